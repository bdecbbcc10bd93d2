"""Run a chaos run: one server, a client for each transport, the proxy between them, and kills."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx2
import msgspec
from msgspec import Struct, field

from midstream.environment import World
from midstream.protocol.frames import EventId
from midstream.store.contract import StoredRecord
from tests.chaos.chaos_judge import ChaosVerdict, judge
from tests.chaos.plan import SWEPT_BYTES, ChaosPlan
from tests.chaos.proxy import ChaosProxy
from tests.chaos.turns import ENOUGH, WAYS
from tests.fault.starting import start
from tests.forked import AsyncForked
from tests.ports import held_port

LOOK_S = 0.2
"""Seconds between two checks of the clients' progress."""
END_S = 120.0
"""Seconds within which all turns must end when the network has healed."""
LISTENS_S = 60.0
TAIL_BYTES = 3000
"""The end of a log that is shown with a problem."""


class ChaosReport(Struct):
    """The figures of a run, and its result.


    Args:
        reconnects: Connections of a stream that were lost and made again, up to the server's welcome; by
            transport.     connections: TCP connections that the proxy took.     kills: Processes that died,
            by side and by place.     offsets_up: Of the offsets 0 to 799 of a client's bytes, those at which
            a connection was cut.     offsets_down: The same of the server's bytes.
    """

    seed: int
    reconnects: int = 0
    reconnects_by_transport: dict[str, int] = field(default_factory=dict)
    connections: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    harms: dict[str, int] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    cuts_inside_a_write: int = 0
    offsets_up: int = 0
    offsets_down: int = 0
    requests_repeated: int = 0
    connections_overtaken: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    verdict: ChaosVerdict = field(default_factory=ChaosVerdict)


class RestartedProgram:
    """One process after the other, until one ends successfully.


    Args:
        side: `server`, or the client's transport.     plan: Where each life ends.     is_calm: Called at each
            start: whether no process is to die any more.
    """

    def __init__(
        self,
        side: str,
        folder: Path,
        port: int,
        plan: ChaosPlan,
        kills: Counter[str],
        is_calm: Callable[[], bool],
    ) -> None:
        self.side = side
        self._kind = "server" if side == "server" else "client"
        self._folder = folder
        self._port = port
        self._plan = plan
        self._kills = kills
        self._is_calm = is_calm
        self._life = 0
        self._process: asyncio.subprocess.Process | AsyncForked | None = None
        self._killed_by = ""

    async def run(self) -> None:
        """Start it again whenever it was killed.

        Raises:     AssertionError: It ended in another way.
        """
        while True:
            cause = await self._start()
            assert self._process is not None
            if self._kind == "server" and self._process.stdout is not None:
                async with asyncio.timeout(LISTENS_S):
                    await self._process.stdout.readline()
            code = await self._process.wait()
            if code == 0:
                return
            assert code == -signal.SIGKILL, f"{self.side} ended with {code}: {self.log()}"
            self._kills[f"{self._kind} {self._killed_by or cause}"] += 1

    async def _start(self) -> str:
        """Start the next life; return where it will end by itself."""
        death = None if self._is_calm() else self._plan.death(self.side, self._life)
        self._life += 1
        self._killed_by = ""
        arguments = [str(self._folder), str(self._port)]
        if self._kind == "client":
            arguments += ["--way", self.side]
        if death is not None:
            arguments += ["--die-at", death.point.value, "--die-time", str(death.count)]
        module = f"tests.chaos.chaos_{self._kind}_process"
        self._process = await start(module, *arguments, log=self._folder / f"{self.side}.log")
        return "" if death is None else death.point.value

    def kill(self) -> None:
        """Kill it at any place."""
        if self._process is not None and self._process.returncode is None:
            self._killed_by = "anywhere"
            self._process.kill()

    async def end(self) -> None:
        """Kill it for the last time."""
        self.kill()
        if self._process is not None:
            await self._process.wait()

    def log(self) -> str:
        log = self._folder / f"{self.side}.log"
        return log.read_text(errors="replace")[-TAIL_BYTES:] if log.exists() else ""


async def run(
    plan: ChaosPlan, folder: Path, reconnects: int, *, within_s: float, print_progress: Callable[[str], None]
) -> ChaosReport:
    """Run until this many connections were lost and made again, heal the network, and judge.


    Args:
        folder: An empty folder for all files.     within_s: Bound of the whole run.     print_progress: Receives the
            progress.
    """
    report = ChaosReport(plan.seed)
    world = World()
    began_at = world.monotonic()
    journals: dict[str, list[StoredRecord]] = {}
    kills: Counter[str] = Counter()
    with held_port() as port:
        proxy = ChaosProxy(plan, port)
        enough = folder / ENOUGH
        server = RestartedProgram("server", folder, port, plan, kills, enough.exists)
        async with proxy.listening():
            clients = [RestartedProgram(way, folder, proxy.port, plan, kills, enough.exists) for way in WAYS]
            lives = [asyncio.create_task(each.run()) for each in (server, *clients)]
            try:
                async with asyncio.timeout(within_s):
                    await _until_enough(
                        folder, reconnects, plan, proxy, [server, *clients], lives, print_progress
                    )
                proxy.heal()
                enough.touch()
                async with asyncio.timeout(END_S):
                    await _until_ended(lives[0], lives[1:])
                    await _until_left(f"http://127.0.0.1:{port}")
                    journals = await _journals(f"http://127.0.0.1:{port}")
            except (TimeoutError, AssertionError) as error:
                logs = "\n".join(f"{each.side}: {each.log()}" for each in (server, *clients))
                report.verdict.problems.append(f"{type(error).__name__}: {error}\n{logs}")
            finally:
                for life in lives:
                    life.cancel()
                await asyncio.wait(lives)
                for each in (server, *clients):
                    await each.end()
    if journals:
        report.verdict = judge(folder, journals)
    _note(report, folder, proxy, kills)
    report.seconds = round(world.monotonic() - began_at, 1)
    return report


async def _until_enough(
    folder: Path,
    reconnects: int,
    plan: ChaosPlan,
    proxy: ChaosProxy,
    programs: Sequence[RestartedProgram],
    lives: Sequence[asyncio.Task[None]],
    print_progress: Callable[[str], None],
) -> None:
    """Kill by the plan until there were enough reconnects, some of each client: one may be slow to start."""
    by_side = {each.side: each for each in programs}
    number, reported = 0, 0
    after, side = plan.kill(number, [*by_side])
    kill_at = after
    while (made := sum((by_way := _reconnects(folder)).values())) < reconnects or not all(by_way.values()):
        for life in lives:
            if life.done():
                life.result()
                raise AssertionError("a process ended before there was enough")
        if proxy.accepted >= kill_at:
            by_side[side].kill()
            number += 1
            after, side = plan.kill(number, [*by_side])
            kill_at = proxy.accepted + after
        if made >= reported + reconnects / 20:
            reported = made
            print_progress(f"{made} of {reconnects} reconnects, {proxy.accepted} connections, {number} kills")
        await World().sleep(LOOK_S)


async def _until_ended(server: asyncio.Task[None], clients: Sequence[asyncio.Task[None]]) -> None:
    left = set(clients)
    while left:
        done, _ = await asyncio.wait({server, *left}, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
        assert server not in done, "the server ended by itself"
        left -= done


async def _until_left(url: str) -> None:
    """Wait until the server counts no client any more: every connection, cut or repeated, ends."""
    async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
        while (await http.get("/ready")).json().get("streams") != 0:
            await World().sleep(LOOK_S)


def _reconnects(folder: Path) -> dict[str, int]:
    noted = {way: folder / way / "reconnects" for way in WAYS}
    return {way: path.stat().st_size if path.exists() else 0 for way, path in noted.items()}


class _StoredLine(Struct, frozen=True):
    id: str
    record: msgspec.Raw


async def _journals(url: str) -> dict[str, list[StoredRecord]]:
    """Request all the server has, through its public API."""
    journals: dict[str, list[StoredRecord]] = {}
    async with httpx2.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as http:
        query: str | None = "?limit=200"
        while query is not None:
            page = (await http.get(f"/v1/sessions{query}")).raise_for_status().json()
            for session in page["sessions"]:
                lines = (await http.get(f"/v1/sessions/{session['id']}/records")).raise_for_status().content
                journals[session["id"]] = [_stored(line) for line in lines.splitlines()]
            query = page["next"]
    return journals


def _stored(line: bytes) -> StoredRecord:
    read = msgspec.json.decode(line, type=_StoredLine)
    event_id = EventId.parse(read.id)
    return StoredRecord(event_id.position, event_id.epoch, bytes(read.record))


def _note(report: ChaosReport, folder: Path, proxy: ChaosProxy, kills: Counter[str]) -> None:
    report.reconnects_by_transport = _reconnects(folder)
    report.reconnects = sum(report.reconnects_by_transport.values())
    report.connections = proxy.accepted
    report.requests = dict(sorted(proxy.requests.items()))
    report.harms = dict(sorted(proxy.harms.items()))
    report.cuts = dict(sorted(proxy.cuts.items()))
    report.cuts_inside_a_write = proxy.in_pieces
    report.offsets_up, report.offsets_down = (
        sum(offset < SWEPT_BYTES for offset in proxy.offsets[way]) for way in ("up", "down")
    )
    report.requests_repeated = proxy.repeated
    report.connections_overtaken = proxy.overtaken
    report.kills = dict(sorted(kills.items()))
