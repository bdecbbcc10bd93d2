"""Pages of an allowed origin may read responses, errors included; pages of other origins may not."""

from __future__ import annotations

from collections.abc import Mapping

import httpx2
import pytest

from midstream.server.api.route_table import OPERATIONS
from midstream.server.auth.origins import DELIBERATE
from midstream.server.limits import Limits
from midstream.testing.scripted_model import text
from tests.server.known_people import ADA, guarded_app, status_and_code
from tests.server.serving import KEYS, Json, asgi_client, command, make_app

PAGE = {"origin": "https://app.example"}
ALLOWED = [PAGE["origin"], "http://localhost:5173"]
CORS = "access-control-"


def _cors(answer: httpx2.Response) -> Json:
    return {
        name.removeprefix(CORS): value
        for name, value in answer.headers.items()
        if name.startswith(CORS) or name == "vary"
    }


READABLE = {
    "allow-origin": PAGE["origin"],
    "expose-headers": "allow, etag, location, mcp-session-id, producer-epoch, producer-expected-seq, "
    "producer-received-seq, producer-seq, retry-after, stream-closed, stream-cursor, stream-expires-at, "
    "stream-next-offset, "
    "stream-sse-data-encoding, stream-ttl, stream-up-to-date, www-authenticate, x-midstream-replayed, "
    "x-workflow-run-id, x-workflow-stream-tail-index",
    "vary": "Origin",
}


@pytest.mark.parametrize("origin", ALLOWED)
async def test_a_preflight_allows_the_headers_that_the_protocol_needs(origin: str) -> None:
    async with asgi_client(make_app(allowed_origins=ALLOWED)) as client:
        asked = await client.options(
            "/v1/sessions/s1/commands",
            headers={
                "origin": origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "x-idempotency-key,content-type",
            },
        )
    allowed = _cors(asked)
    assert (asked.status_code, asked.content) == (204, b"")
    assert allowed["allow-origin"] == origin
    assert "allow-credentials" not in allowed
    methods = {operation.method for operation in OPERATIONS}
    assert methods - {"HEAD", "OPTIONS"} <= {*allowed["allow-methods"].split(", ")}
    sendable = {name.strip() for name in allowed["allow-headers"].split(",")}
    assert {"a2a-version", "authorization", "content-type", "last-event-id", *KEYS} <= sendable
    assert {name.decode() for name in DELIBERATE} - {"x-api-key"} <= sendable
    assert allowed["vary"] == "Origin"


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        ("GET", "/v1/sessions", ADA, 200),
        ("GET", "/v1/sessions", {}, 401),
        ("GET", "/v1/sessions/missing", ADA, 404),
        ("PATCH", "/v1/sessions", {**ADA, "x-midstream": "1"}, 405),
        ("POST", "/v1/sessions/s1/commands", {**ADA, "content-type": "text/plain"}, 400),
        ("GET", "/v1/sessions", {**ADA, "x-long": "x" * 5000}, 431),
        ("GET", "/no/such/address", ADA, 404),
        ("OPTIONS", "/v1/sessions", ADA, 405),
    ],
)
async def test_an_allowed_page_may_read_responses_and_errors(
    method: str, path: str, more: Mapping[str, str], status: int
) -> None:
    app = guarded_app(allowed_origins=ALLOWED, limits=Limits(header_bytes_max=4000))
    async with asgi_client(app) as client:
        answer = await client.request(method, path, headers={**PAGE, **more})
    assert (answer.status_code, _cors(answer)) == (status, READABLE)


async def test_an_allowed_page_may_read_a_stream_of_events() -> None:
    async with asgi_client(make_app([text("hi")], allowed_origins=ALLOWED)) as client:
        response = await client.post("/v1/sessions/s1/commands", json=command(), headers={**KEYS, **PAGE})
        assert (response.status_code, _cors(response)) == (200, READABLE)
        followed = await client.get("/v1/sessions/s1/events", headers={**KEYS, **PAGE})
    assert (followed.status_code, _cors(followed)) == (200, READABLE)


async def test_a_preflight_of_another_origin_reveals_nothing() -> None:
    async with asgi_client(make_app(allowed_origins=ALLOWED)) as client:
        for method in ("OPTIONS", "GET"):
            answer = await client.request(
                method,
                "/v1/sessions",
                headers={"origin": "https://evil.example", "access-control-request-method": "DELETE"},
            )
            assert status_and_code(answer) == (403, "foreign_origin")
            assert answer.headers["content-type"] == "application/problem+json"
            assert _cors(answer) == {"vary": "Origin"}


async def test_without_allowed_origins_no_response_has_cors_headers() -> None:
    async with asgi_client(make_app()) as client:
        own = await client.get("/v1/sessions", headers={"origin": "http://testserver"})
        first = await client.options(
            "/v1/sessions",
            headers={"origin": "http://testserver", "access-control-request-method": "DELETE"},
        )
    assert (own.status_code, _cors(own)) == (200, {})
    assert (status_and_code(first), _cors(first)) == ((405, "method_not_allowed"), {})
