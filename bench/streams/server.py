"""The midstream server of `bench.streams`: `python -m bench.streams.server FOLDER [OPTION ...]`.

It runs as under `midstream serve`. Each response of its model requests `CALLS` calls of the client's tool `note`. Each
result is one durable command. If the message is a number, the model returns this number of words instead.

The option `encrypted` encrypts the store with an operator's key; `counting` counts syncs. The server prints its port.
Then it answers each line of input: `syncs` with the number of syncs, `collect` after a garbage collection.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from bench.steps import Counting
from midstream.cli.listening import run_server
from midstream.engine.agent import Agent
from midstream.history.messages import Finish, Text, UserMessage
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta, ToolCallRequested
from midstream.server.app import asgi
from midstream.server.uvicorn_server import serve
from midstream.store.contract import Store
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.sqlite import SQLiteStore

CALLS = 20
"""Calls of one response."""
WORD = "@".ljust(50, ".")
WORDS_AT_ONCE = 20
"""Words after which the model yields to other tasks."""


class BenchModel:
    """The model of the server."""

    name = "bench"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Return the requested number of words, or tool calls."""
        last = request.history.entries[-1]
        if isinstance(last, UserMessage) and (message := _text_of(last)).isdecimal():
            for number in range(int(message)):
                if number % WORDS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                yield TextDelta(WORD)
            yield Finished()
            return
        response = len(request.history.entries)
        for number in range(CALLS):
            yield ToolCallRequested(f"c{response}-{number}", "note", "{}")
        yield Finished(Finish.CALLS)


def _text_of(message: UserMessage) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, Text))


def _store(folder: Path, options: list[str]) -> tuple[Store, Counting | None]:
    counting = Counting("counting") if "counting" in options else None
    store: Store = SQLiteStore(folder / "bench.db", vfs="counting" if counting else None)
    if "encrypted" in options:
        FileKeys.make(folder / "key")
        store = encrypt_store(store, FileKeys(folder / "key"))
    return store, counting


async def _serve(folder: Path, options: list[str]) -> None:
    store, counting = _store(folder, options)

    def answer() -> None:
        for line in sys.stdin:
            match line.strip():
                case "syncs":
                    print(counting.syncs if counting else -1, flush=True)
                case "collect":
                    print(gc.collect(), flush=True)

    def listening(url: str) -> None:
        print(url.rpartition(":")[2], flush=True)
        threading.Thread(target=answer, daemon=True).start()

    await serve(
        asgi(Agent(BenchModel()), store=store, allow_unauthenticated=True), port=0, on_listening=listening
    )


if __name__ == "__main__":
    run_server(_serve(Path(sys.argv[1]), sys.argv[2:]))
