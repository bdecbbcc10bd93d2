"""NATS JetStream clusters as stores."""

from midstream.store.jetstream.jetstream_store import JetStreamStore

__all__ = ["JetStreamStore"]
