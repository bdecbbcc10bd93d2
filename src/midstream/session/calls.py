"""The life of one tool call, as values.

    planned ──[asked ──allowed]──▶ started(run 1) ──outcome──▶ ended
                 │                    │
              denied,        the node died: in doubt
              expired                 │
                       by the tool's declared policy: started(run n+1), probed,
                       asked (a person decides), or outcome unknown

Server and client keep this life in their own journals. `rerun_policy.judge` decides for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

from msgspec import Struct

from midstream.history.messages import Outcome, ToolCall, ToolResult

SUSPENDED = '{"kind":"suspended"}'
"""Native outcome of a run in a driven turn that suspended itself to wait for a person: the call may start again."""
UNKNOWN_CONTENT = (
    "The process running this tool stopped before its outcome was recorded. It may or may not have taken effect. "
    "Check before repeating it."
)
STOPPED_CONTENT = "This tool was stopped on request while it ran. It may or may not have taken effect."
NOT_STARTED_CONTENT = "This tool was not started, because the turn was stopped first."
NO_ANSWER_CONTENT = "No client answered this call in time. It may or may not have taken effect."
DAMAGED_CONTENT = (
    "This call ended, but the record of its outcome cannot be read any more. It may or may not have taken effect. "
    "Check before repeating it."
)
DENIED_CONTENT = "A person declined this call. It was not started."
NO_DECISION_CONTENT = "Nobody approved this call in time. It was not started."
NO_RESPONSE_CONTENT = "Nobody answered this question in time."
SKIPPED_CONTENT = "A person decided not to run this call again. It may or may not have taken effect."
HAPPENED_CONTENT = "A person confirmed that this call took effect. What it returned is not known."
EDITED_CONTENT = "[a person changed the arguments before this ran, to: {arguments}]"


class OnDoubt(StrEnum):
    """Policy for a call that was started and has an unknown outcome."""

    UNKNOWN = "unknown"
    """Report to the model that the outcome is unknown, and that it must check. The default for tools with effects."""
    RERUN = "rerun"
    """Run the call again: it only reads, or a repetition is harmless."""
    RERUN_WITH_KEY = "rerun_with_key"
    """Run the call again with the same effect key, by which the external system refuses a repetition."""
    PROBE = "probe"
    """Call the tool's own `probe` function to find out whether the call took effect."""
    HOLD = "hold"
    """Ask a person: it took effect, run it again, or skip it."""
    IN_TRANSACTION = "in_transaction"
    """Effect and outcome are one transaction of the session's database. Without an outcome, the call runs again."""


OnDoubtName = Literal["unknown", "rerun", "rerun_with_key", "probe", "hold", "in_transaction"]
"""The values of `OnDoubt` as literals."""


class Site(StrEnum):
    """Place where a call is answered."""

    SERVER = "server"
    CLIENT = "client"
    PERSON = "person"
    """A person answers, through any client; nothing runs."""
    CHILD = "child"
    """A child session does the work; its id follows from the place of the call."""


class QuestionKind(StrEnum):
    """Kinds of questions to a person about a call."""

    APPROVAL = "approval"
    """May it run?"""
    QUESTION = "question"
    """The call is itself a question."""
    DOUBT = "doubt"
    """Did it take effect? It was started, and its outcome is unknown."""


class Choice(StrEnum):
    """The decisions of a person."""

    ALLOW = "allow"
    DENY = "deny"
    RESPOND = "respond"
    """Answer a question with text."""
    HAPPENED = "happened"
    """The call took effect; the text is its result."""
    RERUN = "rerun"
    """Run it again."""
    SKIP = "skip"
    """Do not run it again; the outcome stays unknown."""


CHOICES = {
    QuestionKind.APPROVAL: (Choice.ALLOW, Choice.DENY),
    QuestionKind.QUESTION: (Choice.RESPOND,),
    QuestionKind.DOUBT: (Choice.HAPPENED, Choice.RERUN, Choice.SKIP),
}
"""The answers to each kind of question."""


APPROVERS_MAX = 10
"""Greatest number of people whose approval a call can need."""


class CallPlan(Struct, frozen=True, gc=False, omit_defaults=True):
    """The journaled facts of a call, sufficient to continue without the tool's code.

    Args:
        call_id: The call's id within its response.
        digest: Digest of name and arguments; the same id with another digest is an error.
        site: The place where the tool runs.
        has_effects: Whether it has effects: then it runs alone, in order, and its start is synced to disk.
        on_doubt: The tool's declared policy.
        timeout_s: Seconds until a running call is given up.
        problem: The reason why it cannot be started (unknown tool, invalid arguments), for the model.
        needs_approval: Whether a person must allow it before each start.
        question: The text for the person; for a call that is itself a question, that question.
        answer_s: Seconds a person has to answer; 0 for no limit.
        approvers: Number of different people who must allow it before each start.
    """

    call_id: str
    digest: str
    site: Site = Site.SERVER
    has_effects: bool = True
    on_doubt: OnDoubt = OnDoubt.UNKNOWN
    timeout_s: float = 0.0
    problem: str | None = None
    needs_approval: bool = False
    question: str = ""
    answer_s: float = 0.0
    approvers: int = 1


class CallState(Struct, frozen=True, gc=False):
    """One call of the running batch, folded from the journal."""

    call: ToolCall
    plan: CallPlan
    runs: int = 0
    epoch: int = 0
    """The epoch that started it last; 0 if it was never started."""
    started_at: float = 0.0
    is_in_doubt: bool = False
    """Whether its node died, and by its policy a person is asked whether it took effect."""
    asked: QuestionKind | None = None
    """The kind of the open question to a person."""
    asked_at: float = 0.0
    expires_at: float = 0.0
    """When the open question expires (seconds since 1970); 0 for never."""
    is_allowed: bool = False
    """Whether a person allowed it and it has not started since: a start uses the permission up."""
    approved_by: tuple[str, ...] = ()
    """The principals that have allowed it, if several must."""
    child_position: int = 0
    """Position of the child session up to which its records were copied here."""
    is_edited: bool = False
    """Whether a person changed the arguments; `call` and `plan` have the new ones, the response the model's."""
    is_outcome_lost: bool = False
    """Whether it ended, and the record of its outcome cannot be read."""
    result: ToolResult | None = None

    @property
    def is_open(self) -> bool:
        """Whether it still needs a result."""
        return self.result is None

    @property
    def is_running(self) -> bool:
        """Whether it was started, is not in doubt, and has not ended."""
        return self.result is None and self.runs > 0 and not self.is_in_doubt

    @property
    def is_asking(self) -> bool:
        """Whether it waits for a person."""
        return self.result is None and self.asked is not None

    @property
    def needs_person(self) -> bool:
        """Whether a person must be asked next, and was not asked yet."""
        if self.result is not None or self.runs or self.asked is not None or self.plan.problem is not None:
            return False
        return self.plan.site is Site.PERSON or (self.plan.needs_approval and not self.is_allowed)


def question_text(call: CallState, kind: QuestionKind) -> str:
    """Return the text of a question about a call, with the people who have allowed it if several must."""
    if kind is not QuestionKind.APPROVAL:
        return call.plan.question
    return text_for_several(call.plan.question, call.plan.approvers, call.approved_by)


def text_for_several(text: str, approvers: int, approved_by: tuple[str, ...] = ()) -> str:
    """Return the text of a question, with the number of people who must allow the act, and those who have."""
    if approvers == 1:
        return text
    so_far = f"; so far {', '.join(approved_by)} did" if approved_by else ""
    return f"{text}\n{approvers} people must allow this{so_far}.".lstrip()


def approvals_after(
    approved_by: tuple[str, ...], approvers: int, by: str, *, is_edited: bool
) -> tuple[str, ...]:
    """Return the people who have allowed an act after one more approval; () if one person is sufficient.

    An approval is valid only for its arguments, so after a change all must approve again.
    """
    if approvers == 1:
        return ()
    before = () if is_edited else approved_by
    return before if by in before else (*before, by)


def startable(calls: Iterable[CallState]) -> tuple[CallState, ...]:
    """Return the calls that may start now, in order.

    Calls without effects run concurrently. A call with effects runs alone, after all earlier ones have ended. A call
    that waits for a person does not start, and keeps its place.
    """
    ready: list[CallState] = []
    is_reading = is_clear = True
    for call in calls:
        is_due = is_clear or (is_reading and not call.plan.has_effects)
        if is_due and call.runs == 0 and call.is_open and not (call.is_asking or call.needs_person):
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


def closing_result(call: CallState, *, running: str = STOPPED_CONTENT) -> ToolResult:
    """Return the result of a call that ends without its own outcome; `running` is the reason if it ran."""
    if call.result is not None:
        return call.result
    if call.is_outcome_lost:
        return lost_result(call)
    if call.runs == 0:
        return ToolResult(call.call.id, NOT_STARTED_CONTENT, Outcome.CANCELLED)
    return ToolResult(call.call.id, UNKNOWN_CONTENT if call.is_in_doubt else running, Outcome.UNKNOWN)


def lost_result(call: CallState) -> ToolResult:
    """Return the result of a call in doubt that must not run again, with the reason."""
    content = DAMAGED_CONTENT if call.is_outcome_lost else UNKNOWN_CONTENT
    return ToolResult(call.call.id, content, Outcome.UNKNOWN)
