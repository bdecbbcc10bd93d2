"""The relay in front of a NATS server."""

from __future__ import annotations

import asyncio

import pytest

from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.relay import Relay

LEFT_TO_THE_COLLECTOR = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Connections that nats-py leaves open after a failed start; a test with such a failure collects them at its end."""


class NatsRelay(Relay):
    """See `Relay`."""

    def __init__(self, place: JetStreamPlace) -> None:
        super().__init__()
        self._place = place

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._place.cluster.servers[0].port)

    def _url_at(self, port: int) -> str:
        return f"nats://127.0.0.1:{port}/?name={self._place.name}&streams=2"
