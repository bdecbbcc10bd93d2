"""The setting of an attack: servers of this machine, each a process with its own home folder."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from tests.forked import Forked

WAIT_S = 30.0
AGENT = """
from midstream import Agent, tool
from midstream.testing import ScriptedModel, calls, text

@tool(needs_approval=True)
def pay(to: str) -> str:
    "Pay somebody."
    return f"paid {to}"

agent = Agent(ScriptedModel([calls(("pay", '{"to": "Ann"}')), text("Hello.")]), tools=[pay], name="target")
"""


class HttpAnswer(Struct, frozen=True):
    """The answer to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a problem, "" for another answer."""
        is_problem = "json" in self.headers.get("content-type", "") and self.status >= http.client.BAD_REQUEST
        return str(self.json.get("code", "")) if is_problem else ""

    @property
    def cookie(self) -> str:
        return self.headers.get("set-cookie", "").partition(";")[0]


class Target:
    """A server process."""

    def __init__(self, process: Forked, ready: dict[str, Any]) -> None:
        self.process = process
        self.ready = ready
        self.url: str = ready["url"]

    def ask(
        self, method: str, path: str, body: object = None, *, token: str = "", **headers: str
    ) -> HttpAnswer:
        """Send one request; `token` is a bearer token, and `_` in the name of a header stands for `-`."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_S)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent |= {"authorization": f"Bearer {token}"} if token else {}
        sent |= {"content-type": "application/json"} if body is not None else {}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return HttpAnswer(answer.status, named, answer.read())
        finally:
            connection.close()

    def send_message(self, session: str, words: str = "hi", *, key: str = "k1", **shown: str) -> HttpAnswer:
        """Send a message to a session."""
        frame = {
            "type": "command",
            "seqno": 0,
            "payload": {"type": "send", "parts": [{"type": "text", "text": words}]},
        }
        keys = {"x_idempotency_key": key, "x_idempotent_encryption_key": "s" * 43}
        return self.ask("POST", f"/v1/sessions/{session}/commands", frame, **keys, **shown)

    def stop(self) -> str:
        """End the process; return its output on stderr."""
        if self.process.poll() is None:
            self.process.terminate()
        _, output = self.process.communicate(timeout=WAIT_S)
        return str(output)


class Ground:
    """A folder with a home, an agent and servers.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        (folder / "target.py").write_text(AGENT)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")},
            "MIDSTREAM_HOME": str(self.home),
        }

    def write_secret(self, name: str, text: str) -> Path:
        """Write a file that only this user can read, whole and at once."""
        path = self.folder / name
        fresh = path.with_name(f".{name}.new")
        fresh.write_text(text)
        fresh.chmod(0o600)
        fresh.replace(path)
        return path

    def run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of midstream to its end, without a terminal."""
        process = Forked(
            "midstream", *arguments, text=True, cwd=self.folder, env={**self.environment, **environment}
        )
        out, err = process.communicate(timeout=WAIT_S)
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)

    @contextlib.contextmanager
    def serving(self, *options: str | Path, port: int = 0) -> Iterator[Target]:
        """Run `midstream serve` until the end of the block."""
        store = self.folder / "sessions.db"
        arguments = ("serve", "target:agent", "--store", store, "--port", port, *options)
        with self.start(*map(str, arguments)) as target:
            yield target

    @contextlib.contextmanager
    def start(self, *arguments: str | Path, **environment: str) -> Iterator[Target]:
        """Run a command of midstream that listens until the end of the block."""
        process = Forked(
            *("midstream", *arguments, "--json"),
            text=True,
            cwd=self.folder,
            env={**self.environment, **environment},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=WAIT_S)[1]
        target = Target(process, json.loads(line))
        try:
            yield target
        finally:
            target.stop()
