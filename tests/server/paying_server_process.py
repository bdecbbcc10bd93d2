"""A server whose agent and sub-agent ask before they pay: `python -m ... FOLDER PORT DAYS`.

Its clock is `DAYS` ahead, so that tests need no waiting.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from midstream.engine.agent import Agent, sub_agent
from midstream.environment import World
from midstream.history.messages import UserMessage
from midstream.models.responses import ModelRequest
from midstream.server.app import asgi
from midstream.server.uvicorn_server import serve
from midstream.testing.scripted_model import ScriptedModel, ScriptedStep, calls, steps_since_user, text
from midstream.tools.function_tools import tool

DAY_S = 24 * 60 * 60.0
LOOK_BACK_S = 1.0


class Ahead(World):
    """A world whose calendar is days ahead."""

    def __init__(self, days: float) -> None:
        self._ahead_s = days * DAY_S

    def now(self) -> float:
        return super().now() + self._ahead_s


def _response(request: ModelRequest) -> list[ScriptedStep]:
    if steps_since_user(request.history):
        return text("It is paid.")
    message = [entry for entry in request.history.entries if isinstance(entry, UserMessage)][-1]
    is_delegated = message == UserMessage.of("delegate")
    return calls(("clerk", '{"task":"pay"}')) if is_delegated else calls(("pay", '{"sum":3}'))


async def main(folder: Path, port: int, days: float) -> None:
    @tool(needs_approval=True)
    def pay(sum: int) -> str:  # noqa: A002 - the model's name for it
        """Pay."""
        with (folder / "ledger").open("a") as ledger:
            ledger.write(f"{sum}\n")
        return f"paid {sum}"

    clerk = Agent(ScriptedModel(_response), tools=[pay], name="clerk")
    agent = Agent(ScriptedModel(_response), tools=[pay, sub_agent(clerk, description="Pays.")])
    app = asgi(agent, store=folder / "sessions.db", world=Ahead(days), look_back_s=LOOK_BACK_S)
    await serve(app, port=port, on_listening=lambda url: print(url, flush=True))  # noqa: T201 - for the test


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
