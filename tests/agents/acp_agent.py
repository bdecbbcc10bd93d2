"""A scripted agent on the agent side of the `agent-client-protocol` package, over stdio.

The folder in its first argument holds its conversations, its orders and the messages that it received. The
other arguments are its abilities: `load`, `resume`, `http`, `image`. A test's command starts it, or `--serve`
starts as many as needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from acp import RequestError, helpers, run_agent
from acp.interfaces import Client
from acp.schema import (
    AgentCapabilities,
    AgentMessageChunk,
    AuthenticateResponse,
    Implementation,
    InitializeResponse,
    LoadSessionResponse,
    McpCapabilities,
    NewSessionResponse,
    PermissionOption,
    PromptCapabilities,
    PromptResponse,
    ResumeSessionResponse,
    SessionCapabilities,
    SessionResumeCapabilities,
    SetSessionModeResponse,
    Usage,
)

from tests.agents.scripted_peer import SEPARATOR, Orders

Anything = Any
"""The types of the protocol's arguments."""


class ScriptedAgent:
    def __init__(self, folder: Path, can: set[str]) -> None:
        self.orders = Orders(folder)
        self.can = can
        self.stopped = asyncio.Event()
        self.client: Client

    def on_connect(self, conn: Client) -> None:
        self.client = conn

    # --- conversations

    def conversation_path(self, session: str) -> Path:
        return self.orders.folder / "always" / f"talk-{session}"

    def create_session(self) -> str:
        session = uuid.uuid4().hex
        self.orders.declare(f"talk-{session}", [])
        return session

    def remembered(self, session: str) -> list[str]:
        texts = self.orders.holds(f"talk-{session}")
        if texts is None:
            raise RequestError(-32603, "Internal error", {"details": f"Session not found: {session}"})
        assert isinstance(texts, list)
        return texts

    # --- the protocol

    async def initialize(self, protocol_version: int, **about: Anything) -> InitializeResponse:
        shown = {name: value.model_dump() if value is not None else None for name, value in about.items()}
        self.orders.record("initialized", version=protocol_version, env=dict(os.environ), **shown)
        if words := self.orders.holds("silent"):
            sys.stderr.write(f"{words}\n")
            sys.stderr.flush()
            os._exit(1)
        resume = SessionResumeCapabilities() if "resume" in self.can else None
        return InitializeResponse(
            protocol_version=self.orders.holds("version") or protocol_version,
            agent_info=Implementation(name=self.orders.holds("name") or "scripted", version="1"),
            agent_capabilities=AgentCapabilities(
                load_session="load" in self.can,
                session_capabilities=SessionCapabilities(resume=resume),
                mcp_capabilities=McpCapabilities(http="http" in self.can),
                prompt_capabilities=PromptCapabilities(
                    image="image" in self.can, embedded_context="image" in self.can
                ),
            ),
        )

    async def authenticate(self, method_id: str, **_: Anything) -> AuthenticateResponse:
        self.orders.record("signed in", method=method_id)
        self.orders.lift("refused")
        return AuthenticateResponse()

    async def new_session(
        self, cwd: str, mcp_servers: Anything = None, **meta: Anything
    ) -> NewSessionResponse:
        if self.orders.holds("refused"):
            raise RequestError.auth_required()
        self.record_opening("new", cwd, mcp_servers, meta)
        return NewSessionResponse(session_id=self.create_session())

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Anything = None, **meta: Anything
    ) -> LoadSessionResponse:
        self.record_opening("load", cwd, mcp_servers, meta)
        texts = self.remembered(session_id)
        if self.orders.take("wrong"):
            return LoadSessionResponse()
        if "late" in self.can:  # as Gemini CLI does
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, lambda: loop.create_task(self.replay(session_id, texts)))
        else:
            await self.replay(session_id, texts)
        return LoadSessionResponse()

    async def replay(self, session_id: str, texts: list[str]) -> None:
        for text in texts:
            await self.client.session_update(session_id, helpers.update_user_message_text(text))
            await self.send_text(session_id, "an old answer")

    async def resume_session(
        self, session_id: str, cwd: str, mcp_servers: Anything = None, **meta: Anything
    ) -> ResumeSessionResponse:
        self.record_opening("resume", cwd, mcp_servers, meta)
        self.remembered(session_id)
        if self.orders.take("wrong"):
            self.orders.declare(f"other-{session_id}", self.create_session())
        return ResumeSessionResponse()

    async def set_session_mode(self, mode_id: str, session_id: str, **_: Anything) -> SetSessionModeResponse:
        self.orders.record("mode", session=session_id, mode=mode_id)
        return SetSessionModeResponse()

    async def cancel(self, session_id: str, **_: Anything) -> None:
        self.orders.record("cancelled", session=session_id)
        self.orders.lift(f"busy-{session_id}")
        if not self.orders.holds("deaf"):
            self.stopped.set()

    async def prompt(self, session_id: str, prompt: Anything, **meta: Anything) -> PromptResponse:
        if self.orders.holds("refused"):
            raise RequestError.auth_required()
        session = self.orders.holds(f"other-{session_id}") or session_id
        texts = self.remembered(session)
        if self.orders.holds(f"busy-{session}"):
            raise RequestError(-32603, "Internal error", {"details": "Agent is already processing a prompt"})
        self.stopped.clear()
        blocks = [block.model_dump(exclude_none=True) for block in prompt]
        text = "".join(block.get("text", "") for block in blocks)
        key = meta.get("midstream/key", "")
        self.orders.record("told", agent=session, text=text, key=key, blocks=blocks)
        if failure := self.orders.take("failure"):
            raise RequestError(*failure)
        if failure := self.orders.take("provider failure"):
            if self.orders.holds("name") != "gemini-cli":
                self.orders.declare(f"talk-{session}", [*texts, text])
            raise RequestError(*failure)
        if reason := self.orders.take("stop"):
            return PromptResponse(stop_reason=reason)
        self.orders.declare(f"talk-{session}", [*texts, text])
        if self.orders.take("leave a child"):
            command = [sys.executable, "-c", "import time; time.sleep(30)"]
            await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL)  # it inherits stdout
            os._exit(137)
        if self.orders.take("lose"):
            os._exit(137)
        if ledger := self.orders.take("ledger"):
            take_effect(ledger)
        if ledger := self.orders.take("after the gateway"):
            await self.outlive(ledger)
        if self.orders.take("mute"):
            await self.stopped.wait()
            return PromptResponse(stop_reason="cancelled")
        is_hanging = self.orders.take("hang")
        with self.orders.run():
            return await self.run_prompt(session, [*texts, text], is_hanging=bool(is_hanging))

    async def run_prompt(self, session: str, texts: list[str], *, is_hanging: bool) -> PromptResponse:
        await self.client.session_update(session, helpers.update_agent_thought_text("hmm"))
        if self.orders.take("detached"):
            await self.detached(session)
            is_hanging = True
        if is_hanging:
            await self.stopped.wait()
            return PromptResponse(stop_reason="cancelled")
        if call := self.orders.take("tool"):
            await self.tool(session, **call)
        if entries := self.orders.take("plan"):
            plan = helpers.update_plan([helpers.plan_entry(text, status=status) for text, status in entries])
            await self.client.session_update(session, plan)
        answer = SEPARATOR.join(texts)
        half = len(answer) // 2 or 1
        await self.send_text(session, answer[:half])
        if self.orders.take("die"):
            await asyncio.sleep(0)
            sys.stdout.flush()
            os._exit(137)
        await self.send_text(session, answer[half:])
        counted = Usage(
            total_tokens=107, input_tokens=30, output_tokens=7, cached_read_tokens=60, cached_write_tokens=10
        )
        return PromptResponse(stop_reason="end_turn", usage=counted)

    async def outlive(self, ledger: str) -> None:
        """Run a tool that is not reported and takes effect one second after the end of the gateway."""
        program = (
            "import pathlib, sys, time\n"
            "while pathlib.Path('/proc', sys.argv[1]).exists(): time.sleep(0.01)\n"
            "time.sleep(1)\n"
            "pathlib.Path(sys.argv[2]).open('a').write('effect\\n')"
        )
        command = [sys.executable, "-c", program, str(os.getppid()), ledger]
        none = subprocess.DEVNULL
        tool = await asyncio.create_subprocess_exec(
            *command, env={}, start_new_session=True, stdin=none, stdout=none, stderr=none
        )
        self.orders.record("family", pids=[os.getpid(), tool.pid])
        await self.stopped.wait()

    async def detached(self, session: str) -> None:
        """Run a command in a session of its own, which does not end with the turn."""
        given = {"command": "sleep"}
        start = helpers.start_tool_call(
            "call-1", "sleep", kind="execute", status="in_progress", raw_input=given
        )
        await self.client.session_update(session, start)
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        tool = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.orders.record("detached", pid=tool.pid)

    async def send_text(self, session: str, text: str) -> None:
        chunk: AgentMessageChunk = helpers.update_agent_message_text(text)
        await self.client.session_update(session, chunk)

    async def tool(
        self,
        session: str,
        name: str,
        arguments: str,
        content: str,
        is_asked: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        kind: Anything = name if name in {"read", "edit", "execute"} else "other"
        start = helpers.start_tool_call("call-1", f"{name} it", kind=kind, status="pending")
        await self.client.session_update(session, start)
        given = json.loads(arguments)
        if is_asked:
            options = [
                PermissionOption(option_id="never", name="Never", kind="reject_always"),
                PermissionOption(option_id="no", name="No", kind="reject_once"),
                PermissionOption(option_id="always", name="Always", kind="allow_always"),
                PermissionOption(option_id="yes", name="Yes", kind="allow_once"),
            ]
            asked = helpers.update_tool_call("call-1", raw_input=given)
            response = await self.client.request_permission(session, asked, options)
            outcome = response.outcome.model_dump()
            self.orders.record("permission", **outcome)
            if outcome.get("option_id") != "yes":
                failed = helpers.update_tool_call("call-1", status="failed", raw_input=given)
                return await self.client.session_update(session, failed)
        self.orders.record("ran", arguments=given)
        running = helpers.update_tool_call("call-1", status="in_progress", raw_input=given)
        await self.client.session_update(session, running)
        block = helpers.tool_content(helpers.text_block(content))
        done = helpers.update_tool_call("call-1", status="completed", content=[block])
        return await self.client.session_update(session, done)

    def record_opening(self, how: str, cwd: str, servers: Anything, meta: Anything) -> None:
        if failure := self.orders.take("opening"):
            raise RequestError(*failure)
        shown = [server.model_dump(exclude_none=True) for server in servers or []]
        meta.pop("additional_directories", None)
        self.orders.record("opened", how=how, cwd=cwd, servers=shown, meta=meta)


def take_effect(ledger: str) -> None:
    Path(ledger).write_text("effect\n")


async def main(folder: str, *can: str) -> None:
    agent: Anything = ScriptedAgent(Path(folder), {*can})
    with contextlib.suppress(asyncio.CancelledError):
        await run_agent(agent, use_unstable_protocol=True)


def serve(address: str) -> None:
    """Run an agent in a copy of this process for each `acp_launcher` that connects, as long as stdin is open."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(address)
        listening.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            link, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                stand_in(link)
            link.close()


def stand_in(link: socket.socket) -> None:
    """Run as the process at the other end of `link`, and end with it."""
    size, files, _, _ = socket.recv_fds(link, 4, 3)
    about = json.loads(link.makefile("rb").read(int.from_bytes(size, "big")))
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    os.environ.clear()
    os.environ.update(about["env"])
    os.chdir(about["cwd"])

    def follow() -> None:
        link.recv(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - as at a start
    asyncio.run(main(*about["arguments"]))
    link.sendall(b"\0")
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        asyncio.run(main(*sys.argv[1:]))
