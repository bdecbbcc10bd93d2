"""`midstream conformance` against a server of ours."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from starlette.requests import HTTPConnection

from midstream.cli import midstream_command
from midstream.cli.exits import FAILURE, USAGE, VERIFICATION
from midstream.client.transport_selection import TransportKind
from midstream.local_keys import headers_for, read_or_make_key
from midstream.paths import Paths
from midstream.protocol.stream_settings import StreamSettings
from midstream.server.auth.access import Access, this_user
from midstream.server.auth.principals import Principal
from midstream.testing.conformance.scripts import scripts
from midstream.testing.scripted_model import text
from tests.cli.conftest import Run
from tests.fault.extent import IS_FULL
from tests.house.source import ROOT
from tests.server.serving import make_app, served


async def run_conformance(*arguments: str, access: Access | None = None) -> tuple[Result, int]:
    """Run the command against a server; return its result, and the number of sessions left there."""
    async with served(make_app([text("ready")] * 300, access=access)) as server:
        server.app.settings = StreamSettings(heartbeat_s=0.1)
        command = ["conformance", server.url, "--wait", "60", *arguments]
        result = await asyncio.to_thread(CliRunner().invoke, midstream_command, command)
        shown = await asyncio.to_thread(headers_for, server.url)
        left = (await server.http.get("/v1/sessions?limit=200", headers=shown)).json()["sessions"]
        return result, len(left)


async def test_our_own_server_passes_all_scripts_and_is_left_clean() -> None:
    result, left = await run_conformance("--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line for line in lines if not line["has_passed"]] == []
    expected = {
        transport: sum(script.fits(transport) for script in scripts("server")) for transport in TransportKind
    }
    assert Counter(line["transport"] for line in lines) == expected
    assert (result.exit_code, left) == (0, 0)
    assert f"{len(lines)} of {len(lines)} scripts passed." in result.stderr


async def test_scripts_can_be_selected_by_clause_and_their_sessions_kept() -> None:
    result, left = await run_conformance(
        "--only", "STREAM-8", "--keep", "--transport", "sse", "--transport", "poll"
    )
    assert result.exit_code == 0
    assert left == len(result.stdout.splitlines()) == 4
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["passed  sse"] * 2 + [
        "passed  poll"
    ] * 2


async def test_a_server_of_this_user_receives_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))
    monkeypatch.delenv("MIDSTREAM_TOKEN", raising=False)
    access = Access(authenticate=this_user(read_or_make_key(Paths.find().data)))
    result, _ = await run_conformance("--only", "STREAM-31", access=access)
    assert (result.exit_code, result.stdout.count("passed")) == (0, 6)


async def test_a_required_header_is_sent() -> None:
    result, _ = await run_conformance("--only", "STREAM-31", "--header", "origin: https://elsewhere.example")
    assert result.exit_code == VERIFICATION
    assert "step 1: foreign_origin" in result.stdout
    assert "step 2: error: type is 'error', not 'welcome'" in result.stdout
    assert "0 of 6 scripts passed." in result.stderr


async def test_sessions_created_with_a_header_are_deleted_too() -> None:
    async def alice(request: HTTPConnection) -> Principal | None:
        return Principal("alice") if request.headers.get("authorization") == "Bearer a" else None

    async with served(make_app([text("ready")] * 9, access=Access(authenticate=alice))) as server:
        for url in (server.url, server.url.replace("http:", "ws:")):
            command = ["conformance", url, "--only", "STREAM-8", "--header", "authorization: Bearer a"]
            result = await asyncio.to_thread(CliRunner().invoke, midstream_command, command)
            assert (result.exit_code, result.stdout.count("passed")) == (0, 6)
        headers = {"authorization": "Bearer a"}
        assert (await server.http.get("/v1/sessions", headers=headers)).json()["sessions"] == []


CLIENT = ROOT / "examples" / "minimal_client"
NODE = "node --experimental-websocket --no-warnings"
WEBSOCKET = ("--transport", "websocket")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node here")


def _run_client(run: Run, folder: Path, *arguments: str) -> Result:
    command = f"{NODE} {folder / 'subject.mjs'}"
    return run("conformance", "--client", command, *WEBSOCKET, *arguments)


SOME = "ack"
"""The word that selects the scripts of `make test`; `MIDSTREAM_FAULT_FULL=1` runs all of them, in a minute."""


@needs_node
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_client_of_the_examples_passes_the_scripts(run: Run) -> None:
    words = "" if IS_FULL else SOME
    result = _run_client(run, CLIENT, "--json", "--only", words)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line for line in lines if not line["has_passed"]] == []
    chosen = [script for script in scripts("client") if words in script.name or words in script.clauses]
    assert (result.exit_code, len(lines)) == (0, len(chosen))
    assert len(chosen) > 10


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "right", "wrong", "clause", "problem"),
    [
        ("stream.mjs", "connection: this.kept.connection + 1", "connection: 1", "STREAM-50", "not above 1"),
        pytest.param(
            *("stream.mjs", "at.epoch > promised.epoch", "false"),
            *("STREAM-100", "the client did not react within 5 s"),
            marks=pytest.mark.long,
        ),
        (
            "stream.mjs",
            "else if (FRAMES.has(frame.type)) this",
            "else this",
            "STREAM-34",
            "FAILED  websocket: A frame of an unknown",
        ),
        pytest.param(
            *("stream.mjs", "this.overBy = newest", "this.overBy = null"),
            *("STREAM-54", "the client did not react within 5 s"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("checkpoint.mjs", "write(this.file,", "void (this.file,"),
            *("STREAM-11", "the client program ended"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_client_that_breaks_a_rule_fails_its_script(
    run: Run, tmp_path: Path, file: str, right: str, wrong: str, clause: str, problem: str
) -> None:
    folder = shutil.copytree(CLIENT, tmp_path / "client")
    source = (folder / file).read_text()
    assert right in source
    (folder / file).write_text(source.replace(right, wrong, 1))
    result = _run_client(
        run, folder, "--only", clause, "--wait", "20" if clause in {"STREAM-50", "STREAM-11"} else "5"
    )
    assert (result.exit_code, problem in result.stdout) == (VERIFICATION, True), result.stdout
    assert "FAILED  websocket: " in result.stdout


def test_a_program_that_is_not_a_client_is_reported(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    for program_text, wait_s, problem in (
        ("raise SystemExit(3)", 60, "the client program ended with status 3 at `begin`"),
        ("print('hello', flush=True); input()", 60, "the client program answered `begin` with 'hello'"),
        ("input(); input()", 1, "the client program did not answer `begin` within 1 s"),
    ):
        program.write_text(program_text)
        command = f"{sys.executable} {program}"
        options = ("--only", "STREAM-7", "--wait", str(wait_s), *WEBSOCKET)
        result = run("conformance", "--client", command, *options)
        assert result.exit_code == VERIFICATION
        assert problem in result.stdout


def test_impossible_requests_are_reported(run: Run) -> None:
    assert run("conformance", "http://127.0.0.1:9", "--only", "no such words").exit_code == USAGE
    assert run("conformance", "nowhere").exit_code == USAGE
    assert run("conformance", "http://127.0.0.1:9", "--header", "x").exit_code == USAGE
    assert run("conformance").exit_code == USAGE
    assert run("conformance", "--client", "no-such-program").exit_code == USAGE
    assert run("conformance", "--client", "'").exit_code == USAGE
    assert run("conformance", "http://127.0.0.1:9", "--client", "true").exit_code == USAGE
    assert run("conformance", "--client", "true", "--only", "no such words").exit_code == USAGE
    unreachable = run("conformance", "http://127.0.0.1:9", "--only", "STREAM-31")
    assert unreachable.exit_code in (FAILURE, VERIFICATION)
