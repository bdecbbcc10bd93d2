"""The suite finds faults: each broken upstream here fails the test of its fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from midstream.agents.upstreams import Abilities, Marked, MessageTaken, Setup, UpstreamEvent, UpstreamMessage
from midstream.errors import ModelAccessError, UpstreamBusyError, UpstreamFailedError, UpstreamGoneError
from midstream.history.messages import Text
from midstream.models.responses import Finished, TextDelta, UpstreamCallEnded, UpstreamCallStarted
from midstream.testing.upstream_contract import SEPARATOR, USAGE, PeerMessage, Trait, UpstreamContract

FAILED = (AssertionError, pytest.fail.Exception)


class Memory:
    """A peer in memory, with its own upstream: the smallest that passes."""

    def __init__(self, broken: type[Remembering] | None = None) -> None:
        self.kind = broken or Remembering
        self.lacks: frozenset[Trait] = frozenset({Trait.PROCESS})
        self.talks: dict[str, list[str]] = {}
        self.received: list[PeerMessage] = []
        self.running = 0
        self.made = 0
        self.is_refusing = False
        self.busy: set[str] = set()
        self.next: set[str] = set()
        self.tools: list[tuple[str, str, str]] = []

    def upstream(self) -> Remembering:
        return self.kind(self)

    def messages(self) -> list[PeerMessage]:
        return [*self.received]

    def runs(self) -> int:
        return self.running

    def expire(self, agent: str) -> None:
        del self.talks[agent]

    def end_processes(self) -> None:
        raise AssertionError("there are none")

    def be_busy(self, agent: str) -> None:
        self.busy.add(agent)

    def hang(self) -> None:
        self.next.add("hang")

    def echo_wrong_id(self) -> None:
        self.next.add("wrong")

    def die_mid_stream(self) -> None:
        self.next.add("die")

    def refuse_key(self) -> None:
        self.is_refusing = True

    def run_tool(self, name: str, arguments: str, content: str) -> None:
        self.tools.append((name, arguments, content))

    def begin_conversation(self, *texts: str) -> str:
        self.made += 1
        self.talks[f"talk-{self.made}"] = [*texts]
        return f"talk-{self.made}"

    def takes(self, what: str) -> bool:
        is_next = what in self.next
        self.next.discard(what)
        return is_next


class Remembering:
    name = "memory"
    identity: Mapping[str, str] = MappingProxyType({"folder": "none"})
    abilities = Abilities(can_fork=True)

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.agents: list[Agent] = []

    async def open(self, setup: Setup, *, resume: str = "") -> Agent:
        if resume and self.memory.takes("wrong"):
            return self._agent(self.memory.begin_conversation(), source=self.memory.begin_conversation())
        return self._agent(resume or self.memory.begin_conversation(), source=resume)

    async def fork(self, setup: Setup, *, agent: str, mark: str) -> Agent:
        return self._agent(
            self.memory.begin_conversation(*self.memory.talks[agent][: int(mark)]), source=agent
        )

    async def verify(self) -> bool:
        return not self.memory.is_refusing

    async def delete(self, agent: str) -> None:
        self.memory.talks.pop(agent, None)

    async def aclose(self) -> None:
        for agent in self.agents:
            await agent.aclose()

    def _agent(self, talk: str, source: str) -> Agent:
        self.agents.append(Agent(self.memory, talk, source))
        return self.agents[-1]


class Agent:
    def __init__(self, memory: Memory, talk: str, source: str) -> None:
        self.memory, self.talk, self.source = memory, talk, source
        self.is_closed = asyncio.Event()

    async def send(
        self, outgoing: UpstreamMessage, *, key: str, is_forced: bool = False
    ) -> AsyncGenerator[UpstreamEvent, None]:
        memory = self.memory
        if memory.is_refusing:
            raise ModelAccessError("refused")
        if self.talk not in memory.talks:
            raise UpstreamGoneError("gone")
        if is_forced:
            memory.busy.discard(self.talk)
        if self.talk in memory.busy:
            raise UpstreamBusyError("busy")
        memory.running += 1
        try:
            text = "".join(part.text for part in outgoing.message.parts if isinstance(part, Text))
            memory.talks[self.talk].append(text)
            memory.received.append(PeerMessage(self.talk, text, key))
            is_hanging = memory.takes("hang")
            yield MessageTaken(self.talk, self.source)
            self.source = self.talk
            if is_hanging:
                await self.is_closed.wait()
                raise UpstreamFailedError("closed")
            answer = SEPARATOR.join(memory.talks[self.talk])
            for number, (name, arguments, content) in enumerate(memory.tools):
                yield UpstreamCallStarted(str(number), name, arguments)
                yield UpstreamCallEnded(str(number), content)
            yield TextDelta(answer[:1])
            if memory.takes("die"):
                raise UpstreamFailedError("died")
            yield TextDelta(answer[1:])
            yield Marked(str(len(memory.talks[self.talk])))
            yield Finished(usage=USAGE)
        finally:
            memory.running -= 1

    async def aclose(self) -> None:
        self.is_closed.set()


class TestRemembering(UpstreamContract):
    @pytest.fixture
    def peer(self) -> Memory:
        return Memory()


class Wrapped(Remembering):
    """An upstream that changes the events of a good one."""

    async def open(self, setup: Setup, *, resume: str = "") -> Agent:
        agent = await super().open(setup, resume=resume)
        good: Any = agent.send

        async def send(
            outgoing: UpstreamMessage, *, key: str, is_forced: bool = False
        ) -> AsyncGenerator[UpstreamEvent, None]:
            events = good(outgoing, key=key, is_forced=is_forced)
            try:
                async for event in events:
                    changed = self.changed(event)
                    if changed is not None:
                        yield changed
            finally:
                await events.aclose()

        agent.send = send  # type: ignore[method-assign] # a fault is put here
        return agent

    def changed(self, event: UpstreamEvent) -> UpstreamEvent | None:
        return event


class OmitsName(Wrapped):
    def changed(self, event: UpstreamEvent) -> UpstreamEvent | None:
        return None if isinstance(event, MessageTaken) else event


class EchoesRequestedName(Wrapped):
    async def open(self, setup: Setup, *, resume: str = "") -> Agent:
        self.asked = resume
        return await super().open(setup, resume=resume)

    def changed(self, event: UpstreamEvent) -> UpstreamEvent | None:
        return replace(event, resumed=self.asked) if isinstance(event, MessageTaken) else event


class CountsNothing(Wrapped):
    def changed(self, event: UpstreamEvent) -> UpstreamEvent | None:
        return replace(event, usage=None) if isinstance(event, Finished) else event


class LosesResults(Wrapped):
    def changed(self, event: UpstreamEvent) -> UpstreamEvent | None:
        return None if isinstance(event, UpstreamCallEnded) else event


class StartsFresh(Remembering):
    async def open(self, setup: Setup, *, resume: str = "") -> Agent:
        return await super().open(setup, resume=resume if resume in self.memory.talks else "")


LEFT: set[asyncio.Task[bool]] = set()
"""Kept, so that no garbage collection removes them before the suite has checked."""


class LeaksTasks(Remembering):
    async def open(self, setup: Setup, *, resume: str = "") -> Agent:
        LEFT.add(asyncio.create_task(asyncio.Event().wait()))
        return await super().open(setup, resume=resume)


SUITE = UpstreamContract()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (OmitsName, SUITE.test_an_answer_is_opened_first_and_finished_last),
        (EchoesRequestedName, SUITE.test_a_wrong_conversation_id_is_detected),
        (CountsNothing, SUITE.test_tokens_are_counted_once_an_answer),
        (LosesResults, SUITE.test_calls_and_results_of_its_own_tools_are_reported_in_pairs),
        (StartsFresh, SUITE.test_a_deleted_agent_is_gone_and_receives_no_message),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_broken_upstream_fails(
    broken: type[Remembering], test: Callable[[Memory], Awaitable[None]]
) -> None:
    with pytest.raises(FAILED):
        await test(Memory(broken))


async def test_an_upstream_that_leaves_tasks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.testing.upstream_contract.LIMIT_S", 0.05)
    with pytest.raises(TimeoutError):
        await SUITE.test_nothing_is_left_behind(Memory(LeaksTasks))
    for task in LEFT:
        task.cancel()
    LEFT.clear()


async def test_a_feature_that_a_kind_of_upstream_lacks_is_skipped() -> None:
    memory = Memory()
    memory.lacks = frozenset({Trait.BUSY})
    with pytest.raises(pytest.skip.Exception):
        await SUITE.test_a_busy_agent_is_recognized_and_takes_a_forced_message(memory)
