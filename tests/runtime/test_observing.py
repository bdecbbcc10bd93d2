"""Observers are told of what was appended, once, in order, and cannot harm it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from midstream.core.messages import UserMessage
from midstream.core.records import Record
from midstream.core.turn import SendMessage
from midstream.runtime.agent import Agent
from midstream.runtime.host import Host
from midstream.runtime.observing import Observers
from midstream.store.memory import MemoryStore
from midstream.testing.models import ScriptedModel, text
from midstream.testing.worlds import FakeWorld


class Noting:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def appended(self, session: str, records: Sequence[Record]) -> None:
        self.told += [(session, type(record).__name__) for record in records]


class Failing:
    def appended(self, session: str, records: Sequence[Record]) -> None:
        raise ValueError("a secret")


async def test_every_record_of_a_turn_is_told_but_the_words_on_their_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    world, noting = FakeWorld(), Noting()
    host = Host(Agent(ScriptedModel(lambda _: text("Hello there."))), MemoryStore(), world=world)
    host.observers.add(Failing())
    host.observers.add(noting)
    await host.start()
    runner = await host.session("s1", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    await world.settle()
    assert noting.told == [
        ("s1", name)
        for name in (
            "EpochStarted",
            "MessageAccepted",
            "AttemptStarted",
            "ReplyCompleted",
            "ExchangeCommitted",
            "TurnEnded",
        )
    ]
    assert {record.getMessage() for record in caplog.records} == {"an observer failed: ValueError"}
    assert "a secret" not in caplog.text
    await host.stop(grace_s=0)


def test_without_an_observer_nothing_is_read() -> None:
    Observers().appended("s1", [b"no record at all"])
