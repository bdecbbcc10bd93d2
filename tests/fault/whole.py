"""The whole matrix over a set of stories: every death in each of them, the table and the file of figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path

import pytest

from tests.fault.death_cases import figures_of, lines_of, summary, table
from tests.fault.matrix import CaseReport, KillCase
from tests.forked import ROOT

AT_ONCE = 2
FULL_S = 3600
PROGRESS = 25
"""The number of cases between two progress messages."""


async def play_all(
    stories: Collection[str],
    meet: Callable[[KillCase, Path], Awaitable[CaseReport]],
    every_case: Callable[[str, CaseReport], Iterator[KillCase]],
    *,
    folder: Path,
    results: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Play every case of every story; fail if one of them has a problem.


    Args:
        meet: Plays one case in its own folder.     every_case: The cases of a story, from its run without a
            death.     results: Name of the file of figures, in `bench/results`.     capsys: Shows progress
            and the table past pytest.
    """
    turnstile = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, case: KillCase) -> CaseReport:
        own = folder / f"{case.story}-{number}"
        own.mkdir()
        async with turnstile:
            return await meet(case, own)

    references = await asyncio.gather(*(one(0, KillCase(story=story)) for story in stories))
    assert [problem for report in references for problem in report.problems] == []
    cases = [
        each for story, report in zip(stories, references, strict=True) for each in every_case(story, report)
    ]
    reports: list[CaseReport] = []
    playing = [one(number, case) for number, case in enumerate(cases, start=1)]
    for done, next_one in enumerate(asyncio.as_completed(playing), start=1):
        reports.append(await next_one)
        if reports[-1].problems or done % PROGRESS == 0:
            with capsys.disabled():
                print(f"{done} of {len(cases)}: {reports[-1].case} {reports[-1].problems}", flush=True)  # noqa: T201
    figures = {story: figures_of(story, reports) for story in stories}
    with capsys.disabled():
        print(f"\n{table(summary(reports))}\n{lines_of(figures)}")  # noqa: T201 - the result of the matrix
    (ROOT / "bench" / "results" / results).write_text(json.dumps({"result": figures}, indent=2) + "\n")
    assert [f"{report.case}: {report.problems}" for report in reports if report.problems] == []
    assert sum(each.duplicates for each in reports) == 0
