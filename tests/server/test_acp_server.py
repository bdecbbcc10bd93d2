"""An editor's operations on sessions: begin, load, resume, list, close and delete them, and bring MCP servers."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("acp", reason="agent-client-protocol is not installed (requirements/upstreams.txt)")

from acp import RequestError
from acp.schema import EnvVariable, McpServerStdio, SseMcpServer

from tests.dialects.acp_editor import ROOT, Editor
from tests.dialects.acp_kills import make_editor

pytestmark = pytest.mark.slow
Json = dict[str, Any]
TALKING = "tests.dialects.acp_agents:talking"


@pytest_asyncio.fixture
async def editor(tmp_path: Path) -> AsyncIterator[Editor]:
    async with make_editor(tmp_path, agent=TALKING) as started:
        yield started


async def test_the_initialize_response_names_the_capabilities(editor: Editor) -> None:
    greeting = editor.greeting.model_dump(mode="json", by_alias=True, exclude_none=True)
    can = greeting["agentCapabilities"]
    assert can["loadSession"]
    assert can["promptCapabilities"] == {"image": True, "audio": True, "embeddedContext": True}
    assert sorted(can["sessionCapabilities"]) == ["close", "delete", "list", "resume"]
    assert not can["mcpCapabilities"]["sse"]
    with pytest.raises(RequestError, match="not found"):
        await editor.connection.fork_session(cwd="/", session_id="x")


async def test_a_session_without_a_message_can_be_loaded_after_a_kill(editor: Editor) -> None:
    session = await editor.new()
    await editor.kill()
    await editor.start()
    await editor.load(session)
    assert editor.shown == []
    assert (await editor.prompt(session, "hello")).stop_reason == "end_turn"


async def test_a_missing_session_is_refused(editor: Editor) -> None:
    with pytest.raises(RequestError, match="no session") as refused:
        await editor.load("acp-nothing")
    assert refused.value.code == -32002
    with pytest.raises(RequestError, match="load it first"):
        await editor.prompt("acp-nothing", "hello")


async def test_a_resumed_session_replays_nothing_and_continues(editor: Editor) -> None:
    session = await editor.new()
    await editor.prompt(session, "hello")
    await editor.kill()
    await editor.start()
    editor.shown = []
    await editor.connection.resume_session(cwd="/", session_id=session)
    await editor.prompt(session, "again")
    assert editor.text() == "You sent Text: again"
    await editor.load(session)
    assert editor.text() == "You sent Text: helloYou sent Text: again"


async def test_sessions_are_listed_by_folder_in_pages(editor: Editor) -> None:
    sessions = [await editor.new() for _ in range(53)]
    for session in sessions[:52]:
        await editor.prompt(session, f"hello {session}")
    first = await editor.connection.list_sessions()
    second = await editor.connection.list_sessions(cursor=first.next_cursor)
    listed = [each.session_id for each in (*first.sessions, *second.sessions)]
    assert listed == [*reversed(sessions[:52])]
    assert first.sessions[0].title == f"hello {sessions[51]}"
    assert second.next_cursor is None
    assert (await editor.connection.list_sessions(cwd="/elsewhere")).sessions == []
    with pytest.raises(RequestError, match="nextCursor"):
        await editor.connection.list_sessions(cursor="nonsense")


async def test_a_session_can_be_closed_and_deleted(editor: Editor) -> None:
    session = await editor.new()
    await editor.prompt(session, "hello")
    await editor.connection.close_session(session)
    with pytest.raises(RequestError, match="load it first"):
        await editor.prompt(session, "hello")
    await editor.load(session)
    assert editor.text() == "You sent Text: hello"
    for _ in range(2):  # A second deletion is no error.
        await editor.connection._conn.send_request("session/delete", {"sessionId": session})
    with pytest.raises(RequestError, match="no session"):
        await editor.load(session)


async def test_tools_of_the_editors_mcp_servers_belong_to_its_session(editor: Editor, tmp_path: Path) -> None:
    values = {"PYTHONPATH": str(ROOT), "LEDGER": str(tmp_path / "mcp.txt")}
    server = McpServerStdio(
        name="My tools!",
        command=sys.executable,
        args=["-m", "tests.tools.misbehaving_server"],
        env=[EnvVariable(name=name, value=value) for name, value in values.items()],
    )
    begun = (await editor.connection.new_session(cwd="/", mcp_servers=[server])).session_id
    await editor.prompt(begun, "add")
    assert editor.text() == "It came to: 5"
    await editor.prompt(await editor.new(), "tools")  # Of another session.
    assert editor.text().endswith("I have ask burn helper look")
    await editor.kill()
    await editor.start()
    await editor.connection.load_session(cwd="/", session_id=begun, mcp_servers=[server])
    await editor.prompt(begun, "add")
    assert editor.text().endswith("It came to: 5")
    sse = SseMcpServer(type="sse", name="far", url="http://127.0.0.1:1", headers=[])
    with pytest.raises(RequestError, match="not supported"):
        await editor.connection.new_session(cwd="/", mcp_servers=[sse])


async def test_an_empty_prompt_has_invalid_parameters(editor: Editor) -> None:
    session = await editor.new()
    with pytest.raises(RequestError, match="at least one content block") as refused:
        await editor.prompt(session, [])
    assert refused.value.code == -32602
    assert (await editor.prompt(session, "hello")).stop_reason == "end_turn"
