"""Serve an app on a port, with an orderly shutdown within a time limit.

uvicorn alone would wait for open streams for ever, without informing the app. Here the shutdown has three steps:

1. The app drains. WebSockets get an `error` frame with code `draining`, event streams are reset, and both reconnect.
2. The app stops. A waiting client gets its answer, or a refusal with a retry time. Interrupted work is in the journal.
3. The remaining connections are closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from midstream.environment import World
from midstream.errors import PortTakenError, UsageError
from midstream.file_safety import read_secret_text
from midstream.number_checks import require_seconds
from midstream.protocol.frames import FRAME_BYTES_MAX
from midstream.server.auth.origins import LOOPBACK_NAMES, HostGuard
from midstream.server.raw_connections import RawConnections, RawLimits
from midstream.server.tls_handshakes import after_handshake
from midstream.server.uvicorn_logs import PeerNoise
from midstream.server.uvicorn_protocols import PlainHttp, protocols
from midstream.server.worker_link import WorkerLink

STOP_WITHIN_S = 10.0
"""Seconds from the signal to the end of the process. Supervisors kill after 10 (containers) to 90 (systemd)."""
GOODBYE_S = 2.0
"""Seconds for the last frames of all connections."""
CUT_S = 1
"""Whole seconds for requests in progress, before they are interrupted."""
CHECK_S = 0.01
"""Seconds between two checks for sent last frames or a second signal."""
CLOSING_S = 2.0
"""Seconds reserved for closing the store, and work that the host could not stop in its grace."""
WS_FRAME_BYTES_MAX = FRAME_BYTES_MAX + 64 * 1024
"""A WebSocket message just above `FRAME_BYTES_MAX` gets an `error` frame; one above this limit ends the connection."""
UNREAD_S = 30.0
"""Seconds without an acknowledgement of sent bytes after which the system closes a connection. Otherwise an unread
answer would stay in memory. Streams also have their own limit."""
PING_S = 20.0
"""Seconds between WebSocket pings, and for each answer; detects dead peers."""


class TlsFiles(Struct, frozen=True):
    """PEM files of a server's certificate and key."""

    certificate: Path
    key: Path


class Servable(Protocol):
    """An app that can drain: `App` around an agent, `Gateway` around a model."""

    @property
    def world(self) -> World:
        """Clock, random numbers and tasks."""

    @property
    def requires_authentication(self) -> bool:
        """Whether requests need a credential."""

    @property
    def open_streams(self) -> int:
        """Number of answers in progress."""

    async def start(self) -> None:
        """Start the app. Idempotent."""

    def drain(self) -> None:
        """End open streams, and refuse new ones."""

    async def stop(self, *, grace_s: float) -> None:
        """Wait at most `grace_s` seconds for running work, then close everything. Idempotent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""


async def serve(
    app: Servable,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    shares_port: bool = False,
    allowed_hosts: Collection[str] = (),
    trusted_proxies: Collection[str] = (),
    tls: TlsFiles | None = None,
    allows_plain_text: bool = False,
    stop_within_s: float = STOP_WITHIN_S,
    on_listening: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    raw_limits: RawLimits = RawLimits(),  # noqa: B008 - frozen
    link: WorkerLink | None = None,
    message_bytes_max: int = WS_FRAME_BYTES_MAX,
) -> None:
    """Serve until SIGINT or SIGTERM (or `stop`), then drain and return within `stop_within_s` seconds.

    A second signal cuts all open connections.

    Args:
        app: The app of `asgi` or `gateway`.
        host: Address to listen on; loopback by default.
        port: Port to listen on; 0 chooses a free one.
        shares_port: Whether other servers of this user may share the port; the system distributes connections.
        allowed_hosts: Host names that requests may have; those of this machine by default. Required if `host` is not
            loopback.
        trusted_proxies: Addresses of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are trusted; none by
            default.
        tls: Certificate for TLS; without it, plain text.
        allows_plain_text: Allow plain text although `host` is not loopback, for a proxy with TLS in front.
        stop_within_s: Time limit of the whole shutdown.
        on_listening: Called with the address, such as `http://127.0.0.1:8000`, once connections are accepted.
        stop: An event that ends the server like a signal.
        raw_limits: Limits of connections and of their bytes before authentication.
        link: Link of a worker to its supervisor, which owns the sockets and orders the end.
        message_bytes_max: Bytes of one WebSocket message; a longer one ends the connection.

    Raises:
        PortTakenError: Another program uses the port. Nothing was started.
        UsageError: The address does not exist, the files of `tls` cannot be used, or `stop_within_s` is not 0 to
            366 days. Or the address is open to the network, and authentication, `allowed_hosts`, or the choice of TLS
            or plain text is missing.
        StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
    """
    grace_s = _grace_of(stop_within_s)
    is_local = host in LOOPBACK_NAMES
    if not is_local and not app.requires_authentication:
        raise UsageError(
            f"listening on {host!r} opens the server to the network, and this app has no authentication"
        )
    if not is_local and not allowed_hosts:
        raise UsageError(
            f"listening on {host!r} opens the server to the network; list the host names that clients use (`*` for any)"
        )
    if not is_local and tls is None and not allows_plain_text:
        raise UsageError(
            f"listening on {host!r} opens the server to the network in plain text; give a certificate (--tls-cert, "
            "--tls-key), or --allow-plain-text if a proxy in front has TLS"
        )
    if tls is not None:
        require_tls_files(tls)
    names = {*allowed_hosts, *LOOPBACK_NAMES} if is_local else {*allowed_hosts}
    listener = listen(host, port, shares_port=shares_port) if link is None else link.listener
    server = _Server(
        app,
        names,
        listener,
        trusted_proxies,
        tls,
        on_listening,
        stop if link is None else link.stop,
        grace_s,
        link,
        RawConnections(raw_limits, trusted=trusted_proxies),
        message_bytes_max,
    )
    noise = PeerNoise(app.world)
    logging.getLogger("uvicorn.error").addFilter(noise)
    try:
        await app.start()
        await server.serve(sockets=[listener])
    finally:
        logging.getLogger("uvicorn.error").removeFilter(noise)
        listener.close()
        if link is not None:
            await link.close()
        await app.stop(grace_s=grace_s)  # if serving ended early


def _grace_of(stop_within_s: float) -> float:
    """Return the seconds that work has to end in a shutdown of `stop_within_s` seconds."""
    require_seconds("stop_within_s", stop_within_s)
    return max(0.0, stop_within_s - GOODBYE_S - CUT_S - CLOSING_S)


def require_tls_files(tls: TlsFiles) -> None:
    """Require that TLS works with these files.

    Raises:
        UsageError: A file cannot be read, the key does not match, or other users may read the key.
    """
    try:
        read_secret_text(tls.key, "the key of the certificate", is_named=True)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        reason = (
            error.strerror if isinstance(error, FileNotFoundError) else ""
        ) or "no certificate with its key"
        raise UsageError(f"TLS cannot be used with {tls.certificate} and {tls.key}: {reason}") from error


def listen(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """Return a listening socket.

    Raises:
        PortTakenError: Another program uses the port, and at least one of the two does not share it.
        UsageError: The address does not exist, the port needs more rights, or the system cannot share ports.
    """
    if shares_port and not hasattr(socket, "SO_REUSEPORT"):
        raise UsageError("this system cannot share ports; use a proxy in front of several servers")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only with the protocol given; otherwise a second small write is delayed by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by each connection
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * UNREAD_S))
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            message = f"another program listens on {host}:{port}: stop it, or choose another port"
            raise PortTakenError(f"{message} (0 takes a free one)") from error
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}") from error
    listener.setblocking(False)  # noqa: FBT003 - the standard library's interface
    return listener


class _Server(uvicorn.Server):
    """uvicorn with an orderly shutdown."""

    def __init__(
        self,
        app: Servable,
        names: Collection[str],
        listener: socket.socket,
        trusted_proxies: Collection[str],
        tls: TlsFiles | None,
        on_listening: Callable[[str], None] | None,
        stop: asyncio.Event | None,
        grace_s: float,
        link: WorkerLink | None,
        raw: RawConnections,
        message_bytes_max: int,
    ) -> None:
        http, websockets = protocols(raw)
        config = uvicorn.Config(
            HostGuard(app, names),
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # By default uvicorn trusts these headers in every request from this machine.
            proxy_headers=bool(trusted_proxies),
            forwarded_allow_ips=[*trusted_proxies],
            http=http,
            ws=websockets,
            ws_max_size=message_bytes_max,
            # Compression of small messages costs half of the client's time, and much memory.
            ws_per_message_deflate=False,
            ws_ping_interval=PING_S,
            ws_ping_timeout=PING_S,
            timeout_graceful_shutdown=CUT_S,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        super().__init__(config)
        self._app = app
        self._raw = raw
        self._listener = listener
        self._on_listening = on_listening
        self._stop = stop
        self._grace_s = grace_s
        self._link = link
        self._adopted: dict[int, asyncio.Server] = {}
        """Servers on the sockets of workers that are missing, by the indices of the sockets."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections, and report it."""
        if self.config.ssl is not None:  # uvicorn itself would count a peer only after its handshake
            context, self.config.ssl = self.config.ssl, None
            self.config.http_protocol_class = after_handshake(
                self.config.http_protocol_class, context, self._raw
            )
        await super().startup(sockets=sockets)
        if self._on_listening is not None:
            address, port = self._listener.getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            place = f"[{address}]" if ":" in address else address
            self._on_listening(f"{scheme}://{place}:{port}")
        if self._link is not None:
            await self._link.follow(self.accept_from, self._cut)

    def _cut(self) -> None:
        self.force_exit = True

    async def accept_from(self, sockets: dict[int, socket.socket]) -> None:
        """Accept from these sockets of missing workers, and from this worker's own socket."""
        for index in [*self._adopted.keys() - sockets.keys()]:
            self._adopted.pop(index).close()
        for index, each in sockets.items():
            if index in self._adopted or self.should_exit:
                each.close()
                continue
            self._adopted[index] = await asyncio.get_running_loop().create_server(
                self._make_protocol, sock=each, ssl=self.config.ssl, backlog=self.config.backlog
            )

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn makes it
            config=self.config, server_state=self.server_state, app_state={}
        )

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; uvicorn calls this ten times a second."""
        return await super().on_tick(counter) or (self._stop is not None and self._stop.is_set())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's shape
        """Begin the shutdown; unlike uvicorn, do not raise the signal again at the end."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain all connections, stop the app, and let uvicorn close the rest."""
        for server in [*self.servers, *self._adopted.values()]:
            server.close()
        if self._link is not None:
            self._link.close_sockets()
        self._app.drain()
        for connection in [*self.server_state.connections]:
            if isinstance(connection, PlainHttp):  # no request may follow on this connection
                connection.shutdown()
        try:
            async with asyncio.timeout(GOODBYE_S):
                while self._app.open_streams and not self.force_exit:
                    await self._app.world.sleep(CHECK_S)
        except TimeoutError:
            pass
        stopping = self._app.world.spawn(self._app.stop(grace_s=self._grace_s), name="stop the app")
        while not (stopping.done() or self.force_exit):
            await asyncio.wait({stopping}, timeout=CHECK_S)
        await super().shutdown(sockets=sockets)
        if not self.force_exit and (cut := [*self.server_state.tasks]):
            await asyncio.wait(cut, timeout=CUT_S)  # requests without an answer get an error
        await stopping
