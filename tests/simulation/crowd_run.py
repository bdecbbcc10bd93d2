"""A hundred nodes and a million sessions, with faults: `python -m tests.simulation.crowd_run [SEED]`.

A few sessions of the million have clients that send until they have an acknowledgement, and wait for the end
of their turn. Others have readers that wait for nothing. Nodes crash, freeze, are cut off from the store or
lose their locks; the store restarts; all nodes are restarted one by one; all clients lose their connections
at once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from midstream.errors import MidstreamError
from midstream.protocol.frames import HEARTBEAT_S
from midstream.retries import HEARTBEATS_MISSED_MAX, RECONNECT_BACKOFF
from midstream.session import session as sessions
from midstream.session.records import decode
from midstream.session.session import Received
from tests.session.turn_stories import sends
from tests.simulation.crowd import GREEDY_MOST, FleetNode, SimulatedFleet
from tests.simulation.crowd_store import LATENCY_S, STORE_CORES, Rules

SILENCE_S = HEARTBEATS_MISSED_MAX * HEARTBEAT_S
CONNECT_S = 10.0
"""Seconds after which a client leaves a server that does not answer."""
REST_S = 900.0
"""Seconds after the last fault within which every turn must have ended."""
RESTART_S = 3.0
GREEDY_PER_S = 50.0
GREEDY_MARGIN = 1.2
"""Tolerance above the limit: counts of other nodes arrive late, and those of a dead node are lost."""
FAULTS = ("crash", "rack", "freeze", "cut", "terminate", "store", "herd")


class FleetPlan(Struct, frozen=True):
    """Size of the fleet, and duration of the faults.

    Args:
        readers: Clients that are connected and wait for nothing.
        turns_per_s: Messages of all users.
        fault_every_s: Mean seconds between two faults.
        rolls: Rolling restarts of all nodes.
    """

    nodes: int = 100
    sessions: int = 1_000_000
    readers: int = 50_000
    turns_per_s: float = 100.0
    seconds: float = 300.0
    fault_every_s: float = 4.0
    rolls: int = 1


SOUND = Rules()
SHORT = FleetPlan(nodes=10, sessions=10_000, readers=500, turns_per_s=4.0, seconds=90.0, fault_every_s=5.0)


class FleetReport(Struct):
    """Result of a run. Times are virtual seconds."""

    seed: int
    plan: FleetPlan
    problems: list[str]
    faults: dict[str, int]
    turns: int
    tools: int
    late_starts: int
    """Number of tools that a node started after it had briefly lost its lock, and with it the session."""
    takeover_crash_s: dict[str, float]
    takeover_silence_s: dict[str, float]
    turn_s: dict[str, float]
    spread_readers: float
    """Greatest number of readers at one node, by the mean."""
    spread_sessions: float
    store_requests: dict[str, int]
    store_mean: float
    """Share of the store's cores that were at work."""
    store_busiest_second: float
    store_late_s: float
    """The longest wait of a request for the store."""
    notifications: int
    greedy_passed: float
    """Number of requests of a caller that calls all nodes in turn, far above its limit."""
    greedy_allowed: float
    events: int
    virtual_s: float
    real_s: float


class Client(Struct, eq=False):
    """A user who has sent a message, and waits for the end of its turn."""

    session: str
    stream: str
    begun_at: float
    node: FleetNode | None = None
    tries: int = 0
    has_ack: bool = False
    is_over: bool = False


class Crowd:
    """All clients of a fleet."""

    def __init__(self, fleet: SimulatedFleet, plan: FleetPlan) -> None:
        self.waiting: dict[str, Client] = {}
        self.spoken: Counter[str] = Counter()
        self.is_streaming = True
        self._fleet = fleet
        self._plan = plan
        self._clock = fleet.clock
        self._chance = random.Random(f"{fleet.seed}/clients")
        self._at: defaultdict[str, set[str]] = defaultdict(set)
        """The sessions of the waiting clients of each node."""
        self._streams = 0
        fleet.on_end = self._receive_end
        fleet.on_drop = self._drop

    def start(self) -> None:
        nodes = [*self._fleet.nodes.values()]
        for number in range(self._plan.readers):
            nodes[number % len(nodes)].readers += 1
        self._send_messages()
        self._be_greedy()

    def _send_messages(self) -> None:
        if not self.is_streaming:
            return
        session = f"s{self._chance.randrange(self._plan.sessions)}"
        if session not in self.waiting:
            self._streams += 1
            client = self.waiting[session] = Client(session, f"t{self._streams}", self._clock.now)
            self.spoken[session] += 1
            self._connect(client)
        self._clock.later(self._chance.expovariate(self._plan.turns_per_s), self._send_messages)

    def _be_greedy(self) -> None:
        if self.is_streaming and (node := self._pick()) is not None:
            self._fleet.send_greedy_request(node)
        self._clock.later(1 / GREEDY_PER_S, self._be_greedy)

    def _pick(self) -> FleetNode | None:
        serving = [node for node in self._fleet.nodes.values() if node.is_serving]
        return self._chance.choice(serving) if serving else None

    # --- clients that wait for a turn

    def _connect(self, client: Client) -> None:
        if client.node is not None:
            self._at[client.node.name].discard(client.session)
        client.tries += 1
        client.node = node = self._pick()
        tries = client.tries
        self._clock.later(CONNECT_S, partial(self._give_up, client, tries))
        if node is None:
            return
        self._at[node.name].add(client.session)
        node.later(LATENCY_S, partial(self._arrive, client, tries, node))

    def _reconnect(self, client: Client) -> None:
        wait_s = RECONNECT_BACKOFF.wait_s(client.tries - 1, chance=self._chance.random())
        client.tries += 1
        tries = client.tries

        def connect() -> None:
            if client.tries == tries and client.session in self.waiting:
                self._connect(client)

        self._clock.later(wait_s, connect)

    def _give_up(self, client: Client, tries: int) -> None:
        if client.tries == tries and not client.has_ack:
            self._reconnect(client)

    def _arrive(self, client: Client, tries: int, node: FleetNode) -> None:
        if client.has_ack:
            self._fleet.store.request(
                node, "read", lambda: client.is_over, partial(self._look_again, client, tries)
            )
            return
        received = Received(client.stream, client.stream, 0, client.stream, sends(stream=client.stream))
        node.submit(client.session, received, partial(self._on_answer, client, tries))

    def _look_again(self, client: Client, tries: int, is_over: object) -> None:
        if client.tries == tries:
            if isinstance(is_over, MidstreamError):
                self._reconnect(client)
            elif is_over:
                self._finish(client)

    def _on_answer(self, client: Client, tries: int, error: MidstreamError | None) -> None:
        if client.tries != tries:
            return
        if error is not None:
            self._reconnect(client)
            return
        client.has_ack = True
        if client.is_over:
            self._finish(client)

    def _receive_end(self, session: str) -> None:
        client = self.waiting.get(session)
        if client is None:
            self._fleet.judge.blame(f"{session}: a turn ended that was not asked for, or twice")
            return
        client.is_over = True
        node = client.node
        if client.has_ack and node is not None and node.is_reachable and not node.is_cut:
            self._finish(client)

    def _finish(self, client: Client) -> None:
        if self.waiting.pop(client.session, None) is not None:
            self._fleet.judge.turns_s.append(self._clock.now - client.begun_at)
            if client.node is not None:
                self._at[client.node.name].discard(client.session)

    def notice_silence(self, node: FleetNode) -> None:
        """Let the clients of a frozen node leave it when its heartbeats have been missing for long enough."""

        def leave() -> None:
            if node.is_frozen:
                self._drop(node)

        self._clock.later(SILENCE_S, leave)

    def catch_up(self, node: FleetNode) -> None:
        """Show the clients of a returned node the ended turns."""
        for client in self._clients_of(node):
            if client.has_ack and client.is_over:
                self._finish(client)

    def _clients_of(self, node: FleetNode) -> list[Client]:
        return [self.waiting[name] for name in sorted(self._at[node.name]) if name in self.waiting]

    # --- clients that only read

    def _drop(self, node: FleetNode) -> None:
        readers, node.readers = node.readers, 0
        for _ in range(readers):
            self._read(0)
        for client in self._clients_of(node):
            client.tries = 1
            self._reconnect(client)

    def drop_all(self) -> None:
        for node in [*self._fleet.nodes.values()]:
            self._drop(node)

    def _read(self, failures: int) -> None:
        """Connect a reader: at once after the loss of a connection, then with the pauses of a client."""
        is_settled = False

        def connect() -> None:
            node = self._pick()
            self._clock.later(CONNECT_S, partial(settle, None))
            if node is not None:
                self._fleet.store.request(node, "read", lambda: None, partial(settle, node))

        def settle(node: FleetNode | None, error: MidstreamError | None = None) -> None:
            nonlocal is_settled
            if is_settled:
                return
            is_settled = True
            if node is None or error is not None or not node.is_serving:
                self._read(failures + 1)
            else:
                node.readers += 1

        wait_s = RECONNECT_BACKOFF.wait_s(failures, chance=self._chance.random())
        self._clock.later(wait_s + 0.1 * self._chance.random(), connect)


class FleetNemesis:
    """The faults, until they are stopped."""

    def __init__(self, fleet: SimulatedFleet, crowd: Crowd, plan: FleetPlan) -> None:
        self.faults: Counter[str] = Counter()
        self._fleet = fleet
        self._crowd = crowd
        self._plan = plan
        self._chance = random.Random(f"{fleet.seed}/nemesis")
        self._is_over = False

    def start(self) -> None:
        for number in range(self._plan.rolls):
            at = self._plan.seconds * (number + 0.5) / self._plan.rolls
            self._fleet.clock.later(at, self._roll)
        self._fleet.clock.later(self._pause_s(), self._act)

    def stop(self) -> None:
        """End all faults."""
        self._is_over = True
        for node in [*self._fleet.nodes.values()]:
            node.on_intent = None
            self._thaw(node)
            self._heal(node)

    def _pause_s(self) -> float:
        return self._chance.expovariate(1 / self._plan.fault_every_s)

    def _act(self) -> None:
        if self._is_over:
            return
        nodes = [node for node in self._fleet.nodes.values() if node.is_reachable and not node.is_cut]
        weights = (6, 1, 5, 5, 5, 1, 1)
        kind = self._chance.choices(FAULTS, weights)[0]
        if len(nodes) > self._plan.nodes // 2:
            self.faults[kind] += 1
            acts: dict[str, Callable[[], None]] = {
                "crash": partial(self._crash, [self._chance.choice(nodes)]),
                "rack": partial(self._crash, self._chance.sample(nodes, max(2, self._plan.nodes // 20))),
                "freeze": self._at_once_or_later(self._chance.choice(nodes), self._freeze),
                "cut": self._at_once_or_later(self._chance.choice(nodes), self._cut),
                "terminate": partial(self._fleet.terminate, self._chance.choice(nodes)),
                "store": partial(self._fleet.restart_store, self._chance.uniform(1.0, 10.0)),
                "herd": self._crowd.drop_all,
            }
            acts[kind]()
        self._fleet.clock.later(self._pause_s(), self._act)

    def _at_once_or_later(self, node: FleetNode, act: Callable[[FleetNode], None]) -> Callable[[], None]:
        """Act now, or at the worst moment: between the intent of a tool and its start."""

        def wait() -> None:
            node.on_intent = partial(act, node)

        return partial(act, node) if self._chance.random() < 0.3 else wait

    def _crash(self, nodes: Sequence[FleetNode]) -> None:
        for node in nodes:
            self._fleet.crash(node)
            self._fleet.clock.later(self._chance.uniform(1.0, 10.0), self._fleet.add)

    def _silence(self, node: FleetNode) -> float:
        """Return the duration of a node's silence: in half of the cases longer than its lease."""
        for name in self._fleet.store.open_turns(node.name):
            self._fleet.judge.lost_at.setdefault(name, (self._fleet.clock.now, "silence"))
        return self._chance.choice([self._chance.uniform(0.5, 10.0), self._chance.uniform(20.0, 60.0)])

    def _freeze(self, node: FleetNode) -> None:
        node.is_frozen = True
        self._crowd.notice_silence(node)
        self._fleet.clock.later(self._silence(node), partial(self._thaw, node))

    def _cut(self, node: FleetNode) -> None:
        node.is_cut = True
        self._fleet.clock.later(self._silence(node), partial(self._heal, node))

    def _thaw(self, node: FleetNode) -> None:
        self._regain(node)
        if node.is_frozen:
            node.thaw()
            node.later(0.0, partial(self._crowd.catch_up, node))

    def _heal(self, node: FleetNode) -> None:
        self._regain(node)
        node.is_cut = False
        node.later(0.0, partial(self._crowd.catch_up, node))

    def _regain(self, node: FleetNode) -> None:
        """Count no take-over for sessions that stayed."""
        for name in self._fleet.store.open_turns(node.name):
            self._fleet.judge.lost_at.pop(name, None)

    def _roll(self) -> None:
        """Restart the nodes one by one: each drains when the next one has joined."""
        self.faults["roll"] += 1
        old = [*self._fleet.nodes.values()]

        def step() -> None:
            while old and old[-1].is_dead:
                old.pop()
            if old:
                old.pop().drain()
                self._fleet.clock.later(RESTART_S / 2, self._fleet.add)
                self._fleet.clock.later(min(RESTART_S, self._plan.seconds / 3 / self._plan.nodes), step)

        step()


def run(seed: int, plan: FleetPlan = SHORT, rules: Rules = SOUND) -> FleetReport:
    """Run the plan of a seed, and judge it."""
    began_at = time.monotonic()
    fleet = SimulatedFleet(seed, rules)
    for _ in range(plan.nodes):
        fleet.add()
    fleet.clock.run(5.0)
    crowd = Crowd(fleet, plan)
    nemesis = FleetNemesis(fleet, crowd, plan)
    crowd.start()
    nemesis.start()
    fleet.clock.run(5.0 + plan.seconds)
    spread = _spread(node.readers for node in fleet.nodes.values())
    spread_sessions = _spread(len(node.held) for node in fleet.nodes.values())
    nemesis.stop()
    crowd.is_streaming = False
    fleet.clock.run(fleet.clock.now + REST_S, lambda: not (crowd.waiting or fleet.store.turns_open))
    problems = [*fleet.judge.problems, *_problems(fleet, crowd)]
    allowed = GREEDY_MARGIN * GREEDY_MOST * (1 + plan.seconds / 60)
    if fleet.greedy_passed > allowed:
        problems.append(f"{fleet.greedy_passed:g} requests of the greedy caller passed, {allowed:g} may")
    store = fleet.store
    busy = sum(store.busy_s.values())
    return FleetReport(
        seed,
        plan,
        problems,
        dict(sorted((+nemesis.faults).items())),
        len(fleet.judge.turns_s),
        fleet.judge.figures["tools"],
        fleet.judge.figures["late starts"],
        _distribution(fleet.judge.takeovers_s["crash"]),
        _distribution(fleet.judge.takeovers_s["silence"]),
        _distribution(fleet.judge.turns_s),
        spread,
        spread_sessions,
        dict(sorted(store.counts.items())),
        round(busy / STORE_CORES / fleet.clock.now, 4),
        round(max(store.busy_s.values()) / STORE_CORES, 3),
        round(store.late_s, 3),
        fleet.notifications,
        round(fleet.greedy_passed, 1),
        allowed,
        fleet.clock.events,
        round(fleet.clock.now, 1),
        round(time.monotonic() - began_at, 1),
    )


def _problems(fleet: SimulatedFleet, crowd: Crowd) -> list[str]:
    """Return the violations when all has come to rest."""
    found = [f"{name}: its turn does not end" for name in [*crowd.waiting][:20]]
    for name, stored in fleet.store.memory.sessions.items():
        state = sessions.fold([(each.epoch, decode(each.body)) for each in stored.records])
        if state.is_live:
            found.append(f"{name}: a turn is open")
        if state.turns != crowd.spoken[name]:
            found.append(f"{name}: {crowd.spoken[name]} messages, {state.turns} turns")
    return found[:50]


def _spread(counts: Any) -> float:  # noqa: ANN401 - numbers
    numbers = [*counts]
    mean = statistics.mean(numbers)
    return round(max(numbers) / mean, 2) if mean else 0.0


def _distribution(values: Sequence[float]) -> dict[str, float]:
    """Return count, median, 99th percentile and greatest."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "p50": 0.0, "p99": 0.0, "max": 0.0}
    return {
        "count": len(ordered),
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[int(0.99 * len(ordered))], 3),
        "max": round(ordered[-1], 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.crowd_run")
    parser.add_argument("seed", type=int, nargs="?", default=int(time.time()))
    for name, value in msgspec.structs.asdict(FleetPlan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = vars(parser.parse_args(arguments))
    seed = given.pop("seed")
    print(f"seed {seed}; repeat it: make sim-fleet ARGS={seed}", flush=True)  # noqa: T201 - a command
    report = run(seed, FleetPlan(**given))
    print(json.dumps(msgspec.to_builtins(report), indent=2))  # noqa: T201 - a command
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
