"""One live session: journal -> fold -> owed -> do -> append.

The runner has no opinion. Commands come through its mailbox, one at a time; it appends what `session` decides, folds
it, answers the senders, and then compares the pending work with what runs: it starts what is missing and cancels
    what is no longer pending. A failing store ends the runner as a crash would; the next one takes over.

Order law: append, then ack; append, then publish; append the intent, then act.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Protocol

from midstream.engine import agent_guard
from midstream.engine.agent import Agent
from midstream.engine.defects import stopped_on, undone
from midstream.engine.executors import Executor
from midstream.engine.forwarding import GIVE_UP, encode_command, once, position_of
from midstream.engine.journal import Journal
from midstream.engine.listing import batch_of, without_starts
from midstream.engine.mailbox import Effect, Envelope, Mailbox, are_words, is_mere_result, merged
from midstream.engine.outages import Outages
from midstream.engine.sub_agents import Nursery
from midstream.engine.timers import Waits, Work, parted
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
from midstream.retries import CONFIRM_ATTEMPTS_MAX
from midstream.session import session as sessions
from midstream.session.blobs import Blob, lifted
from midstream.session.records import EpochStarted, Parent, Record, Sync, encode
from midstream.session.session import Received, Session, ToolsFound
from midstream.session.turn.commands import (
    CallFinished,
    CallProgress,
    Cancel,
    ChildStreamed,
    Command,
    ModelResumable,
    ModelReuseDecided,
    ModelStreamed,
    PermissionRequested,
    PermissionWithdrawn,
    Recover,
    Refused,
    Resume,
    Stalled,
    StallFinished,
    UseAnswer,
)
from midstream.session.turn.pending import AnswerAgent, CallModel, RunCall
from midstream.session.turn.states import LOOK_BACK_S, SUSPECTED_MAX
from midstream.store.contract import Attempt, Batch, StoredRecord

HAND_OVER_S = 10.0
"""Seconds that the node of a session has to decide a command that reached another process."""
HELD_FOR_S = 5.0
"""Seconds after an append in which nobody can have taken the session for a frozen node's: a quarter of a lease."""

_log = logging.getLogger(__name__)


class Family(Nursery, Protocol):
    """Children and parent of a session: the host."""

    async def is_wanted(self, parent: Parent) -> bool:
        """Whether the call is still open whose work a child session does."""

    def refuse_while_deleting(self, session_id: str) -> None:
        """Refuse all commands while a session, or one that it is part of, is being deleted.

        Raises:
            UnavailableError: It is.
        """

    def suspected(self, runner: Runner) -> int:
        """Return how many deaths a session is suspected of that is about to be claimed here (TURN-84)."""

    def note_left(self, runner: Runner) -> bool:
        """Note what a dead process left of a session; return whether to claim it is left to the host."""

    def hold(self, runner: Runner) -> None:
        """Call `Runner.resume` when it is the turn of this suspect."""


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
        self.session_id = journal.session_id
        self.state = Session()
        self.readers = 0
        """Connections that follow this session; the host keeps it awake while there are any."""
        self.journal = journal
        self._agent_of = agent
        self._family = family
        self._world = world
        self._node = node
        self._look_back_s = look_back_s
        self._on_failed = on_failed
        self._on_followed = on_followed
        self._mailbox = Mailbox(world, self._say_at_once)
        self._outages = Outages(world, self.session_id, self._mailbox.refuse_clients)
        self._doing: dict[Work, asyncio.Task[None]] = {}
        self._waits = Waits(world, self.note)
        self._stopping: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._failed: MidstreamError | None = None
        self._parted: MidstreamError | None = None
        self._is_quiescing = False
        self._is_held = False
        """Whether nothing is started here yet, because it may kill this process as it did the last one."""
        self._is_patient = False
        """While quiescing: whether a model call that runs may go on to its end."""
        self._asking: set[asyncio.Timeout] = set()
        """The limits of the commands that another process is being asked to decide."""
        self._unclaimed = asyncio.Lock()
        """Held by whoever folds what others append, while this process has not claimed the session."""
        self._has_begun = False
        """Whether this process's epoch is on the journal."""

    # --- what connections use ---------------------------------------------------------------------------------

    @property
    def newest(self) -> EventId:
        """The newest event of the journal."""
        return self.journal.newest

    async def submit(self, command: Command | Received) -> int:
        """Let a command be decided, here or by its node; return the journal's end once all it caused is durable.

        Raises:
            MidstreamError: It was refused (nothing was written), or the session failed under it (look again).
        """
        if self._parted is not None:
            raise self._parted.again()
        try:
            return await self.decide(command)
        except LeaseHeldError:
            return await self._forward(command)

    @property
    def events(self) -> Journal:
        """The journal, to read in it."""
        return self.journal

    async def read(self, *, after: int, limit: int) -> Sequence[StoredRecord]:
        """Return up to `limit` records after position `after`, as `Journal.read` does; empty at the end."""
        return await self.journal.read(after=after, limit=limit)

    async def wait(self, after: int) -> None:
        """Wait for a record after `after`; raises what ended the session here (draining, lease lost, ...)."""
        await self.journal.wait(after)

    def attach(self) -> None:
        """Count one more reader."""
        self.readers += 1
        if not self._has_begun:
            self._on_followed()

    def detach(self) -> None:
        """Count one reader less. The turn goes on without it: a disconnect never cancels."""
        self.readers -= 1

    @property
    def outage(self) -> MidstreamError | None:
        """Why nothing could be appended for some seconds, while that is tried again; None otherwise."""
        return self._outages.error

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost by letting this session go to sleep."""
        if self.readers or self._asking:  # a command that another process decides is answered here
            return False
        if self.state.rests_on_people:  # whoever answers wakes it
            return self._mailbox.is_at_rest
        return not (self._is_busy or self._doing or self._stopping)

    @property
    def _is_busy(self) -> bool:
        """Whether a turn is open here, or something is on its way to the journal that may open one."""
        return (self._has_begun and self.state.is_live) or not self._mailbox.is_at_rest

    @property
    def is_stale(self) -> bool:
        """Whether another process may have appended since: this one has not claimed the session, and does not now."""
        return not self._has_begun and not self._is_busy

    @property
    def is_of_others(self) -> bool:
        """Whether others may append: nothing was written here, though a claim may be on its way."""
        return not self._has_begun and self._failed is None

    @property
    def has_failed(self) -> bool:
        """Whether it ended on an error; a new runner may take over."""
        return self._failed is not None

    @property
    def is_following(self) -> bool:
        """Whether a turn is open that another process is at work on."""
        return self.is_stale and self.state.needs_node

    # --- what the host uses -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Fold the journal; where a turn is open, take the session over and go on with it, or follow its node.

        A turn that waits for people only needs no node: their answer resumes it.

        Raises:
            StoreDamagedError: The journal cannot be read. Nothing was changed.
        """
        self._take_over(await self.journal.load())
        self._agent = self._agent_of(self.state)
        self.journal.introduce(self._agent.name, self._agent.model.name)
        self._executor = Executor(self._agent, self._world, self, self._family)
        self._task = self._world.spawn(self._run(), name=f"runner {self.session_id}")
        self._task.add_done_callback(self._untie)
        if self.waits_for_agent:
            agent_guard.warn(self.session_id, self.state, self._agent)
        elif self.state.needs_node and not self._family.note_left(self):
            try:
                await self._post(await self._first_word())
            except LeaseHeldError:
                _log.debug("another process works on it", extra={"session": self.session_id})

    async def _first_word(self) -> Cancel | None:
        """Return the command with which an open turn is resumed: a child that is not awaited is stopped."""
        parent = self.state.parent
        return None if parent is None or await self._family.is_wanted(parent) else Cancel()

    async def take_up(self) -> None:
        """Take the session over if a turn is open in it that is not ours; calling it again is harmless.

        Raises:
            LeaseHeldError: Another living process works on it. Nothing was changed.
        """
        await self.refresh()
        if self.is_following and not self.waits_for_agent:
            await self._post(await self._first_word())

    def resume(self) -> None:
        """Go on with a turn that was held back: until `Recover` is decided, a call of an older node is owed."""
        if self._is_held:
            self.note(Recover(self._look_back_s))

    async def refresh(self) -> None:
        """Fold what others have appended, and wake the readers; without effect where this process has the lease.

        It fails as a whole where the session was deleted meanwhile: readers and senders meet the new one.
        """
        async with self._unclaimed:
            if self._has_begun or self._failed is not None:
                return
            try:
                self._take_over(await self.journal.catch_up())
            except MidstreamError as error:
                self._fail(error)

    def decide(self, command: Command | Received) -> asyncio.Future[int]:
        """Decide a command here: what another process was asked also while new ones from outside are refused.

        The future has the journal's end once all it caused is durable.

        Raises:
            MidstreamError: See `submit`; `LeaseHeldError` where another process owns the session by now,
                `UnavailableError` while it is being deleted here.
        """
        self._family.refuse_while_deleting(self.session_id)
        return self._post(sessions.limited(command, self._agent.turn_s))

    def part(self, error: MidstreamError) -> None:
        """Send the readers away with `error` and refuse new commands from outside; the turn goes on."""
        self._parted = error
        self.journal.close(error)

    async def sleep(self) -> None:
        """Let an idle session go: its memory, and the right to write to it."""
        await self.close(DrainingError("this session went to sleep: reconnect to wake it"))
        await self.journal.release()

    async def let_go(self) -> None:
        """Give an idle session up for another process to delete it. Readers stay, and follow what becomes of it.

        They are not informed of a deletion before it has happened: `refresh` finds it. Where it does not happen, the
        session is released, and the next node with work for it claims it.

        Raises:
            SessionBusyError: A turn is running. Nothing was changed.
            LeaseHeldError: Another living process has it by now. Nothing was changed.
            UnavailableError: The store is busy or full. It is this process's still: it may be used, or let go again.
        """
        async with self._unclaimed:  # a command that comes meanwhile waits, and then claims it anew
            self.refuse_while_running()
            self._has_begun = False
            await self.journal.disown(at=self._world.now())
        self._on_followed()

    def refuse_while_running(self) -> None:
        """Refuse to end a session in which a turn is open, or about to be.

        Raises:
            SessionBusyError: It is.
        """
        if self._is_busy or self.state.rests_on_people:
            raise SessionBusyError(f"a turn of session {self.session_id!r} is running: cancel it first")

    async def ask_to_give_up(self) -> None:
        """Ask the process that owns an idle session to let go of it, so that it can be deleted.

        Raises:
            SessionBusyError: A turn is running there. Nothing was changed.
            UnavailableError: It does not answer.
        """
        await self._ask_node(GIVE_UP)

    async def quiesce(self) -> None:
        """Start nothing new, cut model calls, and wait for the tools that run; their outcomes are kept."""
        self._is_quiescing = True
        self._waits.clear()
        self._stop_unowed(parted(sessions.pending_work(self.state))[0])
        await self._mailbox.rest()
        while running := [*self._doing.values(), *self._stopping]:
            await asyncio.wait(running)
            await self._mailbox.rest()

    async def wind_down(self) -> None:
        """Start nothing new, and wait for everything that runs, also for the model's response."""
        self._is_patient = True
        try:
            await self.quiesce()
        finally:
            self._is_patient = False

    async def hand_on(self) -> None:
        """Give the session up for another process to go on with. What still runs is cut, and in doubt there."""
        await self.close(
            DrainingError("another server goes on with this session: reconnect", retry_after_s=0.0)
        )
        await self.journal.release()

    async def close(self, error: MidstreamError) -> None:
        """Stop at once; readers end with `error`. What was being done is in doubt for the next node."""
        self._is_quiescing = True
        self._failed = self._failed or error.again()
        self.journal.close(error)
        self._waits.clear()
        tasks = [*self._doing.values(), *self._stopping]
        if self._task is not None and self._task is not asyncio.current_task():
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        self._refuse_all(error)

    # --- what executors use ----------------------------------------------------------------------------------

    async def say(self, command: ModelStreamed | ModelResumable | ModelReuseDecided | ToolsFound) -> None:
        """Journal a model's words, or its tools, soon; wait only while too many of them are on their way."""
        if self._failed is not None:
            return  # a model that does not mind being stopped talks to nobody
        if self._mailbox.put(Envelope(command)):
            await self._world.sleep(0.0)  # what was said is sent before more is asked for
        while self._mailbox.is_full and self._failed is None:
            await self._mailbox.room()

    def tell(self, progress: CallProgress | Stalled | StallFinished) -> None:
        """Journal how far a tool is, or that nothing comes, soon; left out while too much waits for its append."""
        if self._failed is None and not self._mailbox.is_full:
            self._mailbox.put(Envelope(progress))

    def note(self, command: Command) -> None:
        """Journal soon what no client sends: that an agent waits no more, or that a deadline has come."""
        if self._failed is None:
            self._mailbox.put(Envelope(command))

    async def show(self, command: ChildStreamed | PermissionRequested) -> None:
        """Journal what a child did, or an agent asks, and wait for it: the piece of pending work goes on.

        Raises:
            MidstreamError: This session has failed.
        """
        await self._post(command)

    async def insist(self, command: UseAnswer | PermissionWithdrawn) -> None:
        """Journal this before what it announces, and end a piece of pending work by it.

        Raises:
            MidstreamError: It was refused, or this session has failed. Nothing was written.
        """
        await self._post(command, asyncio.current_task())

    def report(self, command: Command) -> None:
        """Journal what came of a piece of pending work, soon; a runner that has failed meanwhile leaves it in doubt."""
        if self._failed is None:
            self._mailbox.put(Envelope(command, reporter=asyncio.current_task()))

    async def confirm(self) -> None:
        """Make sure that the session was not taken while this process was frozen; where it was, end here.

        Between an append and what it announces there is no other process, unless this one stood still for so long
        that it was taken for dead. Then the call belongs to the new node, as one in doubt.
        """
        for _ in range(CONFIRM_ATTEMPTS_MAX):
            if self._world.monotonic() - self.journal.held_at <= HELD_FOR_S:
                return
            try:
                await self.journal.confirm()
            except MidstreamError as error:
                self._fail(error)
                break
        else:
            self._fail(UnavailableError(f"session {self.session_id!r}: its store answers too slowly to act"))
        raise asyncio.CancelledError

    async def report_within(self, pending_work: RunCall, run: Callable[[Attempt], CallFinished]) -> None:
        """Let a call write into the database in the append of its outcome; not at all, if it is no longer owed."""
        try:
            await self._post(Effect(pending_work, run), asyncio.current_task())
        except MidstreamError as error:
            _log.debug("an effect did not happen: %s", error.code, extra={"session": self.session_id})

    @property
    def is_transactional(self) -> bool:
        """Whether tools can write in the transactions of this session's store."""
        return self.journal.is_transactional

    async def blob(self, digest: str) -> bytes | None:
        """Return a large result that a record of this session names, or None where it is not there."""
        return await self.journal.blob(digest)

    @property
    def is_closing(self) -> bool:
        """Whether tasks are stopped because this process releases the session, and not because their work is not
        pending any more.
        """
        return self._is_quiescing

    # --- the loop ---------------------------------------------------------------------------------------------

    def _post(
        self, command: Command | Received | Effect | None, reporter: asyncio.Task[None] | None = None
    ) -> asyncio.Future[int]:
        """Put a command into the mailbox; the future has the journal's end once all it caused is durable."""
        if self._failed is not None:
            raise self._failed.again()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._mailbox.put(Envelope(command, done, reporter))
        return done

    async def _forward(self, command: Command | Received) -> int:
        """Let the node decide it; return once what it caused can be read here too."""
        lasting = once(command, self.state, self._world)
        if lasting is None:
            return self.newest.position
        end = await self._ask_node(encode_command(lasting))
        await self.refresh()
        return end

    async def _ask_node(self, body: bytes) -> int:
        limit = asyncio.timeout(HAND_OVER_S)
        self._asking.add(limit)
        try:
            async with limit:
                return position_of(await self.journal.forward(body))
        except TimeoutError as error:
            if self._failed is not None and limit not in self._asking:
                raise self._failed.again() from error
            message = f"the node of session {self.session_id!r} does not answer: ask again later"
            raise UnavailableError(message, retry_after_s=1.0) from error
        finally:
            self._asking.discard(limit)

    async def _run(self) -> None:
        try:
            while True:
                await self._mailbox.arrival()
                if self._has_begun:
                    await self._step(self._mailbox.take())
                else:
                    async with self._unclaimed:  # who stops it here must find the commands in the mailbox
                        await self._step(self._mailbox.take())
                self._mailbox.settle()
        except asyncio.CancelledError:
            # Also when a whole event loop is cancelled at its end: a tool that reports its own cancellation must
            # not wait for an append that nobody makes any more.
            self._let_go(DrainingError(f"session {self.session_id!r} is let go: reconnect to carry on"))
            raise
        except MidstreamError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the top of a session: it ends, the others go on
            _log.exception("a session ended on a bug", extra={"session": self.session_id})
            self._fail(stopped_on(error, self.session_id))

    async def _step(self, batch: list[Envelope]) -> None:
        """Decide a batch of commands, append all their records at once, then answer and act."""
        if not batch or (not self._has_begun and self._has_answered(batch)):
            return
        try:
            if isinstance(effect := batch[0].command, Effect):
                taken, written = batch, await self._append_effect(effect, batch)
            else:
                taken, written = await self._append_decided(batch)
        except MidstreamError as error:
            internal = [each for each in batch if each.is_internal]
            is_shared = len(internal) < len(batch)
            if isinstance(error, UnavailableError) and is_shared:
                for (
                    envelope
                ) in batch:  # nothing was written: clients may ask again, and the rest is tried again
                    if not envelope.is_internal:
                        envelope.answer(error)
                await self._step(internal)
                return
            for envelope in batch:
                envelope.answer(error)
            if isinstance(error, LeaseHeldError | AgentMismatchError) and not self._has_begun:
                return  # it is followed here
            raise
        except (Exception, asyncio.CancelledError) as error:
            for envelope in batch:  # a bug ends the session, but nobody may wait for its answer for ever
                envelope.answer(stopped_on(error, self.session_id))
            raise
        self._has_begun = self._has_begun or bool(written)
        for envelope in taken:
            envelope.answer(self.newest.position)
        if not (are_words(batch) or is_mere_result(batch, written)):
            self._reconcile({each.reporter for each in batch if each.reporter is not None})

    async def _append_decided(self, batch: list[Envelope]) -> tuple[list[Envelope], int]:
        """Return what was taken of a batch, and how many records that wrote."""
        taken: list[Envelope] = []
        records: list[Record] = []
        blobs: list[Blob] = []
        is_adopted = self.waits_for_agent
        state = await self._claim_if_needed(records, [each.command for each in batch])
        at = self._world.now()
        for envelope in merged(batch):
            assert not isinstance(envelope.command, Effect)  # see `Mailbox.take`
            if envelope.command is not None and not (is_adopted and isinstance(envelope.command, Resume)):
                try:
                    decided, large = self._decided(state, envelope.command, at=at)
                except Refused as refused:
                    envelope.answer(refused.error)
                    continue
                state = self._folded(state, decided)
                records.extend(decided)
                blobs.extend(large)
            taken.append(envelope)
        if records:
            appended = batch_of(records, blobs, self.state, state, epoch=self.journal.epoch)
            await self._append(partial(self.journal.append, appended), taken)
        self.state = state
        if any(isinstance(each.command, Recover) for each in taken):
            self._is_held = False
        return taken, len(records)

    def _say_at_once(self, words: list[Envelope]) -> bool:
        """Journal words without a task's wake-up and a thread; return whether that could be done."""
        [first, *others] = merged(words)
        if others or self._failed is not None:
            return False
        assert isinstance(first.command, ModelStreamed)  # see `Mailbox`
        try:
            epoch = self.journal.epoch
            decided = sessions.decide(self.state, first.command, epoch=epoch, at=self._world.now())
            state = self._folded(self.state, decided)
            batch = Batch([encode(record) for record in decided], self.state.position, epoch, Sync.NORMAL)
            if len(decided) != 1 or not self.journal.append_now(batch):
                return False
        except Exception as error:  # noqa: BLE001 - as in `_run`: perhaps it was appended, and must not be again
            _log.exception("a session ended on a bug", extra={"session": self.session_id})
            self._fail(stopped_on(error, self.session_id))
            return False
        self.state = state
        return True

    async def _append_effect(self, effect: Effect, batch: list[Envelope]) -> int:
        """Run a call in the append of its outcome; return how many records that wrote: none, if it was not owed."""
        if effect.pending_work not in sessions.pending_work(self.state):
            return 0
        state = self.state

        def work(attempt: Attempt) -> Batch:
            # In the store's thread. Nothing else changes this session while its runner waits for this.
            nonlocal state
            finished = effect.run(attempt)
            records, blobs = self._decided(self.state, finished, at=self._world.now())
            state = self._folded(self.state, records)
            return batch_of(records, blobs, self.state, state, epoch=self.journal.epoch)

        await self._append(partial(self.journal.append_within, work), batch)
        written, self.state = state.position - self.state.position, state
        return written

    def _decided(
        self, state: Session, command: Command | Received | ToolsFound, *, at: float
    ) -> tuple[tuple[Record, ...], tuple[Blob, ...]]:
        """Return what must be appended because of a command: records, and the large results they name."""
        decided = sessions.decide(state, command, epoch=self.journal.epoch, at=at)
        return lifted(without_starts(decided) if self._is_quiescing else decided)

    def _has_answered(self, batch: list[Envelope]) -> bool:
        """Answer a batch that would write nothing, so that a refused request does not claim the session."""
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

    async def _claim_if_needed(self, records: list[Record], commands: agent_guard.Commands) -> Session:
        """Begin an epoch before the first append of this process, and recover what an older one left.

        Raises:
            AgentMismatchError: The turn is of another agent, and the command neither resumes nor cancels it. Nothing
            was written.
        """
        if self._has_begun:
            return self.state
        self._refuse_other_agent(commands)
        at = self._world.now()
        epoch = await self.journal.claim(at=at)
        if epoch > 1:  # somebody had it before, and may have had it since it was read here
            self._take_over(await self.journal.catch_up())
            self._refuse_other_agent(commands)
        is_handover = self.journal.is_handed_over
        is_stopped = self.waits_for_agent and not agent_guard.adopts(commands)
        suspected = 0 if is_handover else self._family.suspected(self)
        began = EpochStarted(epoch, self._node, at, is_handover=is_handover, suspected=suspected)
        records.append(agent_guard.named(began, self._agent))
        state = self._folded(self.state, records)
        if is_stopped:
            return state  # nothing of the other agent is started in order to be cancelled
        if 0 < suspected <= SUSPECTED_MAX:
            self._is_held = True
            self._family.hold(self)
            return state
        recovered = sessions.decide(state, Recover(self._look_back_s), epoch=epoch, at=at)
        records.extend(recovered)
        return self._folded(state, recovered)

    def _refuse_other_agent(self, commands: agent_guard.Commands) -> None:
        if self.waits_for_agent:
            agent_guard.refuse(commands, self.session_id, self.state, self._agent)

    @property
    def waits_for_agent(self) -> bool:
        """Whether the open turn is not one for the agent served here, and was not resumed with it."""
        return not self._has_begun and agent_guard.is_held(self.state, self._agent)

    def _take_over(self, records: Sequence[tuple[int, Record]]) -> None:
        """Fold what others appended.

        Raises:
            StoreDamagedError: It is no journal of ours. Nothing was changed.
        """
        try:
            self.state = sessions.fold(records, self.state)
        except Exception as error:
            _log.exception("a journal does not fold", extra={"session": self.session_id})
            message = f"the journal of session {self.session_id!r} does not fold ({type(error).__name__})"
            raise StoreDamagedError(message) from error

    def _folded(self, state: Session, records: Sequence[Record]) -> Session:
        for record in records:
            state = sessions.evolve(state, record, epoch=self.journal.epoch)
        return state

    async def _append(self, append: Callable[[], Awaitable[None]], batch: list[Envelope]) -> None:
        """Append, patiently where no client waits for it: clients ask again, models and tools do not."""
        if all(each.is_internal for each in batch):
            await self._outages.append(append)
        else:
            await append()

    def _reconcile(self, reporters: AbstractSet[asyncio.Task[None]]) -> None:
        """Start what is owed and not being done; stop what is being done and not owed."""
        work, waits = parted(sessions.pending_work(self.state))
        self._waits.set(() if self._is_quiescing else waits)
        work = [] if self._is_held else work
        if self._doing.keys() == set(work) and not reporters and not self._is_quiescing:
            return
        self._stop_unowed(work, reporters)
        if not reporters.isdisjoint(self._doing.values()):
            self._fail(undone(self.session_id))
        if self._failed is None:
            self._start_pending(work)

    def _stop_unowed(
        self, pending_work: Sequence[Work], reporters: AbstractSet[asyncio.Task[None]] = frozenset()
    ) -> None:
        for work_item in [each for each in self._doing if each not in pending_work or self._is_cut(each)]:
            task = self._doing.pop(work_item)
            if task.done():
                continue  # it ended with its report
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)
            if task not in reporters:
                task.cancel()

    def _start_pending(self, pending_work: Sequence[Work]) -> None:
        for work_item in pending_work:
            # What is in the journal as started is run also at the last moment: left out, it would be in doubt.
            if work_item not in self._doing and not self._is_cut(work_item):
                name = f"{type(work_item).__name__} {self.session_id}"
                self._doing[work_item] = self._world.spawn(self._execute(work_item, self.state), name=name)

    def _is_cut(self, work_item: Work) -> bool:
        if self._is_patient and isinstance(work_item, AnswerAgent):
            return False  # the response that may go on waits for it
        if self._is_patient and isinstance(work_item, CallModel) and work_item in self._doing:
            return False
        return self._is_quiescing and Executor.is_repeatable(work_item)

    async def _execute(self, work_item: Work, owing: Session) -> None:
        """Do one piece of pending work, and report a failure where it ends without a report, such as by a model that
        cancels itself.
        """
        try:
            await self._executor.execute(work_item, owing)
        except Exception as error:  # noqa: BLE001 - a bug in there ends the session as a crash would
            extra = {"session": self.session_id}
            _log.error("performing an obligation failed", exc_info=error, extra=extra)
            self._fail(stopped_on(error, self.session_id))
        finally:
            task = asyncio.current_task()
            if self._doing.get(work_item) is task and not self._mailbox.has_report_of(task):
                del self._doing[work_item]
                self._fail(undone(self.session_id))

    def _fail(self, error: MidstreamError) -> None:
        """End as a crash would: nothing more is written; the next node finds the doubt in the journal."""
        if self._failed is None:
            self._let_go(error)
            self._on_failed(self, error)

    def _let_go(self, error: MidstreamError) -> None:
        self._failed = self._failed or error.again()
        self._is_quiescing = True
        self.journal.close(error)
        self._waits.clear()
        self._doing = {each: task for each, task in self._doing.items() if not task.done()}
        for task in [*self._doing.values(), *self._stopping]:
            task.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._refuse_all(error)

    def _untie(self, _ended: asyncio.Task[None]) -> None:
        """Let go of all that holds this runner, so that its memory is free with its last user's name for it."""
        self._task = None
        self._mailbox.close()
        self._waits.close()
        del self._executor

    def _refuse_all(self, error: MidstreamError) -> None:
        self._mailbox.refuse_all(error)
        asking, self._asking = self._asking, set()
        for limit in asking:
            if not limit.expired():
                limit.reschedule(0.0)
