"""Links, nodes and senders as a test suite, for guarded stores. A part of `StoreContract`."""
# ruff: noqa: D102, PLR2004 - tests: names state what they check, and numbers need no names

from __future__ import annotations

import asyncio

import pytest

from midstream.environment import World
from midstream.errors import UsageError
from midstream.session.records import Sync
from midstream.store.contract import Batch, ForwardedCommand, Store
from midstream.testing.store_fakes import Storage, open_store

NEWS_S = 30.0
"""Seconds after which an expected forwarded command counts as missing."""


class LinkContract:
    """The tests of links and nodes. Each one gets a fresh `place`."""

    pytestmark = pytest.mark.asyncio

    async def test_links_are_stored_with_their_records(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await _append_linked(store)
            await store.append("s", Batch([b"3"], 2, epoch, Sync.FULL))
        async with open_store(place) as again:
            assert await _links(again) == [b"\x00one", b"two", b""]

    async def test_pruning_leaves_the_link_or_replaces_it(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await _append_linked(store)
            assert await store.prune("s", b"fold", position=1, epoch=epoch)
            assert await _links(store) == [b"\x00one", b"two"]
            assert await store.prune("s", b"fold", position=2, epoch=epoch, link=b"of the fold")
            assert await _links(store) == [b"of the fold"]

    async def test_a_forwarded_command_names_the_node_that_waits(self, place: Storage) -> None:
        async with open_store(place) as node, open_store(place) as sender:
            assert len({node.node, sender.node, ""}) == 3
            await node.claim("s", at=1.0)
            forwarding = World().spawn(sender.forward("s", b"command"), name="forward")
            found: list[ForwardedCommand] = []
            async with asyncio.timeout(NEWS_S):
                while not found:
                    found = [*(await node.watch({})).forwarded_commands]
            assert [(each.body, each.sender) for each in found] == [(b"command", sender.node)]
            await node.answer(found[0].number, b"answer")
            async with asyncio.timeout(NEWS_S):
                assert await forwarding == b"answer"


async def _append_linked(store: Store) -> int:
    """Append two records with links, or skip the test if the store makes its own links."""
    epoch = await store.claim("s", at=1.0)
    try:
        await store.append("s", Batch([b"1", b"2"], 0, epoch, Sync.FULL, links=[b"\x00one", b"two"]))
    except UsageError:
        pytest.skip("this store has links of its own")
    return epoch


async def _links(store: Store) -> list[bytes]:
    return [each.link for each in await store.read("s", after=0, limit=9)]
