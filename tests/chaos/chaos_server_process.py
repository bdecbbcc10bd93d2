"""The server of a chaos run: `python -m tests.chaos.chaos_server_process FOLDER PORT`."""

from __future__ import annotations

import asyncio
import logging

from midstream.engine.agent import Agent
from midstream.protocol.stream_settings import StreamSettings
from midstream.server.app import asgi
from midstream.server.uvicorn_server import serve
from midstream.store.sqlite import SQLiteStore
from midstream.testing.fake_worlds import KillingWorld
from midstream.testing.scripted_model import ScriptedModel
from tests.chaos.turns import ProcessArguments, script, server_tools
from tests.fault.turn import EffectLedger

HEARTBEAT_S = 0.25
"""Half-open connections are found after three of them: a run has no thirty seconds."""


async def main() -> None:
    arguments = ProcessArguments()
    world = KillingWorld(*arguments.death)
    tools = server_tools(EffectLedger(arguments.folder / "ledger"), world)
    app = asgi(
        Agent(ScriptedModel(script(), world=world), tools=tools),
        store=SQLiteStore(arguments.folder / "server.db", world=world),
        world=world,
        settings=StreamSettings(heartbeat_s=HEARTBEAT_S),
    )
    await serve(app, port=arguments.port, on_listening=lambda url: print(url, flush=True))  # noqa: T201 - for the driver


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
