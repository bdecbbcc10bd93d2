"""A scripted agent of pydantic-ai in a process that can die, over a memory that survives it."""

# ruff: noqa: ANN401 - a run has any keywords and any result
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel

from midstream.frameworks.pydantic_ai_durable import DurableTurns
from midstream.observability.observers import Observer
from midstream.session.calls import OnDoubtName
from midstream.session.records import Record, decode
from midstream.store.memory import Memory, MemoryStore

SESSION = "s"
Parts = list[Any]


class Lab:
    """A memory that survives processes, a scripted model, and tools that count."""

    def __init__(
        self,
        *responses: Parts,
        on_doubt: dict[str, OnDoubtName] | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.observers = observers
        self.memory = Memory()
        self.responses = responses
        self.policies = on_doubt
        self.asked: list[int] = []
        self.ran: list[str] = []
        self.hangs_in = ""
        self.running = asyncio.Event()
        self.model_error: Exception | None = None
        self.start_process()

    def start_process(self) -> None:
        """Simulate a process with only the memory; the previous one is dead."""
        for owner in list(self.memory.living):
            self.memory.kill(owner)
        self.durable: DurableTurns[None] = DurableTurns(
            MemoryStore(self.memory), on_doubt=self.policies, observers=self.observers
        )

    def agent(self, **keywords: Any) -> Agent[None, Any]:
        model = FunctionModel(self._answer, stream_function=self._stream)
        agent: Agent[None, Any] = Agent(model, deps_type=type(None), capabilities=[self.durable], **keywords)
        agent.tool_plain(self.act)
        return agent

    async def act(self, name: str) -> str:
        self.ran.append(name)
        if self.hangs_in == name:
            self.running.set()
            await asyncio.Event().wait()
        return f"result of {name}"

    async def run(
        self,
        agent: Agent[None, Any] | None = None,
        *,
        prompt: str | None = "go",
        key: str = "",
        **keywords: Any,
    ) -> Any:
        async with self.durable.turn(SESSION, key=key):
            return await (agent or self.agent()).run(prompt, **keywords)

    async def cut(self, agent: Agent[None, Any] | None = None, *, key: str = "", **keywords: Any) -> None:
        """Run until the hanging tool hangs, and let the process die there."""
        task = asyncio.create_task(self.run(agent, key=key, **keywords))
        async with asyncio.timeout(60):
            await self.running.wait()
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self.hangs_in = ""
        self.start_process()

    async def records(self) -> list[Record]:
        store = MemoryStore(self.memory)
        await store.open()
        return [decode(stored.body) for stored in await store.read(SESSION, after=0, limit=1000)]

    async def kinds(self, kind: type[Any]) -> list[Any]:
        return [record for record in await self.records() if isinstance(record, kind)]

    def _answer(self, messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
        return ModelResponse(parts=self._next(messages))

    def _next(self, messages: Sequence[ModelMessage]) -> Parts:
        number = sum(isinstance(each, ModelResponse) for each in messages)
        self.asked.append(number + 1)
        if self.model_error is not None:
            error, self.model_error = self.model_error, None
            raise error
        return self.responses[number]

    async def _stream(
        self, messages: list[ModelMessage], _info: AgentInfo
    ) -> AsyncIterator[str | DeltaToolCalls]:
        for index, part in enumerate(self._next(messages)):
            if isinstance(part, TextPart):
                for word in part.content.split():
                    yield f"{word} "
            else:
                yield {
                    index: DeltaToolCall(
                        part.tool_name, part.args_as_json_str(), tool_call_id=part.tool_call_id
                    )
                }


def call(name: str, tool: str = "act", **arguments: Any) -> ToolCallPart:
    return ToolCallPart(tool, arguments or {"name": name}, name)


def answers(messages: Sequence[ModelMessage]) -> dict[str, Any]:
    parts = [part for message in messages for part in message.parts]
    return {part.tool_call_id: part.content for part in parts if isinstance(part, ToolReturnPart)}


STEPS: tuple[Parts, ...] = ([call("c1")], [call("p1"), call("p2"), call("p3")], [TextPart("all done")])
