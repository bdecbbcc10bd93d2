"""Each policy, approvals, sub-agents, queue, resumption, a tool's process: killed at every point, also in recovery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.environment import Fault
from midstream.session.calls import OnDoubt
from tests.fault.cases import IN_RECOVERY
from tests.fault.drive import play
from tests.fault.extent import IS_FULL, select_cases
from tests.fault.matrix import Case, Kill, Report
from tests.fault.options import Inside, Point
from tests.fault.stories import ELSEWHERE, POLICIES, STORIES
from tests.fault.whole import FULL_S, play_all
from tests.spec import spec

pytestmark = pytest.mark.fault

APPENDS_MAX = 12
"""Appends of one story at each of which it is killed; of longer ones every second or third."""


def _kills(*deaths: tuple[Point, int]) -> tuple[Kill, ...]:
    return tuple(Kill("server", point, count) for point, count in deaths)


EVERY_DAY = (
    # A call in doubt, by each policy with a question; the last recovery dies as well.
    Case(_kills((Fault.AFTER_TOOL, 1), (Fault.AFTER_APPEND, 1)), story="probe"),
    Case(_kills((Inside.INSIDE_TOOL, 1), (Fault.AFTER_CLAIM, 1)), story="hold"),
    Case(_kills((Fault.AFTER_TOOL, 1)), story="rerun_with_key"),
    # An approval that was used, and one that was given when no process was left to use it.
    Case(_kills((Inside.INSIDE_TOOL, 1)), story="approval_rerun"),
    Case(_kills((Fault.AFTER_APPEND, 3)), story="approval"),
    # A child with a call in doubt, then its parent.
    Case(_kills((Fault.AFTER_TOOL, 2), (Fault.AFTER_APPEND, 4)), story="family"),
    Case(_kills((Fault.AFTER_APPEND, 4), (Fault.BEFORE_APPEND, 1)), story="queue"),
    Case(_kills((Fault.AFTER_APPEND, 5)), story="resume"),
    Case(story="program_dies"),
    # A tool in another process: its server dies in the middle of a call, and the caller.
    Case(story="mcp_dies"),
    Case(_kills((Inside.INSIDE_TOOL, 1)), story="mcp"),
    Case(_kills((Fault.AFTER_TOOL, 2), (Fault.AFTER_CLAIM, 1)), story="mcp_dies"),
)


@spec("TURN-13", "TURN-28", "TURN-30", "TURN-35", "TURN-36", "TURN-37", "TURN-46")
@pytest.mark.parametrize("case", select_cases(EVERY_DAY, 0, 1, 2, 3, 5, 6, 7, 9, 10), ids=str)
async def test_a_server_dies_in_a_story(case: Case, tmp_path: Path) -> None:
    report = await play(case, tmp_path)
    assert report.problems == []
    assert report.deaths == len(case.kills), "a point was not reached"


def test_every_policy_has_its_story() -> None:
    assert {*POLICIES.values()} | ELSEWHERE == set(OnDoubt)


@pytest.mark.skipif(not IS_FULL, reason="MIDSTREAM_FAULT_FULL=1 runs the whole matrix (`make fault`)")
@pytest.mark.timeout(FULL_S)
async def test_a_server_dies_everywhere_in_every_story(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await play_all(STORIES, play, _every_case, folder=tmp_path, results="fault_stories.json", capsys=capsys)


def _every_case(story: str, reference: Report) -> Iterator[Case]:
    """Yield each point at each time it is reached; then deaths in a row, the last ones in recovery."""
    times = reference.reached["server"]
    appends = times[Fault.BEFORE_APPEND]
    for point in (Fault.BEFORE_APPEND, Fault.AFTER_APPEND):
        for count in range(1, appends + 1, 1 + appends // APPENDS_MAX):
            yield Case(_kills((point, count)), story=story)
    doubtful: tuple[Point, int] = (Fault.AFTER_APPEND, appends // 2)
    if times.get(Fault.AFTER_TOOL):
        doubtful = (Fault.AFTER_TOOL, 1)
        yield from (Case(_kills((point, 1)), story=story) for point in (Fault.BEFORE_TOOL, *Inside))
        yield Case(_kills((Inside.INSIDE_TOOL, 1), (Fault.AFTER_PUBLISH, 1)), story=story)
    yield Case(_kills(doubtful), story=story)
    yield from (Case(_kills(doubtful, (point, 1)), story=story) for point in IN_RECOVERY)
    yield Case(_kills(doubtful, (Fault.AFTER_CLAIM, 1), (Fault.AFTER_APPEND, 2)), story=story)
