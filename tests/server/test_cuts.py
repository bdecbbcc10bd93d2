"""A body never ends cleanly before its turn, whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
import pytest
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from midstream.server.api import http_endpoints as http_module
from midstream.store.contract import StoredRecord
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.scripted_model import Gate, Stall, text
from midstream.testing.turns import records_until_end
from tests.server.serving import KEYS, WAIT_S, Json, Served, asgi_client, command, make_app, served
from tests.spec import spec


async def post(client: httpx2.AsyncClient, frame: Json, **headers: str) -> httpx2.Response:
    return await client.post("/v1/sessions/s1/commands", json=frame, headers={**KEYS, **headers})


@asynccontextmanager
async def following(server: Served, **headers: str) -> AsyncIterator[httpx2.Response]:
    async with server.http.stream("GET", "/v1/sessions/s1/events", headers=headers) as response:
        yield response


@spec("STREAM-27", "STREAM-39")
async def test_a_body_is_cut_when_its_own_client_closes_it_elsewhere_and_only_then() -> None:
    gate = asyncio.Event()
    async with served(make_app([[*text("hello")[:-1], Gate(gate)]])) as server:
        await post(server.http, command())
        async with asyncio.timeout(WAIT_S), following(server, **KEYS) as response:
            body = response.aiter_bytes()
            await anext(body)
            wrong = {"x-idempotent-encryption-key": "another"}
            assert (await post(server.http, {"type": "close"}, **wrong)).status_code == 204
            assert server.app.open_streams == 1, "it was somebody else's word"
            await post(server.http, {"type": "close"})
            with pytest.raises(httpx2.RemoteProtocolError):
                [each async for each in body]
        assert server.app.host.awake.turns_running == 1


@spec("STREAM-27")
async def test_a_body_is_cut_under_a_middleware_that_hides_exceptions() -> None:
    async def passed_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    app = make_app([[Stall()]])
    sent: list[Message] = []
    has_begun = asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        if message.get("body"):
            has_begun.set()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with asgi_client(app) as client:
        await post(client, command())
        headers = [(name.encode(), value.encode()) for name, value in KEYS.items()]
        path = "/v1/sessions/s1/events"
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
        answering = asyncio.create_task(BaseHTTPMiddleware(app, passed_on)(scope, receive, send))
        await asyncio.wait_for(has_begun.wait(), WAIT_S)
        app.drain()
        with pytest.raises(AssertionError, match=http_module.UNKNOWN):
            await asyncio.wait_for(answering, WAIT_S)
    assert b"draining" in sent[-1]["body"]
    assert [message["more_body"] for message in sent[1:]] == [True] * len(sent[1:])


class LosingStore(MemoryStore):
    """A store that loses something of a session after some pages were read."""

    pages_left = -1
    lose: Callable[[], object]

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        self.pages_left -= 1
        if self.pages_left == 0:
            self.lose()
        return await super().read(session, after=after, limit=limit)


@spec("STREAM-27")
@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "pruned"])
async def test_an_export_that_loses_its_session_midway_is_cut(
    is_deleted: bool,  # noqa: FBT001 - a case
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_module, "RECORDS_PER_READ", 2)
    memory = Memory()
    store = LosingStore(memory)
    async with served(make_app([text("hello world")], store=store)) as server:
        await post(server.http, command())
        await records_until_end(await server.app.host.session("s1"), after=0)
        kept = memory.sessions["s1"].records
        store.lose = (
            (lambda: memory.sessions.pop("s1")) if is_deleted else (lambda: kept.__delitem__(slice(0, 3)))
        )
        store.pages_left = 2
        async with asyncio.timeout(WAIT_S), server.http.stream("GET", "/v1/sessions/s1/records") as response:
            with pytest.raises(httpx2.RemoteProtocolError):
                await response.aread()
