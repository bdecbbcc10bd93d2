"""The only file of the gateway's golden transcripts that imports midstream: a gateway in front of a scripted
upstream.

A script is JSON. Each answer is a list of steps. Steps of a `provider` (chat completions over HTTP on
loopback):

- `{"text": …}`, `{"thinking": …}`, `{"call": [id, name, arguments]}`
- `{"hold": true}` waits until the story releases it, `{"cut": true}` closes the connection
- `{"status": …, "message": …, "headers": …}` refuses, instead of all others

Steps of an `agent` (stateful, in a pool): `{"text": …}`, `{"tool": [id, name, arguments, result]}` (run by
the agent itself), `{"trouble": …}` (`midstream.testing.scripted_upstream.Trouble`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from midstream.agents.pool import Pooled
from midstream.agents.upstream_abilities import Abilities
from midstream.agents.upstreams import UpstreamEvent
from midstream.history.messages import Usage
from midstream.models.model import Model
from midstream.models.openai_compatible import OpenAICompatible
from midstream.models.responses import Finished, TextDelta, UpstreamCallEnded, UpstreamCallStarted
from midstream.server.gateway_app import gateway
from midstream.server.uvicorn_server import serve
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_upstream import AgentConversation, ScriptedUpstream, Trouble, words_of
from tests.models.chat_server import call, delta, serve_app, usage

Json = dict[str, Any]

TOKEN = "secret-of-the-tests"
WAIT_S = 60.0
NAMES = ("m", "m-2")


class ScriptedProvider:
    """A local server of chat completions that answers by a script."""

    def __init__(self, script: Sequence[Sequence[Json]]) -> None:
        self.sent_messages: list[Json] = []
        self.gate = asyncio.Event()
        self._script = list(script)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        sent_messages = json.loads(body)
        self.sent_messages.append(
            {
                key: sent_messages[key]
                for key in sorted(sent_messages)
                if key not in ("stream", "stream_options")
            }
        )
        steps = self._script.pop(0)
        if "status" in steps[0]:
            await self._refuse(steps[0], send)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in self._pieces(steps):
            if piece is None:
                await self.gate.wait()
                self.gate.clear()
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        if not any("cut" in step for step in steps):
            await send({"type": "http.response.body", "body": b""})

    def _pieces(self, steps: Sequence[Json]) -> Iterator[bytes | None]:
        calls = 0
        for step in steps:
            match step:
                case {"text": text}:
                    yield _sse(delta(content=text))
                case {"thinking": text}:
                    yield _sse(delta(reasoning_content=text))
                case {"call": [call_id, name, arguments]}:
                    yield _sse(delta(tool_calls=[call(calls, arguments, call_id, name)]))
                    calls += 1
                case {"hold": _}:
                    yield None
                case {"cut": _}:
                    return
                case _:
                    raise AssertionError(f"no step of a provider: {step}")
        yield _sse(delta("tool_calls" if calls else "stop"))
        yield _sse(usage(10, 5))
        yield b"data: [DONE]\n\n"

    async def _refuse(self, step: Json, send: Send) -> None:
        headers = {"content-type": "application/json", **step.get("headers", {})}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": step["status"], "headers": encoded})
        error = {"error": {"message": step["message"], "type": "test"}}
        await send({"type": "http.response.body", "body": json.dumps(error).encode()})


class StatefulAgent:
    """An upstream with stateful agents, and the messages sent to them."""

    def __init__(self, script: Sequence[Sequence[Json]]) -> None:
        self.gate = asyncio.Event()
        # A trouble without text comes before the answer, which then is not requested.
        self._script = [steps for steps in script if any("trouble" not in step for step in steps)]
        troubles = [
            next((Trouble(step["trouble"]) for step in steps if "trouble" in step), None) for steps in script
        ]
        abilities = Abilities(can_fork=True)
        self.upstream = ScriptedUpstream(answer=self._answer, troubles=troubles, abilities=abilities)

    @property
    def sent_messages(self) -> list[Json]:
        """Return the messages sent to agents, in order; then the agents that were opened (`""`: fresh),
        received a message, were deleted.
        """
        sent = [
            {"instructions": each.setup.instructions, "said": words_of(each.message)}
            for each in self.upstream.sends
        ]
        taken = [agent for agent, _ in self.upstream.memory.arrived]
        forgotten = self.upstream.memory.forgotten
        return [*sent, {"opened": self.upstream.opened, "taken by": taken, "forgotten": forgotten}]

    def _answer(self, talk: AgentConversation) -> Sequence[UpstreamEvent]:
        del talk
        events: list[UpstreamEvent] = []
        for step in self._script.pop(0):
            match step:
                case {"text": text}:
                    events.append(TextDelta(text))
                case {"tool": [call_id, name, arguments, result]}:
                    events += [
                        UpstreamCallStarted(call_id, name, arguments),
                        UpstreamCallEnded(call_id, result),
                    ]
        return [*events, Finished(usage=Usage(10, 5))]


Upstream = ScriptedProvider | StatefulAgent


@contextlib.asynccontextmanager
async def gateway_before(kind: str, script: Sequence[Sequence[Json]]) -> AsyncGenerator[tuple[str, Upstream]]:
    """Serve a gateway on loopback; yield its address and the upstream behind it."""
    async with contextlib.AsyncExitStack() as stack:
        upstream: Upstream
        model: Model
        if kind == "provider":
            upstream = ScriptedProvider(script)
            url = await stack.enter_async_context(serve_app(upstream))
            model = OpenAICompatible(url, "upstream-model")
        else:
            upstream = StatefulAgent(script)
            model = Pooled(upstream.upstream)
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        app = gateway(model, token=TOKEN, store=MemoryStore(), names=NAMES)
        work = serve(app, port=0, stop_within_s=0.0, on_listening=listening.set_result, stop=stop)
        task = asyncio.create_task(work)
        try:
            yield await asyncio.wait_for(listening, WAIT_S), upstream
        finally:
            stop.set()
            upstream.gate.set()
            await asyncio.wait_for(task, 2 * WAIT_S)


def _sse(command: Json) -> bytes:
    return b"data: %b\n\n" % json.dumps(command).encode()
