"""The open agents of an upstream in this process: few, and only those that may soon be used again."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec import Struct

from midstream.agents.resident_memory import measure_memory
from midstream.agents.upstreams import Setup, Upstream, UpstreamAgent
from midstream.environment import Cancellable, World

_log = logging.getLogger(__name__)


class _Resting(Struct):
    agent: UpstreamAgent
    setup: Setup
    since: float


class LiveAgents:
    """Opens agents, keeps some open between two turns, and closes all others.

    Args:
        live_max: Number of open agents, including those in a turn; a turn never waits for a place.
        rest_s: Seconds without a message after which an agent is closed: some die unnoticed after five minutes.
        close_s: Time limit in seconds for closing and deletion.
        memory_mib_max: MiB of memory of all agents' processes together; None for no limit. Beyond it idle agents are
            closed, the longest unused first. Agents in a turn are never closed for it.
        measure: Measures these MiB; returns None where that is not possible. It is called in a thread.
    """

    def __init__(
        self,
        upstream: Upstream,
        world: World,
        *,
        live_max: int,
        rest_s: float,
        close_s: float,
        memory_mib_max: float | None = None,
        measure: Callable[[], float | None] = measure_memory,
    ) -> None:
        self._upstream = upstream
        self._world = world
        self._live_max = live_max
        self._rest_s = rest_s
        self._close_s = close_s
        self._memory_mib_max = memory_mib_max if upstream.abilities.has_process else None
        self._measure = measure
        self._measuring: asyncio.Task[None] | None = None
        self._resting: OrderedDict[str, _Resting] = OrderedDict()
        """By the id for resuming, the longest unused first."""
        self._alarm: Cancellable | None = None
        self._busy = 0
        self._errands: set[asyncio.Task[None]] = set()
        self._closing: dict[str, asyncio.Task[None]] = {}

    @property
    def resting(self) -> int:
        """Number of open agents that are idle."""
        return len(self._resting)

    def has(self, setup: Setup, name: str) -> bool:
        """Whether `take` would return an agent."""
        resting = self._resting.get(name)
        return (
            resting is not None
            and resting.setup == setup
            and self._world.monotonic() - resting.since < self._rest_s
        )

    async def take(self, setup: Setup, name: str) -> UpstreamAgent | None:
        """Return the idle agent of this name, if it has the same setup and was not idle for too long.

        Otherwise it is closed, so that no conversation is open twice. Return it with `rest` or `close`, once.
        """
        if (closing := self._closing.get(name)) is not None:
            await asyncio.shield(closing)
        is_usable = self.has(setup, name)
        resting = self._resting.pop(name, None)
        self._close_rested()
        if resting is None:
            return None
        if is_usable:
            self._busy += 1
            return resting.agent
        await self._within(resting.agent.aclose(), "closed")
        return None

    async def open(self, setup: Setup, *, resume: str = "") -> UpstreamAgent:
        """Open a fresh agent, or resume one that is not open here. Return it with `rest` or `close`, once.

        Raises:
            ModelError: As `Upstream.open` does. Then there is nothing to return.
        """
        agent = await self._upstream.open(setup, resume=resume)
        self.has_opened()
        return agent

    def has_opened(self) -> None:
        """Count an agent that was opened in another way, such as a fork. Return it like the others."""
        self._busy += 1
        self._close_surplus()
        self._check_memory()

    def rest(self, name: str, agent: UpstreamAgent, setup: Setup) -> None:
        """Return an agent after its answer; it stays open for a while."""
        self._busy -= 1
        self._resting[name] = _Resting(agent, setup, self._world.monotonic())
        self._close_rested()
        self._close_surplus()
        self._check_memory()
        self._set_alarm()

    def close(self, agent: UpstreamAgent, *, deleted: str = "") -> None:
        """Return an agent and close it soon; then delete the conversation `deleted` at the upstream."""
        self._busy -= 1
        self._run(self._close(agent, deleted))

    def delete(self, name: str) -> None:
        """Delete a conversation at the upstream soon, after closing its open agent."""
        resting = self._resting.pop(name, None)
        self._run(self._close(resting.agent if resting else None, name))

    async def aclose(self) -> None:
        """Close idle agents, and wait for closings and deletions."""
        while self._resting:
            self._close_oldest()
        self._set_alarm()
        if self._errands:
            await asyncio.wait(self._errands)

    def _close_rested(self) -> None:
        now = self._world.monotonic()
        while self._resting and now - next(iter(self._resting.values())).since >= self._rest_s:
            self._close_oldest()

    def _set_alarm(self) -> None:
        """Arrange that the longest idle agent is closed in time, also if no turn follows."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._resting:
            idle_s = self._world.monotonic() - next(iter(self._resting.values())).since
            self._alarm = self._world.later(max(0.0, self._rest_s - idle_s), self._close_in_time)

    def _close_in_time(self) -> None:
        self._close_rested()
        self._set_alarm()

    def _close_surplus(self) -> None:
        while self._resting and self._busy + len(self._resting) > self._live_max:
            self._close_oldest()

    def _close_oldest(self) -> asyncio.Task[None]:
        name, resting = self._resting.popitem(last=False)
        self._closing[name] = closing = self._run(self._close(resting.agent, ""))
        closing.add_done_callback(lambda _: self._closing.pop(name, None))
        return closing

    def _check_memory(self) -> None:
        """Begin to close idle agents beyond the memory limit."""
        is_measuring = self._measuring is not None and not self._measuring.done()
        if self._memory_mib_max is not None and self._resting and not is_measuring:
            self._measuring = self._run(self._close_beyond(self._memory_mib_max))

    async def _close_beyond(self, mib_max: float) -> None:
        while self._resting:
            mib = await asyncio.to_thread(self._measure)
            if mib is None or mib <= mib_max or not self._resting:
                return
            closing = self._close_oldest()
            _log.info(
                "closed an idle agent: all take %.0f MiB, and the limit is %.0f MiB",
                mib,
                mib_max,
                extra={"upstream": self._upstream.name},
            )
            await asyncio.wait({closing})

    def _run(self, errand: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._world.spawn(errand, name="let go of an agent")
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    async def _close(self, agent: UpstreamAgent | None, deleted: str) -> None:
        if agent is not None:
            await self._within(agent.aclose(), "closed")
        if deleted:
            await self._within(self._upstream.delete(deleted), "deleted")

    async def _within(self, work: Awaitable[None], what: str) -> None:
        try:
            async with asyncio.timeout(self._close_s):
                await work
        except Exception as error:  # noqa: BLE001 - foreign code on the way out: nothing depends on it
            kind = type(error).__name__
            _log.debug("an agent was not %s: %s", what, kind, extra={"upstream": self._upstream.name})
