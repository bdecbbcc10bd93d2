"""Calls that a graph asks for again: one start, one outcome, and an id that means one thing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midstream.engine.active_runs import ActiveRun
from midstream.engine.call_cache import OVERTAKEN_CONTENT, CallBook
from midstream.errors import CallReusedError, LeaseHeldError, SessionBusyError, UsageError
from midstream.history.messages import Outcome, ToolCall, ToolResult
from midstream.session.calls import SUSPENDED, UNKNOWN_CONTENT, CallPlan, OnDoubt, digest_of
from midstream.session.records import CallEnded, CallStarted, decode
from midstream.session.session import fold
from midstream.store.contract import Store
from midstream.store.memory import Memory, MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing.fake_worlds import SETTLE_TURNS
from midstream.tools.function_tools import CallContext
from tests.spec import spec

CALL = ToolCall("a", "work", "{}")


def plan(call: ToolCall = CALL, policy: OnDoubt = OnDoubt.UNKNOWN) -> CallPlan:
    return CallPlan(call.id, digest_of(call.name, call.arguments), on_doubt=policy)


class Book(CallBook):
    """A book in a process of its own, in which a run of the thread is at work."""

    def __init__(self, store: Store) -> None:
        super().__init__("graph", store)
        self.run: ActiveRun | None = None

    async def call(self, session: str, call: ToolCall, plan: CallPlan) -> CallEnded | CallContext:
        """Start a call, in a run that is begun with the first."""
        if self.run is None:
            self.run = await self.begin_run(session)
        return await self.start(session, self.run, call, plan)

    async def end(self, *, is_complete: bool = True) -> None:
        """End the run."""
        assert self.run is not None
        await self.end_run("t", self.run, is_complete=is_complete)
        self.run = None


def book(memory: Memory) -> Book:
    memory.living.clear()
    return Book(MemoryStore(memory))


async def freed(memory: Memory) -> None:
    """Wait until no process has the thread."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
    assert memory.sessions["t"].node is None


@spec("DRIVEN-8")
async def test_an_outcome_is_given_again_and_other_arguments_are_refused() -> None:
    memory = Memory()
    started = await (first := book(memory)).call("t", CALL, plan())
    assert isinstance(started, CallContext)
    assert started.effect_key == "t/1/1/a"
    await first.finish(started, ToolResult("a", "1"), "n")
    for asked in (first, book(memory)):
        known = await asked.call("t", CALL, plan())
        assert isinstance(known, CallEnded)
        assert (known.result.content, known.native) == ("1", "n")
        other = ToolCall("a", "work", '{"x":1}')
        with pytest.raises(CallReusedError):
            await asked.call("t", other, plan(other))


@spec("DRIVEN-8")
async def test_a_call_that_was_cut_is_in_doubt_in_this_process_and_in_the_next() -> None:
    memory = Memory()
    first = book(memory)
    started = await first.call("t", CALL, plan())
    assert isinstance(started, CallContext)
    waiting = asyncio.create_task(first.call("t", CALL, plan()))
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
    assert not waiting.done()
    first.leave_in_doubt(started)
    assert isinstance(await waiting, CallEnded)
    for asked in (first, book(memory)):
        known = await asked.call("t", CALL, plan())
        assert isinstance(known, CallEnded)
        assert (known.result.content, known.result.outcome) == (UNKNOWN_CONTENT, Outcome.UNKNOWN)


async def test_a_policy_runs_it_again_at_most_twice() -> None:
    memory = Memory()
    runs = []
    for _ in range(5):
        started = await book(memory).call("t", CALL, plan(policy=OnDoubt.RERUN))
        runs.append(started.run if isinstance(started, CallContext) else 0)
    assert runs == [1, 2, 3, 0, 0]


async def test_a_call_that_waits_for_somebody_starts_again() -> None:
    memory = Memory()
    first = book(memory)
    started = await first.call("t", CALL, plan())
    assert isinstance(started, CallContext)
    await first.finish(started, ToolResult("a", "waits", Outcome.CANCELLED), SUSPENDED)
    again = await book(memory).call("t", CALL, plan())
    assert isinstance(again, CallContext)


async def test_siblings_start_in_one_append_and_the_journal_folds() -> None:
    memory = Memory()
    calls = [ToolCall(name, "work", "{}") for name in "abc"]
    asked = book(memory)
    asked.run = await asked.begin_run("t")
    started = await asyncio.gather(*(asked.call("t", call, plan(call)) for call in calls))
    for each in reversed(started):
        assert isinstance(each, CallContext)
        await asked.finish(each, ToolResult(each.call_id, "1"))
    records = [(each.epoch, decode(each.body)) for each in memory.sessions["t"].records]
    assert [record.response for _, record in records if isinstance(record, CallStarted)] == [1, 2, 3]
    assert fold(records[:-1]).driver == "graph"
    assert not memory.sessions["t"].mark.is_live


async def test_runs_of_an_old_thread_are_epochs_of_their_own(tmp_path: Path) -> None:
    calls = [ToolCall(name, "work", "{}") for name in "abc"]
    for policy in (OnDoubt.UNKNOWN, OnDoubt.RERUN):
        asked = CallBook("graph", SQLiteStore(tmp_path / "calls.db"))
        run = await asked.begin_run("t")
        await asyncio.gather(*(asked.start("t", run, call, plan(call, policy)) for call in calls))
        await asked.close()
    store = SQLiteStore(tmp_path / "calls.db")
    await store.open()
    assert [each.epoch async for each in store.list()] == [2]
    await store.close()


@spec("DRIVEN-12")
async def test_a_thread_belongs_to_the_process_whose_run_is_at_work() -> None:
    memory = Memory()
    first = book(memory)
    started = await first.call("t", CALL, plan())
    assert isinstance(started, CallContext)
    await first.finish(started, ToolResult("a", "1"))
    other, sibling = Book(MemoryStore(memory)), ToolCall("b", "work")
    with pytest.raises(LeaseHeldError):  # also between its calls
        await other.begin_run("t")
    with pytest.raises(SessionBusyError):
        await first.begin_run("t")
    await first.end()
    await freed(memory)
    there = await other.call("t", sibling, plan(sibling))
    assert isinstance(there, CallContext)
    await other.finish(there, ToolResult("b", "2"))
    await other.end()
    await freed(memory)
    known = await first.call("t", sibling, plan(sibling))  # what the other one did is known here
    assert isinstance(known, CallEnded)
    assert known.result.content == "2"
    await other.close()


@spec("DRIVEN-12")
async def test_a_call_of_a_run_that_has_ended_is_refused() -> None:
    memory = Memory()
    asked = book(memory)
    run = await asked.begin_run("t")
    await asked.end_run("t", run, is_complete=False)
    with pytest.raises(UsageError, match="has ended"):
        await asked.start("t", run, CALL, plan())
    later = await asked.begin_run("t")
    with pytest.raises(UsageError, match="has ended"):
        await asked.start("t", run, CALL, plan())
    assert isinstance(await asked.start("t", later, CALL, plan()), CallContext)


async def test_a_run_that_was_cut_waits_for_its_calls() -> None:
    asked = book(Memory())
    started = await asked.call("t", CALL, plan())
    assert isinstance(started, CallContext)
    ending = asyncio.create_task(asked.end(is_complete=False))
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
    assert not ending.done()
    asked.leave_in_doubt(started)
    await ending


@spec("DRIVEN-8")
async def test_outcomes_that_come_at_once_end_the_turn() -> None:
    memory = Memory()
    asked = book(memory)
    asked.run = await asked.begin_run("t")
    calls = [ToolCall(name, "work", "{}") for name in "abc"]
    started = await asyncio.gather(*(asked.call("t", call, plan(call)) for call in calls))
    await asyncio.gather(
        *(
            asked.finish(each, ToolResult(each.call_id, "1"))
            for each in started
            if isinstance(each, CallContext)
        )
    )
    assert status_of(memory) == ("completed", 1)


async def test_an_outcome_may_come_after_the_end_of_its_run() -> None:
    memory = Memory()
    asked = book(memory)
    started = await asked.call("t", CALL, plan())
    assert isinstance(started, CallContext)
    assert asked.run is not None
    ending = asyncio.create_task(asked.end_run("t", asked.run, is_complete=False))
    await asyncio.sleep(0)
    ending.cancel()  # it waits for the call, and not longer than its own task
    await asyncio.wait([ending])
    await freed(memory)
    await asked.finish(started, ToolResult("a", "late"))
    await freed(memory)
    assert status_of(memory) == ("completed", 1)
    known = await book(memory).call("t", CALL, plan())
    assert isinstance(known, CallEnded)
    assert known.result.content == "late"


def status_of(memory: Memory) -> tuple[str, int]:
    """Return what a listing shows of the thread: its status and how many turns it had."""
    mark = memory.sessions["t"].mark
    return mark.status, mark.turns


async def test_a_thread_whose_calls_have_all_ended_is_listed_as_completed() -> None:
    memory = Memory()
    asked = book(memory)
    sibling, later = ToolCall("b", "work"), ToolCall("c", "work")
    first, second = [await asked.call("t", call, plan(call)) for call in (CALL, sibling)]
    assert isinstance(first, CallContext)
    assert isinstance(second, CallContext)
    await asked.finish(first, ToolResult("a", "1"))
    assert status_of(memory) == ("running", 1)
    await asked.finish(second, ToolResult("b", "2"))
    assert status_of(memory) == ("completed", 1)

    third = await asked.call("t", later, plan(later))
    assert isinstance(third, CallContext)
    assert (third.turn, third.response, status_of(memory)) == (2, 1, ("running", 2))
    known = await asked.call("t", CALL, plan())
    assert isinstance(known, CallEnded)
    await asked.finish(third, ToolResult("c", "3"))
    assert status_of(memory) == ("completed", 2)
    assert isinstance(await book(memory).call("t", later, plan(later)), CallEnded)
    fold([(each.epoch, decode(each.body)) for each in memory.sessions["t"].records])


async def test_a_thread_with_a_call_that_waits_or_is_in_doubt_is_not_over() -> None:
    memory = Memory()
    asked = book(memory)
    started = await asked.call("t", CALL, plan())
    assert isinstance(started, CallContext)
    await asked.finish(started, ToolResult("a", "waits", Outcome.CANCELLED), SUSPENDED)
    assert status_of(memory) == ("waiting", 1)
    await asked.end()
    assert status_of(memory) == ("waiting", 1)
    again = await asked.call("t", CALL, plan())
    assert isinstance(again, CallContext)
    asked.leave_in_doubt(again)
    await asked.end(is_complete=False)
    assert status_of(memory) == ("running", 1)
    assert isinstance(await book(memory).call("t", CALL, plan()), CallEnded)  # unknown, and told so
    assert status_of(memory) == ("completed", 1)


@spec("DRIVEN-8")
async def test_a_complete_run_settles_what_it_did_not_request_again() -> None:
    memory = Memory()
    asked, waiting = book(memory), ToolCall("b", "work")
    started = await asked.call("t", CALL, plan())
    suspended = await asked.call("t", waiting, plan(waiting))
    assert isinstance(started, CallContext)
    assert isinstance(suspended, CallContext)
    await asked.finish(suspended, ToolResult("b", "waits", Outcome.CANCELLED), SUSPENDED)
    asked = book(memory)
    asked.run = await asked.begin_run("t")
    await asked.end()
    assert status_of(memory) == ("waiting", 1)  # the call that waits may be requested later
    asked.run = await asked.begin_run("t")
    overtaken = asked.end_overtaken("t", "b")
    assert overtaken is not None
    assert asked.end_overtaken("t", "c") is None
    await asked.end()
    assert status_of(memory) == ("completed", 1)
    for call, content in ((CALL, UNKNOWN_CONTENT), (waiting, OVERTAKEN_CONTENT)):
        known = await asked.call("t", call, plan(call))
        assert isinstance(known, CallEnded)
        assert known.result.content == content
    fold([(each.epoch, decode(each.body)) for each in memory.sessions["t"].records])
