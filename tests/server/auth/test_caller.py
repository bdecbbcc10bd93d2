"""A caller's use of a session: begun once, counted while it lasts, and ended with its permission."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import HTTPConnection

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import LimitReachedError, SessionNotFoundError, UnauthorizedError, UsageError
from midstream.server.auth.access import Access, Authorize
from midstream.server.auth.authorizer import Authorizer
from midstream.server.auth.caller import (
    CALLER,
    Counters,
    KnownCaller,
    LiveCallers,
    UnauthenticatedCaller,
    caller_of,
    known_caller_of,
)
from midstream.server.auth.credential_sources import source_of
from midstream.server.auth.issued_credentials import CredentialIssuer
from midstream.server.auth.ownership import Ownership
from midstream.server.auth.principals import Action, Principal
from midstream.server.auth.revocations import Revocations
from midstream.server.limits import Limits
from midstream.session.turn.commands import Cancel, Resume
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedModel


class House:
    """The services behind the middleware."""

    def __init__(self, limits: Limits | None = None, authorize: Authorize | None = None) -> None:
        self.world = FakeWorld()
        self.store = MemoryStore()
        self.host = Host(Agent(ScriptedModel([])), self.store, world=self.world)
        self.ownership = Ownership(self.store, self.world)
        self.known: Principal | None = Principal("ada")
        access = Access(authenticate=lambda _: self.known, authorize=authorize)
        source = source_of(access.authenticate)
        revocations = Revocations(self.store, self.world)
        issued = CredentialIssuer(self.store, self.world, revocations, source.is_current)
        self.authorizer = Authorizer(access, source, self.store, self.ownership, issued)
        self.counters = Counters(limits or Limits(), self.world)
        self.living = LiveCallers()

    def visit(self, principal: Principal, session: str = "s1") -> KnownCaller:
        connection = HTTPConnection({"type": "http", "path": "/", "headers": []})
        return KnownCaller(
            principal,
            session,
            connection,
            "",
            authorizer=self.authorizer,
            ownership=self.ownership,
            counters=self.counters,
            host=self.host,
            living=self.living,
            recheck_s=300.0,
        )


async def test_a_list_is_computed_from_the_visible_sessions_of_a_caller_and_not_from_all() -> None:
    house = House()
    await house.store.open()
    for name, session in (("ada", "s1"), ("bob", "s2")):
        await house.visit(Principal(name), session).begin()
    assert await house.visit(Principal("ada")).visible_sessions() == ["s1"]
    # With a viewer token.
    assert await house.visit(Principal("ada", session="s2")).visible_sessions() == ["s2"]
    assert await house.visit(Principal("root", is_operator=True)).visible_sessions() is None
    assert await UnauthenticatedCaller().visible_sessions() is None
    narrow = House(authorize=lambda _subject, _action, _session, _owner: True)
    await narrow.store.open()
    assert await narrow.visit(Principal("ada")).visible_sessions() is None, (
        "the application is asked about each"
    )


async def test_the_principal_that_begins_a_session_owns_it_and_others_find_nothing() -> None:
    house = House(Limits(sessions_begun_per_minute=1))
    await house.store.open()
    ada, bob = house.visit(Principal("ada")), house.visit(Principal("bob"))
    await ada.begin()
    await ada.begin()
    with pytest.raises(SessionNotFoundError):
        await bob.begin()
    with pytest.raises(LimitReachedError):
        await house.visit(Principal("ada"), "s2").begin()
    await house.store.claim("s1", at=1.0)
    await house.store.delete("s1")
    await bob.begin()
    await bob.require(Action.OWN)


async def test_a_stream_is_rechecked_and_ends_when_its_permission_has_ended() -> None:
    house = House()
    await house.store.open()
    visit = house.visit(Principal("ada"))
    await visit.begin()
    waiting = asyncio.create_task(visit.until_unauthorized())
    await house.world.advance(10 * 300.0)
    assert not waiting.done()
    house.known = None
    await house.world.advance(299.0)
    assert not waiting.done()
    await house.world.advance(1.0)
    assert isinstance(await waiting, UnauthorizedError)


async def test_a_stream_ends_at_the_second_its_credential_does() -> None:
    house = House()
    await house.store.open()
    visit = house.visit(Principal("ada", expires_at=house.world.now() + 42.0))
    waiting = asyncio.create_task(visit.until_unauthorized())
    await house.world.advance(41.9)
    assert not waiting.done()
    await house.world.advance(0.2)
    assert isinstance(await waiting, UnauthorizedError)


async def test_a_stream_that_sent_commands_ends_when_only_reading_is_permitted() -> None:
    house = House()
    await house.store.open()
    owner = house.visit(Principal("ada"))
    await owner.begin()
    await house.store.claim("s1", at=house.world.now())
    reader = house.visit(Principal("bob"))
    house.known = Principal("bob")
    await house.ownership.share("s1", ["bob"])
    await reader.require(Action.READ)
    waiting = asyncio.create_task(reader.until_unauthorized())
    await house.world.advance(300.0)
    assert not waiting.done()
    waiting.cancel()

    house.known = Principal("ada")
    reading = asyncio.create_task(owner.until_unauthorized())
    await house.world.settle()
    await house.store.claim("s1", at=1.0)
    await house.store.delete("s1")
    await house.ownership.claim("s1", Principal("bob"))
    await house.ownership.share("s1", ["ada"])
    owner.recheck()
    assert isinstance(await asyncio.wait_for(reading, 60), UnauthorizedError)


async def test_streams_count_towards_the_limit_while_they_last_except_an_operators() -> None:
    house = House(Limits(streams_per_principal_max=1, turns_per_principal_max=1))
    first, second = house.visit(Principal("ada")), house.visit(Principal("ada"), "s2")
    first.enter()
    assert len(house.living) == 1
    with pytest.raises(LimitReachedError):
        second.enter()
    first.leave()
    second.enter()
    second.count_command(Resume())
    second.count_command(Cancel())
    with pytest.raises(LimitReachedError):
        first.count_command(Resume())
    operator = [house.visit(Principal("root", is_operator=True), name) for name in ("a", "b")]
    for each in operator:
        each.enter()
        each.count_command(Resume())


def test_a_request_without_credentials_has_no_authenticated_caller() -> None:
    assert isinstance(caller_of({}), UnauthenticatedCaller)
    with pytest.raises(UsageError):
        known_caller_of({CALLER: caller_of({})})
