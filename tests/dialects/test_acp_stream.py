"""The updates of a session: from its records, live and in a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from midstream.dialects.acp_stream import AcpFold, AcpUpdates, usage_json
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
    UpstreamCall,
    Usage,
    UserMessage,
)
from midstream.session.calls import CallPlan
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallProgressed,
    CallStarted,
    Delta,
    EpochStarted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    StepCommitted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.session import prune_session, restore_session
from tests.dialects.langgraph_journal import cut, delta, opening, whole

schema = pytest.importorskip("acp.schema")
Json = dict[str, Any]
CALL = ToolCall("c", "look", '{"where": "here"}')


def looked() -> list[Record]:
    """Return a turn that thinks, calls a tool that only reads, and answers."""
    body = Response((Thinking("Where?"), Text("I look."), CALL), Finish.CALLS, usage=Usage(1, 2))
    return [
        *opening(),
        delta("Where?", kind="thinking"),
        delta("I look.", part=1),
        ResponseCompleted(1, 1, 1, body, 3.0, (CallPlan("c", "dig", has_effects=False),)),
        CallStarted(1, 1, "c", 1, 3.0),
        CallProgressed(1, 1, "c", 1, "halfway", 3.0),
        CallEnded(1, 1, ToolResult("c", '{"found": 1}'), 4.0),
        StepCommitted(1, 1),
        AttemptStarted(1, 2, 1, 4.0),
        delta("Done.", response=2),
        *whole("Done.", response=2),
    ]


def updates_of(records: Sequence[Record], live_from: int) -> tuple[list[Json], list[Json], AcpUpdates]:
    """Return the updates of a load of the first records, those of the others, and their writer."""
    updates, epoch, live = AcpUpdates(AcpFold("s")), 0, list[Json]()
    shown: list[Json] = []
    for number, record in enumerate(records):
        if number == live_from:
            shown = updates.replay()
        epoch = record.epoch if isinstance(record, EpochStarted) else epoch
        live += updates.take(record, epoch=epoch)
    if live_from >= len(records):
        shown = updates.replay()
    for each in (*shown, *live):
        schema.SessionNotification.model_validate({"sessionId": "s", "update": each})
    return shown, live, updates


def words_of(updates: Sequence[Json], kind: str = "agent_message_chunk") -> list[str]:
    return [each["content"]["text"] for each in updates if each["sessionUpdate"] == kind]


@pytest.mark.parametrize("live_from", range(len(looked()) + 1))
def test_a_load_and_the_updates_after_it_are_the_same_wherever_it_happens(live_from: int) -> None:
    whole_load, _, updates = updates_of(looked(), 99)
    shown, live, _ = updates_of(looked(), live_from)
    assert shown + live == whole_load
    call = {"toolCallId": "1-c~ai-1", "sessionUpdate": "tool_call_update"}
    assert whole_load[3:7] == [
        {
            **call,
            "sessionUpdate": "tool_call",
            "title": "look",
            "kind": "read",
            "status": "pending",
            "rawInput": {"where": "here"},
        },
        {**call, "status": "in_progress", "rawInput": {"where": "here"}},
        {**call, "content": [{"type": "content", "content": {"type": "text", "text": "halfway"}}]},
        {
            **call,
            "status": "completed",
            "content": [{"type": "content", "content": {"type": "text", "text": '{"found": 1}'}}],
            "rawOutput": {"found": 1},
        },
    ]
    assert words_of(whole_load, "agent_thought_chunk") == ["Where?"]
    assert words_of(whole_load) == ["I look.", "Done."]
    assert updates.usage == {1: Usage(4, 6)}
    assert usage_json(Usage(4, 6))["totalTokens"] == 10
    assert updates.stop_reason(1) == "end_turn"


def interrupted(*attempts: Sequence[str]) -> list[Record]:
    """Return a turn whose attempts but the last were interrupted after these words."""
    records = opening()
    for number, attempt in enumerate(attempts, start=1):
        if number > 1:
            records.append(AttemptStarted(1, 1, number, 3.0))
        records += [delta(each, attempt=number) for each in attempt]
    return [*records, *whole("".join(attempts[-1]), attempt=len(attempts))]


@pytest.mark.parametrize(
    ("attempts", "shown"),
    [
        ([["Hel", "lo"], ["H", "ello ", "you"]], ["Hel", "lo", " ", "you"]),
        ([["Hello ", "you"], ["Hello"], ["Hello you", " all"]], ["Hello ", "you", " all"]),
        ([["Hello"], ["He", "y you"]], ["Hello", "Hey you"]),
        ([["Hello"], ["Hello"]], ["Hello"]),
        ([["Hello ", "you"], ["Hel", "lo"]], ["Hello ", "you", "Hello"]),
        ([["Hello"], []], ["Hello"]),
    ],
)
def test_text_of_an_interrupted_attempt_that_the_client_has_is_not_sent_again(
    attempts: list[list[str]], shown: list[str]
) -> None:
    _, live, _ = updates_of(interrupted(*attempts), 0)
    assert words_of(live) == shown
    names = {each["messageId"] for each in live if each["sessionUpdate"] == "agent_message_chunk"}
    assert len(names) == (2 if shown[-1] in ("Hey you", "Hello") and len(shown) > 1 else 1)


@pytest.mark.parametrize("live_from", range(len(cut()) + 1))
def test_a_load_omits_the_text_of_interrupted_attempts(live_from: int) -> None:
    shown, live, _ = updates_of(cut(), live_from)
    final, _, _ = updates_of(cut(), 99)
    assert "".join(words_of(shown + live)).endswith("".join(words_of(final)))
    if live_from == len(cut()):
        assert words_of(shown) == words_of(final) == ["Hello ", "you"]


def test_an_edited_history_stays_shown_when_the_first_attempt_after_it_is_interrupted() -> None:
    earlier = (UserMessage.of("before"), Step(Response((Text("It was so."),)), ()))
    message = MessageAccepted(1, UserMessage.of("hi"), 2.0, keep=0, before=earlier)
    records: list[Record] = [
        EpochStarted(1, "n", 1.0),
        message,
        AttemptStarted(1, 1, 1, 2.0),
        delta("Hel"),
        AttemptStarted(1, 1, 2, 3.0),
        delta("Hello", attempt=2),
        *whole("Hello", attempt=2),
    ]
    shown, _, _ = updates_of(records, 99)
    assert words_of(shown) == ["It was so.", "Hello"]
    assert words_of(shown, "user_message_chunk") == ["before", "hi"]


def test_the_text_of_a_failed_turn_stays_and_the_same_text_of_the_next_turn_is_shown() -> None:
    records = [
        *opening(),
        delta("Hello"),
        TurnEnded(1, TurnStatus.FAILED, 3.0, "model_failed", "no"),
        MessageAccepted(2, UserMessage.of("again"), 4.0),
        AttemptStarted(2, 1, 1, 4.0),
        Delta(2, 1, 1, 0, "text", "Hello"),
    ]
    shown, _, updates = updates_of(records, 99)
    assert words_of(shown) == ["Hello", "Hello"]
    assert updates.ended[1].message == "no"
    _, live, _ = updates_of(records, 0)
    assert words_of(live) == ["Hello", "Hello"]


def test_a_tool_of_the_upstream_is_shown_with_its_kind_and_its_end() -> None:
    begun = UpstreamCall("u", "edit", '{"path": "a"}')
    ended = UpstreamCall("u", "edit", '{"path": "a"}', "no", Outcome.DENIED)
    records = [
        *opening(),
        Delta(1, 1, 1, 0, "thinking", "", begun),
        Delta(1, 1, 1, 0, "thinking", "", ended),
        delta("No.", part=1),
        ResponseCompleted(1, 1, 1, Response((ended, Text("No."))), 3.0),
        *whole("")[1:],
    ]
    shown, _, _ = updates_of(records, 99)
    calls = [each for each in shown if each["sessionUpdate"].startswith("tool_call")]
    assert [(each.get("kind"), each["status"]) for each in calls] == [
        ("edit", "in_progress"),
        (None, "failed"),
    ]


def test_a_message_of_this_client_is_not_sent_back_and_one_of_another_is() -> None:
    updates = AcpUpdates(AcpFold("s"))
    updates.replay()
    updates.own.add("mine")
    updates.take(EpochStarted(1, "n", 1.0), epoch=1)
    assert updates.take(MessageAccepted(1, UserMessage.of("hi"), 2.0, stream="mine"), epoch=1) == []
    updates.take(TurnEnded(1, TurnStatus.COMPLETED, 3.0), epoch=1)
    (theirs,) = updates.take(MessageAccepted(2, UserMessage.of("ho"), 4.0, stream="theirs"), epoch=1)
    assert (theirs["sessionUpdate"], theirs["content"]["text"]) == ("user_message_chunk", "ho")
    assert updates.turns == {"mine": 1, "theirs": 2}


def test_a_pruned_journal_starts_with_its_history_in_whole_messages() -> None:
    fold, epoch = AcpFold("s"), 1
    for record in looked():
        fold.take(record, epoch=epoch)
    updates = AcpUpdates(AcpFold("s", restore_session(prune_session(fold.session, at=9.0))))
    before, _, _ = updates_of(looked(), 99)
    shown = updates.replay()
    for kind in ("user_message_chunk", "agent_message_chunk", "agent_thought_chunk"):
        assert words_of(shown, kind) == words_of(before, kind)
    ids = [each["toolCallId"] for each in shown if "toolCallId" in each]
    assert ids == [ids[0]] * 2
    assert shown[-2]["status"] == "completed"


def test_a_file_is_shown_as_the_matching_block() -> None:
    parts = (
        File("image/png", data="aGk="),
        File("application/pdf", url="https://example.com/a.pdf", name="a.pdf"),
        File("application/pdf", data="aGk="),
    )
    records: list[Record] = [EpochStarted(1, "n", 1.0), MessageAccepted(1, UserMessage(parts), 2.0)]
    shown, _, _ = updates_of(records, 99)
    assert [each["content"]["type"] for each in shown] == ["image", "resource_link", "resource"]
