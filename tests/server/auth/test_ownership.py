"""Rows of owners: one for each session, first come, and none across tenants."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import AccessError, LimitReachedError, SessionNotFoundError
from midstream.server.auth import ownership as rights_module
from midstream.server.auth.ownership import READERS_MAX, Ownership, is_of_tenant, name_in_store, name_outside
from midstream.server.auth.principals import Principal
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld

NAMES = st.text("ab:.-_1", min_size=1, max_size=12)


async def _ownership(store: MemoryStore | None = None) -> Ownership:
    store = store or MemoryStore()
    await store.open()
    return Ownership(store, FakeWorld())


async def test_one_of_two_concurrent_callers_owns_a_session_until_it_is_deleted() -> None:
    store = MemoryStore()
    ownership = await _ownership(store)
    ada, bob = Principal("ada"), Principal("bob")
    owners = await asyncio.gather(ownership.claim("s1", ada), ownership.claim("s1", bob))
    assert owners[0] == owners[1] == await ownership.owner_of("s1") == await ownership.owner_of("s1::1.1.0")
    await store.claim("s1", at=1.0)
    await store.delete("s1")
    assert await ownership.owner_of("s1") is None
    assert (await ownership.claim("s1", bob)).principal == "bob"


async def test_readers_of_a_session_are_limited() -> None:
    ownership = await _ownership()
    with pytest.raises(SessionNotFoundError):
        await ownership.share("s1", ["bob"])
    await ownership.claim("s1", Principal("ada"))
    assert (await ownership.share("s1", ["bob"])).readers == ("bob",)
    with pytest.raises(LimitReachedError):
        await ownership.share("s1", [str(number) for number in range(READERS_MAX + 1)])
    found = await ownership.owner_of("s1")
    assert found is not None
    assert found.readers == ("bob",)


async def test_principals_with_and_without_a_tenant_cannot_share_a_store() -> None:
    ownership = await _ownership()
    await ownership.claim("acme:s1", Principal("ada", tenant="acme"))
    await ownership.claim("other:s1", Principal("eve", tenant="other"))
    await ownership.claim("s9", Principal("root", is_operator=True))
    with pytest.raises(AccessError, match="give every principal a tenant"):
        await ownership.claim("acme:s2", Principal("bob"))
    assert await ownership.owner_of("acme:s2") is None


@given(NAMES, st.sampled_from(["a", "b", "a-b"]), st.sampled_from(["a", "b", "a-b"]))
def test_names_of_different_tenants_never_collide(name: str, tenant: str, other: str) -> None:
    inside = name_in_store(name, tenant)
    assert name_in_store(inside, tenant) == inside
    assert name_in_store(name_outside(inside, tenant), tenant) == inside
    if is_of_tenant(inside, tenant) and tenant != other:
        assert not is_of_tenant(inside, other)
        assert name_in_store(inside, other) != inside


async def test_the_visible_sessions_of_a_principal_are_indexed() -> None:
    store = MemoryStore()
    ownership = await _ownership(store)
    ada, bob, eve = Principal("ada"), Principal("bob"), Principal("ada", tenant="acme")
    for session in ("s1", "s2"):
        await ownership.claim(session, ada)
    await ownership.claim("s1", bob)  # Too late.
    await ownership.share("s2", ["bob"])
    assert sorted(await ownership.sessions_of(ada)) == ["s1", "s2"]
    assert sorted(await ownership.sessions_of(bob)) == ["s1", "s2"], "it may be just about to be theirs"
    assert await ownership.sessions_of(eve) == []


async def test_deleted_sessions_leave_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights_module, "LOOKED_AT", 2)
    world, store = FakeWorld(), MemoryStore()
    await store.open()
    ownership, ada = Ownership(store, world), Principal("ada")
    for number in range(6):
        await ownership.claim(f"s{number}", ada)
        await store.claim(f"s{number}", at=1.0)
    for number in range(1, 6):
        await store.delete(f"s{number}")
    assert len(await ownership.sessions_of(ada)) == 6
    await world.advance(rights_module.BEGINNING_S + 1)
    for _ in range(100):
        if await ownership.sessions_of(ada) == ["s0"]:
            break
    assert await ownership.sessions_of(ada) == ["s0"]


async def test_a_session_id_that_is_claimed_again_gets_a_fresh_index_entry() -> None:
    world, store = FakeWorld(), MemoryStore()
    await store.open()
    ownership, ada = Ownership(store, world), Principal("ada")
    await ownership.claim("s1", ada)
    await store.claim("s1", at=1.0)
    await store.delete("s1")
    await world.advance(rights_module.BEGINNING_S + 1)
    await ownership._note("s1", "", "ada")  # A crash, or another claim, comes before the row is written.
    assert await ownership.sessions_of(ada) == ["s1"]
    await ownership.claim("s1", ada)
    assert await ownership.sessions_of(ada) == ["s1"]
