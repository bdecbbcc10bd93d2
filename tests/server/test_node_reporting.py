"""Reports of servers to one another, and limits that hold for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import World
from midstream.errors import LimitReachedError
from midstream.server.limits import CallerSlots, Rate, RunningTurns
from midstream.server.node_reporting import NodeReports
from midstream.store.node_reports import NODES
from midstream.testing.scripted_model import ScriptedModel, text

WAIT_S = 60.0


class ReportingServer:
    """A host with its limits."""

    def __init__(self, path: Path) -> None:
        self.world = World()
        self.host = Host(Agent(ScriptedModel(lambda _: text("hi"))), path, world=self.world)
        self.rate = Rate(10, "requests", self.world)
        self.slots = CallerSlots(3, "streams")
        self.turns = RunningTurns(2, self.world)
        self.reports = NodeReports(
            self.host,
            "serve",
            name="agent",
            figures=lambda: {"streams": 1},
            counters={"requests": self.rate, "streams": self.slots, "turns": self.turns},
        )


@asynccontextmanager
async def _servers(path: Path) -> AsyncIterator[tuple[ReportingServer, ReportingServer]]:
    one, other = ReportingServer(path), ReportingServer(path)
    async with asyncio.timeout(WAIT_S), one.host, other.host:
        for each in (one, other):
            while not each.host.has_peers:
                await each.world.sleep(0.02)
            each.reports.start()
        yield one, other
        for each in (one, other):
            await each.reports.stop()
        assert await one.host.store.kv_list(NODES) == []


async def _wait_until_refused(server: ReportingServer, *callers: str) -> None:
    for caller in callers:
        while True:
            try:
                server.rate.check(caller)
            except LimitReachedError:
                break
            await server.world.sleep(0.02)


async def test_a_limit_used_up_at_one_server_is_used_up_at_the_other(tmp_path: Path) -> None:
    async with _servers(tmp_path / "s.db") as (one, other):
        one.slots.take("ada")
        one.slots.take("ada")
        one.turns.begin("ada", "s1", lambda _: True)
        one.turns.begin("ada", "s2", lambda _: True)
        for _ in range(10):
            one.rate.count("ada")
        await _wait_until_refused(other, "ada")
        other.slots.take("ada")
        with pytest.raises(LimitReachedError, match="3 streams"):
            other.slots.take("ada")
        with pytest.raises(LimitReachedError, match="turns run in 2 sessions"):
            other.turns.begin("ada", "s3", lambda _: True)
        other.turns.begin("ada", "s2", lambda _: True)  # The same session counts once.
        other.rate.check("bob")
        other.slots.take("bob")
        lines = await other.reports.lines()
        assert [(line.kind, line.streams, line.state) for line in lines] == [("serve", 1, "serving")] * 2
