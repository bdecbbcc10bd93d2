"""The journal of a session with driven turns.

One task does all operations on the journal, in order: decisions, the claim of a run that begins, the release of a run
that ended. So all appends of earlier runs of this process precede a new run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from midstream.engine.journal import Journal
from midstream.engine.listing import batch_of
from midstream.environment import World
from midstream.errors import LeaseHeldError, MidstreamError, UnavailableError
from midstream.models.responses import merge_deltas
from midstream.observability.observers import Observers
from midstream.retries import APPEND_ATTEMPTS_MAX, APPEND_BACKOFF
from midstream.session import session as sessions
from midstream.session.driven_turn import AddOutput, DrivenCommand, decide
from midstream.session.records import Delta, EpochStarted, Record
from midstream.session.session import Session
from midstream.session.turn.commands import Refused
from midstream.store.contract import Store

HELD_PAUSE_S = 0.05
"""Seconds between two claims of a session whose process may have just died."""
HOLD_S = 0.005
"""Seconds that a whole response may wait for the start of its first call, to share its append."""

Decision = Callable[[Session, int, float], Sequence[Record]]
"""Records to append, for a state, an epoch and a time."""


class _Request(Struct):
    """A decision that waits for the journal. Without a decision: the claim of a run. No caller awaits deltas."""

    decision: Decision | None
    answer: asyncio.Future[Sequence[Record]] | None
    deltas: tuple[Delta, ...] = ()
    is_patient: bool = True


class DrivenJournal:
    """A journal with its state, for driven turns. Simultaneous decisions share one append."""

    def __init__(
        self,
        store: Store,
        session_id: str,
        world: World,
        *,
        node: str,
        agent: tuple[str, str] = ("", ""),
        observers: Observers | None = None,
    ) -> None:
        self.journal = Journal(store, session_id, world, observers)
        self.state = Session()
        self.failed: MidstreamError | None = None
        self.loop = asyncio.get_running_loop()
        self.on_records: Callable[[Sequence[tuple[int, Record]]], None] = lambda _records: None
        """Receives the appended records with their epochs, also those of other nodes since the last read."""
        self.decided: list[Record] = []
        """Decided records that are not appended yet: simultaneous decisions share one append."""
        self._world = world
        self._node = node
        self._agent = agent
        self._requests: deque[_Request] = deque()
        self._is_wanted = True
        self._announced = 0
        """The epoch whose first record is in the journal."""
        self._working: asyncio.Task[None] | None = None

    async def load(self) -> list[tuple[int, Record]]:
        """Read and fold the journal, and return its records; nothing is claimed. Call it before the other methods.

        Raises:
            RecordUndecodableError: The journal cannot be read.
        """
        records = await self.journal.load()
        self.state = sessions.fold(records, self.state)
        return records

    async def begin_run(self) -> None:
        """Claim the session for a run, under a new epoch: calls that an earlier run left started are in doubt.

        No other process can claim the session before `release_when_idle`.

        Raises:
            LeaseHeldError: Another process has the session. Nothing was changed.
            MidstreamError: The journal cannot be read any more. Nothing was changed.
        """
        self._is_wanted = True
        await self._request(_Request(None, self.loop.create_future()))

    async def submit(self, decision: Decision, *, is_patient: bool = True) -> Sequence[Record]:
        """Decide and append; return the decided records once they are durable.

        Raises:
            MidstreamError: The command was refused, or the journal cannot be written. The decision was not written.
        """
        return await self._request(_Request(decision, self.loop.create_future(), is_patient=is_patient))

    def journal_output(self, deltas: tuple[Delta, ...]) -> None:
        """Journal the model's output soon; simultaneous deltas become one record."""
        if self.failed is None:
            self._put(_Request(decision_of(AddOutput(deltas)), None, deltas))

    def hold(self, decision: Decision) -> None:
        """Decide, and append together with the next `submit`, or soon if none follows.

        Raises:
            MidstreamError: The journal cannot be written. The next `submit` raises a later failure.
        """
        if self.failed is not None:
            raise self.failed
        self._requests.append(_Request(decision, None))
        self.loop.call_later(HOLD_S, self._start_working)

    @property
    def is_usable(self) -> bool:
        """Whether the journal belongs to the running event loop, and can be written."""
        return self.failed is None and self.loop is asyncio.get_running_loop()

    def release_when_idle(self) -> None:
        """Release the session each time that it is idle, so that any node can claim it. An append claims it again."""
        self._is_wanted = False
        if self.loop is asyncio.get_running_loop():
            self._start_working()

    async def flush(self) -> None:
        """Append all decisions that wait."""
        self._start_working()
        await self.settle()
        if self.failed is not None:
            raise self.failed

    async def settle(self) -> None:
        """Wait until no decision waits for its append."""
        if self._working is not None:
            await asyncio.wait([self._working])

    async def _request(self, request: _Request) -> Sequence[Record]:
        assert request.answer is not None
        if self.failed is not None:
            raise self.failed
        self._put(request)
        return await request.answer

    def _put(self, request: _Request) -> None:
        self._requests.append(request)
        self._start_working()

    def _start_working(self) -> None:
        if self._working is None and (self._requests or self._is_surplus):
            self._working = self._world.spawn(self._work(), name=f"driven {self.journal.session_id}")

    async def _work(self) -> None:
        try:
            while self._requests or self._is_surplus:
                if self._requests:
                    await self._step(self._next_batch())
                else:
                    await self._release()
        finally:
            self._working = None

    def _next_batch(self) -> list[_Request]:
        """Take the decisions before the next claim, or that claim."""
        batch = [self._requests.popleft()]
        while batch[0].decision and self._requests and self._requests[0].decision:
            batch.append(self._requests.popleft())
        return _merge(batch)

    @property
    def _is_surplus(self) -> bool:
        return not self._is_wanted and self.journal.epoch > 0

    async def _release(self) -> None:
        try:
            await self.journal.release()
        except MidstreamError as error:  # the session stays claimed until this process ends
            self.failed = self.failed or error
        self.journal.epoch = 0

    async def _step(self, batch: Sequence[_Request]) -> None:
        try:
            if batch[0].decision is None:
                await self._claim()
                self._answer(batch[0], ())
            else:
                await self._decide(batch)
        except MidstreamError as error:
            if batch[0].decision is not None and not isinstance(error, UnavailableError):
                self.failed = error
            for request in batch:
                self._answer(request, error)
        except (Exception, asyncio.CancelledError) as error:  # no task may wait for its answer for ever
            stopped = UnavailableError(
                f"session {self.journal.session_id!r} stopped on {type(error).__name__}"
            )
            self.failed = stopped
            for request in (*batch, *self._requests):
                self._answer(request, stopped)
            self._requests.clear()
            raise

    async def _decide(self, batch: Sequence[_Request]) -> None:
        if not self.journal.epoch:
            await self._claim()
        at = self._world.now()
        records = self.decided = self._announcement(at)
        state = self._fold(self.state, records)
        taken: list[tuple[_Request, Sequence[Record]]] = []
        for request in batch:
            assert request.decision is not None, "a claim is a batch of its own"
            try:
                decided = request.decision(state, self.journal.epoch, at)
            except Refused as refused:
                self._answer(request, refused.error)
                continue
            state = self._fold(state, decided)
            records.extend(decided)
            taken.append((request, decided))
        if any(decided for _, decided in taken):
            await self._append(records, state, is_patient=any(each.is_patient for each, _ in taken))
            self.state, self._announced, self.decided = state, self.journal.epoch, []
            self.on_records([(self.journal.epoch, record) for record in records])
        for request, decided in taken:
            self._answer(request, decided)

    def _answer(self, request: _Request, answer: Sequence[Record] | MidstreamError) -> None:
        waiting = request.answer
        if isinstance(answer, MidstreamError):
            if waiting is None:
                self.failed = self.failed or answer  # no task waits for it: the next call raises the error
            elif not waiting.done():
                waiting.set_exception(answer)
        elif waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _claim(self) -> None:
        """Claim the session under a new epoch, and fold the records of other nodes.

        After a kill and an immediate restart, the session may be held by the killed process for a moment.
        """
        until = self._world.monotonic() + self.journal.death_noticed_s
        while True:
            try:
                await self.journal.claim(at=self._world.now())
                break
            except LeaseHeldError:
                if self._world.monotonic() >= until:
                    raise
            await self._world.sleep(HELD_PAUSE_S)
        try:
            others = await self.journal.catch_up()
            self.state = sessions.fold(others, self.state)
        except MidstreamError as error:
            self.journal.epoch = 0
            self.failed = error
            raise
        self.on_records(others)

    def _announcement(self, at: float) -> list[Record]:
        """Return the first record of the epoch, if it is not in the journal yet."""
        epoch = self.journal.epoch
        if epoch == self._announced:
            return []
        name, version = self._agent
        return [EpochStarted(epoch, self._node, at, agent=name, agent_version=version)]

    async def _append(self, records: Sequence[Record], state: Session, *, is_patient: bool) -> None:
        batch = batch_of(records, (), self.state, state, epoch=self.journal.epoch)
        tries = APPEND_ATTEMPTS_MAX if is_patient else 1
        for failures in range(1, tries + 1):
            try:
                await self.journal.append(batch)
            except UnavailableError:
                if failures == tries:
                    raise
                await self._world.sleep(APPEND_BACKOFF.wait_s(failures, chance=self._world.chance()))
            else:
                return

    def _fold(self, state: Session, records: Sequence[Record]) -> Session:
        for record in records:
            state = sessions.evolve(state, record, epoch=self.journal.epoch)
        return state


def decision_of(command: DrivenCommand) -> Decision:
    """Return the decision for a command of the loop."""
    return lambda state, epoch, at: decide(state, command, epoch=epoch, at=at)


def _merge(requests: Sequence[_Request]) -> list[_Request]:
    """Join neighbouring deltas, so that a fast model costs one record and not hundreds."""
    merged: list[_Request] = []
    for request in requests:
        if merged and request.deltas and merged[-1].deltas:
            deltas = merge_deltas((*merged.pop().deltas, *request.deltas))
            request = _Request(decision_of(AddOutput(deltas)), None, deltas)
        merged.append(request)
    return merged
