"""Driven turns: sessions whose turns are run by the loop of another framework.

The loop calls this module before each act and with each result; `session.driven_turn` decides the records. After a
crash the loop is run again: `Driver.begin` finds the open turn, and `DrivenTurn` answers from the journal until the
loop is where it was. Every run has an epoch of its own. So calls that an earlier run left started are in doubt, also
within one process. A run claims its session first.

Order of effects, as in midstream's own loop: append, then publish; append the intent, then act.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from msgspec import Struct

from midstream.engine.active_runs import ActiveRun, ActiveRuns
from midstream.engine.driven_journal import Decision, DrivenJournal, decision_of
from midstream.engine.journal import Journal, require_session_id
from midstream.environment import Fault, World
from midstream.errors import (
    AgentMismatchError,
    EventGoneError,
    SessionBusyError,
    StreamReusedError,
    UsageError,
)
from midstream.history.messages import Response, Text, ToolCall, ToolResult, UserMessage, storable
from midstream.observability.observers import Observer, Observers
from midstream.session import session as sessions
from midstream.session.calls import CallPlan
from midstream.session.driven_turn import (
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
from midstream.store.guard.guarded_store import guard_store, open_guarded
from midstream.tools.function_tools import CallContext

SESSIONS_KEPT_MAX = 1000
"""Sessions whose state stays in memory between their turns. Beyond it, the longest unused one is released."""


class DrivenTurn:
    """One run of a loop through one turn. Responses come in order; the calls of one response in any order.

    After `leave` only outcomes of calls are accepted: a tool that the run started may end late.
    """

    def __init__(self, journal: DrivenJournal, world: World, number: int, *, is_over: bool = False) -> None:
        self.number = number
        self.recorded: dict[int, ResponseCompleted] = {}
        """The responses that the journal had when this run began, by number."""
        self.cancelled: tuple[Record, ...] = ()
        """The records of the cancelled turns directly before this one, which the loop's history lacks."""
        self._journal = journal
        self._world = world
        self._started: dict[tuple[int, str], bool] = {}
        """The started calls, each with whether a person allowed its last run."""
        self._outcomes: dict[tuple[int, str], CallEnded] = {}
        self._is_over = is_over
        self._has_left = False
        self._response_no = 0
        self._response: Response | None = None
        self._taken: set[str] = set()

    def note(self, records: Sequence[tuple[int, Record]]) -> None:
        """Fold journaled results that this turn's loop can reuse, also late results of an earlier run."""
        for _, record in records:
            if getattr(record, "turn", 0) != self.number:
                continue
            if isinstance(record, ResponseCompleted):
                self.recorded[record.response] = record
            elif isinstance(record, CallStarted):
                self._started[record.response, record.call_id] = record.arguments is not None
            elif isinstance(record, CallEnded):
                self._outcomes[record.response, record.result.call_id] = record

    def leave(self) -> None:
        """End this run; another run may continue the turn."""
        self._has_left = True

    def skip(self, responses: int) -> None:
        """Skip responses that the loop received with their results, except for the last one, whose calls it runs."""
        self._response_no = responses
        known = self.recorded.get(responses)
        self._response = known.body if known else None
        self._taken = set()

    def find_response(self, call_ids: AbstractSet[str]) -> int:
        """Return the number of the newest response that requested all these calls, by the loop's ids; or 0."""
        if self._response is not None and call_ids <= {_loop_id(call) for call in self._response.calls}:
            return self._response_no
        numbers = (
            number
            for number in sorted(self.recorded, reverse=True)
            if call_ids <= {_loop_id(call) for call in self.recorded[number].body.calls}
        )
        return next(numbers, 0)

    def started_calls(self, response_no: int) -> Mapping[str, ToolCall]:
        """Return the started calls of a response, by the loop's ids, with and without outcome."""
        known = self.recorded.get(response_no)
        calls = known.body.calls if known else ()
        return {_loop_id(call): call for call in calls if (response_no, call.id) in self._started}

    def has_outcome(self, response_no: int, call_id: str) -> bool:
        """Whether a call of `started_calls`, by midstream's id, has an outcome."""
        return (response_no, call_id) in self._outcomes

    @property
    def response_no(self) -> int:
        """The number of the loop's current response; 0 before the first."""
        return self._response_no

    async def request_response(self, answers: Mapping[str, ToolResult]) -> ResponseCompleted | None:
        """Request the next response: return it from the journal, or announce an attempt.

        Args:
            answers: Results by the loop itself for calls of the previous response, by the loop's call ids.

        Raises:
            UsageError: The turn has ended and its loop now requests more than before, or the run has left the turn.
        """
        self._require_presence()
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
        if not self._has_left:
            self._journal.journal_output(deltas)

    @property
    def next_place(self) -> tuple[int, int, int]:
        """The turn, response and attempt of the current model call, for its deltas."""
        state = self._journal.state.turn
        return self.number, self._response_no + 1, getattr(state, "attempt", 1)

    async def journal_response(self, response: Response, plans: Sequence[CallPlan], native: str) -> None:
        """Journal the whole response before any of its calls starts; with calls, in the append of the first start."""
        self._require_presence()
        responded = Responded(response, tuple(plans), native)
        if response.calls:
            self._journal.hold(decision_of(responded))
        else:
            await self._submit(responded)
        self._begin_response(self._response_no + 1, response)

    async def journal_failure(self, code: str, message: str) -> None:
        """Journal that the model gave no usable response."""
        if not self._has_left:
            await self._submit(AttemptLost(code, message))

    async def start(self, call_id: str, *, is_approved: bool = False) -> CallEnded | CallContext:
        """Announce a call: return its outcome if there is one, else the context in which it runs.

        Args:
            call_id: The loop's id of the call.
            is_approved: A person allowed this run. A call that started without approval was suspended, and restarts.

        Raises:
            UsageError: The response has no such call, or the run has left the turn.
        """
        self._require_presence()
        call = self._call_of(call_id)
        self._taken.add(call.id)
        key = (self._response_no, call.id)
        if (known := self._outcomes.get(key)) is not None:
            return known
        response_no = self._response_no
        is_suspended = is_approved and self._started.get(key) is False
        for record in await self._submit(BeginCall(call.id, is_approved, is_suspended)):
            if isinstance(record, CallStarted):
                self._require_presence()
                self._world.reach(Fault.BEFORE_TOOL)
                session = self._journal.journal.session_id
                return CallContext(session, self.number, response_no, call.id, record.run)
        return self._outcomes[key]  # it was in doubt and may not run again, or its outcome came late

    async def journal_outcome(self, result: ToolResult, native: str) -> None:
        """Journal the outcome of a call that `start` permitted, also after `leave`; `result` has its context's id."""
        self._world.reach(Fault.AFTER_TOOL)
        await self._submit(Ended(result, native))

    async def pause(self) -> None:
        """Journal all pending records before the loop waits for people, so that another process can continue."""
        if not self._has_left:
            await self._journal.flush()

    async def close(self, status: TurnStatus, answers: Mapping[str, ToolResult]) -> None:
        """End the turn, if it has not ended."""
        if not self._is_over:
            await self._submit(EndTurn(status, self._by_our_ids(answers)))
            self._is_over = True

    async def _submit(
        self, command: RequestModelResponse | Responded | AttemptLost | BeginCall | Ended | EndTurn
    ) -> Sequence[Record]:
        return await self._journal.submit(decision_of(command))

    def _require_presence(self) -> None:
        if self._has_left:
            raise UsageError(
                f"this run has left turn {self.number} of session {self._journal.journal.session_id!r}, and another "
                "run may go on with it; await a run, or read its stream to the end, inside its `turn`"
            )

    def _begin_response(self, number: int, response: Response) -> None:
        self._response_no, self._response = number, response
        self._taken = set()

    def _call_of(self, call_id: str) -> ToolCall:
        """Find a call by the loop's id. If the provider used an id twice, return the first call that was not taken."""
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
    """A turn that has begun and not ended."""

    session: str
    message: UserMessage
    key: str
    """The key that opened the turn, and with which it is continued; "" if it was opened without one."""
    at: float

    @property
    def text(self) -> str:
        """The text of the message, without its files."""
        return "".join(part.text for part in self.message.parts if isinstance(part, Text))


class Driver:
    """Engine of driven turns for one loop of a framework.

    Args:
        name: The loop's name in the journal. Only a driver of this name continues its turns.
        store: The store of the journals; opened at the first use, closed by `close`.
        agent: The agent's name in the journal. An open turn of an agent with another name is refused; "" matches any.
        agent_version: Its version; compared if both versions are set.
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
        self._runs = ActiveRuns()
        self._turns: dict[str, tuple[ActiveRun, DrivenTurn]] = {}
        self._is_open = False

    async def open(self) -> None:
        """Open the store. A second call has no effect.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
        """
        if not self._is_open:
            await open_guarded(self.store)
            self._is_open = True

    async def close(self) -> None:
        """Release all sessions and close the store. Running calls are in doubt for the next process."""
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
        owner: asyncio.Task[Any] | None = None,
    ) -> DrivenTurn:
        """Open a turn, or continue the one that this message opened. End the run with `leave`.

        A message with a key is the open turn's message only under the key that opened that turn. An equal message with
        another key is another message, also if the turn was opened without a key. A message without a key is the open
        turn's message if both are equal. The session is claimed first, so that no other process answers at the same
        time.

        Args:
            message: The user's message; None if the loop brings results for the calls of a turn.
            key: A key of the message; with it, a turn that has completed is replayed from the journal.
            digest: Digest of the message, to detect a key that is used for two messages.
            goes_on: Continue the open turn, if there is one, whichever message and key opened it.
            cancels: Cancel an open turn of another message, in the append that opens the new one. Its records are in
                `DrivenTurn.cancelled`.
            owner: The task whose cancellation ends the run; the current one by default.

        Raises:
            UsageError: The session's name or the key is not valid, there is no turn to continue, or the turn of the key
                ended without completing. Nothing was changed.
            SessionBusyError: Another turn is open in this session, running here or interrupted. The end of a cancelled
                run of this process is awaited, `active_runs.ENDING_S` at most. Nothing was changed.
            SeqnoReusedError: The key was used for another message. Nothing was changed.
            LeaseHeldError: Another process has the session. Nothing was changed.
            AgentMismatchError: The open turn belongs to an agent of another name. Nothing was changed.
        """
        require_session_id(session)
        _require_key(key)
        await self.open()
        run = await self._runs.enter(session, owner)
        try:
            journal = await self._journal(session)
            turn = None
            if not (key and _is_over(journal.state, key)):
                await journal.begin_run()
                turn = await self._continue_turn(journal) if goes_on else None
            turn = turn or await self._begin_turn(journal, message, key, digest, cancels=cancels)
        except BaseException:
            self._end_run(session, run)
            raise
        self._turns[session] = (run, turn)
        return turn

    def leave(self, session: str, turn: DrivenTurn | None = None) -> None:
        """End the run of the loop, so that another process can claim the session.

        Args:
            session: The session of the run.
            turn: The value that `begin` returned for the run, so that no later run is ended; by default the active one.
        """
        run, present = self._turns.get(session, (None, None))
        if turn is not None:
            turn.leave()
        if run is not None and present is not None and turn in (None, present):
            del self._turns[session]
            present.leave()
            self._end_run(session, run)

    def _end_run(self, session: str, run: ActiveRun) -> None:
        if self._runs.leave(session, run) and (journal := self._kept.get(session)) is not None:
            journal.release_when_idle()

    async def open_turns(self) -> AsyncIterator[OpenTurn]:
        """Iterate over the open turns of this driver, last changed first."""
        await self.open()
        found = [
            info.session
            async for info in self.store.list(live=False)
            if info.mark.status == SessionStatus.RUNNING
        ]
        for session in found:
            journal = self._make_journal(session)
            records = await journal.load()
            is_ours = journal.state.driver == self.name and self._may_go_on(journal.state)
            if is_ours and session not in self._runs:
                opened = _opening_of(records)
                yield OpenTurn(session, opened.message, opened.stream, opened.at)

    async def abandon(self, session: str) -> tuple[Record, ...]:
        """End the open turn of a session as interrupted and return its records, or none if no turn is open.

        Raises:
            SessionBusyError: It is running in this process. Nothing was changed.
            LeaseHeldError: Another process has the session. Nothing was changed.
        """
        require_session_id(session)
        await self.open()
        if await self.store.find(session) is None:
            return ()
        run = await self._runs.enter(session)
        journal = None
        try:
            journal = await self._journal(session)
            await journal.begin_run()
            if journal.state.driver != self.name or not journal.state.is_live:
                return ()
            number = journal.state.turns
            records = await self._read(journal)
            closed = await journal.submit(decision_of(EndTurn(TurnStatus.INTERRUPTED, {})))
            return (*_records_of(records, number), *closed)
        finally:
            self._end_run(session, run)
            if journal is not None:
                await journal.settle()

    async def follow(self, session: str, *, after: int = 0) -> AsyncIterator[StoredRecord]:
        """Yield the records of a session after position `after`, and all that this process appends later, without end.

        Raises:
            UsageError: No run of this process has used the session.
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
        self, journal: DrivenJournal, message: UserMessage | None, key: str, digest: str, *, cancels: bool
    ) -> DrivenTurn:
        session, state = journal.journal.session_id, journal.state
        if key and key in state.streams:
            try:
                if message is not None:
                    decide(state, Begin(message, self.name, key, digest), epoch=state.epoch, at=0.0)
            except Refused as refused:
                if isinstance(refused.error, StreamReusedError):
                    raise StreamReusedError(
                        f"`key` {key!r} was used for another message of session {session!r}; give each message its own"
                    ) from refused
                raise refused.error from refused
            is_over = _is_over(state, key)
            if not is_over:
                self._refuse_other_agent(session, state)
            return await self._take_up(journal, state.streams[key].turn, is_over=is_over)
        if not state.is_live:
            if message is None:
                raise UsageError(f"no turn of session {session!r} is open, so nothing can be continued")
            was_cancelled = state.last_turn is not None and state.last_turn.status is TurnStatus.CANCELLED
            return await self._open_turn(journal, message, key, digest, has_cancelled=was_cancelled)
        if state.driver == self.name and message is not None:
            # DRIVEN-3: an equal message under a new key is another one. As part of this turn, its key would be lost.
            if not key and message == _opening_of(await self._read(journal)).message:
                self._refuse_other_agent(session, state)
                return await self._take_up(journal, state.turns, is_over=False)
            if cancels:
                first = EndTurn(TurnStatus.CANCELLED, {})
                return await self._open_turn(journal, message, key, digest, first=first, has_cancelled=True)
        raise SessionBusyError(
            f"a turn of session {session!r} was left open: run it again with its own message and key to continue it, "
            "or abandon it"
        )

    async def _continue_turn(self, journal: DrivenJournal) -> DrivenTurn | None:
        state = journal.state
        if state.driver != self.name or not state.is_live:
            return None
        self._refuse_other_agent(journal.journal.session_id, state)
        return await self._take_up(journal, state.turns, is_over=False)

    def _may_go_on(self, state: Session) -> bool:
        return not self.agent or state.is_agent(self.agent, self.agent_version)

    def _refuse_other_agent(self, session: str, state: Session) -> None:
        """Refuse to continue a turn of an agent of another name (TURN-86)."""
        if not self._may_go_on(state):
            theirs = f"{state.agent!r} {state.agent_version}".strip()
            ours = f"{self.agent!r} {self.agent_version}".strip()
            raise AgentMismatchError(
                f"the open turn of session {session!r} belongs to the agent {theirs}, and this program runs {ours}: "
                "run that agent on this store, or end the turn with `abandon`"
            )

    async def _open_turn(
        self,
        journal: DrivenJournal,
        message: UserMessage,
        key: str,
        digest: str,
        *,
        first: EndTurn | None = None,
        has_cancelled: bool = False,
    ) -> DrivenTurn:
        begin = decision_of(Begin(message, self.name, key, digest))
        await journal.submit(_both(decision_of(first), begin) if first else begin, is_patient=False)
        turn = DrivenTurn(journal, self.world, journal.state.turns)
        journal.on_records = turn.note
        if has_cancelled:
            turn.cancelled = _cancellations_before(await self._read(journal), turn.number)
        return turn

    async def _take_up(self, journal: DrivenJournal, number: int, *, is_over: bool) -> DrivenTurn:
        turn = DrivenTurn(journal, self.world, number, is_over=is_over)
        journal.on_records = turn.note
        records = await self._read(journal)
        status = _status_of(records, number)
        if is_over and status is None:
            raise EventGoneError(f"turn {number} is over, and its result is no longer kept")
        if is_over and status is not TurnStatus.COMPLETED:
            raise UsageError(f"turn {number} ended as {status}; give the next attempt its own key")
        turn.note(records)
        turn.cancelled = _cancellations_before(records, number)
        return turn

    async def _journal(self, session: str) -> DrivenJournal:
        """Return this process's journal of a session, or load it."""
        journal = self._kept.pop(session, None)
        if journal is None or not journal.is_usable:
            journal = self._make_journal(session)
            await journal.load()
        self._keep(journal)
        return journal

    def _make_journal(self, session: str) -> DrivenJournal:
        return DrivenJournal(
            self.store,
            session,
            self.world,
            node=self._node,
            agent=(self.agent, self.agent_version),
            observers=self._observers,
        )

    async def _read(self, journal: DrivenJournal) -> list[tuple[int, Record]]:
        """Read all records of a session again."""
        return await Journal(self.store, journal.journal.session_id, self.world).load()

    def _keep(self, journal: DrivenJournal) -> None:
        self._kept[journal.journal.session_id] = journal
        if len(self._kept) > SESSIONS_KEPT_MAX:
            idle = next((each for each in self._kept if each not in self._runs), None)
            if idle is not None:
                del self._kept[idle]


def _both(first: Decision, second: Decision) -> Decision:
    """Decide two commands in one append, the second on the state after the first."""

    def decided(state: Session, epoch: int, at: float) -> Sequence[Record]:
        records = first(state, epoch, at)
        for record in records:
            state = sessions.evolve(state, record, epoch=epoch)
        return (*records, *second(state, epoch, at))

    return decided


def _require_key(key: object) -> None:
    if not isinstance(key, str) or storable(key) != key:
        raise UsageError(f"`key` is {key!r}; expected text")


def _is_over(state: Session, key: str) -> bool:
    """Whether the turn of a message has ended, so that only its journal is needed."""
    known = state.streams.get(key)
    return known is not None and (not state.is_live or known.turn != state.turns)


def _loop_id(call: ToolCall) -> str:
    return call.provider_id or call.id


def _records_of(records: Sequence[tuple[int, Record]], number: int) -> tuple[Record, ...]:
    return tuple(record for _, record in records if getattr(record, "turn", 0) == number)


def _cancellations_before(records: Sequence[tuple[int, Record]], number: int) -> tuple[Record, ...]:
    """Return the records of the turns before this one, back to the last that was not cancelled."""
    first = number
    while first > 1 and _status_of(records, first - 1) is TurnStatus.CANCELLED:
        first -= 1
    return tuple(record for _, record in records if first <= getattr(record, "turn", 0) < number)


def _opening_of(records: Sequence[tuple[int, Record]]) -> MessageAccepted:
    return next(record for _, record in reversed(records) if isinstance(record, MessageAccepted))


def _status_of(records: Sequence[tuple[int, Record]], number: int) -> TurnStatus | None:
    return next(
        (record.status for _, record in records if isinstance(record, TurnEnded) and record.turn == number),
        None,
    )
