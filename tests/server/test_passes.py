"""Passes: good for what they were issued for, once or until they end, and not to be read from the store."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from midstream.errors import UnauthorizedError
from midstream.server.passes import NAMESPACE, SWEEP_S, Kind, Passes, key_of
from midstream.server.subjects import Subject
from midstream.store.memory import MemoryStore
from midstream.testing.worlds import FakeWorld

ADA = Subject("ada", tenant="acme")


async def _passes() -> tuple[Passes, MemoryStore, FakeWorld]:
    store, world = MemoryStore(), FakeWorld()
    await store.open()
    return Passes(store, world), store, world


async def test_a_pass_is_taken_once_however_many_try() -> None:
    passes, _, _ = await _passes()
    word = await passes.issue(Kind.TICKET, ADA, for_s=30, session="s1", action="read", origin="app.example")
    tries = await asyncio.gather(*(passes.take(Kind.TICKET, word) for _ in range(5)), return_exceptions=True)
    taken = [each for each in tries if not isinstance(each, BaseException)]
    assert [(one.subject, one.session, one.action, one.origin) for one in taken] == [
        (ADA, "s1", "read", "app.example")
    ]
    assert sum(isinstance(each, UnauthorizedError) for each in tries) == 4


async def test_a_pass_of_one_kind_is_none_of_another_and_ends_in_time() -> None:
    passes, _, world = await _passes()
    word = await passes.issue(Kind.COOKIE, ADA, for_s=10)
    for kind in Kind:
        if kind is not Kind.COOKIE:
            with pytest.raises(UnauthorizedError):
                await passes.show(kind, word)
    assert (await passes.show(Kind.COOKIE, word)).subject == ADA
    await world.advance(10)
    with pytest.raises(UnauthorizedError):
        await passes.show(Kind.COOKIE, word)


async def test_a_pass_does_not_outlive_the_credential_it_was_issued_for() -> None:
    passes, _, world = await _passes()
    word = await passes.issue(Kind.COOKIE, Subject("ada", expires_at=world.now() + 5), for_s=1000)
    await world.advance(5)
    with pytest.raises(UnauthorizedError):
        await passes.show(Kind.COOKIE, word)


async def test_the_store_has_no_word_that_opens_anything_and_forgets_what_has_ended() -> None:
    passes, store, world = await _passes()
    words = [await passes.issue(kind, ADA, for_s=10) for kind in Kind]
    kept = await store.kv_list(NAMESPACE)
    assert {each.key for each in kept} == {key_of(word) for word in words}
    assert [word for word in words for each in kept if word.encode() in each.body or word in each.key] == []
    await world.advance(SWEEP_S)
    last = await passes.issue(Kind.TICKET, ADA, for_s=10)
    assert [each.key for each in await store.kv_list(NAMESPACE)] == [key_of(last)]


async def test_viewers_passes_are_withdrawn_by_session() -> None:
    passes, _, _ = await _passes()
    words = {
        name: await passes.issue(Kind.VIEWER, replace(ADA, session=name), for_s=10) for name in ("s1", "s2")
    }
    cookie = await passes.issue(Kind.COOKIE, replace(ADA, session="s1"), for_s=10)  # of that viewer
    own = await passes.issue(Kind.TICKET, ADA, for_s=10, session="s1")
    assert await passes.withdraw_viewers("s1") == 2
    with pytest.raises(UnauthorizedError):
        await passes.show(Kind.COOKIE, cookie)
    await passes.show(Kind.TICKET, own)
    with pytest.raises(UnauthorizedError):
        await passes.show(Kind.VIEWER, words["s1"])
    await passes.show(Kind.VIEWER, words["s2"])
    await passes.withdraw("nothing")
