from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from midstream.session.session import Session
from midstream.store.contract import SessionListing
from midstream.store.sqlite.truncation import cut_journals
from midstream.store.store_registry import open_store, read_store
from tests.store.stores import append


async def test_a_cut_journal_ends_at_the_position_of_its_state_and_is_listed_so(folder: Path) -> None:
    store = open_store(folder / "x.db")
    await store.open()
    for session in ("cut", "whole"):
        epoch = await store.claim(session, at=1.0)
        await append(store, b"1", b"2", b"3", expected=0, epoch=epoch, session=session)
    await store.close()
    with closing(sqlite3.connect(folder / "x.db")) as db:
        cut_journals(db, sessions={"cut": Session(position=1, turns=7)})
    with read_store(folder / "x.db") as read:
        assert [each.body for each in read.read("cut", after=0, limit=9)] == [b"1"]
        assert len(read.read("whole", after=0, limit=9)) == 3
        found = read.find("cut")
        assert found is not None
        assert found.mark == SessionListing(is_live=False, at=1.0, turns=7)
