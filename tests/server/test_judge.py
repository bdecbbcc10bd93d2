"""The verdicts: owner, reader, neighbour, operator, and an application that decides itself."""

from __future__ import annotations

import pytest

from midstream.errors import AccessError, SessionNotFoundError
from midstream.server.access import Access, Authorize
from midstream.server.judge import Judge, Verdict
from midstream.server.passes import Passes
from midstream.server.rights import Owner, Rights
from midstream.server.subjects import Action, Subject
from midstream.store.memory import MemoryStore
from midstream.testing.worlds import FakeWorld

ADA, BOB, CAROL = (Subject(name, tenant="acme") for name in ("ada", "bob", "carol"))
EVE = Subject("ada", tenant="other")
ROOT = Subject("root", is_operator=True)
LOCAL_ROOT = Subject("root", tenant="other", is_operator=True)


async def _judge(authorize: Authorize | None = None) -> Judge:
    store, world = MemoryStore(), FakeWorld()
    await store.open()
    rights = Rights(store, world)
    await rights.claim("acme:s1", ADA)
    await rights.share("acme:s1", ["bob"])
    for session in ("acme:s1", "acme:old"):
        await store.claim(session, at=world.now())
    access = Access(authenticate=lambda _: None, authorize=authorize)
    return Judge(access, store, rights, Passes(store, world))


@pytest.mark.parametrize(
    ("subject", "session", "verdict"),
    [
        (ADA, "acme:s1", Verdict.ALL),
        (ADA, "acme:s1::1.1.0", Verdict.ALL),
        (BOB, "acme:s1", Verdict.LOOK),
        (CAROL, "acme:s1", Verdict.NOTHING),
        (EVE, "acme:s1", Verdict.NOTHING),
        (ROOT, "acme:s1", Verdict.ALL),
        (LOCAL_ROOT, "acme:s1", Verdict.NOTHING),
        (Subject("ada"), "acme:s1", Verdict.NOTHING),
        (ADA, "acme:new", Verdict.BEGIN),
        (EVE, "acme:new", Verdict.NOTHING),
        (ADA, "acme:old", Verdict.NOTHING),  # begun before anybody was asked: the operator's
        (ROOT, "acme:old", Verdict.ALL),
        (Subject("v", tenant="acme", session="acme:s1"), "acme:s1", Verdict.LOOK),
        (Subject("v", tenant="acme", session="acme:s1"), "acme:new", Verdict.NOTHING),
        (Subject("ada", tenant="acme", session="acme:s1"), "acme:s1", Verdict.LOOK),
    ],
)
async def test_who_may_do_what(subject: Subject, session: str, verdict: Verdict) -> None:
    assert await (await _judge()).verdict(subject, session, Action.READ) is verdict


async def test_what_is_not_allowed_is_said_only_to_those_who_may_look() -> None:
    judge = await _judge()
    with pytest.raises(AccessError):
        await judge.require(BOB, "acme:s1", Action.SPEAK)
    with pytest.raises(SessionNotFoundError):
        await judge.require(CAROL, "acme:s1", Action.SPEAK)
    assert await judge.require(ADA, "acme:s1", Action.OWN) is Verdict.ALL


async def test_an_application_decides_itself_but_not_across_tenants() -> None:
    asked: list[tuple[str, Action, str, Owner | None]] = []

    async def authorize(subject: Subject, action: Action, session: str, owner: Owner | None) -> bool:
        asked.append((subject.key, action, session, owner))
        return subject.id == "carol" and action is not Action.OWN

    judge = await _judge(authorize)
    assert await judge.verdict(CAROL, "acme:s1", Action.SPEAK) is Verdict.ALL
    owner = asked[-1][-1]
    assert owner == Owner("acme", "ada", ("bob",), claim=owner.claim if owner else "")
    assert asked[-1] == ("acme:carol", Action.SPEAK, "acme:s1", owner)
    assert await judge.verdict(CAROL, "acme:s1", Action.OWN) is Verdict.LOOK
    assert await judge.verdict(ADA, "acme:s1", Action.READ) is Verdict.NOTHING
    assert await judge.verdict(CAROL, "acme:new", Action.SPEAK) is Verdict.BEGIN
    assert await judge.verdict(ADA, "acme:new", Action.SPEAK) is Verdict.NOTHING
    asked.clear()
    assert await judge.verdict(Subject("carol", tenant="other"), "acme:s1", Action.READ) is Verdict.NOTHING
    assert asked == []
