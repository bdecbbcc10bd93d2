"""Resume suspects one at a time: sessions that ran a tool when the process that owned them died.

`midstream.session.crash_suspects` decides who is one. A suspect is claimed at once, so that it can be read and
cancelled, and is
held: nothing is started in it before its trial. Other sessions are not held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.retries import TRIAL, TRIAL_BACKOFF
from midstream.session.crash_suspects import deaths_of, is_at_risk, is_at_work, is_untried
from midstream.session.session import Session

NODES_MAX = 16
"""Dead nodes of which it is kept what they left, until the trials of it are over."""

_log = logging.getLogger(__name__)


class Trials:
    """The suspects of one host.

    Args:
        node: The name of this process: what it left itself, no death has interrupted.
        awake: The sessions in memory.
        is_ready: Wait until the suspects of this start are known.
    """

    def __init__(
        self,
        world: World,
        node: str,
        awake: Mapping[str, Runner],
        is_ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._world = world
        self._node = node
        self._awake = awake
        self._is_ready = is_ready
        self._left: dict[str, dict[str, Session]] = {}
        """The suspects that were claimed here, as their dead nodes had left them."""
        self._held: list[Runner] = []
        self._running: asyncio.Task[None] | None = None

    def is_suspect(self, runner: Runner) -> bool:
        """Return whether a session is claimed only when all that its node left was read."""
        state = runner.state
        return state.node != self._node and (is_at_risk(state) or is_untried(state))

    def count_suspected_deaths(self, runner: Runner) -> int:
        """Return how many deaths a session is suspected of that is about to be claimed."""
        state = runner.state
        if not self.is_suspect(runner):
            return 0
        left = self._left.setdefault(state.node, {})
        while len(self._left) > NODES_MAX:
            del self._left[next(iter(self._left))]
        others = {key: each.state for key, each in self._awake.items() if each.state.node == state.node}
        others.update(left)
        others.pop(runner.session_id, None)
        left[runner.session_id] = state
        return deaths_of(state, others.values())

    def hold(self, runner: Runner) -> None:
        """Resume a suspect when it is its turn."""
        self._held.append(runner)
        if self._running is None:
            self._running = self._world.spawn(self._run(), name="trials")

    async def stop(self) -> None:
        """Begin no more trials."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        await self._is_ready()
        while self._held:
            runner = min(self._held, key=lambda each: each.state.suspected)  # those of one death first
            self._held.remove(runner)
            try:
                await self._try(runner)
            except MidstreamError as error:
                _log.debug("a trial ended: %s", error.code, extra={"session": runner.session_id})
        self._left.clear()
        self._running = None

    async def _try(self, runner: Runner) -> None:
        deaths = runner.state.suspected
        wait_s = TRIAL_BACKOFF.wait_s(deaths - 1, chance=self._world.chance())
        if wait_s:
            _log.warning(
                "the server died %d times while this session ran a tool: resumed alone in %.1f s",
                deaths,
                wait_s,
                extra={"session": runner.session_id},
            )
            await self._world.sleep(wait_s)
        runner.resume()
        try:
            async with asyncio.timeout(TRIAL.wait_s(deaths, chance=0.0)):
                while is_at_work(runner.state):
                    await runner.wait(runner.newest.position)
        except TimeoutError:
            pass  # it has done no harm for as long as that: it goes on, and so does the next one
