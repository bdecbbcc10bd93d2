"""Programs of the guide of pydantic-ai."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic_ai import Agent, DeferredToolRequests
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel

from tests.frameworks.kill_programs import (
    SESSION,
    FinalState,
    GuidePlay,
    Program,
    cancel_and_repeat,
    cancel_at_random,
    converse,
    run_guide,
    store,
    until_free,
)

PAGE = "pydantic-ai.md"


def _model(play: GuidePlay) -> FunctionModel:
    async def text_and_calls(messages: list[ModelMessage]) -> list[str]:
        prompts = [
            (place, part.content)
            for place, message in enumerate(messages)
            if isinstance(message, ModelRequest)
            for part in message.parts
            if isinstance(part, UserPromptPart)
        ]
        place, text = prompts[-1]
        responses = sum(isinstance(each, ModelResponse) for each in messages[place:])
        return [str(text), *await play.next_calls(str(text), responses)]

    async def respond(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
        text, *names = await text_and_calls(messages)
        calls: list[Any] = [ToolCallPart("act", {"name": name}, name) for name in names]
        return ModelResponse(parts=calls or [TextPart(f"done {text}")])

    async def stream(messages: list[ModelMessage], _info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        text, *names = await text_and_calls(messages)
        for index, name in enumerate(names):
            yield {index: DeltaToolCall("act", f'{{"name": "{name}"}}', tool_call_id=name)}
        if not names:
            yield "done "
            await play.pause()
            yield text

    return FunctionModel(respond, stream_function=stream)


def _names(play: GuidePlay, *blocks: int) -> dict[str, Any]:
    names = run_guide(PAGE, 0, *blocks)
    agent: Agent[None, Any] = Agent(_model(play), deps_type=type(None), capabilities=[names["durable"]])
    agent.tool_plain(play.act)
    names["agent"] = agent
    return names


def _report(messages: list[ModelMessage]) -> FinalState:
    parts = [part for message in messages for part in message.parts]
    answers = [part.content for part in parts if isinstance(part, TextPart)]
    results = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert len({part.tool_call_id for part in results}) == len(results), (
        "a result stands twice in the history"
    )
    return FinalState({part.tool_call_id: str(part.content) for part in results}, answers)


async def conversation(play: GuidePlay) -> FinalState:
    """Two messages, with a history."""
    return _read_report(await converse(play, _names(play, 2)))


async def cancelled(play: GuidePlay) -> FinalState:
    """Two messages; each is cancelled at random and repeated at once."""
    return _read_report(await converse(play, cancel_at_random(_names(play, 2), play)))


def _read_report(history: bytes) -> FinalState:
    return _report(ModelMessagesTypeAdapter.validate_json(history))


async def streamed(play: GuidePlay) -> FinalState:
    """One message, whose events are read; cancelled at random and repeated at once."""
    names = _names(play)

    async def run() -> Any:
        async with names["durable"].turn(SESSION, key="m1"), names["agent"].run_stream_events("m1") as events:
            received = [each async for each in events]
        return received[-1].result

    result = await cancel_and_repeat(lambda: until_free(run, play), play)
    return _report(result.all_messages())


async def sub_agent(play: GuidePlay) -> FinalState:
    """An agent that a tool runs, with the same capability and with its own effects."""
    names = _names(play)
    inner: Agent[None, str] = Agent(
        FunctionModel(_inner), deps_type=type(None), capabilities=[names["durable"]], tools=[play.act]
    )
    agent: Agent[None, Any] = Agent(_model(play), deps_type=type(None), capabilities=[names["durable"]])

    @agent.tool_plain
    async def act(name: str) -> str:
        return (await inner.run(name)).output

    names["agent"] = agent
    async with names["durable"].turn(SESSION, key="m1"):
        result = await agent.run("m1")
    return _report(result.all_messages())


def _inner(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
    (prompt,) = (part.content for part in messages[0].parts if isinstance(part, UserPromptPart))
    found = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    if found:
        return ModelResponse(parts=[TextPart(str(found[0].content))])
    return ModelResponse(parts=[ToolCallPart("act", {"name": str(prompt)}, "inner")])


async def approvals(play: GuidePlay) -> FinalState:
    """Calls that need a person's approval, and a program that stores the waiting ones."""
    names = run_guide(PAGE, 0, 2, 3)
    names["payments"] = names["durable"]  # one journal, which the play reads
    cashier: Agent[None, Any] = Agent(
        _model(play),
        deps_type=type(None),
        output_type=[str, DeferredToolRequests],
        capabilities=[names["payments"]],
    )
    cashier.tool_plain(requires_approval=True)(play.act)
    names["cashier"] = cashier
    waiting = play.folder / "waiting"
    if not waiting.exists():
        store(waiting, (await names["ask_to_pay"](SESSION, "m1", "m1")).decode())
    while True:
        stored = waiting.read_text()
        async with names["payments"].turn(SESSION, key="m1"):
            history = ModelMessagesTypeAdapter.validate_json(stored)
            approved = dict.fromkeys(names["waiting_calls"](history), True)
            results = names["DeferredToolResults"](approvals=approved)
            result = await cashier.run(message_history=history, deferred_tool_results=results)
        if not isinstance(result.output, DeferredToolRequests):
            return _report(result.all_messages())
        store(waiting, result.all_messages_json().decode())


def warm() -> None:
    """Build the objects that pydantic builds at the first use."""
    ModelMessagesTypeAdapter.validate_json(ModelMessagesTypeAdapter.dump_json([]))


PROGRAMS: dict[str, Program] = {
    "conversation": conversation,
    "streamed, cancelled, then repeated": streamed,
    "cancelled, then repeated": cancelled,
    "sub-agent": sub_agent,
    "approvals": approvals,
    "two processes": conversation,
}
