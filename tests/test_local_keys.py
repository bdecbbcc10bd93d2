"""The key of a user's own servers: created once, private to its user, and sent to no program."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from midstream.errors import UnauthorizedError, UsageError
from midstream.local_keys import (
    KEY_FILE,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    address_of_socket,
    headers_for,
    is_loopback,
    prove_server,
    read_or_make_key,
    token_for,
)
from midstream.paths import Paths
from tests.spec import spec

pytestmark = pytest.mark.slow

Prove = Callable[[str, str], Any]
"""Return the answer to a nonce at an address."""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    for name in (TOKEN_VARIABLE, URL_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return Paths(tmp_path / "data", tmp_path / "state")


@contextmanager
def proving(prove: Prove) -> Iterator[tuple[str, list[bytes]]]:
    """Listen on this machine and answer challenges; yield the address, and the received requests."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(bytes(self.headers) + body)
            answer = prove(
                json.loads(body)["nonce"],
                address_of_socket(cast("tuple[str, int]", self.server.server_address)),
            )
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(200 if answer is not None else 404)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def test_a_key_is_created_once_and_readable_by_its_user_only(places: Paths) -> None:
    key = read_or_make_key(places.data)
    path = places.data / KEY_FILE
    assert (read_or_make_key(places.data), path.read_text().strip()) == (key, key)
    assert (path.stat().st_mode & 0o777, places.data.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [each.name for each in places.data.iterdir()] == [KEY_FILE]


@spec("SEC-14")
def test_a_key_that_others_can_read_or_that_is_a_link_is_refused(places: Paths, tmp_path: Path) -> None:
    read_or_make_key(places.data)
    path = places.data / KEY_FILE
    path.chmod(0o644)
    for use in (lambda: read_or_make_key(places.data), lambda: headers_for("http://127.0.0.1:1", places)):
        with pytest.raises(UsageError, match="readable by other users"):
            use()
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="symbolic link"):
        read_or_make_key(places.data)


@spec("SEC-10")
def test_a_server_with_a_valid_proof_receives_the_token_of_its_start_and_never_the_key(places: Paths) -> None:
    key = read_or_make_key(places.data)

    def prove(nonce: str, address: str) -> Any:  # noqa: ANN401 - JSON
        return {"start": "start-1", "proof": prove_server(key, address, "start-1", nonce)}

    with proving(prove) as (url, received):
        shown = headers_for(url, places)["authorization"]
        port = url.rpartition(":")[2]
    assert shown == f"Bearer {token_for(key, f'127.0.0.1 {port}', 'start-1')}"
    [challenge] = received
    assert key.encode() not in challenge
    assert b"authorization" not in challenge.lower()


@spec("SEC-10", "SEC-11")
@pytest.mark.parametrize("address", [("127.0.0.1", 8000), ("::1", 8000, 0, 0)])
def test_proof_and_token_have_the_form_of_the_specification(address: tuple[object, ...]) -> None:
    place = f"{address[0]} 8000"
    assert address_of_socket(address) == place

    def mac(*parts: str) -> str:
        return hmac.new(b"k\xc3\xa9y", "\0".join(parts).encode(), hashlib.sha256).hexdigest()

    proof = mac("midstream local user", "server", place, "start-1", "nonce")
    assert prove_server("k\u00e9y", place, "start-1", "nonce") == proof
    token = mac("midstream local user", "client", place, "start-1")
    assert token_for("k\u00e9y", place, "start-1") == f"start-1.{token}"


@spec("SEC-10")
@pytest.mark.parametrize("lie", ["another key", "another address", "another nonce", "another start"])
def test_a_server_with_a_wrong_proof_receives_nothing(places: Paths, lie: str) -> None:
    key = read_or_make_key(places.data)

    def prove(nonce: str, address: str) -> Any:  # noqa: ANN401 - JSON
        proof = prove_server(
            "key" if lie == "another key" else key,
            "127.0.0.1 1" if lie == "another address" else address,
            "start-2" if lie == "another start" else "start-1",
            "nonce" if lie == "another nonce" else nonce,
        )
        return {"start": "start-1", "proof": proof}

    with proving(prove) as (url, received), pytest.raises(UnauthorizedError, match="does not have the key"):
        headers_for(url, places)
    assert len(received) == 1


@pytest.mark.parametrize("answer", [None, b"", b"{", b"[]", b"{}", b'{"start": 1}', b"[" * 4000])
def test_a_foreign_program_receives_no_token(places: Paths, answer: bytes | None) -> None:
    read_or_make_key(places.data)
    with proving(lambda *_: answer) as (url, _):
        assert headers_for(url, places) == {}


@pytest.mark.parametrize("url", ["http://192.0.2.7:8000", "https://agents.example", "nonsense"])
def test_another_machine_receives_no_token(places: Paths, url: str) -> None:
    read_or_make_key(places.data)
    assert headers_for(url, places) == {}


@pytest.mark.parametrize("url", ["http://localhost:99999", "http://localhost:x", "http://[::1"])
def test_an_invalid_port_is_refused(places: Paths, url: str) -> None:
    with pytest.raises(UsageError):
        headers_for(url, places)


def test_without_a_key_nothing_is_sent_and_nothing_created(places: Paths) -> None:
    assert headers_for("http://localhost:8000", places) == {}
    assert not places.data.exists()


def test_a_user_without_a_home_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MIDSTREAM_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert headers_for("http://localhost:8000") == {}


@spec("SEC-13")
@pytest.mark.parametrize(
    ("value", "origin", "url", "is_sent"),
    [
        ("https://agents.example TOKEN", "", "https://agents.example/path", True),
        ("https://agents.example:443 TOKEN\n", "", "wss://AGENTS.example", True),
        ("https://agents.example TOKEN", "", "http://agents.example", False),
        ("https://agents.example TOKEN", "", "https://agents.example:8443", False),
        ("https://agents.example TOKEN", "", "https://agents.example.evil.example", False),
        ("TOKEN", "https://agents.example", "https://agents.example", True),
        ("TOKEN", "https://agents.example", "https://evil.example", False),
    ],
)
def test_a_token_is_sent_only_to_its_origin(
    places: Paths, monkeypatch: pytest.MonkeyPatch, value: str, origin: str, url: str, *, is_sent: bool
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, value)
    if origin:
        monkeypatch.setenv(URL_VARIABLE, origin)
    assert headers_for(url, places) == ({"authorization": "Bearer TOKEN"} if is_sent else {})


@spec("SEC-13")
@pytest.mark.parametrize(
    "value", ["TOKEN", "TOKEN https://agents.example", "https://a.example TOKEN TOKEN", "https://[ T"]
)
def test_a_token_without_an_origin_is_refused(
    places: Paths, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, value)
    with pytest.raises(UsageError, match=TOKEN_VARIABLE):
        headers_for("https://agents.example", places)


def test_only_this_machine_is_reached_without_proxies() -> None:
    names = ["localhost", "a.localhost", "127.9.9.9", "::1", "example.org", "10.0.0.1", ""]
    assert [is_loopback(name) for name in names] == [True, True, True, True, False, False, False]
