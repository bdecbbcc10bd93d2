from __future__ import annotations

import pytest

from midstream.errors import StoreFullError
from midstream.session.records import Delta, decode
from midstream.store.memory import MemoryStore
from midstream.testing.history_checker import check, check_ended
from midstream.testing.store_fakes import FailingStore
from tests.engine.test_faults import Lab, _send_message


@pytest.mark.parametrize("appends", [3, 8, 14])
async def test_after_a_long_outage_the_turn_continues_by_itself(appends: int) -> None:
    """The outage is longer than any retry: the session ends as by a crash, and is reopened when the store is back."""
    lab = Lab()
    store = FailingStore(MemoryStore(lab.memory))
    host, world = lab.host(store)

    async def until_outage() -> None:
        await _send_message(host)
        while store.appends < appends:
            await world.sleep(0.01)

    await world.live_through(until_outage())
    store.outage = StoreFullError("full")
    await world.advance(1200.0)
    assert check(lab.evidence()) == []
    store.outage = None
    await world.advance(120.0)

    assert check_ended(lab.evidence()) == [], "no request came for the session"
    await lab.bury()


async def test_a_journal_that_lost_its_end_is_opened_again() -> None:
    """A database crashed and lost unsynced records: the session has its lease, and nothing else wakes it."""
    lab = Lab()
    store = FailingStore(MemoryStore(lab.memory))
    host, world = lab.host(store)

    async def until_words() -> None:
        await _send_message(host)
        while not isinstance(decode(lab.memory.sessions["s"].records[-1].body), Delta):
            await world.sleep(0.001)

    await world.live_through(until_words())
    found = lab.memory.sessions["s"]
    lost = found.records.pop()
    await world.advance(120.0)

    assert found.records[lost.position - 1].epoch > lost.epoch, "no event id is given twice"
    assert check_ended(lab.evidence()) == []
    await lab.bury()
