"""Resume suspects one at a time: sessions that ran a tool when the process that owned them died.

`midstream.session.crash_suspects` has the rule. A suspect is claimed at once, so that it can be read and cancelled.
Nothing is started in it before its trial. Other sessions are not held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from midstream.background_loops import spawn_loop
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.retries import TRIAL, TRIAL_BACKOFF
from midstream.session.crash_suspects import deaths_of, is_at_risk, is_at_work, is_untried
from midstream.session.session import Session

NODES_MAX = 16
"""Dead nodes whose suspects are kept in memory until their trials have ended."""

_log = logging.getLogger(__name__)


class Trials:
    """The suspects of one host.

    Args:
        node: The name of this process. Its own sessions are no suspects.
        awake: The sessions in memory.
        is_ready: Waits until all suspects of this start are known.
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
        """The claimed suspects, by their dead nodes, with their states at the death."""
        self._held: list[Runner] = []
        self._running: asyncio.Task[None] | None = None

    def is_suspect(self, runner: Runner) -> bool:
        """Whether a session is a suspect, which is claimed only after all sessions of its node were read."""
        state = runner.state
        return state.node != self._node and (is_at_risk(state) or is_untried(state))

    def count_suspected_deaths(self, runner: Runner) -> int:
        """Return the number of deaths that a session is suspected of, before it is claimed."""
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
        """Begin the trial of a suspect when its turn comes."""
        self._held.append(runner)
        if self._running is None:
            self._running = spawn_loop(self._world, self._run, name="trials")

    async def stop(self) -> None:
        """Stop the trials."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        await self._is_ready()
        while self._held:
            runner = min(self._held, key=lambda each: each.state.suspected)  # the fewest deaths first
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
            pass  # it has done no harm for that long: it continues, and the next trial begins
