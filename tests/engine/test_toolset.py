from __future__ import annotations

import asyncio

import pytest

from midstream.engine import toolset
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.toolset import Toolset, read_toolset
from midstream.errors import ToolsUnavailableError
from midstream.history.messages import Outcome, ToolResult
from midstream.session.records import CallEnded, ToolsChanged, TurnEnded, decode
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel, calls, run_turn
from midstream.tools.function_tools import Tool, tool
from tests.spec import spec


def named_tool(name: str, answer: str = "") -> Tool:
    @tool(name=name, has_effects=False)
    def work() -> str:
        """Work."""
        return answer

    return work


class ScriptedToolSource:
    """A source with the test's entries: each is offered or raised, or never returns."""

    def __init__(self, name: str, *offers: Tool | Exception | SystemExit | None) -> None:
        self.name = name
        self.offers = [*offers]
        self.closings = 0

    async def tools(self) -> tuple[Tool, ...]:
        for each in self.offers:
            if each is None:
                await asyncio.Event().wait()
            if isinstance(each, Exception | SystemExit):
                raise each
        return tuple(each for each in self.offers if isinstance(each, Tool))

    async def close(self) -> None:
        self.closings += 1
        if self.offers[:1] == [None]:
            raise OSError("it does not close")


async def test_an_agent_without_sources_has_its_own_tools() -> None:
    agent = Agent(ScriptedModel([]), tools=[named_tool("a")])
    assert await read_toolset(agent) == Toolset(agent.tools)


@spec("TURN-41")
async def test_the_agents_own_tools_come_first_then_the_sources_in_order() -> None:
    own, first, second = (
        named_tool("a"),
        ScriptedToolSource("one", named_tool("a"), named_tool("b")),
        ScriptedToolSource("two", named_tool("b"), named_tool("c")),
    )
    found = await read_toolset(Agent(ScriptedModel([]), tools=[first, own, second]))
    assert found.tools == {"a": own, "b": first.offers[1], "c": second.offers[1]}
    assert (found.found, found.unreachable) == (frozenset("bc"), frozenset())


@spec("TURN-40")
async def test_a_source_that_hangs_or_fails_is_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolset, "READ_S", 0.5)
    sources = (
        ScriptedToolSource("slow", None),
        ScriptedToolSource("down", ToolsUnavailableError("down")),
        ScriptedToolSource("bug", ZeroDivisionError()),
        ScriptedToolSource("exit", SystemExit(3)),
        ScriptedToolSource("up", named_tool("a")),
    )
    async with asyncio.timeout(60):
        found = await read_toolset(Agent(ScriptedModel([]), tools=sources))
    assert (found.found, found.unreachable) == (frozenset("a"), frozenset({"slow", "down", "bug", "exit"}))


@spec("TURN-40", "TURN-42")
async def test_readers_receive_each_change_once() -> None:
    shelf = ScriptedToolSource("shelf", named_tool("a"))
    model = ScriptedModel([])
    host = Host(Agent(model, tools=[shelf]), MemoryStore())
    await host.start()

    async def changes() -> list[ToolsChanged]:
        records = await run_turn(host, "s", "go")
        assert isinstance(records[-1], TurnEnded)
        return [record for record in records if isinstance(record, ToolsChanged)]

    (first,) = await changes()
    assert (first.turn, first.added, first.removed, first.unreachable) == (1, ("a",), (), ())
    assert await changes() == []
    shelf.offers = [named_tool("b")]
    (second,) = await changes()
    assert (second.turn, second.added, second.removed) == (3, ("b",), ("a",))
    shelf.offers = [ToolsUnavailableError("down")]
    (third,) = await changes()
    assert (third.added, third.removed, third.unreachable) == ((), ("b",), ("shelf",))
    assert await changes() == []
    await host.stop(grace_s=0.1)
    assert shelf.closings
    assert [[each.name for each in request.tools] for request in model.requests] == [
        ["a"],
        ["a"],
        ["b"],
        [],
        [],
    ]


@spec("TURN-43")
async def test_a_tool_that_disappears_before_its_run_gives_an_error_result() -> None:
    """Two processes: the first journals the plan and is stopped while an earlier call runs."""
    started = asyncio.Event()

    @tool(name="wait")
    async def wait_for_ever() -> str:
        """Wait."""
        started.set()
        await asyncio.Event().wait()
        return ""

    store = MemoryStore()
    model = ScriptedModel([calls(("wait", "{}"), ("later", "{}"), ("kept", "{}"))])
    sources = ScriptedToolSource("shelf", named_tool("later"), named_tool("kept", "here"))
    first = Host(Agent(model, tools=[wait_for_ever, sources]), store)
    await first.start()
    turn = asyncio.ensure_future(run_turn(first, "s", "go"))
    async with asyncio.timeout(60):
        await started.wait()
    await first.stop(grace_s=0.0)
    await asyncio.wait([turn], timeout=60)
    turn.exception()

    second = Host(
        Agent(model, tools=[wait_for_ever, ScriptedToolSource("shelf", named_tool("kept", "here"))]), store
    )
    await second.start()
    await second.wait_for_recovery()
    runner = await second.session("s")
    async with asyncio.timeout(60):
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
    records = [*(await runner.read(after=0, limit=1000))]
    await second.stop(grace_s=0.1)
    results = [record.result for each in records if isinstance(record := decode(each.body), CallEnded)]
    assert [(each.call_id, each.outcome) for each in results] == [
        ("c1", Outcome.UNKNOWN),
        ("c2", Outcome.ERROR),
        ("c3", Outcome.OK),
    ]
    assert results[1].content == "The tool 'later' no longer exists, so the call was not run."
    assert results[2] == ToolResult("c3", "here")


async def test_a_source_that_does_not_close_does_not_block_the_stop_of_a_host() -> None:
    host = Host(Agent(ScriptedModel([]), tools=[ScriptedToolSource("stuck", None)]), MemoryStore())
    await host.start()
    async with asyncio.timeout(60):
        await host.stop(grace_s=0.1)
