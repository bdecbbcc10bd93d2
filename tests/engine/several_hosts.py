"""Hosts on one memory, and stores of theirs that refuse or delay an operation."""

from __future__ import annotations

import asyncio
import math

from midstream.engine.agent import Agent
from midstream.engine.host import Host, HostPhase
from midstream.engine.runner import Runner, StopMode
from midstream.errors import (
    DrainingError,
    StoreBusyError,
)
from midstream.history.messages import UserMessage
from midstream.session.records import (
    EpochStarted,
    Record,
    decode,
)
from midstream.session.turn.commands import Cancel, SendMessage
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import ScriptedModel
from midstream.testing.scripted_model import Script
from midstream.testing.store_fakes import StoreInFront

WAIT_S = 60.0


class Hold:
    """A gate before an operation."""

    def __init__(self) -> None:
        self.was_called = asyncio.Event()
        self.may_continue = asyncio.Event()


class ScriptedStore(StoreInFront):
    """A store that refuses an operation, or delays it."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(MemoryStore(memory))
        self.refused = ""
        self.last_joined_at = -math.inf
        self._holds: dict[str, Hold] = {}

    @property
    def joined_at(self) -> float:
        return self.last_joined_at

    def hold(self, operation: str) -> Hold:
        """Let the next operation wait; `claimed` waits for the return of a claim that has happened."""
        self._holds[operation] = Hold()
        return self._holds[operation]

    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        epoch = await super().claim(session, at=at, is_free=is_free)
        await self.before_operation("claimed", session)
        return epoch

    async def before_operation(self, operation: str, session: str) -> None:
        if hold := self._holds.pop(operation, None):
            hold.was_called.set()
            await hold.may_continue.wait()
        if operation == self.refused:
            raise StoreBusyError("somebody else has the disk")


class Places:
    """Hosts on one memory."""

    def __init__(self) -> None:
        self.memory = Memory()
        self._hosts: list[Host] = []

    async def host(
        self, script: Script = (), *, store: StoreInFront | None = None, turn_s: float = 0.0
    ) -> Host:
        host = Host(Agent(ScriptedModel(script), turn_s=turn_s), store or MemoryStore(self.memory))
        self._hosts.append(host)
        await host.start()
        await host.wait_for_recovery()
        return host

    async def kill(self, host: Host) -> None:
        """Let a host die as a process does: nothing is given up or reported."""
        assert isinstance(host.store, MemoryStore)
        host._phase = HostPhase.STOPPED
        await host._caretaker.stop()
        for runner in host.awake.runners.values():
            await runner.stop(StopMode.CLOSE, DrainingError("killed"))
        self.memory.kill(host.store.node)

    async def stop(self) -> None:
        for host in self._hosts:
            await host.stop(grace_s=0.1)

    def handovers(self) -> list[bool]:
        """Return the marks of all epochs of the session."""
        return [each.is_handover for each in self.records() if isinstance(each, EpochStarted)]

    def records(self, session: str = "s") -> list[Record]:
        return [decode(each.body) for each in self.memory.sessions[session].records]


async def send_message(host: Host, words: str, session: str = "s") -> Runner:
    """Send a message to a session, and return it once the message is accepted."""
    runner = await host.session(session, create=True)
    await runner.submit(SendMessage(UserMessage.of(words)))
    return runner


async def run_turn_of(host: Host, words: str) -> None:
    """Let a host own session s: one turn, cancelled."""
    runner = await send_message(host, words)
    await runner.submit(Cancel())


async def newest_at(host: Host) -> int:
    """Return the position of the newest event that a host reads of session s."""
    return (await host.session("s")).newest.position
