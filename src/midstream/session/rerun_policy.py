"""The at-most-once rule: whether a tool call may start, or run again after its process died.

The intent is journaled before the start. So exactly the calls that were started under an older epoch and have no
outcome are in doubt.
"""

from __future__ import annotations

from enum import StrEnum

from midstream.session.calls import CallState, OnDoubt, Site

RERUNS_MAX = 2
"""Automatic reruns of one call: a tool that kills its process must not do this for ever."""


class CallVerdict(StrEnum):
    """Permission to start a call, or the reason against it."""

    START = "start"
    """It was never started: start it."""
    LEAVE = "leave"
    """It is running, or waits for a client, a person or a probe: do nothing."""
    RERUN = "rerun"
    """In doubt, and its policy permits another run."""
    PROBE = "probe"
    """In doubt, and its tool has a probe."""
    ASK = "ask"
    """In doubt, and a person must decide."""
    GIVE_UP = "give_up"
    """In doubt, and it may not run again: its outcome is unknown."""
    DONE = "done"
    """It has its result."""


def judge(call: CallState, *, epoch: int) -> CallVerdict:
    """Return what the node of `epoch` may do about a call: the at-most-once rule.

    A call at a client or a sub-agent is never in doubt here, because both have journals of their own. Each start uses
    up its approval, so a rerun of a call that needs approval needs a new one.
    """
    if call.result is not None:
        return CallVerdict.DONE
    if call.asked is not None or call.is_in_doubt:
        return CallVerdict.LEAVE
    if call.runs == 0:
        return CallVerdict.START
    if call.is_outcome_lost and call.plan.site is Site.CLIENT:
        return CallVerdict.GIVE_UP  # its client has sent everything that it had
    if call.epoch == epoch or call.plan.site in (Site.CLIENT, Site.CHILD):
        return CallVerdict.LEAVE
    if call.is_outcome_lost and call.plan.on_doubt is OnDoubt.IN_TRANSACTION:
        return CallVerdict.GIVE_UP  # it took effect: the effect is in the database
    match call.plan.on_doubt:
        case OnDoubt.UNKNOWN:
            return CallVerdict.GIVE_UP
        case OnDoubt.HOLD:
            return CallVerdict.ASK
        case OnDoubt.PROBE:
            return CallVerdict.PROBE
        case OnDoubt.RERUN | OnDoubt.RERUN_WITH_KEY | OnDoubt.IN_TRANSACTION:
            if call.plan.needs_approval:
                return CallVerdict.ASK
            return CallVerdict.GIVE_UP if call.runs > RERUNS_MAX else CallVerdict.RERUN
