"""The scripted server below its frames: its requests and responses."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
import websockets

from midstream.testing.conformance.scripted_server import ScriptedServer

WAIT_S = 30.0
PATH = "/v1/sessions/s1"
NAMED = {"x-midstream-connection": "one"}


@pytest.mark.parametrize("size", [0, 125, 126, 70_000])
async def test_frames_of_every_size_come_and_go_over_a_websocket(size: int) -> None:
    frame = {"type": "x", "text": "ü" * size}
    async with ScriptedServer().listening() as server:
        async with websockets.connect(f"{server.url.replace('http', 'ws')}{PATH}/stream") as socket:
            connection = await asyncio.wait_for(server.new_connections("s1").get(), WAIT_S)
            await socket.send('{"type":"x","text":"%s"}' % ("ü" * size))
            async with asyncio.timeout(WAIT_S):
                while not connection.received:
                    await server.wait_for_frame()
            assert connection.received == [frame]
            await asyncio.wait_for(await socket.ping(), WAIT_S)
            if size <= 126:
                await connection.send(frame)
                assert len(await asyncio.wait_for(socket.recv(), WAIT_S)) > size
        async with asyncio.timeout(WAIT_S):
            while not connection.is_over:
                await server.wait_for_frame()


async def test_a_poll_waits_for_frames_and_a_cut_one_is_never_answered() -> None:
    async with (
        ScriptedServer().listening() as server,
        httpx2.AsyncClient(base_url=server.url, headers=NAMED, timeout=WAIT_S) as client,
    ):
        asking = asyncio.ensure_future(client.post(f"{PATH}/poll?n=0", json={"type": "open"}))
        connection = await asyncio.wait_for(server.new_connections("s1").get(), WAIT_S)
        await connection.send({"type": "welcome"})
        answer = (await asking).json()
        assert answer == {"frames": [{"type": "welcome"}], "more": True}
        assert (await client.post(f"{PATH}/commands", json={"type": "command"})).status_code == 204
        assert [frame["type"] for frame in connection.received] == ["open", "command"]
        connection.cut()
        for path in ("poll?n=1", "commands"):
            with pytest.raises(httpx2.HTTPError):
                await client.post(f"{PATH}/{path}", json={"type": "open"})


async def test_records_are_events_of_their_own_and_files_are_found() -> None:
    async with (
        ScriptedServer({"/page": b"<p>"}).listening() as server,
        httpx2.AsyncClient(base_url=server.url, headers=NAMED, timeout=WAIT_S) as client,
    ):
        assert (await client.get("/page")).text == "<p>"
        assert (await client.get("/other")).status_code == 404
        async with client.stream("POST", f"{PATH}/events", json={"type": "open"}) as answer:
            connection = await asyncio.wait_for(server.new_connections("s1").get(), WAIT_S)
            await connection.send({"type": "events", "events": [{"id": "1-2", "record": {"type": "x"}}]})
            await connection.send_text("hello?")
            received = ""
            async with asyncio.timeout(WAIT_S):
                async for piece in answer.aiter_text():
                    received += piece
                    if "hello?" in received:
                        break
        assert 'id: 1-2\nevent: record\ndata: {"type":"x"}\n\ndata: hello?\n\n' in received
