"""Tests cite the clauses of `docs/spec` they prove."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def spec(*clauses: str) -> Callable[[Test], Test]:
    """Say which clauses a test proves; `tests/house/test_spec.py` reads it from the source."""
    assert clauses, "cite a clause"
    return lambda test: test
