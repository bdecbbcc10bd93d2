"""A key endpoint of an application, served on a free port of this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from midstream.server.key_service import key_app
from midstream.store.encryption.ciphers import FileKeys
from tests.store.keys import keys_in

TOKEN = "token-of-the-clerk"
WAIT_S = 60.0


class Accepted:
    """The tokens that an application accepts, and the number of requests it decided."""

    def __init__(self) -> None:
        self.tokens = {TOKEN}
        self.requests = 0

    async def __call__(self, token: str) -> bool:
        self.requests += 1
        return token in self.tokens


@contextlib.contextmanager
def serving(app: ASGIApp, pem: Path | None = None) -> Iterator[str]:
    """Serve an app in a thread until the end of the block; yield the URL.

    Args:
        pem: The certificate with its key, for TLS.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ssl_certfile=pem))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"{'https' if pem else 'http'}://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)


@contextlib.contextmanager
def key_endpoint(
    folder: Path,
    accepted: Accepted | None = None,
    *,
    keys: FileKeys | None = None,
    pem: Path | None = None,
) -> Iterator[str]:
    """Serve the keys of a folder until the end of the block; yield the URL."""
    with serving(key_app(keys or keys_in(folder), authorize=accepted or Accepted()), pem) as url:
        yield url
