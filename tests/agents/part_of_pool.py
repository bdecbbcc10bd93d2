"""A part of the pool's contract, for upstreams whose cases start processes.

The scripted upstream and chained responses run the whole contract; with `MIDSTREAM_FAULT_FULL=1` all upstreams
do.
"""

from __future__ import annotations

from typing import Final

import pytest

from midstream.testing.pool_contract import MATRIX, Case, PoolContract, PoolPeer, UpstreamFault
from tests.fault.extent import IS_FULL


def choose_cases() -> tuple[Case, ...]:
    """Return each fault once, and each situation at least once."""
    cases: list[Case] = []
    for fault in UpstreamFault:
        possible = [case for case in MATRIX if case.fault is fault]
        played = [case.situation for case in cases]
        cases.append(min(possible, key=lambda case: played.count(case.situation)))
    return tuple(cases)


PART: Final = MATRIX if IS_FULL else choose_cases()


class PartOfPoolContract(PoolContract):
    """Runs each fault, and each situation."""

    @pytest.mark.parametrize("case", PART, ids=lambda case: f"{case.situation}-{case.fault}")
    async def test_each_message_arrives_once_whatever_goes_wrong(self, peer: PoolPeer, case: Case) -> None:
        await super().test_each_message_arrives_once_whatever_goes_wrong(peer, case)
