"""A process with one session whose provider stores its responses: `stored_response_process DB URL [POINT TIME]`.

It sends one message, or continues the session of an earlier process, and may kill itself on the way.
"""

from __future__ import annotations

import asyncio
import sys

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import Fault
from midstream.history.messages import UserMessage
from midstream.models.openai_responses import OpenAIResponses
from midstream.session.turn.commands import SendMessage
from midstream.store.sqlite import SQLiteStore
from midstream.testing.fake_worlds import KillingWorld


async def main(path: str, url: str, point: str = "", time: str = "1") -> None:
    world = KillingWorld(Fault(point) if point else None, int(time))
    async with OpenAIResponses(url, "m", world=world) as model:
        host = Host(Agent(model), SQLiteStore(path, world=world), world=world)
        await host.start()
        await host.wait_for_recovery()
        runner = await host.session("s", create=True)
        if not runner.state.turns:
            await runner.submit(SendMessage(UserMessage.of("hi")))
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
        await host.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
