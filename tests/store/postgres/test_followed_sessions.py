"""Announcements of followed sessions, and the journal ends that are sent."""

from __future__ import annotations

import pytest

from midstream.store.postgres import followed_sessions
from midstream.store.postgres.followed_sessions import (
    ANNOUNCED_AGAIN_S,
    FOLLOWED_S,
    FollowedByOthers,
    FollowedHere,
)
from midstream.testing.fake_worlds import FakeWorld


def test_only_ends_of_followed_sessions_are_sent() -> None:
    followed = FollowedByOthers(FakeWorld())
    assert followed.select({"s": 1, "t": 1}) == {}
    assert followed.note(["s"]) == {"s": 1}
    assert followed.note(["s"]) == {}
    assert followed.select({"s": 2, "t": 2}) == {"s": 2}
    assert followed.note(["s", "t", "u"]) == {"t": 2}


async def test_an_announcement_expires() -> None:
    world = FakeWorld()
    followed = FollowedByOthers(world)
    followed.note(["s"])
    await world.advance(FOLLOWED_S - 1)
    assert followed.select({"s": 1}) == {"s": 1}
    await world.advance(2)
    assert followed.select({"s": 2}) == {}
    assert followed.note(["t"]) == {}
    assert followed._until.keys() == {"t"}
    assert followed.note(["s"]) == {"s": 2}


def test_unsent_ends_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_sessions, "UNSENT_MAX", 3)
    followed = FollowedByOthers(FakeWorld())
    for number in range(5):
        followed.select({f"s{number}": 1})
        followed.select({"s1": number})
    assert followed.note([f"s{number}" for number in range(5)]) == {"s1": 4, "s3": 1, "s4": 1}


async def test_followed_sessions_are_announced_periodically() -> None:
    world = FakeWorld()
    here = FollowedHere(world)
    assert here.due({"s": 1, "t": 1}) == ["s", "t"]
    assert here.due({"t": 2, "u": 1}) == ["u"]
    await world.advance(ANNOUNCED_AGAIN_S)
    assert here.due({"u": 1}) == ["u"]
    assert here._announced_at.keys() == {"u"}
    here.forget()
    assert here.due({"u": 1}) == ["u"]
