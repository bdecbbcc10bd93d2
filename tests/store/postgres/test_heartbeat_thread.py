"""A process with a blocked event loop keeps its sessions."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from midstream.environment import World
from midstream.errors import LeaseHeldError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from tests.postgres_engine import Engine
from tests.store.postgres.postgres_places import PostgresPlace

pytestmark = pytest.mark.slow

WORLD = World()
LEASE_S = 2.0
CHILD = """
import asyncio, sys, time
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.postgres import PostgresStore

async def main():
    store = PostgresStore(sys.argv[1], lease_s=float(sys.argv[2]))
    await store.open()
    epoch = await store.claim("s", at=1.0)
    print("blocked", flush=True)
    time.sleep(3 * float(sys.argv[2]))  # a tool that was not made async
    print(await store.append("s", Batch([b"late"], 0, epoch, Sync.FULL)), flush=True)
    await store.close()

asyncio.run(main())
"""


def _start(url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, url, str(LEASE_S)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_a_blocked_event_loop_does_not_lose_its_leases(engine: Engine) -> None:
    place = PostgresPlace(engine, lease_s=LEASE_S)
    store = place.store()
    await store.open()
    child = await asyncio.to_thread(_start, place.url)
    try:
        assert store._opened is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "blocked\n"
        until = WORLD.monotonic() + 2 * LEASE_S
        while WORLD.monotonic() < until:
            with pytest.raises(LeaseHeldError):
                await store.claim("s", at=2.0)
            await store._opened._neighbours.look()
            await WORLD.sleep(0.05)
        assert child.stdout.readline() == "1\n"
        child.wait(60)
        epoch = await store.claim("s", at=3.0)
        assert await store.append("s", Batch([b"next"], 1, epoch, Sync.FULL)) == 2
    finally:
        child.kill()
        child.communicate(timeout=60)
        await store.close()
