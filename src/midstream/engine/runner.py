"""One live session: journal -> fold -> pending work -> execute -> append.

Commands come through its mailbox, one at a time. The runner appends what `session` decides, folds it, answers the
senders, and lets `session_work` start what is missing and cancel what is not pending any more. A failing store ends the
runner like a crash; the next runner continues.

    FOLLOWING ──first append──▶ RUNNING
        ▲            │             │
        └──release───┼─────────────┤
                     └──── stop or failure ──▶ ENDED

Order of effects: append, then acknowledge; append, then publish; append the intent, then act.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from functools import partial
from typing import Protocol

from midstream.engine import agent_mismatch, session_work
from midstream.engine.agent import Agent
from midstream.engine.defect_limit import stop_error
from midstream.engine.executors import Executor
from midstream.engine.forwarding import GIVE_UP, Forwarder
from midstream.engine.journal import Journal
from midstream.engine.listing import batch_of, without_starts
from midstream.engine.mailbox import Effect, Envelope, Mailbox, is_mere_result, is_model_output, merge
from midstream.engine.outages import Outages
from midstream.engine.session_work import Drain, SessionWork
from midstream.engine.sub_agents import ChildSessions
from midstream.environment import World
from midstream.errors import (
    AgentMismatchError,
    DrainingError,
    LeaseHeldError,
    MidstreamError,
    SessionBusyError,
    StoreDamagedError,
    UnavailableError,
)
from midstream.protocol.frames import EventId
from midstream.session import session as sessions
from midstream.session.blobs import Blob, split_large_results
from midstream.session.records import EpochStarted, Parent, Record, Sync, encode
from midstream.session.session import Received, Session, ToolsFound
from midstream.session.turn.commands import Cancel, Command, ModelStreamed, Recover, Refused, Resume
from midstream.session.turn.states import LOOK_BACK_S, SUSPECTED_MAX
from midstream.store.contract import Attempt, Batch, StoredRecord

_log = logging.getLogger(__name__)


class Phase(Enum):
    """The relation of this process to a session's journal."""

    FOLLOWING = "following"
    """This process has appended nothing. Another node may append; the first append here claims the session."""
    RUNNING = "running"
    """This process's epoch is in the journal."""
    ENDED = "ended"
    """The runner was stopped, or has failed; a new runner may continue."""


class StopMode(Enum):
    """How a runner is stopped."""

    FINISH_RESPONSE = "finish response"
    """Start nothing new. Wait for all running work, including the model's response."""
    FINISH_TOOLS = "finish tools"
    """Start nothing new, cut model calls, and wait for running tools; their outcomes are journaled."""
    SLEEP = "sleep"
    """Release an idle session: its memory and its lease."""
    HAND_OVER = "hand over"
    """Release the session for another node to continue. Running work is cut, and in doubt there."""
    CLOSE = "close"
    """Stop at once and keep the lease. Running work is in doubt for the next runner."""


class Family(ChildSessions, Protocol):
    """The parent and the child sessions of a session, and its trials: the host."""

    async def is_child_awaited(self, parent: Parent) -> bool:
        """Whether the call of a child session is still running."""

    def refuse_while_deleting(self, session_id: str) -> None:
        """Refuse all commands while a session, its parent or a sub-agent's session is being deleted.

        Raises:
            UnavailableError: One of them is being deleted.
        """

    def count_suspected_deaths(self, runner: Runner) -> int:
        """Return the number of deaths that a session is suspected of, before it is claimed (TURN-84)."""

    def defer_suspect(self, runner: Runner) -> bool:
        """Return whether a session is a suspect, which the host claims later."""

    def hold(self, runner: Runner) -> None:
        """Call `Runner.resume` when the trial of this suspect begins."""

    def note_claimed(self, runner: Runner) -> None:
        """Resume the open turn of a session that was claimed for a refused command, if there is one."""


class Runner:
    """A session that is awake in this process."""

    def __init__(
        self,
        journal: Journal,
        agent: Callable[[Session], Agent],
        world: World,
        *,
        node: str,
        family: Family,
        look_back_s: float = LOOK_BACK_S,
        on_failed: Callable[[Runner, MidstreamError], None] = lambda _runner, _error: None,
        on_followed: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = Session()
        self.readers = 0
        """Number of connections that follow this session. The host keeps it awake while there are any."""
        self.journal = journal
        self._agent_of = agent
        self._family = family
        self._world = world
        self._node = node
        self._look_back_s = look_back_s
        self._on_failed = on_failed
        self._on_followed = on_followed
        self._phase = Phase.FOLLOWING
        self._mailbox = Mailbox(world, self._append_output_at_once)
        self._work = SessionWork(journal, self._mailbox, world, self._fail)
        self._forwarder = Forwarder(lambda _, body: journal.forward(body), world)
        self._outages = Outages(world, self.session_id, self._mailbox.refuse_clients)
        self._task: asyncio.Task[None] | None = None
        self._draining_error: MidstreamError | None = None
        """The error for new commands of clients while this process drains."""
        self._unclaimed = asyncio.Lock()
        """Held in phase FOLLOWING while records of other nodes are folded."""

    # --- what connections use ---------------------------------------------------------------------------------

    @property
    def session_id(self) -> str:
        """The name of the session."""
        return self.journal.session_id

    @property
    def newest(self) -> EventId:
        """The newest event of the journal."""
        return self.journal.newest

    async def submit(self, command: Command | Received) -> int:
        """Decide a command, here or on the node with the lease; return the journal's end once its records are durable.

        Raises:
            MidstreamError: The command was refused and nothing was written, or the session failed: outcome unknown.
        """
        if self._draining_error is not None:
            raise self._draining_error.again()
        try:
            return await self.decide(command)
        except LeaseHeldError:
            accepted = await self._forwarder.forward(self.session_id, command, self.state)
            if accepted is None:
                return self.newest.position
            await self.refresh()
            return accepted.position

    @property
    def events(self) -> Journal:
        """The session's journal, for reading."""
        return self.journal

    async def read(self, *, after: int, limit: int) -> Sequence[StoredRecord]:
        """Return up to `limit` records after position `after`, as `Journal.read` does; empty at the end."""
        return await self.journal.read(after=after, limit=limit)

    async def wait(self, after: int) -> None:
        """Wait for a record after `after`. Raises the error that ended the session here (draining, lease lost, ...)."""
        await self.journal.wait(after)

    def attach(self) -> None:
        """Count one more reader."""
        self.readers += 1
        if self._phase is Phase.FOLLOWING:
            self._on_followed()

    def detach(self) -> None:
        """Remove one reader. The turn continues without it: a disconnect never cancels."""
        self.readers -= 1

    @property
    def outage(self) -> MidstreamError | None:
        """The store's error, if no append succeeded for some seconds and it is still retried; None otherwise."""
        return self._outages.error

    @property
    def is_idle(self) -> bool:
        """Whether this session may go to sleep."""
        if self.readers or self._forwarder.is_waiting:
            return False
        if self.state.rests_on_people:  # the answer wakes the session
            return self._mailbox.is_idle
        return not self._is_busy and self._work.is_idle

    @property
    def _is_busy(self) -> bool:
        """Whether a turn is open here, or a command that may open one waits."""
        is_live_here = self._phase is not Phase.FOLLOWING and self.state.is_live
        return is_live_here or not self._mailbox.is_idle

    @property
    def is_stale(self) -> bool:
        """Whether another node may have appended: this process has not claimed the session, and is not claiming it."""
        return self._phase is Phase.FOLLOWING and not self._is_busy

    @property
    def has_lease(self) -> bool:
        """Whether this process has claimed the session and not noticed a newer claim."""
        return self._phase is Phase.RUNNING

    @property
    def may_grow_elsewhere(self) -> bool:
        """Whether other nodes may append.

        Without an append here for longer than the lease can guarantee, or since this process lost its connection.
        """
        if self._phase is Phase.RUNNING:
            return not self.journal.was_held(within_s=session_work.HELD_FOR_S)
        return self._phase is Phase.FOLLOWING

    @property
    def has_failed(self) -> bool:
        """Whether the runner ended with an error; a new one may continue."""
        return self._phase is Phase.ENDED

    @property
    def is_following(self) -> bool:
        """Whether another node runs the open turn."""
        return self.is_stale and self.state.needs_node

    @property
    def waits_for_agent(self) -> bool:
        """Whether the open turn is held: the served agent cannot continue it, and it was not resumed on request."""
        return self._phase is Phase.FOLLOWING and agent_mismatch.is_held(self.state, self._agent)

    # --- what the host uses -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Fold the journal. If a turn is open, claim the session and resume the turn, or follow its node.

        A turn that waits only for people needs no node: the answer resumes it.

        Raises:
            StoreDamagedError: The journal cannot be read. Nothing was changed.
        """
        self._take_over(await self.journal.load())
        self._agent = self._agent_of(self.state)
        self.journal.introduce(self._agent.name, self._agent.model.name)
        self._work.begin(Executor(self._agent, self._world, self._work, self._family))
        self._task = self._world.spawn(self._run(), name=f"runner {self.session_id}")
        self._task.add_done_callback(self._drop_references)
        if self.waits_for_agent:
            agent_mismatch.warn(self.session_id, self.state, self._agent)
        elif self.state.needs_node and not self._family.defer_suspect(self):
            try:
                await self._mailbox.post(await self._first_command())
            except LeaseHeldError:
                _log.debug("another process runs it", extra={"session": self.session_id})

    async def _first_command(self) -> Cancel | None:
        """Return the command that resumes an open turn; a cancellation, if no parent awaits the child session."""
        parent = self.state.parent
        return None if parent is None or await self._family.is_child_awaited(parent) else Cancel()

    async def take_up(self) -> None:
        """Claim the session if a turn is open in it that this process does not run. A second call has no effect.

        Raises:
            LeaseHeldError: Another living node has the session. Nothing was changed.
        """
        await self.refresh()
        if self.is_following and not self.waits_for_agent:
            await self._mailbox.post(await self._first_command())

    def claim_soon(self) -> None:
        """Begin to claim a new session while its first command is prepared; without effect on other sessions."""
        if self._phase is Phase.FOLLOWING:
            self.journal.claim_soon(at=self._world.now())

    async def undo_claim(self) -> None:
        """Delete a session that `claim_soon` has claimed, if it is still new; without effect on other sessions."""
        if self._phase is Phase.FOLLOWING:
            await self.journal.undo_claim()

    def resume(self) -> None:
        """Resume a held turn. Before `Recover` is decided, a call of an older node stays pending."""
        if self._work.is_held:
            self._work.note(Recover(self._look_back_s))

    async def refresh(self) -> None:
        """Fold the records of other nodes, and wake the readers; with the lease, confirm it.

        Fails if the session was deleted meanwhile, or another node claimed it while this one was frozen or cut off.
        Readers and senders then get the new session or node.
        """
        async with self._unclaimed:
            try:
                if self._phase is Phase.FOLLOWING:
                    self._take_over(await self.journal.catch_up())
                elif self._phase is Phase.RUNNING:
                    await self.journal.confirm()
            except UnavailableError as error:
                if self._phase is Phase.FOLLOWING:
                    self._fail(error)
            except MidstreamError as error:
                self._fail(error)

    def decide(self, command: Command | Received) -> asyncio.Future[int]:
        """Decide a command here. A forwarded one is also decided while new commands of clients are refused.

        The future has the journal's end once all its records are durable.

        Raises:
            MidstreamError: See `submit`; `LeaseHeldError` if another node has the lease, `UnavailableError` while the
                session is being deleted here.
        """
        self._family.refuse_while_deleting(self.session_id)
        return self._mailbox.post(sessions.with_turn_limit(command, self._agent.turn_s))

    def refuse_for_other_agent(self, command: Command | Received) -> None:
        """Refuse a forwarded transcript that another agent must answer.

        Raises:
            AgentMismatchError: It names another agent than the one that is served here.
        """
        agent_mismatch.refuse_for_other(command, self.session_id, self._agent)

    def part(self, error: MidstreamError) -> None:
        """End the readers with `error` and refuse new commands of clients; the turn continues."""
        self._draining_error = error
        self.journal.close(error)

    async def release(self) -> None:
        """Release an idle session so that another process can delete it. Readers stay, and follow the session.

        `refresh` informs them after the deletion. If the session is not deleted, the next node with work for it claims
        it.

        Raises:
            SessionBusyError: A turn is running. Nothing was changed.
            LeaseHeldError: Another living process has the session. Nothing was changed.
            UnavailableError: The store is busy or full. The lease is kept: call this again, or use the session.
        """
        async with self._unclaimed:  # a command that comes meanwhile waits, and then claims the session again
            self.refuse_while_running()
            self._phase = Phase.FOLLOWING
            await self.journal.disown(at=self._world.now())
        self._on_followed()

    def refuse_while_running(self) -> None:
        """Check that no turn of a session is open or about to be opened.

        Raises:
            SessionBusyError: A turn is open.
        """
        if self._is_busy or self.state.rests_on_people:
            raise SessionBusyError(f"a turn of session {self.session_id!r} is running: cancel it first")

    async def request_release(self) -> None:
        """Request the node of an idle session to release it, so that it can be deleted.

        Raises:
            SessionBusyError: A turn is running there. Nothing was changed.
            UnavailableError: The node does not answer.
        """
        await self._forwarder.request(self.session_id, GIVE_UP)

    async def stop(self, mode: StopMode, error: MidstreamError | None = None) -> None:
        """Stop this runner; see `StopMode`. In the modes that do not finish, readers and senders end with `error`."""
        match mode:
            case StopMode.FINISH_RESPONSE:
                await self._work.finish(self.state, Drain.FINISH_RESPONSE)
                return
            case StopMode.FINISH_TOOLS:
                await self._work.finish(self.state, Drain.FINISH_TOOLS)
                return
            case StopMode.SLEEP:
                error = error or DrainingError("this session went to sleep; reconnect to wake it")
            case StopMode.HAND_OVER:
                words = "another server runs this session now; reconnect"
                error = error or DrainingError(words, retry_after_s=0.0)
            case StopMode.CLOSE:
                error = error or DrainingError(f"session {self.session_id!r} was stopped; reconnect")
        tasks = self._work.tasks
        if self._task is not None and self._task is not asyncio.current_task():
            tasks.append(self._task)
        self._end(error)
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if mode is not StopMode.CLOSE:
            await self.journal.release()

    # --- the loop ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._mailbox.arrival()
                if self._phase is Phase.FOLLOWING:
                    async with self._unclaimed:  # `release` must see the commands in the mailbox
                        await self._step(self._mailbox.take())
                else:
                    await self._step(self._mailbox.take())
                self._mailbox.settle()
        except asyncio.CancelledError:
            # At its end an event loop may cancel everything: a tool that reports its cancellation must not wait for an
            # append.
            self._end(DrainingError(f"session {self.session_id!r} was released; reconnect to continue"))
            raise
        except MidstreamError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the top of a session: it ends, the others continue
            _log.exception("a session ended on a defect", extra={"session": self.session_id})
            self._fail(stop_error(error, self.session_id))

    async def _step(self, batch: list[Envelope]) -> None:
        """Decide a batch of commands, append all their records at once, answer, and reconcile the pending work."""
        if not batch or (self._phase is Phase.FOLLOWING and self._has_answered(batch)):
            return
        try:
            if isinstance(effect := batch[0].command, Effect):
                taken, written = batch, await self._append_effect(effect, batch)
            elif (output := self._decide_output(batch)) is not None:
                await self._append(partial(self.journal.append, output[0]), batch)
                self.state = output[1]
                return  # no caller waits for output, and it does not change the pending work
            else:
                taken, written = await self._append_decisions(batch)
        except MidstreamError as error:
            internal = [each for each in batch if each.is_internal]
            is_shared = len(internal) < len(batch)
            if isinstance(error, UnavailableError) and is_shared:
                # Nothing was written: clients may send their commands again, and the others are retried.
                for envelope in batch:
                    if not envelope.is_internal:
                        envelope.answer(error)
                if not internal and self.journal.has_unused_claim:
                    self._family.note_claimed(self)
                await self._step(internal)
                return
            for envelope in batch:
                envelope.answer(error)
            if isinstance(error, LeaseHeldError | AgentMismatchError) and self._phase is Phase.FOLLOWING:
                return  # the session is followed
            raise
        except (Exception, asyncio.CancelledError) as error:
            for envelope in batch:  # a defect ends the session, but no caller may wait for ever
                envelope.answer(stop_error(error, self.session_id))
            raise
        if written and self._phase is Phase.FOLLOWING:
            self._phase = Phase.RUNNING
        for envelope in taken:
            envelope.answer(self.newest.position)
        if not (is_model_output(batch) or is_mere_result(batch, written)):
            self._work.reconcile(self.state, {each.reporter for each in batch if each.reporter is not None})

    async def _append_decisions(self, batch: list[Envelope]) -> tuple[list[Envelope], int]:
        """Return the accepted envelopes of a batch, and the number of records that were appended."""
        taken: list[Envelope] = []
        records: list[Record] = []
        blobs: list[Blob] = []
        is_adopted = self.waits_for_agent
        state = await self._claim_if_needed(records, [each.command for each in batch])
        at = self._world.now()
        for envelope in merge(batch):
            assert not isinstance(envelope.command, Effect)  # see `Mailbox.take`
            if envelope.command is not None and not (is_adopted and isinstance(envelope.command, Resume)):
                try:
                    decided, large = self._decide_command(state, envelope.command, at=at)
                except Refused as refused:
                    envelope.answer(refused.error)
                    continue
                state = self._fold(state, decided)
                records.extend(decided)
                blobs.extend(large)
            taken.append(envelope)
        if records:
            appended = batch_of(records, blobs, self.state, state, epoch=self.journal.epoch)
            await self._append(partial(self.journal.append, appended), taken)
        self.state = state
        if any(isinstance(each.command, Recover) for each in taken):
            self._work.is_held = False
        return taken, len(records)

    def _append_output_at_once(self, words: list[Envelope]) -> bool:
        """Append output without waking a task or a thread; return whether that was possible."""
        if not self.journal.is_ready:  # else `_step` would repeat the rest
            return False
        if self._mailbox.failure is not None:
            return False
        try:
            output = self._decide_output(words)
            if output is None or not self.journal.append_now(output[0]):
                return False
        except Exception as error:  # noqa: BLE001 - as in `_run`: perhaps it was appended, and must not be again
            _log.exception("a session ended on a defect", extra={"session": self.session_id})
            self._fail(stop_error(error, self.session_id))
            return False
        self.state = output[1]
        return True

    def _decide_output(self, words: list[Envelope]) -> tuple[Batch, Session] | None:
        """Return the append of output of one attempt, and the state after it; None for any other batch.

        This is a short path of `_append_decisions`: there are a hundred deltas for each other command.
        """
        if self._phase is not Phase.RUNNING or not is_model_output(words):
            return None
        [first, *others] = merge(words)
        if others or not isinstance(first.command, ModelStreamed):
            return None
        epoch = self.journal.epoch
        decided = sessions.decide(self.state, first.command, epoch=epoch, at=self._world.now())
        if len(decided) != 1:
            return None
        state = self._fold(self.state, decided)
        return Batch([encode(decided[0])], self.state.position, epoch, Sync.NORMAL), state

    async def _append_effect(self, effect: Effect, batch: list[Envelope]) -> int:
        """Run a call in the transaction of its outcome; return the number of records, 0 if the call was not pending."""
        if effect.pending_work not in sessions.pending_work(self.state):
            return 0
        state = self.state

        def work(attempt: Attempt) -> Batch:
            # Runs in the store's thread. Nothing else changes this session while its runner waits.
            nonlocal state
            finished = effect.run(attempt)
            records, blobs = self._decide_command(self.state, finished, at=self._world.now())
            state = self._fold(self.state, records)
            return batch_of(records, blobs, self.state, state, epoch=self.journal.epoch)

        await self._append(partial(self.journal.append_within, work), batch)
        written, self.state = state.position - self.state.position, state
        return written

    def _decide_command(
        self, state: Session, command: Command | Received | ToolsFound, *, at: float
    ) -> tuple[tuple[Record, ...], tuple[Blob, ...]]:
        """Return the records of a command, and the large results that they name."""
        decided = sessions.decide(state, command, epoch=self.journal.epoch, at=at)
        return split_large_results(without_starts(decided) if self._work.is_closing else decided)

    def _has_answered(self, batch: list[Envelope]) -> bool:
        """Answer a batch without records, so that a refused request does not claim the session."""
        if self.state.is_live:
            return False
        answers: list[int | MidstreamError] = []
        at = self._world.now()
        for envelope in batch:
            if envelope.command is None or isinstance(envelope.command, Effect):
                return False
            try:
                decided = sessions.decide(self.state, envelope.command, epoch=self.state.epoch + 1, at=at)
            except Refused as refused:
                answers.append(refused.error)
                continue
            if decided:
                return False
            answers.append(self.newest.position)
        for envelope, answer in zip(batch, answers, strict=True):
            envelope.answer(answer)
        return True

    async def _claim_if_needed(self, records: list[Record], commands: agent_mismatch.Commands) -> Session:
        """Begin an epoch before the first append of this process, and recover the work of an older one.

        Raises:
            AgentMismatchError: The turn belongs to another agent, and the command does not end it. Nothing was written.
        """
        if self._phase is not Phase.FOLLOWING:
            return self.state
        self._refuse_other_agent(commands)
        at = self._world.now()
        epoch = await self.journal.claim(at=at)
        if (
            epoch > 1 and not self.journal.is_new
        ):  # another node had the session, and may have appended since it was read
            self._take_over(await self.journal.catch_up())
            self._refuse_other_agent(commands)
        is_handover = self.journal.is_handed_over
        is_stopped = self.waits_for_agent and not agent_mismatch.adopts(commands)
        suspected = 0 if is_handover else self._family.count_suspected_deaths(self)
        began = EpochStarted(epoch, self._node, at, is_handover=is_handover, suspected=suspected)
        records.append(agent_mismatch.with_agent_name(began, self._agent))
        state = self._fold(self.state, records)
        if is_stopped:
            return state  # work of the other agent must not be started only to be cancelled
        if 0 < suspected <= SUSPECTED_MAX:
            self._work.is_held = True
            self._family.hold(self)
            return state
        recovered = sessions.decide(state, Recover(self._look_back_s), epoch=epoch, at=at)
        records.extend(recovered)
        return self._fold(state, recovered)

    def _refuse_other_agent(self, commands: agent_mismatch.Commands) -> None:
        if self.waits_for_agent:
            agent_mismatch.refuse(commands, self.session_id, self.state, self._agent)

    def _take_over(self, records: Sequence[tuple[int, Record]]) -> None:
        """Fold the records of other nodes.

        Raises:
            StoreDamagedError: The records do not fold. Nothing was changed.
        """
        try:
            self.state = sessions.fold(records, self.state)
        except Exception as error:
            _log.exception("a journal does not fold", extra={"session": self.session_id})
            message = f"the journal of session {self.session_id!r} does not fold ({type(error).__name__})"
            raise StoreDamagedError(message) from error

    def _fold(self, state: Session, records: Sequence[Record]) -> Session:
        for record in records:
            state = sessions.evolve(state, record, epoch=self.journal.epoch)
        return state

    async def _append(self, append: Callable[[], Awaitable[None]], batch: list[Envelope]) -> None:
        """Append, with retries if no client waits: clients can send again, models and tools cannot."""
        if all(each.is_internal for each in batch):
            await self._outages.append(append)
        else:
            await append()

    def _fail(self, error: MidstreamError) -> None:
        """End like a crash: nothing more is written, and the next node finds calls in doubt."""
        if self._phase is not Phase.ENDED:
            self._end(error)
            self._on_failed(self, error)

    def _end(self, error: MidstreamError) -> None:
        """End everything at once, in any phase; later callers get the first error."""
        self._phase = Phase.ENDED
        self._mailbox.failure = self._mailbox.failure or error.again()
        self.journal.close(error)
        self._work.cancel_all()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._mailbox.refuse_all(error)
        self._forwarder.refuse(self._mailbox.failure)

    def _drop_references(self, _ended: asyncio.Task[None]) -> None:
        """Drop the references to this runner, so that its memory is freed with its last user."""
        self._task = None
        self._mailbox.close()
        self._work.close()
