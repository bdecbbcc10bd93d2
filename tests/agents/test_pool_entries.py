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


class Moody(MemoryStore):
    """A store that is out of order when it is told to be."""

    is_out_of_order = False

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        if self.is_out_of_order:
            raise StoreBusyError("locked")
        return await super().kv_put(namespace, key, body, expected=expected, at=at)


async def test_a_claimed_entry_is_nobody_elses_until_it_is_let_go() -> None:
    _store, entries, world = await _made()
    claim = await entries.claim("s", await entries.find("s"), _asked(world))
    found = await entries.find("s")
    assert found.record is not None
    assert (found.record.run != "", found.record.is_resumable) == (True, False)
    await claim.release(_told(world))
    found = await entries.find("s")
    assert found.record == _told(world)
    assert found.record.is_resumable


async def test_of_two_who_claim_one_entry_one_has_it() -> None:
    _, entries, world = await _made()
    found = await entries.find("s")
    await entries.claim("s", found, _asked(world))
    with pytest.raises(EntryMovedError):
        await entries.claim("s", found, _asked(world))


async def test_who_was_taken_over_writes_and_removes_nothing_any_more() -> None:
    _store, entries, world = await _made()
    first = await entries.claim("s", await entries.find("s"), _asked(world))
    second = await entries.claim("s", await entries.find("s"), _asked(world))
    await first.hold(confirm(_asked(world), "agent-1", now=world.now()))
    assert first.is_lost
    await first.release(_told(world))
    await first.drop()
    await second.release(_told(world, agent="agent-2"))
    assert not second.is_lost
    found = await entries.find("s")
    assert found.record is not None
    assert found.record.agent == "agent-2"


async def test_a_side_call_that_is_noted_meanwhile_takes_nothing_over() -> None:
    _, entries, world = await _made()
    claim = await entries.claim("s", await entries.find("s"), _asked(world))
    await entries.note_aside("s", await entries.find("s"), _outline("a title", system="titles"))
    await claim.release(_told(world))
    found = await entries.find("s")
    assert not claim.is_lost
    assert found.record is not None
    assert [aside.users for aside in found.record.asides] == [1]


async def test_a_claim_is_dropped_also_after_a_side_call_was_noted() -> None:
    _, entries, world = await _made()
    claim = await entries.claim("s", await entries.find("s"), _asked(world))
    await entries.note_aside("s", await entries.find("s"), _outline("a title", system="titles"))
    await claim.drop()
    assert (await entries.find("s")).version == 0


async def test_a_word_that_cannot_be_written_leaves_the_entry_to_nobody() -> None:
    store, entries, world = await _made()
    claim = await entries.claim("s", await entries.find("s"), _asked(world))
    store.is_out_of_order = True
    await claim.release(_told(world))
    found = await entries.find("s")
    assert found.record is not None
    assert not found.record.is_resumable


async def test_an_entry_that_cannot_be_read_or_is_too_old_is_not_known_and_can_be_replaced() -> None:
    store, entries, world = await _made()
    await store.kv_put(POOL_NAMESPACE, key_of("up", "s"), b"nothing", expected=0, at=1.0)
    found = await entries.find("s")
    assert (found.version, found.record) == (1, None)
    claim = await entries.claim("s", found, _asked(world))
    await claim.release(_told(world))
    await world.advance(8 * 24 * 3600.0)
    assert (await entries.find("s")).record is None


async def test_pruning_names_our_own_free_agents_and_removes_the_old_of_all() -> None:
    store, entries, world = await _made()
    others = PoolEntries(store, "other", world)
    for session in ("free", "held"):
        claim = await entries.claim(session, await entries.find(session), _told(world, agent=session))
        if session == "free":
            await claim.release(_told(world, agent=session))
    theirs = replace(_told(world), upstream="other")
    claim = await others.claim("s", await others.find("s"), theirs)
    await claim.release(theirs)
    await world.advance(8 * 24 * 3600.0)
    assert await entries.prune() == ("free",)
    assert await store.kv_list(POOL_NAMESPACE) == []


async def test_only_unwanted_records_of_this_upstream_are_dropped() -> None:
    store, entries, world = await _made()
    for session in ("a", "b"):
        claim = await entries.claim(session, await entries.find(session), _asked(world))
        await claim.release(_told(world, agent=session))
    await entries.drop_where(lambda record: record.agent == "a")
    assert [kept.key for kept in await store.kv_list(POOL_NAMESPACE)] == ["up/b"]


async def test_what_is_learned_of_an_upstream_is_kept() -> None:
    _, entries, _ = await _made()
    for _ in range(3):
        await entries.note_resume(age_s=600.0, is_alive=False)
    assert (await entries.retention()).limit_s(now=1_000_000.0) == 600.0


def test_a_key_names_the_upstream_and_the_session() -> None:
    record = create_fresh(_outline("x"), upstream="claude:opus", now=1.0)
    assert session_of(key_of("claude:opus", "a/b"), record) == "a/b"


async def _made() -> tuple[Moody, PoolEntries, FakeWorld]:
    store, world = Moody(), FakeWorld()
    await store.open()
    return store, PoolEntries(store, "up", world), world


def _outline(text: str, *, system: str = "") -> Outline:
    return outline(system, (), (), {}, History((UserMessage.of(text),)))


def _asked(world: FakeWorld) -> PoolRecord:
    return create_fresh(_outline("one"), upstream="up", now=world.now())


def _told(world: FakeWorld, *, agent: str = "agent-1") -> PoolRecord:
    asked = confirm(_asked(world), agent, now=world.now())
    return with_answer(asked, agent=agent, mark="", open_calls=(), now=world.now())


@spec("REUSE-25")
async def test_the_limits_are_settings_and_each_eviction_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, _, world = await _made()
    entries = PoolEntries(store, "up", world, age_max_s=60.0, records_max=2)
    for session in ("a", "b", "c"):
        claim = await entries.claim(session, await entries.find(session), _asked(world))
        await claim.release(_told(world, agent=session))
        await world.advance(1.0)
    assert await entries.prune() == ("a",)
    assert entries.evictions == {Eviction.COUNT: 1}
    await world.advance(60.0)
    found = await entries.find("b")
    assert found.record is None
    await entries.claim("b", found, _asked(world))  # a fresh agent takes the place of one that is too old
    assert await entries.prune() == ("c",)
    assert entries.evictions == {Eviction.COUNT: 1, Eviction.AGE: 2}
    assert [record.limit for record in caplog.records] == ["count", "age", "age"]  # type: ignore[attr-defined]


@spec("REUSE-25")
async def test_a_pool_hands_its_limits_on_and_counts_what_they_cost() -> None:
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
def test_a_limit_that_keeps_nothing_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        PoolLimits(**limits)  # type: ignore[arg-type]
