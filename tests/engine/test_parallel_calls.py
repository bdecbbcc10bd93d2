"""Batches of calls in a host: order, independence, time limits, progress, late results."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import StoreDamagedError
from midstream.history.messages import Outcome, Step, ToolResult, UserMessage
from midstream.session.blobs import BLOB_BYTES_MIN, blob_of
from midstream.session.records import (
    CallEnded,
    CallProgressed,
    CancelRequested,
    Record,
    ResultArrivedLate,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.session.turn.commands import Cancel, SendMessage
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import ScriptedModel, calls, records_until_end, run_turn, text
from midstream.tools.function_tools import RESULT_CHARS_MAX, Tool, current_call, report_progress, tool
from tests.spec import spec


@asynccontextmanager
async def _hosted(
    model: ScriptedModel, *tools: Tool, world: World | None = None, store: MemoryStore | None = None
) -> AsyncIterator[Host]:
    host = Host(Agent(model, tools=tools), store or MemoryStore(), world=world)
    await host.start()
    try:
        async with asyncio.timeout(60):
            yield host
    finally:
        await host.stop()


async def _start(host: Host) -> Runner:
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    return runner


async def _records(runner: Runner, kind: type[Record], count: int = 1) -> list[Record]:
    """Wait until there are `count` records of a kind."""
    while True:
        end = runner.newest.position
        records = [decode(each.body) for each in await runner.read(after=0, limit=1000)]
        if len(found := [record for record in records if isinstance(record, kind)]) >= count:
            return found
        await runner.wait(end)


def _results(records: tuple[Record, ...]) -> dict[str, ToolResult]:
    return {record.result.call_id: record.result for record in records if isinstance(record, CallEnded)}


# --- progress -------------------------------------------------------------------------------------------------


@spec("TURN-38")
async def test_a_coroutine_reports_its_progress_while_it_runs() -> None:
    go = asyncio.Event()

    @tool
    async def build() -> str:
        report_progress("half way")
        await go.wait()
        report_progress("nearly")
        return "built"

    async with _hosted(ScriptedModel([calls(("build", "{}")), text("ok")]), build) as host:
        runner = await _start(host)
        (first,) = await _records(runner, CallProgressed)
        assert isinstance(first, CallProgressed)
        assert (first.call_id, first.run, first.text) == ("c1", 1, "half way")
        assert await runner.read(after=0, limit=100)
        go.set()
        records = await records_until_end(runner, after=0)
        assert [r.text for r in records if isinstance(r, CallProgressed)] == ["half way", "nearly"]
        assert _results(records) == {"c1": ToolResult("c1", "built")}


@spec("TURN-38")
async def test_a_plain_function_reports_its_progress_from_its_thread() -> None:
    go = threading.Event()

    @tool
    def build() -> str:
        report_progress("half way")
        assert go.wait(60)
        return "built"

    async with _hosted(ScriptedModel([calls(("build", "{}")), text("ok")]), build) as host:
        runner = await _start(host)
        (first,) = await _records(runner, CallProgressed)
        assert isinstance(first, CallProgressed)
        assert first.text == "half way"
        go.set()
        assert _results(await records_until_end(runner, after=0)) == {"c1": ToolResult("c1", "built")}


# --- independence and time ------------------------------------------------------------------------------------


async def test_results_are_in_the_order_of_the_calls_whichever_ends_first() -> None:
    is_second_done = asyncio.Event()

    @tool(has_effects=False)
    async def first() -> str:
        await is_second_done.wait()
        return "1"

    @tool(has_effects=False)
    async def second() -> str:
        is_second_done.set()
        return "2"

    model = ScriptedModel([calls(("first", "{}"), ("second", "{}")), text("ok")])
    async with _hosted(model, first, second) as host:
        await run_turn(host, "s", "hi")
        _, step, _ = (await host.session("s")).state.history.entries
        assert isinstance(step, Step)
        assert [result.content for result in step.results] == ["1", "2"]


async def test_a_failing_or_slow_call_does_not_affect_the_others() -> None:
    @tool(has_effects=False)
    async def fails() -> str:
        raise ValueError("no")

    @tool(has_effects=False, timeout_s=0.02)
    async def hangs() -> str:
        await asyncio.Event().wait()
        return ""

    @tool(timeout_s=0.02)
    async def hangs_while_writing() -> str:
        await asyncio.Event().wait()
        return ""

    @tool(has_effects=False)
    def works() -> str:
        return "fine"

    tools = (fails, hangs, works, hangs_while_writing)
    batch = calls(*((each.name, "{}") for each in tools))
    async with _hosted(ScriptedModel([batch, text("ok")]), *tools) as host:
        results = _results(await run_turn(host, "s", "hi"))
        outcomes = [results[f"c{number}"].outcome for number in range(1, 5)]
        assert outcomes == [Outcome.ERROR, Outcome.ERROR, Outcome.OK, Outcome.UNKNOWN]
        assert "within 0.02 s" in results["c2"].content
        assert results["c3"].content == "fine"


# --- cancellation ---------------------------------------------------------------------------------------------


@spec("TURN-7", "TURN-8")
async def test_a_plain_function_that_stops_on_request_keeps_its_result() -> None:
    has_begun = threading.Event()

    @tool
    def work() -> str:
        has_begun.set()
        assert current_call().stopped.wait(60)
        return "three of five"

    async with _hosted(ScriptedModel([calls(("work", "{}")), text("ok")]), work) as host:
        runner = await _start(host)
        await asyncio.to_thread(has_begun.wait, 10)
        await runner.submit(Cancel())
        records = await records_until_end(runner, after=0)
        assert _results(records) == {"c1": ToolResult("c1", "three of five")}
        assert isinstance(records[-1], TurnEnded)
        assert records[-1].status is TurnStatus.CANCELLED


class NoWaitWorld(World):
    """A world in which waiting takes no time: every grace is over at once."""

    ticks = 1_000_000.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def now(self) -> float:
        self.ticks += 10.0
        return self.ticks


@spec("TURN-8", "TURN-31")
@pytest.mark.parametrize("is_plain", [True, False])
async def test_a_result_after_the_grace_is_recorded_as_late(
    is_plain: bool,  # noqa: FBT001 - pytest's parameter
) -> None:
    has_begun, may_end, may_end_too = threading.Event(), threading.Event(), asyncio.Event()

    @tool(name="work")
    def plain() -> str:
        has_begun.set()
        assert may_end.wait(60)
        return "all five"

    @tool(name="work")
    async def stubborn() -> str:
        has_begun.set()
        while not may_end_too.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end_too.wait()
        return "all five"

    work = plain if is_plain else stubborn
    async with _hosted(ScriptedModel([calls(("work", "{}")), text("ok")]), work, world=NoWaitWorld()) as host:
        runner = await _start(host)
        await asyncio.to_thread(has_begun.wait, 10)
        await runner.submit(Cancel())
        records = await records_until_end(runner, after=0)
        assert _results(records)["c1"].outcome is Outcome.UNKNOWN
        before = runner.state.history
        may_end.set()
        may_end_too.set()
        (late,) = await _records(runner, ResultArrivedLate)
        assert isinstance(late, ResultArrivedLate)
        assert late.result == ToolResult("c1", "all five")
        assert runner.state.history == before
        again = await run_turn(host, "s", "and now?")  # without a waiter
        assert isinstance(again[-1], TurnEnded)


@spec("TURN-8")
async def test_a_cancelled_coroutine_may_have_taken_effect() -> None:
    has_begun = asyncio.Event()

    @tool
    async def work() -> str:
        has_begun.set()
        await asyncio.Event().wait()
        return ""

    async with _hosted(ScriptedModel([calls(("work", "{}")), text("ok")]), work) as host:
        runner = await _start(host)
        await has_begun.wait()
        await runner.submit(Cancel())
        records = await records_until_end(runner, after=0)
        assert _results(records)["c1"].outcome is Outcome.UNKNOWN
        assert sum(isinstance(record, CancelRequested) for record in records) == 1


# --- large results --------------------------------------------------------------------------------------------

LARGE = "line of a log\n" * 20_000


@tool(has_effects=False)
def read_log() -> str:
    """Read the log."""
    return LARGE


@spec("TURN-70")
async def test_a_large_result_is_small_in_the_session_and_whole_for_the_model() -> None:
    batch = calls(("read_log", "{}"), ("read_log", "{}"))
    model = ScriptedModel([batch, text("so long")])
    memory = Memory()
    async with _hosted(model, read_log, store=MemoryStore(memory)) as host:
        records = await run_turn(host, "s", "hi")
        digest = blob_of(LARGE).digest
        for result in _results(records).values():
            assert (result.blob, result.size) == (digest, len(LARGE))
            assert len(result.content) < BLOB_BYTES_MIN
        assert memory.sessions["s"].blobs == {digest: LARGE.encode()}
        shown = model.requests[1].history.entries[1]
        assert isinstance(shown, Step)
        assert shown.results == (ToolResult("c1", LARGE), ToolResult("c2", LARGE))
        kept = (await host.session("s")).state.history.entries[1]
        assert isinstance(kept, Step)
        assert {result.call_id: result for result in kept.results} == _results(records)
    async with _hosted(model, read_log, store=MemoryStore(memory)) as host:  # another process
        await run_turn(host, "s", "again")
        assert model.requests[2].history.entries[1] == shown


async def test_an_endless_result_is_cut() -> None:
    @tool(has_effects=False)
    def endless() -> str:
        return "x" * (RESULT_CHARS_MAX + 5)

    async with _hosted(ScriptedModel([calls(("endless", "{}")), text("ok")]), endless) as host:
        (result,) = _results(await run_turn(host, "s", "hi")).values()
        assert result.size == RESULT_CHARS_MAX + len("\n[+5 characters]")


class Unreadable(MemoryStore):
    """A store that cannot find its blobs for a while."""

    failures = 2

    async def blob(self, session: str, digest: str) -> bytes | None:
        if self.failures:
            self.failures -= 1
            raise StoreDamagedError("a page cannot be read")
        return await super().blob(session, digest)


async def test_an_unreadable_large_result_is_a_failed_attempt_and_the_session_continues() -> None:
    model = ScriptedModel([calls(("read_log", "{}")), text("so long")])
    async with _hosted(model, read_log, world=NoWaitWorld(), store=Unreadable()) as host:
        records = await run_turn(host, "s", "hi")
        assert isinstance(records[-1], TurnEnded)
        assert records[-1].status is TurnStatus.COMPLETED
        assert [type(record).__name__ for record in records].count("AttemptFailed") == 2
