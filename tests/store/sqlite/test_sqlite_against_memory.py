"""SQLite and the reference store in memory return the same results for any operations of two nodes."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import MidstreamError
from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionListing, Store
from midstream.store.memory import Memory, MemoryStore
from midstream.store.sqlite import SQLiteStore
from tests.search import tried

SESSIONS = st.sampled_from(["s", "t"])
OFFSETS = st.sampled_from([0, 0, 0, 0, -1, 1])
"""Offset of a command from the correct epoch or end."""


class Claim(NamedTuple):
    session: str
    at: float


class Release(NamedTuple):
    session: str
    epoch_offset: int


class Append(NamedTuple):
    session: str
    bodies: list[bytes]
    expected_offset: int
    epoch_offset: int
    sync: Sync
    mark: SessionListing | None


class Prune(NamedTuple):
    session: str
    position: int
    epoch_offset: int


class Delete(NamedTuple):
    session: str


class Die(NamedTuple):
    """The node is killed, and another one starts."""


class Reopen(NamedTuple):
    pass


Command = Claim | Release | Append | Prune | Delete | Die | Reopen

marks = st.builds(
    SessionListing,
    is_live=st.booleans(),
    at=st.integers(0, 3).map(float),
    title=st.sampled_from(["", "one", "two"]),
    turns=st.integers(0, 3),
    status=st.sampled_from(["", "running"]),
)
commands = st.one_of(
    st.builds(Claim, SESSIONS, st.integers(0, 3).map(float)),
    st.builds(Release, SESSIONS, OFFSETS),
    st.builds(
        Append,
        SESSIONS,
        st.lists(st.binary(max_size=5), max_size=3),
        OFFSETS,
        OFFSETS,
        st.sampled_from(Sync),
        st.none() | marks,
    ),
    st.builds(Prune, SESSIONS, st.integers(-1, 6), OFFSETS),
    st.builds(Delete, SESSIONS),
    st.builds(Die),
    st.builds(Reopen),
)


class TwoNodes:
    """Two nodes of one place, by number."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.memory = Memory()
        self.stores = [self._store(), self._store()]

    def _store(self) -> Store:
        return SQLiteStore(self.path, durability="process") if self.path else MemoryStore(self.memory)

    async def do(self, node: int, command: Command) -> object:
        store = self.stores[node]
        try:
            match command:
                case Claim(session, at):
                    return await store.claim(session, at=at)
                case Release(session, epoch_offset):
                    _, epoch = await self._line(session)
                    await store.release(session, epoch=epoch + epoch_offset)
                case Append(session, bodies, expected_offset, epoch_offset, sync, mark):
                    end, epoch = await self._line(session)
                    return await store.append(
                        session,
                        Batch(
                            bodies,
                            expected=end + expected_offset,
                            epoch=epoch + epoch_offset,
                            sync=sync,
                            mark=mark,
                        ),
                    )
                case Prune(session, position, epoch_offset):
                    _, epoch = await self._line(session)
                    return await store.prune(
                        session, b"pruned", position=position, epoch=epoch + epoch_offset
                    )
                case Delete(session):
                    return await store.delete(session)
                case Die():
                    await self._kill(store)
                    self.stores[node] = self._store()
                    await self.stores[node].open()
                case Reopen():
                    await store.close()
                    await store.open()
        except MidstreamError as error:
            return type(error)
        return None

    async def _line(self, session: str) -> tuple[int, int]:
        line = await self.stores[0].find(session)
        return (line.end, line.epoch) if line else (0, 0)

    async def _kill(self, store: Store) -> None:
        if isinstance(store, SQLiteStore):
            assert store._opened is not None
            store._opened.lock.drop()
            await store.close()  # Its threads and files; no longer its lock.
        elif isinstance(store, MemoryStore):
            self.memory.kill(store.node)

    async def read_all(self) -> object:
        store = self.stores[0]
        return [
            [line async for line in store.list()],
            [line.session async for line in store.list(live=True)],
            [await store.read(session, after=0, limit=3) for session in ("s", "t")],
            [await store.read(session, after=2, limit=100) for session in ("s", "t")],
            await store.find("s"),
        ]


@given(story=st.lists(st.tuples(st.integers(0, 1), commands), max_size=25))
@settings(max_examples=tried(100))
def test_sqlite_returns_the_same_results_as_memory(folders: Path, story: list[tuple[int, Command]]) -> None:
    async def play(world: TwoNodes) -> list[object]:
        for store in world.stores:
            await store.open()
        try:
            return [(await world.do(*step), await world.read_all()) for step in story]
        finally:
            for store in world.stores:
                await store.close()

    with tempfile.TemporaryDirectory(dir=folders) as folder:
        real = asyncio.run(play(TwoNodes(Path(folder) / "x.db")))
    assert real == asyncio.run(play(TwoNodes(None)))
