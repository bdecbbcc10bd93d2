"""PostgreSQL as a kind of store: by its URL, for writing and for reading."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest

from midstream.errors import StoreBusyError, StoreDamagedError, UsageError
from midstream.store.guard.guarded_store import guard_store
from midstream.store.postgres import PostgresStore
from midstream.store.store_registry import file_of, open_store, prepare_store, read_store
from tests.store.postgres.postgres_places import PostgresPlace
from tests.store.stores import append


async def test_a_url_is_a_store_and_no_file(place: PostgresPlace) -> None:
    for url in (place.url, place.url.replace("postgresql:", "postgres:")):
        assert isinstance(open_store(url), PostgresStore)
        assert file_of(url) is None


async def test_a_store_can_be_read_while_a_server_works_on_it(
    store: PostgresStore, place: PostgresPlace
) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", b"b", expected=0, epoch=epoch)
    await store.kv_put("n", "k", b"1", expected=0, at=1.0)
    with read_store(place.url) as reader:
        assert [line.session for line in reader.list()] == ["s"]
        assert [each.body for each in reader.read("s", after=1, limit=9)] == [b"b"]
        assert reader.blob("s", "none") is None
        assert [each.key for each in reader.kv_list("n")] == ["k"]
    assert await append(store, b"c", expected=2, epoch=epoch) == 3


def test_an_unreachable_server_is_named_without_the_password() -> None:
    with (
        pytest.raises(StoreBusyError, match="cannot be reached") as refused,
        read_store("postgresql://u:secret@127.0.0.1:1/db"),
    ):
        pass
    assert "secret" not in str(refused.value)


async def test_preparing_a_store_that_needs_no_preparation_is_a_usage_error(tmp_path: object) -> None:
    with pytest.raises(UsageError, match="needs no preparation"):
        await prepare_store(f"{tmp_path}/x.db")


async def test_servers_with_one_store_key_detect_foreign_writes_to_the_database(
    place: PostgresPlace, tmp_path: Path
) -> None:
    key = tmp_path / "store-key"
    url = f"{place.url}&store_key={key}"
    with pytest.raises(UsageError, match="create it once"):
        await open_store(url).open()
    key.write_text(f"{b64encode(bytes(32)).decode()}\n")
    key.chmod(0o600)
    one, other = (guard_store(open_store(url)) for _ in range(2))
    await one.open()
    await other.open()
    epoch = await one.claim("s", at=1.0)
    await append(one, b"a", b"b", expected=0, epoch=epoch)
    assert [each.body for each in await other.read("s", after=0, limit=9)] == [b"a", b"b"]
    raw = place.store()
    await raw.open()
    assert raw._opened is not None
    await raw._opened.pool.run(lambda db, _: db.execute("update record set body = 'x' where position = 2"))
    third = guard_store(open_store(url))
    await third.open()
    with pytest.raises(StoreDamagedError):
        await third.read("s", after=0, limit=9)
    for store in (one, other, raw, third):
        await store.close()
