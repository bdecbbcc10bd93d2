"""An agent mounted in a Starlette app under plain uvicorn: `python -m tests.server.mounted_process FOLDER
[OPTIONS]`.

The last text of its model waits until the file `go` is in the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

import midstream
from midstream.store.sqlite import SQLiteStore
from tests.fault.worker_process import Go, WorkerModel, WorkerWorld


class Printing(uvicorn.Server):
    """A uvicorn server that prints the address of the agent once it accepts connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        host, port = self.servers[0].sockets[0].getsockname()
        print(f"http://{host}:{port}/agent", flush=True)  # noqa: T201 - for the driver


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without-lifespan", action="store_true")
    parser.add_argument("--allow-unauthenticated", action="store_true")
    given = parser.parse_args()
    world = WorkerWorld(None, 1)
    go = Go(given.folder / "go", world)
    store = SQLiteStore(given.folder / "server.db", world=world)
    agents = midstream.asgi(
        midstream.Agent(WorkerModel(go, world)),
        store=store,
        world=world,
        allow_unauthenticated=given.allow_unauthenticated,
    )

    @contextlib.asynccontextmanager
    async def own(app: Starlette) -> AsyncIterator[None]:
        looking = world.spawn(go.look(), name="go")
        async with contextlib.nullcontext() if given.without_lifespan else agents.lifespan(app):
            yield
        looking.cancel()
        (given.folder / "ended").touch()

    app = Starlette(routes=[Mount("/agent", agents)], lifespan=own)
    Printing(uvicorn.Config(app, port=0, log_config=None)).run()


if __name__ == "__main__":
    main()
