"""Editors of other projects, unmodified, whose agent `midstream acp` is killed in the middle of turns."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("acp", reason="agent-client-protocol is not installed (requirements/upstreams.txt)")

from tests.dialects import chat_agent
from tests.dialects.acp_agents import ANSWER, LEDGER_VARIABLE
from tests.dialects.acp_editor import ROOT, WAIT_S, Editor
from tests.dialects.acp_kills import AGENT, FATES, play
from tests.dialects.ui_stream import HOME, run_node

pytestmark = pytest.mark.fault
Json = dict[str, Any]
COAT = "Let me look. Take a coat: it is 8 degrees in Oslo."
SDK = HOME / "node_modules" / "@agentclientprotocol" / "sdk"


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "acp-agent.md"
MORTAL = """
import subprocess, sys
from pathlib import Path

agent = subprocess.Popen([sys.executable, "-m", "midstream", *sys.argv[2:]], stdout=subprocess.PIPE)
for number, line in enumerate(agent.stdout):
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
    if number == int(sys.argv[1]) and not Path("killed").exists():
        Path("killed").touch()
        agent.kill()
        break
sys.exit(agent.wait())
"""
"""A program that starts the agent and kills it, once, after this many lines of its output."""


def text_of(updates: list[Json], kind: str = "agent_message_chunk") -> str:
    return "".join(each["content"]["text"] for each in updates if each["sessionUpdate"] == kind)


async def test_agents_killed_in_turns_show_each_word_and_have_each_effect_once(tmp_path: Path) -> None:
    fates = await play(tmp_path, kills=3, seed=3)
    assert sum(fates[fate] for fate in FATES) == 3


async def test_a_second_window_shows_the_rest_after_a_kill_of_the_turns_process(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = request.getfixturevalue("engine").url
    variables = {chat_agent.LEDGER_VARIABLE: str(tmp_path / "ledger"), chat_agent.WORDS_VARIABLE: "400"}
    agent = "tests.dialects.chat_agent:agent"
    first, second = (Editor(tmp_path, agent, "--store", store, variables=variables) for _ in range(2))
    async with first, second:
        session = await first.new()
        asking = asyncio.create_task(first.prompt(session, "hi"))
        await first.wait_until(lambda: "word0 " in first.text())
        await second.load(session)
        await second.wait_until(lambda: "word100 " in second.text())
        await first.kill()
        with pytest.raises(ConnectionError):
            await asking
        await second.wait_until(lambda: "word399 " in second.text())
        live = second.text()
        await second.load(session)
        assert live == second.text() == chat_agent.FIRST + "".join(f"word{number} " for number in range(400))
    assert (tmp_path / "ledger").read_text(encoding="utf-8").splitlines() == ["it"]


@pytest.mark.skipif(not SDK.exists(), reason="npm did not install the protocol's client here (make dialects)")
@pytest.mark.parametrize("kill", [5])
async def test_the_client_of_the_protocols_npm_package_continues_after_a_kill(
    tmp_path: Path, kill: int
) -> None:
    store = str(tmp_path / "acp.db")
    story: Json = {
        "command": [sys.executable, "-m", "midstream", "acp", AGENT, "--store", store],
        "env": {**os.environ, "PYTHONPATH": str(ROOT), LEDGER_VARIABLE: str(tmp_path / "ledger")},
        "cwd": str(tmp_path),
        "kill": kill,
        "choice": "allow_once",
    }
    program = Path(__file__).with_name("acp_client.mjs").read_text(encoding="utf-8")
    result: Json = json.loads(await run_node(program, json.dumps(story)))
    assert result["seen"] >= kill
    assert result["answer"]["stopReason"] == "end_turn"
    assert result["greeting"]["agentInfo"]["name"] == "noting"
    for shown in (result["later"], result["again"]):
        assert text_of(shown, "user_message_chunk") == "turn 0;"
        assert text_of(shown) == ANSWER
    assert [each["sessionId"] for each in result["sessions"]] == [result["sessionId"]]
    assert result["left"] == []
    ledger = tmp_path / "ledger"
    assert not ledger.exists() or ledger.read_text(encoding="utf-8").splitlines() == ["it"]


@pytest.mark.long
@pytest.mark.parametrize("lines", [0, 6])
async def test_the_program_of_the_guide_prints_the_answer_although_its_agent_is_killed(
    tmp_path: Path, lines: int
) -> None:
    (printed,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    program, call = printed.rsplit("print(", 1)
    started = f'COMMAND = (sys.executable, "mortal.py", "{lines}", *COMMAND[3:])'
    (tmp_path / "program.py").write_text(f"{program}\n{started}\nprint({call}", encoding="utf-8")
    (tmp_path / "mortal.py").write_text(MORTAL, encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "program.py"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'examples'}:{ROOT / 'src'}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 2 * WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert (process.returncode, out.decode()) == (0, f"{COAT}\n"), err.decode()[-3000:]
    assert err.decode().count("Starting it again") == 1
    assert (tmp_path / "killed").exists()
