"""Run the turn with real processes, kill one at a named point, let both recover by themselves, and judge.

A case describes the deaths, also several in a row: the second kill of a side is for the process that was
started after the first one died. All waits are for pipes and the ends of processes, within bounds.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field

from midstream.client.local_tools import declare
from midstream.environment import Fault
from midstream.history.messages import Outcome, Text, ToolResult
from midstream.protocol.frames import CancelPayload, Payload, ResultPayload, SendPayload, digest_of, encode
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import (
    AttemptStarted,
    CommandAccepted,
    Delta,
    Record,
    ResponseCompleted,
    StreamOpened,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.testing.history_checker import ClientLog, Evidence, Execution, ShownEvent, check_ended
from tests.fault import starting
from tests.fault.fault_client_process import read_notes
from tests.fault.options import Point
from tests.fault.stored import read_session
from tests.fault.turn import (
    ANSWER_OF_CLIENT,
    QUESTION,
    SESSION,
    TEXTS,
    EffectLedger,
    LedgerLine,
    client_tools,
)
from tests.forked import AsyncForked
from tests.ports import held_port

CASE_S = 90.0
"""Seconds for a whole case; an idle machine needs one or two, one with ten times the work of its cores up to 40."""
START_S = 60.0
LIVES_MAX = 8
"""Processes of one side in one case."""

Side = Literal["server", "client"]


class Kill(Struct, frozen=True):
    """One death: this side's process, when it reaches `point` for the `count`-th time in its life."""

    side: Side
    point: Point
    count: int

    def __str__(self) -> str:
        return f"{self.side} {self.point.value} {self.count}"


class KillCase(Struct, frozen=True):
    """The events of the turn; no kills: the reference."""

    kills: tuple[Kill, ...] = ()
    is_cancelled: bool = False
    """The client cancels the turn while the slow tool runs."""
    story: str = "words"
    """The subject of the turn; see `fault_stories` for all others than this one."""

    def __str__(self) -> str:
        deaths = ", then ".join(map(str, self.kills)) or "nobody dies"
        if self.story != "words":
            return f"{self.story}: {deaths}"
        return f"{deaths} (cancelled)" if self.is_cancelled else deaths


class CaseReport(Struct):
    """The result of a case."""

    case: str
    deaths: int = 0
    status: str = ""
    problems: list[str] = field(default_factory=list)
    reached: dict[str, dict[str, int]] = field(default_factory=dict)
    """How often each side reached each point, over all its processes."""
    deadly: list[Point] = field(default_factory=list)
    runs: int = 0
    """Started executions of tools."""
    reruns: int = 0
    """Executions that the journal announces as a second or later run."""
    unknown: int = 0
    """Calls whose outcome is unknown."""
    duplicates: int = 0
    """Effects that were repeated and must not be."""
    takeover_s: list[float] = field(default_factory=list)
    """For each restart of the server in a live turn: from the start of the process to the first new record."""
    from_start_s: list[float] = field(default_factory=list)
    """The same, from the start of the host: without the interpreter and its imports."""
    seconds: float = 0.0


class SideProcess:
    """One side, in one process after the other."""

    def __init__(self, side: Side, folder: Path, port: int, case: KillCase) -> None:
        self.side = side
        self.url = f"http://127.0.0.1:{port}"
        self.deaths: list[Point] = []
        self.started_at: list[float] = []
        self.acked: set[int] = set()
        """The commands whose storage a client had confirmed when it died."""
        self._folder = folder
        self._arguments = [str(folder), str(port), *(["--cancel"] if case.is_cancelled else [])]
        self._arguments += ["--story", case.story]
        is_person = side == "client" and case.story != "words"
        self._program = "person_process" if is_person else f"fault_{side}_process"
        self._kills = [kill for kill in case.kills if kill.side == side]
        self._process: asyncio.subprocess.Process | AsyncForked | None = None

    async def start(self) -> None:
        """Start the next process; a server is waited for until it listens or is dead."""
        assert len(self.started_at) < LIVES_MAX, f"the {self.side} was started {LIVES_MAX} times"
        life = len(self.started_at)
        arguments = list(self._arguments)
        if life < len(self._kills):
            kill = self._kills[life]
            arguments += ["--kill-at", kill.point.value, "--kill-time", str(kill.count)]
        self.started_at.append(time.time())
        log = self._folder / f"{self.side}.log"
        self._process = await starting.start(f"tests.fault.{self._program}", *arguments, log=log)
        if self.side == "server":
            assert self._process.stdout is not None
            async with asyncio.timeout(START_S):
                await self._process.stdout.readline()

    async def await_end(self) -> bool:
        """Wait for the end of the process; return whether it was killed as planned (or ended successfully)."""
        assert self._process is not None
        code = await self._process.wait()
        if code == -signal.SIGKILL and len(self.deaths) < len(self._kills):
            self.deaths.append(self._kills[len(self.deaths)].point)
            return True
        assert code == 0, f"the {self.side} ended with {code}: {self.log()[-2000:]}"
        return False

    def look_back(self) -> None:
        """Read from a dead client's checkpoint which of its commands are acknowledged."""
        if self.side == "client" and (self._folder / "client.db").exists():
            with closing(sqlite3.connect(self._folder / "client.db")) as kept:
                if kept.execute("SELECT 1 FROM sqlite_master WHERE name = 'command'").fetchone():
                    numbered = kept.execute("SELECT coalesce(max(next_seqno), 0) FROM stream").fetchone()[0]
                    waiting = {seqno for (seqno,) in kept.execute("SELECT seqno FROM command")}
                    self.acked |= set(range(numbered)) - waiting

    async def kill(self) -> None:
        """End it at any point."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()

    def log(self) -> str:
        log = self._folder / f"{self.side}.log"
        return log.read_text(errors="replace") if log.exists() else ""


Judge = Callable[[KillCase, Path, tuple["SideProcess", "SideProcess"], CaseReport], Awaitable[None]]
"""Examines the files of server and client in a folder, and completes the report."""


async def run(case: KillCase, folder: Path, judge: Judge | None = None) -> CaseReport:
    """Run one case in an empty folder and judge it, by default as the long turn."""
    began_at = time.monotonic()
    with held_port() as port:
        server, client = SideProcess("server", folder, port, case), SideProcess("client", folder, port, case)
        report = CaseReport(str(case))
        try:
            async with asyncio.timeout(CASE_S):
                await _play(server, client)
        except (TimeoutError, AssertionError) as error:
            problem = f"{type(error).__name__}: {error}"
            report.problems.append(f"{problem}\n{server.log()[-1500:]}\n{client.log()[-1500:]}")
        finally:
            await server.kill()
            await client.kill()
    report.deadly = [*server.deaths, *client.deaths]
    report.deaths = len(report.deadly)
    report.reached = {side: reached(folder, side) for side in ("server", "client")}
    await (judge or _judge)(case, folder, (server, client), report)
    report.seconds = round(time.monotonic() - began_at, 2)
    return report


async def _play(server: SideProcess, client: SideProcess) -> None:
    """Start both, restart dead processes, until the client has received everything."""
    await server.start()
    await client.start()
    waits = {asyncio.ensure_future(each.await_end()): each for each in (server, client)}
    try:
        while True:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                who = waits.pop(wait)
                if not wait.result():
                    assert who is client, "the server ended by itself"
                    return
                who.look_back()
                await who.start()
                waits[asyncio.ensure_future(who.await_end())] = who
    finally:
        for wait in waits:
            wait.cancel()


def reached(folder: Path, side: Side) -> dict[str, int]:
    path = folder / f"{side}.reached"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(Counter(line.split()[0] for line in lines))


# --- judgement --------------------------------------------------------------------------------------------------


async def _judge(
    case: KillCase, folder: Path, sides: tuple[SideProcess, SideProcess], report: CaseReport
) -> None:
    server, client = sides
    stored = read_session(folder, SESSION)
    records = [decode(each.body) for each in stored]
    ledger = read_ledger(folder)
    message = SendPayload((Text(QUESTION),), declare(client_tools(EffectLedger(folder / "ledger"))))
    later: list[Payload] = [
        ResultPayload(1, 4, ToolResult("a", ANSWER_OF_CLIENT)),
        ResultPayload(1, 4, ToolResult("a", UNKNOWN_CONTENT, Outcome.UNKNOWN)),
        CancelPayload(),
        CancelPayload(1),
    ]
    logs = [client_log(folder, records, client.acked, message, later), reader_log(folder)]
    evidence = Evidence({SESSION: stored}, logs, ledger)
    report.problems += map(str, check_ended(evidence))

    ends = [record for record in records if isinstance(record, TurnEnded)]
    report.status = ends[-1].status.value if ends else "open"
    allowed = {TurnStatus.COMPLETED}
    if case.is_cancelled:  # the turn may have been faster than a dead client
        allowed = {TurnStatus.CANCELLED, TurnStatus.COMPLETED}
    if report.status not in allowed or len(ends) != 1:
        report.problems.append(f"the turn ended {report.status}, {len(ends)} times")

    seen = [decode(each.body) for each in logs[0].seen]
    if text_shown(seen) != text_kept(records):
        report.problems.append("the reader's text is not the journal's")
    if not case.is_cancelled and text_kept(records) != TEXTS:
        report.problems.append("the text is not what the model says")
    report.runs = len(ledger)
    report.reruns = sum(each.run > 1 for each in ledger)
    if any(each.run > 1 and each.tool != "read" for each in ledger):
        report.problems.append("a tool with effects ran again")
    report.unknown = sum(
        getattr(record, "result", None) is not None and record.result.outcome is Outcome.UNKNOWN  # type: ignore[union-attr]
        for record in records
    )
    _measure_takeovers(folder, server, report)


def read_ledger(folder: Path) -> list[Execution]:
    """Return the lines that the tools wrote."""
    if not (folder / "ledger").exists():
        return []
    lines = [
        msgspec.json.decode(line, type=LedgerLine) for line in (folder / "ledger").read_bytes().splitlines()
    ]
    ended = {_run_of(each) for each in lines if each.what == "ended"}
    return [
        Execution(
            each.session,
            each.turn,
            each.response,
            each.call_id,
            each.run,
            each.tool,
            has_ended=_run_of(each) in ended,
        )
        for each in lines
        if each.what == "began"
    ]


def _run_of(line: LedgerLine) -> tuple[str, int, int, str, int]:
    return (line.session, line.turn, line.response, line.call_id, line.run)


def client_log(
    folder: Path, records: Sequence[Record], acked: set[int], message: SendPayload, later: Sequence[Payload]
) -> ClientLog:
    """Return the client's log; its commands follow from the script: first `send`, then any of `later`."""
    seen = [ShownEvent(line.id, bytes(line.record)) for line in read_notes(folder / "client.seen")]
    opened = [decode(each.body) for each in seen]
    stream = next((each.stream for each in opened if isinstance(each, StreamOpened)), "")
    stored = [each for each in records if isinstance(each, CommandAccepted) and each.stream == stream]
    possible = {digest_of(encode(each)) for each in later}
    sent = {0: digest_of(encode(message))}
    sent |= {each.seqno: each.digest for each in stored if each.seqno > 0 and each.digest in possible}
    return ClientLog("client", SESSION, stream, sent=sent, acked={0, *acked}, seen=seen)


def reader_log(folder: Path) -> ClientLog:
    seen = [ShownEvent(line.id, bytes(line.record)) for line in read_notes(folder / "reader.seen")]
    return ClientLog("reader", SESSION, start=0, seen=seen)


def text_shown(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the texts of the responses as a reader makes them: from deltas, without interrupted attempts."""
    texts: dict[int, str] = {}
    for record in records:
        match record:
            case AttemptStarted(response=response):
                texts[response] = ""
            case Delta(response=response, kind="text", text=text):
                texts[response] += text
    return tuple(text for _, text in sorted(texts.items()) if text)


def text_kept(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the texts of the whole responses in the journal."""
    return tuple(
        record.body.text for record in records if isinstance(record, ResponseCompleted) and record.body.text
    )


def _measure_takeovers(folder: Path, server: SideProcess, report: CaseReport) -> None:
    """Read from the server's log how long each new process took to its first append."""
    lives: list[list[tuple[str, float]]] = []
    for line in (folder / "server.reached").read_text().splitlines():
        name, *_, at = line.split()
        if name == "start":
            lives.append([])
        lives[-1].append((name, float(at)))
    for begun_at, life in list(zip(server.started_at, lives, strict=False))[1:]:
        appended = next((at for name, at in life if name == Fault.AFTER_APPEND), None)
        if appended is not None:
            report.takeover_s.append(round(appended - begun_at, 4))
            report.from_start_s.append(round(appended - life[0][1], 4))
