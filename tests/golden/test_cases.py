"""Every recorded case of the kill matrices, chaos, simulation and conformance still exists; a new one must be
recorded.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden import recorded_cases

RECORDED: dict[str, Any] = json.loads(recorded_cases.PATH.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", recorded_cases.FOLDERS)
def test_every_recorded_test_is_still_collected(folder: str) -> None:
    expected, actual = RECORDED["tests"][folder], recorded_cases.collected()[folder]
    lost = {name: count for name, count in expected.items() if actual.get(name, 0) < count}
    assert lost == {}, "recorded tests are gone"
    assert actual == expected, "tests that are not recorded: make golden-record"


def test_every_conformance_script_is_still_there() -> None:
    assert recorded_cases.listed_scripts() == RECORDED["scripts"]


def test_a_chaos_seed_decides_as_recorded() -> None:
    assert json.loads(json.dumps(recorded_cases.planned_chaos())) == RECORDED["chaos"]
