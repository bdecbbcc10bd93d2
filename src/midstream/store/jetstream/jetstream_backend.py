"""NATS JetStream clusters as a kind of store: see `store_registry`."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from typing_extensions import override

from midstream.environment import World
from midstream.store.blocking_reads import LoopThread
from midstream.store.contract import StoreReader
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.jetstream_address import JetStreamAddress
from midstream.store.jetstream.jetstream_link import JetStreamLink
from midstream.store.jetstream.session_reader import JetStreamReader, SessionReader
from midstream.store.jetstream.stream_setup import find_streams
from midstream.store.store_registry import Backend

T = TypeVar("T")


class JetStreamBackend(Backend):
    """See `Backend`. An address is what follows `nats:`."""

    @override
    def open(self, address: str, *, world: World) -> JetStreamStore:
        return JetStreamStore(f"nats:{address}", world=world)

    @contextlib.contextmanager
    @override
    def read(self, address: str) -> Iterator[StoreReader]:
        place = JetStreamAddress.parse(address)
        link = JetStreamLink(place, World())
        with contextlib.closing(LoopThread()) as loop:
            try:
                reader = loop.run(_open_to_read(link, place))

                def ask(question: Callable[[SessionReader], Awaitable[T]]) -> T:
                    return loop.run(_ask(reader, question))

                yield JetStreamReader(ask)
            finally:
                loop.run(link.close())

    def file(self, _address: str) -> None:
        """See `Backend.file`."""


async def _open_to_read(link: JetStreamLink, address: JetStreamAddress) -> SessionReader:
    await link.connect()
    return SessionReader(link, await find_streams(link, address), World())


async def _ask(reader: SessionReader, question: Callable[[SessionReader], Awaitable[T]]) -> T:
    return await question(reader)
