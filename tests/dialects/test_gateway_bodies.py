"""Bodies over HTTP, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from midstream.dialects import gateway_bodies
from midstream.dialects.gateway_bodies import GoneError, RefusedError, body_of, check_token, headers_of

JSON = {"content-type": "application/json"}


def receive_of(*messages: dict[str, Any]) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Return the `receive` of a client that sends these messages, and then nothing."""
    waiting = list(messages)

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    return receive


def pieces(*parts: bytes) -> Sequence[dict[str, Any]]:
    return [{"type": "http.request", "body": part, "more_body": True} for part in parts]


async def refused(headers: dict[str, str], *messages: dict[str, Any]) -> int:
    with pytest.raises(RefusedError) as met:
        await body_of(headers, receive_of(*messages))
    return met.value.refusal.status


async def test_a_body_arrives_in_pieces() -> None:
    last = {"type": "http.request", "body": b"c"}
    assert await body_of(JSON, receive_of(*pieces(b"a", b"b"), last)) == b"abc"


async def test_no_response_is_sent_to_a_disconnected_client() -> None:
    with pytest.raises(GoneError):
        await body_of(JSON, receive_of(*pieces(b"a"), {"type": "http.disconnect"}))


async def test_a_body_has_a_limit_whatever_it_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_bodies, "BODY_BYTES_MAX", 3)
    assert await refused({**JSON, "content-length": "4"}) == 413
    assert await refused(JSON, *pieces(b"ab", b"cd")) == 413


async def test_the_wait_for_a_body_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_bodies, "BODY_S", 0.0)
    assert await refused(JSON, *pieces(b"a")) == 408


@pytest.mark.parametrize(
    "headers", [{"content-type": "text/plain"}, {**JSON, "content-encoding": "gzip"}, {"content-type": ""}]
)
async def test_a_body_that_is_not_plain_json_is_refused(headers: dict[str, str]) -> None:
    assert await refused(headers) == 415


def test_the_key_is_accepted_in_both_headers() -> None:
    for headers in ({"authorization": "Bearer k"}, {"authorization": "bearer  k "}, {"x-api-key": "k"}):
        check_token(headers, "k")
    for wrong in ({}, {"authorization": "Basic k"}, {"x-api-key": "kk"}, {"x-api-key": "\udcff"}):
        with pytest.raises(RefusedError):
            check_token(wrong, "k")


def test_the_first_of_two_headers_counts() -> None:
    assert headers_of({"headers": [(b"X-A", b"1"), (b"x-a", b"2")]}) == {"x-a": "1"}
