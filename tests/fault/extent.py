"""The extent of the kill tests: representatives in `make test`, all of them in `make fault`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import pytest

IS_FULL: Final = os.environ.get("MIDSTREAM_FAULT_FULL") == "1"
STORES: Final = ("sqlite", "postgresql")
Case = TypeVar("Case")


def select_cases(cases: Sequence[Case], *numbers: int) -> list[Case]:
    """Return the cases with these numbers, which represent the others in `make test`; in `make fault` all cases."""
    return [each for number, each in enumerate(cases) if IS_FULL or number in numbers]


def run_on_stores(metafunc: pytest.Metafunc, usual: Mapping[str, Sequence[str]]) -> None:
    """Run each test with a `folder` on its stores; in `make fault` on all of `STORES`.


    Args:
        usual: The stores of a test by its name; SQLite for other tests.
    """
    if "folder" in metafunc.fixturenames:
        stores = STORES if IS_FULL else usual.get(metafunc.function.__name__, STORES[:1])
        metafunc.parametrize("folder", stores, indirect=True)
