"""Clients that run tools or answer for people, killed at every point: for every policy, also with a dying server."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.environment import Fault
from midstream.session.calls import OnDoubt
from tests.fault.client_deaths import every_case, kills, meet
from tests.fault.extent import IS_FULL, select_cases
from tests.fault.fault_stories import CLIENT_POLICIES, ELSEWHERE, PEOPLE
from tests.fault.matrix import KillCase
from tests.fault.options import Inside
from tests.fault.whole import FULL_S, play_all
from tests.spec import spec

pytestmark = pytest.mark.fault


EVERY_DAY = (
    # A call in doubt at the client, by each policy of its tool; the life that finds it in doubt dies too.
    KillCase(kills(("client", Fault.AFTER_TOOL, 1)), story="client_unknown"),
    KillCase(
        kills(("client", Inside.INSIDE_TOOL, 1), ("client", Inside.INSIDE_TOOL, 1)), story="client_rerun"
    ),
    KillCase(kills(("client", Fault.AFTER_TOOL, 1)), story="client_rerun_with_key"),
    KillCase(
        kills(("client", Fault.AFTER_TOOL, 1), ("client", Fault.AFTER_CHECKPOINT, 1)), story="client_probe"
    ),
    KillCase(kills(("client", Inside.INSIDE_TOOL, 1)), story="client_hold"),
    # Its outcome is in transit when both die.
    KillCase(kills(("client", Fault.AFTER_TOOL, 1), ("server", Fault.BEFORE_ACK, 2)), story="client_unknown"),
    # Approval: given, used, and run by a client that dies before and after it was stored.
    KillCase(kills(("client", Fault.BEFORE_TOOL, 1)), story="client_approval"),
    KillCase(kills(("client", Fault.AFTER_TOOL, 1)), story="client_approval_rerun"),
    KillCase(kills(("client", Inside.INSIDE_TOOL, 1)), story="client_approval_probe"),
    KillCase(
        kills(("server", Fault.BEFORE_ACK, 2), ("client", Fault.BEFORE_CHECKPOINT, 9)), story="approval"
    ),
    KillCase(kills(("client", Fault.AFTER_CHECKPOINT, 9)), story="question"),
    # A client is asked about a call in doubt, of the server or of a sub-agent, and dies.
    KillCase(kills(("server", Inside.INSIDE_TOOL, 1), ("client", Fault.AFTER_CHECKPOINT, 9)), story="hold"),
    KillCase(kills(("server", Fault.AFTER_TOOL, 2), ("client", Fault.BEFORE_CHECKPOINT, 9)), story="family"),
    KillCase(kills(("client", Fault.AFTER_CHECKPOINT, 12)), story="family_asks"),
)


@spec("TURN-13", "TURN-28", "TURN-30")
@pytest.mark.parametrize("case", select_cases(EVERY_DAY, 1, 3, 4, 5, 7, 10, 11, 13), ids=str)
async def test_a_story_survives_the_death_of_its_client(case: KillCase, tmp_path: Path) -> None:
    report = await meet(case, tmp_path)
    assert report.problems == []
    assert report.deaths == len(case.kills), "a point was not reached"


def test_every_policy_of_a_client_tool_has_a_case() -> None:
    assert {*CLIENT_POLICIES.values()} | ELSEWHERE == set(OnDoubt)
    assert {case.story for case in EVERY_DAY} == set(PEOPLE)


@pytest.mark.skipif(not IS_FULL, reason="MIDSTREAM_FAULT_FULL=1 runs the whole matrix (`make fault`)")
@pytest.mark.timeout(FULL_S)
async def test_every_story_survives_the_death_of_its_client_at_every_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await play_all(PEOPLE, meet, every_case, folder=tmp_path, results="fault_people.json", capsys=capsys)
