"""Shared pages of a session's readers: one encoding for readers at one position, one read for those behind."""

from __future__ import annotations

import pytest

from midstream.engine import journal as journal_module
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import EventGoneError, JournalMovedError
from midstream.protocol.server_stream import NATIVE
from midstream.server.api.http_endpoints import SSE
from midstream.server.transports import encoded_pages as copies_module
from midstream.server.transports.connection import Connections
from midstream.server.transports.encoded_pages import EncodedEvents
from midstream.session.records import Delta, StepCommitted, Sync, encode
from midstream.session.session import Session, prune_session
from midstream.store.contract import Batch, StoredRecord
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel, text
from tests.spec import spec

PAGE = 4


class Counting(MemoryStore):
    """A store that records the positions of its reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read_after: list[int] = []

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        self.read_after.append(after)
        return await super().read(session, after=after, limit=limit)


async def _runner(store: MemoryStore) -> Runner:
    """Return a session of 20 records, of which few are in memory."""
    host = Host(Agent(ScriptedModel(lambda _: text("hi"))), store, world=World())
    await host.start()
    runner = await host.session("s1", create=True)
    await runner.events.claim(at=1.0)
    for number in range(20):
        body = encode(StepCommitted(1, number))
        await runner.events.append(_batch(runner.events, [body], Sync.NORMAL))
    return runner


def _batch(journal: journal_module.Journal, bodies: list[bytes], sync: Sync) -> Batch:
    return Batch(bodies, journal.newest.position, journal.epoch, sync)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "TAIL_RECORDS_MAX", PAGE)
    monkeypatch.setattr(copies_module, "EVENTS_PER_FRAME_MAX", PAGE)
    monkeypatch.setattr(copies_module, "AHEAD_RECORDS_MAX", 2 * PAGE)


async def test_readers_at_the_same_position_receive_the_same_bytes() -> None:
    copies = EncodedEvents(await _runner(MemoryStore()), NATIVE)
    page = copies.page_after(16)
    assert page is not None
    assert (page.after, page.end) == (16, 20)
    assert copies.page_after(16) is page
    assert copies.page_after(20) is None  # The end.


async def test_one_read_from_the_store_serves_all_readers_behind() -> None:
    store = Counting()
    copies = EncodedEvents(await _runner(store), NATIVE)
    store.read_after.clear()
    for _ in range(2):
        seen, position = [], 0
        while position < 2 * PAGE:
            page = copies.page_after(position)
            if page is None:
                await copies.read(position)
                continue
            seen.append((page.after, page.end))
            position = page.end
        assert seen == [(0, 4), (4, 8)]
    assert store.read_after == [0]


async def test_encoded_pages_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "PAGE_BYTES_MAX", 1)
    monkeypatch.setattr(copies_module, "AHEAD_BYTES_MAX", 3 * len(encode(StepCommitted(1, 1))))
    store = Counting()
    copies = EncodedEvents(await _runner(store), NATIVE)
    store.read_after.clear()
    position = 0
    while position < 2 * PAGE:
        page = copies.page_after(position)
        if page is None:
            await copies.read(position)
        else:
            assert (page.after, page.end) == (position, position + 1), "one record at least, and no more"
            position = page.end
    assert store.read_after == [0, 3, 6]


@spec("STREAM-114")
async def test_a_stalled_reader_holds_no_more_than_one_write() -> None:
    runner = await _runner(MemoryStore())
    words = encode(Delta(1, 1, 1, 0, "text", "x" * 2**15))
    await runner.events.append(_batch(runner.events, [words] * PAGE, Sync.NORMAL))
    copies, position = EncodedEvents(runner, NATIVE), 20
    while page := copies.page_after(position):
        assert 0 < page.end - position < PAGE
        assert sum(map(len, page.pieces)) < 2**17
        position = page.end
    assert position == 20 + PAGE


async def test_a_pruned_page_is_gone() -> None:
    store = MemoryStore()
    runner = await _runner(store)
    await store.prune("s1", encode(prune_session(Session(), at=1.0)), position=8, epoch=runner.events.epoch)
    copies = EncodedEvents(runner, NATIVE)
    assert copies.page_after(2) is None
    with pytest.raises(EventGoneError):
        await copies.read(2)


async def test_nothing_is_left_of_a_session_that_another_process_deleted() -> None:
    store = MemoryStore()
    copies = EncodedEvents(await _runner(store), NATIVE)
    await store.delete("s1")
    with pytest.raises(JournalMovedError):
        await copies.read(2)


async def test_connections_share_pages_while_one_of_them_uses_them() -> None:
    runner, connections = await _runner(MemoryStore()), Connections()
    ours = connections.encoded_events_of(runner, SSE)
    assert connections.encoded_events_of(runner, SSE) is ours
    assert connections.encoded_events_of(runner, NATIVE) is not ours
    other = await _runner(MemoryStore())  # Of the same name, opened again.
    assert connections.encoded_events_of(other, SSE).runner is other
