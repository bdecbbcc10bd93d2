"""Cursor's agents, with the real package and a scripted bridge."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socketserver import TCPServer

import pytest

pytest.importorskip("cursor_sdk", reason="the package is not installed here: `make test` installs it")

from midstream.agents import cursor
from midstream.agents.cursor import RULES_FILE, RULES_SENTINEL, Cursor, _launch, write_rules
from midstream.agents.owned_processes import owner_of, owner_of_new_agents
from midstream.agents.upstreams import MessageTaken, Setup, UpstreamAgent, UpstreamEvent, UpstreamMessage
from midstream.environment import World
from midstream.errors import (
    ModelAccessError,
    ModelError,
    ModelMissingError,
    ModelRateLimitedError,
    ModelUnavailableError,
    UpstreamFailedError,
    UpstreamGoneError,
    UsageError,
)
from midstream.history.messages import UserMessage
from midstream.models.responses import TextDelta
from midstream.retries import RETRY_AFTER_MAX_S
from midstream.testing.upstream_contract import UpstreamContract
from midstream.tools.forwarded_servers import ForwardedMcpServer
from tests.agents.cursor_bridge import CursorBridge, cursor_bridge
from tests.agents.part_of_pool import PartOfPoolContract
from tests.spec import spec

WAIT_S = 60.0


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[CursorBridge]:
    async with cursor_bridge(tmp_path) as bridge:
        yield bridge


class TestCursorAgents(UpstreamContract):
    """Runs the suite that every upstream passes."""


@pytest.mark.slow
class TestCursorPooled(PartOfPoolContract):
    """Runs each fault, and each situation."""


async def _send(agent: UpstreamAgent, text: str) -> list[UpstreamEvent]:
    return [event async for event in agent.send(UpstreamMessage(UserMessage.of(text)), key="k")]


async def test_a_run_that_failed_without_output_may_be_a_dead_agent(tmp_path: Path) -> None:
    async with cursor_bridge(tmp_path) as bridge, contextlib.aclosing(bridge.upstream()) as upstream:
        agent = await upstream.open(Setup())
        for status, code, expected in (
            ("ERROR", "", UpstreamFailedError),
            ("EXPIRED", "", UpstreamGoneError),
            ("ERROR", "SDK_ERROR_CODE_AGENT_NOT_FOUND", UpstreamGoneError),
        ):
            bridge.end = {"status": f"RUN_LIFECYCLE_STATUS_{status}", "errorCode": code}
            answer = agent.send(UpstreamMessage(UserMessage.of("one")), key="k")
            with pytest.raises(ModelError) as raised:
                await anext(answer)  # no event came before
            assert type(raised.value) is expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [("RATE_LIMIT_EXCEEDED", ModelRateLimitedError), ("UNAUTHENTICATED", ModelAccessError)],
)
async def test_a_run_that_failed_for_a_known_reason_has_taken_the_message(
    tmp_path: Path, code: str, expected: type[ModelError]
) -> None:
    async with cursor_bridge(tmp_path) as bridge, contextlib.aclosing(bridge.upstream()) as upstream:
        agent = await upstream.open(Setup())
        bridge.end = {"status": "RUN_LIFECYCLE_STATUS_ERROR", "errorCode": f"SDK_ERROR_CODE_{code}"}
        answer = agent.send(UpstreamMessage(UserMessage.of("one")), key="k")
        assert isinstance(await anext(answer), MessageTaken)
        with pytest.raises(ModelError) as raised:
            await anext(answer)
    assert type(raised.value) is expected


async def test_only_a_message_that_was_never_sent_is_sent_again(tmp_path: Path) -> None:
    async with cursor_bridge(tmp_path) as bridge, contextlib.aclosing(bridge.upstream()) as upstream:
        agent = await upstream.open(Setup())
        bridge.die_unopened()
        with pytest.raises(UpstreamFailedError):
            await _send(agent, "one")
        bridge.is_full, bridge.retry_after = True, "Thu, 31 Dec 2099 23:59:59 GMT"
        with pytest.raises(ModelUnavailableError) as raised:
            await _send(agent, "two")
        assert type(raised.value) is ModelRateLimitedError
        assert (raised.value.retry_after_s or 0.0) > RETRY_AFTER_MAX_S
        assert [received.text for received in bridge.messages()] == ["one"]


async def test_a_message_without_a_reachable_bridge_was_never_sent(tmp_path: Path) -> None:
    async with cursor_bridge(tmp_path) as bridge:
        upstream = bridge.upstream()
        agent = await upstream.open(Setup())
    with pytest.raises(ModelUnavailableError) as raised:
        await _send(agent, "one")
    assert type(raised.value) is ModelUnavailableError
    await upstream.aclose()


async def test_a_bridge_that_sends_only_whole_steps_is_supported(tmp_path: Path) -> None:
    async with cursor_bridge(tmp_path) as bridge, contextlib.aclosing(bridge.upstream()) as upstream:
        bridge.is_live = False
        events = await _send(await upstream.open(Setup()), "one")
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["one"]


async def test_servers_are_passed_with_the_client_registration_for_their_login(tmp_path: Path) -> None:
    servers = (
        ForwardedMcpServer("files", command="files-server", args=("--root", "."), env={"A": "b"}),
        ForwardedMcpServer(
            "web", "http", url="http://127.0.0.1/mcp", headers={"x": "y"}, client_id="c", scope="read write"
        ),
    )
    async with cursor_bridge(tmp_path) as bridge, contextlib.aclosing(bridge.upstream()) as upstream:
        await upstream.open(Setup(servers=servers))
        options = next(message["options"] for method, message in bridge.requests if method == "CreateAgent")
    auth = {"clientId": "c", "scopes": ["read", "write"]}
    assert options["mcpServers"] == {
        "files": {"stdio": {"command": "files-server", "args": ["--root", "."], "env": {"A": "b"}}},
        "web": {
            "http": {
                "type": "HTTP_MCP_TRANSPORT_TYPE_HTTP",
                "url": "http://127.0.0.1/mcp",
                "headers": {"x": "y"},
                "auth": auth,
            }
        },
    }


async def test_instructions_are_written_to_our_own_file_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / RULES_FILE
    async with cursor_bridge(tmp_path) as bridge:
        command = bridge.command()
        async with contextlib.aclosing(
            Cursor("composer-2", cwd=tmp_path, api_key="k", bridge=command, is_instructing=True)
        ) as upstream:
            await upstream.open(Setup("be brief"))
            assert RULES_SENTINEL in path.read_text()
            assert path.read_text().endswith("be brief\n")
            await upstream.open(Setup("be thorough"))
            assert path.read_text().endswith("be thorough\n")
            path.write_text("my own rules")
            await upstream.open(Setup("be brief"))
            assert path.read_text() == "my own rules"


def test_several_processes_may_write_instructions_at_once(tmp_path: Path) -> None:
    path = tmp_path / RULES_FILE

    def write(writer: str) -> None:
        for time in range(100):
            write_rules(tmp_path, f"be {writer} {time}")

    writers = ["brief", "thorough", "kind"]
    with ThreadPoolExecutor(len(writers)) as pool:
        for written in [pool.submit(write, writer) for writer in writers]:
            written.result()
    assert path.read_text().split()[-2] in writers
    assert list(path.parent.iterdir()) == [path]


@spec("SEC-55", "SEC-56")
@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder elsewhere"])
def test_instructions_are_not_written_through_a_link_of_a_checkout(tmp_path: Path, kind: str) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    theirs = elsewhere / RULES_FILE.name
    theirs.write_text(RULES_SENTINEL)
    path = project / RULES_FILE
    if kind == "a folder elsewhere":
        path.parent.parent.mkdir(parents=True)
        path.parent.symlink_to(elsewhere)
    else:
        path.parent.mkdir(parents=True)
        if kind == "a link":
            path.symlink_to(theirs)
        else:
            os.mkfifo(path)
    for instructions in ("be brief", ""):
        write_rules(project, instructions)
    assert theirs.read_text() == RULES_SENTINEL
    assert [each.name for each in elsewhere.iterdir()] == [RULES_FILE.name]


async def test_a_bridge_that_does_not_start_is_missing_software(tmp_path: Path) -> None:
    upstream = Cursor("composer-2", cwd=tmp_path, api_key="k", bridge=["/nowhere/bridge"])
    with pytest.raises(ModelMissingError, match="does not start"):
        await upstream.open(Setup())


async def test_the_package_joins_its_threads_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_in: list[threading.Thread] = []
    close = TCPServer.server_close

    def record_thread(server: TCPServer) -> None:
        closed_in.append(threading.current_thread())  # it has joined the thread of that server before
        close(server)

    async with cursor_bridge(tmp_path) as bridge:
        monkeypatch.setattr(TCPServer, "server_close", record_thread)
        upstream = bridge.upstream()
        await upstream.open(Setup())
        await upstream.aclose()
    assert len(closed_in) == 1
    assert closed_in != [threading.current_thread()]


FROZEN = """
import json, socket, sys, threading
listener = socket.create_server(("127.0.0.1", 0))
ready = {"schemaVersion": 1, "transport": "tcp", "protocol": "connect", "authToken": "t"}
ready["url"] = "http://127.0.0.1:%d" % listener.getsockname()[1]
print("cursor-sdk-bridge ready", json.dumps(ready), file=sys.stderr, flush=True)
threading.Event().wait()
"""


async def test_a_frozen_bridge_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "STOP_S", 0.05)
    running = await _launch([sys.executable, "-c", FROZEN], tmp_path, World())
    process = running.bridge.process
    assert process is not None
    if sys.platform == "linux":
        assert owner_of(process.pid) == owner_of_new_agents(), "the guardian finds it"
    async with asyncio.timeout(WAIT_S):
        await running.aclose()
    assert process.returncode == -signal.SIGKILL


TALKATIVE = """
import sys
print("cursor-sdk-bridge ready", sys.argv[1], file=sys.stderr, flush=True)
for _ in range(64):
    print("x" * 8192, file=sys.stderr, flush=True)
"""


async def test_the_output_of_a_bridge_does_not_block_it(tmp_path: Path) -> None:
    async with cursor_bridge(tmp_path) as bridge:
        running = await _launch([sys.executable, "-c", TALKATIVE, bridge.command()[3]], tmp_path, World())
        process = running.bridge.process
        assert process is not None
        try:
            assert await asyncio.to_thread(process.wait, WAIT_S) == 0, "it has come to its end"
        finally:
            await running.aclose()


def test_another_folder_account_or_option_is_another_identity(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    identities = [
        Cursor("m", cwd=tmp_path, api_key="k").identity,
        Cursor("m", cwd=other, api_key="k").identity,
        Cursor("m", cwd=tmp_path, api_key="l").identity,
        Cursor("m", cwd=tmp_path, api_key="k", options={"mode": "plan"}).identity,
    ]
    assert len({tuple(sorted(identity.items())) for identity in identities}) == len(identities)
    assert Cursor("m", cwd=tmp_path, api_key="k").identity == identities[0]


def test_a_missing_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        Cursor("m", cwd=tmp_path / "nowhere")
