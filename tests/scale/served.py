"""The agent of a scale run, for `midstream serve tests.scale.served:agent`, with tools that have effects.

The variable SCALE_LEDGER names the file in which every run of a tool is noted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from midstream.engine.agent import Agent
from midstream.environment import World
from midstream.history.messages import Finish
from midstream.models.responses import Finished, TextDelta, ToolCallRequested
from midstream.testing.scripted_model import Pause, ScriptedModel, ScriptedStep
from midstream.tools.function_tools import Tool, tool
from tests.fault.turn import EffectLedger

LEDGER_VARIABLE = "SCALE_LEDGER"
WORDS = tuple(
    " ".join(f"{word}{number}ü漢🙂" for number in range(12)) for word in ("look", "work", "ship", "done")
)
"""The text of each response, with characters of one to four bytes."""
WORD_S = 0.02
SLOW_S = 0.1
"""Seconds the slow tool takes."""
DEPLOY_RESPONSE = 3
"""The response whose call a person must allow."""


def is_denied(session: str, turn: int) -> bool:
    """Whether the approval of this turn is refused."""
    return turn == 1 and int(session.split("-")[1]) % 3 == 0


def _pieces_of(words: str) -> list[ScriptedStep]:
    steps: list[ScriptedStep] = []
    for piece in words.replace(" ", "\0 ").split("\0"):
        steps += [TextDelta(piece), Pause(WORD_S)]
    return steps


def script() -> list[list[ScriptedStep]]:
    first, second, third, last = map(_pieces_of, WORDS)
    calls = Finished(Finish.CALLS)
    return [
        [*first, ToolCallRequested("a", "write", "{}"), ToolCallRequested("b", "ask", "{}"), calls],
        [*second, ToolCallRequested("a", "work_slowly", "{}"), calls],
        [*third, ToolCallRequested("a", "deploy", "{}"), calls],
        [*last, Finished()],
    ]


def server_tools(ledger: EffectLedger) -> Sequence[Tool]:
    """Return tools with effects, none of which may run twice."""
    world = World()

    async def write() -> str:
        """Write something."""
        ledger.note("write", "began")
        ledger.note("write", "ended")
        return "it was written"

    async def work_slowly() -> str:
        """Work slowly."""
        ledger.note("work_slowly", "began")
        await world.sleep(SLOW_S)
        ledger.note("work_slowly", "ended")
        return "it was done"

    async def deploy() -> str:
        """Deploy, when a person allows it."""
        ledger.note("deploy", "began")
        ledger.note("deploy", "ended")
        return "it was deployed"

    return [tool(write), tool(work_slowly), tool(needs_approval=True)(deploy)]


def __getattr__(name: str) -> Agent:
    """Make the agent when a server loads it: the judge imports this module too, and has no ledger."""
    if name != "agent":
        raise AttributeError(name)
    ledger = EffectLedger(Path(os.environ[LEDGER_VARIABLE]))
    return Agent(ScriptedModel(script()), tools=server_tools(ledger), name="scale")
