"""One run: the faults and their times follow from the seed; afterwards all results are compared."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from midstream.session import session as sessions
from midstream.session.calls import Choice, Site
from midstream.session.child_names import PART_MARK
from midstream.session.records import (
    AnswerUsed,
    CancelRequested,
    EpochStarted,
    QuestionAnswered,
    SessionStatus,
    TurnEnded,
    decode,
)
from midstream.session.session import Session
from midstream.session.turn.states import CANCEL_GRACE_S, CHILD_GRACE_S, Cancelling, RunningCalls
from midstream.testing.history_checker import ClientLog, Evidence, check_ended
from tests.session.edges import RecordEffect, steps_of
from tests.simulation.actors import (
    Meddler,
    PassingSpeaker,
    Person,
    SimulatedClient,
    SimulatedReader,
    answer_everything,
    answer_unexpiring,
)
from tests.simulation.lab import Lab, SimulatedServer
from tests.simulation.loop import SimulatedLoop, Stuck, current_process, pass_time

REST_S = 6 * 60 * 60.0
"""Seconds after the last fault within which everything must have come to rest: a client may take 2 h for a call."""
PROBE_FAILED = "the probe of a tool failed"
"""Logged with a traceback, and no fault of the program."""
LONG_OUTAGE_S = 15 * 60.0
"""Seconds without a store after which every runner has failed (`APPEND_ATTEMPTS_MAX`)."""
CANCELLED_WITHIN_S = CANCEL_GRACE_S + 2 * CHILD_GRACE_S + 10.0
"""Seconds for a cancel to come to rest without faults: the grace of sub-agents in two layers, differing
clocks, a slow store, a last restart.
"""
LOOK_S = 5.0
"""Seconds between two checks of that."""


class RunPlan(Struct, frozen=True):
    """The meaning of a seed. Each run has some kinds of faults and not others, so that none hides another."""

    seed: int
    sessions: int
    speakers: int
    servers: int
    trouble_s: float
    """Seconds until the last fault."""
    is_fair: bool
    """Tasks run in asyncio's order, not in a random one."""
    kills: bool
    drains: bool
    freezes: bool
    outages: bool
    pauses: bool
    """A long time without any server."""
    failing: float
    latency_s: float
    model_failing: float
    cutting: float
    skew_s: float
    look_back_s: float
    is_deserted: bool
    """Whether clients leave at once, and none comes: only the host itself continues a turn. No process stops,
    but the store is away, often beyond the patience of every runner.
    """

    @property
    def is_steady(self) -> bool:
        """Return whether every process is alive and awake to the end."""
        return not any((self.kills, self.drains, self.freezes, self.pauses))

    @property
    def is_calm(self) -> bool:
        """Return whether servers and store work without faults."""
        return self.is_steady and not (self.outages or self.failing)

    @classmethod
    def of(cls, seed: int) -> RunPlan:
        """Draw a plan."""
        chance = random.Random(f"{seed}/plan")

        def maybe(share: float) -> bool:
            return chance.random() < share

        drawn = cls(
            seed=seed,
            sessions=chance.choice([1, 1, 2]),
            speakers=chance.choice([1, 2, 3]),
            servers=chance.choice([1, 1, 2]),
            trouble_s=chance.choice([5.0, 20.0, 60.0]),
            is_fair=maybe(0.3),
            kills=maybe(0.6),
            drains=maybe(0.3),
            freezes=maybe(0.3),
            outages=maybe(0.3),
            pauses=maybe(0.1),
            failing=chance.choice([0.0, 0.0, 0.02, 0.2]),
            latency_s=chance.choice([0.0, 0.001, 0.02, 0.3]),
            model_failing=chance.choice([0.0, 0.05, 0.3]),
            cutting=chance.choice([0.0, 0.1]),
            skew_s=chance.choice([0.0, 0.0, 3.0]),
            look_back_s=chance.choice([7200.0, 7200.0, 30.0]),
            is_deserted=maybe(0.1),
        )
        if not drawn.is_deserted:
            return drawn
        return replace(
            drawn, speakers=1, kills=False, drains=False, freezes=False, pauses=False, outages=True
        )


class Outcome(Struct):
    """Result of a run."""

    plan: RunPlan
    problems: list[str]
    trace: list[tuple[object, ...]]
    steps: int
    records: int
    children: int
    seconds: float
    """Simulated ones."""
    taken: set[RecordEffect]
    """Effects of records on turns, out of all possible ones."""

    def figures(self) -> Counter[str]:
        """Return the figures, for totals."""
        items = Counter(str(what[2]) for what in self.trace)
        return Counter(
            steps=self.steps,
            records=self.records,
            deaths=items["dies"],
            freezes=items["freezes"],
            outages=items["outages"],
            tools=items["tool begins"],
            children=self.children,
        )

    def lines(self) -> Iterator[str]:
        """Yield the readable trace; the same bytes for the same seed, in any process."""
        yield str(self.plan)
        for at, who, *what in self.trace:
            yield f"{at:12.6f} {who!s:8} {' '.join(map(_readable, what))}"


def _readable(what: object) -> str:
    if isinstance(what, tuple):
        return "".join(f"\n{'':22}{body.decode()}" for body in what)
    return str(what)


def run(seed: int) -> Outcome:
    """Run the plan of a seed and judge it."""
    plan = RunPlan.of(seed)
    loop = SimulatedLoop(None if plan.is_fair else random.Random(f"{seed}/order"))
    lab = Lab(seed, loop)
    was_collecting = gc.isenabled()
    gc.disable()  # The time of a cycle collection must not matter, and it costs a third of the time.
    with _complaints(lab):
        try:
            logs = loop.run_until_complete(_live(lab, plan))
            lab.problems += _find_violations(lab, logs)
            if plan.is_calm:
                lab.problems += _late_cancels(lab)
            if plan.is_steady and not lab.has_outlasted_runners:
                lab.problems += _needless_doubts(lab)
        except Stuck as stuck:
            lab.problems.append(f"stuck: {stuck}")
        lab.problems += [f"nobody took an error: {each}" for each in loop.complaints]
        problems, trace = [*lab.problems], [*lab.trace]
        for server in lab.servers:
            loop.close_remains(server.process)
        if was_collecting:
            gc.enable()
    records = sum(len(found.records) for found in lab.memory.sessions.values())
    children = sum(PART_MARK in name for name in lab.memory.sessions)
    return Outcome(
        plan, problems, trace, loop.steps, records, children, round(loop.time(), 3), _steps_taken(lab)
    )


def _steps_taken(lab: Lab) -> set[RecordEffect]:
    taken: set[RecordEffect] = set()
    for found in lab.memory.sessions.values():
        session = Session()
        for stored in found.records:
            record = decode(stored.body)
            taken.update(steps_of(session, (record,), epoch=stored.epoch))
            session = sessions.evolve(session, record, epoch=stored.epoch)
    return taken


async def _live(lab: Lab, plan: RunPlan) -> list[ClientLog]:
    lab.weather.failing = plan.failing
    lab.weather.latency_s = plan.latency_s
    lab.outside.model_failing = plan.model_failing
    lab.cutting = plan.cutting
    logs = _populate(lab, plan)
    nemesis = Nemesis(lab, plan)
    await nemesis.live()
    lab.weather.failing = lab.outside.model_failing = lab.cutting = 0.0
    await _come_to_rest(lab, plan)
    return logs


def _populate(lab: Lab, plan: RunPlan) -> list[ClientLog]:
    """Start all speakers, people, readers and meddlers."""
    logs: list[ClientLog] = []
    kind = PassingSpeaker if plan.is_deserted else SimulatedClient
    for session in (f"s{number}" for number in range(plan.sessions)):
        speakers = [kind(lab, session, number) for number in range(plan.speakers)]
        for speaker in speakers:
            lab.spawn(_later(lab.chance(speaker.log.client), speaker))
            logs.append(speaker.log)
        if plan.is_deserted:
            continue
        reader = SimulatedReader(lab, session, 0, start=0)
        lab.spawn(reader.live())
        logs.append(reader.log)
        lab.spawn(Meddler(lab, session, acts=lab.chance(f"acts {session}").choice([0, 1, 3])).live())
    for name in () if plan.is_deserted else ("person", "other person"):
        Person(lab, name)
    return logs


async def _later(chance: random.Random, speaker: SimulatedClient) -> None:
    await pass_time(chance.expovariate(0.3))
    await speaker.live()


class Nemesis:
    """Faults of servers and store, until they stop."""

    def __init__(self, lab: Lab, plan: RunPlan) -> None:
        self._lab = lab
        self._plan = plan
        self._chance = lab.chance("nemesis")
        self._is_over = False
        lab.outside.on_begin = self._on_tool_begun

    def _on_tool_begun(self) -> None:
        """Kill a process in the middle of its tool, now and then: calls in doubt are the hardest case."""
        process = current_process()
        if self._plan.kills and not self._is_over and process is not None and self._chance.random() < 0.1:
            process.dies_in = int(self._chance.expovariate(0.2))

    async def live(self) -> None:
        for _ in range(self._plan.servers):
            await self._start()
        acts = [
            name for name in ("kills", "drains", "freezes", "outages", "pauses") if getattr(self._plan, name)
        ]
        while acts and (self._lab.loop.time() < self._plan.trouble_s):
            await pass_time(self._chance.expovariate(4.0 / self._plan.trouble_s))
            await self._act(self._chance.choice(acts))
            while len(self._alive()) < self._plan.servers:
                await pass_time(self._chance.expovariate(2.0))
                await self._start()
        await pass_time(max(0.0, self._plan.trouble_s - self._lab.loop.time()))
        await self._stop()

    async def _stop(self) -> None:
        """End all faults, and start one more process, as after the last restart of a night.

        Where no process ever stopped there is none: it would take up the work that the others had left.
        """
        self._is_over = True
        if self._plan.is_steady:
            self._lab.note("nemesis", "is over")
            return
        for server in self._lab.servers:
            server.process.dies_in = None
            if server.process.is_frozen:
                self._thaw(server)
        if self._chance.random() < 0.5:
            for server in self._alive():
                self._lab.loop.kill(server.process)
        self._lab.note("nemesis", "is over")
        await self._start()

    def _alive(self) -> list[SimulatedServer]:
        return [each for each in self._lab.servers if not (each.process.is_dead or each.is_leaving)]

    async def _start(self) -> None:
        skew_s = self._plan.skew_s * (self._chance.random() - 0.5)
        server = self._lab.server(skew_s=skew_s, look_back_s=self._plan.look_back_s)
        self._lab.note(server.process.name, "starts")
        await server.begin()

    async def _act(self, what: str) -> None:
        alive = [each for each in self._alive() if not each.process.is_frozen]
        self._lab.note("nemesis", what)
        if what == "outages":
            await self._outage()
        elif what == "pauses":
            await self._pause()
        elif not alive:
            return
        elif what == "kills":
            self._chance.choice(alive).process.dies_in = int(self._chance.expovariate(0.05))
            await pass_time(0.01)
        elif what == "drains":
            await self._chance.choice(alive).leave(grace_s=self._chance.choice([0.0, 1.0, 10.0]))
        else:
            await self._freeze(self._chance.choice(alive))

    async def _outage(self) -> None:
        weather = self._lab.weather
        weather.is_down, weather.is_full = True, self._chance.random() < 0.5
        is_long = self._chance.random() < (0.5 if self._plan.is_deserted else 0.1)
        self._lab.has_outlasted_runners |= is_long
        await pass_time(LONG_OUTAGE_S if is_long else self._chance.expovariate(0.3))
        weather.is_down = False

    async def _pause(self) -> None:
        for server in self._alive():
            self._lab.loop.kill(server.process)
        await pass_time(self._chance.choice([60.0, 3 * 60 * 60.0]))

    async def _freeze(self, server: SimulatedServer) -> None:
        """Freeze a process for a while; others may consider it dead."""
        server.process.is_frozen = True
        await pass_time(self._chance.expovariate(0.5))
        self._lab.memory.kill(server.memory_store.node)  # Its heartbeat was missed.
        while len(self._alive()) < self._plan.servers + 1:
            await self._start()
        await pass_time(self._chance.expovariate(0.5))
        self._thaw(server)

    def _thaw(self, server: SimulatedServer) -> None:
        self._lab.note(server.process.name, "thaws")
        if not server.process.is_dead and server.memory_store.node:
            self._lab.memory.living.add(server.memory_store.node)  # Its heartbeat continues.
        self._lab.loop.thaw(server.process)


async def _come_to_rest(lab: Lab, plan: RunPlan) -> None:
    """Wait until no turn is open and every client has received everything."""
    answer = answer_unexpiring if plan.is_deserted else answer_everything
    chance = lab.chance("rest")
    until = lab.loop.time() + REST_S
    while lab.loop.time() < until:
        await pass_time(LOOK_S)
        await answer(lab, chance)
        if _open_turns(lab):
            continue
        lab.is_over = lab.is_over or len(lab.clients) == lab.following
        if not lab.clients:
            break
    lab.problems += [f"turn of {name!r} did not end: {lab.folded(name).turn}" for name in _open_turns(lab)]
    lab.problems += [f"a client still waits: {each.get_coro()}" for each in lab.clients][:3]
    for server in lab.servers:
        if not (server.process.is_dead or server.is_leaving):
            await server.leave(grace_s=10.0)


def _open_turns(lab: Lab) -> list[str]:
    """Return the sessions with an open turn, also one that waits for people only."""
    marks = {name: found.mark for name, found in lab.memory.sessions.items()}
    return [name for name, mark in marks.items() if mark.is_live or mark.status == SessionStatus.WAITING]


def _find_violations(lab: Lab, logs: list[ClientLog]) -> list[str]:
    journals = {name: found.records for name, found in lab.memory.sessions.items()}
    received = [log for log in logs if log.session in journals]
    evidence = Evidence(journals, received, lab.outside.ledger)
    return [*(str(each) for each in check_ended(evidence)), *_used_twice(lab)]


def _used_twice(lab: Lab) -> Iterator[str]:
    """Yield the agents that acted more often than permitted."""
    for name, found in lab.memory.sessions.items():
        records = [decode(each.body) for each in found.records]
        allowed = {
            each.call_id
            for each in records
            if isinstance(each, QuestionAnswered) and each.choice is Choice.ALLOW
        }
        used = [each.call_id for each in records if isinstance(each, AnswerUsed)]
        leaves = sum(each in allowed for each in used)
        if len(used) != len(set(used)) or lab.outside.acts[name] > leaves:
            yield f"{name}: agents acted {lab.outside.acts[name]} times with {leaves} leaves, used as {used}"


def _late_cancels(lab: Lab) -> Iterator[str]:
    """Return the cancels that took longer than the grace of tools."""
    for name, found in lab.memory.sessions.items():
        asked: dict[int, float] = {}
        for record in (decode(stored.body) for stored in found.records):
            match record:
                case CancelRequested(turn=turn, at=at):
                    asked.setdefault(turn, at)
                case TurnEnded(turn=turn, at=at) if at - asked.get(turn, at) > CANCELLED_WITHIN_S:
                    yield f"the cancel of turn {turn} of {name!r} took {at - asked[turn]:.1f} s"
                case _:
                    pass


def _needless_doubts(lab: Lab) -> Iterator[str]:
    """Return the calls that lost their node while they ran, though every process lived and the store returned
    in time.
    """
    for name, found in lab.memory.sessions.items():
        session = Session()
        for stored in found.records:
            record = decode(stored.body)
            calls = session.turn.calls if isinstance(session.turn, RunningCalls | Cancelling) else ()
            if isinstance(record, EpochStarted):
                for call in calls:
                    if call.is_running and call.plan.site is Site.SERVER:
                        yield f"call {call.call.id!r} of {name!r} lost its node, and nothing had happened to it"
            session = sessions.evolve(session, record, epoch=stored.epoch)


@contextmanager
def _complaints(lab: Lab) -> Iterator[None]:
    """Make a problem of every exception that the program logs."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.msg != PROBE_FAILED:
                lab.problems.append(f"logged: {record.getMessage()}: {record.exc_info[1]!r}")

    log = logging.getLogger("midstream")
    handler = Handler(logging.ERROR)
    before = (log.level, log.propagate)
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before
