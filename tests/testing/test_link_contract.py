"""The suite finds faults: each broken store here fails the test of its fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from midstream.store.contract import Batch, Store
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.link_contract import LinkContract
from midstream.testing.store_fakes import Storage

SUITE = LinkContract()


class WithoutLinks(MemoryStore):
    """A store that drops the links."""

    async def append(self, session: str, batch: Batch) -> int:
        return await super().append(session, replace(batch, links=()))


class KeepsTheLink(MemoryStore):
    """A store that keeps the link of the pruned record."""

    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        return await super().prune(session, body, position=position, epoch=epoch)


class Nameless(MemoryStore):
    """A store with one name for all nodes."""

    async def open(self) -> None:
        await super().open()
        self._memory.living.add("node")
        self.node = "node"


class LinkPlace:
    def __init__(self, kind: type[MemoryStore]) -> None:
        self._kind = kind
        self._memory = Memory()

    def store(self) -> Store:
        return self._kind(self._memory)

    def kill(self, store: Store) -> None:
        self._memory.kill(store.node)


Test = Callable[[Storage], Awaitable[None]]


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (WithoutLinks, SUITE.test_links_are_stored_with_their_records),
        (KeepsTheLink, SUITE.test_pruning_leaves_the_link_or_replaces_it),
        (Nameless, SUITE.test_a_forwarded_command_names_the_node_that_waits),
    ],
)
async def test_a_broken_store_fails_the_test_of_its_fault(kind: type[MemoryStore], test: Test) -> None:
    with pytest.raises(AssertionError):
        await test(LinkPlace(kind))
    await test(LinkPlace(MemoryStore))
