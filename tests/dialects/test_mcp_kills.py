"""MCP's client, unmodified, with a server that is killed, and the conformance suite."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import httpx2
import pytest

from tests.dialects import chat_agent, mcp_suite
from tests.dialects.mcp_kills import HEADERS, RawMcpClient, play
from tests.dialects.mcp_suite import lacking
from tests.dialects.ui_stream import run_servers

pytestmark = pytest.mark.fault
RUNS = [*mcp_suite.RUNS[:2], ("extension", ("--scenario", "tasks-lifecycle"))]
"""Both versions, and the longest scenario of tasks; `make dialects` runs the others, too."""
CHECKS = 168
"""Checks of these runs that pass."""


async def test_each_call_runs_once_and_its_answer_is_whole_although_the_server_is_killed(
    tmp_path: Path,
) -> None:
    result = await play(tmp_path, 4, 5, words=300)
    assert result["kills"] == 4
    assert result["effects"] <= result["calls"]


async def test_a_call_continues_at_another_server_that_takes_over_its_turn(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = ("--store", request.getfixturevalue("engine").url)
    words = 400
    async with (
        run_servers(tmp_path, words, *options, count=2) as [first, second],
        contextlib.aclosing(RawMcpClient(first.url)) as raw,
    ):
        await raw.initialize()
        params = {"name": "ask", "arguments": {"message": "hi"}, "_meta": {"progressToken": 1}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        headers = {**HEADERS, **raw.session}
        text = ""
        with contextlib.suppress(httpx2.HTTPError):
            async with raw.http.stream("POST", "/v1/mcp", json=body, headers=headers) as stream:
                async for line in stream.aiter_lines():
                    text += line + "\n"
                    if "word9 " in line:
                        await first.kill()
        whole = text.rpartition("\n\n")[0]  # a truncated event does not count
        last = re.findall(r"^id: (.*)$", whole, re.MULTILINE)[-1]
        async with httpx2.AsyncClient(base_url=second.url, timeout=60) as http:
            rest = await http.get("/v1/mcp", headers={**headers, "last-event-id": last})
        lines = f"{whole}\n\n{rest.text}".splitlines()
        messages = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        shown = "".join(each["params"].get("message", "") for each in messages if "params" in each)
        answer = "".join(f"word{number} " for number in range(words))
        assert shown == chat_agent.FIRST + answer
        assert messages[-1]["result"]["structuredContent"]["answer"] == answer


@pytest.mark.skipif(bool(lacking()), reason=lacking())
async def test_the_conformance_suite_passes_except_for_unserved_scenarios(tmp_path: Path) -> None:
    found = await mcp_suite.judge(tmp_path, runs=RUNS)
    assert mcp_suite.faults(found) == []
    assert {each.name for each in found if each.failed} == mcp_suite.NOT_SERVED.keys()
    assert sum(each.passed for each in found) == CHECKS
