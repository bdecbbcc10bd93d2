"""Stores under keys that stay with an application: the machine of the store has ciphertext only."""

from __future__ import annotations

from base64 import b64encode
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import (
    KeyMissingError,
    KeysUnavailableError,
    MidstreamError,
    StoreDamagedError,
    UnavailableError,
    UsageError,
)
from midstream.history.messages import UserMessage
from midstream.session.records import Sync
from midstream.session.turn.commands import SendMessage
from midstream.store import Batch, RemoteKeys, SessionListing, SQLiteStore, Store, encrypt_store
from midstream.testing import ScriptedModel, text
from tests.certificates import certificate
from tests.key_endpoint import TOKEN, Accepted, key_endpoint, serving
from tests.spec import spec
from tests.store.keys import keys_in

TEXT = "the word is canary-7f3a"


def _store(path: Path, url: str, token: str = TOKEN) -> Store:
    return encrypt_store(SQLiteStore(path), RemoteKeys(url, token=token))


def _agent() -> Agent:
    return Agent(ScriptedModel(lambda request: text(f"canary-7f3a was said; {len(request.history.entries)}")))


async def _send(runner: Runner, words: str) -> None:
    await runner.submit(SendMessage(UserMessage.of(words)))
    while runner.state.is_live:
        await runner.wait(runner.newest.position)


async def _begin(host: Host, session: str) -> Runner:
    runner = await host.session(session, create=True)
    await _send(runner, TEXT)
    return runner


def _stored(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("sessions.db*") if file.is_file())


async def _run_turn(store: Store, session: str = "s") -> int:
    """Send a message, and return the length of the session's history after it."""
    async with Host(_agent(), store) as host:
        runner = await host.session(session, create=True)
        await _send(runner, TEXT)
        return len(runner.state.history.entries)


@spec("SEC-60")
async def test_a_store_has_no_content_of_a_conversation_and_another_host_continues_it(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with key_endpoint(tmp_path) as url:
        first = await _run_turn(_store(path, url))
        assert b"canary-7f3a" not in _stored(tmp_path)
        assert TOKEN.encode() not in _stored(tmp_path)
        assert await _run_turn(_store(path, url)) == 2 * first


@spec("SEC-40", "SEC-60")
async def test_a_store_without_its_keys_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with key_endpoint(tmp_path) as url:
        await _run_turn(_store(path, url))
    with pytest.raises(KeyMissingError):
        await _run_turn(SQLiteStore(path))
    with (
        key_endpoint(tmp_path, keys=keys_in(tmp_path, "other")) as url,
        pytest.raises(KeyMissingError, match="not the operator's keys"),
    ):
        await _run_turn(_store(path, url))


@spec("SEC-61")
@pytest.mark.parametrize("token", ["", "token-of-another"])
async def test_a_token_that_the_application_refuses_opens_nothing(tmp_path: Path, token: str) -> None:
    with key_endpoint(tmp_path) as url:
        with pytest.raises(UnavailableError, match="refused the token"):
            await _run_turn(_store(tmp_path / "sessions.db", url, token))
        with pytest.raises(UnavailableError, match="refused the token"):
            await RemoteKeys(url, token=token).unwrap(b"?" * 99, context=b"c")


@spec("SEC-61")
async def test_content_is_read_with_one_request_for_each_epoch_and_none_for_a_record(tmp_path: Path) -> None:
    accepted = Accepted()
    with key_endpoint(tmp_path, accepted) as url:
        store = _store(tmp_path / "sessions.db", url)
        async with Host(_agent(), store) as host:
            runner = await host.session("s", create=True)
            await _send(runner, "first")
            before = accepted.requests
            for number in range(5):
                await _send(runner, str(number))
            assert accepted.requests == before


@spec("SEC-42", "SEC-61")
async def test_a_list_needs_one_request_for_64_titles_and_a_bad_row_loses_only_its_own_title(
    tmp_path: Path,
) -> None:
    accepted, path = Accepted(), tmp_path / "sessions.db"
    with key_endpoint(tmp_path, accepted) as url:
        store = _store(path, url)
        await store.open()
        for number in range(70):
            epoch = await store.claim(f"s{number}", at=1.0)
            mark = SessionListing(is_live=False, at=float(number), title=f"title {number}")
            await store.append(f"s{number}", Batch([b"{}"], 0, epoch, Sync.NORMAL, mark=mark))
        await store.close()
        stored = SQLiteStore(path)
        await stored.open()
        [bad] = [info async for info in stored.list(of=["s5"])]
        epoch = await stored.claim("s5", at=1.0)
        [other] = [info async for info in stored.list(of=["s6"])]
        mark = replace(bad.mark, title=other.mark.title)
        await stored.append("s5", Batch([b"{}"], 1, epoch, Sync.NORMAL, mark=mark))
        await stored.close()
        store = _store(path, url)
        await store.open()
        before = accepted.requests
        titles = {info.session: info.mark.title async for info in store.list()}
        assert accepted.requests == before + 2
        await store.close()
    assert titles == {f"s{number}": "" if number == 5 else f"title {number}" for number in range(70)}


@spec("SEC-42", "SEC-61")
async def test_a_namespace_needs_one_request_for_64_entries_and_none_for_known_ones(
    tmp_path: Path,
) -> None:
    accepted, path = Accepted(), tmp_path / "sessions.db"
    with key_endpoint(tmp_path, accepted) as url:
        store = _store(path, url)
        await store.open()
        for number in range(130):
            await store.kv_put("n", str(number), b"%d" % number, expected=0, at=float(number))
        await store.close()
        store = _store(path, url)
        await store.open()
        before = accepted.requests
        found = {entry.key: entry.body for entry in await store.kv_list("n")}
        assert accepted.requests == before + 3
        again = await store.kv_get("n", "7")
        assert again is not None
        assert (again.body, accepted.requests) == (b"7", before + 3)
        assert {entry.key: entry.body for entry in await store.kv_list("n")} == found
        assert accepted.requests == before + 3
        await store.close()
    assert found == {str(number): b"%d" % number for number in range(130)}


@spec("SEC-62")
async def test_an_unreachable_endpoint_is_a_retryable_error(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with key_endpoint(tmp_path) as url:
        await _run_turn(_store(path, url))
    with pytest.raises(UnavailableError, match="did not answer") as caught:
        await _run_turn(_store(path, url))
    assert (caught.value.retry, caught.value.retry_after_s) == ("later", 1.0)
    with key_endpoint(tmp_path) as url:
        assert await _run_turn(_store(path, url)) > 0


@spec("SEC-61")
async def test_a_certificate_is_checked_and_one_of_an_own_authority_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = certificate(tmp_path / "server.pem")
    with key_endpoint(tmp_path, pem=pem) as url:
        with pytest.raises(KeysUnavailableError, match=r"certificate .* was refused .* SSL_CERT_FILE"):
            await _run_turn(_store(tmp_path / "sessions.db", url))
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        assert await _run_turn(_store(tmp_path / "sessions.db", url)) > 0


@spec("SEC-62")
async def test_an_unreachable_endpoint_blocks_new_sessions_and_no_open_one(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with key_endpoint(tmp_path) as url:
            host = Host(_agent(), _store(tmp_path / "sessions.db", url))
            await stack.enter_async_context(host)
            runner = await _begin(host, "open")
        with pytest.raises(UnavailableError, match="did not answer"):
            await _begin(host, "other")
        await _send(runner, TEXT)
    assert b"canary-7f3a" not in _stored(tmp_path)


class RefusingEndpoint(Accepted):
    """An endpoint that refuses three requests in a row, from a number on."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = -1
        self.refused = 0

    async def __call__(self, token: str) -> bool:
        is_accepted = await super().__call__(token)
        if 0 <= self.begin < self.requests and self.refused < 3:
            self.refused += 1
            return False
        return is_accepted


@spec("SEC-62")
@pytest.mark.parametrize("passing", [0, 1])
async def test_a_command_of_another_node_is_retried_while_the_keys_are_unreachable(
    tmp_path: Path, passing: int
) -> None:
    """The keys are unreachable when the command is read, or when the answer is written."""
    path, refusing = tmp_path / "sessions.db", RefusingEndpoint()
    async with AsyncExitStack() as stack:
        ours = stack.enter_context(key_endpoint(tmp_path, refusing))
        theirs = stack.enter_context(key_endpoint(tmp_path))
        node = await stack.enter_async_context(Host(_agent(), _store(path, ours)))
        runner = await _begin(node, "s")
        other = await stack.enter_async_context(Host(_agent(), _store(path, theirs)))
        sender = await other.session("s")
        refusing.begin = refusing.requests + passing
        await sender.submit(SendMessage(UserMessage.of("over there")))
        assert refusing.refused == 3
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
        users = [each for each in runner.state.history.entries if isinstance(each, UserMessage)]
    assert users == [UserMessage.of(TEXT), UserMessage.of("over there")]


@spec("SEC-41", "SEC-60")
async def test_the_application_rotates_its_keys_and_the_old_one_can_be_removed(tmp_path: Path) -> None:
    path, file = tmp_path / "sessions.db", tmp_path / "keys"
    with key_endpoint(tmp_path) as url:
        await _run_turn(_store(path, url))
        store = _store(path, url)
        await store.open()
        assert await store.delete("s")
        await store.close()
    old = file.read_text()
    file.write_text(f"2 {b64encode(bytes(range(32))).decode()}\n{old}")
    with key_endpoint(tmp_path) as url:
        await _run_turn(_store(path, url))
    file.write_text(file.read_text().removesuffix(old))
    with key_endpoint(tmp_path) as url:
        await _run_turn(_store(path, url))


@spec("SEC-61")
async def test_changed_or_moved_keys_are_refused(tmp_path: Path) -> None:
    with key_endpoint(tmp_path) as url:
        keys = RemoteKeys(url, token=TOKEN)
        wrapped = await keys.wrap(b"k" * 32, context=b"here")
        assert keys.generation == "1"
        assert await keys.unwrap(wrapped, context=b"here") == b"k" * 32
        for changed, context in ((wrapped, b"there"), (wrapped[:-1], b"here"), (b"", b"here")):
            with pytest.raises(StoreDamagedError, match="refused"):
                await keys.unwrap(changed, context=context)


@spec("SEC-61")
@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("http://keys.example/", ""),
        ("ftp://127.0.0.1/", ""),
        ("https://", ""),
        ("https://ada:secret@keys.example", ""),
        ("https://keys.example:99999", ""),
        ("https://keys.example", "two words\r\n"),
    ],
)
def test_an_address_that_would_expose_the_token_is_refused(url: str, token: str) -> None:
    with pytest.raises(UsageError) as caught:
        RemoteKeys(url, token=token)
    assert "secret" not in str(caught.value)


@spec("SEC-61")
@pytest.mark.parametrize(
    ("response", "error", "match"),
    [
        (Response(status_code=307, headers={"location": "/wrap/again"}), UsageError, "status 307"),
        (Response('{"keys":[]}'), UsageError, "another number of keys"),
        (Response('{"keys":[{}]}'), UsageError, "another number of keys"),
        (Response("hello"), UsageError, "cannot be decoded"),
        (Response(b'{"key":"' + b"A" * 99_999), UsageError, "cannot be decoded"),
        (Response(status_code=403), UnavailableError, "refused the token"),
        (Response(status_code=429), UnavailableError, "status 429"),
        (Response("<html>", 502), UnavailableError, "status 502"),
    ],
)
async def test_any_other_response_is_an_error_and_no_redirect_is_followed(
    response: Response, error: type[MidstreamError], match: str
) -> None:
    async def answer(_: Request) -> Response:
        return response

    app = Starlette(routes=[Route("/keys/wrap", answer, methods=["POST"])])
    with serving(app) as url, pytest.raises(error, match=match):
        await RemoteKeys(f"{url}/keys/", token=TOKEN).wrap(b"k", context=b"c")
