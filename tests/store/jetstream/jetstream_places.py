"""Stores in the NATS server of the tests, and the death of one without a close."""

from __future__ import annotations

import itertools
from typing import Any

from midstream.environment import World
from midstream.store.contract import Store
from midstream.store.jetstream import JetStreamStore
from tests.nats_engine import NatsCluster

_numbers = itertools.count(1)


class JetStreamPlace:
    """Streams of its own in running servers."""

    def __init__(self, cluster: NatsCluster, *, lease_s: float = 20.0, streams: int = 2) -> None:
        self.cluster = cluster
        self.name = f"test_{next(_numbers)}"
        self.url = cluster.url(self.name, streams=streams)
        self._lease_s = lease_s

    def store(self, world: World = World()) -> JetStreamStore:
        return JetStreamStore(self.url, lease_s=self._lease_s, world=world)

    def kill(self, store: Store) -> None:
        assert isinstance(store, JetStreamStore)
        die(store)


def die(store: JetStreamStore) -> None:
    """End a node as with its process: its tasks stop and its connection is cut, without a message to the server."""
    opened = store._opened
    assert opened is not None
    tasks = [
        opened.presence._watching,
        *opened._watching,
        *opened.routes._sending,
        *(outbox.task for outbox in opened.routes._outboxes.values()),
    ]
    for task in tasks:
        if task is not None:
            task.cancel()
    client = opened.link._client
    assert client is not None
    client.options["allow_reconnect"] = False
    transport: Any = client._transport
    transport._io_writer.transport.abort()
