"""noeta-sdk with its SQLite storage."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from noeta.protocols.messages import LLMResponse, TextBlock, ToolUseBlock
from noeta.sdk import Client, HostConfig, Options, ToolResult
from noeta.sdk.testing import FakeLLMProvider
from noeta.tools.decorator import tool

from bench.durable.play import ANSWER, STEP_ARGUMENT, Contestant, Play, Turn

WAIT_S = 45
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@asynccontextmanager
async def noeta(play: Play) -> AsyncIterator[Turn]:
    """Run turns with noeta-sdk. The lease of a dead process lasts 600 s; the bench expires it."""

    def respond(request: Any) -> Any:
        requested = sum(
            isinstance(block, ToolUseBlock) for each in request.messages for block in each.content
        )
        names = play.calls(requested)
        if not names:
            return LLMResponse("end_turn", [TextBlock(ANSWER)])
        blocks = [ToolUseBlock(name, "act", {"name": name, "text": STEP_ARGUMENT}) for name in names]
        return LLMResponse("tool_use", blocks)

    @tool(name="act", version="1", risk_level="low", description="Act.", input_schema=SCHEMA)  # type: ignore[untyped-decorator, unused-ignore]
    def act(arguments: Any, _context: Any) -> Any:
        result = asyncio.run(play.work(arguments["name"]))  # tools run in other threads
        return ToolResult(success=True, output=result, summary="ok")

    storage = play.folder / "noeta.db"
    client = Client(
        Options(system_prompt="x", allowed_tools=(act,)),
        provider=FakeLLMProvider(responder=respond),
        workspace_dir=play.folder,
        model="claude-sonnet-5",
        host_config=HostConfig(storage_path=str(storage)),
    )

    async def turn(_session: str) -> str:
        if play.is_resumed:
            return await _resume(client, storage)
        task = await asyncio.to_thread(client.start, goal="go")
        return ANSWER if ANSWER in str([str(each) for each in client.messages(task.task_id)]) else "none"

    yield turn


async def _resume(client: Any, storage: Any) -> str:
    with sqlite3.connect(storage) as db:
        db.execute("update dispatcher_tasks set lease_expires_at = 0 where status = 'leased'")
    task = client.task_streams()[0].task_id
    client.start_workers(1, lease_seconds=5, stale_sweep_interval=0.5, heartbeat_interval=1)
    for _ in range(WAIT_S * 4):
        if ANSWER in str([str(each) for each in client.messages(task)]):
            return ANSWER
        await asyncio.sleep(0.25)
    return "none"


CONTESTANTS: dict[str, Contestant] = {"noeta-sdk": noeta}
