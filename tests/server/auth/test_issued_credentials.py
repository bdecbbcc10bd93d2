"""Access credentials: valid for their purpose, once or until they expire, and not readable from the store."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from midstream.errors import AccessError, UnauthorizedError
from midstream.server.auth.issued_credentials import (
    CHAIN_MAX,
    COOKIE_IDLE_S,
    COOKIE_S,
    NAMESPACE,
    SWEEP_S,
    CredentialIssuer,
    CredentialKind,
    key_of,
)
from midstream.server.auth.principals import Principal
from midstream.server.auth.revocations import Revocations
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec

ADA = Principal("ada", tenant="acme")


async def _credentials() -> tuple[CredentialIssuer, MemoryStore, FakeWorld]:
    store, world = MemoryStore(), FakeWorld()
    await store.open()
    return CredentialIssuer(store, world, Revocations(store, world), _accept), store, world


async def _accept(principal: Principal) -> bool:
    return principal.source != "removed"


async def test_a_one_time_token_is_redeemed_once_by_concurrent_attempts() -> None:
    credentials, _, _ = await _credentials()
    token = await credentials.issue(
        CredentialKind.TICKET, ADA, for_s=30, session="s1", action="read", origin="app.example"
    )
    tries = await asyncio.gather(
        *(credentials.take(CredentialKind.TICKET, token) for _ in range(5)), return_exceptions=True
    )
    taken = [each for each in tries if not isinstance(each, BaseException)]
    assert [(one.principal, one.session, one.action, one.origin) for one in taken] == [
        (ADA, "s1", "read", "app.example")
    ]
    assert sum(isinstance(each, UnauthorizedError) for each in tries) == 4


async def test_a_token_of_one_kind_is_invalid_as_another_and_expires() -> None:
    credentials, _, world = await _credentials()
    token = await credentials.issue(CredentialKind.COOKIE, ADA, for_s=10)
    for kind in CredentialKind:
        if kind is not CredentialKind.COOKIE:
            with pytest.raises(UnauthorizedError):
                await credentials.show(kind, token)
    assert (await credentials.show(CredentialKind.COOKIE, token)).principal == ADA
    await world.advance(10)
    with pytest.raises(UnauthorizedError):
        await credentials.show(CredentialKind.COOKIE, token)


async def test_a_token_does_not_outlive_the_credential_it_was_issued_for() -> None:
    credentials, _, world = await _credentials()
    token = await credentials.issue(
        CredentialKind.COOKIE, Principal("ada", expires_at=world.now() + 5), for_s=1000
    )
    await world.advance(5)
    with pytest.raises(UnauthorizedError):
        await credentials.show(CredentialKind.COOKIE, token)


async def test_the_store_contains_no_usable_token_and_removes_expired_ones() -> None:
    credentials, store, world = await _credentials()
    tokens = [await credentials.issue(kind, ADA, for_s=10) for kind in CredentialKind]
    kept = await store.kv_list(NAMESPACE)
    assert {each.key for each in kept} == {key_of(token) for token in tokens}
    assert [
        token for token in tokens for each in kept if token.encode() in each.body or token in each.key
    ] == []
    await world.advance(SWEEP_S)
    last = await credentials.issue(CredentialKind.TICKET, ADA, for_s=10)
    assert [each.key for each in await store.kv_list(NAMESPACE)] == [key_of(last)]


async def test_viewer_tokens_are_revoked_by_session() -> None:
    credentials, _, _ = await _credentials()
    tokens = {
        name: await credentials.issue(CredentialKind.VIEWER, replace(ADA, session=name), for_s=10)
        for name in ("s1", "s2")
    }
    # Of that viewer.
    cookie = await credentials.issue(CredentialKind.COOKIE, replace(ADA, session="s1"), for_s=10)
    own = await credentials.issue(CredentialKind.TICKET, ADA, for_s=10, session="s1")
    assert await credentials.revoke_viewer_tokens("s1") == 2
    with pytest.raises(UnauthorizedError):
        await credentials.show(CredentialKind.COOKIE, cookie)
    await credentials.show(CredentialKind.TICKET, own)
    with pytest.raises(UnauthorizedError):
        await credentials.show(CredentialKind.VIEWER, tokens["s1"])
    await credentials.show(CredentialKind.VIEWER, tokens["s2"])
    await credentials.withdraw("nothing")


async def _line(credentials: CredentialIssuer, length: int) -> list[str]:
    """Return credentials of which each was issued for the one before."""
    tokens: list[str] = []
    for _ in range(length):
        principal = replace(ADA, via=key_of(tokens[-1]) if tokens else "", source="line")
        tokens.append(await credentials.issue(CredentialKind.COOKIE, principal, for_s=1000))
    return tokens


async def _good(credentials: CredentialIssuer, tokens: list[str]) -> list[bool]:
    found = []
    for token in tokens:
        try:
            await credentials.show(CredentialKind.COOKIE, token)
        except UnauthorizedError:
            found.append(False)
        else:
            found.append(True)
    return found


@spec("SEC-1", "SEC-2", "SEC-5")
async def test_a_credential_is_valid_while_all_above_it_are() -> None:
    credentials, store, _ = await _credentials()
    tokens = await _line(credentials, 4)
    assert await _good(credentials, tokens) == 4 * [True]
    # Without the rows below it: as after a crash in the middle of a revocation.
    row = await store.kv_get(NAMESPACE, key_of(tokens[1]))
    assert row is not None
    await store.kv_delete(NAMESPACE, row.key, expected=row.version)
    assert await _good(credentials, tokens) == [True, False, False, False]
    assert await credentials.revoke([key_of(tokens[0])]) == 1
    others = await _line(credentials, 3)
    await credentials.withdraw(others[0])
    assert await _good(credentials, others) == 3 * [False]
    assert {key for key, _ in await credentials.read_all()} == {key_of(token) for token in tokens[2:]}


@spec("SEC-2")
async def test_an_unreadable_row_refuses_its_own_credential_and_those_below_it() -> None:
    credentials, store, world = await _credentials()
    tokens = await _line(credentials, 2)
    row = await store.kv_get(NAMESPACE, key_of(tokens[0]))
    assert row is not None
    for damaged in (b"", b"{", b"[" * 5000, b"\xff"):
        version = await store.kv_put(NAMESPACE, row.key, damaged, expected=row.version, at=world.now())
        row = replace(row, version=version)
        assert await _good(credentials, tokens) == [False, False]
        assert [key for key, _ in await credentials.read_all()] == [key_of(tokens[1])]
    await store.kv_put(NAMESPACE, row.key, row.body, expected=row.version, at=world.now())
    assert await _good(credentials, tokens) == [True, True]


@spec("SEC-3", "SEC-6")
async def test_a_chain_ends_with_its_source_and_with_a_lock_out_of_its_principal() -> None:
    credentials, store, world = await _credentials()
    token = await credentials.issue(CredentialKind.COOKIE, replace(ADA, source="removed"), for_s=1000)
    assert await _good(credentials, [token]) == [False]
    tokens = await _line(credentials, 2)
    await world.advance(1)
    await Revocations(store, world).lock_out(ADA.key)
    assert await _good(credentials, tokens) == [False, False]
    await world.advance(1)
    assert await _good(credentials, await _line(credentials, 1)) == [True]


async def test_the_length_of_a_chain_is_limited() -> None:
    credentials, _, _ = await _credentials()
    tokens = await _line(credentials, CHAIN_MAX)
    assert await _good(credentials, tokens) == CHAIN_MAX * [True]
    with pytest.raises(AccessError, match="log in with a token"):
        await credentials.issue(CredentialKind.COOKIE, replace(ADA, via=key_of(tokens[-1])), for_s=1000)


@spec("SEC-7")
async def test_a_login_expires_when_unused_and_at_the_latest_at_its_own_end() -> None:
    credentials, _, world = await _credentials()

    async def log_in(via: str = "") -> str:
        principal = replace(ADA, via=via)
        return await credentials.issue(CredentialKind.COOKIE, principal, for_s=COOKIE_S, idle_s=COOKIE_IDLE_S)

    unused = await log_in()
    used, begun = await log_in(), world.now()
    below = await log_in(via=key_of(used))
    uses = 0
    while world.now() < begun + COOKIE_S - COOKIE_IDLE_S / 2:
        assert await _good(credentials, [below]) == [True]  # Use of it is use of the credential above, too.
        uses += 1
        await world.advance(COOKIE_IDLE_S * 0.9)
    assert uses >= 4
    assert await _good(credentials, [unused]) == [False]
    await world.advance(begun + COOKIE_S - world.now())
    assert await _good(credentials, [used, below]) == [False, False]
