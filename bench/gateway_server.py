"""The peer of `bench/gateway.py`: it sends tokens by a script, the first one at once.

A request that ends with midstream's request to continue gets the tokens that its cut answer lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from midstream.session.session import CONTINUE

TOKEN = "the-key-of-the-bench"  # noqa: S105 - has no value
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _command(**delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _framed(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


_ROLE = _framed(_command(role="assistant", content=""))
_TOKEN = _framed(_command(content="token "))
_END = _framed(
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)


async def _answer_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests of one connection: `tokens` and the seconds between them stand in the model's name."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line[:15] == b"content-length:"
            )
            asked = msgspec.json.decode(await reader.readexactly(length))
            tokens, pause_s = asked["model"].split("@")
            writer.write(_HEAD + _ROLE)
            for number in range(_sent_before(asked["messages"]), int(tokens)):
                if number:
                    await asyncio.sleep(float(pause_s))
                writer.write(_TOKEN)
            writer.write(_END + b"0\r\n\r\n")
            await writer.drain()
    writer.close()


def _sent_before(messages: list[dict[str, Any]]) -> int:
    """Return how many tokens of the answer the request has already."""
    if messages[-1]["content"] != CONTINUE:
        return 0
    return str(messages[-2]["content"]).count("token")


async def _serve() -> None:
    server = await asyncio.start_server(_answer_requests, "127.0.0.1", 0)
    print(f'{{"url":"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}}', flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
