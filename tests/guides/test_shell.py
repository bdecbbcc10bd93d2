"""The shell blocks of the README and the guides: each line is executed, as printed, in the folder of a
reader.

Servers take a free port (`MIDSTREAM_SERVE_PORT`) in the place of 8000 and 8100, and `MIDSTREAM_URL` names it
to the commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guides.blocks import COMMANDS, ROOT
from tests.guides.reader import BLOCKS, environment, write_agent
from tests.ports import held_port
from tests.search import with_slow

pytestmark = pytest.mark.slow

WAIT_S = 60.0
Key = tuple[str, str, int]


class Shell:
    """A reader's terminal in a folder of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.typed: set[str] = set()
        port = url.rpartition(":")[2]
        self.environment = environment(
            folder,
            HOME=str(folder),
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            MIDSTREAM_SERVE_PORT=port,
            MIDSTREAM_GATEWAY_PORT=port,
            MIDSTREAM_URL=url,
        )

    def run(self, line: str, *, stdin: str = "") -> str:
        """Run a line to its end and return what it printed on stdout."""
        process = self.start(line)
        out, err = process.communicate(stdin, timeout=WAIT_S)
        assert process.returncode == 0, f"{line}: {out}{err}"
        return out

    def start(self, line: str, *, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start a line in the background."""
        self.typed.add(line)
        here = line.replace("http://127.0.0.1:8000", self.url).replace("http://127.0.0.1:8100", self.url)
        return subprocess.Popen(
            ["bash", "-euc", here],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=self.folder,
            env=self.environment,
            start_new_session=True,
        )

    @contextlib.contextmanager
    def serving(self, line: str) -> Iterator[None]:
        """Run a line with a server until the end of the block."""
        process = self.start(line, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        late = threading.Timer(WAIT_S, process.kill)
        late.start()
        try:
            seen = ""
            for each in process.stdout:
                seen += each
                if self.url in each:
                    break
            late.cancel()
            assert self.url in seen, f"{line}: {seen}"
            yield
        finally:
            late.cancel()
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=WAIT_S)

    def until(self, line: str, shown: str) -> None:
        """Repeat a line until it prints `shown`."""
        end = time.monotonic() + WAIT_S
        while shown not in self.run(line):
            assert time.monotonic() < end, f"{line} never prints {shown}"


def _lines_of(key: Key) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", BLOCKS[key].code)
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.strip()]


# --- the use of each block
# --------------------------------------------------------------------------------------


def _first_hour(shell: Shell, serve: str, chat: str) -> None:
    write_agent(shell.folder, "hello:agent")
    with shell.serving(serve):
        assert "Take a coat: it is 8 degrees in Oslo." in shell.run(chat, stdin="Oslo?")


def _gateway(shell: Shell, export: str, gateway: str, curl: str) -> None:
    name, _, value = export.partition("#")[0].removeprefix("export ").strip().partition("=")
    shell.environment[name] = value
    shell.typed.add(export)
    with shell.serving(gateway):
        answer = json.loads(shell.run(curl))
    assert answer["object"] == "chat.completion"
    assert "hello" in answer["choices"][0]["message"]["content"]


def _approvals(shell: Shell, questions: str, *answers: str) -> None:
    script = """
from midstream import Agent, tool
from midstream.testing import ScriptedModel, calls, text

@tool(needs_approval=True)
def pay(to: str, amount: int) -> str:
    "Pay somebody."
    return f"paid {amount} to {to}"

script = [calls((f"c{number}", "pay", '{"to": "Ann", "amount": 250}')) for number in range(3)]
agent = Agent(ScriptedModel([*script, text("I am done.")]), tools=[pay])
"""
    (shell.folder / "app.py").write_text(script)
    with shell.serving("midstream serve app:agent"):
        asking = shell.start("midstream chat --session my-session --message 'pay Ann'")
        for answer in answers:
            shell.until(questions, "my-session")
            shell.run(answer)
        asking.communicate(timeout=WAIT_S)
        shown = shell.run("midstream sessions show my-session")
    assert shown.count("paid 250 to Ann") == 1
    assert "too much" in shown
    assert "paid 25 to Ann" in shown


def _encrypted(shell: Shell, install: str, serve: str) -> None:
    pytest.importorskip("cryptography")
    (shell.folder / "secrets").mkdir()
    shell.folder /= "project"
    shell.folder.mkdir()
    write_agent(shell.folder, "hello:agent", "app")
    shell.typed.add(install)  # The extra is in this environment.
    with shell.serving(serve):
        shell.run("midstream chat --session s --message Oslo?")
    assert "Oslo" in shell.run("midstream sessions show s --store sessions.db --key-file ../secrets/keys")
    assert b"Oslo" not in (shell.folder / "sessions.db").read_bytes()


def _decrypted_outside(shell: Shell, backup: str, export: str, *others: str) -> None:
    """Use a file of keys in the place of the endpoint, which tests/cli/test_key_option.py covers."""
    pytest.importorskip("cryptography")
    write_agent(shell.folder, "hello:agent", "app")
    with shell.serving("midstream serve app:agent --store sessions.db --key-file keys"):
        shell.run("midstream chat --session my-session --message Oslo?")
    shell.run(backup)
    assert "Oslo" in shell.run(export)
    shell.typed.update(others)
    show, verify = (line.replace("https://keys.example", "keys") for line in others)
    assert "Oslo" in shell.run(show)
    shell.run(verify)  # A bad journal is another status.


def _encrypted_for_clients(shell: Shell, serve: str, chat: str) -> None:
    pytest.importorskip("cryptography")
    write_agent(shell.folder, "hello:agent", "app")
    with shell.serving(serve):
        assert "Take a coat" in shell.run(chat, stdin="Oslo?")
    assert b"Oslo" not in (shell.folder / "sessions.db").read_bytes()


def _security(shell: Shell, serve: str, chat: str, login: str, access: str, curl: str) -> None:
    write_agent(shell.folder, "hello:agent", "app")
    with shell.serving(serve):
        assert "Take a coat" in shell.run(chat, stdin="Oslo?")
        assert shell.run(login).startswith(f"{shell.url}/#login=")
        assert "\tlogin\t" in shell.run(access)
        assert json.loads(shell.run(curl))["sessions"]


def _verified(shell: Shell, checkpoint: str, compare: str) -> None:
    write_agent(shell.folder, "hello:agent", "app")
    with shell.serving("midstream serve app:agent"):
        shell.run("midstream chat --session s --message Oslo?")
        shell.run(checkpoint)
        shell.run(compare)
    assert (shell.folder / "heads-2").read_text().count('"session":"s"') == 1


def _upstreams(shell: Shell, *gateways: str) -> None:
    """Start each; one whose upstream is not on this machine reports what is missing when a client sends a request."""
    for gateway in gateways:
        line = gateway.partition("  #")[0]
        shell.typed.add(gateway)
        if " scripted" not in gateway:
            continue
        with shell.serving(f"{line} --no-token"):
            models = json.loads(shell.run(f"curl -s {shell.url}/v1/models"))
        assert models["object"] == "list"


def _users(shell: Shell, *lines: str) -> None:
    """Give two users keys, let one request an answer, and read the usage."""
    adding, other_adding, listing, revoking, usage, other_usage = lines
    with shell.serving("midstream gateway --upstream scripted"):
        key = shell.run(adding).strip()
        shell.run(other_adding)
        assert [line.split("\t")[1] for line in shell.run(listing).splitlines()] == ["ada", "eve"]
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
        curl = f"curl -s -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json'"
        answer = f"{curl} {shell.url}/v1/chat/completions -d '{body}'"
        assert json.loads(shell.run(answer))["choices"][0]["message"]["content"] == "You said: hello"
        assert "1 key revoked" in shell.run(revoking)
        assert json.loads(shell.run(answer))["error"]["code"] == "invalid_api_key"
        assert shell.run(usage).split("\t")[:2] == ["ada", "1"]
    with shell.serving("midstream gateway --upstream scripted --store gateway.db"):
        assert shell.run(other_usage) == ""


def _gateway_file(shell: Shell, gateway: str) -> None:
    """Start it with the file of options, and the file of MCP servers, of the page."""
    pytest.importorskip("claude_agent_sdk")
    shell.environment["MAIL_TOKEN"] = "t"
    (shell.folder / "project").mkdir()
    (shell.folder / "gateway.toml").write_text(BLOCKS["gateway.md", "toml", 2].code)
    (shell.folder / "mcp.json").write_text(BLOCKS["gateway.md", "json", 1].code)
    (shell.folder / "gateway.key").write_text("the-key-of-our-clients\n")
    (shell.folder / "gateway.key").chmod(0o600)
    with shell.serving(gateway):
        models = json.loads(
            shell.run(f"curl -s -H 'Authorization: Bearer the-key-of-our-clients' {shell.url}/v1/models")
        )
    assert models["object"] == "list"
    assert (shell.folder / "gateway.db").exists()


def _several_models(shell: Shell, gateway: str) -> None:
    """Start it with the tables of the page; one of its models answers."""
    for package in ("claude_agent_sdk", "openai"):
        pytest.importorskip(package)
    shell.environment["TEAM_OPENAI_KEY"] = "k"
    (shell.folder / "project").mkdir()
    (shell.folder / "models.toml").write_text(BLOCKS["gateway.md", "toml", 3].code)
    (shell.folder / "gateway.key").write_text("the-key-of-our-clients\n")
    (shell.folder / "gateway.key").chmod(0o600)
    with shell.serving(gateway):
        curl = f"curl -s -H 'Authorization: Bearer the-key-of-our-clients' {shell.url}/v1"
        models = json.loads(shell.run(f"{curl}/models"))
        body = json.dumps({"model": "try", "messages": [{"role": "user", "content": "hello"}]})
        answer = json.loads(
            shell.run(f"{curl}/chat/completions -H 'Content-Type: application/json' -d '{body}'")
        )
    assert {each["id"] for each in models["data"]} == {"coder", "gpt", "qwen3", "try"}
    assert answer["choices"][0]["message"]["content"] == "You said: hello"


def _targets(shell: Shell, *lines: str) -> None:
    """Check that every target that the page names is one of the Makefile; `make test` runs this."""
    makefile = (ROOT / "Makefile").read_text()
    for line in lines:
        shell.typed.add(line)
        assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


def _npm(shell: Shell, install: str) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not here")
    (shell.folder / "package.json").write_text('{"name": "app", "private": true, "type": "module"}')
    shell.run(install)
    (name,) = json.loads((shell.folder / "package.json").read_text())["dependencies"]
    shown = f"import('{name}').then((found) => console.log(typeof found.connect))"
    assert shell.run(f'node -e "{shown}"') == "function\n"


def _allowed_origin(shell: Shell, serve: str) -> None:
    write_agent(shell.folder, "hello:agent")
    (shell.folder / "tokens").write_text("the-token-of-our-users-1 ada\n")
    (shell.folder / "tokens").chmod(0o600)
    shown = "-H 'Authorization: Bearer the-token-of-our-users-1'"
    with shell.serving(serve):
        for origin, status in (("https://app.example", "200"), ("https://evil.example", "403")):
            asked = (
                f"curl -s -o answer -w '%{{http_code}}' {shown} -H 'Origin: {origin}' {shell.url}/v1/sessions"
            )
            assert shell.run(asked) == status


def _minimal_client(shell: Shell, serve: str, ask: str) -> None:
    _copy_client(shell)
    write_agent(shell.folder, "hello:agent")
    with shell.serving(serve):
        first, again = shell.run(ask), shell.run(ask)
    assert "Take a coat: it is 8 degrees in Oslo." in first
    assert again == first, "the answer is there, and was not requested again"


def _client_conformance(shell: Shell, test: str) -> None:
    _copy_client(shell)
    lines = shell.run(test).splitlines()
    assert len(lines) > 5
    assert all(line.startswith("passed") for line in lines)


def _copy_client(shell: Shell) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not here")
    shutil.copytree(ROOT / "examples" / "minimal_client", shell.folder / "examples" / "minimal_client")


RUN: dict[tuple[Key, ...], Callable[..., None]] = {
    (("README.md", "", 2),): _first_hour,
    (("README.md", "", 3), ("README.md", "", 4)): _gateway,
    (("README.md", "", 5),): _targets,
    (("README.md", "", 0),): _targets,
    (("approvals.md", "", 0),): _approvals,
    (("browser.md", "", 0),): _npm,
    (("browser.md", "", 1),): _allowed_origin,
    (("browser.md", "", 2),): _minimal_client,
    (("browser.md", "", 3),): _client_conformance,
    (("encryption.md", "", 0),): _encrypted,
    (("encryption.md", "", 1),): _decrypted_outside,
    (("encryption.md", "", 2),): _encrypted_for_clients,
    (("gateway.md", "", 0),): _upstreams,
    (("gateway.md", "", 1), ("gateway.md", "", 2)): _users,
    (("gateway.md", "", 4),): _gateway_file,
    (("gateway.md", "", 5),): _several_models,
    (("security.md", "sh", 0),): _security,
    (("security.md", "sh", 1),): _verified,
}
LONG = [keys for keys in RUN if keys[0][0] != "README.md" and keys[0][2] > 0]
"""Blocks that are left to `make long`: `make test` runs those of the README, and the first one of each guide."""
NOT_RUN = {
    ("README.md", "", 1): "nothing is published yet: tests/test_extras.py",
    ("doctor.md", "", 0): "output on one reader's files: tests/cli/test_doctor.py",
    (
        "durable-streams.md",
        "sh",
        0,
    ): "an address that is nowhere: tests/dialects/test_plain_streams.py sends the body",
    ("gateway.md", "", 3): "another vendor's program: its API is tests/dialects",
    (
        "jetstream.md",
        "",
        0,
    ): "a configuration: tests/store/jetstream/test_stream_setup.py gives it to a server",
    ("mcp.md", "", 0): "a package of another registry: tests/cli/test_mcp_servers.py serves with --mcp",
    ("mcp-server.md", "", 0): "another vendor's program: tests/dialects/test_mcp_kills.py has a client",
    ("postgresql.md", "", 0): "a configuration: tests/fault/test_postgres_recovery.py gives it to a server",
    ("postgresql.md", "", 1): "a configuration: tests/fault/test_postgres_recovery.py gives it to a server",
    ("network.md", "", 0): "output behind one proxy: tests/cli/test_network.py",
    (
        "observability.md",
        "sh",
        0,
    ): "needs a collector: tests/observability/test_opentelemetry.py has the options",
    ("reuse.md", "", 0): "a log line: tests/observability/test_debug_output.py",
}
"""Blocks that a reader does not type unchanged, and the tests that execute the same."""


def test_every_shell_block_is_executed_or_listed_with_a_reason() -> None:
    shells = {key for key in BLOCKS if key[1] in COMMANDS}
    run = {key for keys in RUN for key in keys}
    assert run | NOT_RUN.keys() == shells
    assert not run & NOT_RUN.keys()
    named = {path for reason in NOT_RUN.values() for path in re.findall(r"tests/[\w/.]+", reason)}
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("keys", with_slow(RUN, (), LONG), ids=lambda keys: "-".join(map(str, keys[0])))
def test_a_shell_block_runs_as_printed(keys: tuple[Key, ...], tmp_path: Path) -> None:
    lines = [line for key in keys for line in _lines_of(key)]
    with held_port() as port:
        shell = Shell(tmp_path, f"http://127.0.0.1:{port}")
        RUN[keys](shell, *lines)
    assert set(lines) <= shell.typed
