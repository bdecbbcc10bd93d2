"""Rows of access in the store, read so that a damaged one costs itself only.

A row that another program changed raises `EntryDamagedError` where it is read. For a credential it counts as missing,
which refuses the credential. It can be replaced, so that a revocation is written all the same.
"""

from __future__ import annotations

import logging

from midstream.errors import EntryDamagedError, KeyMissingError
from midstream.store.contract import KeyValue, KeyValueEntry

_log = logging.getLogger(__name__)


async def read_row(kv: KeyValue, namespace: str, key: str) -> KeyValueEntry | None:
    """Return a row, or None where there is none that can be read; a damaged one is logged."""
    try:
        return await kv.kv_get(namespace, key)
    except (EntryDamagedError, KeyMissingError) as error:
        _log.error("a row of access is not read: %s", error.message)
        return None


async def version_of(kv: KeyValue, namespace: str, key: str) -> int:
    """Return the version that a write replaces, also that of a damaged row; 0 where there is no row."""
    try:
        row = await kv.kv_get(namespace, key)
    except EntryDamagedError as error:
        return error.version
    return row.version if row is not None else 0
