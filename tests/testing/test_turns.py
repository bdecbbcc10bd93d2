from __future__ import annotations

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.session.records import TurnEnded
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel, Stall, run_turn, text, turns


async def test_a_turn_is_run_to_its_end() -> None:
    host = Host(Agent(ScriptedModel([text("a")])), MemoryStore())
    await host.start()
    first = await run_turn(host, "s", "hi")
    second = await run_turn(host, "s", "hi")
    assert isinstance(first[-1], TurnEnded)
    assert isinstance(second[-1], TurnEnded)
    assert (first[-1].turn, second[-1].turn) == (1, 2)
    await host.stop()


async def test_an_endless_turn_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.05)
    host = Host(Agent(ScriptedModel([[Stall()]])), MemoryStore())
    await host.start()
    with pytest.raises(TimeoutError):
        await run_turn(host, "s", "hi")
    await host.stop()
