"""What HTTP itself promises; what a model makes of it is tested with each model built on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx2
import pytest

from midstream.core.sse import ServerSentEvent
from midstream.core.timing import StallBudgets
from midstream.errors import ModelForgotError, ModelStalledError, ModelUnavailableError, UsageError
from midstream.integrations.http_limits import HttpLimits
from midstream.integrations.plain_http import is_plain
from midstream.integrations.provider_http import Provider
from midstream.world import World
from tests.integrations.chat_server import (
    WAIT_S,
    Answer,
    chat_server,
    delta,
    refusal,
    silence,
    stream,
)


@pytest.fixture(params=["plain", "httpx"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The HTTP client that is used: with any proxy in the environment it is httpx2's."""
    if request.param == "httpx":
        monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert is_plain(httpx2.URL("http://127.0.0.1")) is (request.param == "plain")
    return str(request.param)


HEAD_ONLY = stream(ending="hang")
ONE_PIECE = stream(delta(content="a"), ending="hang")
LONG = 60.0


@pytest.mark.parametrize(
    ("answer", "limits", "stalls", "limit_s"),
    [
        (silence(), HttpLimits(first_byte_s=0.05, between_bytes_s=LONG, connect_s=0.05), None, 0.1),
        (HEAD_ONLY, HttpLimits(first_byte_s=0.05, between_bytes_s=LONG), None, 0.05),
        (ONE_PIECE, HttpLimits(first_byte_s=LONG, between_bytes_s=0.05), None, 0.05),
        (ONE_PIECE, HttpLimits(first_byte_s=0.05, between_bytes_s=0.05), None, 0.05),
        (HEAD_ONLY, None, StallBudgets(first_token_max_s=0.05), 0.05),
        (
            ONE_PIECE,
            None,
            StallBudgets(first_token_max_s=LONG, between_tokens_max_s=0.04, upstream_tool_max_s=0.05),
            0.05,
        ),
    ],
    ids=["nothing", "head", "piece", "equal", "budget", "budget between"],
)
async def test_silence_is_cut_by_the_limit_that_holds(
    answer: Answer, limits: HttpLimits | None, stalls: StallBudgets | None, limit_s: float, client: str
) -> None:
    del client
    async with chat_server(answer) as server:
        provider = Provider(server.url, "m", limits=limits, world=World())
        with pytest.raises(ModelStalledError, match=f"sent nothing for {limit_s:g} s"):
            [each async for each in provider.events("POST", "/chat/completions", b"{}", stalls=stalls)]
        async with asyncio.timeout(WAIT_S):
            await server.left.wait()
        await provider.aclose()


async def test_a_first_byte_may_take_longer_than_what_follows(client: str) -> None:
    """The gate opens only after the limit between bytes has passed, which says nothing about the first one."""
    del client
    gate = asyncio.Event()
    answer = Answer(stream(delta(content="a")).pieces[:1], gate=gate)
    async with chat_server(answer) as server:
        limits = HttpLimits(first_byte_s=LONG, between_bytes_s=0.05)
        provider = Provider(server.url, "m", limits=limits, world=World())
        reading = asyncio.create_task(_all(provider))
        asyncio.get_running_loop().call_later(0.1, gate.set)
        assert sum(map(len, await asyncio.wait_for(reading, WAIT_S))) == 1
        await provider.aclose()


async def _all(provider: Provider) -> list[Sequence[ServerSentEvent]]:
    return [each async for each in provider.events("POST", "/chat/completions", b"{}")]


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
