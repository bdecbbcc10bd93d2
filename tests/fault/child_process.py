"""A server whose agent delegates everything to a sub-agent, and whose sub-agent kills it: `… FOLDER`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from midstream.engine.agent import Agent, sub_agent
from midstream.models.responses import ModelRequest
from midstream.server.app import asgi
from midstream.server.uvicorn_server import serve
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import ScriptedModel, ScriptedStep, calls
from midstream.tools.function_tools import tool
from tests.fault.turn import EffectLedger


async def main(folder: Path) -> None:
    ledger = EffectLedger(folder / "ledger")

    @tool
    async def kill() -> str:
        """Kill the server, as a tool that takes all its memory does."""
        ledger.note("kill", "began")
        os.kill(os.getpid(), signal.SIGKILL)
        return "not reached"

    def killing(_: ModelRequest) -> list[ScriptedStep]:
        return calls(("a", "kill", "{}"))

    def calling(_: ModelRequest) -> list[ScriptedStep]:
        return calls(("a", "middle", '{"task": "kill"}'))

    def handing_on(_: ModelRequest) -> list[ScriptedStep]:
        return calls(("a", "killer", '{"task": "kill"}'))

    killer = Agent(ScriptedModel(killing), name="killer", tools=[kill])
    middle = Agent(ScriptedModel(handing_on), name="middle", tools=[sub_agent(killer, description="Kill.")])
    parent = Agent(ScriptedModel(calling), tools=[sub_agent(middle, description="Hand it on.")])
    app = asgi(parent, store=SQLiteStore(folder / "server.db"))
    await serve(app, port=0, on_listening=lambda url: print(url, flush=True))  # noqa: T201 - for the driver


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(main(Path(sys.argv[1])))
