"""Too deeply nested arguments and results of an agent's own tools: replaced by a text, not journaled, not walked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from midstream.agents.permission_rules import EVERYTHING, Verdict, decide_permission
from midstream.agents.tool_value_json import DEEP_VALUE, json_text
from midstream.json_depth import DEPTH_MAX
from midstream.models.responses import UpstreamCallEnded, UpstreamCallStarted
from midstream.session.permissions import Permission
from tests.spec import spec


def nested(levels: int) -> object:
    """Return a value with this many levels, the outermost of which is an object."""
    value: object = "at the bottom"
    for _ in range(levels - 1):
        value = [value]
    return {"a": value}


def _of_acp(value: object) -> list[object]:
    pytest.importorskip("acp")
    from acp import helpers

    from midstream.agents.acp_updates import AcpReader

    reader = AcpReader()
    begun = helpers.start_tool_call("1", "do", kind="other", status="in_progress", raw_input=value)
    ended = helpers.update_tool_call("1", status="completed", raw_output=value)
    return [*reader.update(begun), *reader.update(ended)]


def _of_claude(value: object) -> list[object]:
    pytest.importorskip("claude_agent_sdk")
    from claude_agent_sdk import AssistantMessage, ToolResultBlock, ToolUseBlock

    from midstream.agents.claude_messages import ClaudeReader

    called = ToolUseBlock(id="1", name="do", input=value)  # type: ignore[arg-type]
    result = ToolResultBlock(tool_use_id="1", content=value)  # type: ignore[arg-type]
    message = AssistantMessage(content=[called, result], model="m")
    return list(ClaudeReader("claude", "s", "mine").read(message, now=0.0))


def _of_codex(value: object) -> list[object]:
    pytest.importorskip("openai_codex")
    from openai_codex.generated import v2_all as wire

    from midstream.agents.codex import CodexTurn

    item = {"type": "mcpToolCall", "id": "1", "server": "s", "tool": "do", "arguments": value}
    place = {"threadId": "t", "turnId": "u"}
    begun = {**place, "startedAtMs": 1, "item": {**item, "status": "inProgress"}}
    content = {"content": [value]}
    ended = {**place, "completedAtMs": 2, "item": {**item, "status": "completed", "result": content}}
    turn = CodexTurn()
    return [
        *turn.read(wire.ItemStartedNotification.model_validate(begun), "item/started"),
        *turn.read(wire.ItemCompletedNotification.model_validate(ended), "item/completed"),
    ]


def _of_cursor(value: object) -> list[object]:
    sdk = pytest.importorskip("cursor_sdk")
    from midstream.agents.cursor import _Reading

    ended = sdk.SDKToolUseMessage("tool_call", "a", "r", "1", "do", "completed", value, value)
    return list(_Reading().read(sdk.RunStreamEvent("sdk_message", sdk_message=ended)))


UPSTREAMS = [_of_acp, _of_claude, _of_codex, _of_cursor]


@spec("SEC-76")
@pytest.mark.parametrize("levels", [DEPTH_MAX + 1, 900, 3000])
@pytest.mark.parametrize("read", UPSTREAMS)
def test_a_too_deeply_nested_value_is_replaced_by_a_text(
    read: Callable[[object], list[object]], levels: int
) -> None:
    events = [
        each for each in read(nested(levels)) if isinstance(each, UpstreamCallStarted | UpstreamCallEnded)
    ]
    assert events == [UpstreamCallStarted("1", "do", DEEP_VALUE), UpstreamCallEnded("1", DEEP_VALUE)]


@spec("SEC-76")
@pytest.mark.parametrize("read", UPSTREAMS)
def test_a_value_within_the_depth_limit_is_unchanged(read: Callable[[object], list[object]]) -> None:
    value = nested(DEPTH_MAX)
    events = [each for each in read(value) if isinstance(each, UpstreamCallStarted | UpstreamCallEnded)]
    assert events == [
        UpstreamCallStarted("1", "do", json_text(value)),
        UpstreamCallEnded("1", json_text(value)),
    ]
    assert "at the bottom" in json_text(value)


@spec("SEC-76")
async def test_no_rule_allows_arguments_that_cannot_be_shown() -> None:
    async def anything(_: Permission) -> Verdict:
        return True

    wanted = Permission("a", "run", "execute", json_text(nested(900)))
    for rules in (EVERYTHING, anything):
        refused = await decide_permission(rules, wanted)
        assert refused == "'run' is not allowed: its arguments are nested more than 64 levels deep."


@spec("SEC-76")
def test_a_too_deep_line_of_a_transcript_costs_only_itself(tmp_path: Path) -> None:
    pytest.importorskip("claude_agent_sdk")
    from midstream.agents.claude_transcripts import is_whole

    folder = tmp_path / "projects" / "p"
    folder.mkdir(parents=True)
    lines = ['{"type":"user","uuid":"1"}', '{"x":' + "[" * 3000 + "]" * 3000 + "}"]
    (folder / "s.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert is_whole(tmp_path, "s", "1")


def test_half_a_character_in_a_value_is_replaced() -> None:
    assert json_text({"b": "\ud83d", "a": ["\ud83d\ude00"]}) == '{"b":"\ufffd","a":["\U0001f600"]}'
