"""The scripted upstream keeps conversations, and fails by script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from midstream.agents.upstream_abilities import Abilities
from midstream.agents.upstreams import Marked, MessageTaken, Setup, UpstreamEvent, UpstreamMessage
from midstream.errors import ModelError, ModelUnavailableError, UpstreamBusyError, UpstreamGoneError
from midstream.history.messages import Usage, UserMessage
from midstream.models.responses import Finished, TextDelta
from midstream.testing.scripted_upstream import ScriptedAgent, ScriptedUpstream, Trouble, words_of

SETUP = Setup()
ENDLESS = tuple(trouble for trouble in Trouble if trouble.value.startswith("hangs"))


async def test_a_conversation_continues_by_name_from_another_process() -> None:
    one = ScriptedUpstream()
    events = await _send(await one.open(SETUP), "a")
    assert events == [
        MessageTaken("agent-1"),
        TextDelta("answer "),
        TextDelta("1"),
        Finished(usage=Usage(1, 2)),
    ]
    other = ScriptedUpstream(one.memory)
    events = await _send(await other.open(SETUP, resume="agent-1"), "b")
    assert events[0] == MessageTaken("agent-1", "agent-1")
    assert one.memory.talks["agent-1"].words == "a\nb"


async def test_a_fork_contains_only_the_messages_before_the_mark() -> None:
    upstream = ScriptedUpstream(abilities=Abilities(can_fork=True))
    agent = await upstream.open(SETUP)
    marks = [event for text in ("a", "b") for event in await _send(agent, text) if isinstance(event, Marked)]
    fork = await upstream.fork(SETUP, agent="agent-1", mark=marks[0].mark)
    events = await _send(fork, "c")
    assert events[0] == MessageTaken("agent-2", "agent-1")
    assert [talk.words for talk in upstream.memory.talks.values()] == ["a\nb", "a\nc"]


@pytest.mark.parametrize("trouble", [each for each in Trouble if each not in ENDLESS])
async def test_a_trouble_affects_one_message_and_the_next_works(trouble: Trouble) -> None:
    upstream = ScriptedUpstream()
    await _send(await upstream.open(SETUP), "a")
    upstream.troubles.append(trouble)
    events: list[UpstreamEvent] = []
    try:
        agent = await upstream.open(SETUP, resume="agent-1")
        await _send(agent, "b", events)
    except ModelError:
        assert not any(isinstance(event, Finished) for event in events)
    else:
        assert trouble in (Trouble.NEW_CHAT, Trouble.CUT)
    agent = await upstream.open(SETUP, resume="agent-1")
    events = [event async for event in agent.send(_message("c"), key="c", is_forced=True)]
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize("trouble", sorted(ENDLESS))
async def test_a_hanging_run_ends_when_it_is_closed(trouble: Trouble) -> None:
    upstream = ScriptedUpstream(troubles=[trouble])
    agent = await upstream.open(SETUP)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await _send(agent, "a")
    assert isinstance((await _send(agent, "b"))[-1], Finished)


async def test_repeating_the_same_key_makes_up_for_a_lost_acknowledgement() -> None:
    upstream = ScriptedUpstream()
    agent = await upstream.open(SETUP)
    await _send(agent, "a")
    upstream.troubles.append(Trouble.ACK_LOST)
    with pytest.raises(ModelUnavailableError):
        await _send(agent, "b")
    await _send(agent, "b")
    assert upstream.memory.talks["agent-1"].words == "a\nb"


async def test_forbidden_calls_are_recorded() -> None:
    upstream = ScriptedUpstream()
    agent = await upstream.open(SETUP)
    running = agent.send(_message("a"), key="a")
    await anext(running)
    with pytest.raises(UpstreamBusyError):
        await _send(agent, "b")
    await running.aclose()
    await _send(agent, "c", key="a")
    assert upstream.memory.wrongs == ["agent-1 was spoken to while it spoke", "key 'a' stands for two things"]


async def test_a_deleted_agent_is_gone() -> None:
    upstream = ScriptedUpstream()
    await _send(await upstream.open(SETUP), "a")
    await upstream.delete("agent-1")
    for opening in (upstream.open(SETUP, resume="agent-1"), upstream.fork(SETUP, agent="agent-1", mark="1")):
        with pytest.raises(UpstreamGoneError):
            await opening
    assert upstream.memory.forgotten == ["agent-1"]


async def test_open_agents_are_counted() -> None:
    upstream = ScriptedUpstream()
    agents = [await upstream.open(SETUP) for _ in range(3)]
    for agent in agents[:2]:
        await agent.aclose()
        await agent.aclose()
    assert (upstream.live, upstream.live_max) == (1, 3)


def test_the_text_of_a_message_is_complete() -> None:
    assert words_of(_message("a")) == "a"


def _message(text: str) -> UpstreamMessage:
    return UpstreamMessage(UserMessage.of(text))


async def _send(
    agent: ScriptedAgent, text: str, events: list[UpstreamEvent] | None = None, *, key: str = ""
) -> Sequence[UpstreamEvent]:
    received = [] if events is None else events
    async for event in agent.send(_message(text), key=key or text):
        received.append(event)
    return received
