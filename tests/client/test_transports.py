"""The address of a server, and the meaning of each refusal."""

from __future__ import annotations

import msgspec
import pytest

from midstream.client.transports import (
    base_url,
    refusal_of,
    session_path,
    websocket_url,
)
from midstream.errors import (
    AccessError,
    ConnectionLostError,
    DrainingError,
    InternalError,
    MidstreamError,
    NotFoundError,
    ProtocolError,
    UnauthorizedError,
    UsageError,
)
from tests.spec import spec


@pytest.mark.parametrize(
    ("server", "base", "socket"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "ws://127.0.0.1:8000"),
        ("https://host/agents/", "https://host/agents", "wss://host/agents"),
        ("ws://[::1]:1", "http://[::1]:1", "ws://[::1]:1"),
        ("wss://host", "https://host", "wss://host"),
    ],
)
def test_a_server_has_one_address_for_every_transport(server: str, base: str, socket: str) -> None:
    assert base_url(server) == base
    assert websocket_url(base) == socket


def test_a_session_path_is_quoted() -> None:
    assert session_path("a/b c") == "/v1/sessions/a%2Fb%20c"


@pytest.mark.parametrize(
    "server",
    ["", "localhost:8000", "ftp://host", "http://", "http://host:99999", "http://host:x", "http://[::1"],
)
def test_an_invalid_url_is_refused(server: str) -> None:
    with pytest.raises(UsageError):
        base_url(server)


def _problem(code: str, retry: str, after_s: float | None = None) -> bytes:
    return msgspec.json.encode(
        {
            "type": f"urn:midstream:error:{code}",
            "code": code,
            "detail": "text",
            "retry": retry,
            "retry_after_s": after_s,
        }
    )


FOREIGN = b'{"type":"about:blank","code":"UNAVAILABLE","detail":"no healthy upstream"}'


@spec("STREAM-107", "STREAM-28")
@pytest.mark.parametrize(
    ("status", "body", "sent_s", "kind", "after_s"),
    [
        (503, _problem("draining", "later", 2.5), 9.0, DrainingError, 2.5),
        (403, _problem("access", "never"), None, AccessError, None),
        (401, b"<html>", None, UnauthorizedError, None),
        (404, b"", None, NotFoundError, None),
        (429, b"slow down", 7.0, ConnectionLostError, 7.0),
        (408, b"", None, ConnectionLostError, None),
        (425, b"", None, ConnectionLostError, None),
        (502, b"", None, ConnectionLostError, None),
        (521, b"web server is down", 7.0, ConnectionLostError, 7.0),
        (530, b"", None, ConnectionLostError, None),
        (501, b"no upgrade", None, ProtocolError, None),
        (505, b"", None, ProtocolError, None),
        (503, FOREIGN, 7.0, ConnectionLostError, 7.0),
        (404, FOREIGN, None, NotFoundError, None),
        (403, b'{"code":"draining","detail":"somebody else"}', None, AccessError, None),
        (500, _problem("internal", "never", None), None, InternalError, None),
        (400, _problem("of_tomorrow", "never"), None, ProtocolError, None),
        (409, b"", None, ProtocolError, None),
        (400, b"", None, ProtocolError, None),
    ],
)
def test_an_http_refusal_is_a_typed_error(
    status: int, body: bytes, sent_s: float | None, kind: type[MidstreamError], after_s: float | None
) -> None:
    error = refusal_of(status, body, sent_s)
    assert (type(error), error.retry_after_s) == (kind, after_s)
