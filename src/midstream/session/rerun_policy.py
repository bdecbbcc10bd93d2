"""Whether a tool call may start, or run again after its process died: the at-most-once rule.

The intent is journaled before the start. A call that was started under an older epoch and has no outcome is therefore
in doubt, and no other call is.
"""

from __future__ import annotations

from enum import StrEnum

from midstream.session.calls import CallState, OnDoubt, Site

RERUNS_MAX = 2
"""Automatic reruns of one call; a tool that kills its process must not do so for ever."""


class CallVerdict(StrEnum):
    """Permission to start a call, or the reason against it."""

    START = "start"
    """Never started: start it."""
    LEAVE = "leave"
    """Running, or waiting for a client, a person or a probe: leave it."""
    RERUN = "rerun"
    """In doubt, and its policy allows another run."""
    PROBE = "probe"
    """In doubt, and the outside world can be asked."""
    ASK = "ask"
    """In doubt, and a person must decide."""
    GIVE_UP = "give_up"
    """In doubt, and it may not run again: its outcome is unknown."""
    DONE = "done"
    """It has its result."""


def judge(call: CallState, *, epoch: int) -> CallVerdict:
    """Return what the node of `epoch` may do about a call. This is the at-most-once rule, and there is no other.

    A call that waits for a client is never in doubt here: the client keeps its own journal of it, and so does the
    session that does the work of a sub-agent. A permission was
    used up by the start, so that a call which needed one goes back to the person.
    """
    if call.result is not None:
        return CallVerdict.DONE
    if call.asked is not None or call.is_in_doubt:
        return CallVerdict.LEAVE
    if call.runs == 0:
        return CallVerdict.START
    if call.is_outcome_lost and call.plan.site is Site.CLIENT:
        return CallVerdict.GIVE_UP  # its client has sent all that it had to send
    if call.epoch == epoch or call.plan.site in (Site.CLIENT, Site.CHILD):
        return CallVerdict.LEAVE
    if call.is_outcome_lost and call.plan.on_doubt is OnDoubt.IN_TRANSACTION:
        return CallVerdict.GIVE_UP  # it did happen: its effect is in the database
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
