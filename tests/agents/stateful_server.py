"""Shared parts of scripted servers for agents with a memory: the controls of `Peer`, and plain HTTP."""

from __future__ import annotations

import asyncio
import json

from starlette.types import Receive, Send

from midstream.testing.upstream_contract import PeerMessage
from tests.models.chat_server import Json


class StatefulServer:
    """The controls of `Peer` that only set what the server does next; subclasses implement the behaviour."""

    def __init__(self) -> None:
        self.url = ""
        self.retry_after = ""
        """The pause that a server without capacity requests."""
        self._messages: list[PeerMessage] = []
        self._tools: list[tuple[str, str, str]] = []
        """Name, arguments and result of each tool that the next answer runs."""
        self._is_mute = self._loses = False
        self._hangs = self._errs = self._dies = self._refuses = False

    def messages(self) -> list[PeerMessage]:
        return list(self._messages)

    def hang(self) -> None:
        self._hangs = True

    def hang_unopened(self) -> None:
        self._is_mute = True

    def die_unopened(self) -> None:
        self._loses = True

    def echo_wrong_id(self) -> None:
        self._errs = True

    def die_mid_stream(self) -> None:
        self._dies = True

    def refuse_key(self) -> None:
        self._refuses = True

    def accept_key(self) -> None:
        self._refuses = False

    def run_tool(self, name: str, arguments: str, content: str) -> None:
        self._tools.append((name, arguments, content))


async def body_of(receive: Receive) -> bytes:
    """Return the whole body of a request."""
    pieces: list[bytes] = []
    while True:
        piece = await receive()
        pieces.append(piece.get("body", b""))
        if not piece.get("more_body"):
            return b"".join(pieces)


async def until_gone(receive: Receive, stopped: asyncio.Event) -> None:
    """Wait until the client disconnects or stops its request."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(stopped.wait()), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def answer_json(send: Send, status: int, answer: Json, *, retry_after: str = "") -> None:
    """Answer in one piece."""
    headers = [(b"content-type", b"application/json")]
    if retry_after:
        headers.append((b"retry-after", retry_after.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
