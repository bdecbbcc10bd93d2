"""Single updates of agents with the Agent Client Protocol."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.history.messages import Finish, Outcome, Usage
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)

pytest.importorskip("acp", reason="the Agent Client Protocol's package is not installed")

from acp import helpers
from acp.schema import PromptResponse, ToolCallUpdate
from acp.schema import Usage as CountedTokens

from midstream.agents.acp_updates import CHANGES_SHOWN_MAX, AcpReader, usage_of

ENDED = PromptResponse(stop_reason="end_turn")


def events_of(reader: AcpReader, *updates: object) -> list[ModelEvent]:
    return [event for update in updates for event in reader.update(update)]


def test_message_and_thought_chunks_become_deltas() -> None:
    reader = AcpReader()
    assert not reader.has_words
    picture = helpers.update_agent_message(helpers.image_block("aGk=", "image/png"))
    assert events_of(
        reader,
        helpers.update_agent_thought_text("hm"),
        helpers.update_agent_message_text("one"),
        picture,
        helpers.update_user_message_text("an echo"),
        helpers.update_current_mode("plan"),
    ) == [
        ThinkingDelta("hm"),
        TextDelta("one"),
        Working("content of kind image"),
        KeepAlive(),
        KeepAlive(),
    ]
    assert reader.has_words


def test_a_plan_is_reported_when_it_changes() -> None:
    reader = AcpReader()
    plan = helpers.update_plan([helpers.plan_entry("look", status="in_progress")])
    assert events_of(reader, plan, plan) == [ThinkingDelta("\nPlan:\n- [>] look\n")]


def test_a_tool_call_is_reported_when_its_arguments_are_known() -> None:
    reader = AcpReader()
    assert events_of(
        reader,
        helpers.start_tool_call("1", "Reading a.txt", kind="read", status="pending"),
        helpers.update_tool_call("1", raw_input={"path": "a.txt"}),
        helpers.update_tool_call("1", status="in_progress"),
        helpers.update_tool_call("1", status="completed", raw_output={"lines": 3}),
        helpers.update_tool_call("1", status="completed"),
    ) == [
        Working("read"),
        UpstreamCallStarted("1", "read", '{"path":"a.txt"}'),
        Working("read"),
        Working("read"),
        UpstreamCallEnded("1", '{"lines":3}'),
        KeepAlive(),
    ]


def test_a_tool_call_without_arguments_is_described_by_its_title_and_locations() -> None:
    from acp.schema import ToolCallLocation

    reader = AcpReader()
    places = [ToolCallLocation(path="/a.txt")]
    assert events_of(
        reader, helpers.start_tool_call("1", "Ask the oracle", status="failed", locations=places)
    ) == [
        UpstreamCallStarted("1", "Ask the oracle", '{"locations":["/a.txt"],"title":"Ask the oracle"}'),
        UpstreamCallEnded("1", "", Outcome.ERROR),
    ]


def test_changing_arguments_are_reported_a_few_times_and_at_the_end() -> None:
    reader = AcpReader()
    begun = helpers.start_tool_call("1", "t", kind="execute", status="in_progress", raw_input={"n": 0})
    changes = [helpers.update_tool_call("1", raw_input={"n": n}) for n in range(1, 20)]
    done = helpers.update_tool_call("1", status="completed")
    events = events_of(reader, begun, *changes, done)
    shown = [event.arguments for event in events if isinstance(event, UpstreamCallStarted)]
    numbers = [*range(CHANGES_SHOWN_MAX + 1), 19]
    assert shown == [f'{{"n":{n}}}' for n in numbers]
    assert events[-1] == UpstreamCallEnded("1", "")


def test_a_permission_request_with_only_a_folder_is_vague() -> None:
    given: dict[str, Any] = {"tool_call_id": "1", "title": "bash", "kind": "execute"}
    asked = AcpReader().describe_request(ToolCallUpdate(**given, raw_input={"cwd": "/work"}))
    assert asked == ("bash", "execute", '{"locations":[],"title":"bash"}', True)


def test_the_result_of_a_tool_is_reported_as_text() -> None:
    made: list[Any] = [
        helpers.tool_content(helpers.text_block("words")),
        helpers.tool_content(helpers.image_block("aGk=", "image/png")),
        helpers.tool_diff_content("/a.txt", "new", "old"),
        helpers.tool_diff_content("/b.txt", "new"),
        helpers.tool_terminal_ref("t1"),
    ]
    events = events_of(
        AcpReader(), helpers.start_tool_call("1", "t", kind="edit", status="completed", content=made)
    )
    assert events[-1] == UpstreamCallEnded(
        "1", "words\n[image]\n[an edit of /a.txt]\n[a new file, /b.txt]\n[terminal]"
    )


def test_a_tool_call_without_an_end_is_unknown() -> None:
    reader = AcpReader()
    events_of(reader, helpers.start_tool_call("1", "t", kind="edit", status="in_progress"))
    assert [*reader.end(ENDED)] == [
        UpstreamCallEnded("1", "(the agent did not say how this ended)", Outcome.UNKNOWN),
        Finished(),
    ]


def test_a_refused_tool_call_is_denied_unless_it_ran_nevertheless() -> None:
    for status, outcome in (("failed", Outcome.DENIED), ("completed", Outcome.OK)):
        reader = AcpReader()
        given: dict[str, Any] = {"tool_call_id": "1", "title": "Edit a.txt", "kind": "edit"}
        asked = reader.describe_request(ToolCallUpdate(**given, raw_input={"a": 1}))
        assert asked == ("Edit a.txt", "edit", '{"a":1}', False)
        reader.note_refusal("1", "no")
        reported: Any = status
        assert events_of(reader, helpers.update_tool_call("1", status=reported)) == [
            UpstreamCallStarted("1", "edit", '{"a":1}'),
            UpstreamCallEnded("1", "no" if outcome is Outcome.DENIED else "", outcome),
        ]


def test_an_update_of_an_earlier_tool_call_is_a_keep_alive() -> None:
    assert events_of(AcpReader(), helpers.update_tool_call("old", status="completed")) == [KeepAlive()]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", Finish.STOP),
        ("max_tokens", Finish.LENGTH),
        ("max_turn_requests", Finish.LENGTH),
        ("refusal", Finish.FILTER),
    ],
)
def test_the_finish_follows_the_stop_reason(reason: Any, finish: Finish) -> None:  # noqa: ANN401 - a literal of the protocol
    assert [*AcpReader().end(PromptResponse(stop_reason=reason))] == [Finished(finish)]


@pytest.mark.parametrize(
    ("total", "usage"),
    [
        (117, Usage(100, 17, 60, 10)),  # all numbers are separate
        (107, Usage(100, 7, 60, 10)),  # thoughts are part of the output
        (37, Usage(30, 7, 60, 10)),  # cached tokens are part of the input
    ],
)
def test_the_total_shows_which_token_counts_include_others(total: int, usage: Usage) -> None:
    counted = CountedTokens(
        total_tokens=total,
        input_tokens=30,
        output_tokens=7,
        thought_tokens=10,
        cached_read_tokens=60,
        cached_write_tokens=10,
    )
    assert usage_of(counted) == usage
