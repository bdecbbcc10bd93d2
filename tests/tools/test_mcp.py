"""Tools of real MCP servers: their results, and turns during their failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import mcp_types as wire
import pytest
from mcp.client import stdio as mcp_stdio

from midstream.engine import toolset
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import World
from midstream.errors import ToolsUnavailableError, UsageError
from midstream.history.messages import Outcome, ToolCall, ToolResult, UserMessage
from midstream.retries import Backoff
from midstream.session.calls import OnDoubt
from midstream.session.records import CallEnded, Record, ToolsChanged, TurnEnded, TurnStatus
from midstream.session.turn.commands import Cancel, SendMessage
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel, calls, run_turn, turns
from midstream.testing.turns import records_until_end
from midstream.tools import mcp
from midstream.tools.function_tools import CallContext, Tool, run_call
from midstream.tools.mcp import McpServer, text_of
from tests.ports import held_port
from tests.spec import spec

PROGRAM = Path(__file__).with_name("misbehaving_server.py")
WAIT_S = 45.0
"""Seconds for each bounded wait: a busy machine is slow to start a server."""
SILENT = "import sys; sys.stdin.read()"
"""A program that never answers, and ends when its stdin is closed."""

OLD = """
import json, os, sys
def note(line):
    open(sys.argv[1], "a").write(line + "\\n")

def answer(number, **result):
    print(json.dumps({"jsonrpc": "2.0", "id": number, **result}), flush=True)

print("welcome to the old server!", flush=True)  # as many do, to the despair of their clients
note(f"started {os.getpid()}")
for line in sys.stdin:
    asked = json.loads(line)
    note(asked["method"])
    if asked["method"] == "initialize":
        info = {"name": "old", "version": "1"}
        version = asked["params"]["protocolVersion"]
        answer(asked["id"], result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
    elif asked["method"] == "tools/list":
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("quick", "slow")]
        if "cursor" in (asked.get("params") or {}):
            answer(asked["id"], result={"tools": tools[1:]})
        else:
            answer(asked["id"], result={"tools": tools[:1], "nextCursor": "2"})
    elif asked["method"] == "tools/call" and asked["params"]["name"] == "quick":
        answer(asked["id"], result={"content": [{"type": "text", "text": "done"}]})
    elif asked["method"] == "server/discover":
        answer(asked["id"], error={"code": -32601, "message": "Method not found"})
"""
"""A hand-written server of the protocol before 2026: paged lists, noise on stdout, and `slow` never answers.
"""


class ServerLedger:
    """Lines that the server wrote about its events."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[str]:
        return self.path.read_text("utf-8").splitlines() if self.path.exists() else []

    @property
    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if line.startswith("started ")]

    async def wait_for_line(self, line: str) -> None:
        """Wait for a line."""
        await _until(lambda: line in self.lines)


async def _until(happened: Callable[[], bool]) -> None:
    """Poll a condition that another process fulfils."""
    async with asyncio.timeout(WAIT_S):
        while not happened():
            await World().sleep(0.01)


class HttpProgram:
    """The same server behind streamable HTTP, as a process."""

    def __init__(self, ledger: ServerLedger, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.ledger = ledger
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it on a listening socket, so that early connections wait in the backlog."""
        with socket.create_server(("127.0.0.1", self.port)) as listening:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(listening.fileno())],
                env={**os.environ, "LEDGER": str(self.ledger.path)},
                pass_fds=[listening.fileno()],
                stderr=subprocess.DEVNULL,
            )

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=WAIT_S)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "START_WAIT_S", WAIT_S)
    monkeypatch.setattr(mcp, "LIST_S", WAIT_S)
    monkeypatch.setattr(toolset, "READ_S", WAIT_S)
    monkeypatch.setattr(turns, "TURN_S", WAIT_S)


@pytest.fixture
def _soon_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the SDK's waits at the end of a program: two seconds for its own exit, two after a request."""
    monkeypatch.setattr(mcp_stdio, "PROCESS_TERMINATION_TIMEOUT", 0.2)
    monkeypatch.setattr(mcp_stdio, "FORCE_KILL_TIMEOUT", 0.2)


@pytest.fixture
def ledger(tmp_path: Path) -> ServerLedger:
    return ServerLedger(tmp_path / "ledger")


@pytest.fixture
async def stdio(ledger: ServerLedger) -> AsyncIterator[McpServer]:
    environment = {"LEDGER": str(ledger.path), "TOKEN": "s3cret-value"}
    server = McpServer.stdio(sys.executable, [str(PROGRAM)], name="files", env=environment)
    yield server
    await _bounded(server.close())


@pytest.fixture
async def old(ledger: ServerLedger) -> AsyncIterator[McpServer]:
    server = McpServer.stdio(sys.executable, ["-c", OLD, str(ledger.path)], name="files", timeout_s=2.0)
    yield server
    await _bounded(server.close())


@pytest.fixture
def program(ledger: ServerLedger) -> Iterator[HttpProgram]:
    with held_port() as port:
        program = HttpProgram(ledger, port)
        yield program
        program.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpProgram]:
    with held_port() as port:
        program = HttpProgram(ServerLedger(tmp_path_factory.mktemp("shared") / "ledger"), port)
        program.start()
        yield program
        program.end()


@pytest.fixture
async def http(shared: HttpProgram) -> AsyncIterator[McpServer]:
    server = McpServer.http(shared.url, name="files", headers={"authorization": "Bearer hunter2"})
    yield server
    await _bounded(server.close())


async def _bounded(work: Awaitable[None]) -> None:
    async with asyncio.timeout(WAIT_S):
        await work


async def _tools(server: McpServer) -> dict[str, Tool]:
    async with asyncio.timeout(WAIT_S):
        return {each.name: each for each in await server.tools()}


async def _call(server: McpServer, name: str, arguments: str = "{}", *, run: int = 1) -> ToolResult:
    found = (await _tools(server))[f"files__{name}"]
    async with asyncio.timeout(WAIT_S):
        return await run_call(found, ToolCall("c1", found.name, arguments), CallContext("s", 1, 1, "c1", run))


def _results(records: tuple[Record, ...]) -> list[ToolResult]:
    return [record.result for record in records if isinstance(record, CallEnded)]


def _changes(records: tuple[Record, ...]) -> list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    changed = [record for record in records if isinstance(record, ToolsChanged)]
    return [(record.added, record.removed, record.unreachable) for record in changed]


@contextlib.asynccontextmanager
async def _host(model: ScriptedModel, *servers: McpServer) -> AsyncIterator[Host]:
    host = Host(Agent(model, tools=servers), MemoryStore())
    await host.start()
    try:
        yield host
    finally:
        await _bounded(host.stop(grace_s=0.1))


# --- tools and calls ------------------------------------------------------------------------------------------


@spec("TURN-44", "SEC-76")
async def test_hints_become_policies_and_tools_with_invalid_names_are_left_out(http: McpServer) -> None:
    tools = await _tools(http)
    policies = {name: (each.has_effects, each.on_doubt) for name, each in tools.items()}
    assert policies["files__add"] == (False, OnDoubt.RERUN)
    assert policies["files__put"] == (True, OnDoubt.RERUN)
    assert policies["files__send"] == (True, OnDoubt.UNKNOWN)
    assert "files__broken" not in tools
    assert "files__deep" not in tools
    assert [name for name in tools if name.startswith("files__odd_name__")]
    assert tools["files__add"].spec.description == "Add two numbers."
    assert tools["files__add"].spec.parameters["required"] == ["a", "b"]


@spec("TURN-44")
async def test_with_hints_ignored_each_tool_of_a_server_counts_as_having_effects(
    shared: HttpProgram,
) -> None:
    server = McpServer.http(shared.url, name="files", hints="ignored", prefix="")
    tools = await _tools(server)
    assert {(each.has_effects, each.on_doubt) for each in tools.values()} == {(True, OnDoubt.UNKNOWN)}
    assert "add" in tools
    await _bounded(server.close())


async def test_a_call_returns_the_result_of_the_server_and_no_secret_is_logged_or_printed(
    stdio: McpServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    answered = [
        await _call(stdio, "add", '{"a": 1, "b": 2}'),
        await _call(stdio, "put", '{"text": "grüße"}'),
        await _call(stdio, "picture"),
    ]
    expected = ["3", "put grüße ☃", "look:\n[image image/png, 1200 bytes, not shown]"]
    assert answered == [ToolResult("c1", content) for content in expected]
    await _bounded(stdio.close())
    line = ("midstream.tools.mcp", logging.INFO, "files: token of a fool: hunter2")
    await _until(lambda: line in caplog.record_tuples)  # its stderr
    assert "s3cret-value" not in f"{caplog.text}{stdio!r}{Agent(ScriptedModel([]), tools=[stdio])!r}"
    assert capfd.readouterr() == ("", "")


async def test_an_error_or_a_refusal_of_the_server_is_an_error_result(http: McpServer) -> None:
    failed = await _call(http, "fail")
    assert (failed.outcome, failed.content) == (
        Outcome.ERROR,
        "Error executing tool fail: it does not work ☃",
    )
    for arguments in ('{"a": "x", "b": 1}', "{}"):
        refused = await _call(http, "add", arguments)
        assert (refused.outcome, "validation error" in refused.content) == (Outcome.ERROR, True)


async def test_an_oversized_result_is_cut_with_a_mark(http: McpServer) -> None:
    result = await _call(http, "big")
    assert (result.outcome, result.content[-20:]) == (Outcome.OK, "[+805696 characters]")


@spec("TURN-45", "TURN-38")
async def test_a_server_receives_the_effect_key_and_its_progress_is_reported(
    shared: HttpProgram, http: McpServer
) -> None:
    received: list[str] = []
    send = (await _tools(http))["files__send"]
    for run in (1, 2):
        context = CallContext("s", 1, 1, "c1", run, received.append)
        async with asyncio.timeout(WAIT_S):
            assert await run_call(send, ToolCall("c1", "x", '{"text": "a"}'), context) == ToolResult(
                "c1", "sent"
            )
    assert [line for line in shared.ledger.lines if line.startswith("send")] == ["send a s/1/1/c1"] * 2
    assert received == ["1 of 2: half"] * 2


def test_images_audio_and_files_are_replaced_by_a_note_in_the_result() -> None:
    result = wire.CallToolResult(
        content=[
            wire.TextContent(text="so"),
            wire.AudioContent(data="AAAA", mime_type="audio/wav"),
            wire.ResourceLink(name="a", uri="file:///a", mime_type="text/plain"),
            wire.EmbeddedResource(resource=wire.TextResourceContents(uri="file:///b", text="inside")),
            wire.EmbeddedResource(resource=wire.BlobResourceContents(uri="file:///c", blob="AAAAAA==")),
        ]
    )
    assert text_of(result).splitlines() == [
        "so",
        "[audio audio/wav, 3 bytes, not shown]",
        "[resource a at file:///a, text/plain]",
        "[resource file:///b]",
        "inside",
        "[resource file:///c, 4 bytes, not shown]",
    ]
    assert text_of(wire.CallToolResult(content=[], structured_content={"n": 1})) == '{"n":1}'
    deep: dict[str, object] = {}
    for _ in range(100):
        deep = {"a": deep}
    shown = text_of(wire.CallToolResult(content=[], structured_content=deep))
    assert shown == "[structured content, nested more than 64 levels deep, not shown]"


# --- a server that fails --------------------------------------------------------------------------------------


@spec("TURN-43")
async def test_a_server_that_dies_during_a_call_gives_an_error_and_is_restarted(
    stdio: McpServer, ledger: ServerLedger
) -> None:
    died = await _call(stdio, "die_reading")
    assert (died.outcome, "went away" in died.content) == (Outcome.ERROR, True)
    assert await _call(stdio, "add", '{"a": 1, "b": 2}') == ToolResult("c1", "3")
    assert len(ledger.pids) == 2


@pytest.mark.long
@spec("TURN-43")
async def test_an_http_server_that_dies_during_a_call_is_left_out_until_it_is_back(
    program: HttpProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "MCP_BACKOFF", Backoff(first_s=0.0, most_s=0.0))
    program.start()
    server = McpServer.http(program.url, name="files")
    tools = await _tools(server)
    assert (await _call(server, "die")).outcome is Outcome.UNKNOWN
    program.end()
    with pytest.raises(ToolsUnavailableError, match="'files'"):
        await _tools(server)
    not_run = await run_call(tools["files__send"], ToolCall("c1", "x", "{}"), CallContext("s", 1, 1, "c1"))
    assert (not_run.outcome, not_run.content[:8]) == (Outcome.ERROR, "Not run:")
    again = await run_call(tools["files__send"], ToolCall("c1", "x", "{}"), CallContext("s", 1, 1, "c1", 2))
    assert (again.outcome, again.content[:14]) == (Outcome.UNKNOWN, "Not run again:")
    program.start()
    assert await _call(server, "add", '{"a": 1, "b": 2}') == ToolResult("c1", "3")
    await _bounded(server.close())


@spec("TURN-43", "TURN-45")
async def test_a_hanging_call_is_abandoned_and_cancelled_also_at_a_server_of_the_older_protocol(
    old: McpServer, ledger: ServerLedger
) -> None:
    assert sorted(await _tools(old)) == ["files__quick", "files__slow"]
    assert await _call(old, "quick") == ToolResult("c1", "done")
    hung = await _call(old, "slow")
    assert (hung.outcome, "no answer within 2 s" in hung.content) == (Outcome.UNKNOWN, True)
    await ledger.wait_for_line("notifications/cancelled")
    assert await _call(old, "quick") == ToolResult("c1", "done")
    assert len(ledger.pids) == 1  # The server was not restarted for it.


async def test_a_command_that_cannot_be_started_is_retried_only_after_the_backoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp, "MCP_BACKOFF", Backoff(first_s=1000.0, most_s=1000.0))
    server = McpServer.stdio("no-such-program-here", name="files", env={"TOKEN": "hunter2"})
    with pytest.raises(ToolsUnavailableError, match="cannot be started or reached: No such file"):
        await _tools(server)
    with pytest.raises(ToolsUnavailableError, match="is tried again in 1000 s"):
        await _tools(server)
    await _bounded(server.close())


async def test_a_program_that_never_initializes_is_waited_for_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp, "START_WAIT_S", 0.1)
    server = McpServer.stdio(sys.executable, ["-c", SILENT], name="files")
    for _ in range(2):
        with pytest.raises(ToolsUnavailableError, match="is still starting"):
            await _tools(server)
    await _bounded(server.close())


async def test_a_program_that_never_initializes_is_abandoned_also_without_a_waiting_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp, "CONNECT_S", 0.1)
    monkeypatch.setattr(mcp, "MCP_BACKOFF", Backoff(first_s=0.0, most_s=0.0))
    server = McpServer.stdio(sys.executable, ["-c", SILENT], name="files")
    with pytest.raises(ToolsUnavailableError, match=r"did not start within 0\.1 s"):
        await _tools(server)
    monkeypatch.setattr(mcp, "START_WAIT_S", 0.0)
    with pytest.raises(ToolsUnavailableError, match="is still starting"):
        await _tools(server)
    link = server._link
    assert link is not None
    await _until(lambda: link.is_done)
    monkeypatch.setattr(mcp, "MCP_BACKOFF", Backoff(first_s=1000.0, most_s=1000.0))
    with pytest.raises(ToolsUnavailableError, match=r"did not start within 0\.1 s"):
        await _tools(server)
    with pytest.raises(ToolsUnavailableError, match="is tried again in"):
        await _tools(server)
    await _bounded(server.close())


async def test_a_server_whose_list_of_tools_violates_the_protocol_is_named_as_such(tmp_path: Path) -> None:
    program = OLD.replace('{"type": "object"}', '{"properties": {}}')
    server = McpServer.stdio(sys.executable, ["-c", program, str(tmp_path / "ledger")], name="files")
    with pytest.raises(ToolsUnavailableError, match="sent an answer that violates the protocol"):
        await _tools(server)
    await _bounded(server.close())


@pytest.mark.usefixtures("_soon_killed")
async def test_a_server_that_is_busy_with_a_call_keeps_its_known_tools(
    old: McpServer, ledger: ServerLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    had = await _tools(old)
    hanging = asyncio.ensure_future(_call(old, "slow"))
    await ledger.wait_for_line("tools/call")
    monkeypatch.setattr(mcp, "LIST_S", 0.2)
    os.kill(ledger.pids[0], signal.SIGSTOP)
    assert await _tools(old) == had
    hanging.cancel()
    await asyncio.wait([hanging])
    with pytest.raises(ToolsUnavailableError, match="did not list its tools within"):
        await _tools(old)


# --- a turn ---------------------------------------------------------------------------------------------------


@spec("TURN-40", "TURN-42", "TURN-43")
async def test_a_tool_removed_during_a_turn_gives_an_error_result_and_the_change_is_recorded(
    stdio: McpServer,
) -> None:
    model = ScriptedModel(
        [
            calls(("files__replace", "{}"), ("files__add", '{"a": 1, "b": 2}')),
            calls(("files__add", '{"a": 1, "b": 2}'), ("files__subtract", '{"a": 1, "b": 2}')),
        ]
    )
    async with _host(model, stdio) as host:
        records = await run_turn(host, "s", "go")
        assert [(each.outcome, each.content[:28]) for each in _results(records)] == [
            (Outcome.OK, "replaced"),
            (Outcome.ERROR, "Unknown tool: add"),
            (Outcome.ERROR, "There is no tool named 'file"),
            (Outcome.OK, "-1"),
        ]
        (everything, _, _), *more = _changes(records)
        assert "files__add" in everything
        assert more == [(("files__subtract",), ("files__add",), ())]
        assert _changes(await run_turn(host, "s", "again")) == []
    offered = [{each.name for each in request.tools} for request in model.requests]
    assert ["files__subtract" in each for each in offered] == [False, True, True, True, True, True]


@spec("TURN-40", "TURN-42", "TURN-43")
async def test_a_dead_or_absent_server_never_blocks_a_turn(stdio: McpServer, program: HttpProgram) -> None:
    away = McpServer.http(program.url, name="away")
    model = ScriptedModel([calls(("files__die", "{}"))])
    async with _host(model, stdio, away) as host:
        records = await run_turn(host, "s", "go")
        assert [each.outcome for each in _results(records)] == [Outcome.UNKNOWN]
        assert isinstance(records[-1], TurnEnded)
        assert records[-1].status is TurnStatus.COMPLETED
        assert [unreachable for _, _, unreachable in _changes(records)] == [("away",)]


@spec("TURN-45")
async def test_a_cancelled_turn_cancels_the_call_at_the_server(
    stdio: McpServer, ledger: ServerLedger
) -> None:
    async with _host(ScriptedModel([calls(("files__hang", "{}"))]), stdio) as host:
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("go")))
        await ledger.wait_for_line("hang")
        before = runner.newest.position
        await runner.submit(Cancel())
        records = await records_until_end(runner, after=before)
        assert [each.outcome for each in _results(records)] == [Outcome.UNKNOWN]
        await ledger.wait_for_line("hang was cancelled")


# --- after the end
# -----------------------------------------------------------------------------------------------


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_stopped_host_leaves_no_process_and_a_closed_server_can_start_again(
    old: McpServer, ledger: ServerLedger
) -> None:
    async with _host(ScriptedModel([]), old) as host:
        await run_turn(host, "s", "go")
        (pid,) = ledger.pids
        assert _is_alive(pid)
    assert not _is_alive(pid)
    await _bounded(old.close())
    assert "files__quick" in await _tools(old)
    assert len(ledger.pids) == 2


@pytest.mark.usefixtures("_soon_killed")
async def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """The server starts a child that ignores SIGTERM and keeps its pipes; both are gone after `close`."""
    stubborn = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "print('up', file=sys.stderr, flush=True)\n"
        "while True: signal.pause()\n"
    )
    server = McpServer.stdio(sys.executable, ["-c", stubborn], name="files")
    asking = asyncio.ensure_future(server.tools())
    await _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    await _bounded(server.close())
    with pytest.raises(ToolsUnavailableError):
        await asking
    assert not _is_alive(int((tmp_path / "pid").read_text()))


def test_an_address_is_shown_without_its_possibly_secret_parts() -> None:
    away = McpServer.http("http://u:s3cret-value@127.0.0.1:9/mcp?key=s3cret-value", name="mail")
    assert repr(away) == "McpServer('mail', 'http://127.0.0.1')"


@pytest.mark.parametrize(
    "make",
    [
        lambda: McpServer.stdio("x", name="no name"),
        lambda: McpServer.stdio("x", name=""),
        lambda: McpServer.http("ftp://example.com", name="a"),
        lambda: McpServer.http("example.com/mcp", name="a"),
    ],
)
def test_an_invalid_name_or_address_is_refused(make: Callable[[], McpServer]) -> None:
    with pytest.raises(UsageError):
        make()
