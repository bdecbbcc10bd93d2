"""Calls that a foreign graph may ask for again: each is started at most once, and its outcome is kept.

For frameworks that keep their own turns and hand us single calls: there is no response and no step to be seen, only
an id that stays the same when the graph runs a step again. One session holds the calls of one thread; in its journal
each of them is a response of its own. A turn begins with the first call of a step and ends when every call of it has an
outcome; a call that was suspended, or is in doubt, keeps it open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from midstream.engine.driven_sessions import DrivenJournal
from midstream.engine.journal import require_session_id
from midstream.environment import Fault, World
from midstream.errors import CallReusedError, SessionBusyError
from midstream.history.messages import Outcome, Response, ToolCall, ToolResult, UserMessage
from midstream.observability.observers import Observer, Observers
from midstream.session.calls import UNKNOWN_CONTENT, CallPlan, CallState, digest_of
from midstream.session.records import (
    CallEnded,
    CallStarted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.rerun_policy import CallVerdict, judge
from midstream.session.session import Session
from midstream.session.turn.commands import Refused
from midstream.session.turn.states import RunningCalls
from midstream.store.contract import Store
from midstream.store.guard.guarded_store import guard_store
from midstream.tools.function_tools import CallContext

SUSPENDED = '{"kind":"suspended"}'
"""Native outcome of a run that stopped by itself to wait for a person: the call may start again."""


class _Entry(Struct, frozen=True):
    """One call of the book."""

    turn: int
    response_no: int
    state: CallState
    ended: CallEnded | None = None


class CallBook:
    """The calls of any number of threads.

    Args:
        name: Whose graph it is; it stands in the journal.
        store: Where journals live; opened at the first call, closed by `close`.
        world: Clock, chance and tasks; the real ones by default.
        observers: Notified of appends.
    """

    def __init__(
        self, name: str, store: Store, *, world: World | None = None, observers: Iterable[Observer] = ()
    ) -> None:
        self.name = name
        self._observers = Observers(observers)
        self._store = guard_store(store)
        self._world = world or World()
        self._node = self._world.new_id("node")
        self._journals: dict[str, DrivenJournal] = {}
        self._entries: dict[str, dict[str, _Entry]] = {}
        self._opening: dict[str, asyncio.Task[DrivenJournal]] = {}
        self._starting: Counter[str] = Counter()
        self._running: set[tuple[str, str]] = set()
        self._is_open = False

    async def close(self) -> None:
        """Close the store. What runs is in doubt for the next process."""
        if self._is_open:
            self._is_open = False
            self._journals.clear()
            await self._store.close()

    async def start(self, session: str, call: ToolCall, plan: CallPlan) -> CallEnded | CallContext:
        """Announce a call: return its outcome where there is one, else the context to run it in.

        Raises:
            CallReusedError: The id was used for another tool or other arguments. Nothing was changed.
            SessionBusyError: The call is running in this process. Nothing was changed.
            LeaseHeldError: Another process works on this session. Nothing was changed.
        """
        self._starting[session] += 1
        try:
            return await self._start_call(session, call, plan)
        finally:
            self._starting[session] -= 1
            self._release_if_idle(session)

    async def _start_call(self, session: str, call: ToolCall, plan: CallPlan) -> CallEnded | CallContext:
        journal = await self._journal(session)
        journal.is_wanted = True
        entries = self._entries[session]

        def decide(state: Session, epoch: int, at: float) -> Sequence[Record]:
            return self._decide_start(state, session, call, plan, epoch=epoch, at=at)

        decided = await journal.submit(decide)
        self._note(entries, decided, epoch=journal.journal.epoch)
        entry = entries[call.id]
        if entry.ended is not None:
            return entry.ended
        self._running.add((session, call.id))
        self._world.reach(Fault.BEFORE_TOOL)
        return CallContext(session, entry.turn, entry.response_no, call.id, entry.state.runs)

    async def finish(self, context: CallContext, result: ToolResult, native: str = "") -> None:
        """Journal the outcome of a call that `start` let run."""
        self._world.reach(Fault.AFTER_TOOL)
        session = context.session
        self._running.discard((session, context.call_id))

        def decide(state: Session, _epoch: int, at: float) -> Sequence[Record]:
            ended = CallEnded(context.turn, context.response, result, at, native)
            return (ended, *self._closing(session, state, ended))

        journal = self._journals[session]
        self._note(self._entries[session], await journal.submit(decide), epoch=journal.journal.epoch)
        self._release_if_idle(session)

    def leave_in_doubt(self, context: CallContext) -> None:
        """Record that a run was cut here without an outcome: it is in doubt from now on."""
        self._running.discard((context.session, context.call_id))
        self._release_if_idle(context.session)

    def _release_if_idle(self, session: str) -> None:
        """Let another process have the thread: its next step may run there."""
        is_idle = not self._starting[session] and not any(each == session for each, _ in self._running)
        if is_idle and (journal := self._journals.get(session)) is not None and journal.is_here:
            journal.release_when_idle()

    def _decide_start(
        self, state: Session, session: str, call: ToolCall, plan: CallPlan, *, epoch: int, at: float
    ) -> Sequence[Record]:
        entry = self._entries[session].get(call.id)
        if entry is None:
            opening: tuple[Record, ...] = ()
            if isinstance(state.turn, RunningCalls):
                turn, response_no = state.turn.turn, state.turn.response_no + 1
            else:
                turn, response_no = state.turns + 1, 1
                message = UserMessage.of(f"Calls of a {self.name} thread.")
                opening = (MessageAccepted(turn, message, at, driver=self.name),)
            return (
                *opening,
                ResponseCompleted(turn, response_no, 1, Response((call,)), at, (plan,)),
                CallStarted(turn, response_no, call.id, 1, at, plan.has_effects),
            )
        if entry.state.plan.digest != plan.digest:
            raise Refused(CallReusedError(f"call {call.id!r} was recorded with other arguments"))
        if entry.ended is not None:
            return ()
        if (session, call.id) in self._running:
            raise Refused(SessionBusyError(f"call {call.id!r} is running already"))
        # Whatever this process does not run itself is in doubt, also where an earlier run in it was cut.
        verdict = judge(entry.state, epoch=epoch + 1)
        if verdict in (CallVerdict.START, CallVerdict.RERUN):
            run = entry.state.runs + 1
            return (CallStarted(entry.turn, entry.response_no, call.id, run, at, plan.has_effects),)
        lost = CallEnded(
            entry.turn, entry.response_no, ToolResult(call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN), at
        )
        return (lost, *self._closing(session, state, lost))

    def _closing(self, session: str, state: Session, ended: CallEnded) -> Sequence[Record]:
        """Return the end of the turn where `ended` is the last outcome that it lacks."""
        is_suspended = ended.native == SUSPENDED
        if is_suspended or not isinstance(state.turn, RunningCalls) or state.turn.turn != ended.turn:
            return ()
        others = (
            entry
            for call_id, entry in self._entries[session].items()
            if entry.turn == ended.turn and call_id != ended.result.call_id
        )
        if any(entry.ended is None for entry in others):
            return ()
        return (TurnEnded(ended.turn, TurnStatus.COMPLETED, ended.at),)

    async def _journal(self, session: str) -> DrivenJournal:
        known = self._journals.get(session)
        if known is not None and known.failed is None and known.is_here:
            return known
        opening = self._opening.get(session)
        if opening is None:  # siblings come at once: one of them opens, under one claim
            opening = self._world.spawn(self._open_journal(session), name=f"open {session}")
            self._opening[session] = opening
            opening.add_done_callback(lambda _: self._opening.pop(session, None))
        return await asyncio.shield(opening)

    async def _open_journal(self, session: str) -> DrivenJournal:
        require_session_id(session)
        if not self._is_open:
            await self._store.open()
            self._is_open = True
        journal = DrivenJournal(self._store, session, self._world, node=self._node, observers=self._observers)
        entries: dict[str, _Entry] = {}
        self._note_all(entries, await journal.load())
        journal.on_others = lambda records: self._note_all(entries, records)
        self._journals[session], self._entries[session] = journal, entries
        return journal

    def _note_all(self, entries: dict[str, _Entry], records: Sequence[tuple[int, Record]]) -> None:
        for epoch, record in records:
            self._note(entries, (record,), epoch=epoch)

    @staticmethod
    def _note(entries: dict[str, _Entry], records: Sequence[Record], *, epoch: int) -> None:
        """Fold what concerns calls."""
        for record in records:
            if isinstance(record, ResponseCompleted):
                plans = {plan.call_id: plan for plan in record.plans}
                for call in record.body.calls:
                    plan = plans.get(call.id) or CallPlan(call.id, digest_of(call.name, call.arguments))
                    entries[call.id] = _Entry(record.turn, record.response, CallState(call, plan))
            elif isinstance(record, CallStarted) and record.call_id in entries:
                entry = entries[record.call_id]
                state = msgspec.structs.replace(entry.state, runs=record.run, epoch=epoch)
                entries[record.call_id] = msgspec.structs.replace(entry, state=state)
            elif isinstance(record, CallEnded) and record.result.call_id in entries:
                entry = entries[record.result.call_id]
                if record.native == SUSPENDED:  # it may start again
                    suspended = msgspec.structs.replace(entry.state, runs=0)
                    entries[record.result.call_id] = msgspec.structs.replace(entry, state=suspended)
                else:
                    entries[record.result.call_id] = msgspec.structs.replace(entry, ended=record)
