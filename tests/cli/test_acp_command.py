"""`midstream acp` as an editor starts it: its options, its errors, its end, and a pool in front of it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("acp", reason="agent-client-protocol is not installed (requirements/upstreams.txt)")

from acp import RequestError

from midstream.agents.acp import AcpAgent
from midstream.agents.pool import Pooled
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.store.memory import MemoryStore
from midstream.store.store_registry import open_store
from tests.agents.ended_processes import end_agents
from tests.dialects.acp_agents import ANSWER, LEDGER_VARIABLE
from tests.dialects.acp_editor import ROOT
from tests.dialects.acp_kills import AGENT, make_editor
from tests.forked import Forked

WAIT_S = 60.0


def run(folder: Path, *arguments: str, sent: str = "") -> subprocess.CompletedProcess[str]:
    process = Forked(
        *("midstream", "--home", folder / "home", "acp", *arguments),
        stdin=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", LEDGER_VARIABLE: str(folder / "ledger")},
    )
    out, output = process.communicate(sent, WAIT_S)
    return subprocess.CompletedProcess(process.args, process.wait(), out, output)


def test_a_missing_agent_is_named_on_stderr_only(tmp_path: Path) -> None:
    done = run(tmp_path, "nothing:agent")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no module 'nothing'" in done.stderr


def test_invalid_lines_are_ignored_and_the_end_of_stdin_ends_it(tmp_path: Path) -> None:
    sent = [
        "nonsense",
        json.dumps({"jsonrpc": "2.0", "method": "$/unknown", "params": {}}),
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 99}}),
        json.dumps({"jsonrpc": "2.0", "id": 2, "method": "session/new", "params": {"mcpServers": []}}),
        json.dumps({"jsonrpc": "2.0", "id": 3, "method": "session/unknown", "params": {}}),
    ]
    done = run(tmp_path, AGENT, sent="\n".join(sent) + "\n")
    assert done.returncode == 0, done.stderr
    answers = {each["id"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert answers[1]["result"]["protocolVersion"] == 1
    assert answers[2]["error"]["code"] == -32602
    assert answers[3]["error"]["code"] == -32601


async def test_a_turn_interrupted_by_the_editors_end_continues_in_the_next_process(tmp_path: Path) -> None:
    async with make_editor(tmp_path) as editor:
        session = await editor.new()
        asking = asyncio.create_task(editor.prompt(session, "turn 0;"))
        await editor.wait_until(lambda: "word0 " in editor.text())
        await editor.close()
        with pytest.raises((RequestError, ConnectionError)):
            await asking
        await editor.start()
        await editor.load(session)
        await editor.wait_until(lambda: editor.text() == ANSWER)


async def test_a_signal_shuts_it_down_in_order(tmp_path: Path) -> None:
    async with make_editor(tmp_path) as editor:
        await editor.new()
        assert editor.process is not None
        editor.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(editor.process.wait(), WAIT_S) == 0


async def test_a_pool_uses_it_as_an_upstream_agent_and_resumes_it_after_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "midstream", "acp", AGENT, "--store", str(tmp_path / "inner.db")]
    variables = {"PYTHONPATH": str(ROOT), LEDGER_VARIABLE: str(tmp_path / "ledger")}
    coder = AcpAgent(command, cwd=tmp_path, env=variables)
    async with Host(Agent(Pooled(coder)), MemoryStore()) as host:
        assert await host.ask("outer", "turn 0;") == ANSWER
        end_agents()
        assert await host.ask("outer", "turn 1;") == ANSWER
    assert (tmp_path / "ledger").read_text(encoding="utf-8").splitlines() == ["it", "it"]
    store = open_store(tmp_path / "inner.db")
    await store.open()
    try:
        assert [info.mark.turns async for info in store.list()] == [2]  # one conversation, continued
    finally:
        await store.close()
