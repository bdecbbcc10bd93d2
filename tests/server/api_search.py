"""Run schemathesis against our server for long: python -m tests.server.api_search [TIMES].

It has only the description and the identity of an operator. Every phase and every check is on.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from midstream.engine.agent import Agent
from midstream.models.responses import ModelRequest
from midstream.observability.prometheus import Prometheus
from midstream.protocol.stream_settings import StreamSettings
from midstream.server.app import asgi
from midstream.server.auth.access import Access, bearer
from midstream.session.blobs import blob_of
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel, ScriptedStep, calls, text
from midstream.tools.function_tools import tool
from tests.house.source import ROOT
from tests.server.known_people import KNOWN, OPERATOR, post_message
from tests.server.serving import Served, served

EXAMPLES = 4
HERE = Path(__file__).parent
SCHEMATHESIS = ROOT / ".venv" / "schemathesis" / "bin" / "schemathesis"
LARGE = "a line of a large result\n" * 10_000


@tool(has_effects=False)
def dump() -> str:
    """Return much."""
    return LARGE


def _response(request: ModelRequest) -> list[ScriptedStep]:
    is_first = len(request.history.entries) == 1
    return calls(("dump", "{}")) if is_first else text("ready")


@asynccontextmanager
async def described() -> AsyncIterator[Served]:
    """Serve an app with all features and some content; no request waits for long."""
    app = asgi(
        Agent(ScriptedModel(_response), tools=[dump]),
        store=MemoryStore(),
        access=Access(authenticate=bearer(KNOWN.get)),
        observers=[Prometheus()],
        settings=StreamSettings(heartbeat_s=1.0),
    )
    async with served(app) as server:
        for session in ("s1", "s2"):
            await post_message(server.http, session, OPERATOR)
            runner = await server.app.host.session(session)
            while runner.state.is_live:
                await runner.wait(runner.newest.position)
        yield server


async def looking(server: Served, *options: str, is_quiet: bool = False) -> Process:
    """Start schemathesis."""
    [credential] = OPERATOR.values()
    return await asyncio.create_subprocess_exec(
        SCHEMATHESIS,
        f"--config-file={HERE / 'schemathesis.toml'}",
        "run",
        f"{server.url}/v1/openapi.json",
        f"--header=Authorization: {credential}",
        "--request-timeout=2",
        *options,
        stdout=asyncio.subprocess.PIPE if is_quiet else None,
        stderr=asyncio.subprocess.STDOUT if is_quiet else None,
        env={
            **os.environ,
            "MIDSTREAM_API_HOOKS": str(HERE / "api_hooks.py"),
            "MIDSTREAM_DIGEST": blob_of(LARGE).digest,
        },
    )


async def main(times: int) -> int:
    async with described() as server:
        return await (await looking(server, f"--max-examples={EXAMPLES * times}")).wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)))
