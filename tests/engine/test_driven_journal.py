"""The journal of a foreign loop: one task, in order, with a claim for each run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from midstream.engine.driven_journal import DrivenJournal, decision_of
from midstream.environment import World
from midstream.errors import LeaseHeldError
from midstream.history.messages import UserMessage
from midstream.session.driven_turn import Begin, EndTurn, RequestModelResponse
from midstream.session.records import EpochStarted, Record, TurnStatus, decode
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.fake_worlds import SETTLE_TURNS, FakeWorld

BEGIN = decision_of(Begin(UserMessage.of("go"), "loop"))
END = decision_of(EndTurn(TurnStatus.COMPLETED, {}))


async def journal_of(memory: Memory) -> DrivenJournal:
    store = MemoryStore(memory)
    await store.open()
    journal = DrivenJournal(store, "s", World(), node="node-1")
    await journal.load()
    return journal


def kinds(memory: Memory) -> list[str]:
    return [type(decode(each.body)).__name__ for each in memory.sessions["s"].records]


async def test_a_run_starts_after_all_writes_of_the_previous_one() -> None:
    memory = Memory()
    journal = await journal_of(memory)
    received: list[tuple[int, str]] = []
    journal.on_records = lambda records: received.extend(
        (epoch, type(each).__name__) for epoch, each in records
    )
    await journal.begin_run()
    await journal.submit(BEGIN)
    ends, begins, asks = (
        asyncio.create_task(each)
        for each in (
            journal.submit(decision_of(RequestModelResponse(1, {}))),
            journal.begin_run(),
            journal.submit(END),
        )
    )
    await asyncio.gather(ends, begins, asks)
    assert kinds(memory) == [
        *("EpochStarted", "MessageAccepted", "AttemptStarted"),
        *("EpochStarted", "TurnEnded"),
    ]
    assert received == [
        *((1, "EpochStarted"), (1, "MessageAccepted"), (1, "AttemptStarted")),
        *((2, "EpochStarted"), (2, "TurnEnded")),
    ]


async def test_a_run_without_writes_leaves_no_record() -> None:
    memory = Memory()
    journal = await journal_of(memory)
    await journal.begin_run()
    journal.release_when_idle()
    await journal.settle()
    assert (memory.sessions["s"].records, memory.sessions["s"].node) == ([], None)


async def test_a_run_of_another_process_is_refused_and_changes_nothing() -> None:
    memory = Memory()
    first, second = await journal_of(memory), await journal_of(memory)
    await first.begin_run()
    with pytest.raises(LeaseHeldError):
        await second.begin_run()
    first.release_when_idle()
    await first.settle()
    await second.begin_run()
    await second.submit(BEGIN)
    assert second.is_usable


class _LateStore(MemoryStore):
    """Detects a death a moment later."""

    death_noticed_s = 5.0


@pytest.mark.parametrize("is_dead", [True, False])
async def test_a_run_waits_until_the_death_of_the_last_process_can_be_detected(*, is_dead: bool) -> None:
    memory, world = Memory(), FakeWorld()
    first, store = await journal_of(memory), _LateStore(memory)
    await first.begin_run()
    await store.open()
    second = DrivenJournal(store, "s", world, node="node-2")
    await second.load()
    running = asyncio.create_task(second.begin_run())
    await world.advance(1.0)
    assert not running.done()
    if is_dead:
        memory.kill(memory.sessions["s"].node or "")
    for _ in range(100):
        await world.advance(0.1)
    assert running.done()
    if is_dead:
        await running
    else:
        with pytest.raises(LeaseHeldError):
            await running


async def test_records_of_others_are_received_with_the_claim() -> None:
    memory = Memory()
    first, second = await journal_of(memory), await journal_of(memory)
    received: list[Record] = []

    def collect(records: Sequence[tuple[int, Record]]) -> None:
        received.extend(each for _, each in records)

    second.on_records = collect
    await first.begin_run()
    await first.submit(BEGIN)
    first.release_when_idle()
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
    await second.begin_run()
    assert [type(each) for each in received][:1] == [EpochStarted]
    assert second.state.is_live
