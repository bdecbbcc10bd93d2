"""People at clients: they answer, queue, withdraw and resume; from any client, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.client import Event, connect
from midstream.engine.agent import Agent, sub_agent
from midstream.environment import Fault, World
from midstream.errors import (
    AnswerMismatchError,
    ModelRejectedError,
    NothingToResumeError,
    QuestionClosedError,
    SessionBusyError,
    SessionNotFoundError,
    ToolDefinitionError,
    UsageError,
)
from midstream.history.messages import Outcome
from midstream.models.responses import ModelRequest, TextDelta
from midstream.server.app import asgi
from midstream.session.records import (
    CallEnded,
    ChildDelta,
    MessageQueued,
    MessageWithdrawn,
    TurnEnded,
    TurnResumed,
    TurnStatus,
)
from midstream.store.memory import MemoryStore
from midstream.testing import Gate, ScriptedModel, calls, text
from midstream.testing.fake_worlds import Crashed, FakeWorld
from midstream.testing.scripted_model import ScriptedStep
from midstream.tools.function_tools import question, tool
from tests.server.serving import make_app, served
from tests.spec import spec

WAIT_S = 60.0
PAY = calls(("pay", '{"sum":3}'))


class Purse:
    """A tool that needs a person's approval."""

    def __init__(self) -> None:
        self.paid: list[int] = []

        @tool(name="pay", needs_approval=True)
        def pay(sum: int) -> str:  # noqa: A002 - the model's name for it
            """Pay."""
            self.paid.append(sum)
            return f"paid {sum}"

        self.tool = pay


async def _all(events: AsyncIterator[Event]) -> list[Event]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in events]


def _results(events: list[Event]) -> list[tuple[str, Outcome]]:
    ends = [event.record.result for event in events if isinstance(event.record, CallEnded)]
    return [(end.content, end.outcome) for end in ends]


def _status(events: list[Event]) -> TurnStatus:
    end = events[-1].record
    assert isinstance(end, TurnEnded)
    return end.status


# --- answers --------------------------------------------------------------------------------------------------------


@spec("TURN-33", "STREAM-36")
async def test_a_question_is_answered_by_another_client_and_once() -> None:
    purse = Purse()
    app = make_app([PAY, text("ok")], tools=[purse.tool])
    async with served(app) as server, connect(server.url) as speaker, connect(server.url) as boss:
        seen: list[Event] = []
        async with asyncio.timeout(WAIT_S):
            async for event in speaker.send("s1", "pay 3"):
                seen.append(event)
                if asked := event.question:
                    assert purse.paid == []
                    with pytest.raises(AnswerMismatchError):
                        await boss.answer("s1", asked, "respond", text="yes")
                    await boss.answer("s1", asked, "allow")
                    with pytest.raises(QuestionClosedError):
                        await speaker.answer("s1", asked, "deny")
        assert (_results(seen), purse.paid) == ([("paid 3", Outcome.OK)], [3])


async def test_a_denial_has_its_reason_and_an_approval_may_change_the_arguments() -> None:
    for choice, more, paid, outcome in (
        ("deny", {"text": "too much"}, [], Outcome.DENIED),
        ("allow", {"arguments": '{"sum":2}'}, [2], Outcome.OK),
    ):
        purse = Purse()
        app = make_app([PAY, text("ok")], tools=[purse.tool])
        async with served(app) as server, connect(server.url) as client:
            seen: list[Event] = []
            async with asyncio.timeout(WAIT_S):
                async for event in client.send("s1", "pay 3"):
                    seen.append(event)
                    if event.question:
                        (asked,) = await client.questions()
                        await client.answer(asked.session, asked, choice, **more)
            ((content, ended),) = _results(seen)
            assert (purse.paid, ended) == (paid, outcome)
            assert ("too much" in content) is (choice == "deny")


async def test_an_invalid_choice_is_refused_before_it_is_sent() -> None:
    app = make_app([PAY, text("ok")], tools=[Purse().tool])
    async with served(app) as server, connect(server.url) as client:
        async for event in client.send("s1", "pay 3"):
            if asked := event.question:
                with pytest.raises(UsageError, match="'yes' is not one of allow, deny"):
                    await client.answer("s1", asked, "yes")
                break


@pytest.mark.slow
@spec("TURN-50")
async def test_a_sub_agents_question_is_answered_in_its_own_session() -> None:
    purse = Purse()
    clerk = Agent(ScriptedModel([PAY, text("it is paid")]), tools=[purse.tool], name="clerk")
    boss = Agent(
        ScriptedModel([calls(("clerk", '{"task":"pay"}')), text("ok")]),
        tools=[sub_agent(clerk, description="Pays.")],
    )
    async with served(asgi(boss, store=MemoryStore())) as server, connect(server.url) as client:
        seen: list[Event] = []
        async with asyncio.timeout(WAIT_S):
            async for event in client.send("s1", "pay"):
                seen.append(event)
                if asked := event.question:
                    (listed,) = await client.questions("s1")
                    assert (listed.session, listed.agents) == (event.path[-1], ("clerk",))
                    await client.answer(event.path[-1], asked, "allow")
        assert any(isinstance(event.record, ChildDelta) for event in seen)
        assert (_results(seen), purse.paid) == ([("it is paid", Outcome.OK)], [3])


@spec("TURN-33")
async def test_a_client_tool_waits_for_approval_and_runs_with_the_edited_arguments(tmp_path: Path) -> None:
    purse = Purse()
    async with (
        served(make_app([PAY, text("ok")])) as server,
        connect(server.url, state=tmp_path / "state.db", tools=[purse.tool]) as client,
    ):
        seen: list[Event] = []
        async with asyncio.timeout(WAIT_S):
            async for event in client.send("s1", "pay 3"):
                seen.append(event)
                if asked := event.question:
                    assert purse.paid == []
                    await client.answer("s1", asked, "allow", arguments='{"sum":1}')
        ((content, outcome),) = _results(seen)
        assert (purse.paid, outcome) == ([1], Outcome.OK)
        assert content.endswith("paid 1")


async def test_an_answer_whose_ack_was_lost_with_its_process_is_sent_again(tmp_path: Path) -> None:
    purse = Purse()
    async with (
        served(make_app([PAY, text("ok")], tools=[purse.tool])) as server,
        connect(server.url) as speaker,
    ):
        turn = speaker.send("s1", "pay 3")
        asked = None
        async for event in turn:
            if asked := event.question:
                break
        assert asked is not None
        world = FakeWorld(at=World().now())
        world.crash_at(Fault.AFTER_CHECKPOINT)
        state = tmp_path / "state.db"
        with pytest.raises(Crashed):
            async with connect(server.url, state=state, world=world) as boss, asyncio.timeout(WAIT_S):
                await boss.answer("s1", asked, "allow")
        assert purse.paid == []
        follower = speaker.follow("s1", "0-0")
        async with connect(server.url, state=state) as boss:
            assert await boss.resume_interrupted() == []
            async with asyncio.timeout(WAIT_S):
                async for event in follower:
                    if event.is_end:
                        break
        assert purse.paid == [3]


async def test_a_tool_answered_by_people_is_not_a_clients_tool() -> None:
    with pytest.raises(ToolDefinitionError, match="'ask_user'"):
        connect("http://127.0.0.1:1", tools=[question()])


# --- the queue ------------------------------------------------------------------------------------------------------


@spec("STREAM-35")
async def test_a_message_during_a_turn_waits_and_then_has_its_turn() -> None:
    gate = asyncio.Event()

    def response(request: ModelRequest) -> list[ScriptedStep]:
        users = sum(entry.__class__.__name__ == "UserMessage" for entry in request.history.entries)
        return [Gate(gate), *text("first")] if users == 1 else text("second")

    async with served(make_app(response)) as server, connect(server.url) as client:
        first, second = client.send("s1", "one"), client.send("s1", "two")
        await anext(first)
        records = [await anext(second), await anext(second), await anext(second)]
        assert isinstance(records[-1].record, MessageQueued)
        with pytest.raises(SessionBusyError):
            await _all(client.send("s1", "three", when_busy="refuse"))
        gate.set()
        assert "".join(event.text for event in await _all(first)) == "first"
        assert "".join(event.text for event in await _all(second)) == "second"


@spec("TURN-29")
async def test_any_client_can_withdraw_a_queued_message() -> None:
    gate = asyncio.Event()
    app = make_app([[Gate(gate), *text("first")]])
    async with served(app) as server, connect(server.url) as client, connect(server.url) as other:
        first, second = client.send("s1", "one"), client.send("s1", "two")
        await anext(first)
        waiting = asyncio.create_task(_all(second))
        queued: list[int] = []
        async for event in other.follow("s1", "0-0"):
            if isinstance(event.record, MessageQueued):
                queued.append(event.record.number)
                break
        assert queued == [1]
        await other.withdraw("s1", 1)
        await other.withdraw("s1")
        assert isinstance((await waiting)[-1].record, MessageWithdrawn)
        gate.set()
        assert _status(await _all(first)) is TurnStatus.COMPLETED


# --- resumed turns --------------------------------------------------------------------------------------------------


@spec("TURN-30", "STREAM-36")
async def test_any_client_can_resume_a_failed_turn_and_only_once() -> None:
    gate = asyncio.Event()
    lives: list[list[ScriptedStep]] = [
        [TextDelta("half a"), ModelRejectedError("the key has expired")],
        [Gate(gate), *text(" sentence")],
    ]

    async with served(make_app(lambda _: lives.pop(0))) as server, connect(server.url) as client:
        assert _status(await _all(client.send("s1", "hi"))) is TurnStatus.FAILED
        with pytest.raises(NothingToResumeError):
            await _all(client.resume("s1", turn=7))
        resumed = client.resume("s1")
        seen = [await anext(resumed)]
        while not isinstance(seen[-1].record, TurnResumed):
            seen.append(await anext(resumed))
        with pytest.raises(SessionBusyError):
            await _all(client.resume("s1"))
        gate.set()
        rest = await _all(resumed)
        assert ("".join(event.text for event in rest), _status(rest)) == (" sentence", TurnStatus.COMPLETED)
        with pytest.raises(NothingToResumeError):
            await _all(client.resume("s1"))
        with pytest.raises(SessionNotFoundError):
            await _all(client.resume("nowhere"))
