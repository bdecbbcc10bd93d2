"""Connections and their held bytes, counted before a request is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from midstream.errors import UsageError
from midstream.server.raw_connections import PROCESS_DESCRIPTORS, RawConnections, RawLimits
from tests.server.known_people import guarded_app
from tests.server.serving import Served, make_app, served
from tests.spec import spec

WAIT_S = 60.0


@spec("SEC-83")
def test_local_peers_can_connect_when_remote_ones_have_taken_all() -> None:
    raw = RawConnections(RawLimits(connections_max=3, reserved=2), descriptors=None)
    assert [raw.enter(number, f"10.0.0.{number}") for number in range(5)] == [True, True, True, False, False]
    assert [raw.enter(f"here {number}", "127.0.0.1") for number in range(3)] == [True, True, False]
    assert [raw.enter(9, "10.0.0.9"), len(raw)] == [False, 5]
    raw.leave(0)
    raw.leave("here 0")
    raw.leave("here 1")
    raw.leave("here 1")
    assert [raw.enter(9, "10.0.0.9"), raw.enter(10, "10.0.0.10"), len(raw)] == [True, False, 3]


@spec("SEC-83")
def test_one_address_gets_its_share_and_a_customers_network_counts_as_one() -> None:
    raw = RawConnections(RawLimits(per_address_max=2))
    assert [raw.enter(number, f"2001:db8::{number}") for number in range(3)] == [True, True, False]
    assert raw.enter(9, "2001:db8:1::1")
    assert all(raw.enter(f"here {number}", "::1") for number in range(5))


@spec("SEC-83")
@pytest.mark.parametrize("trusted", ["10.0.0.1", "10.0.0.0/8", "*"])
def test_a_trusted_proxy_may_use_the_connections_of_all_its_clients(trusted: str) -> None:
    raw = RawConnections(RawLimits(per_address_max=1, connections_max=4), trusted=("a-name", trusted))
    assert [raw.enter(number, "10.0.0.1") for number in range(3)] == [True, True, True]
    raw.hold(0, 2 * 1024 * 1024)
    assert raw.hold(1, 2 * 1024 * 1024)
    assert [raw.enter(3, "192.0.2.1"), raw.enter(4, "192.0.2.1")] == [True, False]


@spec("SEC-83")
def test_connections_are_limited_by_the_file_descriptors_of_the_process() -> None:
    raw = RawConnections(RawLimits(reserved=1), descriptors=PROCESS_DESCRIPTORS + 3)
    assert [raw.enter(number, "10.0.0.1") for number in range(3)] == [True, True, False]
    assert raw.enter("here", "127.0.0.1")
    assert RawConnections(RawLimits(), descriptors=10).enter(1, "10.0.0.1")


@spec("SEC-83")
def test_held_bytes_are_bounded_for_an_address_and_in_total() -> None:
    limits = RawLimits(held_bytes_max=100, held_bytes_per_address_max=60)
    raw = RawConnections(limits)
    for number in range(4):
        raw.enter(number, "127.0.0.1" if number == 3 else "10.0.0.1")
    assert [raw.hold(0, 40), raw.hold(1, 20), raw.hold(1, 21)] == [True, True, False]
    raw.leave(1)
    assert [raw.hold(2, 20), raw.hold(3, 40), raw.hold(3, 41)] == [True, True, False]
    assert [raw.hold(0, 0), raw.hold(3, 80), raw.hold("unknown", 10**9)] == [True, True, True]


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(UsageError):
        RawLimits(reserved=0)


@contextlib.asynccontextmanager
async def connections(server: Served, count: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Open connections one after the other that send the beginning of a request."""
    host, port = server.url.removeprefix("http://").split(":")
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(b"GET / HTTP/1.1\r\nx-slow: ")
            readers.append(reader)
        yield readers


@spec("SEC-83")
async def test_a_server_refuses_connections_above_the_limit_and_accepts_again_when_one_ends() -> None:
    async with served(make_app(), raw_limits=RawLimits(connections_max=3, reserved=2)) as server:
        async with connections(server, 6) as readers:
            answer = await asyncio.wait_for(readers[-1].read(), WAIT_S)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert json.loads(body)["status"] == 503
        async with asyncio.timeout(WAIT_S):
            while (await server.http.get("/health")).status_code != 200:
                pass


@spec("SEC-83")
async def test_a_websocket_is_counted_until_it_ends() -> None:
    async with served(make_app(), raw_limits=RawLimits(connections_max=1, reserved=1)) as server:
        async with server.socket() as _, connections(server, 2) as readers:
            assert (await asyncio.wait_for(readers[-1].read(), WAIT_S)).startswith(b"HTTP/1.1 503 ")
        async with asyncio.timeout(WAIT_S):
            while (await server.http.get("/health")).status_code != 200:
                pass


@spec("SEC-82")
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_login_body_is_limited_to_four_kilobytes(*, is_chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"login": "'
        for _ in range(64):
            yield b"x" * 128

    async with served(guarded_app()) as server:
        body = pieces() if is_chunked else b'{"login": "' + b"x" * 8192 + b'"}'
        headers = {"content-type": "application/json", "x-midstream": "test"}
        answer = await server.http.post("/v1/login", content=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (413, "frame_too_large")
        answer = await server.http.post("/v1/login", json={"login": "x" * 1000}, headers=headers)
        assert answer.status_code == 401
