"""The OpenAI Agents SDK with its SQLite session, and with midstream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agents import Agent, ModelResponse, Runner, SQLiteSession, Usage, function_tool, set_tracing_disabled
from agents.models.interface import Model
from agents.testing import assistant_message, function_call

from bench.durable.play import ANSWER, STEP_ARGUMENT, Contestant, Play, Turn

TURNS_MAX = 1000


class PlayedModel(Model):
    """Returns the next calls of the play."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def get_response(self, system_instructions: Any, input: Any, *_args: Any, **_keywords: Any) -> Any:  # noqa: ARG002 - the SDK's names
        items = [] if isinstance(input, str) else input
        names = self._play.calls(sum(item.get("type") == "function_call" for item in items))
        calls = [function_call("act", {"name": name, "text": STEP_ARGUMENT}, call_id=name) for name in names]
        return ModelResponse(calls or [assistant_message(ANSWER)], Usage(), None)

    def stream_response(self, *_args: Any, **_keywords: Any) -> Any:
        raise NotImplementedError


def tool_of(play: Play) -> Any:
    @function_tool
    async def act(name: str, text: str) -> str:  # noqa: ARG001 - it has the size of a real argument
        """Act."""
        return await play.work(name)

    return act


@asynccontextmanager
async def session(play: Play) -> AsyncIterator[Turn]:
    """Run turns with a session. The SDK cannot resume, so the application runs again with the same session."""
    set_tracing_disabled(True)
    agent = Agent(name="bench", model=PlayedModel(play), tools=[tool_of(play)])

    async def turn(name: str) -> str:
        memory = SQLiteSession(name, play.folder / "session.db")
        words = "continue" if play.is_resumed else "go"
        return str((await Runner.run(agent, words, session=memory, max_turns=TURNS_MAX)).final_output)

    yield turn


@asynccontextmanager
async def midstream(play: Play) -> AsyncIterator[Turn]:
    """Run turns with midstream. A resumed run is the same call as the first one."""
    from midstream.frameworks.openai_agents import DurableAgents  # noqa: PLC0415 - only for the measurement

    set_tracing_disabled(True)
    durable = DurableAgents(play.folder / "agent.db")
    tools = durable.tools([tool_of(play)])
    agent = Agent(name="bench", model=durable.model(PlayedModel(play)), tools=tools)

    async def turn(name: str) -> str:
        async with durable.turn(name, "go", key="k"):
            return str((await Runner.run(agent, "go", max_turns=TURNS_MAX)).final_output)

    yield turn
    await durable.close()


CONTESTANTS: dict[str, Contestant] = {
    "OpenAI Agents, SQLiteSession": session,
    "OpenAI Agents + midstream": midstream,
}
