"""Tools that write in the transaction of their outcome: effect and outcome are both stored, or neither is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import apsw
import pytest

from midstream.engine.agent import Agent, sub_agent
from midstream.engine.host import Host
from midstream.environment import Fault, World
from midstream.errors import MidstreamError, StoreFullError, ToolDefinitionError
from midstream.history.messages import Outcome, ToolResult, UserMessage
from midstream.session.records import (
    CallEnded,
    CallStarted,
    CancelRequested,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.session.turn.commands import Cancel, SendMessage
from midstream.store.contract import Attempt, Batch
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing import FakeWorld, ScriptedModel, calls, records_until_end, run_turn, text
from midstream.testing.scripted_model import ScriptedStep
from midstream.tools.function_tools import Tool, current_call, tool, transaction
from tests.spec import spec

NOTE = [calls(("note", '{"what":"it"}')), text("done")]


@tool(on_doubt="in_transaction")
def note(what: str) -> str:
    """Note something down."""
    transaction().execute("create table if not exists app_note (what text, key text)")
    transaction().execute("insert into app_note values (?, ?)", (what, current_call().effect_key))
    return f"noted {what}"


@tool(on_doubt="in_transaction")
def fail(what: str) -> str:
    """Note something down, then fail."""
    note.function(what=what)
    raise ValueError(what)


@asynccontextmanager
async def _hosted(
    store: SQLiteStore, script: Sequence[list[ScriptedStep]], *tools: Tool, world: World | None = None
) -> AsyncIterator[Host]:
    host = Host(Agent(ScriptedModel(script), tools=tools), store, world=world)
    await host.start()
    await host.wait_for_recovery()
    try:
        yield host
    finally:
        await host.stop()


def _notes(path: Path) -> list[tuple[str, str]]:
    # With the store's own SQLite: a second one in a process breaks the locks of the first, see the guide.
    with closing(apsw.Connection(str(path))) as db:
        if not db.execute("select 1 from sqlite_schema where name = 'app_note'").fetchone():
            return []
        return [(str(what), str(key)) for what, key in db.execute("select what, key from app_note")]


def _results(records: Sequence[Record]) -> list[ToolResult]:
    return [record.result for record in records if isinstance(record, CallEnded)]


@spec("TURN-67")
async def test_a_tool_writes_into_the_sessions_own_database(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with _hosted(SQLiteStore(path), NOTE, note) as host:
        records = await run_turn(host, "s", "hi")
        assert _results(records) == [ToolResult("c1", "noted it")]
        assert _notes(path) == [("it", "s/1/1/c1")]


@spec("TURN-68")
async def test_a_tool_that_raises_has_no_effect_and_the_model_is_informed(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    batch = calls(("fail", '{"what":"no"}'), ("note", '{"what":"yes"}'), ("note", '{"what":3.5}'))
    async with _hosted(SQLiteStore(path), [batch, text("done")], note, fail) as host:
        failed, noted, unfit = sorted(
            _results(await run_turn(host, "s", "hi")), key=lambda result: result.call_id
        )
        assert failed == ToolResult("c1", "ValueError: no\nIts changes were undone.", Outcome.ERROR)
        assert noted.content == "noted yes"
        assert unfit.outcome is Outcome.ERROR
        assert [what for what, _ in _notes(path)] == ["yes"]


@spec("TURN-67")
async def test_a_store_without_transactions_for_tools_is_refused_before_anything_runs() -> None:
    inner = Agent(ScriptedModel([]), tools=[note], name="inner")
    for agent in (inner, Agent(ScriptedModel([]), tools=[sub_agent(inner, description="Notes.")])):
        host = Host(agent, MemoryStore())
        with pytest.raises(ToolDefinitionError, match="note"):
            await host.start()


class Gated(SQLiteStore):
    """A store whose appends wait for the test from the first response with calls on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_waiting = asyncio.Event()
        self.go = asyncio.Event()

    async def append(self, session: str, batch: Batch) -> int:
        if any(isinstance(decode(body), ResponseCompleted) for body in batch.bodies):
            self.is_waiting.set()
            await self.go.wait()
        return await super().append(session, batch)


@spec("TURN-68")
async def test_a_call_cancelled_before_its_transaction_certainly_did_not_happen(
    tmp_path: Path,
) -> None:
    store = Gated(tmp_path / "x.db")
    async with _hosted(store, NOTE, note) as host, asyncio.timeout(60):
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        await store.is_waiting.wait()
        cancelled = asyncio.ensure_future(runner.submit(Cancel()))
        await asyncio.sleep(0)
        store.go.set()
        await cancelled
        records = await records_until_end(runner, after=0)
        assert any(isinstance(record, CallStarted) for record in records)
        assert [result.outcome for result in _results(records)] == [Outcome.CANCELLED]
        assert isinstance(records[-1], TurnEnded)
        assert records[-1].status is TurnStatus.CANCELLED
        assert _notes(tmp_path / "x.db") == []


@spec("TURN-68")
async def test_a_cancel_while_the_tool_writes_comes_after_its_outcome(tmp_path: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    @tool(on_doubt="in_transaction")
    def slow(what: str) -> str:
        """Note something down, slowly."""
        has_begun.set()
        assert may_end.wait(60)
        return str(note.function(what=what))

    async with (
        _hosted(
            SQLiteStore(tmp_path / "x.db"), [calls(("slow", '{"what":"it"}')), text("done")], slow
        ) as host,
        asyncio.timeout(60),
    ):
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        await asyncio.to_thread(has_begun.wait, 10)
        cancelled = asyncio.ensure_future(runner.submit(Cancel()))
        await asyncio.sleep(0)
        may_end.set()
        await cancelled
        records = await records_until_end(runner, after=0)
        kinds = [type(record) for record in records]
        assert kinds.index(CallEnded) < kinds.index(CancelRequested)
        assert _results(records) == [ToolResult("c1", "noted it")]
        assert len(_notes(tmp_path / "x.db")) == 1


class EffectFullOnce(SQLiteStore):
    """A store whose disk is full for the first effect, after it was written."""

    left = 1

    async def append_within(
        self, session: str, work: Callable[[Attempt], Batch], *, expected: int, epoch: int
    ) -> Batch:
        def full(attempt: Attempt) -> Batch:
            batch = work(attempt)
            if self.left:
                self.left -= 1
                raise StoreFullError("no space left: free some and try again")
            return batch

        return await super().append_within(session, full, expected=expected, epoch=epoch)


async def test_an_effect_refused_by_a_full_disk_is_tried_again_and_is_stored_once(tmp_path: Path) -> None:
    store = EffectFullOnce(tmp_path / "x.db")
    async with _hosted(store, NOTE, note) as host:
        records = await run_turn(host, "s", "hi")
        assert _results(records) == [ToolResult("c1", "noted it")]
        assert store.left == 0
        assert len(_notes(tmp_path / "x.db")) == 1


@spec("TURN-67")
@pytest.mark.parametrize("point", [Fault.BEFORE_TOOL, Fault.AFTER_TOOL, Fault.AFTER_APPEND])
@pytest.mark.parametrize("count", range(1, 8))
async def test_effect_and_outcome_agree_after_a_death_at_any_point(
    tmp_path: Path, point: Fault, count: int
) -> None:
    path = tmp_path / "x.db"
    world = FakeWorld(at=World().now())
    world.crash_at(point, count=count)
    batch = calls(("note", '{"what":"a"}'), ("note", '{"what":"b"}'))
    script = [batch, calls(("note", '{"what":"c"}')), text("done")]
    first = SQLiteStore(path)
    async with asyncio.timeout(60):
        host = Host(Agent(ScriptedModel(script), tools=[note]), first, world=world)
        await host.start()
        try:
            await run_turn(host, "s", "hi")
        except MidstreamError:
            assert world.is_dead
        noted = [key for _, key in _notes(path)]
        stored = [decode(each.body) for each in await first.read("s", after=0, limit=1000)]
        ended = [
            f"s/1/{record.response}/{record.result.call_id}"
            for record in stored
            if isinstance(record, CallEnded)
        ]
        assert noted == ended  # also at the moment of the crash
        await first.close()

        async with _hosted(SQLiteStore(path), script, note) as second:
            if not stored:
                return
            runner = await second.session("s")
            records = await records_until_end(runner, after=0)
        assert [result.outcome for result in _results(records)] == [Outcome.OK] * 3
        assert sorted(what for what, _ in _notes(path)) == ["a", "b", "c"]


async def test_a_tool_that_is_no_longer_transactional_is_not_run_after_a_restart(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.db"
    world = FakeWorld(at=World().now())
    world.crash_at(Fault.BEFORE_TOOL)
    store = SQLiteStore(path)
    host = Host(Agent(ScriptedModel(NOTE), tools=[note]), store, world=world)
    await host.start()
    with pytest.raises(MidstreamError, match="Crashed"):
        await run_turn(host, "s", "hi")
    await store.close()
    ran: list[str] = []

    @tool(name="note")
    def other(what: str) -> str:
        """Note something down elsewhere."""
        ran.append(what)
        return what

    async with _hosted(SQLiteStore(path), NOTE, other) as second:
        records = await records_until_end(await second.session("s"), after=0)
        (result,) = _results(records)
        assert result == ToolResult("c1", "'note' is now another tool; the call was not run.", Outcome.ERROR)
        assert ran == []
