from __future__ import annotations

import pytest

from midstream.engine.defect_limit import DEFECTS_MAX, SESSIONS_MAX, WINDOW_S, Defects
from midstream.errors import InternalError
from midstream.testing import FakeWorld


async def test_a_session_that_fails_repeatedly_is_not_opened_again_for_a_while() -> None:
    world = FakeWorld()
    defects = Defects(world)
    for _ in range(DEFECTS_MAX):
        defects.check("s")
        defects.count("s")
    with pytest.raises(InternalError, match="'s' stopped on a defect 3 times"):
        defects.check("s")
    defects.check("another")
    await world.advance(WINDOW_S)
    defects.check("s")


async def test_failures_far_apart_refuse_nothing() -> None:
    world = FakeWorld()
    defects = Defects(world)
    for _ in range(10 * DEFECTS_MAX):
        defects.count("s")
        await world.advance(WINDOW_S / (DEFECTS_MAX - 1))
        defects.check("s")


def test_counts_are_bounded() -> None:
    defects = Defects(FakeWorld())
    for number in range(SESSIONS_MAX + 1):
        for _ in range(DEFECTS_MAX):
            defects.count(f"s{number}")
    defects.check("s0")
    with pytest.raises(InternalError):
        defects.check(f"s{SESSIONS_MAX}")
