"""The live sessions of one process: open, recover, put to sleep, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import re

from msgspec import Struct

from midstream.core.timing import RECONNECT_BACKOFF
from midstream.core.turn import LOOK_BACK_S
from midstream.errors import (
    DrainingError,
    LeaseHeldError,
    MidstreamError,
    SessionNotFoundError,
    UnavailableError,
    UsageError,
)
from midstream.runtime.agent import Agent
from midstream.runtime.journal import Journal
from midstream.runtime.runner import Runner
from midstream.store.contract import Store
from midstream.world import World

SESSIONS_AWAKE_MAX = 1000
"""Sessions kept in memory; beyond it idle ones without readers go to sleep, the longest unused first."""
RECOVERIES_MAX = 16
"""Sessions recovered side by side at start-up."""
REVIVALS_MAX = 100
"""Tries to take up a turn whose runner failed on a store that was busy or full; about 25 minutes."""
_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)

_log = logging.getLogger(__name__)


class Recovery(Struct):
    """How far the start-up has got with the turns an older process left open."""

    total: int = 0
    done: int = 0
    failed: int = 0
    is_done: bool = False


class Host:
    """Run an agent's sessions on a store.

    Args:
        agent: What answers.
        store: Where journals live; the host opens and closes it.
        world: Clock, chance and tasks; the real ones by default.
        look_back_s: A turn untouched for longer (seconds) is ended as `interrupted` at start-up instead of being
            carried on.
    """

    def __init__(
        self, agent: Agent, store: Store, *, world: World | None = None, look_back_s: float = LOOK_BACK_S
    ) -> None:
        self.agent = agent
        self.store = store
        self.world = world or World()
        self.recovery = Recovery()
        self.is_draining = False
        self._look_back_s = look_back_s
        self._owner = self.world.new_id("owner")
        self._awake: dict[str, Runner] = {}
        self._opening: dict[str, asyncio.Task[Runner]] = {}
        self._reviving: set[asyncio.Task[None]] = set()
        self._recovering: asyncio.Task[None] | None = None
        self._is_started = False
        self._is_stopped = False

    async def start(self) -> None:
        """Open the store and begin to carry on with interrupted turns; `recovery` tells how far it is.

        Calling it again is harmless.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
        """
        if self._is_started:
            return
        self._is_started = True
        try:
            await self.store.open()
        except MidstreamError:
            self._is_started = False  # the next call tries again
            raise
        self._recovering = self.world.spawn(self._recover(), name="recovery")

    async def recovered(self) -> None:
        """Wait until start-up recovery has ended (its failures are counted in `recovery`)."""
        if self._recovering is not None:
            await self._recovering

    async def session(self, session_id: str, *, create: bool = False) -> Runner:
        """Return a session, awake. If a turn of a dead process is open in it, it is being carried on.

        Args:
            session_id: 1 to 128 of letters, digits and `._:-`.
            create: Accept an id nobody has used yet; the session exists from its first message on.

        Raises:
            UsageError: The id has another form.
            SessionNotFoundError: No such session, and `create` is false.
            LeaseHeldError: Another process is working on it. Nothing was changed.
            StoreDamagedError: Its journal cannot be read. Nothing was changed.
        """
        runner = self._awake.get(session_id)
        if runner is None or runner.has_failed:
            runner = await self._opened(session_id)
        else:
            self._awake[session_id] = self._awake.pop(session_id)  # the last used goes to sleep last
        if not create and runner.newest.position == 0:
            raise SessionNotFoundError(f"there is no session {session_id!r}")
        return runner

    async def delete(self, session_id: str) -> None:
        """Remove an idle session and all its records for good.

        Raises:
            SessionNotFoundError: No such session.
            SessionBusyError, LeaseHeldError: A turn is running. Nothing was changed.
        """
        runner = await self.session(session_id)
        await runner.retire()
        self._awake.pop(session_id, None)
        await self.store.delete(session_id)

    def drain(self) -> None:
        """Say goodbye: from now on readers and senders are told to reconnect. Turns go on until `stop`."""
        if self.is_draining:
            return
        self.is_draining = True
        for runner in self._awake.values():
            runner.part(_draining())

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """Drain, let running tools finish for up to `grace_s` seconds, stop the rest, close the store.

        What is cut is in the journal as owed or in doubt: the next process carries on. Calling it again is
        harmless; it always ends within the grace and a few seconds.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        self.drain()
        if self._recovering is not None:
            self._recovering.cancel()
            await asyncio.wait([self._recovering])
        for task in [*self._opening.values(), *self._reviving]:
            task.cancel()
        runners = [*self._awake.values()]
        if runners:
            tasks = [self.world.spawn(each.quiesce(), name="quiesce") for each in runners]
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*(each.close(_draining()) for each in runners))
        self._awake.clear()
        if self._is_started:
            await self.store.close()

    # --- opening and sleeping ---------------------------------------------------------------------------------

    async def _opened(self, session_id: str) -> Runner:
        """Open a session once, however many ask for it at the same time."""
        if not _SESSION_ID.fullmatch(session_id):
            raise UsageError(
                f"a session id has 1 to 128 of letters, digits and '._:-', not {session_id[:40]!r}"
            )
        if self.is_draining:
            raise _draining()
        opening = self._opening.get(session_id)
        if opening is None:
            opening = self.world.spawn(self._open(session_id), name=f"open {session_id}")
            self._opening[session_id] = opening
            opening.add_done_callback(lambda _: self._opening.pop(session_id, None))
        return await asyncio.shield(opening)

    async def _open(self, session_id: str) -> Runner:
        journal = Journal(self.store, session_id, self.world)
        runner = Runner(
            journal,
            self.agent,
            self.world,
            owner=self._owner,
            look_back_s=self._look_back_s,
            on_failed=self._runner_failed,
        )
        await runner.open()
        await self._make_room()
        self._awake[session_id] = runner
        return runner

    async def _make_room(self) -> None:
        surplus = len(self._awake) + 1 - SESSIONS_AWAKE_MAX
        if surplus <= 0:
            return
        idle = [key for key, runner in self._awake.items() if runner.is_idle or runner.has_failed]
        for key in idle[:surplus]:
            runner = self._awake.pop(key)
            await runner.close(DrainingError("this session went to sleep: reconnect to wake it"))

    def _runner_failed(self, runner: Runner, error: MidstreamError) -> None:
        """See to it that a turn does not wait for somebody to ask after its runner failed."""
        if runner.state.is_live and error.retry == "later" and not self._is_stopped:
            task = self.world.spawn(self._revive(runner.session_id), name=f"revive {runner.session_id}")
            self._reviving.add(task)
            task.add_done_callback(self._reviving.discard)

    async def _revive(self, session_id: str) -> None:
        for failures in range(1, REVIVALS_MAX + 1):
            await self.world.sleep(RECONNECT_BACKOFF.wait_s(failures, chance=self.world.chance()))
            try:
                await self.session(session_id)
            except UnavailableError as error:
                _log.warning("not yet revived: %s", error.code, extra={"session": session_id})
            except MidstreamError as error:
                _log.error("not revived: %s", error.message, extra={"session": session_id})
                return
            else:
                return

    async def _recover(self) -> None:
        found = [info.session async for info in self.store.list(live=True)]
        self.recovery.total = len(found)
        turnstile = asyncio.Semaphore(RECOVERIES_MAX)

        async def recover_one(session_id: str) -> None:
            async with turnstile:
                try:
                    await self.session(session_id)
                except LeaseHeldError:
                    _log.info("another process works on it", extra={"session": session_id})
                except MidstreamError as error:
                    self.recovery.failed += 1
                    _log.error(
                        "a session could not be recovered: %s", error.message, extra={"session": session_id}
                    )
                self.recovery.done += 1

        async with asyncio.TaskGroup() as group:
            for session_id in found:
                group.create_task(recover_one(session_id))
        self.recovery.is_done = True
        if found:
            _log.info("recovered %d interrupted sessions, %d failed", len(found), self.recovery.failed)


def _draining() -> DrainingError:
    return DrainingError("this server is shutting down: reconnect to carry on", retry_after_s=1.0)
