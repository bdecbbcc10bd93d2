"""The browser client's own tests, which node runs: `browser_client.test.mjs` and those beside it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from midstream.session.session import CONTINUE
from midstream.testing import text
from tests.server.serving import make_app, served

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENT = ROOT / "src" / "midstream" / "server" / "static" / "client"
GUIDE = ROOT / "docs" / "guides" / "browser.md"
NODE = shutil.which("node")
NPM = shutil.which("npm")
NPM_PACK = ("npm", "pack", "--silent")
RUN_S = 50.0


@pytest.mark.skipif(
    NODE is None, reason="the browser client is tested by node (20 or newer), which is not here"
)
@pytest.mark.parametrize(
    "suite",
    [
        "answer",
        "browser_client",
        "browser_kept",
        "browser_lifecycle",
        "browser_reach",
        "minimal_client",
        "transcript",
    ],
)
async def test_the_tests_of_the_browser_client_pass(suite: str) -> None:
    assert NODE is not None
    process = await asyncio.create_subprocess_exec(
        NODE,
        "--test",
        "--test-reporter=spec",
        str(HERE / f"{suite}.test.mjs"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode(errors="replace")


@pytest.mark.parametrize(
    "file",
    [CLIENT / "answer.js", ROOT / "examples/minimal_client/answer.mjs", ROOT / "docs/spec/minimal-client.md"],
)
def test_clients_and_the_page_for_them_have_the_message_that_no_user_sent(file: Path) -> None:
    assert CONTINUE in file.read_text(encoding="utf-8")


INSTALL = re.compile(r"^\$ npm install \"\$\(python (?P<where>-c '.*')\)\"$", re.MULTILINE)
CHAT_PROGRAM = """
import { connect } from "midstream";
const client = await connect({ url: process.argv[2] });
console.log(await client.ask("s1", "hi"));
client.close();
"""


@pytest.mark.skipif(NPM is None, reason="no npm here")
async def test_a_program_can_import_the_npm_package_of_the_client_folder(tmp_path: Path) -> None:
    """npm packs the folder that the guide names; unpacking is enough, since the package has no dependencies."""
    found = INSTALL.search(GUIDE.read_text(encoding="utf-8"))
    assert found is not None
    folder = (await run_program(sys.executable, *shlex.split(found["where"]), at=tmp_path)).strip()
    packed = (await run_program(*NPM_PACK, folder, at=tmp_path)).strip()
    assert _installed(tmp_path / packed, tmp_path / "node_modules") == _names(Path(folder))
    assert (Path(folder) / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    (tmp_path / "speak.mjs").write_text(CHAT_PROGRAM)
    async with served(make_app([text("Hello from npm.")])) as server:
        assert await run_program("node", "speak.mjs", server.url, at=tmp_path) == "Hello from npm.\n"


def _installed(packed: Path, modules: Path) -> set[str]:
    """Unpack what npm packed as npm does; return its files."""
    with tarfile.open(packed) as archive:
        archive.extractall(modules, filter="data")
    return _names((modules / "package").rename(modules / "midstream"))


def _names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


async def run_program(*command: str, at: Path) -> str:
    """Return the output of a program that ends with success and in time."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=at, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, problem = await asyncio.wait_for(process.communicate(), RUN_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0, problem.decode()
    return out.decode()
