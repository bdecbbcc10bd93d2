"""An upstream that answers every request with some words and counts tokens, and gateways of users in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
from starlette.types import Receive, Scope, Send

from midstream.environment import World
from tests.cli.test_gateway import key_of, start_with, stop
from tests.dialects.gateway_serving import WAIT_S
from tests.forked import Forked
from tests.models.chat_server import delta, serve_app, usage

PROMPT, COMPLETION = 100, 10
"""Tokens that the upstream counts for each request."""
WORDS = [f"w{number} " for number in range(8)]
TEXT = "".join(WORDS)
CONTINUATION = "[The turn was interrupted"
"""The start of the message with which a gateway continues an answer."""


class UsageUpstream:
    """Streams chat completions; the pause between two words is `pause_s`, and none ends while `gate` is closed."""

    def __init__(self) -> None:
        self.url = ""
        self.pause_s = 0.0
        self.requests = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        body, is_whole = b"", False
        while not is_whole:
            message = await receive()
            body += message.get("body", b"")
            is_whole = not message.get("more_body")
        self.requests += 1
        words = WORDS[_count_delivered(json.loads(body)["messages"]) :]
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        chunks = [*(delta(content=word) for word in words), delta("stop"), usage(PROMPT, COMPLETION)]
        for number, chunk in enumerate(chunks):
            if number == len(words):
                await self.gate.wait()
            await World().sleep(self.pause_s)
            event = b"data: %b\n\n" % json.dumps(chunk).encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _count_delivered(messages: list[dict[str, Any]]) -> int:
    """Return how many words of an interrupted answer the transcript has already."""
    count = 0
    for message in reversed(messages):
        if message["role"] == "assistant":
            count += len(message["content"].split())
        elif not message["content"].startswith(CONTINUATION):
            break
    return count


class UserGateway:
    """`midstream gateway` in its own process, with keys of users; it may be killed and restarted."""

    def __init__(self, home: Path, options: tuple[str, ...]) -> None:
        self.home = home
        self.options = options
        self.process: Forked | None = None
        self.url = self.own_key = ""

    def command(self, *words: object) -> str:
        """Run `midstream gateway ... WORDS`, and return its output."""
        process = Forked("midstream", "--home", self.home, "gateway", *self.options, *words, text=True)
        out, output = process.communicate(timeout=WAIT_S)
        assert process.wait() == 0, output
        return str(out).strip()

    def usage(self, *words: str) -> list[dict[str, Any]]:
        """Return the report of usage."""
        return [json.loads(line) for line in self.command("usage", "--json", *words).splitlines()]

    def start(self) -> None:
        """Start it."""
        self.process, ready = start_with(self.home, *self.options)
        self.url, self.own_key = ready["url"], key_of(ready)

    def kill(self) -> None:
        """Kill it, with its workers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=WAIT_S)

    def stop(self) -> None:
        """End it."""
        if self.process is not None and self.process.poll() is None:
            stop(self.process)

    def openai(self, key: str, **options: Any) -> openai.AsyncOpenAI:  # noqa: ANN401 - of the SDK
        """Return OpenAI's own client for this gateway."""
        given = {"timeout": WAIT_S, "max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **given)

    def anthropic(self, key: str) -> anthropic.AsyncAnthropic:
        """Return Anthropic's own client for this gateway."""
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=key, timeout=WAIT_S, max_retries=0)


@contextlib.asynccontextmanager
async def usage_upstream() -> AsyncIterator[UsageUpstream]:
    """Serve such an upstream on a free port until the end of the block."""
    app = UsageUpstream()
    async with serve_app(app) as app.url:
        yield app


@contextlib.asynccontextmanager
async def user_gateway(
    home: Path, upstream: UsageUpstream, *options: str, count: int = 1
) -> AsyncIterator[list[UserGateway]]:
    """Run gateways in front of an upstream until the end of the block; they share the store and the users."""
    of_model = ("--upstream", f"openai-compatible:{upstream.url}", "--model", "m")
    gateways = [UserGateway(home, (*of_model, *options)) for _ in range(count)]
    try:
        for each in gateways:  # one after the other: the first one creates the key
            await asyncio.to_thread(each.start)
        yield gateways
    finally:
        for each in gateways:
            await asyncio.to_thread(each.stop)
