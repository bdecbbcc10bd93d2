"""The live sessions of one process: open, recover, put to sleep, drain, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from midstream.engine.agent import Agent, require_agent
from midstream.engine.agent_resources import AgentResources
from midstream.engine.awake_sessions import AwakeSessions
from midstream.engine.conversation import answer_of, payload_of, turn_of
from midstream.engine.crash_suspect_trials import Trials
from midstream.engine.escrow_locks import Locks
from midstream.engine.failed_sessions import FailedSessions
from midstream.engine.followed_journals import FollowedJournals
from midstream.engine.forwarding import Accepted
from midstream.engine.journal import Journal, require_session_id
from midstream.engine.other_nodes import Caretaker
from midstream.engine.recovery import Recovery, StartupRecovery
from midstream.engine.runner import Runner, StopMode
from midstream.engine.session_deletion import SessionDeletion
from midstream.engine.sleeping import MemoryLimits, Sleeping
from midstream.environment import World
from midstream.errors import (
    DrainingError,
    JournalMovedError,
    MidstreamError,
    SessionNotFoundError,
)
from midstream.history.messages import UserMessage
from midstream.number_checks import require_count, require_seconds
from midstream.observability.observers import Observers
from midstream.protocol.events import Event
from midstream.protocol.stream_settings import LOOK_BACK_S_MAX, TAIL_BYTES
from midstream.session.child_names import PART_MARK, root_of
from midstream.session.records import Parent
from midstream.session.retention import Retention
from midstream.session.session import Received, Session, fold
from midstream.session.turn.commands import WhenBusy, WhenBusyName
from midstream.session.turn.states import LOOK_BACK_S, RunningCalls
from midstream.store.contract import SessionInfo, Store
from midstream.store.guard.guarded_store import guard_store, open_guarded
from midstream.store.store_registry import open_store
from midstream.tools.function_tools import ToolSource

RELEASE_WITHIN_S = 1.0
"""Seconds for a cut session to be released. If the store takes longer, all sessions are released when it is closed."""
OPENING_S = 2.0
"""Seconds for sessions that are being opened while the host stops."""
CLAIM_S = 2.0
"""Seconds that a reader waits while this process claims the session. If an outage of the store delays the claim, the
reader gets the last known state."""

_log = logging.getLogger(__name__)


class HostPhase(Enum):
    """The phases of a host."""

    SERVING = "serving"
    """Accepts work; begins with the start."""
    DRAINING = "draining"
    """Turns continue. Readers and senders get an error, and reconnect to another server."""
    STOPPED = "stopped"


class Host:
    """Run an agent's sessions on a store, in this process. A host is an async context manager.

    Args:
        agent: The agent of the sessions.
        store: The store of the journals, or its URL or path (see `open_store`). The host opens and closes it.
        world: Clock, chance and tasks; the real ones by default.
        look_back_s: At start-up, a turn without changes for more seconds ends as `interrupted`.
        retention: How long events can be replayed, and sessions are kept.
        tail_bytes_max: Bytes of its newest events that each session keeps in memory while it is awake.
        memory: Limits for the memory of awake sessions, and for the time that an idle session stays awake.
    """

    def __init__(
        self,
        agent: Agent,
        store: Store | str | Path,
        *,
        world: World | None = None,
        look_back_s: float = LOOK_BACK_S,
        retention: Retention = Retention(),
        tail_bytes_max: int = TAIL_BYTES,
        memory: MemoryLimits = MemoryLimits(),
    ) -> None:
        require_seconds("look_back_s", look_back_s, most=LOOK_BACK_S_MAX)
        require_count("tail_bytes_max", tail_bytes_max)
        self.agent = require_agent(agent)
        self.world = world or World()
        self.store = store = guard_store(open_store(store, world=self.world), world=self.world)
        self.observers = Observers()
        """Receives every record that this process appends."""
        self.look_back_s = look_back_s
        self.tail_bytes_max = tail_bytes_max
        self._node = self.world.new_id("node")
        self.awake = AwakeSessions()
        """The sessions in memory."""
        self._sleeping = Sleeping(self.awake.runners, memory, self.world, self._send_to_sleep)
        self._opening: dict[str, asyncio.Task[Runner]] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        """The paths of the agents of child sessions that have not begun."""
        self._failed = FailedSessions(self.session, self.world)
        self._caretaker = Caretaker(self, store, self.world, retention)
        self._trials = Trials(self.world, self._node, self.awake.runners, self.wait_for_recovery)
        self._recovery = StartupRecovery(self, store, self._trials, self.world, self._send_to_sleep)
        self._deletion = SessionDeletion(self, store)
        self._resources = AgentResources(self.agent, self.world)
        self.locks = Locks(self, store.escrow, self.world) if store.escrow else None
        """Opens sessions for clients with their secrets; None without escrow."""
        self._phase = HostPhase.SERVING
        self._is_started = False

    @property
    def recovery(self) -> Recovery:
        """Progress of start-up recovery."""
        return self._recovery.progress

    @property
    def is_draining(self) -> bool:
        """Whether the host refuses new work, because it stops or was stopped."""
        return self._phase is not HostPhase.SERVING

    @property
    def retention(self) -> Retention:
        """How long events can be replayed, and sessions are kept."""
        return self._caretaker.retention

    async def start(self) -> None:
        """Open the store and begin to resume interrupted turns; `recovery` has the progress.

        A second call has no effect.

        Raises:
            DrainingError: The host was stopped. Nothing stays open.
            ToolDefinitionError: A tool needs the store's transactions, and this store has none for tools.
            StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
        """
        if self._is_started:
            return
        self._refuse_when_stopped()
        self._resources.check(self.store)
        self._is_started = True
        try:
            await open_guarded(self.store)
            self._refuse_when_stopped()  # it may have been stopped before there was anything to close
        except BaseException:  # a retry is possible, also after a cancellation
            self._is_started = False
            await self.store.close()
            raise
        self._resources.begin_use(self.store)
        self._recovery.start()
        self._caretaker.start()
        self._sleeping.start()
        if self.locks is not None:
            self.locks.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def ask(
        self,
        session_id: str,
        message: str | UserMessage,
        *,
        when_busy: WhenBusy | WhenBusyName = WhenBusy.QUEUE,
    ) -> str:
        """Send a message to a session and return the whole answer.

        Raises:
            TurnFailedError: The turn failed, was stopped or was interrupted; see its `status`.
            MidstreamError: As `send` does.
        """
        return await answer_of(session_id, self.send(session_id, message, when_busy=when_busy))

    def send(
        self,
        session_id: str,
        message: str | UserMessage,
        *,
        when_busy: WhenBusy | WhenBusyName = WhenBusy.QUEUE,
    ) -> AsyncGenerator[Event, None]:
        """Send a message to a session, new or existing, and yield the events of the turn, to its end.

        The events are those of `Client.send`, with `text`, `transcript` and `replaces`. The message is sent when the
        iteration starts. Leaving the loop does not stop the turn: it ends here, or in the next process on this store.

        Raises:
            SessionBusyError: A turn is running and `when_busy` is "refuse", or 100 messages wait. Nothing was sent.
            DrainingError: The host is stopped. An unanswered message continues in the next process.
            MidstreamError: The store cannot be used; see `code`.
        """
        return turn_of(self, session_id, payload_of(message, when_busy))

    def _refuse_when_stopped(self) -> None:
        if self._phase is HostPhase.STOPPED:
            raise _draining()

    async def wait_for_recovery(self) -> None:
        """Wait until start-up recovery has ended; failures are counted in `recovery`."""
        await self._recovery.wait()

    async def session(self, session_id: str, *, create: bool = False) -> Runner:
        """Return a session, awake. An open turn of a dead process is resumed.

        A session of another node is followed: its records are read as they are appended, and commands are forwarded.

        Args:
            session_id: 1 to 128 of letters, digits and `._:-`.
            create: Open the session also if it is new; it exists from its first message on.

        Raises:
            UsageError: The id is not valid.
            SessionNotFoundError: There is no such session, and `create` is false.
            StoreDamagedError: The journal cannot be read. Nothing was changed.
            InternalError: The session stopped on a defect `DEFECTS_MAX` times within minutes. Nothing was changed.
        """
        runner = await self.awaken(session_id)
        is_unknown = runner.newest.position == 0
        if is_unknown and (not create or PART_MARK in session_id):
            raise SessionNotFoundError(f"no session {session_id!r}")
        return runner

    async def begin(self, session_id: str) -> Runner:
        """Return a new session, awake. Its id must be new and random.

        Nothing of the session is read from the store. The session exists from its first append on.

        Raises:
            UsageError: The id is not valid.
            DrainingError: The host is stopped.
        """
        if session_id in self.awake.runners or session_id in self._opening:
            return await self.session(session_id, create=True)
        self._refuse_opening(session_id)
        return await self._open(session_id, is_new=True)

    async def awaken(self, session_id: str) -> Runner:
        """Return a session, awake, existing or not; see `session`."""
        if (opening := self._opening.get(session_id)) is not None:  # its state may be older than this call
            with suppress(MidstreamError):
                await asyncio.shield(opening)
        runner = self.awake.get(session_id)
        if runner is not None:
            await self._refresh(runner)
        runner = self.awake.get(session_id)  # a concurrent call may have reopened it
        if runner is None or runner.has_failed:
            runner = await self._open_once(session_id)
        else:
            # The last used session goes to sleep last.
            self.awake.runners[session_id] = self.awake.runners.pop(session_id)
        self._sleeping.touch(session_id)
        return runner

    async def is_held_elsewhere(self, session_id: str) -> bool:
        """Whether another node probably runs a session: `forward` then costs less than `submit`."""
        require_session_id(session_id)
        runner = self.awake.get(session_id)
        if self.is_draining or not self.has_peers or (runner is not None and not runner.is_stale):
            return False
        return await self.store.is_held_elsewhere(session_id)

    async def forward(self, session_id: str, received: Received) -> Accepted:
        """Forward a client's command to the node that runs its session; the session is not read here.

        The node checks the command's stream, number and digest. If no node runs the session any more, the next node
        that claims it decides the command.

        Raises:
            MidstreamError: The command was refused, or the node does not answer; as `Runner.submit`.
        """
        self.refuse_while_deleting(session_id)
        return await self._caretaker.forward(session_id, received)

    async def child(self, session_id: str, path: tuple[str, ...]) -> Runner:
        """Return the child session of a call, awake, with the agent at `path`.

        Raises:
            AgentNotFoundError: There is no such sub-agent. Nothing was changed.
            MidstreamError: As `session` does.
        """
        self.agent.sub_agent(path)
        if session_id not in self.awake.runners:
            self._paths[session_id] = path
        return await self.awaken(session_id)

    async def is_child_awaited(self, parent: Parent) -> bool:
        """Whether the call of a child session is still running. Neither session is woken for this check."""
        turn = (await self.glance(parent.session)).turn
        return (
            isinstance(turn, RunningCalls)
            and (turn.turn, turn.response_no) == (parent.turn, parent.response)
            and any(call.call.id == parent.call_id and call.is_running for call in turn.calls)
        )

    def count_suspected_deaths(self, runner: Runner) -> int:
        """Return the number of deaths that a session is suspected of, before it is claimed (TURN-84)."""
        return self._trials.count_suspected_deaths(runner)

    def defer_suspect(self, runner: Runner) -> bool:
        """Return whether a session is a suspect, which is claimed after all sessions of its dead node were read."""
        if not self._trials.is_suspect(runner):
            return False
        if self.recovery.is_done:
            self._caretaker.take_up({runner.session_id})
        return True

    def hold(self, runner: Runner) -> None:
        """Begin the trial of a suspect when its turn comes."""
        self._trials.hold(runner)

    def note_claimed(self, runner: Runner) -> None:
        """Resume the open turn of a session that was claimed for a refused command: no other node is notified of it."""
        if not self.is_draining:
            self._caretaker.take_up({runner.session_id}, once_more=True)

    async def give_up(self, session_id: str) -> None:
        """Release an idle session so that another process can delete it; readers are informed after the deletion.

        Raises:
            SessionBusyError: A turn is running. Nothing was changed.
        """
        runner = await self.session(session_id)
        await runner.release()
        if runner.is_idle:  # without readers, nothing of the session stays in memory
            self.awake.runners.pop(session_id, None)
            await runner.stop(StopMode.SLEEP)

    @property
    def journals(self) -> FollowedJournals:
        """Journals without a session, and their readers."""
        return self._caretaker.journals

    async def put_to_sleep(self, session_id: str) -> bool:
        """Put a session and its sub-agents to sleep if all of them are idle; return whether all sleep.

        Raises:
            MidstreamError: They sleep, but one was not released: the store is busy.
        """
        family = self.awake.family_of(session_id)
        busy = {*self._opening, *self._failed.reopening}
        if any(root_of(each) == session_id for each in busy):
            return False
        if not all(runner.is_idle or runner.has_failed for runner in family):
            return False
        for runner in family:
            self.awake.runners.pop(runner.session_id, None)
        await self._stop_all(family, StopMode.SLEEP)
        return True

    async def tidy(self, session_id: str) -> None:
        """Prune a session where retention requires it and the session can be read.

        Raises:
            UnavailableError: The store is busy or full.
        """
        await self._caretaker.prune(session_id)

    def is_locked(self, info: SessionInfo) -> bool:
        """Whether the open turn of a session waits for its client's secret."""
        return self._caretaker.is_locked(info)

    async def set_sources(self, session_id: str, sources: Sequence[ToolSource]) -> None:
        """Set the tool sources of one session; they apply from its next opening in this process.

        They are closed when they are replaced, and when the host stops.
        """
        await self._resources.set_sources(session_id, sources)

    def resume_unlocked(self, session_id: str) -> None:
        """Resume the work of a session and its sub-agents that waited for the client's secret."""
        left = self._caretaker.note_unlocked(session_id)
        left.update(each.session_id for each in self.awake.family_of(session_id) if each.is_following)
        self._caretaker.take_up(left, once_more=True)

    @property
    def has_peers(self) -> bool:
        """Whether other living processes serve this store."""
        return self._caretaker.peers > 0

    @property
    def memory_held(self) -> int:
        """Bytes that the awake sessions use, estimated from their journals."""
        return self._sleeping.bytes_held

    @property
    def peers(self) -> int:
        """Number of other living nodes on this store."""
        return self._caretaker.peers

    async def glance(self, session_id: str) -> Session:
        """Return the state of a session without waking it; an empty state if there is no such session."""
        runner = self.awake.get(session_id)
        if runner is not None:
            await self._refresh(runner)
        return await self._peek(session_id) if runner is None or runner.has_failed else runner.state

    async def delete(self, session_id: str) -> None:
        """Delete an idle session with all its records, and the sessions of its sub-agents.

        Raises:
            SessionNotFoundError: There is no such session.
            SessionBusyError: A turn of the session or of a sub-agent is running. Nothing was changed.
            LeaseHeldError: The session is locked here, and another process has it. Nothing was changed.
            UnavailableError: The session is already being deleted, its node does not answer, or another node was
                faster. Nothing was changed.
        """
        await self._deletion.delete(session_id)
        self._caretaker.note_unlocked(session_id)

    def refuse_while_deleting(self, session_id: str) -> None:
        """Refuse work in a session while it, its parent or a sub-agent's session is being deleted.

        Raises:
            UnavailableError: One of them is being deleted.
        """
        self._deletion.refuse_while_running(session_id)

    async def close(self, session_id: str, error: MidstreamError) -> None:
        """Close a session and its sub-agents in this process; their readers get `error`."""
        family = self.awake.family_of(session_id)
        for runner in family:
            del self.awake.runners[runner.session_id]
        await self._stop_all(family, StopMode.CLOSE, error)

    async def _stop_all(
        self, runners: Iterable[Runner], mode: StopMode, error: MidstreamError | None = None
    ) -> None:
        """Stop sessions: all of them, also if one is not released or the caller is cancelled.

        Raises:
            MidstreamError: The first error of them.
        """
        tasks = [
            self.world.spawn(runner.stop(mode, error), name=f"stop {runner.session_id}") for runner in runners
        ]
        for outcome in await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True)):
            if isinstance(outcome, BaseException):
                raise outcome

    def drain(self) -> None:
        """Begin to drain: readers and senders get an error, and reconnect elsewhere. Turns continue until `stop`."""
        if self.is_draining:
            return
        self._phase = HostPhase.DRAINING
        for runner in self.awake.runners.values():
            runner.part(_draining())

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """Drain, let running tools finish for up to `grace_s` seconds, stop the rest, close the store.

        Work that is cut is pending or in doubt in the journal, and the next process resumes it. A second call has no
        effect. The stop takes at most the grace and a few seconds. It continues if its caller is cancelled.

        Raises:
            UsageError: `grace_s` is not 0 seconds to 366 days. The host continues.
        """
        require_seconds("grace_s", grace_s)
        if self._phase is HostPhase.STOPPED:
            return
        self.drain()
        self._phase = HostPhase.STOPPED
        await self.world.finish(self._stop(grace_s), name="stop of the host")

    async def _stop(self, grace_s: float) -> None:
        await self._trials.stop()
        await self._sleeping.stop()
        await self._recovery.stop()
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        if pending := [*opening, *self._failed.stop()]:
            await asyncio.wait(pending, timeout=OPENING_S)
        await self._release_all(grace_s)
        await self._caretaker.stop()
        if self.locks is not None:
            await self.locks.stop()
        self.awake.runners.clear()
        if self._is_started:
            # First, because tool servers may take longer than the process manager waits.
            await self.store.close()
        await self._resources.close()

    async def _release_all(self, grace_s: float) -> None:
        """Release each session once nothing runs in it, and all remaining ones at the end of the grace."""
        # With a peer the service continues meanwhile, so responses may be completed. Without one, all clients wait for
        # the next start, so responses are cut.
        finishing = StopMode.FINISH_RESPONSE if self.has_peers else StopMode.FINISH_TOOLS

        until = asyncio.get_running_loop().time() + grace_s + RELEASE_WITHIN_S

        async def release_one(runner: Runner) -> None:
            try:
                async with asyncio.timeout(grace_s):
                    await runner.stop(finishing)
            except TimeoutError:
                pass
            try:
                # With a busy store, only the rest of the grace remains. A session that is not released counts as one of
                # a dead node.
                async with asyncio.timeout_at(until):
                    await runner.stop(StopMode.HAND_OVER)
            except (TimeoutError, MidstreamError):  # released with all others when the store is closed
                _log.warning("not moved to another node", extra={"session": runner.session_id})

        if self.awake.runners:
            _log.info("releasing %d sessions, with %d peers", len(self.awake), self._caretaker.peers)
        tasks = [
            self.world.spawn(release_one(runner), name=f"hand on {runner.session_id}")
            for runner in self.awake.runners.values()
        ]
        if tasks:
            await asyncio.wait(tasks)

    # --- opening and sleeping ---------------------------------------------------------------------------------

    async def _refresh(self, runner: Runner) -> None:
        """Read the records of other nodes. During a claim, `Runner.refresh` waits for its end."""
        if runner.may_grow_elsewhere:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLAIM_S):
                    await runner.refresh()

    async def _open_once(self, session_id: str) -> Runner:
        """Open a session once for all concurrent requests."""
        self._refuse_opening(session_id)
        opening = self._opening.get(session_id)
        if opening is None:
            opening = self.world.spawn(self._open(session_id), name=f"open {session_id}")
            self._opening[session_id] = opening
            opening.add_done_callback(lambda _: self._opening.pop(session_id, None))
        return await asyncio.shield(opening)

    def _refuse_opening(self, session_id: str) -> None:
        require_session_id(session_id)
        if self.is_draining:
            raise _draining()

    async def _open(self, session_id: str, *, is_new: bool = False) -> Runner:
        self._failed.check(session_id)
        tail = self.tail_bytes_max
        journal = Journal(
            self.store, session_id, self.world, self.observers, tail_bytes_max=tail, is_new=is_new
        )
        runner = Runner(
            journal,
            partial(self._agent_of, session_id),
            self.world,
            node=self._node,
            family=self,
            look_back_s=self.look_back_s,
            on_failed=self._failed.add,
            on_followed=self._caretaker.refresh_followed,
        )
        try:
            await runner.open()
        except BaseException as error:  # the session may be claimed already, and its work begun
            is_given_up = isinstance(error, asyncio.CancelledError) and journal.hides_no_death
            await runner.stop(StopMode.HAND_OVER if is_given_up else StopMode.CLOSE, _draining())
            if isinstance(error, JournalMovedError):  # it was deleted meanwhile
                return await self._open(session_id)
            raise
        surplus = self._sleeping.surplus()
        self.awake.runners[session_id] = runner
        self._sleeping.touch(session_id)
        await self._send_to_sleep(surplus)
        return runner

    async def _send_to_sleep(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            runner = self.awake.get(session_id)
            if runner is None or not (runner.is_idle or runner.has_failed):
                continue  # it was used while another session was being released
            del self.awake.runners[session_id]
            try:
                await runner.stop(StopMode.SLEEP)
            except MidstreamError as error:
                # It sleeps, and stays claimed until it wakes or this process ends.
                _log.warning("not released: %s", error.code, extra={"session": runner.session_id})

    def _agent_of(self, session_id: str, state: Session) -> Agent:
        """Return the agent of a session: the host's agent, or for a child session the sub-agent of its call."""
        path = self._paths.pop(session_id, ())
        agent = self.agent.sub_agent(state.parent.path if state.parent else path)
        sources = self._resources.of_sessions.get(session_id)
        return agent.with_tools(*sources) if sources else agent

    async def _peek(self, session_id: str) -> Session:
        """Fold a session from the store, without waking it."""
        return fold(await Journal(self.store, session_id, self.world).load())


def _draining() -> DrainingError:
    return DrainingError("this server is shutting down; reconnect to continue", retry_after_s=1.0)
