"""The bridge of cursor-sdk on this machine, scripted: its Connect protocol and agents with a memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from socketserver import BaseServer

import pytest
from starlette.types import Receive, Scope, Send

from midstream.agents.cursor import Cursor
from midstream.testing.upstream_contract import SEPARATOR, USAGE, PeerMessage, Trait
from tests.agents.ended_processes import end_all
from tests.agents.stateful_server import StatefulServer, answer_json, body_of, until_gone
from tests.models.chat_server import Json, serve_app

TOKEN = "bridge-token"
_END = 0x02
_BRIDGE = """import os, sys
open(sys.argv[2], "a").write(f"{os.getpid()}\\n")
print("cursor-sdk-bridge ready", sys.argv[1], file=sys.stderr, flush=True)
import threading
threading.Event().wait()
"""
"""The program that the package starts: it prints the bridge's address, and runs until it is ended."""


class CursorBridge(StatefulServer):
    """Receives the package's calls and answers as the real bridge does; the controls are those of `Peer`."""

    lacks = frozenset[Trait]()

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.requests: list[tuple[str, Json]] = []
        """Method and message of each call."""
        self.end: Json | None = None
        """How the next run ends, if not successfully."""
        self.is_live = True
        """Whether text is streamed as deltas, or only sent when a step has ended."""
        self.is_full = False
        """Whether messages are refused at present."""
        self._started = folder / "bridges"
        """The process ids of the bridges."""
        self._agents: dict[str, list[str]] = {}
        self._busy: set[str] = set()
        self._stopped: dict[str, asyncio.Event] = {}

    def upstream(self) -> Cursor:
        return Cursor("composer-2", cwd=self.folder, api_key="key-1", bridge=self.command())

    def command(self) -> list[str]:
        """Return the command that starts a bridge to this server."""
        ready = {
            "schemaVersion": 1,
            "transport": "tcp",
            "protocol": "connect",
            "url": self.url,
            "authToken": TOKEN,
        }
        return [sys.executable, "-c", _BRIDGE, json.dumps(ready), str(self._started)]

    def runs(self) -> int:
        return len(self._stopped)

    def expire(self, agent: str) -> None:
        del self._agents[agent]

    def end_processes(self) -> None:
        end_all([int(self._started.read_text().split()[-1])])

    def be_busy(self, agent: str) -> None:
        self._busy.add(agent)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        method = scope["path"].rpartition("/")[2]
        body = await body_of(receive)
        message: Json = json.loads(body[5:] if method == "Send" else body or b"{}")
        self.requests.append((method, message))
        if self._refuses and method in {"Me", "CreateAgent", "ResumeAgent", "Send"}:
            await _refuse(send, 401, "unauthenticated", "invalid API key")
        elif method == "Send" and self.is_full:
            await _refuse(send, 429, "rate_limit_exceeded", "too many requests", self.retry_after)
        elif method == "Send":
            await self._send(message, receive, send)
        else:
            await self._unary(method, message, send)

    async def _unary(self, method: str, message: Json, send: Send) -> None:
        agent = message.get("agentId", "")
        answer: Json = {}
        if method == "CreateAgent":
            answer = {"agentId": self._create_agent()}
        elif method == "ResumeAgent":
            if agent not in self._agents:
                await _refuse(send, 404, "agent_not_found", "Agent not found")
                return
            answer = {"agentId": self._create_agent() if self._errs else agent}
            self._errs = False
        elif method == "CancelRun":
            self._stopped[message["runId"]].set()
        elif method == "DeleteAgent":
            del self._agents[agent]
        elif method == "Me":
            answer = {"user": {"email": "somebody"}}
        await answer_json(send, 200, answer)

    def _create_agent(self) -> str:
        agent = f"agent-{len(self.requests)}"
        self._agents[agent] = []
        return agent

    async def _send(self, message: Json, receive: Receive, send: Send) -> None:
        agent, run = message["agentId"], f"run-{len(self.requests)}"
        is_forced = message.get("options", {}).get("local", {}).get("force")
        if agent not in self._agents:
            await _refuse(send, 404, "agent_not_found", "Agent not found")
            return
        if agent in self._busy and not is_forced:
            await _refuse(send, 409, "agent_busy", "Agent has an active run")
            return
        self._busy.discard(agent)
        text = message["message"]["text"]
        self._agents[agent].append(text)
        self._messages.append(PeerMessage(agent, text, message.get("idempotencyKey", "")))
        self._stopped[run] = asyncio.Event()
        try:
            await _begin(send)
            if self._loses:
                self._loses = False
                return
            if self._is_mute:
                self._is_mute = False
                await until_gone(receive, self._stopped[run])
                return
            await self._run(agent, run, receive, send)
        finally:
            del self._stopped[run]

    async def _run(self, agent: str, run: str, receive: Receive, send: Send) -> None:
        async def send_event(kind: str, **fields: object) -> None:
            await _envelope(
                send, {"sdkMessage": {"type": kind, "message": {"type": kind, "runId": run, **fields}}}
            )

        await send_event("system", agentId=agent, subtype="init")
        await send_event("status", status="RUNNING")
        ended, self.end = self.end, None
        if ended is not None:
            await self._finish(send, agent, run, ended)
            return
        for name, arguments, content in self._tools:
            call: Json = {"callId": "call-1", "name": name, "args": json.loads(arguments)}
            await send_event("tool_call", **call, status="running")
            await send_event("tool_call", **call, status="completed", result=content)
        self._tools = []
        answer = SEPARATOR.join(self._agents[agent])
        half = len(answer) // 2 + 1
        if self.is_live:
            await _delta(send, answer[:half])
        if self._dies:
            self._dies = False
            return  # the body ends without its last envelope
        if self._hangs:
            self._hangs = False
            await until_gone(receive, self._stopped[run])
            await self._finish(send, agent, run, {"status": "RUN_LIFECYCLE_STATUS_CANCELLED"})
            return
        if self.is_live:
            await _delta(send, answer[half:])
        await send_event(
            "assistant", message={"role": "assistant", "content": [{"type": "text", "text": answer}]}
        )
        await self._finish(send, agent, run, {"status": "RUN_LIFECYCLE_STATUS_FINISHED", "result": answer})

    async def _finish(self, send: Send, agent: str, run: str, result: Json) -> None:
        usage = {
            "inputTokens": USAGE.input_tokens - USAGE.cached_tokens - USAGE.cache_write_tokens,
            "outputTokens": USAGE.output_tokens,
            "cacheReadTokens": USAGE.cached_tokens,
            "cacheWriteTokens": USAGE.cache_write_tokens,
        }
        whole = {"agentId": agent, "runId": run, "model": {"id": "composer-2"}, "usage": usage, **result}
        await _envelope(send, {"result": {"agentId": agent, "runId": run, "result": whole}})
        await _envelope(send, {}, flags=_END)
        await send({"type": "http.response.body", "body": b""})


async def _begin(send: Send) -> None:
    headers = [(b"content-type", b"application/connect+json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _envelope(send: Send, payload: Json, *, flags: int = 0) -> None:
    body = json.dumps(payload).encode()
    framed = bytes([flags]) + struct.pack(">I", len(body)) + body
    await send({"type": "http.response.body", "body": framed, "more_body": True})


async def _delta(send: Send, text: str) -> None:
    await _envelope(
        send, {"interactionUpdate": {"type": "text-delta", "update": {"type": "text-delta", "text": text}}}
    )


async def _refuse(send: Send, status: int, code: str, words: str, retry_after: str = "") -> None:
    await answer_json(send, status, {"code": code, "message": words}, retry_after=retry_after)


@contextlib.asynccontextmanager
async def cursor_bridge(folder: Path) -> AsyncIterator[CursorBridge]:
    """Serve the bridge on a free port until the end of the block."""
    bridge = CursorBridge(folder)
    with pytest.MonkeyPatch.context() as patch:
        # The package joins the thread of its own server, which checks twice a second whether to end.
        patch.setattr(BaseServer.serve_forever, "__defaults__", (0.005,))
        async with serve_app(bridge) as bridge.url:
            yield bridge
