"""Intermediaries are detected by the arrival times of a probe's chunks, also through real proxies."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from midstream.client.network_probe import (
    PACE,
    POST,
    Arrivals,
    NetworkProbe,
    NetworkReport,
    Pace,
    Probed,
    ProbeOutcome,
    judge,
)
from midstream.client.transport_selection import TransportKind
from midstream.errors import ConnectionLostError, NotFoundError, UsageError
from tests.certificates import certificate
from tests.client.peer import WebSocketPeer
from tests.client.proxies import OfficeProxy, Upgrades
from tests.server.serving import make_app, served
from tests.spec import spec

WAIT_S = 60.0
SHORT = Pace(every_ms=300, late_s=1.1)
"""Chunks take 1.2 s: buffering is distinguishable from a busy machine, and ten probes take less than a minute."""


def arrivals(*times: float, refusal: str = "") -> Arrivals:
    arrivals = Arrivals()
    for number, at in enumerate(times):
        arrivals.take(b'{"probe":%d}' % number, at)
    arrivals.refusal = refusal
    return arrivals


@spec("STREAM-45")
@pytest.mark.parametrize(
    ("arrivals", "finding"),
    [
        (arrivals(0.1, 0.7, 1.3, 1.9, 2.5), ProbeOutcome.WORKS),
        (arrivals(2.0, 2.6, 3.2, 3.8, 4.4), ProbeOutcome.WORKS),
        (arrivals(2.01, 2.6, 3.2, 3.8, 4.4), ProbeOutcome.BUFFERED),
        (arrivals(2.4, 2.4, 2.4, 2.4, 2.4), ProbeOutcome.BUFFERED),
        (arrivals(2.4), ProbeOutcome.BUFFERED),
        (arrivals(0.1, 0.1, 0.1, 0.1, 0.1), ProbeOutcome.AT_ONCE),
        (arrivals(0.1, 0.7, 1.3, 1.9), ProbeOutcome.INCOMPLETE),
        (arrivals(0.1, 0.7), ProbeOutcome.INCOMPLETE),
        (arrivals(0.1), ProbeOutcome.AT_ONCE),
        (arrivals(0.1, 0.7, refusal="the connection was lost"), ProbeOutcome.INCOMPLETE),
        (arrivals(), ProbeOutcome.NOTHING),
        (arrivals(refusal="403"), ProbeOutcome.REFUSED),
    ],
)
def test_the_arrival_times_of_chunks_show_the_intermediary(arrivals: Arrivals, finding: ProbeOutcome) -> None:
    assert judge("sse", arrivals, PACE).finding is finding


def test_chunks_out_of_order_are_not_a_stream_and_a_login_page_is_not_a_chunk() -> None:
    mixed = Arrivals()
    for number in (0, 2, 1, 3, 4):
        mixed.take(b'{"probe":%d}' % number, 0.5 * number)
    assert judge("sse", mixed, PACE).finding is ProbeOutcome.INCOMPLETE
    page = Arrivals()
    page.take(b"<html>log in", 0.1)
    assert judge("poll", page, PACE).finding is ProbeOutcome.REFUSED


def test_a_probe_takes_three_seconds_and_detects_a_delay_of_two() -> None:
    assert PACE.late_s < PACE.lasts_s < 3.0


async def _report(url: str) -> NetworkReport:
    return await asyncio.wait_for(NetworkProbe(url, pace=SHORT).run(), WAIT_S)


def _findings(report: NetworkReport) -> list[ProbeOutcome]:
    return [each.finding for each in report.probed]


@spec("STREAM-45")
async def test_a_direct_connection_is_undisturbed() -> None:
    async with served(make_app()) as server:
        report = await _report(server.url)
    assert (_findings(report), report.transport, report.is_clear) == (
        [ProbeOutcome.WORKS] * 4,
        TransportKind.WEBSOCKET,
        True,
    )
    assert [each.chunks for each in report.probed] == [5, 5, 5, 1]


@spec("STREAM-45")
@pytest.mark.parametrize(
    ("upgrades", "is_buffering", "most", "findings", "transport"),
    [
        (Upgrades.REFUSED, False, None, ["refused", "works", "works", "works"], TransportKind.SSE),
        (Upgrades.DROPPED, True, None, ["refused", "buffered", "works", "works"], TransportKind.POLL),
        (Upgrades.REFUSED, False, 100, ["refused", "incomplete", "works", "nothing"], None),
    ],
)
async def test_a_proxy_is_identified_by_its_behaviour(
    upgrades: Upgrades,
    *,
    is_buffering: bool,
    most: int | None,
    findings: list[str],
    transport: TransportKind | None,
) -> None:
    async with served(make_app()) as server:
        proxy = OfficeProxy(server.url, upgrades=upgrades, is_buffering=is_buffering, body_bytes_max=most)
        async with proxy.listening():
            report = await _report(proxy.url)
    assert ([str(each) for each in _findings(report)], report.transport) == (findings, transport)
    assert not report.is_clear
    assert all(each.detail for each in report.probed if each.finding is not ProbeOutcome.WORKS)


async def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(ConnectionLostError):
        await _report("http://127.0.0.1:1")
    with pytest.raises(UsageError):
        NetworkProbe("localhost:8000")


@pytest.mark.parametrize(
    ("is_certified", "expected"), [(True, "is not trusted"), (False, "does not use TLS")]
)
async def test_a_non_http_answer_is_not_silence(tmp_path: Path, *, is_certified: bool, expected: str) -> None:
    """An untrusted certificate, or no TLS at all."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if is_certified else None
    if tls is not None:
        tls.load_cert_chain(certificate(tmp_path / "server.pem"))

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ConnectionLostError, match=expected):
            await _report(url)


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_without_its_server_is_a_lost_connection(status: int) -> None:
    async with WebSocketPeer(status).serving() as peer:
        with pytest.raises(ConnectionLostError, match=str(status)):
            await _report(peer.url)


def test_disturbed_better_transports_are_named_and_useless_ones_are_not() -> None:
    found = {
        TransportKind.WEBSOCKET: ProbeOutcome.INCOMPLETE,
        TransportKind.SSE: ProbeOutcome.REFUSED,
        TransportKind.POLL: ProbeOutcome.WORKS,
        POST: ProbeOutcome.WORKS,
    }
    probed = tuple(Probed(what, finding) for what, finding in found.items())
    assert NetworkReport("http://s", probed, TransportKind.POLL).lures == (TransportKind.WEBSOCKET,)
    assert NetworkReport("http://s", probed, TransportKind.WEBSOCKET).lures == ()
    assert NetworkReport("http://s", probed, None).lures == ()


async def test_a_foreign_server_is_reported_as_such() -> None:
    async with WebSocketPeer(404).serving() as peer:
        with pytest.raises(NotFoundError):
            await _report(peer.url)
