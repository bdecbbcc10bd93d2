"""Play a story against a server that dies: the driver sends, follows, and answers as a person.

The answer about a call in doubt is true according to the ledger: it happened, or it should run again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx2
import msgspec

from midstream.client import connect
from midstream.environment import World
from midstream.history.messages import Outcome
from midstream.protocol.frames import AnswerPayload
from midstream.session.calls import Choice, OnDoubt, QuestionKind
from midstream.session.records import (
    CallEnded,
    ChildDelta,
    MessageAccepted,
    QuestionAsked,
    Record,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.testing.history_checker import Evidence, Execution, check_ended
from tests.fault.fault_client_process import HastyWorld
from tests.fault.fault_stories import CLIENT_POLICIES, MCP_POLICIES, MESSAGES, POLICIES, RESUMED
from tests.fault.matrix import CASE_S, CaseReport, KillCase, SideProcess, reached, read_ledger
from tests.fault.stored import read_all
from tests.fault.turn import PIDS, SESSION
from tests.ports import held_port

TRY_AGAIN_S = 0.02
GONE_WITHIN_S = 30.0
REPEATABLE = {OnDoubt.RERUN, OnDoubt.RERUN_WITH_KEY}


async def play(case: KillCase, folder: Path) -> CaseReport:
    """Play one case in an empty folder and judge it."""
    began_at = time.monotonic()
    report = CaseReport(str(case))
    with held_port() as port:
        server = SideProcess("server", folder, port, case)
        try:
            async with asyncio.timeout(CASE_S):
                await _live(server, Driver(case, folder, server.url))
        except (TimeoutError, AssertionError, ExceptionGroup) as error:
            report.problems.append(f"{type(error).__name__}: {error}\n{server.log()[-1500:]}")
        finally:
            await server.kill()
    report.deadly = [*server.deaths]
    report.deaths = len(report.deadly)
    report.reached = {"server": reached(folder, "server")}
    judge(case, Evidence(read_all(folder), ledger=read_ledger(folder)), report)
    report.problems += await _left_behind(folder)
    report.seconds = round(time.monotonic() - began_at, 2)
    return report


async def _live(server: SideProcess, driver: Driver) -> None:
    """Restart the server whenever it dies, until the driver is done."""
    await server.start()
    talk = asyncio.ensure_future(driver.live())
    died = asyncio.ensure_future(server.await_end())
    try:
        while not talk.done():
            await asyncio.wait([talk, died], return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                assert died.result(), "the server ended by itself"
                await server.start()
                died = asyncio.ensure_future(server.await_end())
        talk.result()
    finally:
        for each in (talk, died):
            each.cancel()
        await asyncio.wait([talk, died])


class Driver:
    """All roles other than the server."""

    def __init__(self, case: KillCase, folder: Path, url: str) -> None:
        self._case = case
        self._folder = folder
        self._url = url
        self._messages = MESSAGES.get(case.story, ("go",))
        self._ends = 0
        self._group = asyncio.TaskGroup()
        self._http = httpx2.AsyncClient()

    async def live(self) -> None:
        """Send everything, answer everything, and return when all turns have ended."""
        async with (
            connect(self._url, world=HastyWorld(None)) as client,
            self._http,
            self._group,
        ):
            waiting = [client.send(SESSION, words) for words in self._messages]
            for events in waiting:  # the next message follows when this one was received
                await anext(events)
            followed = client.follow(SESSION, after="0-0")
            async for event in followed:
                if isinstance(event.record, Record) and self._apply(event.record):
                    break
            for events in (followed, *waiting):
                await events.aclose()

    def _apply(self, record: Record) -> bool:
        """React to a record; return whether it was the last one."""
        match record:
            case QuestionAsked():
                self._group.create_task(self._answer(SESSION, record))
            case ChildDelta():
                inner = decode(bytes(record.record))
                if isinstance(inner, QuestionAsked):
                    self._group.create_task(self._answer(record.child, inner))
            case TurnEnded(status=TurnStatus.FAILED) if self._case.story == "resume":
                (self._folder / RESUMED).touch()
                self._group.create_task(self._post(SESSION, "resume", b""))
            case TurnEnded():
                self._ends += 1
        return self._ends == len(self._messages)

    async def _answer(self, session: str, asked: QuestionAsked) -> None:
        choice = truth(self._folder, session, asked)
        answer = AnswerPayload(asked.turn, asked.response, asked.call_id, asked.digest, choice, "so be it")
        await self._post(session, "answer", msgspec.json.encode(answer))

    async def _post(self, session: str, what: str, body: bytes) -> None:
        """Send the request until the server has answered that it is done, or was done before."""
        while True:
            try:
                answer = await self._http.post(f"{self._url}/v1/sessions/{session}/{what}", content=body)
            except httpx2.HTTPError:
                await World().sleep(TRY_AGAIN_S)
                continue
            if answer.is_success or answer.status_code == httpx2.codes.CONFLICT:
                return
            assert answer.status_code >= 500, answer.text
            await World().sleep(TRY_AGAIN_S)


def truth(folder: Path, session: str, asked: QuestionAsked) -> Choice:
    """Return the true answer of a person without objections."""
    match asked.kind:
        case QuestionKind.APPROVAL:
            return Choice.ALLOW
        case QuestionKind.QUESTION:
            return Choice.RESPOND
        case QuestionKind.DOUBT:
            place = (session, asked.turn, asked.response, asked.call_id, True)
            ended = (
                (each.session, each.turn, each.response, each.call_id, each.has_ended)
                for each in read_ledger(folder)
            )
            return Choice.HAPPENED if place in ended else Choice.RERUN


# --- judgement --------------------------------------------------------------------------------------------------


async def _left_behind(folder: Path) -> list[str]:
    """Return a problem if an MCP server survives the processes that started it for long."""
    if not (folder / PIDS).exists():
        return []
    pids = (folder / PIDS).read_text().split()
    try:
        async with asyncio.timeout(GONE_WITHIN_S):
            while any(map(_lives, pids)):
                await World().sleep(TRY_AGAIN_S)
    except TimeoutError:
        return [f"the MCP server {pid} was left behind" for pid in pids if _lives(pid)]
    return []


def _lives(pid: str) -> bool:
    try:
        return bool(Path("/proc", pid, "cmdline").read_bytes())  # empty for a zombie
    except (FileNotFoundError, ProcessLookupError):
        return False


def judge(case: KillCase, evidence: Evidence, report: CaseReport) -> None:
    """Judge the result: no forbidden repetition, no lost outcome, no remaining process."""
    ledger = evidence.ledger
    report.problems += map(str, check_ended(evidence))
    records = [decode(each.body) for stored in evidence.journals.values() for each in stored]
    ends = [each for each in records if isinstance(each, TurnEnded)]
    opened = sum(isinstance(each, MessageAccepted) for each in records)
    report.status = str([each.status.value for each in ends])
    expected = Counter({TurnStatus.COMPLETED: opened, TurnStatus.FAILED: int(case.story == "resume")})
    if Counter(each.status for each in ends) != +expected:
        report.problems.append(f"{opened} turns ended {report.status}")
    if opened != len(MESSAGES.get(case.story, ("go",))) + int(case.story.startswith("family")):
        report.problems.append(f"{opened} turns were opened")
    report.runs = len(ledger)
    report.reruns = sum(each.run > 1 for each in ledger)
    outcomes = [each.result.outcome for each in records if isinstance(each, CallEnded)]
    report.unknown = outcomes.count(Outcome.UNKNOWN)
    effects = Counter(
        (each.session, each.turn, each.response, each.call_id) for each in ledger if each.has_ended
    )
    report.duplicates = sum(times - 1 for call, times in effects.items() if not _may_repeat(ledger, call))
    if report.duplicates:
        report.problems.append(f"{report.duplicates} effects happened twice")
    for each in {(each.session, each.turn, each.response, each.call_id): each for each in ledger}.values():
        call = (each.session, each.turn, each.response, each.call_id)
        if _is_settled(each.tool) and not effects[call]:
            report.problems.append(f"call {call} of {each.tool!r} never took effect")


def _may_repeat(ledger: Sequence[Execution], call: tuple[str, int, int, str]) -> bool:
    """Return whether the policy of a call lets its effect happen again."""
    names = {each.tool for each in ledger if (each.session, each.turn, each.response, each.call_id) == call}
    policies = POLICIES | CLIENT_POLICIES | MCP_POLICIES
    return all(policies.get(name) in REPEATABLE and "approval" not in name for name in names)


def _is_settled(name: str) -> bool:
    """Return whether the effect of such a call always happens in the end: it is run again, or asked about."""
    if (
        name in CLIENT_POLICIES
    ):  # no question is asked: a held call, or one that was allowed once, stays unknown
        return CLIENT_POLICIES[name] in {*REPEATABLE, OnDoubt.PROBE} and "approval" not in name
    return name in POLICIES and POLICIES[name] is not OnDoubt.UNKNOWN
