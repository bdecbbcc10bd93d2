"""midstream as a contestant of a harness for streaming servers: `python -m bench.side_by_side PORT [FOLDER]`.

The harness creates a stream by PUT, appends JSON objects by POST (one, or a list) and follows the stream by GET. The
query `?from=` has the number of objects that it has. All requests go to `/s/{name}`. At `/j/{name}` the response to an
append comes when it is in the journal. Each object is the next text of the model.

Engine, journal and endpoint are the usual ones, with one difference: an event has the text instead of the record, as
the harness searches for the bytes that it sent. Without a folder the journal is in memory.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from bench.streaming_server import Midstream
from midstream.cli.listening import run_server
from midstream.protocol.frames import START, EventId
from midstream.protocol.server_stream import FrameEncoding
from midstream.protocol.sse import BLOCK_BYTES_MAX, event_of_frame
from midstream.server.api import http_endpoints
from midstream.server.uvicorn_server import serve
from midstream.store.contract import Store
from midstream.store.memory import MemoryStore

HOST = "x"
"""The host name in the requests of the harness."""


class _Record(Struct):
    text: str = ""


_record = msgspec.json.Decoder(_Record)


def text_of_records(records: Iterable[tuple[EventId, bytes]]) -> Iterator[bytes]:
    """Yield stored records as events with the model's text as their data."""
    block: list[bytes] = []
    size = 0
    for event_id, body in records:
        text = _record.decode(body).text.encode()
        block.append(b"id: %d-%d\ndata: %b\n\n" % (event_id.epoch, event_id.position, text))
        size += len(text)
        if size > BLOCK_BYTES_MAX:
            yield b"".join(block)
            block, size = [], 0
    if block:
        yield b"".join(block)


class SideBySide(Midstream):
    """The app of `bench.streaming_server` with the requests of the harness."""

    def __init__(self, store: Path | Store) -> None:
        super().__init__(store)
        http_endpoints.SSE = FrameEncoding(event_of_frame, text_of_records)
        self._appends: defaultdict[str, tuple[list[int], list[EventId]]] = defaultdict(lambda: ([0], [START]))
        """For each stream, the numbers of objects after each append, and the newest event at that time."""

    async def serve_at(self, port: int) -> None:
        """Serve as `midstream serve` does."""
        await serve(self, port=port, allowed_hosts=[HOST])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a reader at midstream's endpoint. Other requests feed the model, without a web framework."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _, acked, name = scope["path"].split("/")
        match scope["method"]:
            case "GET":
                await self._follow(name, scope, receive, send)
            case "PUT":
                response = await self.begin(name)
                await response(scope, receive, send)
            case "POST":
                await self._append(name, await _body_of(receive), is_acked=acked == "j")
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send({"type": "http.response.body"})

    async def _follow(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        counts, places = self._appends[name]
        start = int(Request(scope).query_params.get("from", "0"))
        after = places[bisect_right(counts, start) - 1]
        path = f"/v1/sessions/{name}/events"
        request = {"path": path, "raw_path": path.encode(), "query_string": f"after={after}".encode()}
        await self._app({**scope, **request}, receive, send)

    async def _append(self, name: str, body: str, *, is_acked: bool) -> None:
        """Append one object or several. The input is trusted and not parsed, as at the other servers."""
        objects = [body]
        if body.startswith("["):
            objects = [each if each.endswith("}") else each + "}" for each in body[1:-1].split("},")]
        runner = self._app.host.awake.get(name)
        assert runner is not None
        self._model.feeds[name].put(objects)
        newest = runner.newest
        if is_acked:
            await runner.wait(newest.position)
            newest = runner.newest
        counts, places = self._appends[name]
        counts.append(counts[-1] + len(objects))
        places.append(newest)


async def _body_of(receive: Receive) -> str:
    body, is_whole = b"", False
    while not is_whole:
        message = await receive()
        body += message.get("body", b"")
        is_whole = not message.get("more_body", False)
    return body.decode()


if __name__ == "__main__":
    port, *folder = sys.argv[1:]
    app = SideBySide(Path(folder[0]) / "bench.db" if folder else MemoryStore())
    run_server(app.serve_at(int(port)))
