"""The key of a gateway: long enough, and protected from guessing."""

from __future__ import annotations

import pytest

from midstream.dialects.gateway_bodies import RefusedError
from midstream.errors import UsageError
from midstream.server.client_keys import ClientKey
from midstream.server.limits import CALLERS_MAX
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec

KEY = "the-key-of-the-test"


def _status(key: ClientKey, shown: str, address: str = "127.0.0.1") -> tuple[int, float | None]:
    try:
        key.check({"x-api-key": shown}, {"type": "http", "client": (address, 1)})
    except RefusedError as error:
        return error.refusal.status, error.refusal.retry_after_s
    return 200, None


@spec("SEC-15")
async def test_wrong_keys_are_limited_for_each_address_and_the_right_one_passes() -> None:
    world = FakeWorld()
    key = ClientKey(KEY, world)
    assert [_status(key, "wrong")[0] for _ in range(21)] == [*20 * [401], 429]
    status, retry_after_s = _status(key, "wrong")
    assert status == 429
    assert retry_after_s == pytest.approx(3.0)
    assert _status(key, KEY)[0] == 200
    assert _status(key, "wrong", "192.0.2.7")[0] == 401
    await world.advance(60)
    assert _status(key, "wrong")[0] == 401


@spec("SEC-15")
def test_the_number_of_counted_addresses_is_bounded() -> None:
    key = ClientKey(KEY, FakeWorld())
    for number in range(CALLERS_MAX + 10):
        _status(key, "wrong", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(key.refusals._levels) == CALLERS_MAX


@spec("SEC-14")
def test_a_guessable_key_is_refused() -> None:
    with pytest.raises(UsageError, match="16 characters"):
        ClientKey("x" * 15, FakeWorld())
