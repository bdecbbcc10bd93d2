"""A client has one secret for each session, and the right one wherever it is interrupted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstream.client import connect
from midstream.client.client import Client
from midstream.client.secret_store import SecretFileSummary, SecretKey, SecretStore, survey
from midstream.client.session_secrets import NEXT, SecretsToShow, SessionSecrets
from midstream.client.transport_selection import TransportName
from midstream.environment import World
from midstream.errors import AccessError, MidstreamError, WrongSecretError
from midstream.session.child_names import root_of
from midstream.session.records import Delta, TurnEnded
from midstream.store.memory import Memory
from midstream.testing.scripted_model import text
from tests.server.escrowing import OTHER, escrowed_app
from tests.server.serving import SECRET, Served, make_app, served
from tests.spec import spec

WAYS = ["websocket", "sse", "poll"]


def _secrets(store: SecretStore) -> SessionSecrets:
    return SessionSecrets(store, server="http://here", world=World())


@pytest.fixture
async def store() -> AsyncIterator[SecretStore]:
    store = SecretStore(None, world=World())
    yield store
    await store.close()


def test_secrets_to_send_are_not_in_their_representation() -> None:
    shown = SecretsToShow(SECRET, OTHER)
    assert SECRET not in repr(shown)
    assert OTHER not in repr(shown)
    assert shown.headers == {
        "x-idempotent-encryption-key": SECRET,
        "x-idempotent-encryption-key-old": OTHER,
    }
    assert SecretsToShow().headers == {}


async def test_a_session_and_its_sub_agents_have_one_permanent_secret(store: SecretStore) -> None:
    secrets = _secrets(store)
    assert await secrets.read("s") == SecretsToShow()
    made = await secrets.read_or_create("s")
    assert len(made.secret) == 43
    assert await secrets.read_or_create("s::child") == made
    assert root_of("s::child::grandchild") == "s"
    assert await _secrets(store).read("s") == made  # another process
    assert (await secrets.read_or_create("t")).secret != made.secret


async def test_two_clients_that_create_a_secret_get_the_same_one(store: SecretStore) -> None:
    one, other = _secrets(store), _secrets(store)
    assert await one.read("s") == await other.read("s") == SecretsToShow()
    assert await one.read_or_create("s") == await other.read_or_create("s")


async def test_a_given_secret_replaces_the_stored_one(store: SecretStore) -> None:
    secrets = _secrets(store)
    await secrets.read_or_create("s")
    assert await secrets.keep("s", OTHER) == SecretsToShow(OTHER)
    assert await _secrets(store).read("s") == SecretsToShow(OTHER)


@spec("STREAM-95")
async def test_a_discarded_secret_opens_nothing_and_is_not_stored(tmp_path: Path) -> None:
    secrets = tmp_path / "client-secrets.db"
    async with (
        served(escrowed_app(tmp_path, [text("one")])) as server,
        connect(server.url, state=tmp_path / "client.db", secrets=secrets) as client,
    ):
        assert isinstance([event async for event in client.send("s", "hi")][-1].record, TurnEnded)
        assert survey(secrets) == SecretFileSummary(in_file=1)
        await client.discard_secret("s")
        assert survey(secrets) == SecretFileSummary()
        with pytest.raises(WrongSecretError):
            await client.create_viewer_token("s")


@spec("STREAM-95")
async def test_no_secret_is_stored_if_the_server_does_not_need_it(store: SecretStore) -> None:
    secrets = _secrets(store)
    made = await secrets.read_or_create("s")
    await secrets.release("s::child")
    assert await _secrets(store).read("s") == SecretsToShow()
    assert (await secrets.read_or_create("s")).secret not in ("", made.secret)
    assert await _secrets(store).read("s") == SecretsToShow()
    assert await secrets.keep("s", OTHER) == await _secrets(store).read("s") == SecretsToShow(OTHER)


async def test_a_change_ends_even_if_a_stream_meanwhile_received_that_none_is_needed(
    store: SecretStore,
) -> None:
    secrets = _secrets(store)
    both = await secrets.begin_change("s")
    await secrets.release("s")
    await secrets.end_change("s", both)
    assert await _secrets(store).read("s") == SecretsToShow()


@spec("STREAM-95")
@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_a_secret_survives_its_streams_if_it_opens_their_session(
    tmp_path: Path, *, is_encrypted: bool
) -> None:
    steps = [text("one"), text("two")]
    app = escrowed_app(tmp_path, steps) if is_encrypted else make_app(steps)
    secrets = tmp_path / "client-secrets.db"
    async with served(app) as server:
        async with connect(server.url, state=tmp_path / "client.db", secrets=secrets) as client:
            for _ in range(2):
                assert isinstance([event async for event in client.send("s1", "hi")][-1].record, TurnEnded)
                assert survey(secrets) == SecretFileSummary(in_file=int(is_encrypted))
        async with connect(server.url, state=tmp_path / "client.db", secrets=secrets) as client:
            await client.cancel("s1")  # nothing runs: it is only acknowledged
            assert survey(secrets) == SecretFileSummary(in_file=int(is_encrypted))


@spec("STREAM-88")
async def test_during_a_change_both_secrets_are_sent_also_by_the_next_process(store: SecretStore) -> None:
    before = (await _secrets(store).read_or_create("s")).secret
    both = await _secrets(store).begin_change("s")  # and the process dies
    assert both.old_secret == before
    again = _secrets(store)
    assert await again.read("s") == both
    assert await again.begin_change("s") == both  # the same one, as the server may already have it
    await again.end_change("s", both)
    assert await again.read("s") == SecretsToShow(both.secret) == await _secrets(store).read("s")


@spec("STREAM-96")
async def test_a_change_by_another_process_is_visible_at_once(store: SecretStore) -> None:
    one, other = _secrets(store), _secrets(store)
    made = await one.read_or_create("s")
    assert await other.read("s") == made
    both = await other.begin_change("s")
    assert await one.read("s") == both == SecretsToShow(both.secret, made.secret)
    await other.end_change("s", both)
    assert await one.read_or_create("s") == SecretsToShow(both.secret)
    await other.keep("s", OTHER)
    assert await one.read("s") == SecretsToShow(OTHER)


@spec("STREAM-88")
async def test_the_late_end_of_a_change_does_not_end_the_next_one(store: SecretStore) -> None:
    late, other = _secrets(store), _secrets(store)
    both = await late.begin_change("s")
    assert await other.begin_change("s") == both
    await other.end_change("s", both)
    following = await other.begin_change("s")
    await late.end_change("s", both)
    assert await late.read("s") == following


@spec("STREAM-88")
async def test_a_change_interrupted_between_its_two_writes_is_ended_by_the_next_one(
    store: SecretStore,
) -> None:
    secrets = _secrets(store)
    both = await secrets.begin_change("s")
    await store.put(SecretKey("http://here", "s"), both.secret, replaces=both.old_secret)
    assert await secrets.read("s") == SecretsToShow(both.secret)
    again = await secrets.begin_change("s")
    await secrets.end_change("s", again)
    assert (await store.get(SecretKey("http://here", "s", NEXT)), again) == (None, SecretsToShow(both.secret))


async def test_a_given_secret_is_stored_even_during_a_change(store: SecretStore) -> None:
    secrets = _secrets(store)
    await secrets.begin_change("s")
    assert await secrets.keep("s", OTHER) == await _secrets(store).read("s") == SecretsToShow(OTHER)


@spec("STREAM-95")
async def test_a_session_that_needs_a_secret_later_keeps_its_first_one(
    store: SecretStore,
) -> None:
    secrets = _secrets(store)
    await secrets.release("s")
    made = await secrets.read_or_create("s")
    await secrets.need("s::child", made.secret)
    assert await secrets.read("s") == await secrets.read_or_create("s") == made
    await secrets.need("s", OTHER)
    assert await secrets.read("s") == made


async def _send(client: Client, session: str, words: str) -> str:
    records = [event.record async for event in client.send(session, words)]
    assert isinstance(records[-1], TurnEnded)
    return "".join(each.text for each in records if isinstance(each, Delta))


def _client(folder: Path, url: str, way: TransportName = "auto") -> Client:
    """Return a client with the same files in each process."""
    return connect(url, transport=way, state=folder / "state.db", secrets=folder / "secrets.db")


@asynccontextmanager
async def _server(folder: Path, memory: Memory) -> AsyncIterator[Served]:
    async with served(escrowed_app(folder, [text("an answer")], memory=memory)) as server:
        yield server


@spec("STREAM-84")
@pytest.mark.parametrize("way", WAYS)
async def test_its_sessions_open_for_one_client_and_for_no_other(tmp_path: Path, way: TransportName) -> None:
    async with _server(tmp_path, Memory()) as server:
        async with _client(tmp_path, server.url, way) as client:
            assert await _send(client, "s", "one") == "an answer"
            assert await _send(client, "s", "two") == "an answer"
        async with _client(tmp_path, server.url, way) as client:  # another process of the same client
            assert await _send(client, "s", "three") == "an answer"
            async for event in client.follow("s", "0-0"):
                if isinstance(event.record, TurnEnded) and event.record.turn == 3:
                    break
            assert await client.questions("s") == ()
            await client.cancel("s")
            secret = await client.secret("s")
        async with connect(server.url, transport=way) as stranger:
            with pytest.raises(WrongSecretError):
                await _send(stranger, "s", "mine?")
            with pytest.raises(WrongSecretError):
                await anext(stranger.follow("s", "0-0"))
            await stranger.keep_secret("s", secret)  # another device of the same person
            assert await _send(stranger, "s", "four") == "an answer"


@spec("STREAM-89")
@pytest.mark.parametrize("way", WAYS)
async def test_a_viewer_can_read_and_not_send(tmp_path: Path, way: TransportName) -> None:
    async with _server(tmp_path, Memory()) as server, connect(server.url) as client:
        await _send(client, "s", "one")
        token = await client.create_viewer_token("s", for_s=60.0)
        async with connect(server.url, transport=way) as viewer:
            assert (await anext(viewer.follow("s", "0-0", viewer_token=token))).id == "1-1"
            await viewer.keep_secret("s", token)
            with pytest.raises(MidstreamError) as refused:
                await viewer.cancel("s")
            assert refused.value.code in {"access", "usage"}
            await client.revoke_viewer_tokens("s")
            with pytest.raises(WrongSecretError):
                await anext(viewer.follow("s", "0-0", viewer_token=token))
            with pytest.raises(AccessError):
                await viewer.create_viewer_token("s")


@spec("STREAM-88")
@pytest.mark.parametrize("reaches", [False, True])
async def test_an_interrupted_change_locks_no_client_out(
    tmp_path: Path,
    reaches: bool,  # noqa: FBT001 - whether the request reaches the server
) -> None:
    async with _server(tmp_path, Memory()) as server:
        async with _client(tmp_path, server.url) as client:
            await _send(client, "s", "one")
            before = await client.secret("s")
        store = SecretStore(
            tmp_path / "secrets.db", world=World()
        )  # the steps of `change_secret` before its death
        both = await SessionSecrets(store, server=server.url, world=World()).begin_change("s")
        await store.close()
        if reaches:
            assert (await server.http.get("/v1/sessions/s", headers=both.headers)).status_code == 200
        async with _client(tmp_path, server.url) as client:
            assert await _send(client, "s", "two") == "an answer"
            await client.change_secret("s")
            assert await _send(client, "s", "three") == "an answer"
            assert await client.secret("s") == both.secret
        async with connect(server.url) as thief:
            await thief.keep_secret("s", before)
            with pytest.raises(WrongSecretError):
                await anext(thief.follow("s", "0-0"))


@pytest.mark.parametrize("is_escrowed", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_that_started_under_another_secret_is_resumed(
    tmp_path: Path,
    is_escrowed: bool,  # noqa: FBT001 - both kinds of servers
    way: TransportName,
) -> None:
    script = [text("an answer of many words")]
    app = escrowed_app(tmp_path, script) if is_escrowed else make_app(script)
    async with served(app) as server:
        async with _client(tmp_path, server.url, way) as client:
            async for event in client.send("s", "one"):
                if isinstance(event.record, Delta):
                    break
            await client.change_secret("s")
        async with _client(tmp_path, server.url, way) as client:
            [turn] = await client.resume_interrupted()
            records = [event.record async for event in turn]
            assert isinstance(records[-1], TurnEnded)
