"""One request, one answer, and answers of programs that are not a server."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from midstream.client.requests import create_viewer_token, delete, questions, revoke_viewer_tokens, snapshot
from midstream.errors import (
    ConnectionLostError,
    MidstreamError,
    NotFoundError,
    ProtocolError,
    SessionNotFoundError,
    UsageError,
)
from midstream.testing import calls, text
from midstream.tools.function_tools import question
from tests.client.peer import WebSocketPeer
from tests.server.serving import make_app, send_payload, served

ASKS = calls(("ask_user", '{"question": "Which one?"}'))


async def test_open_questions_are_listed_for_all_sessions_or_for_one() -> None:
    async with served(make_app([ASKS, text("ok")], tools=[question()])) as server:
        for session in ("a", "b"):
            headers = {"x-idempotency-key": session, "x-idempotent-encryption-key": "s" * 43}
            frame = {"type": "command", "seqno": 0, "payload": send_payload("hi")}
            await server.http.post(f"/v1/sessions/{session}/commands", json=frame, headers=headers)
            runner = await server.app.host.session(session)
            while not runner.state.rests_on_people:
                await runner.wait(runner.newest.position)
        everywhere = await questions(server.url, None, {})
        assert [(each.session, each.text) for each in everywhere] == [
            ("a", "Which one?"),
            ("b", "Which one?"),
        ]
        assert [each.session for each in await questions(server.url, "b", {})] == ["b"]
        assert await questions(server.url, "nobody", {}) == ()


async def test_a_session_is_shown_as_the_server_has_it() -> None:
    async with served(make_app([ASKS], tools=[question()])) as server:
        with pytest.raises(MidstreamError):
            await snapshot(server.url, "a/b", {})
        headers = {"x-idempotency-key": "a", "x-idempotent-encryption-key": "s" * 43}
        frame = {"type": "command", "seqno": 0, "payload": send_payload("hi")}
        await server.http.post("/v1/sessions/a/commands", json=frame, headers=headers)
        runner = await server.app.host.session("a")
        while not runner.state.rests_on_people:
            await runner.wait(runner.newest.position)
        event_id, is_at_rest, body = await snapshot(server.url, "a", {})
        assert (event_id, is_at_rest, json.loads(body)["waiting_on"]) == (
            str(runner.newest),
            False,
            "person",
        )


async def test_a_session_is_deleted_permanently() -> None:
    async with served(make_app([text("ok")])) as server:
        headers = {"x-idempotency-key": "a", "x-idempotent-encryption-key": "s" * 43}
        frame = {"type": "command", "seqno": 0, "payload": send_payload("hi")}
        await server.http.post("/v1/sessions/a/commands", json=frame, headers=headers)
        runner = await server.app.host.session("a")
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
        await delete(server.url, "a", {})
        with pytest.raises(SessionNotFoundError):
            await delete(server.url, "a", {})


async def test_an_unreachable_server_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLostError):
        await questions("http://127.0.0.1:1", None, {})


async def test_a_foreign_server_is_reported_as_such() -> None:
    async with WebSocketPeer(404).serving() as peer:
        with pytest.raises(NotFoundError):
            await questions(peer.url, None, {})


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize(
    "body",
    [b'{"questions":["\xff"],"code":"\xff"}', b'{"questions":' + b"[" * 10_000, b'{"code":' * 10_000],
    ids=len,
)
async def test_any_answer_is_either_a_server_or_an_error(status: int, body: bytes) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d Told\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        kind = ProtocolError if status == 200 else NotFoundError
        with pytest.raises(kind):
            await questions(url, None, {})
        with pytest.raises(kind):
            await snapshot(url, "s1", {})


async def test_what_no_server_may_be_sent_is_refused() -> None:
    for for_s in (math.nan, math.inf, 0.0):
        with pytest.raises(UsageError, match="`for_s`"):
            await create_viewer_token("http://127.0.0.1:9", "s", for_s, {})
    for request in (snapshot, delete, revoke_viewer_tokens):
        with pytest.raises(UsageError, match="a session needs an id"):
            await request("http://127.0.0.1:9", "", {})
