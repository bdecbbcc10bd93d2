"""Rows of access in the store, with tolerance for damaged ones.

Reading a row that another program changed raises `EntryDamagedError`. A damaged credential counts as missing, and is
refused. A write can replace a damaged row, so that revocations still work.
"""

from __future__ import annotations

import logging

from midstream.errors import EntryDamagedError, KeyMissingError
from midstream.store.contract import KeyValue, KeyValueEntry

_log = logging.getLogger(__name__)


async def read_row(kv: KeyValue, namespace: str, key: str) -> KeyValueEntry | None:
    """Return a row; None if it is missing or damaged. Damage is logged."""
    try:
        return await kv.kv_get(namespace, key)
    except (EntryDamagedError, KeyMissingError) as error:
        _log.error("a stored row about access cannot be read: %s", error.message)
        return None


async def version_of(kv: KeyValue, namespace: str, key: str) -> int:
    """Return the version of a row, damaged or not, for its replacement; 0 without a row."""
    try:
        row = await kv.kv_get(namespace, key)
    except EntryDamagedError as error:
        return error.version
    return row.version if row is not None else 0
