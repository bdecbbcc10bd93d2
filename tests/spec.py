"""Tests cite the clauses of `docs/spec` they prove."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def spec(*clauses: str) -> Callable[[Test], Test]:
    """Name the clauses that a test proves; `tests/house/test_spec.py` reads them from the source."""
    assert clauses, "cite a clause"
    return lambda test: test
