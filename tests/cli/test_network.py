"""`midstream doctor URL` for people and scripts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from midstream.cli.network import NAMES, exit_code_of, is_address, network_lines
from midstream.cli.terminal import Ink, width_of
from midstream.client.network_probe import POST, NetworkReport, Probed, ProbeOutcome
from midstream.client.transport_selection import TransportKind
from midstream.local_keys import TOKEN_VARIABLE
from midstream.server.auth.access import Access, tokens
from midstream.server.auth.principals import Principal
from tests.cli.conftest import Run
from tests.client.proxies import OfficeProxy, Upgrades
from tests.server.in_thread import in_a_thread
from tests.server.serving import make_app, served

TOKEN = "a-token-of-the-server"
WORKS = (
    Probed("websocket", ProbeOutcome.WORKS, 5, 0.012),
    Probed("sse", ProbeOutcome.WORKS, 5, 0.02),
    Probed("poll", ProbeOutcome.WORKS, 5, 0.02),
    Probed("post", ProbeOutcome.WORKS, 1, 0.004),
)


@contextlib.asynccontextmanager
async def _proxied() -> AsyncIterator[str]:
    async with served(make_app()) as app:
        proxy = OfficeProxy(app.url, upgrades=Upgrades.REFUSED, is_buffering=True)
        async with proxy.listening():
            yield proxy.url


@contextlib.asynccontextmanager
async def _serving_with_tokens() -> AsyncIterator[str]:
    async with served(make_app(access=Access(authenticate=tokens({TOKEN: Principal("ann")})))) as app:
        yield app.url


@pytest.fixture
def proxied() -> Iterator[str]:
    """The address of a proxy that buffers answers, and of a server behind it."""
    with in_a_thread(_proxied) as url:
        yield url


def test_a_script_reads_json_and_the_exit_code(run: Run, proxied: str) -> None:
    done = run("doctor", proxied, "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["transport"], report["is_clear"]) == (6, "poll", False)
    assert [each["what"] for each in report["probed"]] == [*TransportKind, POST]
    assert [each["finding"] for each in report["probed"]] == ["refused", "buffered", "works", "works"]


def test_the_exit_code_shows_whether_a_stream_arrives() -> None:
    clear = NetworkReport("http://s", WORKS, TransportKind.WEBSOCKET)
    refused = Probed("websocket", ProbeOutcome.REFUSED)
    hindered = NetworkReport("http://s", (refused, *WORKS[1:]), TransportKind.SSE)
    shut = NetworkReport("http://s", (refused,), None)
    assert [exit_code_of(each) for each in (clear, hindered, shut)] == [0, 6, 1]


def test_an_unreachable_server_is_reported_in_one_line(run: Run) -> None:
    done = run("doctor", "http://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "[connection_lost]" in done.stderr


@pytest.mark.parametrize("more", [["file.json"], ["--fix"], ["--for", "openai-chat"]])
def test_a_url_excludes_other_arguments(run: Run, more: list[str]) -> None:
    assert run("doctor", "http://127.0.0.1:1", *more).exit_code == 2


def test_the_text_output() -> None:
    report = NetworkReport("http://s", WORKS, TransportKind.WEBSOCKET)
    assert [*network_lines(report, Ink(is_terminal=False, is_colored=False), 80)] == [
        "✓ WebSocket    works: 5 chunks, the first after 0.01 s",
        "✓ events (SSE) works: 5 chunks, the first after 0.02 s",
        "✓ long poll    works: 5 chunks, the first after 0.02 s",
        "✓ POST         works: answered after 0.00 s",
        "A client takes WebSocket.",
    ]


def test_the_text_output_if_no_stream_arrives() -> None:
    detail = "the first chunk came after 2.4 s: a proxy buffers answers until they are complete"
    probed = (
        Probed("websocket", ProbeOutcome.REFUSED, detail="the handshake was answered with HTTP status 403"),
        Probed("sse", ProbeOutcome.BUFFERED, 5, 2.4, detail),
    )
    lines = [
        *network_lines(
            NetworkReport("http://s", probed, None, "1.1 wall"), Ink(is_terminal=False, is_colored=False), 60
        )
    ]
    assert lines == [
        "✗ WebSocket    refused: the handshake was answered with HTTP",
        "               status 403",
        "! events (SSE) buffered: the first chunk came after 2.4 s: a",
        "               proxy buffers answers until they are complete",
        "It identifies itself as: 1.1 wall.",
        "No transport works undisturbed. Contact the operator of the",
        "proxy.",
    ]
    assert max(map(width_of, lines)) <= 60


def test_the_text_names_clients_that_may_use_a_disturbed_transport() -> None:
    cut = Probed(
        "websocket", ProbeOutcome.INCOMPLETE, 3, 0.01, "3 of 5 chunks came: a proxy cuts answers short"
    )
    late = Probed("sse", ProbeOutcome.BUFFERED, 5, 3.0, "the first chunk came after 3.0 s")
    last = [
        [*network_lines(NetworkReport("http://s", probed, way), Ink(is_terminal=False, is_colored=False), 80)]
        for probed, way in (
            ((cut, *WORKS[1:]), TransportKind.SSE),
            ((cut, late, *WORKS[2:]), TransportKind.POLL),
        )
    ]
    assert last[0][-2:] == [
        "Works: events (SSE). A client may stay with WebSocket unless it is given",
        "--transport sse.",
    ]
    assert " ".join(last[1][-2:]) == (
        "Works: long poll. A client may stay with WebSocket or events (SSE) unless it is given --transport poll."
    )


def test_a_server_that_requires_a_token_is_distinguished_from_one_without_a_probe(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_a_thread(_serving_with_tokens) as url:
        done = run("doctor", url)
        monkeypatch.setenv(TOKEN_VARIABLE, f"{url} {TOKEN}")
        let_in = run("doctor", url)
    assert (done.exit_code, done.stdout, let_in.exit_code) == (1, "", 0)
    assert "requires authentication" in done.stderr
    assert done.stderr.rstrip().endswith("with the address of the server and its token. [unauthorized]")


def test_only_a_url_is_probed() -> None:
    assert [is_address(each) for each in ("http://s", "https://s", "ws://s", "http", "./http:/s")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert set(NAMES) == {*TransportKind, POST}
