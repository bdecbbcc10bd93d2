from __future__ import annotations

import pytest

from midstream.errors import StoreFullError
from midstream.store.memory import MemoryStore
from midstream.testing.history_checker import check, check_ended
from midstream.testing.store_fakes import FailingStore
from tests.engine.test_faults import Lab, _say


@pytest.mark.parametrize("appends", [3, 8, 14])
async def test_after_a_long_outage_the_turn_goes_on_by_itself(appends: int) -> None:
    """The outage is longer than any retry: the session ends as by a crash, and is reopened when the store is back."""
    lab = Lab()
    store = FailingStore(MemoryStore(lab.memory))
    host, world = lab.host(store)

    async def until_outage() -> None:
        await _say(host)
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
