"""Run three servers, a database, a load balancer and clients, harm them at random, and judge all of it.

A seed repeats every decision; the progress of the others at its effect depends on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from msgspec import Struct, field

from midstream.environment import World
from tests.fault.stored import name_of, read_all, use_postgres
from tests.forked import AsyncForked
from tests.postgres_engine import Engine, terminate
from tests.scale.balancer import Balancer
from tests.scale.clients_process import ENOUGH
from tests.scale.fleet import Fleet, running_fleet
from tests.scale.scale_judge import ScaleVerdict, judge

END_S = 240.0
"""Seconds for all turns to end after the last harm."""
PAUSE_S = (0.3, 2.0)
"""Seconds between two harms."""
DOWN_S = (0.0, 2.0)
"""Seconds until a killed server is started again."""
FROZEN_S = (0.2, 6.0)
LONG_FROZEN_S = (21.0, 25.0)
"""Longer than the lease of a server: its sessions are taken while it is frozen."""
ROLLING_ROUNDS_PAUSE_S = 2.0
_WEIGHTS = {
    "kill": 36,
    "terminate": 44,
    "freeze": 9,
    "long freeze": 1,
    "cut": 8,
    "restart": 2,
    "crash": 2,
}
"""Weights of the harms. `restart` and `crash` are those of PostgreSQL."""
COUNTED = frozenset({"kill", "terminate", "restart", "crash"})
"""Harms that end a process or a backend."""


class ScaleReport(Struct):
    """The figures of a run, and its result.

    Args:
        kills: Ended servers, backends and databases: harms of the kinds `kill`, `terminate`, `restart`, `crash`.
        harms: Their number, by kind.
        backends: Connections of the database that were terminated.
        connections_cut: Connections of clients that the balancer cut.
        requests: Requests that each server took, in the order of the servers.
        reconnects: Connections of a client's stream that were lost and made again.
        turn_s: Seconds of a turn as its client saw it.
        ending_s: Of a rolling restart: seconds from SIGTERM to the end of each server.
    """

    seed: int
    clients: int
    kills: int = 0
    harms: dict[str, int] = field(default_factory=dict)
    backends: int = 0
    connections_cut: int = 0
    requests: list[int] = field(default_factory=list)
    reconnects: int = 0
    turn_s: dict[str, float] = field(default_factory=dict)
    ending_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    verdict: ScaleVerdict = field(default_factory=ScaleVerdict)


class ScaleScene:
    """All running parts, which the faults target.

    Args:
        print_progress: Prints a line of progress.
    """

    def __init__(
        self,
        engine: Engine,
        fleet: Fleet,
        balancer: Balancer,
        report: ScaleReport,
        print_progress: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.fleet = fleet
        self.balancer = balancer
        self.report = report
        self.print_progress = print_progress
        self._harms: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def harm(self, seed: int, kills: int) -> None:
        """Do harm until so many processes and backends were ended."""
        chance = random.Random(seed)
        world = World()
        while self.report.kills < kills:
            (kind,) = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()])
            if await self._do(kind, chance):
                self._harms[kind] += 1
                self.report.harms = dict(sorted(self._harms.items()))
                self.report.kills += kind in COUNTED
                if kind in COUNTED and self.report.kills % 20 == 0:
                    self.print_progress(f"{self.report.kills} of {kills} kills: {self.report.harms}")
            self.fleet.note_exits()
            for task in [each for each in self._tasks if each.done()]:
                self._tasks.discard(task)
                task.result()
            await world.sleep(chance.uniform(*PAUSE_S))

    async def calm(self) -> None:
        """Wait until every frozen server continues, and every killed one is started again."""
        await asyncio.gather(*self._tasks)
        self.fleet.note_exits()

    async def end(self) -> None:
        """Start no further processes, also after a failed run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def roll(self, rounds: int) -> None:
        """Restart the servers one by one, as an update does."""
        for _ in range(rounds):
            for server in self.fleet.servers:
                self.report.ending_s.append(round(await self.fleet.restart(server), 2))
                self.print_progress(
                    f"{server.name} was restarted, and ended in {self.report.ending_s[-1]:g} s"
                )
                await World().sleep(ROLLING_ROUNDS_PAUSE_S)

    async def _do(self, kind: str, chance: random.Random) -> bool:
        """Do one harm; return False where it has no target."""
        server = chance.choice(self.fleet.servers)
        match kind:
            case "kill":
                down_s = chance.uniform(*DOWN_S)
                if self.fleet.is_starting(server):
                    return False
                self._spawn(self.fleet.kill(server, down_s))
            case "freeze":
                self._spawn(self.fleet.freeze(server, chance.uniform(*FROZEN_S)))
            case "long freeze":
                self._spawn(self.fleet.freeze(server, chance.uniform(*LONG_FROZEN_S)))
            case "cut":
                self.report.connections_cut += self.balancer.cut(
                    random.Random(chance.random()), chance.uniform(0.1, 1.0)
                )
            case "terminate":
                ended = await terminate(self.engine, "midstream %", most=chance.randint(1, 3))
                self.report.backends += ended
                return ended > 0
            case "restart" | "crash":
                await asyncio.to_thread(
                    self.engine.stop, signal.SIGINT if kind == "restart" else signal.SIGQUIT
                )
                await asyncio.to_thread(self.engine.start)
        return True

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.add(asyncio.create_task(work))


async def run(
    folder: Path,
    engine: Engine,
    *,
    seed: int,
    clients: int,
    kills: int = 0,
    rolls: int = 0,
    within_s: float,
    print_progress: Callable[[str], None],
) -> ScaleReport:
    """Run until so many kills, or so many rolling restarts, were survived.

    Args:
        folder: Empty; all notes are kept there, and which schema of the database was used.
        engine: A running PostgreSQL, which is ended and started again.
        within_s: Bound of the whole run.
    """
    report = ScaleReport(seed, clients)
    began_at = World().monotonic()
    use_postgres(folder, engine)
    async with running_fleet(name_of(folder), folder) as fleet:
        balancer = Balancer([each.port for each in fleet.servers])
        async with balancer.listening():
            scene = ScaleScene(engine, fleet, balancer, report, print_progress)
            people = await _start_clients(folder, balancer.url, clients)
            try:
                async with asyncio.timeout(within_s):
                    await scene.harm(seed, kills)
                    await scene.roll(rolls)
                    await scene.calm()
                (folder / ENOUGH).touch()
                print_progress("nothing is harmed any more")
                async with asyncio.timeout(END_S):
                    code = await people.wait()
                if code != 0:
                    report.verdict.problems.append(
                        f"the clients ended with {code}: {_tail(folder / 'clients.log')}"
                    )
            except (TimeoutError, AssertionError, OSError) as error:
                logs = "\n".join(f"{each.name}: {each.log()}" for each in fleet.servers)
                report.verdict.problems.append(f"{type(error).__name__}: {error}\n{logs}")
            finally:
                await scene.end()
                with contextlib.suppress(ProcessLookupError):
                    people.kill()
                await people.wait()
            report.requests = [balancer.requests[each.port] for each in fleet.servers]
    problems = report.verdict.problems + fleet.problems
    report.verdict = await asyncio.to_thread(lambda: judge(folder, read_all(folder)))
    report.verdict.problems = problems + report.verdict.problems
    report.turn_s = _spread(folder / "turns")
    noted = folder / "reconnects"
    report.reconnects = noted.stat().st_size if noted.exists() else 0
    report.seconds = round(World().monotonic() - began_at, 1)
    return report


async def _start_clients(folder: Path, url: str, clients: int) -> AsyncForked:
    with (folder / "clients.log").open("ab") as log:
        return await AsyncForked.started(
            *("tests.scale.clients_process", folder, url, f"--clients={clients}"),
            env={**os.environ, "MIDSTREAM_HOME": str(folder / "home")},
            stderr=log,
        )


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def _spread(path: Path) -> dict[str, float]:
    seconds: Sequence[float] = sorted(map(float, path.read_text().split())) if path.exists() else ()
    if not seconds:
        return {}
    return {
        "median": round(statistics.median(seconds), 2),
        "p95": round(seconds[int(0.95 * (len(seconds) - 1))], 2),
        "most": round(seconds[-1], 2),
    }
