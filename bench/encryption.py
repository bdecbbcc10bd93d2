"""Cost of encryption at rest for each event, compared with the store alone; and the cost of opening a session."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from midstream.environment import World
from midstream.session.records import Delta, Sync, encode
from midstream.store.contract import Batch, Store
from midstream.store.encryption import ciphers
from midstream.store.encryption.ciphers import DataKey, FileKeys
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.encryption.escrow import EscrowedStore, escrow_store
from midstream.store.sqlite import SQLiteStore

EVENTS = 20_000
BATCH = 500
OPENINGS = 500
ROUNDS = 5
SECRET = "s" * 43
EVENT = encode(Delta(12, 3, 1, 0, "text", "about as many words as one delta of a model"))


class Point(msgspec.Struct):
    """Microseconds of CPU time for one event, the best of several rounds."""

    what: str
    us: float


def _best_us(what: str, times: list[float]) -> Point:
    return Point(what, min(times) / EVENTS * 1e6)


def _cipher() -> tuple[list[float], list[float]]:
    key = DataKey(ciphers.fresh_key(World()))
    encrypting, decrypting = [], []
    for _ in range(ROUNDS):
        start = time.process_time()
        found = [key.encrypt(EVENT, b"midstream 1 record %d 3 session-1" % place) for place in range(EVENTS)]
        encrypting.append(time.process_time() - start)
        start = time.process_time()
        for place, body in enumerate(found):
            key.decrypt(body, b"midstream 1 record %d 3 session-1" % place)
        decrypting.append(time.process_time() - start)
    return encrypting, decrypting


async def _append_and_read_escrowed(store: EscrowedStore) -> tuple[float, float]:
    await store.open()
    await store.escrow.open("session-1", SECRET, begins=True)
    return await _append_and_read(store)


async def _time_openings(store: EscrowedStore) -> float:
    """Time repeated openings of a session, as each request about it opens it."""
    await store.open()
    start = time.process_time()
    for _ in range(OPENINGS):
        await store.escrow.open("session-1", SECRET)
    took = time.process_time() - start
    await store.close()
    return took


async def _append_and_read(store: Store) -> tuple[float, float]:
    await store.open()
    epoch = await store.claim("session-1", at=1.0)
    start = time.process_time()
    for end in range(0, EVENTS, BATCH):
        await store.append("session-1", Batch([EVENT] * BATCH, expected=end, epoch=epoch, sync=Sync.NORMAL))
    wrote = time.process_time() - start
    start = time.process_time()
    after = 0
    while page := await store.read("session-1", after=after, limit=1000):
        after = page[-1].position
    read = time.process_time() - start
    await store.close()
    return wrote, read


def run(folder: Path) -> list[Point]:
    """Measure, print, return."""
    FileKeys.make(folder / "keys")
    keys = FileKeys(folder / "keys")
    encrypting, decrypting = _cipher()
    plain, encrypted, escrowed, opening = [], [], [], []
    for number in range(ROUNDS):
        plain.append(asyncio.run(_append_and_read(SQLiteStore(folder / f"{number}.db"))))
        encrypted.append(
            asyncio.run(_append_and_read(encrypt_store(SQLiteStore(folder / f"{number}e.db"), keys)))
        )
        store = escrow_store(SQLiteStore(folder / f"{number}c.db"), keys)
        escrowed.append(asyncio.run(_append_and_read_escrowed(store)))
        opening.append(asyncio.run(_time_openings(store)))
    points = [
        _best_us("encrypt", encrypting),
        _best_us("decrypt", decrypting),
        _best_us("append, plain", [wrote for wrote, _ in plain]),
        _best_us("append, encrypted", [wrote for wrote, _ in encrypted]),
        _best_us("append, under the client's secret", [wrote for wrote, _ in escrowed]),
        _best_us("read, plain", [read for _, read in plain]),
        _best_us("read, encrypted", [read for _, read in encrypted]),
        _best_us("read, under the client's secret", [read for _, read in escrowed]),
    ]
    for point in points:
        print(f"{point.what:<36}{point.us:8.2f} us an event of {len(EVENT)} bytes")
    once = Point("open a session", min(opening) / OPENINGS * 1e6)
    print(f"{once.what:<36}{once.us:8.2f} us")
    return [*points, once]
