"""The turn that is killed: the model's text, the tools' work, and their ledger.

Server, client and driver use the same script, so that each has the expected content.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.history.messages import Finish
from midstream.models.responses import Finished, TextDelta, ThinkingDelta, ToolCallRequested
from midstream.testing.scripted_model import Pause, ScriptedStep
from midstream.tools.function_tools import Tool, current_call, tool

SESSION = "s"
PIDS = "mcp.pids"
"""A file with the process id of each process of an MCP server."""
QUESTION = "Read both, write both, think, ask me, and tell me."
SLOW_S = 0.1
"""Seconds that the slow tool takes."""
SLOW_CANCELLED_S = 10.0
"""The same if the turn is cancelled meanwhile: the command arrives in time also on a machine under load."""
TOKENS = 100
"""Pieces of each long text."""
TOKENS_AT_ONCE = 5
"""Pieces that arrive together, so that a text of 100 pieces costs about 20 appends."""
PAUSE_S = 0.003

FIRST_WORDS = " ".join(f"look{number}" for number in range(TOKENS))
LAST_WORDS = " ".join(f"word{number}" for number in range(TOKENS))


def text_steps(words: str) -> list[ScriptedStep]:
    """Return the steps of a text in `TOKENS` pieces, a few at a time."""
    pieces = words.replace(" ", "\0 ").split("\0")
    steps: list[ScriptedStep] = []
    for number, piece in enumerate(pieces, start=1):
        steps.append(TextDelta(piece))
        if number % TOKENS_AT_ONCE == 0:
            steps.append(Pause(PAUSE_S))
    return steps


def script() -> list[list[ScriptedStep]]:
    """Return the responses of the turn: thinking, long texts, every kind of tool."""
    calls = Finished(Finish.CALLS)
    return [
        [
            ThinkingDelta("two to read"),
            ThinkingDelta(", side by side", "signature"),
            *text_steps(FIRST_WORDS),
            ToolCallRequested("a", "read", '{"name":"left"}'),
            ToolCallRequested("b", "read", '{"name":"right"}'),
            calls,
        ],
        [
            ToolCallRequested("a", "write", '{"name":"left"}'),
            ToolCallRequested("b", "write", '{"name":"right"}'),
            calls,
        ],
        [TextDelta("This takes a while."), ToolCallRequested("a", "work_slowly", "{}"), calls],
        [TextDelta("And you?"), ToolCallRequested("a", "ask", "{}"), calls],
        [*text_steps(LAST_WORDS), Finished()],
    ]


TEXTS = (FIRST_WORDS, "This takes a while.", "And you?", LAST_WORDS)
"""The texts of the responses, without thinking; the second response has none."""
ANSWER_OF_CLIENT = "Fine."


class LedgerLine(Struct, frozen=True):
    """One line of the ledger: a run of a call began, or ended."""

    session: str
    turn: int
    response: int
    call_id: str
    run: int
    tool: str
    what: Literal["began", "ended"]


class EffectLedger:
    """The external effects: a file to which every tool appends, on either side."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, name: str, what: Literal["began", "ended"]) -> None:
        call = current_call()
        line = LedgerLine(call.session, call.turn, call.response, call.call_id, call.run, name, what)
        os.write(self._file, msgspec.json.encode(line) + b"\n")

    def has_ended(self) -> bool:
        """Return whether any run of the current call has ended, as a probe or a person finds it."""
        call = current_call()
        place = (call.session, call.turn, call.response, call.call_id, "ended")
        lines = (msgspec.json.decode(line, type=LedgerLine) for line in self._path.read_bytes().splitlines())
        return any(
            (each.session, each.turn, each.response, each.call_id, each.what) == place for each in lines
        )


def server_tools(ledger: EffectLedger, world: World, *, slow_s: float = SLOW_S) -> list[Tool]:
    async def read(name: str) -> str:
        """Read something."""
        ledger.note("read", "began")
        await world.sleep(0.01)
        ledger.note("read", "ended")
        return f"{name} was read"

    async def write(name: str) -> str:
        """Write something."""
        ledger.note("write", "began")
        ledger.note("write", "ended")
        return f"{name} was written"

    async def work_slowly() -> str:
        """Work slowly."""
        ledger.note("work_slowly", "began")
        await world.sleep(slow_s)
        ledger.note("work_slowly", "ended")
        return "it was done"

    return [tool(has_effects=False)(read), tool(write), tool(work_slowly)]


def client_tools(ledger: EffectLedger) -> list[Tool]:
    async def ask() -> str:
        """Ask the user."""
        ledger.note("ask", "began")
        ledger.note("ask", "ended")
        return ANSWER_OF_CLIENT

    return [tool(ask)]
