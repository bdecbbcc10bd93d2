"""Records of a journal: their stored form, and the sync of each."""

from __future__ import annotations

import msgspec
import pytest

from midstream.errors import RecordUndecodableError
from midstream.history.messages import (
    File,
    Finish,
    Outcome,
    Response,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
    UpstreamCall,
    Usage,
    UserMessage,
)
from midstream.session.application_request import ApplicationRequest
from midstream.session.calls import CallPlan, Choice, OnDoubt, QuestionKind, Site
from midstream.session.model_settings import ModelSettings
from midstream.session.records import (
    AnswerUsed,
    AttemptContinued,
    AttemptFailed,
    AttemptResumable,
    AttemptStarted,
    CallEnded,
    CallInDoubt,
    CallProgressed,
    CallStarted,
    CancelRequested,
    ChildDelta,
    ClientTool,
    CloseReason,
    CommandAccepted,
    Delta,
    EpochStarted,
    HistoryCompacted,
    JournalPruned,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    OutcomeDamaged,
    QuestionAnswered,
    QuestionAsked,
    QuestionClosed,
    Record,
    ResponseCompleted,
    ResultArrivedLate,
    ReuseDecided,
    ReuseDecision,
    StallEnded,
    StallNoticed,
    StepCommitted,
    StreamOpened,
    StreamTaken,
    Sync,
    ToolsChanged,
    TranscriptAccepted,
    TurnEnded,
    TurnResumed,
    TurnStatus,
    decode,
    encode,
    sync_of,
)
from midstream.timing import StalledOn

EVERY_RECORD: tuple[Record, ...] = (
    JournalPruned(msgspec.Raw(b'{"position":7}'), 1000.5),
    EpochStarted(3, "node-1", 1000.5),
    StreamOpened("stream-1", "d1"),
    AttemptResumable(1, 1, 1, "resp_1"),
    AttemptContinued(1, 1, 1, 1, 1000.5, not_before=1001.5),
    StallNoticed(1, 1, StalledOn.FIRST_TOKEN, 30.0, 1000.5),
    StallEnded(1, 2, StalledOn.TOOL, 61.5, 1000.5, "c1"),
    CommandAccepted("stream-1", 0, "d2"),
    StreamTaken("stream-1", 2),
    MessageAccepted(
        1,
        UserMessage((Text("look at this"), File("image/png", data="AAAA"))),
        1000.5,
        (ClientTool(ToolSpec("ask", "Ask.", {"type": "object"}), has_effects=False, timeout_s=9.0),),
        "stream-1",
    ),
    MessageQueued(1, UserMessage.of("and then"), 1000.5, stream="stream-2", timeout_s=9.0),
    MessageWithdrawn(1, 1000.5, "stream-2"),
    TurnResumed(1, 4, 1000.5),
    TranscriptAccepted(
        1,
        1,
        1000.5,
        ApplicationRequest(
            "resp_1", "d4", "key", "h:app", ModelSettings(temperature=0.5), form={"dialect": "chat"}
        ),
        2,
        (UserMessage.of("hi"), Step(Response((Text("so"),)))),
        "Be brief.",
        (ToolSpec("look"),),
    ),
    Delta(1, 1, 2, 1, "thinking", "", requested=ToolCall("a", "look"), signature="sig=="),
    AttemptStarted(1, 1, 2, 1000.5, 1001.5),
    Delta(1, 1, 2, 0, "thinking", "hm \u2603 \U0001f600 \u0000"),
    Delta(1, 1, 2, 1, "thinking", "", UpstreamCall("u", "grep", '{"for": "x"}')),
    AttemptFailed(1, 1, 1, "model_stalled", "silence", 1000.5),
    HistoryCompacted(1, 1, 4, 1000.5),
    ReuseDecided(1, 1, 1, ReuseDecision("continuation", "one is new", "resumed", "users", 1, 1, 1), 1000.5),
    ToolsChanged(1, 1000.5, ("files__read",), ("files__write",), ("mail",)),
    ResponseCompleted(
        1,
        1,
        2,
        Response(
            (
                Thinking("hm", "sig=="),
                UpstreamCall("u", "grep", '{"for": "x"}', "none", Outcome.OK),
                Text("so"),
                ToolCall("a", "read", '{"path": "x"}', provider_id=""),
            ),
            Finish.CALLS,
            "scripted",
            Usage(10, 5, 3),
        ),
        1000.5,
        (CallPlan("a", "d3", Site.CLIENT, has_effects=False, on_doubt=OnDoubt.RERUN, problem="no"),),
    ),
    CallStarted(1, 1, "a", 2, 1000.5, has_effects=False, arguments='{"path": "y"}'),
    CallProgressed(1, 1, "a", 2, "half way", 1000.5),
    ChildDelta(1, 1, "a", "s::1.1.0", 7, msgspec.Raw(b'{"type":"step_committed","turn":1,"response":1}')),
    CallInDoubt(1, 1, "a", 1000.5),
    QuestionAsked(1, 1, "a", QuestionKind.APPROVAL, "d3", 1000.5, "Sure?", 2000.5),
    QuestionAnswered(
        1, 1, "a", QuestionKind.APPROVAL, "d3", Choice.ALLOW, 1000.5, "yes", '{"path": "y"}', "ann"
    ),
    QuestionClosed(1, 1, "leave-1", CloseReason.WITHDRAWN, 1000.5),
    AnswerUsed(1, 1, 2, "leave-1", 1000.5),
    CallEnded(1, 1, ToolResult("a", "it says", Outcome.ERROR), 1000.5),
    ResultArrivedLate(1, 1, ToolResult("a", "it said"), 1000.5),
    OutcomeDamaged(1, 1, "a"),
    StepCommitted(1, 1),
    CancelRequested(1, 1000.5, 1005.5),
    TurnEnded(1, TurnStatus.FAILED, 1000.5, "model_rejected", "wrong key"),
)


def test_the_list_above_holds_every_kind_of_record() -> None:
    assert {type(record) for record in EVERY_RECORD} == set(Record.__args__)


@pytest.mark.parametrize("record", EVERY_RECORD, ids=lambda record: type(record).__name__)
def test_a_record_is_decoded_as_it_was_encoded(record: Record) -> None:
    assert decode(encode(record)) == record
    assert encode(decode(encode(record))) == encode(record)


def test_several_records_are_decoded_in_order() -> None:
    assert tuple(decode(encode(record)) for record in EVERY_RECORD) == EVERY_RECORD


@pytest.mark.parametrize("record", EVERY_RECORD, ids=lambda record: type(record).__name__)
def test_a_member_of_a_later_version_is_ignored(record: Record) -> None:
    assert decode(encode(record)[:-1] + b',"later":{"x":[1]}}') == record


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b"[]", b"\xff", b'{"type":"dance"}', b'{"type":"step_committed"}'),
        pytest.param(b'{"type":' * 50_000, id="deeper than anything"),
    ],
)
def test_bytes_that_are_no_record_are_refused(body: bytes) -> None:
    with pytest.raises(RecordUndecodableError):
        decode(body)


FULL = (
    EpochStarted,
    StreamOpened,
    CommandAccepted,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    TranscriptAccepted,
    TurnResumed,
    QuestionAnswered,
    AnswerUsed,
    CancelRequested,
    TurnEnded,
)


@pytest.mark.parametrize("record", EVERY_RECORD, ids=lambda record: type(record).__name__)
def test_each_append_has_the_durability_of_its_records(record: Record) -> None:
    assert sync_of([record]) is (Sync.FULL if isinstance(record, FULL) else Sync.NORMAL)


def test_the_start_of_an_effect_is_synced_before_the_tool_runs() -> None:
    assert sync_of([StepCommitted(1, 1), CallStarted(1, 1, "a", 1, 0.0)]) is Sync.FULL
    assert sync_of([CallStarted(1, 1, "a", 1, 0.0, has_effects=False)]) is Sync.NORMAL
    assert sync_of([]) is Sync.NORMAL
