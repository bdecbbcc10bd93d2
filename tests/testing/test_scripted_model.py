from __future__ import annotations

import asyncio

import pytest

from midstream.errors import ModelUnavailableError
from midstream.history.messages import History, Response, Step, ToolCall, ToolResult, UserMessage
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta, ToolCallRequested
from midstream.testing import Gate, Pause, ScriptedModel, calls, text
from midstream.testing.scripted_model import steps_since_user

REQUEST = ModelRequest("", History((UserMessage.of("hi"),)))


async def _all(model: ScriptedModel, request: ModelRequest = REQUEST) -> list[ModelEvent]:
    return [event async for event in model.stream(request)]


async def test_the_script_is_followed_by_the_position_in_the_conversation_and_not_by_memory() -> None:
    script = [calls(("read", "{}"), text="look"), text("seen")]
    step = Step(Response((ToolCall("c1", "read"),)), (ToolResult("c1", "x"),))
    later = ModelRequest("", REQUEST.history.then(step))
    assert steps_since_user(later.history) == 1
    for model in (ScriptedModel(script), ScriptedModel(script)):  # A restarted process.
        assert await _all(model, later) == [TextDelta("seen"), Finished()]
    first = await _all(ScriptedModel(script))
    assert ToolCallRequested("c1", "read", "{}") in first


async def test_a_text_is_split_into_the_requested_number_of_pieces() -> None:
    assert [step.text for step in text("abcdef", tokens=3) if isinstance(step, TextDelta)] == [
        "ab",
        "cd",
        "ef",
    ]


async def test_failures_pauses_and_gates_are_played() -> None:
    gate = asyncio.Event()
    gate.set()
    model = ScriptedModel(
        [[Pause(0), Gate(gate), TextDelta("a"), ModelUnavailableError("503")]], delay_s=0.0001
    )
    with pytest.raises(ModelUnavailableError):
        await _all(model)
    assert model.requests == [REQUEST]
