"""The live sessions of one process: open, recover, put to sleep, drain, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from midstream.engine.agent import Agent, require_agent
from midstream.engine.agent_resources import AgentResources
from midstream.engine.conversation import answer_of, payload_of, turn_of
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
from midstream.engine.sub_agents import children_at_work
from midstream.engine.suspect_trials import Trials
from midstream.environment import World
from midstream.errors import (
    DrainingError,
    MidstreamError,
    SessionNotFoundError,
)
from midstream.history.messages import UserMessage
from midstream.observability.observers import Observers
from midstream.protocol.events import Event
from midstream.protocol.frames import EventId
from midstream.protocol.server_stream import waiting_on
from midstream.protocol.stream_settings import TAIL_BYTES
from midstream.session.child_names import PART_MARK, root_of
from midstream.session.records import Parent
from midstream.session.retention import Retention
from midstream.session.session import Received, Session, fold
from midstream.session.turn.commands import WhenBusy, WhenBusyName
from midstream.session.turn.states import LOOK_BACK_S, RunningCalls
from midstream.store.contract import SessionInfo, Store
from midstream.store.guard.guarded_store import guard_store
from midstream.store.store_registry import open_store
from midstream.tools.function_tools import ToolSource

HAND_ON_S = 1.0
"""Seconds in which a session that was cut gives itself up; a store that takes longer gives up everything at its end."""
OPENING_S = 2.0
"""Seconds that sessions have to let go which were just being opened when the host is stopped."""

_log = logging.getLogger(__name__)


class HostPhase(Enum):
    """Whether a host takes work."""

    SERVING = "serving"
    """It does, from its start on."""
    DRAINING = "draining"
    """Turns go on; readers and senders get an error with which they reconnect elsewhere."""
    STOPPED = "stopped"


class Host:
    """Run an agent's sessions on a store, in this process: use it as an async context manager, and `ask`.

    Args:
        agent: What answers.
        store: Keeps the journals: a store, or the URL or path of one (see `open_store`). The host opens and closes it.
        world: Clock, chance and tasks; the real ones by default.
        look_back_s: A turn untouched for longer (seconds) is ended as `interrupted` at start-up instead of being
            carried on.
        retention: How long events can be replayed, and sessions are kept.
        tail_bytes_max: Bytes of its newest events that each session keeps in memory while it is awake.
        memory: What awake sessions may hold, and how long an idle one stays awake.
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
        self.agent = require_agent(agent)
        self.world = world or World()
        self.store = store = guard_store(open_store(store, world=self.world), world=self.world)
        self.observers = Observers()
        """Receives every record that is appended here."""
        self.look_back_s = look_back_s
        self.tail_bytes_max = tail_bytes_max
        self._node = self.world.new_id("node")
        self._awake: dict[str, Runner] = {}
        self._sleeping = Sleeping(self._awake, memory, self.world, self._send_to_sleep)
        self._opening: dict[str, asyncio.Task[Runner]] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        """Whose agents answer in child sessions that were not begun yet."""
        self._failed = FailedSessions(self.session, self.world)
        self._caretaker = Caretaker(self, store, self.world, retention)
        self._trials = Trials(self.world, self._node, self._awake, self.wait_for_recovery)
        self._recovery = StartupRecovery(self, store, self._trials, self.world)
        self._deletion = SessionDeletion(self, store)
        self._resources = AgentResources(self.agent, self.world)
        self.locks = Locks(self, store.escrow, self.world) if store.escrow else None
        """Opens sessions for those who show their secrets; None where no client holds a key."""
        self._phase = HostPhase.SERVING
        self._is_started = False

    @property
    def recovery(self) -> Recovery:
        """Progress of start-up recovery."""
        return self._recovery.progress

    @property
    def is_draining(self) -> bool:
        """Whether it refuses new work, since it is about to stop or was stopped."""
        return self._phase is not HostPhase.SERVING

    @property
    def retention(self) -> Retention:
        """How long events can be replayed, and sessions are kept."""
        return self._caretaker.retention

    async def start(self) -> None:
        """Open the store and begin to carry on with interrupted turns; `recovery` has its progress.

        Calling it again is harmless.

        Raises:
            DrainingError: It was stopped. Nothing is open, nor left open.
            ToolDefinitionError: A tool is to write in the store's transactions, and this store has none for tools.
            StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
        """
        if self._is_started:
            return
        self._refuse_when_stopped()
        self._resources.check(self.store)
        self._is_started = True
        try:
            await self.store.open()
            self._refuse_when_stopped()
        except DrainingError:  # stopped meanwhile, when nothing was there to be closed
            self._is_started = False
            await self.store.close()
            raise
        except MidstreamError:
            self._is_started = False  # the next call tries again
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
        """Send a message to a session and return the whole answer, each word once.

        Raises:
            TurnFailedError: The turn ended otherwise: it failed, was stopped or interrupted; see its `status`.
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
        """Send a message to a session, new or existing, and iterate over the turn it opens, to its end.

        The events are those of `Client.send`, with `text`, `transcript` and `replaces`. Iterating starts it. Leaving
        the loop does not stop the turn: it ends here, or in the next process on this store.

        Raises:
            SessionBusyError: A turn runs there and `when_busy` is "refuse", or 100 messages wait. Nothing was sent.
            DrainingError: The host is stopped. An unanswered message continues in the next process.
            MidstreamError: The store cannot be used; see `code`.
        """
        return turn_of(self, session_id, payload_of(message, when_busy))

    def _refuse_when_stopped(self) -> None:
        if self._phase is HostPhase.STOPPED:
            raise _draining()

    async def wait_for_recovery(self) -> None:
        """Wait until start-up recovery has ended (its failures are counted in `recovery`)."""
        await self._recovery.wait()

    async def session(self, session_id: str, *, create: bool = False) -> Runner:
        """Return a session, awake. If a turn of a dead process is open in it, it is being carried on.

        One that another process owns is followed: read here as it grows there, and what is submitted goes to its node.

        Args:
            session_id: 1 to 128 of letters, digits and `._:-`.
            create: Open a session, also under a new id; it exists from its first message on.

        Raises:
            UsageError: The id has another form.
            SessionNotFoundError: No such session, and `create` is false.
            StoreDamagedError: Its journal cannot be read. Nothing was changed.
            InternalError: It stopped on a defect `DEFECTS_MAX` times within minutes. Nothing was changed.
        """
        runner = await self.awaken(session_id)
        is_unknown = runner.newest.position == 0
        if is_unknown and (not create or PART_MARK in session_id):
            raise SessionNotFoundError(f"no session {session_id!r}")
        return runner

    async def begin(self, session_id: str) -> Runner:
        """Return a new session, awake: its id was drawn at random just now, so that no store has a journal of it.

        Nothing is read for it. It exists from its first append on.

        Raises:
            UsageError: The id has another form.
            DrainingError: The host is stopped.
        """
        if session_id in self._awake or session_id in self._opening:
            return await self.session(session_id, create=True)
        self._refuse_opening(session_id)
        return await self._open(session_id, is_new=True)

    async def awaken(self, session_id: str) -> Runner:
        """Return a session, awake, existing or not; see `session`."""
        runner = self._awake.get(session_id)
        if runner is not None and runner.is_stale:
            await runner.refresh()
        runner = self._awake.get(session_id)  # a concurrent call may have opened it anew already
        if runner is None or runner.has_failed:
            runner = await self._open_once(session_id)
        else:
            self._awake[session_id] = self._awake.pop(session_id)  # the last used goes to sleep last
        self._sleeping.touch(session_id)
        return runner

    async def is_held_elsewhere(self, session_id: str) -> bool:
        """Whether another node runs a session, as far as is known here: `forward` then costs less than `submit`."""
        require_session_id(session_id)
        runner = self._awake.get(session_id)
        if self.is_draining or not self.has_peers or (runner is not None and not runner.is_stale):
            return False
        return await self.store.is_held_elsewhere(session_id)

    async def forward(self, session_id: str, received: Received) -> Accepted:
        """Forward a client's command to the node that runs its session; the session is not read here.

        That node checks the command: its stream, its number and its digest. Where no node runs the session any more,
        the next one that sees the command decides it, perhaps this one.

        Raises:
            MidstreamError: It was refused, or the node does not answer; as `Runner.submit`.
        """
        self.refuse_while_deleting(session_id)
        return await self._caretaker.forward(session_id, received)

    async def child(self, session_id: str, path: tuple[str, ...]) -> Runner:
        """Return the session that does the work of a call, awake, with the agent that `path` leads to.

        Raises:
            AgentNotFoundError: There is no such sub-agent any more. Nothing was changed.
            MidstreamError: As `session` does.
        """
        self.agent.sub_agent(path)
        if session_id not in self._awake:
            self._paths[session_id] = path
        return await self.awaken(session_id)

    async def is_wanted(self, parent: Parent) -> bool:
        """Whether the call is still open whose work a child session does; nothing is opened for that."""
        turn = (await self.glance(parent.session)).turn
        return (
            isinstance(turn, RunningCalls)
            and (turn.turn, turn.response_no) == (parent.turn, parent.response)
            and any(call.call.id == parent.call_id and call.is_running for call in turn.calls)
        )

    def count_suspected_deaths(self, runner: Runner) -> int:
        """Return how many deaths a session is suspected of that is about to be claimed here (TURN-84)."""
        return self._trials.count_suspected_deaths(runner)

    def note_left(self, runner: Runner) -> bool:
        """Claim a suspect only when everything that its dead node left was read; return whether it is one."""
        if not self._trials.is_suspect(runner):
            return False
        if self.recovery.is_done:
            self._caretaker.take_up({runner.session_id})
        return True

    def hold(self, runner: Runner) -> None:
        """Resume a suspect when it is its turn."""
        self._trials.hold(runner)

    def note_claimed(self, runner: Runner) -> None:
        """Resume the open turn of a session that was claimed for nothing: no other node is informed of it."""
        if not self.is_draining:
            self._caretaker.take_up({runner.session_id}, once_more=True)

    async def give_up(self, session_id: str) -> None:
        """Release an idle session that another process is to delete; its readers are informed once that is done.

        Raises:
            SessionBusyError: A turn is running. Nothing was changed.
        """
        runner = await self.session(session_id)
        await runner.release()
        if runner.is_idle:  # no reader is here: nothing of what is deleted stays in memory
            self._awake.pop(session_id, None)
            await runner.stop(StopMode.SLEEP)

    def followed_ends(self) -> Mapping[str, int]:
        """Return the sessions that have readers here and may grow elsewhere, with the ends known here."""
        return {
            session_id: runner.newest.position
            for session_id, runner in self._awake.items()
            if runner.readers and runner.may_grow_elsewhere
        }

    @property
    def journals(self) -> FollowedJournals:
        """Readers of journals that are no sessions."""
        return self._caretaker.journals

    async def put_to_sleep(self, session_id: str) -> bool:
        """Let a session and its sub-agents go to sleep if none of them is at work; return whether all sleep.

        Raises:
            MidstreamError: They sleep, and one was not given up: the store is busy.
        """
        family = self.awake_with_children(session_id)
        busy = {*self._opening, *self._failed.reopening}
        if any(root_of(each) == session_id for each in busy):
            return False
        if not all(runner.is_idle or runner.has_failed for runner in family):
            return False
        for runner in family:
            self._awake.pop(runner.session_id, None)
        for runner in family:
            await runner.stop(StopMode.SLEEP)
        return True

    async def tidy(self, session_id: str) -> None:
        """Prune what is due of a session, as long as it can be read.

        Raises:
            UnavailableError: The store is busy or full.
        """
        await self._caretaker.prune(session_id)

    def is_locked(self, info: SessionInfo) -> bool:
        """Whether the open turn of a session waits for its client to bring the secret."""
        return self._caretaker.is_locked(info)

    async def set_sources(self, session_id: str, sources: Sequence[ToolSource]) -> None:
        """Give a session sources of tools of its own, from the next time that it is opened in this process.

        They are closed when others take their place, or none, and at the end of the host.
        """
        await self._resources.set_sources(session_id, sources)

    def carry_on(self, session_id: str) -> None:
        """Resume the work of a session, and of its sub-agents, that waited for its client's secret."""
        left = self._caretaker.note_unlocked(session_id)
        left.update(each.session_id for each in self.awake_with_children(session_id) if each.is_following)
        self._caretaker.take_up(left, once_more=True)

    def note_pruned(self, session_id: str, last: EventId) -> None:
        """Inform the readers of an awake session where its events begin now (STREAM-62)."""
        runner = self._awake.get(session_id)
        if runner is not None and runner.events.pruned_to.position < last.position:
            runner.events.pruned_to = last

    def awake(self, session_id: str) -> Runner | None:
        """Return a session if it is awake."""
        return self._awake.get(session_id)

    def is_live(self, session_id: str) -> bool:
        """Whether a turn is open in a session that is awake here."""
        runner = self._awake.get(session_id)
        return runner is not None and runner.state.is_live

    def children_wait_for(self, session_id: str) -> list[str]:
        """Return what each sub-agent that works for a session's turn waits for, see `waiting_on`: `tool` if unknown."""
        parent = self._awake.get(session_id)
        names = [] if parent is None else children_at_work(session_id, parent.state)
        return [self._waits_for(name) for name in names]

    def _waits_for(self, session_id: str) -> str:
        runner = self._awake.get(session_id)
        return "tool" if runner is None else self.waits_for(runner)

    def waits_for(self, runner: Runner) -> str:
        """Return what an awake session waits for, see `waiting_on`; `agent` where its turn is held (TURN-90)."""
        if runner.waits_for_agent:
            return "agent"
        return waiting_on(runner.state, self.children_wait_for(runner.session_id))

    @property
    def has_peers(self) -> bool:
        """Whether other living processes serve this store."""
        return self._caretaker.peers > 0

    @property
    def memory_held(self) -> int:
        """Bytes that the awake sessions hold, estimated from their journals."""
        return self._sleeping.bytes_held

    @property
    def sessions_awake(self) -> int:
        """How many sessions are in memory."""
        return len(self._awake)

    @property
    def sessions_followed(self) -> int:
        """How many sessions of other nodes are followed here for readers."""
        return sum(bool(runner.readers) and runner.is_stale for runner in self._awake.values())

    @property
    def leases(self) -> int:
        """How many sessions are run here."""
        return sum(runner.has_lease for runner in self._awake.values())

    @property
    def peers(self) -> int:
        """How many other living nodes serve this store."""
        return self._caretaker.peers

    @property
    def turns_running(self) -> int:
        """In how many of them a turn is open, here or at another node."""
        return sum(runner.state.is_live for runner in self._awake.values())

    async def glance(self, session_id: str) -> Session:
        """Return what is known of a session without waking it; an empty one where there is none."""
        awake = self._awake.get(session_id)
        return awake.state if awake is not None else await self._peek(session_id)

    async def delete(self, session_id: str) -> None:
        """Remove an idle session and all its records for good, and the sessions of its sub-agents with it.

        Raises:
            SessionNotFoundError: No such session.
            SessionBusyError: A turn is running, in it or in a sub-agent. Nothing was changed.
            LeaseHeldError: It is locked here, and another process works on it. Nothing was changed.
            UnavailableError: It is being deleted here already; or the process that owns it does not answer, or
                another one was faster. Nothing was changed.
        """
        await self._deletion.delete(session_id)
        self._caretaker.note_unlocked(session_id)

    def refuse_while_deleting(self, session_id: str) -> None:
        """Let nothing begin in a family of sessions of which one is being deleted here.

        Raises:
            UnavailableError: One is.
        """
        self._deletion.refuse_while_running(session_id)

    async def close(self, session_id: str, error: MidstreamError) -> None:
        """End a session and its sub-agents in this process; their readers get `error`."""
        for runner in self.awake_with_children(session_id):
            del self._awake[runner.session_id]
            await runner.stop(StopMode.CLOSE, error)

    async def release_idle(self, runner: Runner) -> None:
        """Release a session of another node that has no reader here."""
        if runner.is_idle:
            self._awake.pop(runner.session_id, None)
            await runner.stop(StopMode.CLOSE, _draining())

    def awake_with_children(self, session_id: str) -> list[Runner]:
        """Return the runner of a session, where it is awake, and then those of its sub-agents."""
        mark = f"{session_id}{PART_MARK}"
        own = [self._awake[session_id]] if session_id in self._awake else []
        return own + [runner for name, runner in self._awake.items() if name.startswith(mark)]

    def drain(self) -> None:
        """Begin to drain: from now on readers and senders get an error with which they reconnect. Turns go on until
        `stop`.
        """
        if self.is_draining:
            return
        self._phase = HostPhase.DRAINING
        for runner in self._awake.values():
            runner.part(_draining())

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """Drain, let running tools finish for up to `grace_s` seconds, stop the rest, close the store.

        What is cut is in the journal as owed or in doubt: the next process carries on. Calling it again is
        harmless; it always ends within the grace and a few seconds.
        """
        if self._phase is HostPhase.STOPPED:
            return
        self.drain()
        self._phase = HostPhase.STOPPED
        await self._trials.stop()
        await self._sleeping.stop()
        await self._recovery.stop()
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        if pending := [*opening, *self._failed.stop()]:
            await asyncio.wait(pending, timeout=OPENING_S)
        await self._hand_on(grace_s)
        await self._caretaker.stop()
        if self.locks is not None:
            await self.locks.stop()
        self._awake.clear()
        if self._is_started:
            # First: tool servers may take longer than the process manager waits.
            await self.store.close()
        await self._resources.close()

    async def _hand_on(self, grace_s: float) -> None:
        """Give each session up as soon as nothing runs in it, and all of them when the grace is over."""
        # With a peer the service goes on meanwhile, so that a response that is being written may be written to its end;
        # without one everybody waits for the next start, which had better come soon.
        finishing = StopMode.FINISH_RESPONSE if self.has_peers else StopMode.FINISH_TOOLS

        until = asyncio.get_running_loop().time() + grace_s + HAND_ON_S

        async def hand_on(runner: Runner) -> None:
            try:
                async with asyncio.timeout(grace_s):
                    await runner.stop(finishing)
            except TimeoutError:
                pass
            try:
                # A busy store has what is left of the grace: a session that stays here counts as that of a dead node.
                async with asyncio.timeout_at(until):
                    await runner.stop(StopMode.HAND_OVER)
            except (TimeoutError, MidstreamError):  # given up with all others when the store is closed
                _log.warning("not moved to another node", extra={"session": runner.session_id})

        if self._awake:
            _log.info("releasing %d sessions, with %d peers", len(self._awake), self._caretaker.peers)
        tasks = [
            self.world.spawn(hand_on(runner), name=f"hand on {runner.session_id}")
            for runner in self._awake.values()
        ]
        if tasks:
            await asyncio.wait(tasks)

    # --- opening and sleeping ---------------------------------------------------------------------------------

    async def _open_once(self, session_id: str) -> Runner:
        """Open a session once, however many ask for it at the same time."""
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
        except BaseException as error:  # it may have claimed the session, and begun to work
            is_given_up = isinstance(error, asyncio.CancelledError) and journal.hides_no_death
            await runner.stop(StopMode.HAND_OVER if is_given_up else StopMode.CLOSE, _draining())
            raise
        surplus = self._sleeping.surplus()
        self._awake[session_id] = runner
        self._sleeping.touch(session_id)
        await self._send_to_sleep(surplus)
        return runner

    async def _send_to_sleep(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            runner = self._awake.get(session_id)
            if runner is None or not (runner.is_idle or runner.has_failed):
                continue  # it was used while another one was being released
            del self._awake[session_id]
            try:
                await runner.stop(StopMode.SLEEP)
            except MidstreamError as error:  # it sleeps, and stays ours until it wakes or this process ends
                _log.warning("not released: %s", error.code, extra={"session": runner.session_id})

    def _agent_of(self, session_id: str, state: Session) -> Agent:
        """Return who answers in a session: the host's agent, or for a child the one that its call named."""
        path = self._paths.pop(session_id, ())
        agent = self.agent.sub_agent(state.parent.path if state.parent else path)
        sources = self._resources.of_sessions.get(session_id)
        return agent.with_tools(*sources) if sources else agent

    async def _peek(self, session_id: str) -> Session:
        """Fold a session as it is in the store, without waking it."""
        return fold(await Journal(self.store, session_id, self.world).load())


def _draining() -> DrainingError:
    return DrainingError("this server is shutting down; reconnect to continue", retry_after_s=1.0)
