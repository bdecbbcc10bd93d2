"""Journals for the tests of LangGraph's dialect: short stories of a session, as records."""

from __future__ import annotations

from midstream.dialects.run_fold import Fact, RunFold, stream_name
from midstream.history.messages import Finish, Response, Text, ToolCall, ToolResult, Usage, UserMessage
from midstream.session.calls import CallPlan, Choice, QuestionKind
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    CommandAccepted,
    Delta,
    EpochStarted,
    MessageAccepted,
    QuestionAnswered,
    QuestionAsked,
    Record,
    ResponseCompleted,
    StepCommitted,
    StreamOpened,
    TurnEnded,
    TurnStatus,
)

RUN = "11111111-1111-4111-8111-111111111111"
STREAM = stream_name(RUN, "m1")


def delta(words: str, *, response: int = 1, attempt: int = 1, part: int = 0, kind: str = "text") -> Delta:
    return Delta(1, response, attempt, part, kind, words)  # type: ignore[arg-type]


def opening(stream: str = STREAM) -> list[Record]:
    """Return the records with which a message of a LangGraph client opens a turn."""
    return [
        EpochStarted(1, "n", 1.0),
        StreamOpened(stream, "digest"),
        CommandAccepted(stream, 0, "d"),
        MessageAccepted(1, UserMessage.of("hi"), 2.0, stream=stream),
        AttemptStarted(1, 1, 1, 2.0),
    ]


def whole(words: str, *, response: int = 1, attempt: int = 1) -> list[Record]:
    """Return the records with which a response without calls ends a turn."""
    body = Response((Text(words),), usage=Usage(3, 4))
    return [
        ResponseCompleted(1, response, attempt, body, 3.0),
        StepCommitted(1, response),
        TurnEnded(1, TurnStatus.COMPLETED, 4.0),
    ]


def approved() -> list[Record]:
    """Return a turn with a call that a person allows."""
    call = ToolCall("c", "burn", '{"what": "paper"}')
    plan = CallPlan("c", "dig", needs_approval=True)
    body = Response((Text("I burn."), call), Finish.CALLS)
    asked = QuestionAsked(1, 1, "c", QuestionKind.APPROVAL, "dig", 3.0)
    answered = QuestionAnswered(1, 1, "c", QuestionKind.APPROVAL, "dig", Choice.ALLOW, 5.0, by="ada")
    return [
        *opening(),
        delta("I burn."),
        ResponseCompleted(1, 1, 1, body, 3.0, (plan,)),
        asked,
        answered,
        CallStarted(1, 1, "c", 1, 5.0),
        CallEnded(1, 1, ToolResult("c", "ash"), 6.0),
        StepCommitted(1, 1),
        AttemptStarted(1, 2, 1, 6.0),
        delta("Done.", response=2),
        *whole("Done.", response=2),
    ]


def cut() -> list[Record]:
    """Return a turn whose first attempt was interrupted in its text."""
    return [
        *opening(),
        delta("Hello "),
        EpochStarted(2, "n2", 3.0),
        AttemptStarted(1, 1, 2, 3.0),
        delta("Hello ", attempt=2),
        delta("you", attempt=2),
        *whole("Hello you", attempt=2),
    ]


def facts_of(records: list[Record], fold: RunFold | None = None) -> list[Fact]:
    """Return the facts that a journal contains."""
    fold = fold or RunFold("t")
    epoch, facts = 0, list[Fact]()
    for record in records:
        epoch = record.epoch if isinstance(record, EpochStarted) else epoch
        facts += fold.take(record, epoch=epoch)
    return facts
