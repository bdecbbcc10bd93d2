"""How a run is told over one HTTP connection: as a stream of events, or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

from starlette.types import Receive, Send

from midstream.core.dialects.messages import PING
from midstream.core.dialects.refusals import Dialect, Refusal, body_in, status_in
from midstream.server.gateway.runs import Run, Runs
from midstream.world import Cancellable, World

QUIET_S = 15.0
"""Seconds without a word after which a stream gets a sign of life: proxies cut after 30 to 60 s of silence, and some
clients too."""
COMMENT = b": waiting\n\n"
_JSON = "application/json"
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    # A proxy that stores, compresses or buffers would hold the words back.
    "cache-control": "no-store, no-transform",
    "x-accel-buffering": "no",
}


async def send_whole(
    send: Send, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Send one answer of JSON."""
    said = {"content-type": _JSON, "cache-control": "no-store", **(headers or {})}
    said |= {"content-length": str(len(body)), "x-content-type-options": "nosniff"}
    await send({"type": "http.response.start", "status": status, "headers": encoded(said)})
    await send({"type": "http.response.body", "body": body})


async def refuse(
    send: Send, dialect: Dialect, refusal: Refusal, headers: Mapping[str, str] | None = None
) -> None:
    """Send a refusal in the words of an API."""
    said = {**(headers or {}), **refusal.headers()}
    await send_whole(send, body_in(dialect, refusal), status=status_in(dialect, refusal), headers=said)


class Reading:
    """One client that reads a run: it knows when the client went away, and tells the run.

    Use it as an async context; nothing else may call `receive` meanwhile.
    """

    def __init__(self, run: Run, runs: Runs, world: World, receive: Receive, send: Send) -> None:
        self._run = run
        self._runs = runs
        self._world = world
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None
        self._sign: Cancellable | None = None
        self._said_at = 0.0
        """When something was said last (monotonic)."""
        self._is_quiet = False
        """`QUIET_S` went by since then, and no sign of life was given."""

    async def __aenter__(self) -> Self:
        self._runs.join(self._run)
        self._watch = self._world.spawn(self._until_gone(), name=f"reader of {self._run.named.id}")
        self._watch.add_done_callback(lambda _: self._run.wake())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sign is not None:
            self._sign.cancel()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])
        self._runs.leave(self._run)

    async def stream(self, headers: Mapping[str, str], *, after: int = 0) -> None:
        """Send the run's events from the one numbered `after` on; an error before the first one as an answer."""
        run = self._run
        self._said_at = self._world.monotonic()
        self._look()
        await self._first(after)
        if self._is_gone:
            return
        if run.refusal is not None and not run.is_begun:
            await self._refuse(headers)
            return
        self._is_quiet = False
        said = encoded({**headers, **EVENT_STREAM})
        await self._send({"type": "http.response.start", "status": 200, "headers": said})
        is_anthropic = run.asked.dialect is Dialect.MESSAGES
        while not self._is_gone:
            if len(run.pieces) > after:
                pieces = run.pieces[after:]
                after += len(pieces)
                is_last = run.is_ended and after == len(run.pieces)
                body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                run.is_delivered = run.is_delivered or is_last
                await self._say(body, is_last=is_last)
                if is_last:
                    return
            elif run.is_ended:
                run.is_delivered = True
                await self._say(b"", is_last=True)
                return
            elif self._is_quiet:
                await self._say(PING if is_anthropic and run.is_begun else COMMENT, is_last=False)
            else:
                await run.news()

    async def state(self, headers: Mapping[str, str]) -> None:
        """Send the answer as it stands, once its intent is written."""
        run = self._run
        while not (run.is_begun or run.is_ended or self._is_gone):
            await run.news()
        if run.refusal is not None and not run.is_begun:
            await self._refuse(headers)
        elif not self._is_gone:
            await send_whole(self._send, run.writer.whole(), headers=headers)

    async def whole(self, headers: Mapping[str, str]) -> None:
        """Wait for the end of the run, and send the answer in one piece."""
        run = self._run
        while not (run.is_ended or self._is_gone):
            await run.news()
        if self._is_gone:
            return
        if run.refusal is not None:
            await self._refuse(headers)
            return
        run.is_delivered = True
        await send_whole(self._send, run.writer.whole(), headers=headers)

    @property
    def _is_gone(self) -> bool:
        return self._watch is None or self._watch.done()

    async def _refuse(self, headers: Mapping[str, str]) -> None:
        run = self._run
        run.is_delivered = True
        refusal = run.refusal
        assert refusal is not None  # who calls this has looked
        await refuse(self._send, run.asked.dialect, refusal, headers)

    async def _first(self, after: int) -> None:
        """Wait for something to say, so that a refusal still has its status; not for ever, since proxies do not."""
        run = self._run
        while len(run.pieces) <= after and not (run.is_ended or self._is_gone or self._is_quiet):
            await run.news()

    async def _say(self, body: bytes, *, is_last: bool) -> None:
        self._is_quiet = False
        self._said_at = self._world.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    def _look(self) -> None:
        """Look whether nothing was said for too long: now and then, since a timer for each word costs more than it."""
        left_s = self._said_at + QUIET_S - self._world.monotonic()
        if left_s <= 0:
            self._is_quiet = True
            self._run.wake()
            left_s = QUIET_S
        self._sign = self._world.later(left_s, self._look)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as they go out."""
    return [
        (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
        for name, value in headers.items()
    ]
