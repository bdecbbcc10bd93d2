"""Readers of journals other than sessions are woken by any node's append."""

from __future__ import annotations

import asyncio

import pytest

from midstream.engine.followed_journals import FollowedJournals


async def test_readers_wait_for_their_own_journal_and_leave_nothing_behind() -> None:
    changes: list[None] = []
    journals = FollowedJournals(lambda: changes.append(None))
    first = asyncio.create_task(journals.wait("~a", 3))
    second = asyncio.create_task(journals.wait("~a", 2))
    other = asyncio.create_task(journals.wait("~b", 0))
    await asyncio.sleep(0)
    assert (dict(journals.ends()), len(changes)) == ({"~a": 2, "~b": 0}, 3)
    journals.wake(["~a", "~none"])
    async with asyncio.timeout(60):
        await first
        await second
    assert dict(journals.ends()) == {"~b": 0}
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    assert not journals.ends()
