from __future__ import annotations

from tests.cli.conftest import store

__all__ = ["store"]
