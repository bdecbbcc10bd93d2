"""Each policy, approvals, sub-agents, queue, resumption, a tool's process: killed at every point, also in recovery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.environment import Fault
from midstream.session.calls import OnDoubt
from tests.fault.death_cases import IN_RECOVERY
from tests.fault.drive import play
from tests.fault.extent import IS_FULL, select_cases
from tests.fault.fault_stories import ELSEWHERE, POLICIES, STORIES
from tests.fault.matrix import CaseReport, Kill, KillCase
from tests.fault.options import Inside, Point
from tests.fault.whole import FULL_S, play_all
from tests.spec import spec

pytestmark = pytest.mark.fault

APPENDS_MAX = 12
"""Appends of one story at each of which it is killed; of longer ones every second or third."""


def _kills(*deaths: tuple[Point, int]) -> tuple[Kill, ...]:
    return tuple(Kill("server", point, count) for point, count in deaths)


EVERY_DAY = (
    # A call in doubt, by each policy with a question; the last recovery dies as well.
    KillCase(_kills((Fault.AFTER_TOOL, 1), (Fault.AFTER_APPEND, 1)), story="probe"),
    KillCase(_kills((Inside.INSIDE_TOOL, 1), (Fault.AFTER_CLAIM, 1)), story="hold"),
    KillCase(_kills((Fault.AFTER_TOOL, 1)), story="rerun_with_key"),
    # An approval that was used, and one that was given when no process was left to use it.
    KillCase(_kills((Inside.INSIDE_TOOL, 1)), story="approval_rerun"),
    KillCase(_kills((Fault.AFTER_APPEND, 3)), story="approval"),
    # A child with a call in doubt, then its parent.
    KillCase(_kills((Fault.AFTER_TOOL, 2), (Fault.AFTER_APPEND, 4)), story="family"),
    KillCase(_kills((Fault.AFTER_APPEND, 4), (Fault.BEFORE_APPEND, 1)), story="queue"),
    KillCase(_kills((Fault.AFTER_APPEND, 5)), story="resume"),
    KillCase(story="program_dies"),
    # A tool in another process: its server dies in the middle of a call, and the caller.
    KillCase(story="mcp_dies"),
    KillCase(_kills((Inside.INSIDE_TOOL, 1)), story="mcp"),
    KillCase(_kills((Fault.AFTER_TOOL, 2), (Fault.AFTER_CLAIM, 1)), story="mcp_dies"),
)


@spec("TURN-13", "TURN-28", "TURN-30", "TURN-35", "TURN-36", "TURN-37", "TURN-46")
@pytest.mark.parametrize("case", select_cases(EVERY_DAY, 0, 3, 5, 7, 9), ids=str)
async def test_a_story_survives_the_death_of_its_server(case: KillCase, tmp_path: Path) -> None:
    report = await play(case, tmp_path)
    assert report.problems == []
    assert report.deaths == len(case.kills), "a point was not reached"


def test_every_policy_has_its_story() -> None:
    assert {*POLICIES.values()} | ELSEWHERE == set(OnDoubt)


@pytest.mark.skipif(not IS_FULL, reason="MIDSTREAM_FAULT_FULL=1 runs the whole matrix (`make fault`)")
@pytest.mark.timeout(FULL_S)
async def test_every_story_survives_the_death_of_its_server_at_every_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await play_all(STORIES, play, _every_case, folder=tmp_path, results="fault_stories.json", capsys=capsys)


def _every_case(story: str, reference: CaseReport) -> Iterator[KillCase]:
    """Yield each point at each time it is reached; then deaths in a row, the last ones in recovery."""
    times = reference.reached["server"]
    appends = times[Fault.BEFORE_APPEND]
    for point in (Fault.BEFORE_APPEND, Fault.AFTER_APPEND):
        for count in range(1, appends + 1, 1 + appends // APPENDS_MAX):
            yield KillCase(_kills((point, count)), story=story)
    doubtful: tuple[Point, int] = (Fault.AFTER_APPEND, appends // 2)
    if times.get(Fault.AFTER_TOOL):
        doubtful = (Fault.AFTER_TOOL, 1)
        yield from (KillCase(_kills((point, 1)), story=story) for point in (Fault.BEFORE_TOOL, *Inside))
        yield KillCase(_kills((Inside.INSIDE_TOOL, 1), (Fault.AFTER_PUBLISH, 1)), story=story)
    yield KillCase(_kills(doubtful), story=story)
    yield from (KillCase(_kills(doubtful, (point, 1)), story=story) for point in IN_RECOVERY)
    yield KillCase(_kills(doubtful, (Fault.AFTER_CLAIM, 1), (Fault.AFTER_APPEND, 2)), story=story)
