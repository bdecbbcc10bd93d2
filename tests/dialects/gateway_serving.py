"""The shared parts of the gateway's tests: a served gateway, a relay that cuts, and third-party clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx2
import openai
from msgspec import Struct

from midstream.demo.cutting_relay import Cutter
from midstream.environment import World
from midstream.models.model import Model
from midstream.server.gateway_app import Gateway, gateway
from midstream.server.uvicorn_server import serve
from midstream.store.contract import Store
from midstream.testing.scripted_model import Script, ScriptedModel

TOKEN = "secret-of-the-tests"
WAIT_S = 60.0
Json = dict[str, Any]


class ServedGateway(Struct):
    """A gateway that uvicorn serves on a free port of this machine."""

    gateway: Gateway
    model: ScriptedModel
    url: str
    http: httpx2.AsyncClient
    cutter: Cutter

    def openai(self, *, url: str | None = None, **options: Any) -> openai.AsyncOpenAI:  # noqa: ANN401 - a parameter of the SDK or the gateway
        """Return OpenAI's own client for this gateway."""
        return openai.AsyncOpenAI(base_url=f"{url or self.url}/v1", api_key=TOKEN, timeout=WAIT_S, **options)

    def anthropic(self, *, url: str | None = None, **options: Any) -> anthropic.AsyncAnthropic:  # noqa: ANN401 - a parameter of the SDK or the gateway
        """Return Anthropic's own client for this gateway."""
        return anthropic.AsyncAnthropic(base_url=url or self.url, api_key=TOKEN, timeout=WAIT_S, **options)


def make_gateway(
    model: Model,
    *,
    store: Store | None = None,
    token: str | None = TOKEN,
    **options: Any,  # noqa: ANN401 - a parameter of the SDK or the gateway
) -> Gateway:
    """Make a gateway for a test."""
    return gateway(model, token=token, store=store, **options)


@contextlib.asynccontextmanager
async def served(script: Script = (), **options: Any) -> AsyncIterator[ServedGateway]:  # noqa: ANN401 - a parameter of the SDK or the gateway
    """Serve a gateway to a scripted model until the end of the block."""
    model = ScriptedModel(script)
    async with serving(make_gateway(model, **options), model) as found:
        yield found


@contextlib.asynccontextmanager
async def serving(app: Gateway, model: ScriptedModel) -> AsyncIterator[ServedGateway]:
    """Serve a gateway until the end of the block."""
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    work = serve(app, port=0, stop_within_s=5.0, on_listening=listening.set_result, stop=stop)
    task = asyncio.create_task(work)
    try:
        url = await asyncio.wait_for(listening, WAIT_S)
        headers = {"authorization": f"Bearer {TOKEN}"}
        port = urlsplit(url).port or 0
        async with (
            httpx2.AsyncClient(base_url=url, timeout=WAIT_S, headers=headers) as client,
            Cutter(port, World()) as cutter,
        ):
            yield ServedGateway(app, model, url, client, cutter)
    finally:
        stop.set()
        await asyncio.wait_for(task, 2 * WAIT_S)


def chat_request(words: str, **more: object) -> Json:
    """Return a body of chat completions."""
    return {"model": "m", "messages": [{"role": "user", "content": words}], **more}


def chat(*messages: tuple[str, str], **more: object) -> Json:
    """Return a body of chat completions with several messages."""
    return {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages], **more}


def words_of(stream: Sequence[Json]) -> str:
    """Return the words in the chunks of a stream."""
    return "".join(
        choice["delta"].get("content") or "" for chunk in stream for choice in chunk.get("choices", ())
    )


@contextlib.asynccontextmanager
async def asgi_client(app: Gateway) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield an HTTP client that calls a gateway through its ASGI interface."""
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://testserver", headers=headers
    ) as client:
        yield client
    await app.stop()
