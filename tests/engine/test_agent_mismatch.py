"""An open turn belongs to the agent with which it started."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import AgentMismatchError
from midstream.history.messages import Outcome, UserMessage
from midstream.models.responses import TextDelta
from midstream.session.call_references import CallRef
from midstream.session.calls import Choice
from midstream.session.records import CallEnded, CallStarted, EpochStarted, TurnStatus, decode
from midstream.session.session import Session, fold
from midstream.session.turn.commands import Answer, Cancel, Resume, SendMessage
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel, Stall, calls, records_until_end, text
from midstream.testing.scripted_model import ScriptedStep
from midstream.tools.function_tools import tool
from tests.engine.test_host import _die, _start
from tests.spec import spec


def _agent(
    name: str, *script: Sequence[ScriptedStep], version: str = "", ran: list[str] | None = None
) -> Agent:
    @tool(needs_approval=True)
    def push(button: str) -> str:
        """Push a button."""
        if ran is not None:
            ran.append(button)
        return "pushed"

    return Agent(ScriptedModel([*script]), name=name, version=version, tools=[push])


async def _store_running_turn(store: MemoryStore, *, version: str = "") -> None:
    """Leave a turn of the agent `cook` in the middle of its text."""
    host = await _start(Host(_agent("cook", [TextDelta("half"), Stall()], version=version), store))
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    await _die(host)


async def _open_session(store: MemoryStore, agent: Agent) -> Runner:
    return await (await _start(Host(agent, store))).session("s")


@spec("TURN-86")
@pytest.mark.parametrize(("name", "version"), [("waiter", ""), ("waiter", "1"), ("cook", "2")])
async def test_another_agent_does_not_continue_a_turn_and_logs_the_remedy(name: str, version: str) -> None:
    store = MemoryStore()
    await _store_running_turn(store, version="1")
    runner = await _open_session(store, _agent(name, text("stolen"), version=version))
    before = runner.newest
    for command in (None, SendMessage(UserMessage.of("and?")), Answer(CallRef(1, 1, "c"), "d", Choice.ALLOW)):
        if command is not None:
            with pytest.raises(AgentMismatchError, match=f"'cook' 1.*{name!r}.*serve that agent"):
                await runner.submit(command)
        assert (runner.newest, runner.state.is_live, runner.state.agent) == (before, True, "cook")
    again = await _open_session(store, _agent("cook", text("the whole answer"), version="1"))
    ended = await records_until_end(again, after=0)
    assert again.state.last_turn is not None
    assert again.state.last_turn.status is TurnStatus.COMPLETED
    assert [each.agent for each in ended if isinstance(each, EpochStarted)] == ["cook", "cook"]


@spec("TURN-86")
@pytest.mark.parametrize("versions", [("1", "1"), ("", "1"), ("1", "")])
async def test_an_empty_version_matches_any(versions: tuple[str, str]) -> None:
    store = MemoryStore()
    await _store_running_turn(store, version=versions[0])
    runner = await _open_session(store, _agent("cook", text("the whole answer"), version=versions[1]))
    await records_until_end(runner, after=0)
    assert not runner.state.is_live


@spec("TURN-86")
async def test_an_approval_is_not_consumed_by_another_agent() -> None:
    store, ran = MemoryStore(), list[str]()
    first = await _start(Host(_agent("cook", calls(("c1", "push", '{"button":"red"}'))), store))
    runner = await first.session("s", create=True)
    end = await runner.submit(SendMessage(UserMessage.of("hi")))
    while not runner.state.rests_on_people:
        await runner.wait(end)
        end = runner.newest.position
    digest = runner.state.turn.calls[0].plan.digest  # type: ignore[union-attr]
    await _die(first)

    allowed = Answer(CallRef(1, 1, "c1"), digest, Choice.ALLOW)
    other = await _open_session(store, _agent("waiter", text("stolen"), ran=ran))
    with pytest.raises(AgentMismatchError):
        await other.submit(allowed)
    assert ran == []
    again = await _open_session(store, _agent("cook", text("done"), ran=ran))
    await again.submit(allowed)
    records = await records_until_end(again, after=0)
    assert (ran, len([each for each in records if isinstance(each, CallStarted)])) == (["red"], 1)


@spec("TURN-86")
async def test_a_cancel_ends_the_held_turn_without_running_any_of_it() -> None:
    store = MemoryStore()
    await _store_running_turn(store)
    model = ScriptedModel([text("next")])
    runner = await _open_session(store, Agent(model, name="waiter"))
    await runner.submit(Cancel())
    assert runner.state.last_turn is not None
    assert runner.state.last_turn.status is TurnStatus.CANCELLED
    assert model.requests == []
    await runner.submit(SendMessage(UserMessage.of("hello")))
    assert (runner.state.turns, runner.state.agent) == (2, "waiter")


@spec("TURN-86")
async def test_an_explicit_resume_continues_with_the_served_agent() -> None:
    store = MemoryStore()
    await _store_running_turn(store)
    runner = await _open_session(store, _agent("waiter", text("the whole answer")))
    await runner.submit(Resume())
    await records_until_end(runner, after=0)
    assert runner.state.last_turn is not None
    assert runner.state.last_turn.status is TurnStatus.COMPLETED
    assert (runner.state.turns, runner.state.agent) == (1, "waiter")


def test_a_journal_without_an_agent_name_matches_any() -> None:
    old = decode(msgspec.json.encode({"type": "epoch_started", "epoch": 1, "node": "o", "at": 1.0}))
    state = fold([(1, old)], Session())
    assert (state.agent, state.is_turn_of_other("waiter", "2")) == ("", False)


async def _store_open_question(store: MemoryStore) -> Runner:
    """Leave a turn that waits for a person's approval of a call of `push`."""
    first = await _start(Host(_agent("cook", calls(("c1", "push", '{"button":"red"}'))), store))
    runner = await first.session("s", create=True)
    end = await runner.submit(SendMessage(UserMessage.of("hi")))
    while not runner.state.rests_on_people:
        await runner.wait(end)
        end = runner.newest.position
    await _die(first)
    return runner


@spec("TURN-90")
async def test_a_turn_with_missing_tools_is_held_and_listed() -> None:
    store = MemoryStore()
    left = await _store_open_question(store)
    digest = left.state.turn.calls[0].plan.digest  # type: ignore[union-attr]
    host = await _start(Host(Agent(ScriptedModel([text("stolen")]), name="cook"), store))
    runner = await host.session("s")
    before = runner.newest
    assert host.awake.waits_for(runner) == "agent"
    for command in (SendMessage(UserMessage.of("and?")), Answer(CallRef(1, 1, "c1"), digest, Choice.ALLOW)):
        with pytest.raises(AgentMismatchError, match=r"no longer has \('push'\).*sessions resume"):
            await runner.submit(command)
    assert (runner.newest, runner.state.is_live) == (before, True)
    ran: list[str] = []
    again = await _open_session(store, _agent("cook", text("done"), ran=ran))
    await again.submit(Answer(CallRef(1, 1, "c1"), digest, Choice.ALLOW))
    await records_until_end(again, after=0)
    assert ran == ["red"]


@spec("TURN-90")
async def test_a_held_turn_continues_when_it_is_resumed_or_ends_when_it_is_cancelled() -> None:
    for command, status, outcome in (
        (Resume(), TurnStatus.COMPLETED, Outcome.ERROR),
        (Cancel(), TurnStatus.CANCELLED, Outcome.CANCELLED),
    ):
        store = MemoryStore()
        left = await _store_open_question(store)
        digest = left.state.turn.calls[0].plan.digest  # type: ignore[union-attr]
        runner = await _open_session(store, Agent(ScriptedModel([text("without it")]), name="cook"))
        await runner.submit(command)
        if runner.state.is_live and runner.state.rests_on_people:
            await runner.submit(Answer(CallRef(1, 1, "c1"), digest, Choice.ALLOW))
        records = await records_until_end(runner, after=0)
        assert runner.state.last_turn is not None
        assert runner.state.last_turn.status is status
        results = [each.result for each in records if isinstance(each, CallEnded)]
        assert [each.outcome for each in results] == [outcome]


@spec("TURN-90")
async def test_additional_tools_do_not_hold_a_turn() -> None:
    store = MemoryStore()
    await _store_open_question(store)
    ran: list[str] = []
    cook = _agent("cook", text("done"), ran=ran)
    more = Agent(cook.model, name="cook", tools=[*cook.tools.values(), tool(has_effects=False)(_more)])
    host = await _start(Host(more, store))
    assert host.awake.waits_for(await host.session("s")) == "person"


def _more() -> str:
    """Do more."""
    return "more"
