"""A store file and a running server give the same answers."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from midstream.cli.session_sources import ServerSource, StoreSource, resolve
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import World
from midstream.errors import (
    ConnectionLostError,
    KeyMissingError,
    MidstreamError,
    ProtocolError,
    SessionBusyError,
    SessionNotFoundError,
    UnavailableError,
    UsageError,
)
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.node_reports import NODES, NodeReport
from midstream.store.sqlite import SQLiteStore
from midstream.testing import ScriptedModel, calls, run_turn, text
from midstream.tools.function_tools import tool
from tests.cli.conftest import Run
from tests.cli.processes import Serving
from tests.cli.processes import run as run_process
from tests.spec import spec


@pytest.fixture
def server(store: Path) -> Iterator[Serving]:
    with Serving(store.parent) as serving:
        yield serving


def test_a_server_lists_exports_and_deletes_the_sessions_of_its_file(server: Serving) -> None:
    remote, local = ServerSource(server.url), StoreSource(server.store)
    assert list(remote.list()) == list(local.list())
    assert list(remote.records("harbour-1")) == list(local.records("harbour-1"))
    remote.delete("harbour-1")
    for source in (remote, local):
        assert [line.id for line in source.list()] == ["harvest-2"]
        with pytest.raises(SessionNotFoundError):
            list(source.records("harbour-1"))
    with pytest.raises(SessionNotFoundError):
        remote.delete("harbour-1")


def test_the_commands_accept_a_server(run: Run, server: Serving) -> None:
    done = run("sessions", "show", "--json", "--url", server.url, "harb")
    assert json.loads(done.stdout)["id"] == "harbour-1"
    both = run("sessions", "list", "--url", server.url, "--store", server.store)
    assert (both.exit_code, "give one of them" in both.stderr) == (2, True)


def test_an_unreachable_server_has_no_traceback(run: Run, server: Serving) -> None:
    server.kill()
    done = run("sessions", "list", "--url", server.url)
    problem = f"no answer from {server.url} (ConnectionRefusedError)."
    advice = "Check that the server runs and that the address is right."
    assert (done.exit_code, done.stderr) == (1, f"midstream: {problem} {advice} [connection_lost]\n")
    with pytest.raises(ConnectionLostError):
        list(ServerSource(server.url).list())


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a", "http://", "file:///etc/passwd", "http://a:99999"]
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        ServerSource(url)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"type":"urn:midstream:error:session_busy","code":"session_busy","detail":"x"}', SessionBusyError),
        (b'{"type":"urn:midstream:error:new","code":"new","detail":"x","retry":"later"}', UnavailableError),
        (b"<html>nobody is here", ProtocolError),
    ],
)
def test_a_refusal_of_a_server_is_the_same_error_here(body: bytes, kind: type[MidstreamError]) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(409)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        answering = Thread(target=server.handle_request)
        answering.start()
        with pytest.raises(MidstreamError) as refused:
            list(ServerSource(f"http://127.0.0.1:{server.server_port}").list())
        answering.join()
    assert type(refused.value) is kind


def test_a_name_is_an_id_or_its_unique_prefix_or_the_last(store: Path) -> None:
    source = StoreSource(store)
    assert resolve(source, "harbour-1").id == "harbour-1"
    assert resolve(source, "harv").id == "harvest-2"
    assert resolve(source, "-").id == "harvest-2"
    with pytest.raises(UsageError, match="'harvest-2', 'harbour-1'"):
        resolve(source, "har")
    with pytest.raises(SessionNotFoundError):
        resolve(source, "x")


LARGE = "é\n" * 40_000


@tool(has_effects=False)
def dump() -> str:
    """Return more than fits a record."""
    return LARGE


async def _record_large_result(path: Path) -> None:
    host = Host(Agent(ScriptedModel([calls(("dump", "{}")), text("long")]), tools=[dump]), SQLiteStore(path))
    await host.start()
    await run_turn(host, "large", "hi")
    await host.stop()


@spec("TURN-71")
def test_an_export_has_a_whole_large_result_from_a_file_and_from_a_server(run: Run, store: Path) -> None:
    asyncio.run(_record_large_result(store))
    with Serving(store.parent) as serving:
        outputs = [
            run("sessions", "export", "large", "--url", serving.url).stdout,
            run("sessions", "export", "large", "--store", store).stdout,
        ]
    assert outputs[0] == outputs[1]
    lines = [json.loads(line) for line in outputs[0].splitlines()]
    (line,) = [line for line in lines if "whole" in line]
    assert line["whole"] == LARGE
    assert line["record"]["result"]["size"] == len(LARGE.encode())


@spec("TURN-72")
def test_a_damaged_outcome_is_marked_and_the_rest_is_unchanged(run: Run, store: Path) -> None:
    with closing(sqlite3.connect(store)) as db:
        db.execute(
            "update record set body = cast(substr(body, 1, length(body) - 2) as blob) "
            "where cast(body as text) like '%call_ended%'"
        )
        db.commit()
    shown = run("sessions", "show", "harbour-1")
    assert shown.exit_code == 0
    assert "cannot be read any more" in shown.stdout
    assert "There is nothing." in shown.stdout


@pytest.mark.slow
def test_an_encrypted_store_is_read_with_its_key_file_without_a_server(tmp_path: Path) -> None:
    environment, keys = {"MIDSTREAM_HOME": str(tmp_path)}, tmp_path / "keys"
    with Serving(tmp_path, options=["--key-file", str(keys)]) as server:
        arguments = ("chat", server.url, "--session", "s", "--message", "what is in the harbour?")
        assert run_process(*arguments, environment=environment).returncode == 0
        live = run_process("sessions", "export", "s", "--url", server.url, environment=environment).stdout
        server.kill()
    store = ("--store", server.store)

    refused = run_process("sessions", "export", "s", *store)
    assert "give the key file with --key-file" in refused.stderr
    opened = (*store, "--key-file", keys)
    assert run_process("sessions", "export", "s", *opened).stdout == live
    assert "You said: what is in the harbour?" in run_process("sessions", "show", "s", *opened).stdout
    assert "what is in the harbour?" in run_process("sessions", "list", *opened).stdout
    assert run_process("sessions", "questions", *opened).returncode == 0
    assert run_process("cache", "s", *opened).returncode == 0

    other = tmp_path / "other keys"
    FileKeys.make(other)
    refused = run_process("sessions", "export", "s", *store, "--key-file", other)
    assert "[key_missing]" in refused.stderr
    refused = run_process("sessions", "export", "s", "--url", server.url, "--key-file", keys)
    assert "remove it with --url" in refused.stderr


async def test_the_servers_of_an_encrypted_store_are_listed_with_its_key_file_only(tmp_path: Path) -> None:
    FileKeys.make(tmp_path / "keys")
    path, keys = tmp_path / "sessions.db", FileKeys(tmp_path / "keys")
    async with Host(Agent(ScriptedModel([])), encrypt_store(SQLiteStore(path), keys)) as host:
        report = NodeReport("serve", "0", "agent", "machine", 1, 1.0, 2.0)
        await host.store.kv_put(
            NODES, host.store.node, msgspec.json.encode(report), expected=0, at=World().now()
        )
        source = StoreSource(path)
        with pytest.raises(KeyMissingError, match="--key-file"):
            await asyncio.to_thread(source.nodes)
        found = await asyncio.to_thread(StoreSource(path, tmp_path / "keys").nodes)
        assert [line.name for line in found] == ["agent"]
