"""Listings of a store with concurrent writes by other nodes."""

from __future__ import annotations

from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionListing
from midstream.store.jetstream import JetStreamStore
from tests.store.jetstream.jetstream_places import JetStreamPlace


async def test_deleted_sessions_take_no_slot_in_a_page(place: JetStreamPlace, store: JetStreamStore) -> None:
    other = place.store()
    await other.open()
    for number in range(150):
        epoch = await other.claim(f"s{number:03}", at=float(number))
        await other.release(f"s{number:03}", epoch=epoch)
    assert len([line async for line in store.list()]) == 150
    for number in range(50, 150):
        await other.delete(f"s{number:03}")
    found = [line.session async for line in store.list(limit=3)]
    assert found == ["s049", "s048", "s047"]
    await other.close()


async def test_a_frequently_changed_line_is_one_message(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    for end in range(20):
        mark = SessionListing(is_live=end % 2 == 0, at=float(end), turns=end)
        await store.append("s", Batch([b"x"], end, epoch, Sync.FULL, mark))
    opened = store._opened
    assert opened is not None
    subjects = opened.presence._subjects
    stream = subjects.session("s").stream
    assert len(await opened.link.scan(stream, subjects.lines(stream))) == 1
    assert [line.mark.turns async for line in store.list()] == [19]


async def test_open_turns_are_found_by_their_own_index(store: JetStreamStore) -> None:
    for number in range(3):
        epoch = await store.claim(f"s{number}", at=1.0)
        for end in range(number):
            mark = SessionListing(is_live=end % 2 == 0, at=float(end), turns=end)
            await store.append(f"s{number}", Batch([b"x"], end, epoch, Sync.FULL, mark))
    opened = store._opened
    assert opened is not None
    assert [line.session async for line in store.list(live=True)] == ["s1"]
    assert [line.session for line in opened.reader.lines.live()] == ["s1"]
    assert {line.session async for line in store.list(live=False)} == {"s0", "s2"}
    await store.delete("s1")
    assert [line async for line in store.list(live=True)] == []
    assert opened.reader.lines.live() == []
