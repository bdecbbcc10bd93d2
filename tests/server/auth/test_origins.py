"""Foreign pages and foreign host names are refused on every route."""

from __future__ import annotations

import httpx2
import pytest
import websockets
from hypothesis import example, given
from hypothesis import strategies as st

from midstream.errors import ForeignOriginError, UsageError
from midstream.server.auth.origins import HostGuard, check_origin, origins_of, page_of, remote_address
from midstream.testing.scripted_model import text
from tests.server.serving import KEYS, Socket, asgi_client, command, make_app, opening, served

FOREIGN = [
    "http://evil.example",
    "null",
    "http://testserver.evil.example",
    "http://evil.example/testserver",
    "http://[",
]
REQUESTS = [
    ("POST", "/v1/sessions/s1/commands"),
    ("POST", "/v1/sessions/s1/cancel"),
    ("DELETE", "/v1/sessions/s1"),
    ("GET", "/v1/sessions/s1"),
    ("GET", "/v1/sessions/s1/events"),
    ("GET", "/v1/sessions"),
    ("GET", "/"),
]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_a_page_of_another_site_is_refused_on_every_route(method: str, path: str, origin: str) -> None:
    async with asgi_client(make_app()) as client:
        answer = await client.request(method, path, headers={"origin": origin}, json=command())
        assert (answer.status_code, answer.json()["code"]) == (403, "foreign_origin")
        assert "access-control-allow-origin" not in answer.headers
        assert (await client.get("/v1/sessions")).json()["sessions"] == []


@pytest.mark.parametrize("origin", ["http://testserver", "https://testserver", "http://TESTSERVER"])
async def test_our_own_page_may_send_requests(origin: str) -> None:
    async with asgi_client(make_app()) as client:
        answer = await client.post(
            "/v1/sessions/s1/commands", json=command(), headers={**KEYS, "origin": origin}
        )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "*",
        "null",
        "",
        "app.example",
        "https://app.example/",
        "https://*.example",
        "https://a@b",
        "https://a b",
    ],
)
def test_an_invalid_origin_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(UsageError):
        make_app(allowed_origins=[name])


def test_origins_are_normalised_as_browsers_write_them() -> None:
    named = ["https://App.Example", "http://localhost:5173", "http://[::1]:8080", "tauri://localhost"]
    assert origins_of(named) == {name.lower() for name in named}
    usual = ["https://App.Example:443", "http://[::1]:80", "http://a.example:443", "https://a.example:8443"]
    assert origins_of(usual) == {
        "https://app.example",
        "http://[::1]",
        "http://a.example:443",
        "https://a.example:8443",
    }


async def test_a_plain_http_page_is_foreign_to_a_server_with_tls() -> None:
    transport = httpx2.ASGITransport(app=make_app())
    async with httpx2.AsyncClient(transport=transport, base_url="https://testserver") as client:
        asked = [
            (await client.get("/health", headers={"origin": origin})).status_code
            for origin in ("https://testserver", "http://testserver")
        ]
    assert asked == [200, 403]


@given(
    st.one_of(st.text(st.characters(max_codepoint=255)), st.sampled_from(["http://[::1", "://", "http://"]))
)
@example("http://[::1")
def test_any_malformed_origin_is_foreign_and_raises_no_other_error(origin: str) -> None:
    for host in ("testserver", ""):
        headers = [(b"origin", origin.encode("latin-1")), (b"host", host.encode())]
        scope = {"type": "http", "method": "GET", "headers": headers, "scheme": "http"}
        page_of(scope)
        if origin:
            with pytest.raises(ForeignOriginError):
                check_origin(scope, ())


async def test_a_foreign_page_cannot_open_a_websocket_and_an_allowed_one_can() -> None:
    app = make_app([text("hi")], allowed_origins=["https://app.example"])
    async with served(app) as server:
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with server.socket(origin="http://evil.example"):
                pass
        for origin in ("https://app.example", server.url):
            async with Socket(server.socket(origin=origin)) as socket:
                await socket.send(opening())
                assert (await socket.receive())["type"] == "welcome"
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"])
async def test_a_local_server_accepts_its_own_host_names(host: str) -> None:
    assert (await ask_by_name(host)).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "[::2]"])
async def test_a_foreign_host_name_for_this_machine_is_refused(host: str) -> None:
    answer = await ask_by_name(host)
    assert (answer.status_code, answer.json()["code"]) == (403, "foreign_origin")


async def ask_by_name(host: str) -> httpx2.Response:
    app = make_app()
    guarded = HostGuard(app, {"localhost", "127.0.0.1", "::1"})
    transport = httpx2.ASGITransport(app=guarded)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/health", headers={"host": host})
    await app.stop()
    return answer


async def test_one_accepted_host_name_does_not_admit_another() -> None:
    async with served(make_app()) as server:
        for host, status in (
            ("localhost", 200),
            ("evil.example", 403),
            ("localhost", 200),
            ("localhost.", 403),
        ):
            answer = await server.http.get("/health", headers={"host": host})
            assert (host, answer.status_code) == (host, status)


async def test_a_wildcard_accepts_any_host_name() -> None:
    async with served(make_app(), allowed_hosts=["*"]) as server:
        answer = await server.http.get("/health", headers={"host": "anything.example"})
    assert answer.status_code == 200


async def test_the_websockets_of_a_served_app_check_the_host_too() -> None:
    async with served(make_app()) as server:
        answer = await server.http.get("/health", headers={"host": "evil.example"})
        # This client sends its own `Host` first, so that there are two of them.
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with server.socket(headers={"Host": "evil.example"}):
                pass
    assert answer.status_code == 403
    # The parser of an install without compiled parts (h11) refuses that by itself, as 400.
    assert refused.value.response.status_code in {400, 403}


@pytest.mark.parametrize(
    ("client", "headers", "expected"),
    [
        ("127.0.0.1", {}, ""),
        ("::1", {}, ""),
        ("::ffff:127.0.0.1", {}, ""),
        (None, {}, ""),
        ("198.51.100.7", {}, "198.51.100.7"),
        ("::ffff:198.51.100.7", {}, "198.51.100.7"),
        (None, {"x-real-ip": "198.51.100.7"}, "198.51.100.7"),
        ("127.0.0.1", {"x-forwarded-for": "127.0.0.1, 198.51.100.7"}, "198.51.100.7"),
        ("127.0.0.1", {"x-forwarded-for": "::1"}, ""),
        ("127.0.0.1", {"forwarded": 'for="[2001:db8::7]:4711";proto=https'}, "2001:db8::"),
        ("198.51.100.7", {"x-forwarded-for": "127.0.0.1"}, "198.51.100.7"),
    ],
)
def test_a_remote_client_is_recognised_by_its_address_and_by_a_proxys_header(
    client: str | None, headers: dict[str, str], expected: str
) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert remote_address({"client": client and (client, 4711), "headers": pairs}) == expected
