"""Responses over a WebSocket, as OpenAI's own client requests them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import openai
import pytest
import websockets

from midstream.dialects import response_socket
from midstream.models.responses import ModelRequest
from midstream.testing.scripted_model import Response, text
from tests.dialects.gateway_serving import TOKEN, WAIT_S, served

TERMINAL = ("response.completed", "response.failed", "response.incomplete", "error")


def counting(request: ModelRequest) -> Response:
    """Answer with the number of entries of the history."""
    return text(f"answer {len(request.history.entries)}")


async def request_response(connection: Any, **fields: Any) -> list[Any]:  # noqa: ANN401 - the SDK's own
    """Request a response, and return its events."""
    await connection.response.create(model="m", **fields)
    events: list[Any] = []
    async with asyncio.timeout(WAIT_S):
        while not events or events[-1].type not in TERMINAL:
            events.append(await connection.recv())
    return events


async def test_an_unstored_chain_continues_as_long_as_its_socket() -> None:
    async with served(counting) as gateway, gateway.openai() as client:
        async with client.responses.connect() as connection:
            first = (await request_response(connection, input="hi", store=False))[-1].response
            events = await request_response(
                connection, input="more", store=False, previous_response_id=first.id
            )
            second = events[-1].response
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert (second.output_text, second.previous_response_id) == ("answer 3", first.id)
            assert second.id != first.id
        async with client.responses.connect() as connection:
            (refused,) = await request_response(
                connection, input="more", store=False, previous_response_id=second.id
            )
            assert (refused.status, refused.error.code) == (400, "previous_response_not_found")
            assert (await request_response(connection, input="again"))[-1].response.output_text == "answer 1"


async def test_a_result_of_an_unknown_call_is_refused_and_ends_the_chain() -> None:
    strange: Any = [{"type": "function_call_output", "call_id": "none", "output": "lost"}]
    async with (
        served(counting) as gateway,
        gateway.openai() as client,
        client.responses.connect() as connection,
    ):
        first = (await request_response(connection, input="hi", store=False))[-1].response
        continuing = {"store": False, "previous_response_id": first.id}
        (refused,) = await request_response(connection, input=strange, **continuing)
        assert (refused.error.code, refused.error.param) == ("malformed_frame", "input")
        (gone,) = await request_response(connection, input="more", **continuing)
        assert gone.error.code == "previous_response_not_found"
        stored = await client.responses.create(model="m", input="hi")
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input=strange, previous_response_id=stored.id)


async def test_a_socket_checks_the_key_and_the_path() -> None:
    async with served(counting) as gateway:
        url = gateway.url.replace("http", "ws")
        for path, key, status in (("/v1/responses", "x" * 16, 401), ("/v1/messages", TOKEN, 404)):
            headers = {"authorization": f"Bearer {key}"}
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with websockets.connect(url + path, additional_headers=headers):
                    pass
            assert refused.value.response.status_code == status
            assert "error" in msgspec.json.decode(refused.value.response.body or b"")
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with websockets.connect(url + "/v1/responses", additional_headers=headers) as socket:
            for message, param in (
                ("hi", None),
                ('{"type": "response.stop"}', "type"),
                ('{"type": "response.create", "background": true, "input": "hi"}', "background"),
            ):
                await socket.send(message)
                event = msgspec.json.decode(await asyncio.wait_for(socket.recv(), WAIT_S))
                assert (event["type"], event["status"], event["error"]["param"]) == ("error", 400, param)
            gateway.gateway.drain()
            await socket.send('{"type": "response.create", "model": "m", "input": "hi"}')
            event = msgspec.json.decode(await asyncio.wait_for(socket.recv(), WAIT_S))
            assert (event["status"], event["error"]["code"]) == (503, "draining")
        assert gateway.model.requests == []


async def test_requests_are_answered_one_after_the_other() -> None:
    async with served(counting) as gateway:
        headers, url = {"authorization": f"Bearer {TOKEN}"}, gateway.url.replace("http", "ws")
        async with websockets.connect(url + "/v1/responses", additional_headers=headers) as socket:
            for words in ("one", "two"):
                await socket.send(f'{{"type": "response.create", "model": "m", "input": "{words}"}}')
            events: list[Any] = []
            async with asyncio.timeout(WAIT_S):
                while sum(event["type"] == TERMINAL[0] for event in events) < 2:
                    events.append(msgspec.json.decode(await socket.recv()))
        whole = len(events) // 2
        assert [event["sequence_number"] for event in events] == [*range(whole), *range(whole)]


async def test_a_socket_accepts_no_request_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_socket, "OPEN_MAX_S", 0.0)
    async with served(counting) as gateway:
        headers, url = {"authorization": f"Bearer {TOKEN}"}, gateway.url.replace("http", "ws")
        async with websockets.connect(url + "/v1/responses", additional_headers=headers) as socket:
            event = msgspec.json.decode(await asyncio.wait_for(socket.recv(), WAIT_S))
            assert event["error"]["code"] == "websocket_connection_limit_reached"
            with pytest.raises(websockets.ConnectionClosed):
                await asyncio.wait_for(socket.recv(), WAIT_S)
