"""The gateway of a soak: `python -m tests.soak.soak_gateway FOLDER PORT UPSTREAM_URL`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from midstream.cli.upstream_options import find_upstream
from midstream.dialects import live_responses
from midstream.server import gateway_app as app_module
from midstream.server.gateway_app import gateway
from midstream.server.uvicorn_server import serve
from midstream.store.sqlite import SQLiteStore
from tests.soak.gauges import answer_commands

KEPT_S = 0.1
"""Seconds that finished responses and their sessions stay in memory: a minute of them is more than the warm-up."""


async def main(folder: Path, port: int, upstream: str) -> None:
    live_responses.KEPT_S = app_module.IDLE_S = KEPT_S
    store = SQLiteStore(folder / "gateway.db")
    model = find_upstream(f"openai-compatible:{upstream}/v1", store, model="8@0.001")
    app = gateway(model, token="the-key-of-the-soak", store=store, grace_s=1.0, kept_s=1.0)

    async def settled(name: str, count: int) -> int:
        del name
        return count

    def listening(url: str) -> None:
        print(url, flush=True)  # noqa: T201 - for the driver
        answer_commands(settled)

    await serve(app, port=port, on_listening=listening)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
