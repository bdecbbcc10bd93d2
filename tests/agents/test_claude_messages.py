"""Single messages of Claude Code, in orders and forms that the scripted CLI does not send."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.agents.upstreams import Marked, MessageTaken, UpstreamEvent
from midstream.errors import ModelError, ModelRateLimitedError, UpstreamFailedError, UpstreamGoneError
from midstream.history.messages import Finish, Outcome, Usage
from midstream.models.responses import (
    Finished,
    KeepAlive,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)

pytest.importorskip("claude_agent_sdk", reason="the Claude Agent SDK is not installed")

from claude_agent_sdk._internal.message_parser import parse_message

from midstream.agents.claude_messages import ClaudeReader, usage_of

COUNTED = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 5,
    "cache_read_input_tokens": 7,
    "output_tokens": 1,
}
RESULT = {
    "type": "result",
    "subtype": "success",
    "duration_ms": 1,
    "duration_api_ms": 1,
    "is_error": False,
    "num_turns": 1,
    "session_id": "s",
}


def events_of(reader: ClaudeReader, *messages: dict[str, Any]) -> list[UpstreamEvent]:
    parsed = [parse_message({"uuid": "u", "session_id": "s", **message}) for message in messages]
    return [event for message in parsed if message is not None for event in reader.read(message, now=100.0)]


def reader_of(source: str = "", *, is_branch: bool = False) -> ClaudeReader:
    return ClaudeReader("claude", source, "mine", is_branch=is_branch)


def assistant_message(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    message = {"id": "m", "model": "opus", "content": [*blocks]}
    return {"type": "assistant", "message": message, **more}


def text_block(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def stream_event(**event: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    return {"type": "stream_event", "event": event}


def failure(reader: ClaudeReader, **result: Any) -> ModelError:  # noqa: ANN401 - any JSON
    assert events_of(reader, {**RESULT, "is_error": True, **result}) == []
    assert reader.failure is not None
    return reader.failure


@pytest.mark.parametrize(
    ("source", "is_branch", "opened"),
    [
        ("", False, MessageTaken("s", "")),
        ("s", False, MessageTaken("s", "s")),
        ("t", False, MessageTaken("s", "s")),
        ("t", True, MessageTaken("s", "t")),
    ],
)
def test_the_init_message_opens_the_answer_with_its_identity(
    source: str, *, is_branch: bool, opened: MessageTaken
) -> None:
    init = {"type": "system", "subtype": "init", "model": "opus"}
    assert events_of(reader_of(source, is_branch=is_branch), init, init) == [opened]


def test_a_failed_result_and_a_hook_do_not_open_the_answer() -> None:
    reader = reader_of("t")
    hook = {"type": "system", "subtype": "hook_started", "hook_event": "SessionStart"}
    assert events_of(reader, hook) == [KeepAlive()]
    error = failure(
        reader, subtype="error_during_execution", errors=["No conversation found with session ID: t"]
    )
    assert isinstance(error, UpstreamGoneError)


def test_streamed_text_is_not_repeated_by_the_whole_message() -> None:
    reader = reader_of()
    events = events_of(
        reader,
        stream_event(type="message_start", message={"id": "m", "usage": COUNTED}),
        stream_event(type="content_block_delta", delta={"type": "text_delta", "text": "one"}),
        assistant_message(text_block("one")),
        {
            **assistant_message(text_block("two")),
            "message": {"id": "n", "model": "opus", "content": [text_block("two")]},
        },
    )
    assert [event for event in events if isinstance(event, TextDelta)] == [TextDelta("one"), TextDelta("two")]


def test_the_result_text_is_sent_if_no_text_was() -> None:
    reader = reader_of()
    events = events_of(reader, {**RESULT, "result": "all of it", "usage": COUNTED})
    assert events == [
        MessageTaken("s", ""),
        TextDelta("all of it"),
        Finished(Finish.STOP, "", Usage(15, 1, 7, 5)),
    ]
    assert reader.is_ended


def test_the_tokens_of_a_turn_are_the_sum_of_its_requests() -> None:
    reader = reader_of()
    step = [
        stream_event(type="message_start", message={"id": "m", "usage": COUNTED}),
        stream_event(type="message_delta", usage={"output_tokens": 9}),
    ]
    events = events_of(reader, *step, *step, {**RESULT, "usage": {"input_tokens": 10**6}})
    assert events[-1] == Finished(Finish.STOP, "", Usage(30, 18, 14, 10))


def test_own_tool_calls_are_reported_in_pairs_and_one_without_an_end_is_unknown() -> None:
    reader = reader_of()
    call = {"type": "tool_use", "id": "1", "name": "Bash", "input": {"command": "ls"}}
    other = {"type": "server_tool_use", "id": "2", "name": "web_search", "input": {"query": "q"}}
    shown = [{"type": "text", "text": "a"}, {"type": "image", "source": {}}]
    answer = {"type": "tool_result", "tool_use_id": "1", "content": shown, "is_error": True}
    stray = {"type": "tool_result", "tool_use_id": "9", "content": "?"}
    events = events_of(
        reader,
        assistant_message(
            {"type": "thinking", "thinking": "hm", "signature": "x"}, call, other, uuid="dangling"
        ),
        {"type": "user", "message": {"content": [answer, stray]}},
        RESULT,
    )
    assert events == [
        MessageTaken("s", ""),
        ThinkingDelta("hm"),
        UpstreamCallStarted("1", "Bash", '{"command":"ls"}'),
        UpstreamCallStarted("2", "web_search", '{"query":"q"}'),
        UpstreamCallEnded("1", "a\n[image]", Outcome.ERROR),
        UpstreamCallEnded("2", "(it did not say how this ended)", Outcome.UNKNOWN),
        Finished(Finish.STOP, "opus"),
    ], "and no mark in the middle of a call"


def test_the_mark_is_the_last_message_of_the_turn() -> None:
    events = events_of(
        reader_of(),
        assistant_message(text_block("a"), uuid="1"),
        assistant_message(text_block("b"), uuid="2"),
        RESULT,
    )
    assert [event for event in events if isinstance(event, Marked)] == [Marked("2")]


def test_a_message_of_a_sub_agent_is_a_keep_alive() -> None:
    below = {"parent_tool_use_id": "1"}
    message = assistant_message(text_block("a"), **below)
    asked = {"type": "user", "message": {"content": "x"}, **below}
    assert (
        events_of(reader_of(), message, asked, {**stream_event(type="ping"), **below})
        == [Working("a sub-agent")] * 3
    )


@pytest.mark.parametrize(
    ("result", "finish"),
    [
        ({"stop_reason": "max_tokens"}, Finish.LENGTH),
        ({"stop_reason": "refusal"}, Finish.FILTER),
        ({"stop_reason": "end_turn"}, Finish.STOP),
        ({"subtype": "error_max_turns", "is_error": True}, Finish.LENGTH),
    ],
)
def test_the_finish_follows_the_stop_reason(result: dict[str, Any], finish: Finish) -> None:
    (last,) = events_of(reader_of(), {**RESULT, **result})[-1:]
    assert isinstance(last, Finished)
    assert last.finish is finish


def test_results_of_other_turns_are_ignored() -> None:
    reader = reader_of()
    by_itself = {**RESULT, "origin": {"kind": "task-notification"}}
    of_another = {**RESULT, "user_message_uuids": ["other"]}
    assert events_of(reader, by_itself, of_another, {**by_itself, "is_error": True}) == []
    assert not reader.is_ended
    events_of(reader, {**by_itself, "user_message_uuids": ["other", "mine"]})
    assert reader.is_ended


def test_a_rate_limit_reports_when_it_ends() -> None:
    reader = reader_of()
    limit = {"status": "rejected", "resetsAt": 160}
    words = "Claude AI usage limit reached"
    message = assistant_message(text_block(words), error="rate_limit")
    assert events_of(reader, {"type": "rate_limit_event", "rate_limit_info": limit}, message) == [KeepAlive()]
    error = failure(reader, result=words, api_error_status=429)
    assert type(error) is ModelRateLimitedError
    assert (error.retry_after_s, str(error).count(words)) == (60.0, 1)


def test_a_conversation_reset_is_an_upstream_gone_error() -> None:
    reader = reader_of("s")
    assert events_of(reader, {"type": "conversation_reset", "new_conversation_id": "n"}) == []
    assert isinstance(reader.failure, UpstreamGoneError)


def test_a_turn_that_another_party_stopped_has_failed() -> None:
    error = failure(reader_of(), terminal_reason="aborted_streaming")
    assert type(error) is UpstreamFailedError


def test_partial_arguments_are_progress() -> None:
    delta = {"type": "input_json_delta", "partial_json": "{"}
    assert events_of(reader_of("s"), stream_event(type="content_block_delta", delta=delta))[1:] == [
        Working("arguments")
    ]


@pytest.mark.parametrize("counted", [None, "many", {}, {"input_tokens": None}])
def test_missing_token_counts_are_none(counted: object) -> None:
    assert usage_of(counted) == Usage()
