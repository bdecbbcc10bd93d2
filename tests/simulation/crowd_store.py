"""The store of a simulated fleet, its clock, and the judge of its events; see `crowd.py`."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from midstream.errors import MidstreamError, StoreBusyError
from midstream.session.calls import CallPlan, OnDoubt
from midstream.session.records import Record, decode
from midstream.session.turn.pending import RunCall
from midstream.store.contract import Batch
from midstream.store.memory import Memory

if TYPE_CHECKING:
    from tests.simulation.crowd import FleetNode, HeldSession

T = TypeVar("T")

LATENCY_S = 0.0005
"""Seconds from a node to the store, and back again."""
LOST_S = 2.0
"""Seconds after which a node considers an unanswered request lost."""
COSTS_S = {
    "append": 180e-6,
    "read": 120e-6,
    "claim": 250e-6,
    "confirm": 60e-6,
    "release": 150e-6,
    "forward": 500e-6,
    "look": 300e-6,
    "beat": 150e-6,
    "report": 400e-6,
    "join": 1000e-6,
}
"""Seconds of one core of the database for each request."""
STORE_CORES = 8


class Rules(Struct, frozen=True):
    """Rules that can be broken, to show that the judge notices it."""

    is_fenced: bool = True
    """An append under an older epoch, or at another position, is refused."""
    raises_epoch: bool = True
    """Each claim begins a new epoch."""
    confirms: bool = True
    """A node that was frozen verifies that the session is still its own before it starts a tool."""
    counts_others: bool = True
    """A limit counts a caller's requests at other nodes."""


class VirtualClock:
    """Virtual time: it jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), do))

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run all timers up to this time."""
        while self._due and self._due[0][0] <= until and not is_over():
            self.now, _, do = heapq.heappop(self._due)
            self.events += 1
            do()
        if not is_over():
            self.now = max(self.now, until)


class Judge(Struct):
    """Forbidden events, and measured durations."""

    clock: VirtualClock
    problems: list[str] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    takeovers_s: dict[str, list[float]] = field(default_factory=lambda: {"crash": [], "silence": []})
    turns_s: list[float] = field(default_factory=list)
    lost_at: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Sessions of dead nodes, with the time and the kind of death."""
    appended: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The newest epoch with an append in each session, and its node."""
    runs: Counter[tuple[object, ...]] = field(default_factory=Counter)

    def blame(self, problem: str) -> None:
        self.figures["problems"] += 1
        if len(self.problems) < 50:
            self.problems.append(f"{self.clock.now:.3f} {problem}")

    def note_append(self, session: str, epoch: int, node: str) -> None:
        newest, owner = self.appended.get(session, (0, ""))
        if epoch < newest:
            self.blame(f"{session}: {node} appended under epoch {epoch}, after epoch {newest} of {owner}")
        elif epoch == newest and node != owner:
            self.blame(f"{session}: {node} and {owner} both appended under epoch {epoch}")
        else:
            self.appended[session] = (epoch, node)
        if epoch > newest and (lost := self.lost_at.pop(session, None)) is not None:
            self.takeovers_s[lost[1]].append(self.clock.now - lost[0])

    def note_tool(
        self, held: HeldSession, work: RunCall, plan: CallPlan, node: FleetNode, epoch: int
    ) -> None:
        """Record the start of a tool; `epoch` is the newest one of its session."""
        self.figures["tools"] += 1
        if epoch != held.epoch:
            if node.was_terminated:
                self.figures["late starts"] += 1
            else:
                self.blame(f"{held.name}: {node.name} starts a tool under epoch {held.epoch}, it is {epoch}")
        key = (held.name, work.ref, work.run)
        self.runs[key] += 1
        if self.runs[key] > 1:
            self.blame(f"{held.name}: run {work.run} of {work.ref} began twice")
        if work.run > 1 and plan.on_doubt is OnDoubt.UNKNOWN:
            self.blame(f"{held.name}: {work.ref} runs again")


class SharedStore:
    """The store of the fleet: leases and journals of the memory store, behind a network and a queue."""

    def __init__(self, clock: VirtualClock, judge: Judge, rules: Rules) -> None:
        self.memory = Memory()
        self.is_down = False
        self.restored_at = -math.inf
        self.beats: dict[str, float] = {}
        self.reports: dict[str, dict[str, float]] = {}
        self.counts: Counter[str] = Counter()
        self.busy_s: defaultdict[int, float] = defaultdict(float)
        """Busy seconds of its cores in each second."""
        self.late_s = 0.0
        """The longest wait of a request."""
        self._clock = clock
        self._judge = judge
        self._rules = rules
        self._free_at = 0.0
        self._starts = 0
        self._open: dict[str, dict[str, None]] = {}
        """Sessions with an open turn, by their nodes."""
        self._places: dict[str, str] = {}

    def request(
        self, node: FleetNode, kind: str, work: Callable[[], T], then: Callable[[T | MidstreamError], None]
    ) -> None:
        """Send a request, and pass its answer on; an error where there is none, executed or not."""
        lost = StoreBusyError("no answer", retry_after_s=1.0)

        def arrive() -> None:
            if node.is_cut or self.is_down:
                node.later(LOST_S if node.is_cut else LATENCY_S, partial(then, lost))
                return
            self.counts[kind] += 1
            start = max(self._clock.now, self._free_at)
            self.late_s = max(self.late_s, start - self._clock.now)
            self.busy_s[int(start)] += COSTS_S[kind]
            self._free_at = start + COSTS_S[kind] / STORE_CORES
            self._clock.later(self._free_at - self._clock.now, partial(execute, self._starts))

        def execute(started: int) -> None:
            if started != self._starts:
                node.later(LATENCY_S, partial(then, lost))
                return
            try:
                answer: T | MidstreamError = work()
            except MidstreamError as error:
                answer = error
                self.counts[f"{kind} refused"] += 1
            if node.is_cut:
                node.later(LOST_S, partial(then, lost))
            else:
                node.later(LATENCY_S, partial(then, answer))

        self._clock.later(LATENCY_S, arrive)

    def stop(self) -> None:
        """End the server: waiting requests are not executed."""
        self.is_down = True
        self._starts += 1
        self._free_at = 0.0

    def start(self) -> None:
        self.is_down = False
        self.restored_at = self._clock.now

    # --- requests

    def claim(self, node: FleetNode, session: str) -> tuple[int, bool, list[tuple[int, Record]]]:
        """Return the new epoch, whether the session was released before, and its records."""
        memory = self.memory
        if not node.is_joined:
            raise StoreBusyError("it joins anew", retry_after_s=1.0)
        frozen = node.silences.frozen & memory.living
        found = memory.sessions.get(session)
        is_handover = found is not None and found.node is None
        memory.living -= frozen
        try:
            epoch = at_once(node.store.claim(session, at=self._clock.now))
        finally:
            memory.living |= frozen
        found = memory.sessions[session]
        if not self._rules.raises_epoch and epoch > 1:
            epoch = found.epoch = epoch - 1
        self._place(session)
        return epoch, is_handover, [(each.epoch, decode(each.body)) for each in found.records]

    def append(self, node: FleetNode, session: str, batch: Batch) -> int:
        found = self.memory.sessions[session]
        fitting = batch
        if not self._rules.is_fenced:
            fitting = replace(batch, expected=found.end, epoch=found.epoch)
        end = at_once(node.store.append(session, fitting))
        self._judge.note_append(session, batch.epoch, node.name)
        if node.on_intent is not None and any(b'"call_started"' in body for body in batch.bodies):
            act, node.on_intent = node.on_intent, None
            act()
        self._place(session)
        return end

    def has_happened(self, session: str, batch: Batch) -> bool:
        """Return whether an append with a lost answer has happened."""
        found = self.memory.sessions[session]
        last = found.records[batch.end - found.oldest : batch.end - found.oldest + 1]
        return bool(last) and (last[0].epoch, last[0].body) == (batch.epoch, batch.bodies[-1])

    def release(self, node: FleetNode, session: str, epoch: int) -> bool:
        at_once(node.store.release(session, epoch=epoch))
        self._place(session)
        return self.memory.sessions[session].mark.is_live

    def epoch_of(self, session: str) -> int:
        return self.memory.sessions[session].epoch

    def holder_of(self, session: str) -> str:
        found = self.memory.sessions.get(session)
        return "" if found is None or found.node is None else found.node

    def orphans(self, node: FleetNode) -> list[str]:
        """Return the sessions with an open turn that no living node has, in the view of a node."""
        living = self.memory.living - node.silences.frozen
        return [name for holder in self._open.keys() - living for name in self._open[holder]]

    def open_turns(self, node: str) -> list[str]:
        return [*self._open.get(node, ())]

    @property
    def turns_open(self) -> int:
        return len(self._places)

    def _place(self, session: str) -> None:
        found = self.memory.sessions[session]
        old = self._places.pop(session, None)
        if old is not None:
            del self._open[old][session]
            if not self._open[old]:
                del self._open[old]
        if found.mark.is_live:
            new = self._places[session] = found.node or ""
            self._open.setdefault(new, {})[session] = None


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a method of the memory store, which never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("the memory store waits")
