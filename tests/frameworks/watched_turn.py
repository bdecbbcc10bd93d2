"""A turn with a tool that fails and a model that fails once, with a canary in all of its text."""

from __future__ import annotations

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import ModelUnavailableError
from midstream.history.messages import Finish, Usage, UserMessage
from midstream.models.responses import Finished, ModelRequest
from midstream.observability.observers import Observer
from midstream.session.turn.commands import SendMessage
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedModel, ScriptedStep, calls, text
from midstream.tools.function_tools import tool

CANARY = "canary-7d1f"


@tool(has_effects=False)
async def look(where: str) -> str:
    """Look. Without a thread, which would take its own time beside the clock of the test."""
    raise RuntimeError(f"{CANARY} {where}")


async def run_watched_turn(observer: Observer) -> None:
    """Let an agent answer, with an observer."""
    asked = 0

    def response(request: ModelRequest) -> list[ScriptedStep]:
        nonlocal asked
        asked += 1
        if asked == 1:
            return [ModelUnavailableError(CANARY)]
        finished = Finished(Finish.STOP, "m-1", Usage(700, 30, 200, 100))
        if asked == 2:
            return calls(("look", f'{{"where": "{CANARY}"}}'), text=CANARY)
        return [*text(f"{CANARY} done")[:-1], finished]

    world = FakeWorld()
    host = Host(Agent(ScriptedModel(response), tools=[look]), MemoryStore(), world=world)
    host.observers.add(observer)
    await host.start()
    runner = await host.session("s1", create=True)
    await runner.submit(SendMessage(UserMessage.of(CANARY)))
    for _ in range(20):
        await world.advance(1.0)
    assert not runner.state.is_live
    await host.stop(grace_s=0)
