"""Programs of the guide of OpenAI Agents."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, ModelResponse, Runner, RunState, Usage, function_tool, set_tracing_disabled
from agents.models.interface import Model
from agents.testing import assistant_message, function_call
from openai.types.responses import ResponseTextDeltaEvent

from midstream.frameworks.openai_agents import _completed_event
from tests.frameworks.kill_programs import (
    SESSION,
    FinalState,
    GuidePlay,
    Program,
    cancel_at_random,
    converse,
    run_guide,
    store,
)

PAGE = "openai-agents.md"
set_tracing_disabled(True)


class PlayModel(Model):
    """Requests the next calls of the play."""

    def __init__(self, play: GuidePlay) -> None:
        self._play = play

    async def get_response(self, system: Any, input: Any, *args: Any, **keywords: Any) -> ModelResponse:
        return ModelResponse(await self._output(input), Usage(), "resp")

    async def stream_response(
        self, system: Any, input: Any, *args: Any, **keywords: Any
    ) -> AsyncIterator[Any]:
        output = await self._output(input)
        for word in output[0].content[0].text.split() if output[0].type == "message" else ():
            yield ResponseTextDeltaEvent(
                content_index=0,
                delta=f"{word} ",
                item_id="i",
                logprobs=[],
                output_index=0,
                sequence_number=0,
                type="response.output_text.delta",
            )
            await self._play.pause()
        yield _completed_event(ModelResponse(output, Usage(), "resp"))

    async def _output(self, input: Any) -> list[Any]:
        items = [{"role": "user", "content": input}] if isinstance(input, str) else input
        place = max(place for place, each in enumerate(items) if each.get("role") == "user")
        text, calls = items[place]["content"], 0
        calls = sum(each.get("type") == "function_call" for each in items[place:])
        names = await self._play.next_calls(text, {0: 0, 1: 1, 4: 2}[calls])
        return [function_call("act", {"name": name}, call_id=name) for name in names] or [
            assistant_message(f"done {text}")
        ]


def _tool(play: GuidePlay, **options: Any) -> Any:
    @function_tool(**options)
    async def act(name: str) -> str:
        """Act."""
        return await play.act(name)

    return act


def _names(play: GuidePlay, *blocks: int, **options: Any) -> dict[str, Any]:
    names = run_guide(PAGE, 0, *blocks)
    durable = names["durable"]
    tools = durable.tools([_tool(play, **options)])
    names["agent"] = names["cashier"] = Agent(name="a", model=durable.model(PlayModel(play)), tools=tools)
    return names


def _report(items: list[Any]) -> FinalState:
    outputs = [each for each in items if each.get("type") == "function_call_output"]
    assert len({each["call_id"] for each in outputs}) == len(outputs), "an output stands twice in the items"
    results = {each["call_id"]: str(each["output"]) for each in outputs}
    messages = [each for each in items if each.get("type") == "message" or each.get("role") == "assistant"]
    answers = [each["content"] for each in messages if each.get("role") == "assistant"]
    texts = [each if isinstance(each, str) else "".join(part["text"] for part in each) for each in answers]
    return FinalState(results, texts)


async def conversation(play: GuidePlay) -> FinalState:
    """Two messages, with their items."""
    return _report(json.loads(await converse(play, _names(play, 2))))


async def cancelled(play: GuidePlay) -> FinalState:
    """Two messages; each is cancelled at random and repeated at once."""
    return _report(json.loads(await converse(play, cancel_at_random(_names(play, 2), play))))


async def streamed(play: GuidePlay) -> FinalState:
    """One message whose stream is read; reading stops after a random event and starts again."""
    names = _names(play, 1)
    for _ in range(3):
        left = play.chance.randrange(12)
        words = names["stream"](SESSION, "m1", "m1")
        async for _word in words:
            left -= 1
            if left < 0:
                break
        await words.aclose()
    texts = [word async for word in names["stream"](SESSION, "m1", "m1")]
    assert texts[-1].strip() == "done m1", texts
    return await _final(names, "m1")


async def _final(names: dict[str, Any], given: Any) -> FinalState:
    async with names["durable"].turn(SESSION, "m1", key="m1"):
        result = await Runner.run(names["agent"], given)
    return _report(result.to_input_list())


async def sub_agent(play: GuidePlay) -> FinalState:
    """An agent as a tool, with a wrapped model and tools with effects."""
    names = run_guide(PAGE, 0)
    durable = names["durable"]
    inner = Agent(name="inner", model=durable.model(Inner()), tools=durable.tools([_tool(play)]))
    act = inner.as_tool("act", "Act.")
    names["agent"] = Agent(name="a", model=durable.model(ForInput(play)), tools=durable.tools([act]))
    return await _final(names, "m1")


class ForInput(PlayModel):
    """Requests calls of an agent that is a tool: their argument is `input`."""

    async def _output(self, input: Any) -> list[Any]:
        output = await super()._output(input)
        return [
            function_call("act", {"input": each.call_id}, call_id=each.call_id)
            if each.type == "function_call"
            else each
            for each in output
        ]


class Inner(Model):
    """Requests one call, and answers with its result."""

    async def get_response(self, system: Any, input: Any, *args: Any, **keywords: Any) -> ModelResponse:
        items = [{"role": "user", "content": input}] if isinstance(input, str) else input
        outputs = [each["output"] for each in items if each.get("type") == "function_call_output"]
        name = items[0]["content"]
        output = (
            assistant_message(outputs[0]) if outputs else function_call("act", {"name": name}, call_id="i")
        )
        return ModelResponse([output], Usage(), "resp")

    def stream_response(self, *args: Any, **keywords: Any) -> Any:
        raise NotImplementedError


async def approvals(play: GuidePlay) -> FinalState:
    """Calls that need a person's approval, and a program that stores the waiting ones."""
    names = _names(play, 3, needs_approval=True)
    names["payments"] = names["durable"]  # one journal, which the play reads
    waiting = play.folder / "waiting"
    if not waiting.exists():
        store(waiting, await names["ask_to_pay"](SESSION, "m1", "m1"))
    while True:
        state = await RunState.from_string(names["cashier"], waiting.read_text())
        for item in state.get_interruptions():
            state.approve(item)
        async with names["payments"].turn(SESSION, "m1", key="m1"):
            result = await Runner.run(names["cashier"], state)
        if not result.interruptions:
            return _report(result.to_input_list())
        store(waiting, result.to_state().to_string())


PROGRAMS: dict[str, Program] = {
    "conversation": conversation,
    "stream left early, then repeated": streamed,
    "cancelled, then repeated": cancelled,
    "sub-agent": sub_agent,
    "approvals": approvals,
    "two processes": conversation,
}
