"""Every code block of the README and the guides is executed as printed.

A program that uses a server is also executed while its connection is cut, and while the server is killed, in
the middle of an answer: its final output is the same. With the agents of `POOLED` it is executed while the
server is killed: the program and the connection are the same for all agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstream.session.records import Delta, TurnEnded
from tests.fault.workers import until_there
from tests.forked import AsyncForked
from tests.guides.blocks import COMMANDS, PROGRAMS, ROOT, SHOWN
from tests.guides.guide_programs import (
    ANYTHING,
    IN_A_BROWSER,
    POOLED,
    SERVED,
    SERVED_JS,
    TABLE,
    URL,
    GuideProgram,
)
from tests.guides.line import line_to
from tests.guides.program_process import Request, Result
from tests.guides.reader import BLOCKS, environment, write_agent
from tests.models.strict_provider import strict_provider
from tests.ports import held_port
from tests.search import with_long, with_slow

pytestmark = pytest.mark.slow

WAIT_S = 60.0
NODE = shutil.which("node")
APART = {
    "main": (Path(sys.executable), ""),
    "frameworks": (ROOT / ".venv-peers-durable" / "bin" / "python", "make contract"),
    "a2a": (Path(sys.prefix, "a2a", "bin", "python"), "make .venv/.a2a"),
}
"""The interpreter of each environment, and the make target that creates it."""
CLIENT_JS = ROOT / "src" / "midstream" / "server" / "static" / "client" / "midstream.js"
TALKING = [program for program in TABLE if program.served_agent]
ONCE_FOR_ALL = [program for program in TALKING if program.served_agent not in POOLED]
OTHERS = [program for program in TABLE if not program.served_agent]
LONG = [each for each in OTHERS if each.page == "openai-agents.md" and len(each.blocks) > 1]
"""Programs that are left to `make long`: each needs seconds to import its SDK, as the first one does."""


class Interpreter:
    """A Python process that runs programs one after the other, and is started again if it was killed."""

    def __init__(self) -> None:
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.guides.program_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(ROOT),
        )

    def run(self, folder: Path, variables: dict[str, str]) -> str:
        """Run `program.py` of a folder to its end, and return its output."""
        if self._process.poll() is not None:
            self._process = self._started()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(WAIT_S, self._process.kill)
        late.start()
        try:
            request = Request(str(folder), environment(folder, **variables))
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        assert line, "the program ended its interpreter, or did not end"
        result = msgspec.json.decode(line, type=Result)
        assert not result.error, result.error
        return result.out

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with contextlib.closing(Interpreter()) as started:
        yield started


def test_every_block_is_executed() -> None:
    named = {(program.page, program.language, number) for program in TABLE for number in program.blocks}
    agents = [SERVED[program.served_agent] for program in TALKING]
    served = {(agent.page, "python", agent.block) for agent in agents}
    programs = {key for key in BLOCKS if key[1] in PROGRAMS and key[:2] not in IN_A_BROWSER}
    assert [path for path in IN_A_BROWSER.values() if not (ROOT / path).exists()] == []
    assert programs - named - served == set(), "a block that no row of tests/guides/guide_programs.py runs"
    assert named - programs == set(), "a row whose block is gone"


def test_every_language_is_known() -> None:
    assert {language for _, language, _ in BLOCKS} <= PROGRAMS | COMMANDS | SHOWN


@pytest.mark.parametrize("program", with_slow(OTHERS, (), LONG), ids=lambda program: program.name)
async def test_a_program_runs_as_printed(
    program: GuideProgram, tmp_path: Path, interpreter: Interpreter
) -> None:
    _check_environment(program)
    with strict_provider() as provider:
        variables = {
            "ANTHROPIC_BASE_URL": provider.url,
            "OPENAI_BASE_URL": f"{provider.url}/v1",
            "ANTHROPIC_API_KEY": "k",
            "OPENAI_API_KEY": "k",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        variables = variables if program.is_of_provider else {}
        if program.language == "python" and program.environment == "main":
            _write(tmp_path, program, URL)
            out = await asyncio.to_thread(interpreter.run, tmp_path, variables)
        else:
            out = await _run(program, tmp_path, URL, variables)
    assert _fits(program, out), out


@pytest.mark.parametrize("program", with_long(ONCE_FOR_ALL, 3), ids=lambda program: program.name)
async def test_a_program_survives_a_connection_cut_during_an_answer(
    program: GuideProgram, tmp_path: Path
) -> None:
    _check_environment(program)
    with held_port() as port:
        async with _serve_agent(program, tmp_path, port), line_to(port) as (line, url):
            running = asyncio.ensure_future(_run(program, tmp_path, url, {}))
            await until_there(tmp_path, program.session, Delta)
            line.cut()
            (tmp_path / "go").touch()
            out = await running
            assert _fits(program, out), out
            await until_there(tmp_path, program.session, TurnEnded)


@pytest.mark.parametrize("program", with_long(TALKING, 6), ids=lambda program: program.name)
async def test_a_program_shows_each_word_once_after_the_server_was_killed_during_an_answer(
    program: GuideProgram, tmp_path: Path
) -> None:
    _check_environment(program)
    with held_port() as port:
        async with line_to(port) as (_, url):
            async with _serve_agent(program, tmp_path, port) as server:
                running = asyncio.ensure_future(_run(program, tmp_path, url, {}))
                await until_there(tmp_path, program.session, Delta)
                server.send_signal(signal.SIGKILL)
                await server.wait()
            (tmp_path / "go").touch()
            async with _serve_agent(program, tmp_path, port):
                out = await running
                assert _fits(program, out), out
                await until_there(tmp_path, program.session, TurnEnded)


# --- execution
# ----------------------------------------------------------------------------------------------------


def _fits(program: GuideProgram, out: str) -> bool:
    expected = re.escape(program.prints).replace(re.escape(ANYTHING), ".*")
    return re.fullmatch(expected, out, re.DOTALL) is not None


def _check_environment(program: GuideProgram) -> None:
    for module in program.needs:
        pytest.importorskip(module)
    python, made_by = APART[program.environment]
    if not python.exists():
        pytest.skip(f"what this needs is in an environment of its own: `{made_by}`")
    if program.language == "js" and NODE is None:
        pytest.skip("JavaScript is run by node (20 or newer), which is not here")


def _write(folder: Path, program: GuideProgram, url: str) -> list[str]:
    """Write the program, and the agent of the README and guides; return the command that starts it."""
    for agent in {"hello:agent", program.served_agent} - {""}:
        write_agent(folder, agent)
    printed = [BLOCKS[program.page, program.language, number].code for number in program.blocks]
    code = "\n".join([program.before, *printed, program.then]).replace(URL, url)
    if program.language == "python":
        python, _ = APART[program.environment]
        (folder / "program.py").write_text(code)
        return [str(python), "program.py"]
    assert NODE is not None
    for address in SERVED_JS:
        code = code.replace(f'"{address}"', f'"{CLIENT_JS.as_uri()}"')

    (folder / "program.mjs").write_text(code)
    return [NODE, "program.mjs"]


async def _run(program: GuideProgram, folder: Path, url: str, variables: dict[str, str]) -> str:
    """Run a program to its end, and return its output."""
    command = _write(folder, program, url)
    with tempfile.TemporaryFile() as errors:
        process: AsyncForked | asyncio.subprocess.Process
        if command == [sys.executable, "program.py"]:
            process = await AsyncForked.started(
                "program", cwd=folder, env=environment(folder, **variables), stderr=errors
            )
        else:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env=environment(folder, **variables),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        try:
            async with asyncio.timeout(WAIT_S):
                out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
        errors.seek(0)
        assert process.returncode == 0, errors.read().decode(errors="replace")
    return out.decode()


@contextlib.asynccontextmanager
async def _serve_agent(program: GuideProgram, folder: Path, port: int) -> AsyncIterator[AsyncForked]:
    """Serve the page's agent with `midstream serve`."""
    _write(folder, program, URL)
    command = ["serve", "tests.guides.slowly:agent", "--no-auth", "--json", "--store", "server.db"]
    with (folder / "log").open("ab") as log:
        process = await AsyncForked.started(
            *("midstream", *command, "--port", port),
            cwd=folder,
            env=environment(folder, GUIDE_AGENT=program.served_agent),
            stderr=log,
        )
    try:
        async with asyncio.timeout(WAIT_S):
            ready: dict[str, Any] = json.loads(await process.stdout.readline())
        assert ready["url"].endswith(f":{port}")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
