"""An agent that restarts its answer: readers that can drop text get the second attempt, others get each part once."""

from __future__ import annotations

import pytest

from midstream import Agent, Host, Pooled
from midstream.agents.restarted_answers import JoinedAnswer
from midstream.agents.upstreams import ResponseRestarted, UpstreamEvent
from midstream.models.responses import (
    Finished,
    ModelEvent,
    TextDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
)
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_upstream import AgentConversation, ScriptedUpstream
from tests.agents.pooling import PoolBench
from tests.spec import spec

AGAIN = ResponseRestarted()


@spec("REUSE-85")
@pytest.mark.parametrize(
    ("events", "text"),
    [
        (["a ", "b ", AGAIN, "a ", "b ", "c"], "a b c"),
        (["a ", "b ", AGAIN, "a b c ", "d"], "a b c d"),
        (["a ", "b ", AGAIN, "a ", "x"], "a b \n\na x"),
        (["a ", "b ", AGAIN, "a "], "a b "),
        (["a ", AGAIN, "a ", AGAIN, "a ", "b"], "a b"),
        ([AGAIN, "a"], "a"),
        (["a ", UpstreamCallStarted("1", "shell", "{}"), AGAIN, "a "], "a a "),
    ],
)
def test_a_second_attempt_is_joined_to_the_first_one(
    events: list[str | ModelEvent | ResponseRestarted], text: str
) -> None:
    answer = JoinedAnswer(can_drop=False)
    passed = [
        each
        for event in events
        for each in answer.take(TextDelta(event) if isinstance(event, str) else event)
    ]
    assert "".join(event.text for event in passed if isinstance(event, TextDelta)) == text


def cut_once(talk: AgentConversation) -> list[UpstreamEvent]:
    return [TextDelta("cut "), ResponseRestarted(), TextDelta("whole"), Finished()]


@spec("REUSE-85")
async def test_the_readers_of_a_session_get_only_the_second_attempt_and_the_agent_gets_one_message() -> None:
    upstream = ScriptedUpstream(answer=cut_once)
    async with Host(Agent(Pooled(upstream)), MemoryStore()) as host:
        assert await host.ask("s", "hi") == "whole"
        assert await host.ask("s", "and now") == "whole"
    assert len(upstream.memory.arrived) == 2


def cut_behind_a_tool(talk: AgentConversation) -> list[UpstreamEvent]:
    return [UpstreamCallStarted("1", "shell", "{}"), UpstreamCallEnded("1", "done"), *cut_once(talk)]


@spec("REUSE-85")
async def test_after_a_tool_the_second_attempt_starts_a_paragraph() -> None:
    upstream = ScriptedUpstream(answer=cut_behind_a_tool)
    async with Host(Agent(Pooled(upstream)), MemoryStore()) as host:
        assert await host.ask("s", "hi") == "cut \n\nwhole"
    assert len(upstream.memory.arrived) == 1


@spec("REUSE-85")
async def test_another_request_of_the_session_ends_the_waiting_run() -> None:
    bench = PoolBench(ScriptedUpstream(answer=cut_once))
    host = await bench.host()
    await host.fail("hi")
    await host.fail("something else")  # ends the first run
    await host.ask()  # continues with the second one
    assert host.text == "whole"
    assert bench.upstream.memory.wrongs == []
