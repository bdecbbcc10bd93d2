"""The scripted model answers the demo's messages, and reports unknown ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.demo.demo_agent import tools_over
from midstream.demo.folder import Folder
from midstream.demo.script import LINES, scripted_model
from midstream.environment import World
from midstream.history.messages import Finish, History, Response, Step, ToolCall, ToolResult, UserMessage
from midstream.models.responses import ModelEvent, ModelRequest, TextDelta, ToolCallRequested
from midstream.testing.fake_worlds import FakeWorld
from midstream.tools.function_tools import by_name, plan_call


async def response_to(history: History) -> list[ModelEvent]:
    world = FakeWorld()

    async def read_all() -> list[ModelEvent]:
        return [event async for event in scripted_model(world).stream(ModelRequest("", history))]

    return await world.live_through(read_all())


@pytest.mark.parametrize("words", [LINES.ask, LINES.write, LINES.again])
async def test_every_message_leads_through_matching_calls_to_an_answer(words: str, tmp_path: Path) -> None:
    tools = by_name(tools_over(Folder(tmp_path), World()))
    history = History().then(UserMessage.of(words))
    for _ in range(5):
        events = await response_to(history)
        asked = [event for event in events if isinstance(event, ToolCallRequested)]
        if not asked:
            break
        calls = tuple(ToolCall(event.id, event.name, event.arguments) for event in asked)
        assert [plan_call(call, tools).problem for call in calls] == [None] * len(calls)
        results = tuple(ToolResult(call.id, "done") for call in calls)
        history = history.then(Step(Response(calls, Finish.CALLS), results))
    assert sum(isinstance(event, TextDelta) for event in events) > 15


async def test_an_unknown_message_gets_a_fixed_answer() -> None:
    events = await response_to(History().then(UserMessage.of("hello?")))
    texts = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert texts == "This scripted model answers only the three messages of the demo."
