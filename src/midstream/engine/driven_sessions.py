"""Sessions whose turns the loop of a framework drives: its agent is made durable from outside.

The loop asks here before it acts and reports the result here; `core.driven` decides what is written.
After a crash the loop is simply run again: `Driver.begin` finds the open turn, and `DrivenTurn` answers from the
journal until the loop has got to where it was. Every such run is an epoch of its own, so that what an earlier run
left started is in doubt, also within one process.

Order law, as for our own loop: append, then publish; append the intent, then act.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from midstream.engine.journal import Journal, require_session_id
from midstream.engine.listing import batch_of
from midstream.environment import Fault, World
from midstream.errors import (
    AgentMismatchError,
    EventGoneError,
    MidstreamError,
    SessionBusyError,
    UnavailableError,
    UsageError,
)
from midstream.history.messages import Response, Text, ToolCall, ToolResult, UserMessage
from midstream.models.responses import merge_deltas
from midstream.observability.observers import Observer, Observers
from midstream.retries import APPEND_ATTEMPTS_MAX, APPEND_BACKOFF
from midstream.session import session as sessions
from midstream.session.calls import CallPlan
from midstream.session.driven_turn import (
    AddOutput,
    AttemptLost,
    Begin,
    BeginCall,
    Ended,
    EndTurn,
    RequestModelResponse,
    Responded,
    decide,
)
from midstream.session.records import (
    CallEnded,
    CallStarted,
    Delta,
    EpochStarted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    SessionStatus,
    TurnEnded,
    TurnStatus,
)
from midstream.session.session import Session
from midstream.session.turn.commands import Refused
from midstream.store.contract import Store, StoredRecord
from midstream.store.guard.guarded_store import guard_store
from midstream.tools.function_tools import CallContext

SESSIONS_KEPT_MAX = 1000
"""Sessions whose fold is kept between their turns; beyond it the longest unused is let go."""

HOLD_S = 0.005
"""Seconds that a whole response may wait for the start of its first call, to be one append with it."""

Decision = Callable[[Session, int, float], Sequence[Record]]
"""What to append, given the fold, the epoch and the time."""


class _Question(Struct):
    """A decision on its way to the journal; text is not waited for."""

    decision: Decision
    answer: asyncio.Future[Sequence[Record]] | None
    deltas: tuple[Delta, ...] = ()
    is_patient: bool = True


class DrivenJournal:
    """A journal with its fold, for a loop that is not ours. Commands that come at once are one append."""

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
        self._world = world
        self._node = node
        self._agent = agent
        self.on_others: Callable[[Sequence[tuple[int, Record]]], None] = lambda _records: None
        """Receives what other nodes appended since it was last read here."""
        self.was_cancelled = False
        """Whether its last turn ended as cancelled: the next one needs the records of it."""
        self._questions: deque[_Question] = deque()
        self.is_wanted = True
        """Whether a run is at work on it here: meanwhile it is kept from other processes."""
        self._working: asyncio.Task[None] | None = None

    async def load(self) -> list[tuple[int, Record]]:
        """Fold what is there and return it; nothing is claimed.

        Raises:
            RecordUndecodableError: It cannot be read.
        """
        records = await self.journal.load()
        self.state = sessions.fold(records, self.state)
        return records

    async def submit(self, decision: Decision, *, is_patient: bool = True) -> Sequence[Record]:
        """Decide and append; return what was decided once it is durable.

        Raises:
            MidstreamError: Refused, or the journal cannot be written; nothing of this decision was.
        """
        if self.failed is not None:
            raise self.failed
        answer: asyncio.Future[Sequence[Record]] = self.loop.create_future()
        self._put(_Question(decision, answer, is_patient=is_patient))
        return await answer

    def journal_output(self, deltas: tuple[Delta, ...]) -> None:
        """Journal a model's words soon; several at once become one record."""
        if self.failed is None:
            self._put(_Question(_decision(AddOutput(deltas)), None, deltas))

    def hold(self, decision: Decision) -> None:
        """Decide and append together with the next `submit`, or soon, if there is none.

        Raises:
            MidstreamError: The journal cannot be written. Where that shows later, the next `submit` raises it.
        """
        if self.failed is not None:
            raise self.failed
        self._questions.append(_Question(decision, None))
        self.loop.call_later(HOLD_S, self._start_working)

    @property
    def is_here(self) -> bool:
        """Whether it belongs to the event loop that asks."""
        return self.loop is asyncio.get_running_loop()

    def release_when_idle(self) -> None:
        """Release the session whenever nothing is on its way, so that any node may claim it; an append claims again."""
        self.is_wanted = False
        self._start_working()

    async def settle(self) -> None:
        """Wait until nothing is on its way."""
        if self._working is not None:
            await asyncio.wait([self._working])

    def _put(self, question: _Question) -> None:
        self._questions.append(question)
        self._start_working()

    def _start_working(self) -> None:
        if self._working is None and (self._questions or self._is_surplus):
            self._working = self._world.spawn(self._work(), name=f"driven {self.journal.session_id}")

    async def _work(self) -> None:
        try:
            while self._questions or self._is_surplus:
                if self._questions:
                    batch = _merge(self._questions)
                    self._questions.clear()
                    await self._step(batch)
                else:
                    await self._release()
        finally:
            self._working = None

    @property
    def _is_surplus(self) -> bool:
        return not self.is_wanted and self.journal.epoch > 0

    async def _release(self) -> None:
        try:
            await self.journal.release()
        except MidstreamError as error:  # it stays ours until this process ends
            self.failed = self.failed or error
        self.journal.epoch = 0

    async def _step(self, batch: Sequence[_Question]) -> None:
        taken: list[tuple[_Question, Sequence[Record]]] = []
        try:
            records, state = await self._claim()
            at = self._world.now()
            for question in batch:
                try:
                    decided = question.decision(state, self.journal.epoch, at)
                except Refused as refused:
                    self._answer(question, refused.error)
                    continue
                state = self._fold(state, decided)
                records.extend(decided)
                taken.append((question, decided))
            if any(decided for _, decided in taken):
                await self._append(records, state, is_patient=any(each.is_patient for each, _ in taken))
                self.state = state
        except MidstreamError as error:
            if not isinstance(error, UnavailableError):
                self.failed = error
            for question in batch:
                self._answer(question, error)
            return
        except (Exception, asyncio.CancelledError) as error:  # no task may wait for its answer for ever
            stopped = UnavailableError(
                f"session {self.journal.session_id!r} stopped on {type(error).__name__}"
            )
            self.failed = stopped
            for question in (*batch, *self._questions):
                self._answer(question, stopped)
            self._questions.clear()
            raise
        for question, decided in taken:
            self._answer(question, decided)

    def _answer(self, question: _Question, answer: Sequence[Record] | MidstreamError) -> None:
        waiting = question.answer
        if isinstance(answer, MidstreamError):
            if waiting is None:
                self.failed = self.failed or answer  # no task waits for it: the next call raises it
            elif not waiting.done():
                waiting.set_exception(answer)
        elif waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _claim(self) -> tuple[list[Record], Session]:
        """Begin an epoch before the first append of this run."""
        if self.journal.epoch:
            return [], self.state
        at = self._world.now()
        epoch = await self.journal.claim(at=at)
        try:
            others = await self.journal.catch_up()
            self.state = sessions.fold(others, self.state)
        except MidstreamError:
            self.journal.epoch = 0
            raise
        self.on_others(others)
        name, version = self._agent
        started: list[Record] = [EpochStarted(epoch, self._node, at, agent=name, agent_version=version)]
        return started, self._fold(self.state, started)

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


class DrivenTurn:
    """One run of a loop through one turn. The responses come in order; the calls of one response in any order."""

    def __init__(self, journal: DrivenJournal, world: World, number: int, *, is_over: bool = False) -> None:
        self.number = number
        self.recorded: dict[int, ResponseCompleted] = {}
        """The responses that the journal had when this run began, by number."""
        self.cancelled: tuple[Record, ...] = ()
        """The records of the turns directly before this one that were cancelled: the loop's history lacks them."""
        self._journal = journal
        self._world = world
        self._outcomes: dict[tuple[int, str], CallEnded] = {}
        self._is_over = is_over
        self._response_no = 0
        self._response: Response | None = None
        self._taken: set[str] = set()

    def restore(self, records: Sequence[tuple[int, Record]]) -> None:
        """Take from a loaded journal what this turn's loop need not do again."""
        for _, record in records:
            if isinstance(record, ResponseCompleted) and record.turn == self.number:
                self.recorded[record.response] = record
            elif isinstance(record, CallEnded) and record.turn == self.number:
                self._outcomes[record.response, record.result.call_id] = record

    def skip(self, responses: int) -> None:
        """Begin after so many responses: the loop was handed them with their results, and runs the rest of the last."""
        self._response_no = responses
        known = self.recorded.get(responses)
        self._response = known.body if known else None

    async def request_response(self, answers: Mapping[str, ToolResult]) -> ResponseCompleted | None:
        """Request the next response: return it where it is in the journal, else announce an attempt.

        Args:
            answers: What the loop itself answered to calls of the response before, by the loop's call id.

        Raises:
            UsageError: The turn is over, and its loop now asks for more than it did.
        """
        number = self._response_no + 1
        if (known := self.recorded.get(number)) is not None:
            self._begin_response(number, known.body)
            return known
        if self._is_over:
            raise UsageError(
                f"turn {self.number} of session {self._journal.journal.session_id!r} is over, and its loop now takes "
                "another path; give a new turn its own key"
            )
        await self._submit(RequestModelResponse(number, self._by_our_ids(answers)))
        return None

    def journal_output(self, deltas: tuple[Delta, ...]) -> None:
        """Journal the model's output, soon and in order."""
        self._journal.journal_output(deltas)

    @property
    def next_place(self) -> tuple[int, int, int]:
        """Turn, response and attempt of the model call that is running: what its deltas carry."""
        state = self._journal.state.turn
        return self.number, self._response_no + 1, getattr(state, "attempt", 1)

    async def journal_response(self, response: Response, plans: Sequence[CallPlan], native: str) -> None:
        """Journal the whole response, before any of its calls starts; one with calls, in one append with the first."""
        responded = Responded(response, tuple(plans), native)
        if response.calls:
            self._journal.hold(_decision(responded))
        else:
            await self._submit(responded)
        self._begin_response(self._response_no + 1, response)

    async def journal_failure(self, code: str, message: str) -> None:
        """Journal that the model gave no usable response."""
        await self._submit(AttemptLost(code, message))

    async def start(self, call_id: str, *, is_approved: bool = False) -> CallEnded | CallContext:
        """Announce a call: return its outcome where there is one, else the context to run it in.

        Raises:
            UsageError: The response has no such call.
        """
        call = self._call_of(call_id)
        self._taken.add(call.id)
        key = (self._response_no, call.id)
        if (known := self._outcomes.get(key)) is not None:
            return known
        for record in await self._submit(BeginCall(call.id, is_approved)):
            if isinstance(record, CallEnded):
                self._outcomes[key] = record
                return record
            if isinstance(record, CallStarted):
                self._world.reach(Fault.BEFORE_TOOL)
                return CallContext(
                    self._journal.journal.session_id, self.number, self._response_no, call.id, record.run
                )
        raise UsageError(f"call {call_id!r} has ended already")

    async def journal_outcome(self, result: ToolResult, native: str) -> None:
        """Journal the outcome of a call that `start` let run; `result` carries the id of its context."""
        self._world.reach(Fault.AFTER_TOOL)
        await self._submit(Ended(result, native))

    async def close(self, status: TurnStatus, answers: Mapping[str, ToolResult]) -> None:
        """End the turn, where it has not ended."""
        if not self._is_over:
            await self._submit(EndTurn(status, self._by_our_ids(answers)))
            self._is_over = True
            self._journal.was_cancelled = status is TurnStatus.CANCELLED

    async def _submit(
        self, command: RequestModelResponse | Responded | AttemptLost | BeginCall | Ended | EndTurn
    ) -> Sequence[Record]:
        return await self._journal.submit(_decision(command))

    def _begin_response(self, number: int, response: Response) -> None:
        self._response_no, self._response = number, response
        self._taken = set()

    def _call_of(self, call_id: str) -> ToolCall:
        """Find a call by the loop's id; where the provider gave one id twice, the first that was not taken yet."""
        calls = self._response.calls if self._response else ()
        for call in calls:
            if call.id not in self._taken and call_id in (call.id, call.provider_id):
                return call
        raise UsageError(f"no call {call_id!r} in response {self._response_no} of turn {self.number}")

    def _by_our_ids(self, answers: Mapping[str, ToolResult]) -> dict[str, ToolResult]:
        ours: dict[str, ToolResult] = {}
        for call in self._response.calls if self._response else ():
            found = answers.get(call.id) or answers.get(call.provider_id or "")
            if found is not None:
                ours[call.id] = ToolResult(call.id, found.content, found.outcome)
        return ours


class OpenTurn(Struct, frozen=True):
    """A turn that was begun and has not ended."""

    session: str
    message: UserMessage
    key: str
    at: float

    @property
    def text(self) -> str:
        """The words of the message, without its files."""
        return "".join(part.text for part in self.message.parts if isinstance(part, Text))


class Driver:
    """Engine under the loop of a framework, for the sessions that this loop drives.

    Args:
        name: The loop's name in the journal. Only a driver of this name goes on with its turns.
        store: Where journals live; opened at the first use, closed by `close`.
        agent: The agent's name in the journal. The open turn of another name is refused; "" fits any.
        agent_version: Its version; versions count where both are known.
        world: Clock, chance and tasks; the real ones by default.
        observers: Notified of appends.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        agent: str = "",
        agent_version: str = "",
        world: World | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.name = name
        self.agent = agent
        self.agent_version = agent_version
        self.world = world or World()
        self.store = guard_store(store, world=self.world)
        self._observers = Observers(observers)
        self._node = self.world.new_id("node")
        self._kept: dict[str, DrivenJournal] = {}
        self._busy: set[str] = set()
        self._is_open = False

    async def open(self) -> None:
        """Open the store. Calling it again is harmless.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: It cannot be opened. Nothing was changed.
        """
        if not self._is_open:
            await self.store.open()
            self._is_open = True

    async def close(self) -> None:
        """Let all sessions go and close the store. What runs is in doubt for the next process."""
        if self._is_open:
            self._is_open = False
            self._kept.clear()
            await self.store.close()

    async def begin(
        self,
        session: str,
        message: UserMessage | None,
        *,
        key: str = "",
        digest: str = "",
        goes_on: bool = False,
        cancels: bool = False,
    ) -> DrivenTurn:
        """Open a turn, or take up the one this message opened. End it with `leave`.

        Args:
            message: The user's message, if any.
            key: The message's own name: with it, a turn that has ended is replayed from the journal.
            digest: Digest of the message, by which a key used twice for two messages is found.
            goes_on: Take up the open turn, if there is one, whatever opened it.
            cancels: A turn that was left open by another message is ended as cancelled, in the append that opens
                the new one; its records are in `DrivenTurn.cancelled`.

        Raises:
            UsageError: The session cannot be called so, or there is nothing to take up. Nothing was changed.
            SessionBusyError: Another turn is open in this session, here or left behind. Nothing was changed.
            SeqnoReusedError: The key was used for another message. Nothing was changed.
            LeaseHeldError: Another process is working on it. Nothing was changed.
            AgentMismatchError: The open turn belongs to an agent of another name. Nothing was changed.
        """
        require_session_id(session)
        await self.open()
        if session in self._busy:
            raise SessionBusyError(f"a turn of session {session!r} is running in this process")
        self._busy.add(session)
        try:
            if goes_on and (turn := await self._continue_turn(session)) is not None:
                return turn
            return await self._begin_turn(session, message, key, digest, cancels=cancels)
        except BaseException:
            self.leave(session)
            raise

    def leave(self, session: str) -> None:
        """End the run of the loop, however it went: another process may have the session now."""
        self._busy.discard(session)
        if (journal := self._kept.get(session)) is not None and journal.is_here:
            journal.release_when_idle()

    async def open_turns(self) -> AsyncIterator[OpenTurn]:
        """Iterate over the turns of this driver that were begun and have not ended, last changed first."""
        await self.open()
        found = [
            info.session
            async for info in self.store.list(live=False)
            if info.mark.status == SessionStatus.RUNNING
        ]
        for session in found:
            journal, records = await self._load(session)
            is_ours = journal.state.driver == self.name and self._may_go_on(journal.state)
            if is_ours and session not in self._busy:
                opened = _opening_of(records)
                yield OpenTurn(session, opened.message, opened.stream, opened.at)

    async def abandon(self, session: str) -> tuple[Record, ...]:
        """End the open turn of a session as interrupted and return its records; none, where no turn is open.

        Raises:
            SessionBusyError: It is running in this process. Nothing was changed.
            LeaseHeldError: Another process is working on it. Nothing was changed.
        """
        if session in self._busy:
            raise SessionBusyError(f"a turn of session {session!r} is running in this process")
        journal, records = await self._load(session)
        self._kept.pop(session, None)
        ended: tuple[Record, ...] = ()
        if journal.state.driver == self.name and journal.state.is_live:
            number = journal.state.turns
            closed = await journal.submit(_decision(EndTurn(TurnStatus.INTERRUPTED, {})))
            ended = (*_records_of(records, number), *closed)
        journal.release_when_idle()
        await journal.settle()
        return ended

    async def follow(self, session: str, *, after: int = 0) -> AsyncIterator[StoredRecord]:
        """Iterate over a session's records from position `after` on, for ever: as they are written here.

        Raises:
            UsageError: No run of this process has worked on the session.
        """
        journal = self._kept.get(session)
        if journal is None:
            raise UsageError(f"no run of this process has worked on session {session!r}")
        while True:
            page = await journal.journal.read(after=after, limit=1000)
            for stored in page:
                yield stored
                after = stored.position
            if not page:
                await journal.journal.wait(after)

    # --- finding the turn -------------------------------------------------------------------------------------

    async def _begin_turn(
        self, session: str, message: UserMessage | None, key: str, digest: str, *, cancels: bool
    ) -> DrivenTurn:
        kept = self._kept.get(session)
        is_usable = kept is not None and not kept.failed and kept.is_here and not kept.was_cancelled
        if kept and is_usable and message and not kept.state.is_live and key not in kept.state.streams:
            found = await self.store.find(session)
            if found is not None and found.end == kept.journal.newest.position:
                turn = await self._open_turn(kept, message, key, digest)
                turn.cancelled = ()
                return turn
        journal, records = await self._load(session)
        state = journal.state
        if key and message and key in state.streams:
            try:
                decide(state, Begin(message, self.name, key, digest), epoch=state.epoch, at=0.0)
            except Refused as refused:  # another message under this key
                raise refused.error from refused
            number = state.streams[key].turn
            is_over = not state.is_live or number != state.turns
            if not is_over:
                self._refuse_other_agent(session, state)
            return self._take_up(journal, records, number, is_over=is_over)
        if not state.is_live:
            if message is None:
                raise UsageError(f"no turn of session {session!r} is open, so nothing can be continued")
            turn = await self._open_turn(journal, message, key, digest)
            turn.cancelled = _cancellations_before(records, turn.number)
            return turn
        if state.driver == self.name and message == _opening_of(records).message:
            self._refuse_other_agent(session, state)
            return self._take_up(journal, records, state.turns, is_over=False)
        if state.driver == self.name and cancels and message is not None:
            turn = await self._open_turn(
                journal, message, key, digest, first=EndTurn(TurnStatus.CANCELLED, {})
            )
            closed = [(0, record) for record in turn.cancelled]
            turn.cancelled = _cancellations_before([*records, *closed], turn.number)
            return turn
        raise SessionBusyError(
            f"a turn of session {session!r} was left open: run it again with its own message to continue it, or "
            "abandon it"
        )

    async def _continue_turn(self, session: str) -> DrivenTurn | None:
        journal, records = await self._load(session)
        if journal.state.driver != self.name:
            return None
        self._refuse_other_agent(session, journal.state)
        return self._take_up(journal, records, journal.state.turns, is_over=False)

    def _may_go_on(self, state: Session) -> bool:
        return not self.agent or state.is_agent(self.agent, self.agent_version)

    def _refuse_other_agent(self, session: str, state: Session) -> None:
        """Refuse to go on with a turn that an agent of another name began (TURN-86)."""
        if not self._may_go_on(state):
            theirs = f"{state.agent!r} {state.agent_version}".strip()
            raise AgentMismatchError(
                f"the open turn of session {session!r} belongs to the agent {theirs}, and this program runs "
                f"{self.agent!r}: run that agent on this store, or end the turn with `abandon`"
            )

    async def _open_turn(
        self,
        journal: DrivenJournal,
        message: UserMessage,
        key: str,
        digest: str,
        *,
        first: EndTurn | None = None,
    ) -> DrivenTurn:
        journal.is_wanted = True
        begin = _decision(Begin(message, self.name, key, digest))
        decided = await journal.submit(_both(_decision(first), begin) if first else begin, is_patient=False)
        self._keep(journal)
        if not any(isinstance(record, MessageAccepted) for record in decided):
            raise SessionBusyError("another process just took this message; try again")
        turn = DrivenTurn(journal, self.world, journal.state.turns)
        turn.cancelled = tuple(decided)
        return turn

    def _take_up(
        self, journal: DrivenJournal, records: Sequence[tuple[int, Record]], number: int, *, is_over: bool
    ) -> DrivenTurn:
        status = _status_of(records, number)
        if is_over and status is None:
            raise EventGoneError(f"turn {number} is over, and its result is no longer kept")
        if is_over and status is not TurnStatus.COMPLETED:
            raise UsageError(f"turn {number} ended as {status}; give the next attempt its own key")
        self._keep(journal)
        turn = DrivenTurn(journal, self.world, number, is_over=is_over)
        turn.restore(records)
        turn.cancelled = _cancellations_before(records, number)
        return turn

    async def _load(self, session: str) -> tuple[DrivenJournal, list[tuple[int, Record]]]:
        await self.open()
        journal = DrivenJournal(
            self.store,
            session,
            self.world,
            node=self._node,
            agent=(self.agent, self.agent_version),
            observers=self._observers,
        )
        return journal, await journal.load()

    def _keep(self, journal: DrivenJournal) -> None:
        name = journal.journal.session_id
        self._kept.pop(name, None)
        self._kept[name] = journal
        if len(self._kept) > SESSIONS_KEPT_MAX:
            idle = next((each for each in self._kept if each not in self._busy), None)
            if idle is not None:
                del self._kept[idle]


def _decision(
    command: Begin | RequestModelResponse | AddOutput | Responded | AttemptLost | BeginCall | Ended | EndTurn,
) -> Decision:
    return lambda state, epoch, at: decide(state, command, epoch=epoch, at=at)


def _both(first: Decision, second: Decision) -> Decision:
    """Decide two commands in one append, the second after what the first decided."""

    def decided(state: Session, epoch: int, at: float) -> Sequence[Record]:
        records = first(state, epoch, at)
        for record in records:
            state = sessions.evolve(state, record, epoch=epoch)
        return (*records, *second(state, epoch, at))

    return decided


def _records_of(records: Sequence[tuple[int, Record]], number: int) -> tuple[Record, ...]:
    return tuple(record for _, record in records if getattr(record, "turn", 0) == number)


def _cancellations_before(records: Sequence[tuple[int, Record]], number: int) -> tuple[Record, ...]:
    """Return the records of the turns before this one, back to the last that was not cancelled."""
    first = number
    while first > 1 and _status_of(records, first - 1) is TurnStatus.CANCELLED:
        first -= 1
    return tuple(record for _, record in records if first <= getattr(record, "turn", 0) < number)


def _merge(questions: Sequence[_Question]) -> list[_Question]:
    """Join neighbouring words, so that a fast model costs one record and not hundreds."""
    merged: list[_Question] = []
    for question in questions:
        if merged and question.deltas and merged[-1].deltas:
            deltas = merge_deltas((*merged.pop().deltas, *question.deltas))
            question = _Question(_decision(AddOutput(deltas)), None, deltas)
        merged.append(question)
    return merged


def _opening_of(records: Sequence[tuple[int, Record]]) -> MessageAccepted:
    return next(record for _, record in reversed(records) if isinstance(record, MessageAccepted))


def _status_of(records: Sequence[tuple[int, Record]], number: int) -> TurnStatus | None:
    return next(
        (record.status for _, record in records if isinstance(record, TurnEnded) and record.turn == number),
        None,
    )
