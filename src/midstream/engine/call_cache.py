"""Single calls of a foreign graph: each is started at most once, and its outcome is journaled.

For frameworks that keep their own turns and pass single calls to midstream. There is no response and no step, only a
call id that stays the same when the graph runs a step again. One session has the calls of one thread; in its journal
each call is a response of its own. A run of the graph claims its thread from its beginning to its end.

A turn begins with the first call of a step and ends when every call of it has an outcome. A suspended call keeps the
turn open. A call in doubt also does, until a run ends that did not request it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import msgspec
from msgspec import Struct

from midstream.engine.active_runs import ENDING_S, ActiveRun, ActiveRuns
from midstream.engine.driven_journal import DrivenJournal
from midstream.engine.journal import require_session_id
from midstream.environment import Fault, World
from midstream.errors import CallReusedError, UsageError
from midstream.history.messages import Outcome, Response, ToolCall, ToolResult, UserMessage
from midstream.observability.observers import Observer, Observers
from midstream.session.calls import SUSPENDED, UNKNOWN_CONTENT, CallPlan, CallState, digest_of
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
from midstream.store.guard.guarded_store import guard_store, open_guarded
from midstream.tools.function_tools import CallContext

OVERTAKEN_CONTENT = "This call waited for a person, and the conversation went on without an answer."


class _Entry(Struct, frozen=True):
    """One call of a `CallBook`."""

    turn: int
    response_no: int
    state: CallState
    ended: CallEnded | None = None

    @property
    def is_in_doubt(self) -> bool:
        """Whether the call was started, has no outcome, and is run by no process."""
        return self.ended is None and self.state.runs > 0

    def end_without_outcome(self, at: float) -> CallEnded:
        """Return the end of a call that was started or suspended and has no other outcome."""
        result = (
            ToolResult(self.state.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN)
            if self.is_in_doubt
            else ToolResult(self.state.call.id, OVERTAKEN_CONTENT, Outcome.CANCELLED)
        )
        return CallEnded(self.turn, self.response_no, result, at)


class CallBook:
    """The calls of any number of threads.

    Args:
        name: The name of the framework, for the journal.
        store: The store of the journals; opened at the first run, closed by `close`.
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
        self._runs = ActiveRuns()
        self._running: set[tuple[str, str]] = set()
        self._present: Counter[str] = Counter()
        """Calls between `start` and their end, by session."""
        self._call_ended = asyncio.Event()
        self._overtaken: set[tuple[str, str]] = set()
        """Calls without an outcome that their graphs no longer request."""
        self._is_open = False

    async def close(self) -> None:
        """Close the store. Running calls are in doubt for the next process."""
        if self._is_open:
            self._is_open = False
            self._journals.clear()
            await self._store.close()

    async def begin_run(self, session: str) -> ActiveRun:
        """Claim a thread for a run of its graph, and return the run for `end_run`.

        Raises:
            UsageError: The session's name is not valid. Nothing was changed.
            SessionBusyError: A run of it is active in this process; the end of a cancelled one is awaited for
                `active_runs.ENDING_S` at most. Nothing was changed.
            LeaseHeldError: Another process works on this thread. Nothing was changed.
        """
        require_session_id(session)
        run = await self._runs.enter(session)
        try:
            journal = await self._journal(session)
            await journal.begin_run()
        except BaseException:
            self._release(session, run)
            raise
        return run

    async def end_run(self, session: str, run: ActiveRun, *, is_complete: bool) -> None:
        """End a run, so that another process can claim the thread.

        Args:
            session: The thread.
            run: The value that `begin_run` returned.
            is_complete: Whether the graph reached its end or an interrupt. Then a call in doubt that was not requested
                again ends with an unknown outcome.
        """
        try:
            await self._wait_for_calls(session)
            if is_complete:

                def decide(state: Session, _epoch: int, at: float) -> Sequence[Record]:
                    return self._decide_end(state, session, at=at)

                await self._journals[session].submit(decide)
        finally:
            self._release(session, run)

    async def start(
        self, session: str, run: ActiveRun, call: ToolCall, plan: CallPlan
    ) -> CallEnded | CallContext:
        """Announce a call: return its outcome if there is one, else the context in which it runs.

        Wait for a call that is running in this process.

        Raises:
            UsageError: The run has ended; its graph was cancelled. The tool must not be started.
            CallReusedError: The id was used for another tool or other arguments. Nothing was changed.
        """
        self._present[session] += 1
        try:
            started = await self._start_call(session, run, call, plan)
        except BaseException:
            self._note_end(session)
            raise
        if isinstance(started, CallEnded):
            self._note_end(session)
        return started

    async def _start_call(
        self, session: str, run: ActiveRun, call: ToolCall, plan: CallPlan
    ) -> CallEnded | CallContext:
        def decide(state: Session, epoch: int, at: float) -> Sequence[Record]:
            try:
                self._require_run(session, run)
            except UsageError as error:
                raise Refused(error) from error
            return self._decide_start(state, session, call, plan, epoch=epoch, at=at)

        # When one call interrupts a tools node, the other calls continue, and the graph may run the node again
        # meanwhile.
        place = (session, call.id)
        while place in self._running:
            await self._wait_for_end()
        self._running.add(place)  # before the append: an equal call that starts now is not in doubt
        try:
            await self._journals[session].submit(decide)
            entry = self._entries[session][call.id]
            if entry.ended is None:
                self._require_run(session, run)
        except BaseException:
            self._running.discard(place)
            raise
        if entry.ended is not None:
            self._running.discard(place)
            return entry.ended
        self._world.reach(Fault.BEFORE_TOOL)
        return CallContext(session, entry.turn, entry.response_no, call.id, entry.state.runs)

    async def finish(self, context: CallContext, result: ToolResult, native: str = "") -> None:
        """Journal the outcome of a call that `start` permitted, also after the end of its run."""
        self._world.reach(Fault.AFTER_TOOL)
        session = context.session
        self._running.discard((session, context.call_id))

        def decide(state: Session, _epoch: int, at: float) -> Sequence[Record]:
            entries = self._current_entries(session)
            if entries[context.call_id].ended is not None:
                return ()  # the call was in doubt, and a later run ended it
            ended = CallEnded(context.turn, context.response, result, at, native)
            return (ended, *_closing(entries, state, (ended,)))

        try:
            await self._journals[session].submit(decide)
        finally:
            self._note_end(session)

    def leave_in_doubt(self, context: CallContext) -> None:
        """Record that a call was cut without an outcome: it is in doubt from now on."""
        self._running.discard((context.session, context.call_id))
        self._note_end(context.session)

    def end_overtaken(self, session: str, call_id: str) -> CallEnded | None:
        """Return the end of a call that its graph no longer requests; None if it never started.

        A call in doubt, or suspended, gets this end in the journal when the run is complete.
        """
        entry = self._entries.get(session, {}).get(call_id)
        if entry is None or (session, call_id) in self._running:
            return None
        if entry.ended is None:
            self._overtaken.add((session, call_id))
        return entry.ended or entry.end_without_outcome(self._world.now())

    async def _wait_for_calls(self, session: str) -> None:
        """Wait for unfinished calls of a cancelled graph, `ENDING_S` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                while self._present[session]:
                    await self._wait_for_end()

    async def _wait_for_end(self) -> None:
        """Wait until some call has ended."""
        self._call_ended.clear()
        await self._call_ended.wait()

    def _note_end(self, session: str) -> None:
        self._present[session] -= 1
        self._call_ended.set()

    def _require_run(self, session: str, run: ActiveRun) -> None:
        if not self._runs.is_active(session, run):
            raise UsageError(f"the run of {session!r} has ended, so its graph can start no more tools")

    def _release(self, session: str, run: ActiveRun) -> None:
        self._overtaken = {each for each in self._overtaken if each[0] != session}
        if self._runs.leave(session, run) and (journal := self._journals.get(session)) is not None:
            journal.release_when_idle()

    def _current_entries(self, session: str) -> MutableMapping[str, _Entry]:
        """Return the calls of a thread, including decisions that are not appended yet."""
        journal = self._journals[session]
        entries: MutableMapping[str, _Entry] = ChainMap({}, self._entries[session])
        _note(entries, [(journal.journal.epoch, record) for record in journal.decided])
        return entries

    def _decide_start(
        self, state: Session, session: str, call: ToolCall, plan: CallPlan, *, epoch: int, at: float
    ) -> Sequence[Record]:
        entries = self._current_entries(session)
        entry = entries.get(call.id)
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
        # A call that this process does not run is in doubt, also if an earlier run in this process was cut.
        verdict = judge(entry.state, epoch=epoch + 1)
        if verdict in (CallVerdict.START, CallVerdict.RERUN):
            run = entry.state.runs + 1
            return (CallStarted(entry.turn, entry.response_no, call.id, run, at, plan.has_effects),)
        lost = entry.end_without_outcome(at)
        return (lost, *_closing(entries, state, (lost,)))

    def _decide_end(self, state: Session, session: str, *, at: float) -> Sequence[Record]:
        entries = self._current_entries(session)
        lost = [
            entry.end_without_outcome(at)
            for call_id, entry in entries.items()
            if (entry.is_in_doubt or (session, call_id) in self._overtaken)
            and (session, call_id) not in self._running
            and entry.ended is None
        ]
        return (*lost, *_closing(entries, state, lost)) if lost else ()

    async def _journal(self, session: str) -> DrivenJournal:
        known = self._journals.get(session)
        if known is not None and known.is_usable:
            return known
        if not self._is_open:
            await open_guarded(self._store)
            self._is_open = True
        journal = DrivenJournal(self._store, session, self._world, node=self._node, observers=self._observers)
        entries: dict[str, _Entry] = {}
        _note(entries, await journal.load())
        journal.on_records = lambda records: _note(entries, records)
        self._journals[session], self._entries[session] = journal, entries
        return journal


def _closing(entries: Mapping[str, _Entry], state: Session, ended: Sequence[CallEnded]) -> Sequence[Record]:
    """Return the end of the turn if `ended` are its last missing outcomes."""
    last = ended[-1]
    is_suspended = last.native == SUSPENDED
    if is_suspended or not isinstance(state.turn, RunningCalls) or state.turn.turn != last.turn:
        return ()
    now = {each.result.call_id for each in ended}
    if any(
        entry.ended is None and entry.turn == last.turn and call_id not in now
        for call_id, entry in entries.items()
    ):
        return ()
    return (TurnEnded(last.turn, TurnStatus.COMPLETED, last.at),)


def _note(entries: MutableMapping[str, _Entry], records: Sequence[tuple[int, Record]]) -> None:
    """Fold the records of calls."""
    for epoch, record in records:
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
            if record.native == SUSPENDED:  # the call may start again
                suspended = msgspec.structs.replace(entry.state, runs=0)
                entries[record.result.call_id] = msgspec.structs.replace(entry, state=suspended)
            else:
                entries[record.result.call_id] = msgspec.structs.replace(entry, ended=record)
