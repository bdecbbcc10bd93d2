"""Stores: the contract, and the backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names

if TYPE_CHECKING:
    from midstream.session.records import Sync as Sync
    from midstream.store.contract import Batch as Batch
    from midstream.store.contract import Escrow as Escrow
    from midstream.store.contract import ForwardedCommand as ForwardedCommand
    from midstream.store.contract import Immediate as Immediate
    from midstream.store.contract import KeyValue as KeyValue
    from midstream.store.contract import KeyValueEntry as KeyValueEntry
    from midstream.store.contract import News as News
    from midstream.store.contract import SessionInfo as SessionInfo
    from midstream.store.contract import SessionListing as SessionListing
    from midstream.store.contract import Store as Store
    from midstream.store.contract import StoredRecord as StoredRecord
    from midstream.store.contract import StoreReader as StoreReader
    from midstream.store.contract import Transactional as Transactional
    from midstream.store.encryption.ciphers import FileKeys as FileKeys
    from midstream.store.encryption.encrypted_store import encrypt_store as encrypt_store
    from midstream.store.encryption.escrow import escrow_store as escrow_store
    from midstream.store.encryption.remote_keys import RemoteKeys as RemoteKeys
    from midstream.store.jetstream.jetstream_store import JetStreamStore as JetStreamStore
    from midstream.store.memory import MemoryStore as MemoryStore
    from midstream.store.postgres.postgres_store import PostgresStore as PostgresStore
    from midstream.store.sqlite.store import SQLiteStore as SQLiteStore
    from midstream.store.store_registry import BACKENDS as BACKENDS
    from midstream.store.store_registry import Backend as Backend
    from midstream.store.store_registry import open_store as open_store

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "session.records": "Sync",
        "store.contract": (
            "Batch Escrow ForwardedCommand Immediate KeyValue KeyValueEntry News SessionInfo "
            "SessionListing Store StoreReader StoredRecord Transactional"
        ),
        "store.encryption.ciphers": "FileKeys",
        "store.encryption.encrypted_store": "encrypt_store",
        "store.encryption.escrow": "escrow_store",
        "store.encryption.remote_keys": "RemoteKeys",
        "store.jetstream.jetstream_store": "JetStreamStore",
        "store.memory": "MemoryStore",
        "store.postgres.postgres_store": "PostgresStore",
        "store.sqlite.store": "SQLiteStore",
        "store.store_registry": "BACKENDS Backend open_store",
    },
)
