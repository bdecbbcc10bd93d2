"""Passes: good for what they were issued for, once or until they end, and not to be read from the store."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from midstream.errors import UnauthorizedError
from midstream.server.auth.principals import Principal
from midstream.server.auth.revocations import Revocations
from midstream.server.auth.tokens import NAMESPACE, SWEEP_S, AccessTokens, TokenKind, key_of
from midstream.store.memory import MemoryStore
from midstream.testing.worlds import FakeWorld

ADA = Principal("ada", tenant="acme")


async def _access_tokens() -> tuple[AccessTokens, MemoryStore, FakeWorld]:
    store, world = MemoryStore(), FakeWorld()
    await store.open()
    return AccessTokens(store, world, Revocations(store, world), _accept), store, world


async def _accept(principal: Principal) -> bool:
    return principal.source != "removed"


async def test_a_pass_is_taken_once_however_many_try() -> None:
    access_tokens, _, _ = await _access_tokens()
    word = await access_tokens.issue(
        TokenKind.TICKET, ADA, for_s=30, session="s1", action="read", origin="app.example"
    )
    tries = await asyncio.gather(
        *(access_tokens.take(TokenKind.TICKET, word) for _ in range(5)), return_exceptions=True
    )
    taken = [each for each in tries if not isinstance(each, BaseException)]
    assert [(one.principal, one.session, one.action, one.origin) for one in taken] == [
        (ADA, "s1", "read", "app.example")
    ]
    assert sum(isinstance(each, UnauthorizedError) for each in tries) == 4


async def test_a_pass_of_one_kind_is_none_of_another_and_ends_in_time() -> None:
    access_tokens, _, world = await _access_tokens()
    word = await access_tokens.issue(TokenKind.COOKIE, ADA, for_s=10)
    for kind in TokenKind:
        if kind is not TokenKind.COOKIE:
            with pytest.raises(UnauthorizedError):
                await access_tokens.show(kind, word)
    assert (await access_tokens.show(TokenKind.COOKIE, word)).principal == ADA
    await world.advance(10)
    with pytest.raises(UnauthorizedError):
        await access_tokens.show(TokenKind.COOKIE, word)


async def test_a_pass_does_not_outlive_the_credential_it_was_issued_for() -> None:
    access_tokens, _, world = await _access_tokens()
    word = await access_tokens.issue(
        TokenKind.COOKIE, Principal("ada", expires_at=world.now() + 5), for_s=1000
    )
    await world.advance(5)
    with pytest.raises(UnauthorizedError):
        await access_tokens.show(TokenKind.COOKIE, word)


async def test_the_store_has_no_word_that_opens_anything_and_forgets_what_has_ended() -> None:
    access_tokens, store, world = await _access_tokens()
    words = [await access_tokens.issue(kind, ADA, for_s=10) for kind in TokenKind]
    kept = await store.kv_list(NAMESPACE)
    assert {each.key for each in kept} == {key_of(word) for word in words}
    assert [word for word in words for each in kept if word.encode() in each.body or word in each.key] == []
    await world.advance(SWEEP_S)
    last = await access_tokens.issue(TokenKind.TICKET, ADA, for_s=10)
    assert [each.key for each in await store.kv_list(NAMESPACE)] == [key_of(last)]


async def test_viewers_passes_are_withdrawn_by_session() -> None:
    access_tokens, _, _ = await _access_tokens()
    words = {
        name: await access_tokens.issue(TokenKind.VIEWER, replace(ADA, session=name), for_s=10)
        for name in ("s1", "s2")
    }
    cookie = await access_tokens.issue(
        TokenKind.COOKIE, replace(ADA, session="s1"), for_s=10
    )  # of that viewer
    own = await access_tokens.issue(TokenKind.TICKET, ADA, for_s=10, session="s1")
    assert await access_tokens.withdraw_viewers("s1") == 2
    with pytest.raises(UnauthorizedError):
        await access_tokens.show(TokenKind.COOKIE, cookie)
    await access_tokens.show(TokenKind.TICKET, own)
    with pytest.raises(UnauthorizedError):
        await access_tokens.show(TokenKind.VIEWER, words["s1"])
    await access_tokens.show(TokenKind.VIEWER, words["s2"])
    await access_tokens.withdraw("nothing")
