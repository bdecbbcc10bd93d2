"""Clients that run tools, and clients that answer for people, killed everywhere: under every policy, with and without
a server that dies too."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from midstream.core.calls import OnDoubt
from midstream.world import Fault
from tests.fault.cases import figures_of, lines_of, summary, table
from tests.fault.matrix import ROOT, Case, Report
from tests.fault.options import Inside
from tests.fault.people import every_case, kills, meet
from tests.fault.stories import CLIENT_POLICIES, ELSEWHERE, PEOPLE
from tests.spec import spec

pytestmark = pytest.mark.fault

IS_FULL = os.environ.get("MIDSTREAM_FAULT_FULL") == "1"
AT_ONCE = 2
FULL_S = 3600
PROGRESS = 25
"""How many cases go by between two signs of life."""

EVERY_DAY = (
    # A call in doubt at the client, by each policy of its tool; the life that finds it in doubt dies too.
    Case(kills(("client", Fault.AFTER_TOOL, 1)), story="client_unknown"),
    Case(kills(("client", Inside.INSIDE_TOOL, 1), ("client", Inside.INSIDE_TOOL, 1)), story="client_rerun"),
    Case(kills(("client", Fault.AFTER_TOOL, 1)), story="client_rerun_with_key"),
    Case(kills(("client", Fault.AFTER_TOOL, 1), ("client", Fault.AFTER_CHECKPOINT, 1)), story="client_probe"),
    Case(kills(("client", Inside.INSIDE_TOOL, 1)), story="client_hold"),
    # Its outcome is on the way when both die.
    Case(kills(("client", Fault.AFTER_TOOL, 1), ("server", Fault.BEFORE_ACK, 2)), story="client_unknown"),
    # Permission: given, used up, and asked for by one who dies before and after it was kept.
    Case(kills(("client", Fault.BEFORE_TOOL, 1)), story="client_approval"),
    Case(kills(("client", Fault.AFTER_TOOL, 1)), story="client_approval_rerun"),
    Case(kills(("client", Inside.INSIDE_TOOL, 1)), story="client_approval_probe"),
    Case(kills(("server", Fault.BEFORE_ACK, 2), ("client", Fault.BEFORE_CHECKPOINT, 9)), story="approval"),
    Case(kills(("client", Fault.AFTER_CHECKPOINT, 9)), story="question"),
    # Somebody is asked about a call in doubt, of the server or of a sub-agent, and dies.
    Case(kills(("server", Inside.INSIDE_TOOL, 1), ("client", Fault.AFTER_CHECKPOINT, 9)), story="hold"),
    Case(kills(("server", Fault.AFTER_TOOL, 2), ("client", Fault.BEFORE_CHECKPOINT, 9)), story="family"),
    Case(kills(("client", Fault.AFTER_CHECKPOINT, 12)), story="family_asks"),
)


@spec("TURN-13", "TURN-28", "TURN-30")
@pytest.mark.parametrize("case", EVERY_DAY, ids=str)
async def test_a_client_dies_in_a_story(case: Case, tmp_path: Path) -> None:
    report = await meet(case, tmp_path)
    assert report.problems == []
    assert report.deaths == len(case.kills), "a point was not reached"


def test_every_policy_a_client_may_have_is_tried() -> None:
    assert {*CLIENT_POLICIES.values()} | ELSEWHERE == set(OnDoubt)
    assert {case.story for case in EVERY_DAY} == set(PEOPLE)


@pytest.mark.skipif(not IS_FULL, reason="MIDSTREAM_FAULT_FULL=1 runs the whole matrix (`make fault`)")
@pytest.mark.timeout(FULL_S)
async def test_a_client_dies_everywhere_in_every_story(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turnstile = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, case: Case) -> Report:
        folder = tmp_path / f"{case.story}-{number}"
        folder.mkdir()
        async with turnstile:
            return await meet(case, folder)

    references = await asyncio.gather(*(one(0, Case(story=story)) for story in PEOPLE))
    assert [problem for report in references for problem in report.problems] == []
    cases = [
        each for story, report in zip(PEOPLE, references, strict=True) for each in every_case(story, report)
    ]
    reports: list[Report] = []
    for number, next_one in enumerate(
        asyncio.as_completed([one(number, case) for number, case in enumerate(cases, start=1)]), start=1
    ):
        reports.append(await next_one)
        if reports[-1].problems or number % PROGRESS == 0:
            with capsys.disabled():
                print(f"{number} of {len(cases)}: {reports[-1].case} {reports[-1].problems}", flush=True)  # noqa: T201
    figures = {story: figures_of(story, reports) for story in PEOPLE}
    with capsys.disabled():
        print(f"\n{table(summary(reports))}\n{lines_of(figures)}")  # noqa: T201 - what this test is run for
    results = ROOT / "bench" / "results"
    (results / "fault_people.json").write_text(json.dumps({"result": figures}, indent=2) + "\n")
    assert [f"{report.case}: {report.problems}" for report in reports if report.problems] == []
    assert sum(each.duplicates for each in reports) == 0
