"""A process that prunes a database until it is done, or dies on the way: `pruning_process.py DATABASE POINT`."""

from __future__ import annotations

import asyncio
import sys

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.pruning import Pruner
from midstream.environment import Fault
from midstream.session.retention import Retention
from midstream.store.sqlite import SQLiteStore
from midstream.testing import ScriptedModel, text
from midstream.testing.fake_worlds import KillingWorld

DONE_WITHIN_S = 60


async def main(path: str, point: str) -> None:
    world = KillingWorld(Fault(point) if point else None)
    retention = Retention(events_for_s=None, events_max=10, bytes_max=None)
    host = Host(Agent(ScriptedModel([text("hi")])), SQLiteStore(path), world=world)
    await host.start()
    await Pruner(host, host.store, world, retention).sweep()
    await host.stop(grace_s=0.1)


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2]), DONE_WITHIN_S))
