"""Observers receive each appended record once, in order, and cannot harm the append."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from midstream.engine.agent import Agent, sub_agent
from midstream.engine.host import Host
from midstream.history.messages import UserMessage
from midstream.observability.observers import Observers
from midstream.session.records import Record
from midstream.session.turn.commands import SendMessage
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedModel, calls, text


class RecordingObserver:
    def __init__(self) -> None:
        self.appended: list[tuple[str, str]] = []

    def on_append(self, session: str, records: Sequence[Record]) -> None:
        self.appended += [(session, type(record).__name__) for record in records]


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_append(self, session: str, records: Sequence[Record]) -> None:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("a secret"), SystemExit("a secret")], ids=["error", "exit"])
async def test_an_observer_receives_every_record_of_a_turn_except_deltas(
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    world, noting = FakeWorld(), RecordingObserver()
    host = Host(Agent(ScriptedModel(lambda _: text("Hello there."))), MemoryStore(), world=world)
    host.observers.add(Failing(error))
    host.observers.add(noting)
    await host.start()
    runner = await host.session("s1", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    await world.settle()
    assert noting.appended == [
        ("s1", name)
        for name in (
            "EpochStarted",
            "MessageAccepted",
            "AttemptStarted",
            "ResponseCompleted",
            "StepCommitted",
            "TurnEnded",
        )
    ]
    assert {record.getMessage() for record in caplog.records} == {
        f"an observer failed: {type(error).__name__}"
    }
    assert "a secret" not in caplog.text
    await host.stop(grace_s=0)


class Meeting(RecordingObserver):
    def answers(self, session: str, agent: str, model: str) -> None:
        self.appended.append((session, f"{agent} by {model}"))


class Shy(Failing):
    def answers(self, session: str, agent: str, model: str) -> None:
        raise ValueError("a secret")


async def test_an_observer_receives_the_agent_and_model_before_the_first_append(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, meeting = FakeWorld(), Meeting()
    helper = Agent(ScriptedModel([text("found it")]), name="helper")
    named = sub_agent(helper, name="help", description="Helps.")
    script = [calls(("help", '{"task": "look"}')), text("so")]
    host = Host(Agent(ScriptedModel(script), name="main", tools=[named]), MemoryStore(), world=world)
    for observer in (Shy(ValueError("a secret")), RecordingObserver(), meeting):
        host.observers.add(observer)
    await host.start()
    runner = await host.session("s1", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    await world.settle()
    assert not runner.state.is_live
    first = dict(reversed(meeting.appended))
    assert first == {"s1": "main by scripted", "s1::1.1.0": "helper by scripted"}
    assert "a secret" not in caplog.text
    await host.stop(grace_s=0)


def test_without_an_observer_nothing_is_decoded() -> None:
    Observers().on_append("s1", [b"no record at all"])
