"""Turns about one subject each: each policy, approvals, sub-agents, the queue, resumption, a tool's process.

`turn.py` has the long one with text, both kinds of tools and a client that runs some. Here each story is short,
so that it can be killed at every point. The client is the driver, which lives (`drive.py`), or a process that
dies (`client_deaths.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from midstream.engine.agent import Agent, sub_agent
from midstream.environment import World
from midstream.errors import ModelRejectedError
from midstream.history.messages import Finish, Outcome
from midstream.models.responses import Finished, ModelRequest, ToolCallRequested
from midstream.session.calls import OnDoubt
from midstream.testing.scripted_model import (
    Script,
    ScriptedModel,
    ScriptedStep,
    calls,
    steps_since_user,
    text,
)
from midstream.tools.function_tools import DidNotHappen, Happened, Probed, StatedOutcome, Tool, question, tool
from tests.fault.turn import EffectLedger

RESUMED = "resumed"
"""A file that the driver creates before it resumes the failed turn."""

POLICIES: dict[str, OnDoubt] = {
    "unknown": OnDoubt.UNKNOWN,
    "rerun": OnDoubt.RERUN,
    "rerun_with_key": OnDoubt.RERUN_WITH_KEY,
    "probe": OnDoubt.PROBE,
    "hold": OnDoubt.HOLD,
    "approval": OnDoubt.UNKNOWN,
    "approval_rerun": OnDoubt.RERUN,
    "approval_probe": OnDoubt.PROBE,
}
"""The stories about one call, and the policy of its tool."""
ELSEWHERE = {OnDoubt.IN_TRANSACTION}
"""Policies with their own matrix: the ledger of this one is in the session's database, see `test_in_transaction.py`."""
MCP_POLICIES = {"look": OnDoubt.RERUN, "write": OnDoubt.UNKNOWN, "put": OnDoubt.RERUN_WITH_KEY}
"""The tools of the MCP server in `mcp_process.py`, by the policy that follows from their hints."""
CLIENT_POLICIES = {f"client_{name}": policy for name, policy in POLICIES.items()}
"""The stories about one call of a tool that the client runs, and that tool's policy."""
STORIES = (
    *POLICIES,
    "question",
    "family",
    "queue",
    "resume",
    "program",
    "program_dies",
    "mcp",
    "mcp_dies",
)
PEOPLE = (*CLIENT_POLICIES, "approval", "question", "hold", "family", "family_asks")
"""The stories in which a client dies that runs tools, or answers questions."""
MESSAGES = {"queue": ("one", "two", "three")}
"""The messages of stories with more than one."""


class StoryStage:
    """Makes the agent of a story, in any process.


    Args:
        folder: Where the ledger is.     world: The world of the process.     dies_inside: Whether this
            process dies in the middle of the first tool with effects.
    """

    def __init__(self, folder: Path, world: World, *, dies_inside: bool) -> None:
        self._folder = folder
        self._ledger = EffectLedger(folder / "ledger")
        self._world = world
        self._dies_inside = dies_inside

    def agent(self, story: str) -> Agent:
        if story in POLICIES:
            return self._agent([calls(("a", story, "{}")), text("done")], self._tool(story))
        match story:
            case "question":
                asked: list[ScriptedStep] = [
                    ToolCallRequested("a", "ask_user", '{"question": "Which?"}'),
                    Finished(Finish.CALLS),
                ]
                return self._agent([asked, text("done")], question())
            case "family":
                return self._family(self._tool("unknown"), self._tool("hold"))
            case "family_asks":
                return self._family(self._tool("approval"), self._tool("unknown"))
            case "mcp" | "mcp_dies":
                return self._with_mcp("kills" if self._dies_inside else story)
            case _ if story in CLIENT_POLICIES:
                return self._agent([calls(("a", story, "{}")), text("done")])
            case "resume":
                return self._agent(self._failing, self._tool("unknown"))
            case "program" | "program_dies":
                return self._agent([calls(("a", story, "{}")), text("done")], self._program(story))
            case _:
                return self._agent([calls(("a", "unknown", "{}")), text("done")], self._tool("unknown"))

    def _agent(self, script: Script, *tools: Tool) -> Agent:
        return Agent(ScriptedModel(script, world=self._world), tools=tools)

    def tool(self, name: str) -> Tool:
        """Return the tool of a story about one call, for server or client."""
        return self._tool(name)

    def _tool(self, name: str) -> Tool:
        policy = (POLICIES | CLIENT_POLICIES)[name]

        async def work() -> str:
            """Do it."""
            self._ledger.note(name, "began")
            if self._dies_inside:
                os.kill(os.getpid(), signal.SIGKILL)
            await self._world.sleep(0.01)
            self._ledger.note(name, "ended")
            return "it was done"

        async def look() -> Probed:
            return Happened("it was done") if self._ledger.has_ended() else DidNotHappen()

        probe = look if policy is OnDoubt.PROBE else None
        needs_approval = "approval" in name
        return tool(name=name, on_doubt=policy, probe=probe, needs_approval=needs_approval)(work)

    def _family(self, first: Tool, second: Tool) -> Agent:
        asked = calls(("a", first.spec.name, "{}"), ("b", second.spec.name, "{}"))
        helper = self._agent([asked, text("the helper is done")], first, second)
        help_out = sub_agent(helper, name="help_out", description="Help.")
        return self._agent([calls(("a", "help_out", '{"task": "go"}')), text("done")], help_out)

    def _with_mcp(self, how: str) -> Agent:
        """Make an agent whose tools are in another process, which may be killed, or kill this one, in a call."""
        # Slow to import: longer than all else in each of the hundreds of processes that play another story.
        from midstream.tools.mcp import McpServer

        arguments = ["-m", "tests.fault.mcp_process", str(self._folder), how]
        path = os.environ.get("PYTHONPATH", "")
        tools = McpServer.stdio(
            sys.executable, arguments, name="m", env={"PYTHONPATH": path}, cwd=Path.cwd(), world=self._world
        )
        script = [*(calls(("a", f"m__{name}", "{}")) for name in MCP_POLICIES), text("done")]
        return Agent(ScriptedModel(script, world=self._world), tools=[tools])

    def _failing(self, request: ModelRequest) -> list[ScriptedStep]:
        """Request the tool, then fail until the cause is removed."""
        if steps_since_user(request.history) == 0:
            return calls(("a", "unknown", "{}"))
        return (
            text("done") if (self._folder / RESUMED).exists() else [ModelRejectedError("the key is no good")]
        )

    def _program(self, name: str) -> Tool:
        """Make a tool that starts a process; in one story that process is killed in the middle."""

        async def run() -> StatedOutcome:
            self._ledger.note(name, "began")
            command = "kill -9 $$" if name == "program_dies" else "exit 0"
            process = await asyncio.create_subprocess_exec("/bin/sh", "-c", command)
            if self._dies_inside:
                os.kill(os.getpid(), signal.SIGKILL)
            if await process.wait() != 0:
                return StatedOutcome("the program was killed", Outcome.UNKNOWN)
            self._ledger.note(name, "ended")
            return StatedOutcome("it was done")

        return tool(name=name)(run)
