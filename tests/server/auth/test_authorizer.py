"""The access levels: owner, reader, neighbour, operator, and an application with its own decision."""

from __future__ import annotations

import pytest

from midstream.errors import AccessError, SessionNotFoundError
from midstream.server.auth.access import Access, Authorize
from midstream.server.auth.authorizer import AccessLevel, Authorizer
from midstream.server.auth.credential_sources import source_of
from midstream.server.auth.issued_credentials import CredentialIssuer
from midstream.server.auth.ownership import Owner, Ownership
from midstream.server.auth.principals import Action, Principal, Scope
from midstream.server.auth.revocations import Revocations
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld

ADA, BOB, CAROL = (Principal(name, tenant="acme") for name in ("ada", "bob", "carol"))
EVE = Principal("ada", tenant="other")
ROOT = Principal("root", is_operator=True)
LOCAL_ROOT = Principal("root", tenant="other", is_operator=True)


async def _authorizer(authorize: Authorize | None = None) -> Authorizer:
    store, world = MemoryStore(), FakeWorld()
    await store.open()
    ownership = Ownership(store, world)
    await ownership.claim("acme:s1", ADA)
    await ownership.share("acme:s1", ["bob"])
    for session in ("acme:s1", "acme:old"):
        await store.claim(session, at=world.now())
    access = Access(authenticate=lambda _: None, authorize=authorize)
    source = source_of(access.authenticate)
    issued = CredentialIssuer(store, world, Revocations(store, world), source.is_current)
    return Authorizer(access, source, store, ownership, issued)


@pytest.mark.parametrize(
    ("principal", "session", "verdict"),
    [
        (ADA, "acme:s1", AccessLevel.FULL),
        (ADA, "acme:s1::1.1.0", AccessLevel.FULL),
        (BOB, "acme:s1", AccessLevel.READ),
        (CAROL, "acme:s1", AccessLevel.NONE),
        (EVE, "acme:s1", AccessLevel.NONE),
        (ROOT, "acme:s1", AccessLevel.FULL),
        (LOCAL_ROOT, "acme:s1", AccessLevel.NONE),
        (Principal("ada"), "acme:s1", AccessLevel.NONE),
        (ADA, "acme:new", AccessLevel.BEGIN),
        (EVE, "acme:new", AccessLevel.NONE),
        (ADA, "acme:old", AccessLevel.NONE),  # Begun before authentication was configured: the operator's.
        (ROOT, "acme:old", AccessLevel.FULL),
        (Principal("v", tenant="acme", session="acme:s1"), "acme:s1", AccessLevel.READ),
        (Principal("v", tenant="acme", session="acme:s1"), "acme:new", AccessLevel.NONE),
        (Principal("ada", tenant="acme", session="acme:s1"), "acme:s1", AccessLevel.READ),
        (Principal("eve", tenant="acme", is_approver=True), "acme:s1", AccessLevel.APPROVE),
        (Principal("eve", tenant="acme", is_approver=True), "acme:old", AccessLevel.NONE),
        (Principal("eve", tenant="other", is_approver=True), "acme:s1", AccessLevel.NONE),
        (Principal("ada", tenant="acme", scope=Scope(sessions="s1")), "acme:s1::1.1.0", AccessLevel.FULL),
        (Principal("ada", tenant="acme", scope=Scope(sessions="s*")), "acme:s1", AccessLevel.FULL),
        (Principal("ada", tenant="acme", scope=Scope(sessions="s")), "acme:s1", AccessLevel.NONE),
        (Principal("root", is_operator=True, scope=Scope(sessions="t*")), "acme:s1", AccessLevel.NONE),
    ],
)
async def test_each_principal_has_its_access_level_for_each_session(
    principal: Principal, session: str, verdict: AccessLevel
) -> None:
    assert await (await _authorizer()).level_of(principal, session, Action.READ) is verdict


async def test_a_refusal_is_explained_only_to_callers_that_may_read() -> None:
    authorizer = await _authorizer()
    with pytest.raises(AccessError):
        await authorizer.require(BOB, "acme:s1", Action.SEND)
    with pytest.raises(SessionNotFoundError):
        await authorizer.require(CAROL, "acme:s1", Action.SEND)
    assert await authorizer.require(ADA, "acme:s1", Action.OWN) is AccessLevel.FULL


async def test_an_application_decides_itself_but_not_across_tenants() -> None:
    asked: list[tuple[str, Action, str, Owner | None]] = []

    async def authorize(principal: Principal, action: Action, session: str, owner: Owner | None) -> bool:
        asked.append((principal.key, action, session, owner))
        return principal.id == "carol" and action is not Action.OWN

    authorizer = await _authorizer(authorize)
    assert await authorizer.level_of(CAROL, "acme:s1", Action.SEND) is AccessLevel.FULL
    owner = asked[-1][-1]
    assert owner == Owner("acme", "ada", ("bob",), claim=owner.claim if owner else "")
    assert asked[-1] == ("acme:carol", Action.SEND, "acme:s1", owner)
    assert await authorizer.level_of(CAROL, "acme:s1", Action.OWN) is AccessLevel.READ
    assert await authorizer.level_of(ADA, "acme:s1", Action.READ) is AccessLevel.NONE
    assert await authorizer.level_of(CAROL, "acme:new", Action.SEND) is AccessLevel.BEGIN
    assert await authorizer.level_of(ADA, "acme:new", Action.SEND) is AccessLevel.NONE
    asked.clear()
    assert (
        await authorizer.level_of(Principal("carol", tenant="other"), "acme:s1", Action.READ)
        is AccessLevel.NONE
    )
    assert asked == []
