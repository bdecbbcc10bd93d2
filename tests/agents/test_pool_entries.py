from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.agents.pool import Pooled, PoolLimits
from midstream.agents.pool_entries import POOL_NAMESPACE, Eviction, PoolEntries, key_of, session_of
from midstream.agents.pool_records import PoolRecord, confirm, create_fresh, with_answer
from midstream.errors import EntryMovedError, StoreBusyError, UsageError
from midstream.history.messages import History, UserMessage
from midstream.models.fingerprint import Outline, outline
from midstream.models.responses import ModelRequest
from midstream.store.memory import MemoryStore
from midstream.testing import FakeWorld
from midstream.testing.scripted_upstream import ScriptedUpstream
from tests.spec import spec


class FailingKeyValue(MemoryStore):
    """A store that fails on demand."""

    is_out_of_order = False

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        if self.is_out_of_order:
            raise StoreBusyError("locked")
        return await super().kv_put(namespace, key, body, expected=expected, at=at)


async def test_a_claimed_entry_belongs_to_the_claim_until_its_release() -> None:
    _store, entries, world = await _open_entries()
    claim = await entries.claim("s", await entries.find("s"), _pending_record(world))
    found = await entries.find("s")
    assert found.record is not None
    assert (found.record.run != "", found.record.is_resumable) == (True, False)
    await claim.release(_answered_record(world))
    found = await entries.find("s")
    assert found.record == _answered_record(world)
    assert found.record.is_resumable


async def test_of_two_claims_on_one_entry_one_succeeds() -> None:
    _, entries, world = await _open_entries()
    found = await entries.find("s")
    await entries.claim("s", found, _pending_record(world))
    with pytest.raises(EntryMovedError):
        await entries.claim("s", found, _pending_record(world))


async def test_a_lost_claim_writes_and_removes_nothing() -> None:
    _store, entries, world = await _open_entries()
    first = await entries.claim("s", await entries.find("s"), _pending_record(world))
    second = await entries.claim("s", await entries.find("s"), _pending_record(world))
    await first.hold(confirm(_pending_record(world), "agent-1", now=world.now()))
    assert first.is_lost
    await first.release(_answered_record(world))
    await first.drop()
    await second.release(_answered_record(world, agent="agent-2"))
    assert not second.is_lost
    found = await entries.find("s")
    assert found.record is not None
    assert found.record.agent == "agent-2"


async def test_a_side_call_noted_meanwhile_does_not_take_the_entry_over() -> None:
    _, entries, world = await _open_entries()
    claim = await entries.claim("s", await entries.find("s"), _pending_record(world))
    await entries.note_aside("s", await entries.find("s"), _outline("a title", system="titles"))
    await claim.release(_answered_record(world))
    found = await entries.find("s")
    assert not claim.is_lost
    assert found.record is not None
    assert [aside.users for aside in found.record.asides] == [1]


async def test_a_claim_is_dropped_even_after_a_side_call_was_noted() -> None:
    _, entries, world = await _open_entries()
    claim = await entries.claim("s", await entries.find("s"), _pending_record(world))
    await entries.note_aside("s", await entries.find("s"), _outline("a title", system="titles"))
    await claim.drop()
    assert (await entries.find("s")).version == 0


async def test_an_entry_whose_release_cannot_be_written_is_not_resumable() -> None:
    store, entries, world = await _open_entries()
    claim = await entries.claim("s", await entries.find("s"), _pending_record(world))
    store.is_out_of_order = True
    await claim.release(_answered_record(world))
    found = await entries.find("s")
    assert found.record is not None
    assert not found.record.is_resumable


async def test_an_entry_that_is_unreadable_or_too_old_is_unknown_and_can_be_replaced() -> None:
    store, entries, world = await _open_entries()
    await store.kv_put(POOL_NAMESPACE, key_of("up", "s"), b"nothing", expected=0, at=1.0)
    found = await entries.find("s")
    assert (found.version, found.record) == (1, None)
    claim = await entries.claim("s", found, _pending_record(world))
    await claim.release(_answered_record(world))
    await world.advance(8 * 24 * 3600.0)
    assert (await entries.find("s")).record is None


async def test_pruning_returns_our_own_free_agents_and_removes_old_entries_of_all() -> None:
    store, entries, world = await _open_entries()
    others = PoolEntries(store, "other", world)
    for session in ("free", "held"):
        claim = await entries.claim(
            session, await entries.find(session), _answered_record(world, agent=session)
        )
        if session == "free":
            await claim.release(_answered_record(world, agent=session))
    theirs = replace(_answered_record(world), upstream="other")
    claim = await others.claim("s", await others.find("s"), theirs)
    await claim.release(theirs)
    await world.advance(8 * 24 * 3600.0)
    assert await entries.prune() == ("free",)
    assert await store.kv_list(POOL_NAMESPACE) == []


async def test_only_unwanted_records_of_this_upstream_are_dropped() -> None:
    store, entries, world = await _open_entries()
    for session in ("a", "b"):
        claim = await entries.claim(session, await entries.find(session), _pending_record(world))
        await claim.release(_answered_record(world, agent=session))
    await entries.drop_where(lambda record: record.agent == "a")
    assert [kept.key for kept in await store.kv_list(POOL_NAMESPACE)] == ["up/b"]


async def test_the_learned_properties_of_an_upstream_are_stored() -> None:
    _, entries, _ = await _open_entries()
    for _ in range(3):
        await entries.note_resume(age_s=600.0, is_alive=False)
    assert (await entries.retention()).limit_s(now=1_000_000.0) == 600.0


def test_a_key_contains_the_upstream_and_the_session() -> None:
    record = create_fresh(_outline("x"), upstream="claude:opus", now=1.0)
    assert session_of(key_of("claude:opus", "a/b"), record) == "a/b"


async def _open_entries() -> tuple[FailingKeyValue, PoolEntries, FakeWorld]:
    store, world = FailingKeyValue(), FakeWorld()
    await store.open()
    return store, PoolEntries(store, "up", world), world


def _outline(text: str, *, system: str = "") -> Outline:
    return outline(system, (), (), {}, History((UserMessage.of(text),)))


def _pending_record(world: FakeWorld) -> PoolRecord:
    return create_fresh(_outline("one"), upstream="up", now=world.now())


def _answered_record(world: FakeWorld, *, agent: str = "agent-1") -> PoolRecord:
    asked = confirm(_pending_record(world), agent, now=world.now())
    return with_answer(asked, agent=agent, mark="", open_calls=(), now=world.now())


@spec("REUSE-25")
async def test_the_limits_are_settings_and_each_eviction_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, _, world = await _open_entries()
    entries = PoolEntries(store, "up", world, age_max_s=60.0, records_max=2)
    for session in ("a", "b", "c"):
        claim = await entries.claim(session, await entries.find(session), _pending_record(world))
        await claim.release(_answered_record(world, agent=session))
        await world.advance(1.0)
    assert await entries.prune() == ("a",)
    assert entries.evictions == {Eviction.COUNT: 1}
    await world.advance(60.0)
    found = await entries.find("b")
    assert found.record is None
    await entries.claim("b", found, _pending_record(world))  # a fresh agent replaces one that is too old
    assert await entries.prune() == ("c",)
    assert entries.evictions == {Eviction.COUNT: 1, Eviction.AGE: 2}
    assert [record.limit for record in caplog.records] == ["count", "age", "age"]  # type: ignore[attr-defined]


@spec("REUSE-25")
async def test_a_pool_passes_its_limits_on_and_counts_their_cost() -> None:
    world, store = FakeWorld(), MemoryStore()
    await store.open()
    pool = Pooled(ScriptedUpstream(), store, limits=PoolLimits(records_max=1), world=world)
    for session in ("a", "b"):
        request = ModelRequest("", History((UserMessage.of("hi"),)), session=session)
        async for _ in pool.stream(request):
            pass
        await world.advance(1.0)
    assert [kept.key for kept in await store.kv_list(POOL_NAMESPACE)] == ["scripted/b"]
    assert pool.counters.evictions == {Eviction.COUNT: 1}
    await pool.aclose()


@pytest.mark.parametrize("limits", [{"records_max": 0}, {"record_age_max_s": 0.0}])
def test_a_limit_of_zero_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        PoolLimits(**limits)  # type: ignore[arg-type]
