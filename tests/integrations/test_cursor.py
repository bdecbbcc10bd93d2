"""Cursor's agents, with the real package and a scripted bridge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("cursor_sdk", reason="the package is not installed here: `make contract` has it")

from midstream.testing.upstream_contract import UpstreamContract
from tests.integrations.cursor_bridge import CursorBridge, cursor_bridge


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[CursorBridge]:
    async with cursor_bridge(tmp_path) as bridge:
        yield bridge


class TestCursorAgents(UpstreamContract):
    """The suite that every upstream passes."""
