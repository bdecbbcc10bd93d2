"""The loop of midstream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from bench.durable.play import ANSWER, STEP_ARGUMENT, Contestant, Play, Turn
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.history.messages import Finish, Step, UserMessage
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta, ToolCallRequested
from midstream.session.records import TurnEnded, decode
from midstream.session.turn.commands import SendMessage
from midstream.tools.function_tools import tool


class PlayedModel:
    """Returns the next calls of the play."""

    name = "played"

    def __init__(self, play: Play) -> None:
        self._play = play

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """See `midstream.models.model.Model`."""
        steps = [each for each in request.history.entries if isinstance(each, Step)]
        results = [result.content for each in steps for result in each.results]
        names = self._play.calls(sum(len(each.response.calls) for each in steps), results)
        for name in names:
            arguments = msgspec.json.encode({"name": name, "text": STEP_ARGUMENT}).decode()
            yield ToolCallRequested(name, "act", arguments)
        if not names:
            yield TextDelta(ANSWER)
        yield Finished(Finish.CALLS if names else Finish.STOP)


@asynccontextmanager
async def native(play: Play) -> AsyncIterator[Turn]:
    """Run turns on a host, which recovers by itself."""

    @tool
    async def act(name: str, text: str) -> str:  # noqa: ARG001 - it has the size of a real argument
        return await play.work(name)

    host = Host(Agent(PlayedModel(play), tools=[act]), play.store("host.db"))
    await host.start()

    async def turn(session: str) -> str:
        runner = await host.session(session, create=True)
        runner.attach()  # a session of the dead process without a reader is released
        if not play.is_resumed:
            await runner.submit(SendMessage(UserMessage.of("go")))
        after = 0
        while True:
            for stored in await runner.read(after=after, limit=1000):
                after = stored.position
                if isinstance(decode(stored.body), TurnEnded):
                    last = runner.state.history.entries[-1]
                    return last.response.text if isinstance(last, Step) else ""
            await runner.wait(after)

    yield turn
    async with asyncio.timeout(10):
        await host.stop(grace_s=1.0)


CONTESTANTS: dict[str, Contestant] = {"midstream": native}
