"""A fleet in front of one store, on the pure core: the rules are those of the product, only the times are
drawn.

The product's own: decisions, folds and pending work of sessions (`midstream.session`); leases, epochs and
appends (`midstream.store.memory`); liveness of nodes (`store.node_liveness`); the limits of callers; every
backoff. Drawn: the durations of networks, models and tools. The store serves one request after the other,
each in the time that `python -m bench population` measured, so that a herd makes it late.

A session without a running turn is in no queue and has no timer: a million of them cost nothing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from msgspec import Struct, field

from midstream.engine.listing import batch_of, without_starts
from midstream.engine.other_nodes import TAKEN_UP_AT_ONCE
from midstream.engine.session_work import HELD_FOR_S
from midstream.environment import World
from midstream.errors import LeaseHeldError, LimitReachedError, MidstreamError, StoreBusyError
from midstream.history.messages import ToolResult
from midstream.retries import APPEND_BACKOFF
from midstream.server.limits import Rate, digest_of_caller
from midstream.session import session as sessions
from midstream.session.calls import OnDoubt
from midstream.session.records import EpochStarted, Record, TurnEnded
from midstream.session.session import Received, Session
from midstream.session.turn.commands import CallFinished, Command, Recover, Refused
from midstream.session.turn.pending import CallModel, RunCall
from midstream.store.contract import Batch
from midstream.store.memory import Memory, MemoryStore
from midstream.store.node_liveness import NodeSilences, next_node
from midstream.store.node_reports import REPORT_S
from midstream.store.postgres.node_locks import BEATS_PER_LEASE, GRACE_S, REJOIN_BACKOFF, REJOIN_S
from midstream.store.postgres.node_watcher import BACKSTOP_S
from midstream.store.postgres.postgres_store import LEASE_S
from tests.session.turn_stories import answers, asks, reads, writes
from tests.simulation.crowd_store import LATENCY_S, LOST_S, Judge, Rules, SharedStore, VirtualClock

T = TypeVar("T")
Answer = Callable[[MidstreamError | None], None]
AnyCommand = Command | Received

BEAT_S = LEASE_S / BEATS_PER_LEASE
IDLE_S = 60.0
"""Seconds after its last use in which a session without a turn stays with its node."""
DRAIN_S = 10.0
MODEL_S, TOOL_S = 2.0, 1.0
"""Mean seconds of a response, and of a tool."""
GREEDY = "greedy"
GREEDY_MOST = 1200
"""Requests in a minute that the limit of the greedy caller allows."""


class HeldSession(Struct, eq=False):
    """A session at a node: a short form of a runner."""

    name: str
    state: Session = Session()
    epoch: int = 0
    """0: not claimed yet."""
    held_at: float = -math.inf
    used_at: float = 0.0
    is_busy: bool = False
    is_lost: bool = False
    queue: list[tuple[AnyCommand, Answer]] = field(default_factory=list)
    doing: set[CallModel | RunCall] = field(default_factory=set)

    @property
    def is_idle(self) -> bool:
        return not (self.is_busy or self.queue or self.doing or self.state.is_live)


class _NodeWorld(World):
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.now


class FleetNode:
    """A server of the fleet."""

    def __init__(self, fleet: SimulatedFleet, number: int, chance: random.Random) -> None:
        self.name = f"n{number:05}"
        self.fleet = fleet
        self.store = MemoryStore(fleet.store.memory)
        self.store.node = self.name
        self.silences: NodeSilences[str] = NodeSilences(lease_s=LEASE_S, beat_s=BEAT_S)
        self.rate = Rate(GREEDY_MOST, "requests", _NodeWorld(fleet.clock))
        self.is_dead = self.is_frozen = self.is_cut = self.is_draining = self.is_joined = False
        self.was_terminated = False
        """Whether it has lost its lock during its life: others may have had its sessions meanwhile."""
        self.on_intent: Callable[[], None] | None = None
        """Called once, when the intent of a tool is in the store and the node has not received that yet."""
        self.readers = 0
        """Number of connected clients without a turn."""
        self.held: dict[str, HeldSession] = {}
        self.watched: str | None = None
        self.chance = chance
        self._set_aside: deque[Callable[[], None]] = deque()
        self._told: set[str] = set()
        self._taking_up: deque[str] = deque()
        self._taken_up_now = 0
        self._is_looking = False

    @property
    def is_serving(self) -> bool:
        """Return whether a balancer sends clients here: it does not notice that a node is frozen or cut off."""
        return not (self.is_dead or self.is_draining)

    @property
    def is_reachable(self) -> bool:
        return not (self.is_dead or self.is_frozen)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        self.fleet.clock.later(seconds, partial(self._step, do))

    def _step(self, do: Callable[[], None]) -> None:
        if self.is_frozen:
            self._set_aside.append(do)
        elif not self.is_dead:
            do()

    def thaw(self) -> None:
        self.is_frozen = False
        while self._set_aside:
            self.later(0.0, self._set_aside.popleft())

    # --- one node among others

    def start(self) -> None:
        self.join()
        for seconds, do in ((BACKSTOP_S, self.check_nodes), (BEAT_S, self.beat), (REPORT_S, self.report)):
            self.later(seconds * self.chance.random(), partial(self._repeat, seconds, do))

    def _repeat(self, seconds: float, do: Callable[[], None]) -> None:
        do()
        self.later(seconds, partial(self._repeat, seconds, do))

    def join(self, failures: int = 0) -> None:
        """Join the nodes, or rejoin."""

        def enter() -> None:
            self.store_memory.living.add(self.name)
            self.fleet.store.beats[self.name] = self.fleet.clock.now
            self.fleet.without_lock.discard(self.name)

        def then(answer: MidstreamError | None) -> None:
            if answer is not None:
                wait_s = REJOIN_BACKOFF.wait_s(failures + 1, chance=self.chance.random())
                self.later(wait_s, partial(self.join, failures + 1))
                return
            self.is_joined = True
            self.fleet.notify()

        self.fleet.store.request(self, "join", enter, then)

    @property
    def store_memory(self) -> Memory:
        return self.fleet.store.memory

    def beat(self) -> None:
        store = self.fleet.store

        def write() -> None:
            if self.name in store.beats:
                store.beats[self.name] = self.fleet.clock.now

        if self.is_joined:
            store.request(self, "beat", write, _ignore)

    def report(self) -> None:
        store = self.fleet.store

        def exchange() -> float:
            store.reports[self.name] = self.rate.own_counts()
            return sum(
                count
                for name, report in store.reports.items()
                if name != self.name
                for count in report.values()
            )

        def then(others: float | MidstreamError) -> None:
            if not isinstance(others, MidstreamError) and self.fleet.rules.counts_others:
                self.rate.set_other_counts({digest_of_caller(GREEDY): others})

        store.request(self, "report", exchange, then)

    def check_nodes(self) -> None:
        """Check the other nodes, and the turns without a node."""
        if self._is_looking:
            return
        self._is_looking = True
        store = self.fleet.store

        def then(answer: tuple[dict[str, float], list[str]] | MidstreamError) -> None:
            self._is_looking = False
            if isinstance(answer, MidstreamError):
                return
            beats, orphans = answer
            self.silences.observe(beats, now=self.fleet.clock.now)
            self._watch_next()
            for late in sorted(self.silences.late & self.fleet.without_lock):
                self.later(GRACE_S, partial(self.declare_dead, late))
            fresh = [name for name in orphans if name not in self._told]
            self._told = set(orphans)
            if self.is_serving:
                self._taking_up.extend(name for name in fresh if name not in self.held)
                self._take_up()

        def find() -> tuple[dict[str, float], list[str]]:
            others = {name: at for name, at in store.beats.items() if name != self.name}
            return others, store.orphans(self)

        store.request(self, "look", find, then)

    def _watch_next(self) -> None:
        self.watched = next_node(self.name, self.silences.known)
        if self.watched is not None and self.watched in self.fleet.without_lock:
            self.later(GRACE_S, partial(self.declare_dead, self.watched))

    def declare_dead(self, name: str) -> None:
        """Declare a node with a free lock dead, unless all have just lost theirs."""
        store, fleet = self.fleet.store, self.fleet

        def remove() -> bool:
            if name not in fleet.without_lock or fleet.clock.now < store.restored_at + REJOIN_S:
                return False
            self.store_memory.living.discard(name)
            store.beats.pop(name, None)
            store.reports.pop(name, None)
            return True

        def then(is_gone: object) -> None:
            if is_gone is True:
                self.silences.drop(name)
                fleet.notify()

        store.request(self, "claim", remove, then)

    # --- turns of dead nodes

    def _take_up(self) -> None:
        while self._taking_up and self._taken_up_now < TAKEN_UP_AT_ONCE:
            name = self._taking_up.popleft()
            if name in self.held:
                continue
            self._taken_up_now += 1
            self.fleet.store.request(
                self, "read", partial(self._is_orphan, name), partial(self._take_up_one, name)
            )

    def _is_orphan(self, name: str) -> bool:
        holder = self.fleet.store.holder_of(name)
        is_free = holder not in self.store_memory.living - self.silences.frozen
        return is_free and self.store_memory.sessions[name].mark.is_live

    def _take_up_one(self, name: str, is_orphan: object) -> None:
        self._taken_up_now -= 1
        if isinstance(is_orphan, MidstreamError):
            self._told.discard(name)
        elif is_orphan and name not in self.held:
            held = self.held[name] = HeldSession(name)
            self._open(held)
        self._take_up()

    # --- sessions

    def submit(self, name: str, command: AnyCommand, answer: Answer) -> None:
        """Decide a command, here or at the node that has the session."""
        if self.is_draining and name not in self.held:
            answer(StoreBusyError("it drains", retry_after_s=1.0))
            return
        held = self.held.get(name)
        if held is None:
            held = self.held[name] = HeldSession(name)
        held.queue.append((command, answer))
        self._pump(held)

    def _pump(self, held: HeldSession) -> None:
        if held.is_busy or not held.queue:
            return
        if held.epoch:
            self._decide(held, [])
        else:
            self._open(held)

    def _open(self, held: HeldSession) -> None:
        held.is_busy = True
        store = self.fleet.store
        store.request(self, "claim", partial(store.claim, self, held.name), partial(self._opened, held))

    def _opened(
        self, held: HeldSession, answer: tuple[int, bool, list[tuple[int, Record]]] | MidstreamError
    ) -> None:
        held.is_busy = False
        if isinstance(answer, MidstreamError):
            del self.held[held.name]
            held.is_lost = True
            if isinstance(answer, LeaseHeldError):
                self._forward(held)
            else:
                self._told.discard(held.name)
                for _, refuse in held.queue:
                    refuse(answer)
            return
        held.epoch, is_handover, records = answer
        held.state = sessions.fold(records)
        at = self.fleet.clock.now
        began: list[Record] = [EpochStarted(held.epoch, self.name, at, is_handover=is_handover)]
        state = self._fold(held, held.state, began)
        began += sessions.decide(state, Recover(), epoch=held.epoch, at=at)
        self._decide(held, began)

    def _forward(self, held: HeldSession) -> None:
        store = self.fleet.store
        holder = self.fleet.nodes.get(store.holder_of(held.name))
        for command, answer in held.queue:
            if holder is None:
                answer(StoreBusyError("its node is gone", retry_after_s=1.0))
                continue
            submit = partial(holder.submit, held.name, command, answer)
            store.request(self, "forward", _nothing, partial(_send, holder, submit))

    def _fold(self, held: HeldSession, state: Session, records: Sequence[Record]) -> Session:
        for record in records:
            state = sessions.evolve(state, record, epoch=held.epoch)
        return state

    def _decide(self, held: HeldSession, records: list[Record]) -> None:
        held.is_busy = True
        taken, held.queue = held.queue, []
        state = self._fold(held, held.state, records)
        at = self.fleet.clock.now
        for command, answer in taken:
            try:
                decided = sessions.decide(state, command, epoch=held.epoch, at=at)
            except Refused as refused:
                answer(refused.error)
                continue
            decided = without_starts(decided) if self.is_draining else decided
            state = self._fold(held, state, decided)
            records.extend(decided)
        if not records:
            self._appended(held, held.state, [], taken)
            return
        batch = batch_of(records, (), held.state, state, epoch=held.epoch)
        self._append(held, batch, partial(self._appended, held, state, records, taken))

    def _append(self, held: HeldSession, batch: Batch, done: Callable[[], None]) -> None:
        """Append, and check whether it has happened before it is sent again."""
        store, asked_at = self.fleet.store, self.fleet.clock.now
        failures = 0

        def send() -> None:
            store.request(self, "append", partial(store.append, self, held.name, batch), receive)

        def receive(answer: object) -> None:
            nonlocal failures
            if isinstance(answer, StoreBusyError):
                failures += 1
                self.later(APPEND_BACKOFF.wait_s(failures, chance=self.chance.random()), settle)
            elif isinstance(answer, MidstreamError):
                self.lose(held, answer)
            else:
                held.held_at = asked_at  # The first time of sending: the knowledge of the lease is that old.
                done()

        def settle() -> None:
            store.request(self, "read", partial(store.has_happened, held.name, batch), find)

        def find(has_happened: object) -> None:
            if has_happened is True:
                receive(batch.end)
            elif has_happened is False:
                send()
            else:
                self.later(LOST_S, settle)

        send()

    def lose(self, held: HeldSession, error: MidstreamError) -> None:
        """End a session here as a crash would: another node has it."""
        held.is_lost = True
        if self.held.get(held.name) is held:
            del self.held[held.name]
        for _, answer in held.queue:
            answer(error)

    def _appended(
        self,
        held: HeldSession,
        state: Session,
        records: Sequence[Record],
        taken: Sequence[tuple[AnyCommand, Answer]],
    ) -> None:
        held.state, held.is_busy, held.used_at = state, False, self.fleet.clock.now
        for _, answer in taken:
            answer(None)
        for record in records:
            if isinstance(record, TurnEnded):
                self.fleet.end_turn(held.name)
        self._reconcile(held)
        self._pump(held)
        if held.is_idle:
            self.later(IDLE_S if not self.is_draining else 0.0, partial(self._sleep, held))
        elif self.is_draining:
            self._hand_on(held)

    def _sleep(self, held: HeldSession) -> None:
        is_rested = self.is_draining or self.fleet.clock.now - held.used_at >= IDLE_S
        if held.is_idle and is_rested and self.held.get(held.name) is held:
            self._release(held)

    def _release(self, held: HeldSession) -> None:
        del self.held[held.name]
        held.is_lost = True

        def then(is_live: object) -> None:
            if is_live is True:
                self.fleet.notify()

        store = self.fleet.store
        store.request(self, "release", partial(store.release, self, held.name, held.epoch), then)

    # --- pending work

    def _reconcile(self, held: HeldSession) -> None:
        pending = sessions.pending_work(held.state)
        work = {each for each in pending if isinstance(each, CallModel | RunCall)}
        held.doing &= work
        for each in work - held.doing:
            if isinstance(each, RunCall):
                held.doing.add(each)
                self._confirm(held, each)
            elif not self.is_draining:
                held.doing.add(each)
                wait_s = max(0.0, each.not_before - self.fleet.clock.now)
                wait_s += self.chance.expovariate(1 / MODEL_S)
                self.later(wait_s, partial(self._respond, held, each))

    def _respond(self, held: HeldSession, work: CallModel) -> None:
        if held.is_lost or work not in held.doing:
            return
        place = {"turn": work.ref.turn, "response": work.ref.response_no, "attempt": work.ref.attempt}
        if work.ref.response_no <= self.fleet.responses_of(held.name):
            kind = (int(held.name[1:]) + work.ref.response_no) % 3
            plan = (writes("a"), reads("a"), writes("a", OnDoubt.RERUN_WITH_KEY))[kind]
            command = asks(plan, **place)
        else:
            command = answers("done", **place)
        held.queue.append((command, _ignore))
        self._pump(held)

    def _confirm(self, held: HeldSession, work: RunCall) -> None:
        """Start a tool; after a long time only where the session is still this node's (TURN-53)."""
        store = self.fleet.store
        asked_at = self.fleet.clock.now
        if asked_at - held.held_at <= HELD_FOR_S or not self.fleet.rules.confirms:
            self._begin(held, work)
            return

        def then(epoch: int | MidstreamError) -> None:
            if held.is_lost:
                return
            if isinstance(epoch, MidstreamError):
                self.later(1.0, partial(self._confirm, held, work))
            elif epoch != held.epoch:
                self.lose(held, StoreBusyError("another node has it", retry_after_s=1.0))
            else:
                held.held_at = asked_at
                self._confirm(held, work)

        store.request(self, "confirm", partial(store.epoch_of, held.name), then)

    def _begin(self, held: HeldSession, work: RunCall) -> None:
        if held.is_lost or work not in held.doing:
            return
        turn = held.state.turn
        [call] = [each for each in getattr(turn, "calls", ()) if each.call.id == work.ref.call_id]
        epoch = self.fleet.store.epoch_of(held.name)
        self.fleet.judge.note_tool(held, work, call.plan, self, epoch)
        self.later(self.chance.expovariate(1 / TOOL_S), partial(self._finish, held, work))

    def _finish(self, held: HeldSession, work: RunCall) -> None:
        if held.is_lost or work not in held.doing:
            return
        ref = work.ref
        finished = CallFinished(ref.turn, ref.response_no, ToolResult(ref.call_id, "done"))
        held.queue.append((finished, _ignore))
        self._pump(held)

    # --- the end

    def drain(self) -> None:
        """Release all sessions in order, and leave."""
        self.is_draining = True
        self.fleet.drop_clients(self)
        for held in [*self.held.values()]:
            self._hand_on(held)
        self.later(DRAIN_S, self._leave)

    def _hand_on(self, held: HeldSession) -> None:
        if held.epoch and not (held.is_busy or held.queue or held.doing) and held.name in self.held:
            self._release(held)

    def _leave(self) -> None:
        for held in [*self.held.values()]:
            if held.epoch:
                self._release(held)
        store = self.fleet.store

        def leave() -> None:
            self.store_memory.living.discard(self.name)
            store.beats.pop(self.name, None)
            store.reports.pop(self.name, None)

        def then(_: object) -> None:
            self.fleet.mark_dead(self)
            self.fleet.notify()

        store.request(self, "release", leave, then)


class SimulatedFleet:
    """All nodes, their store and their clients' balancer."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.clock = VirtualClock()
        self.rules = rules
        self.judge = Judge(self.clock)
        self.store = SharedStore(self.clock, self.judge, rules)
        self.nodes: dict[str, FleetNode] = {}
        self.without_lock: set[str] = set()
        """Nodes without their locks: dead ones, and those that rejoin."""
        self.on_end: Callable[[str], None] = _ignore
        self.on_drop: Callable[[FleetNode], None] = _ignore
        self.notifications = 0
        self.numbers = itertools.count(1)
        self.seed = seed
        self.greedy_passed = 0.0
        """Number of accepted requests of the greedy caller, without those that lost or cut-off nodes forgot.
        """

    def responses_of(self, session: str) -> int:
        """Return the number of responses of a session's turns that call a tool."""
        return int(session[1:]) % 3

    def add(self) -> None:
        """Start a node."""
        number = next(self.numbers)
        node = FleetNode(self, number, random.Random(f"{self.seed}/node {number}"))
        self.nodes[node.name] = node
        node.start()

    def notify(self) -> None:
        """Make all nodes check soon that the store reaches."""
        self.notifications += len(self.nodes)
        for node in self.nodes.values():
            node.later(LATENCY_S, node.check_nodes)

    def end_turn(self, session: str) -> None:
        self.on_end(session)

    def drop_clients(self, node: FleetNode) -> None:
        """Let the clients of a node reconnect."""
        self.on_drop(node)

    def crash(self, node: FleetNode) -> None:
        """Kill a node: its lock is free, and the node that waits for that checks it."""
        for name in self.store.open_turns(node.name):
            self.judge.lost_at.setdefault(name, (self.clock.now, "crash"))
        self.mark_dead(node)
        self.lose_lock(node)
        self.drop_clients(node)

    def mark_dead(self, node: FleetNode) -> None:
        node.is_dead = True
        self.greedy_passed -= sum(node.rate.own_counts().values())
        self.nodes.pop(node.name, None)
        node.held.clear()

    def lose_lock(self, node: FleetNode) -> None:
        self.without_lock.add(node.name)
        for other in self.nodes.values():
            if other.watched == node.name:
                other.later(LATENCY_S + GRACE_S, partial(other.declare_dead, node.name))

    def terminate(self, node: FleetNode) -> None:
        """Drop the connection that holds a node's lock: it rejoins as soon as it can."""
        node.is_joined, node.was_terminated = False, True
        self.lose_lock(node)
        node.join()

    def restart_store(self, down_s: float) -> None:
        """End the server of the store, and start it again: all nodes lose their locks."""
        self.store.stop()
        for node in self.nodes.values():
            node.is_joined = False
            self.without_lock.add(node.name)

        def come_back() -> None:
            self.store.start()
            for node in self.nodes.values():
                node.later(0.0, node.join)

        self.clock.later(down_s, come_back)

    def send_greedy_request(self, node: FleetNode) -> None:
        """Let the greedy caller send a request."""
        try:
            node.rate.count(GREEDY)
        except LimitReachedError:
            self.judge.figures["greedy refused"] += 1
        else:
            self.greedy_passed += not node.is_cut


def _send(holder: FleetNode, submit: Callable[[], None], _: object) -> None:
    holder.later(LATENCY_S, submit)


def _nothing() -> None:
    pass


def _ignore(_: object) -> None:
    pass
