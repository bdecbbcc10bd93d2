"""Play a story between a server and a client that runs a tool or answers questions; either of them dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from midstream.client.local_tools import ALLOWED_ONCE_CONTENT, declare
from midstream.environment import Fault, World
from midstream.history.messages import Outcome, Text, ToolResult
from midstream.protocol.frames import Payload, ResultPayload, SendPayload
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import decode
from midstream.testing.history_checker import Evidence
from tests.fault.death_cases import CHECKPOINTS
from tests.fault.drive import judge
from tests.fault.fault_stories import CLIENT_POLICIES, StoryStage
from tests.fault.matrix import (
    CaseReport,
    Kill,
    KillCase,
    Side,
    SideProcess,
    client_log,
    read_ledger,
    reader_log,
    run,
)
from tests.fault.options import Inside, Point
from tests.fault.stored import read_all
from tests.fault.turn import QUESTION, SESSION

IN_DOUBT: tuple[Point, ...] = (Fault.BEFORE_TOOL, Inside.INSIDE_TOOL, Fault.AFTER_TOOL)
"""The points of death after which a started call is in doubt."""
CHECKPOINTS_MAX = 16
"""Checkpoints of one story at each of which its client is killed; of longer ones every second or third."""


async def meet(case: KillCase, folder: Path) -> CaseReport:
    """Play one case in an empty folder and judge it."""
    return await run(case, folder, _judge)


def kills(*deaths: tuple[Side, Point, int]) -> tuple[Kill, ...]:
    """Return deaths in the order in which their sides die."""
    return tuple(Kill(*death) for death in deaths)


def every_case(story: str, reference: CaseReport) -> Iterator[KillCase]:
    """Yield each point of the client each time it is reached; then deaths in a row, and of both sides."""
    times = reference.reached["client"]
    checkpoints = times[Fault.BEFORE_CHECKPOINT]
    for point in CHECKPOINTS:
        for count in range(1, checkpoints + 1, 1 + checkpoints // CHECKPOINTS_MAX):
            yield KillCase(kills(("client", point, count)), story=story)
    if times.get(Fault.AFTER_TOOL):
        yield from (KillCase(kills(("client", doubtful, 1)), story=story) for doubtful in IN_DOUBT)
        for doubtful in IN_DOUBT:
            for again in (*CHECKPOINTS, *IN_DOUBT):  # the life that finds it in doubt dies too
                yield KillCase(kills(("client", doubtful, 1), ("client", again, 1)), story=story)
            yield KillCase(kills(("client", doubtful, 1), ("server", Fault.AFTER_APPEND, 4)), story=story)
        yield KillCase(kills(("client", Fault.AFTER_TOOL, 1), ("server", Fault.BEFORE_ACK, 2)), story=story)
    if reference.reached["server"].get(Fault.AFTER_TOOL):
        for doubtful in IN_DOUBT:
            for count in range(1, checkpoints + 1, 1 + checkpoints // 6):
                # In doubt at the server, or in a child: the answering client dies as well.
                deaths = kills(("server", doubtful, 1), ("client", Fault.AFTER_CHECKPOINT, count))
                yield KillCase(deaths, story=story)
    yield KillCase(kills(("server", Fault.BEFORE_ACK, 2)), story=story)
    yield KillCase(kills(("server", Fault.BEFORE_ACK, 1), ("client", Fault.AFTER_CHECKPOINT, 2)), story=story)


async def _judge(
    case: KillCase, folder: Path, sides: tuple[SideProcess, SideProcess], report: CaseReport
) -> None:
    journals = read_all(folder)
    stored = [decode(each.body) for each in journals.get(SESSION, [])]
    tools = (
        [StoryStage(folder, World(), dies_inside=False).tool(case.story)]
        if case.story in CLIENT_POLICIES
        else []
    )
    message = SendPayload((Text(QUESTION),), declare(tools))
    later: list[Payload] = [
        ResultPayload(1, 1, ToolResult("a", "it was done")),
        ResultPayload(1, 1, ToolResult("a", UNKNOWN_CONTENT, Outcome.UNKNOWN)),
        ResultPayload(1, 1, ToolResult("a", ALLOWED_ONCE_CONTENT, Outcome.ERROR)),
    ]
    logs = [client_log(folder, stored, sides[1].acked, message, later), reader_log(folder)]
    judge(case, Evidence(journals, logs, read_ledger(folder)), report)
