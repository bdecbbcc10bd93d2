"""Reads: names that PostgreSQL cannot store, and the view for people."""

from __future__ import annotations

import pytest

from midstream.errors import UsageError
from midstream.store.postgres import PostgresStore
from tests.store.stores import append


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
async def test_a_name_that_postgresql_cannot_store_is_refused(store: PostgresStore, name: str) -> None:
    for asking in (
        store.claim(name, at=1.0),
        store.find(name),
        store.read(name, after=0, limit=1),
        store.kv_get("n", name),
        store.kv_put(name, "k", b"", expected=0, at=1.0),
        store.watch({name: 0}),
    ):
        with pytest.raises(UsageError, match="a name"):
            await asking


async def test_a_journal_can_be_read_with_sql(store: PostgresStore) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b'{"type":"x"}', b"\x00\xff", b"", expected=0, epoch=epoch)
    assert store._opened is not None
    rows = await store._opened.pool.run(lambda db, _: db.fetch("select * from journal order by position"))
    assert [tuple(row) for row in rows] == [
        ("s", 1, epoch, '{"type":"x"}'),
        ("s", 2, epoch, None),
        ("s", 3, epoch, None),
    ]
