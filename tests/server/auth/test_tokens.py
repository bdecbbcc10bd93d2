"""Access tokens: valid for their purpose, once or until they expire, and not readable from the store."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from midstream.errors import AccessError, UnauthorizedError
from midstream.server.auth.principals import Principal
from midstream.server.auth.revocations import Revocations
from midstream.server.auth.tokens import (
    CHAIN_MAX,
    COOKIE_IDLE_S,
    COOKIE_S,
    NAMESPACE,
    SWEEP_S,
    AccessTokens,
    TokenKind,
    key_of,
)
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec

ADA = Principal("ada", tenant="acme")


async def _access_tokens() -> tuple[AccessTokens, MemoryStore, FakeWorld]:
    store, world = MemoryStore(), FakeWorld()
    await store.open()
    return AccessTokens(store, world, Revocations(store, world), _accept), store, world


async def _accept(principal: Principal) -> bool:
    return principal.source != "removed"


async def test_a_one_time_token_is_redeemed_once_by_concurrent_attempts() -> None:
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


async def test_a_token_of_one_kind_is_invalid_as_another_and_expires() -> None:
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


async def test_a_token_does_not_outlive_the_credential_it_was_issued_for() -> None:
    access_tokens, _, world = await _access_tokens()
    word = await access_tokens.issue(
        TokenKind.COOKIE, Principal("ada", expires_at=world.now() + 5), for_s=1000
    )
    await world.advance(5)
    with pytest.raises(UnauthorizedError):
        await access_tokens.show(TokenKind.COOKIE, word)


async def test_the_store_contains_no_usable_token_and_removes_expired_ones() -> None:
    access_tokens, store, world = await _access_tokens()
    words = [await access_tokens.issue(kind, ADA, for_s=10) for kind in TokenKind]
    kept = await store.kv_list(NAMESPACE)
    assert {each.key for each in kept} == {key_of(word) for word in words}
    assert [word for word in words for each in kept if word.encode() in each.body or word in each.key] == []
    await world.advance(SWEEP_S)
    last = await access_tokens.issue(TokenKind.TICKET, ADA, for_s=10)
    assert [each.key for each in await store.kv_list(NAMESPACE)] == [key_of(last)]


async def test_viewer_tokens_are_revoked_by_session() -> None:
    access_tokens, _, _ = await _access_tokens()
    words = {
        name: await access_tokens.issue(TokenKind.VIEWER, replace(ADA, session=name), for_s=10)
        for name in ("s1", "s2")
    }
    # Of that viewer.
    cookie = await access_tokens.issue(TokenKind.COOKIE, replace(ADA, session="s1"), for_s=10)
    own = await access_tokens.issue(TokenKind.TICKET, ADA, for_s=10, session="s1")
    assert await access_tokens.revoke_viewer_tokens("s1") == 2
    with pytest.raises(UnauthorizedError):
        await access_tokens.show(TokenKind.COOKIE, cookie)
    await access_tokens.show(TokenKind.TICKET, own)
    with pytest.raises(UnauthorizedError):
        await access_tokens.show(TokenKind.VIEWER, words["s1"])
    await access_tokens.show(TokenKind.VIEWER, words["s2"])
    await access_tokens.withdraw("nothing")


async def _line(tokens: AccessTokens, length: int) -> list[str]:
    """Return credentials of which each was issued for the one before."""
    words: list[str] = []
    for _ in range(length):
        principal = replace(ADA, via=key_of(words[-1]) if words else "", source="line")
        words.append(await tokens.issue(TokenKind.COOKIE, principal, for_s=1000))
    return words


async def _good(tokens: AccessTokens, words: list[str]) -> list[bool]:
    found = []
    for word in words:
        try:
            await tokens.show(TokenKind.COOKIE, word)
        except UnauthorizedError:
            found.append(False)
        else:
            found.append(True)
    return found


@spec("SEC-1", "SEC-2", "SEC-5")
async def test_a_credential_is_valid_while_all_above_it_are() -> None:
    tokens, store, _ = await _access_tokens()
    words = await _line(tokens, 4)
    assert await _good(tokens, words) == 4 * [True]
    # Without the rows below it: as after a crash in the middle of a revocation.
    row = await store.kv_get(NAMESPACE, key_of(words[1]))
    assert row is not None
    await store.kv_delete(NAMESPACE, row.key, expected=row.version)
    assert await _good(tokens, words) == [True, False, False, False]
    assert await tokens.revoke([key_of(words[0])]) == 1
    others = await _line(tokens, 3)
    await tokens.withdraw(others[0])
    assert await _good(tokens, others) == 3 * [False]
    assert {key for key, _ in await tokens.read_all()} == {key_of(word) for word in words[2:]}


@spec("SEC-2")
async def test_an_unreadable_row_refuses_its_own_credential_and_those_below_it() -> None:
    tokens, store, world = await _access_tokens()
    words = await _line(tokens, 2)
    row = await store.kv_get(NAMESPACE, key_of(words[0]))
    assert row is not None
    for damaged in (b"", b"{", b"[" * 5000, b"\xff"):
        version = await store.kv_put(NAMESPACE, row.key, damaged, expected=row.version, at=world.now())
        row = replace(row, version=version)
        assert await _good(tokens, words) == [False, False]
        assert [key for key, _ in await tokens.read_all()] == [key_of(words[1])]
    await store.kv_put(NAMESPACE, row.key, row.body, expected=row.version, at=world.now())
    assert await _good(tokens, words) == [True, True]


@spec("SEC-3", "SEC-6")
async def test_a_chain_ends_with_its_source_and_with_a_lock_out_of_its_principal() -> None:
    tokens, store, world = await _access_tokens()
    word = await tokens.issue(TokenKind.COOKIE, replace(ADA, source="removed"), for_s=1000)
    assert await _good(tokens, [word]) == [False]
    words = await _line(tokens, 2)
    await world.advance(1)
    await Revocations(store, world).lock_out(ADA.key)
    assert await _good(tokens, words) == [False, False]
    await world.advance(1)
    assert await _good(tokens, await _line(tokens, 1)) == [True]


async def test_the_length_of_a_chain_is_limited() -> None:
    tokens, _, _ = await _access_tokens()
    words = await _line(tokens, CHAIN_MAX)
    assert await _good(tokens, words) == CHAIN_MAX * [True]
    with pytest.raises(AccessError, match="log in with a token"):
        await tokens.issue(TokenKind.COOKIE, replace(ADA, via=key_of(words[-1])), for_s=1000)


@spec("SEC-7")
async def test_a_login_expires_when_unused_and_at_the_latest_at_its_own_end() -> None:
    tokens, _, world = await _access_tokens()

    async def log_in(via: str = "") -> str:
        principal = replace(ADA, via=via)
        return await tokens.issue(TokenKind.COOKIE, principal, for_s=COOKIE_S, idle_s=COOKIE_IDLE_S)

    unused = await log_in()
    used, begun = await log_in(), world.now()
    below = await log_in(via=key_of(used))
    uses = 0
    while world.now() < begun + COOKIE_S - COOKIE_IDLE_S / 2:
        assert await _good(tokens, [below]) == [True]  # Use of it is use of the credential above, too.
        uses += 1
        await world.advance(COOKIE_IDLE_S * 0.9)
    assert uses >= 4
    assert await _good(tokens, [unused]) == [False]
    await world.advance(begun + COOKIE_S - world.now())
    assert await _good(tokens, [used, below]) == [False, False]
