"""What HTTP itself promises; what a model makes of it is tested with each model built on it."""

from __future__ import annotations

import httpx2
import pytest

from midstream.errors import ModelForgotError, ModelUnavailableError, UsageError
from midstream.integrations import provider_http
from midstream.integrations.provider_http import Provider
from midstream.world import World
from tests.integrations.chat_server import chat_server, delta, refusal, stream


def test_the_limits_are_the_agreed_ones() -> None:
    assert httpx2.Timeout(connect=10.0, read=60.0, write=30.0, pool=5.0) == provider_http._TIMEOUT


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://example.org", "http://", "http://host:port", ""])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(UsageError):
        Provider(url, "m", world=World())


async def test_what_is_gone_is_forgotten_and_other_refusals_are_not() -> None:
    async with chat_server(refusal(404), refusal(503), stream(delta(content="a"))) as server:
        provider = Provider(server.url, "m", world=World())
        path = "/chat/completions"
        with pytest.raises(ModelForgotError):
            [each async for each in provider.events("POST", path, b"{}", gone=(404,))]
        with pytest.raises(ModelUnavailableError):
            [each async for each in provider.events("POST", path, b"{}", gone=(404,))]
        received = [each async for each in provider.events("POST", path, b"{}", gone=(404,))]
        assert sum(len(each) for each in received) == 2
        await provider.aclose()
