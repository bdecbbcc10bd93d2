"""A server that may kill itself at a fault point: `python -m tests.fault.fault_server_process FOLDER PORT`."""

from __future__ import annotations

import asyncio
import logging
import os

from midstream.engine.agent import Agent
from midstream.server.app import asgi
from midstream.server.uvicorn_server import serve
from midstream.testing.scripted_model import ScriptedModel
from tests.fault.fault_stories import StoryStage
from tests.fault.options import Options
from tests.fault.stored import make_store
from tests.fault.turn import SLOW_CANCELLED_S, SLOW_S, EffectLedger, script, server_tools


async def main() -> None:
    options = Options("server")
    world = options.world()
    ledger = EffectLedger(options.folder / "ledger")
    if options.story == "words":
        slow_s = SLOW_CANCELLED_S if options.is_cancelling else SLOW_S
        tools = server_tools(ledger, world, slow_s=slow_s)
        agent = Agent(ScriptedModel(script(), world=world), tools=tools)
    else:
        agent = StoryStage(options.folder, world, dies_inside=options.dies_inside).agent(options.story)
    app = asgi(agent, store=make_store(options.folder, world), world=world)
    os.write(options.notes, f"start {world.now():.6f}\n".encode())
    await serve(app, port=options.port, on_listening=lambda url: print(url, flush=True))  # noqa: T201 - for the driver


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main())
