"""A server whose clients hold the keys: `python -m tests.fault.escrow_process FOLDER PORT`.

Its model streams without end until a file `go` exists. It reports everything to a log, to OpenTelemetry and to
Prometheus.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from midstream.engine.agent import Agent
from midstream.models.responses import ModelRequest, TextDelta
from midstream.observability.opentelemetry import OpenTelemetry
from midstream.observability.prometheus import Prometheus
from midstream.server.app import asgi
from midstream.server.uvicorn_server import serve
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.escrow import escrow_store
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import Response, ScriptedModel, Stall, calls, steps_since_user, text
from midstream.tools.function_tools import tool

CANARY = "canary-7f3a"


async def main(folder: Path, port: int) -> None:
    def script(request: ModelRequest) -> Response:
        if steps_since_user(request.history) == 0:
            return calls(("look", f'{{"where": "{CANARY}"}}'), text=f"{CANARY} I look.")
        if (folder / "go").exists():
            return text(f"{CANARY} that is all")
        return [TextDelta(f"{CANARY} so "), TextDelta("far"), Stall()]

    @tool
    def look(where: str) -> str:
        """Look somewhere."""
        with (folder / "ledger").open("a") as ledger:
            ledger.write("looked\n")
        return f"{where} {CANARY} " * 20_000

    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=(folder / "spans.log").open("a"))))
    telemetry = OpenTelemetry(agent="tested", tracers=tracers, meters=MeterProvider())
    app = asgi(
        Agent(ScriptedModel(script), tools=[look]),
        store=escrow_store(SQLiteStore(folder / "server.db"), FileKeys(folder / "keys")),
        observers=[Prometheus(), telemetry],
    )
    await serve(app, port=port, on_listening=lambda url: print(url, flush=True))  # noqa: T201 - for the driver


if __name__ == "__main__":
    here = Path(sys.argv[1])
    logging.basicConfig(level=logging.DEBUG, filename=here / "server.log")
    asyncio.run(main(here, int(sys.argv[2])))
