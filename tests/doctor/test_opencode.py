"""The messages that opencode would send, and a call that never ended."""

from __future__ import annotations

from midstream.doctor.opencode import StoredMessage, end_call, is_open, messages_of
from midstream.doctor.shapes import Json
from midstream.history.repair.placeholders import UNKNOWN


def _tool(state: Json | None) -> Json:
    return {"type": "tool", "callID": "c", "tool": "bash", "state": state}


def test_calls_have_their_results_and_display_only_parts_are_not_sent() -> None:
    parts: list[Json] = [
        {"type": "step-start"},
        {"type": "reasoning", "text": "hm", "metadata": {"anthropic": {"signature": "s"}}},
        {"type": "reasoning", "text": "unsigned"},
        {"type": "text", "text": "I look."},
        {"type": "text", "text": "hidden", "ignored": True},
        _tool({"status": "completed", "input": {"a": 1}, "output": "done"}),
        _tool({"status": "error", "error": "broke"}),
        _tool({"status": "running"}),
    ]
    stored = StoredMessage(
        "message/s/m.json", {"role": "assistant"}, [(f"p{at}", each) for at, each in enumerate(parts)]
    )
    messages, files = messages_of([stored])
    assert [block["type"] for block in messages[0]["content"]] == ["thinking", "text", *3 * ["tool_use"]]
    assert [(block["content"], block.get("is_error", False)) for block in messages[1]["content"]] == [
        ("done", False),
        ("broke", True),
    ]
    assert files == 2 * ["message/s/m.json"]


def test_an_open_call_is_closed_without_an_invented_time() -> None:
    part = _tool({"status": "running", "input": {"a": 1}, "time": {"start": 7}})
    assert is_open(part)
    closed = end_call(part)
    assert closed["state"] == {
        "input": {"a": 1},
        "status": "error",
        "error": UNKNOWN,
        "time": {"start": 7, "end": 7},
    }
    assert not is_open(closed)
    assert [is_open(_tool(state)) for state in (None, {"status": "pending"}, {"status": "completed"})] == [
        True,
        True,
        False,
    ]
    assert end_call(_tool(None))["state"]["time"] == {"start": 0, "end": 0}
