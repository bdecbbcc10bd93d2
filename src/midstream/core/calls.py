"""The life of one tool call, and the one judgement about running it.

    planned ──started(run 1)──▶ started ──outcome──▶ ended
                                   │
                     the owner died: in doubt
                                   │
            by the tool's declared policy: started(run n+1), or outcome unknown

Server and client keep this life in their own journals and ask the same `judge`. The intent is journaled
before the start, so "started without outcome under an older epoch" is exactly the doubtful case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from midstream.core.messages import Call, Outcome, Result

RERUNS_MAX = 2
"""Automatic reruns of one call; a tool that kills its process must not do so for ever."""

UNKNOWN_CONTENT = (
    "The process running this tool stopped before its outcome was recorded. It may or may not have taken effect. "
    "Check before repeating it."
)
STOPPED_CONTENT = "This tool was stopped on request while it ran. It may or may not have taken effect."
NOT_STARTED_CONTENT = "This tool was not started, because the turn was stopped first."
NO_ANSWER_CONTENT = "No client answered this call in time. It may or may not have taken effect."


class OnDoubt(StrEnum):
    """What to do with a call that was started and whose outcome nobody knows."""

    UNKNOWN = "unknown"
    """Tell the model that the outcome is unknown and to check. The default for tools with effects."""
    RERUN = "rerun"
    """Run it again: it only reads, or repeating it does no harm."""
    RERUN_WITH_KEY = "rerun_with_key"
    """Run it again with the same effect key, by which the outside world refuses the repetition."""


class Site(StrEnum):
    """Where a tool lives."""

    SERVER = "server"
    CLIENT = "client"


class CallPlan(Struct, frozen=True, omit_defaults=True):
    """What was known of a call when its reply was journaled: enough to go on without the tool's code.

    Args:
        call_id: The call's id within its reply.
        digest: Digest of name and arguments; the same id with another digest is an error.
        site: Where the tool lives.
        has_effects: It changes something: it runs alone, in order, and its start is synced to disk.
        on_doubt: The tool's declared policy.
        timeout_s: Seconds until a running call is given up.
        problem: Why it cannot be started at all (unknown tool, arguments that do not fit); the model reads it.
    """

    call_id: str
    digest: str
    site: Site = Site.SERVER
    has_effects: bool = True
    on_doubt: OnDoubt = OnDoubt.UNKNOWN
    timeout_s: float = 0.0
    problem: str | None = None


class CallState(Struct, frozen=True):
    """One call of the running batch, as folded from the journal."""

    call: Call
    plan: CallPlan
    runs: int = 0
    epoch: int = 0
    """The epoch that started it last; 0 while it was never started."""
    started_at: float = 0.0
    result: Result | None = None

    @property
    def is_open(self) -> bool:
        """Whether it still needs a result."""
        return self.result is None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.result is None and self.runs > 0


class Verdict(StrEnum):
    """What may be done about a call."""

    START = "start"
    """Never started: start it."""
    LEAVE = "leave"
    """Running, or waiting for a client: leave it."""
    RERUN = "rerun"
    """In doubt, and its policy allows another run."""
    GIVE_UP = "give_up"
    """In doubt, and nobody may run it again: its outcome is unknown."""
    DONE = "done"
    """It has its result."""


def judge(call: CallState, *, epoch: int) -> Verdict:
    """Say what the owner `epoch` may do about a call. This is the at-most-once rule, and there is no other.

    A call that waits for a client is never in doubt here: the client keeps its own journal of it.
    """
    if call.result is not None:
        return Verdict.DONE
    if call.runs == 0:
        return Verdict.START
    if call.epoch == epoch or call.plan.site is Site.CLIENT:
        return Verdict.LEAVE
    if call.plan.on_doubt is OnDoubt.UNKNOWN or call.runs > RERUNS_MAX:
        return Verdict.GIVE_UP
    return Verdict.RERUN


def startable(calls: Iterable[CallState]) -> tuple[CallState, ...]:
    """Return the calls that may start now, in order.

    Calls without effects run beside one another; one with effects runs alone, after all before it have ended.
    """
    ready: list[CallState] = []
    is_reading = is_clear = True
    for call in calls:
        if call.runs == 0 and call.is_open and (is_clear or (is_reading and not call.plan.has_effects)):
            ready.append(call)
        if call.is_open:
            is_clear = False
            is_reading = is_reading and not call.plan.has_effects
    return tuple(ready)


def digest_of(name: str, arguments: str) -> str:
    """Return the digest that binds a call to its name and arguments."""
    hasher = hashlib.blake2b(digest_size=16, person=b"midstream-call")
    hasher.update(name.encode("utf-8", "surrogatepass"))
    hasher.update(b"\0")
    hasher.update(arguments.encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()


def closing_result(call: CallState, *, running: str = STOPPED_CONTENT) -> Result:
    """Return the result of a call that ends without an outcome of its own; `running` says why, if it ran."""
    if call.result is not None:
        return call.result
    if call.runs == 0:
        return Result(call.call.id, NOT_STARTED_CONTENT, Outcome.CANCELLED)
    return Result(call.call.id, running, Outcome.UNKNOWN)
