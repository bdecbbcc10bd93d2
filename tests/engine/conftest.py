"""Fixtures of the tests with several hosts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.engine.several_hosts import WAIT_S, Places


@pytest.fixture
async def places() -> AsyncIterator[Places]:
    """Hosts on one memory, stopped at the end."""
    places = Places()
    async with asyncio.timeout(3 * WAIT_S):
        yield places
        await places.stop()
