"""Calls that a graph requests again: one start, one outcome, and an unambiguous id."""

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
    """A call cache in its own process, with an active run of the thread."""

    def __init__(self, store: Store) -> None:
        super().__init__("graph", store)
        self.run: ActiveRun | None = None

    async def call(self, session: str, call: ToolCall, plan: CallPlan) -> CallEnded | CallContext:
        """Start a call, in a run that starts with the first one."""
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


async def wait_until_free(memory: Memory) -> None:
    """Wait until no process has the thread."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
    assert memory.sessions["t"].node is None


@spec("DRIVEN-8")
async def test_a_recorded_outcome_is_returned_again_and_other_arguments_are_refused() -> None:
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
async def test_an_interrupted_call_is_in_doubt_in_this_process_and_in_the_next() -> None:
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


@spec("DRIVEN-8")
async def test_of_equal_calls_that_start_together_one_runs_and_the_other_gets_its_outcome() -> None:
    first = book(Memory())
    assert first.run is None
    first.run = await first.begin_run("t")
    starting = [asyncio.create_task(first.call("t", CALL, plan())) for _ in range(2)]
    done, (waiting,) = await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    (started,) = [each.result() for each in done]
    assert isinstance(started, CallContext)
    await first.finish(started, ToolResult("a", "1"))
    known = await waiting
    assert isinstance(known, CallEnded)
    assert known.result.content == "1"


async def test_a_policy_reruns_a_call_at_most_twice() -> None:
    memory = Memory()
    runs = []
    for _ in range(5):
        started = await book(memory).call("t", CALL, plan(policy=OnDoubt.RERUN))
        runs.append(started.run if isinstance(started, CallContext) else 0)
    assert runs == [1, 2, 3, 0, 0]


async def test_a_call_that_waits_for_a_person_starts_again() -> None:
    memory = Memory()
    first = book(memory)
    started = await first.call("t", CALL, plan())
    assert isinstance(started, CallContext)
    await first.finish(started, ToolResult("a", "waits", Outcome.CANCELLED), SUSPENDED)
    again = await book(memory).call("t", CALL, plan())
    assert isinstance(again, CallContext)


async def test_sibling_calls_start_in_one_append_and_the_journal_folds() -> None:
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


async def test_runs_of_an_old_thread_are_separate_epochs(tmp_path: Path) -> None:
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
async def test_a_thread_belongs_to_the_process_with_the_active_run() -> None:
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
    await wait_until_free(memory)
    there = await other.call("t", sibling, plan(sibling))
    assert isinstance(there, CallContext)
    await other.finish(there, ToolResult("b", "2"))
    await other.end()
    await wait_until_free(memory)
    known = await first.call("t", sibling, plan(sibling))  # the records of the other process are read here
    assert isinstance(known, CallEnded)
    assert known.result.content == "2"
    await other.close()


@spec("DRIVEN-12")
async def test_a_call_of_a_finished_run_is_refused() -> None:
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


async def test_a_cancelled_run_waits_for_its_calls() -> None:
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
async def test_simultaneous_outcomes_end_the_turn() -> None:
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


async def test_an_outcome_may_arrive_after_the_end_of_its_run() -> None:
    memory = Memory()
    asked = book(memory)
    started = await asked.call("t", CALL, plan())
    assert isinstance(started, CallContext)
    assert asked.run is not None
    ending = asyncio.create_task(asked.end_run("t", asked.run, is_complete=False))
    await asyncio.sleep(0)
    ending.cancel()  # it waits for the call, and not longer than its own task
    await asyncio.wait([ending])
    await wait_until_free(memory)
    await asked.finish(started, ToolResult("a", "late"))
    await wait_until_free(memory)
    assert status_of(memory) == ("completed", 1)
    known = await book(memory).call("t", CALL, plan())
    assert isinstance(known, CallEnded)
    assert known.result.content == "late"


def status_of(memory: Memory) -> tuple[str, int]:
    """Return the thread's status in a listing, and its number of turns."""
    mark = memory.sessions["t"].mark
    return mark.status, mark.turns


async def test_a_thread_with_only_finished_calls_is_listed_as_completed() -> None:
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


async def test_a_thread_with_a_waiting_call_or_a_call_in_doubt_is_not_completed() -> None:
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
    assert isinstance(
        await book(memory).call("t", CALL, plan()), CallEnded
    )  # the outcome is unknown, and recorded as such
    assert status_of(memory) == ("completed", 1)


@spec("DRIVEN-8")
async def test_a_complete_run_settles_calls_that_it_did_not_request_again() -> None:
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
    assert status_of(memory) == ("waiting", 1)  # the waiting call may be requested later
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
