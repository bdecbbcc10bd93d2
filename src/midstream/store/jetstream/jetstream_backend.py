"""NATS JetStream clusters as stores: see `store_registry`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from typing_extensions import override

from midstream.environment import World
from midstream.store.contract import StoreReader
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.jetstream_address import JetStreamAddress
from midstream.store.jetstream.jetstream_link import JetStreamLink
from midstream.store.jetstream.session_reader import SessionReader
from midstream.store.jetstream.stream_setup import find_streams
from midstream.store.store_registry import Backend


class JetStreamBackend(Backend):
    """See `Backend`. An address is the part of a URL after `nats:`."""

    @override
    def open(self, address: str, *, world: World) -> JetStreamStore:
        return JetStreamStore(f"nats:{address}", world=world)

    @contextlib.asynccontextmanager
    @override
    async def read(self, address: str) -> AsyncIterator[StoreReader]:
        place = JetStreamAddress.parse(address)
        link = JetStreamLink(place, World())
        try:
            await link.connect()
            yield SessionReader(link, await find_streams(link, place), World())
        finally:
            await link.close()

    def file(self, _address: str) -> None:
        """See `Backend.file`."""
