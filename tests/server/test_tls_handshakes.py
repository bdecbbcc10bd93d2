"""TLS connections that are counted from their accept on."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from midstream.server.raw_connections import RawConnections, RawLimits
from midstream.server.tls_handshakes import after_handshake
from tests.certificates import certificate
from tests.spec import spec

WAIT_S = 60.0


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


@spec("SEC-83")
async def test_a_silent_peer_is_counted_and_a_connection_above_the_limit_is_closed(tmp_path: Path) -> None:
    pem = certificate(tmp_path / "server.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    raw = RawConnections(RawLimits(connections_max=1, reserved=1))
    listening = await asyncio.get_running_loop().create_server(
        after_handshake(_Echo, context, raw), "127.0.0.1", 0
    )
    port = listening.sockets[0].getsockname()[1]
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=ssl.create_default_context(cafile=pem)
        )
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        assert len(raw) == 0  # Its protocol counts it from the handshake on.
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await silent[-1][0].read() == b""
        assert len(raw) == 2
        for each in (writer, *(sent for _, sent in silent)):
            each.close()
        listening.close()
