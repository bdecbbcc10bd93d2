"""Bytes that a conversation sends upstream over the whole path, counted at the receiver.

OpenAI's client resends its transcript to a gateway in its own process. Behind the gateway are the pool, OpenAI's
package as an upstream, and a scripted Responses server that counts the received bodies. All counted bodies went through
a socket.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import openai

from midstream.agents.pool import Pooled
from midstream.server.gateway_app import gateway
from midstream.server.uvicorn_server import serve
from midstream.store.sqlite import SQLiteStore
from tests.agents.openai_memory import OpenAIMemory, openai_memory

TOKEN = "the-key-of-the-bench"  # noqa: S105 - a key without value
PATIENCE_S = 120.0
HEADERS = {"always fresh": {"x-midstream-ephemeral": "1"}, "ours": {}}
"""Headers of each contestant. An ephemeral request gets a fresh agent with the full transcript."""


class Passage(msgspec.Struct):
    """Bodies that the server received of one conversation, as JSON.

    Args:
        users: Received user messages, with replayed ones.
    """

    contestant: str
    turns: int
    users: int
    sent_bytes: int
    first_turn_bytes: int
    last_turn_bytes: int


def measure(turns: int, question_chars: int, answer_chars: int) -> list[Passage]:
    """Run one conversation for each contestant, with questions and answers of this many characters."""
    return [asyncio.run(_passage(contestant, turns, question_chars, answer_chars)) for contestant in HEADERS]


async def _passage(contestant: str, turns: int, question_chars: int, answer_chars: int) -> Passage:
    async with asyncio.timeout(PATIENCE_S):
        with tempfile.TemporaryDirectory() as folder:
            async with openai_memory("responses") as server:
                await _converse(server, Path(folder), contestant, turns, question_chars, answer_chars)
    bodies = [body for method, path, body in server.requests if (method, path) == ("POST", "/responses")]
    sizes = [len(msgspec.json.encode(body)) for body in bodies]
    return Passage(contestant, turns, len(server.messages()), sum(sizes), sizes[0], sizes[-1])


async def _converse(
    server: OpenAIMemory, folder: Path, contestant: str, turns: int, question_chars: int, answer_chars: int
) -> None:
    store = SQLiteStore(folder / "gateway.db")
    app = gateway(Pooled(server.upstream(), store), token=TOKEN, store=store)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(app, port=0, on_listening=listening.set_result, stop=stop))
    url = await listening
    messages: list[Any] = []
    # The client's answers are made here, so that they are as long as in the other figures.
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN) as client:
        headers = {"x-midstream-session": "s1", **HEADERS[contestant]}
        for number in range(turns):
            messages.append({"role": "user", "content": f"question {number} ".ljust(question_chars, "x")})
            await client.chat.completions.create(model="m", messages=messages, extra_headers=headers)
            messages.append({"role": "assistant", "content": f"answer {number} ".ljust(answer_chars, "y")})
    stop.set()
    await serving
