"""The content of a chaos run: the turns of a session, the texts of the model, the tools on both sides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from midstream.environment import Fault, World
from midstream.history.messages import Finish
from midstream.models.responses import Finished, ThinkingDelta, ToolCallRequested
from midstream.testing.scripted_model import ScriptedStep
from midstream.tools.function_tools import Tool, tool
from tests.fault.turn import ANSWER_OF_CLIENT, EffectLedger, text_steps

TURNS = 3
"""Turns of a session; in every second session the last one is cancelled."""
WAYS = ("websocket", "sse", "poll", "auto")
"""The transports of the clients, a process each."""
SESSIONS_AT_ONCE = 8
"""Sessions in which one client sends at a time."""
ENOUGH = "enough"
"""A file whose presence stops the start of further sessions."""
WORDS = tuple(" ".join(f"{word}{number}ü漢🙂" for number in range(40)) for word in ("look", "then", "done"))
"""The text of the model in each response, with characters of one to four bytes."""
ASK_RESPONSE = 1
"""The response in which the client's tool is called."""


class ProcessArguments:
    """The command-line arguments of a process."""

    def __init__(self, arguments: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path, help="where everything is kept")
        parser.add_argument("port", type=int)
        parser.add_argument("--way", default="", help="the client's transport")
        parser.add_argument("--die-at", type=Fault, help="the fault point to die at")
        parser.add_argument("--die-time", type=int, default=1, help="the time it is reached")
        given = parser.parse_args(arguments)
        self.folder: Path = given.folder
        self.port: int = given.port
        self.way: str = given.way
        self.death: tuple[Fault | None, int] = (given.die_at, given.die_time)


def message_of(turn: int) -> str:
    """Return the message that opens a turn of a session, numbered from 0."""
    return f"turn {turn}"


def is_stopped(session: str, turn: int) -> bool:
    """Return whether the client cancels this turn when it receives its first call."""
    _, speaker, number = session.split("-")
    return turn == TURNS - 1 and (int(speaker) + int(number)) % 2 == 1


def script() -> list[list[ScriptedStep]]:
    first, second, third = WORDS
    calls = Finished(Finish.CALLS)
    server, client = ToolCallRequested("a", "write", "{}"), ToolCallRequested("b", "ask", "{}")
    return [
        [ThinkingDelta("both sides"), *text_steps(first), server, client, calls],
        [*text_steps(second), ToolCallRequested("a", "work_slowly", "{}"), calls],
        [*text_steps(third), Finished()],
    ]


def server_tools(ledger: EffectLedger, world: World) -> list[Tool]:
    """Return tools with effects, none of which may run twice, whatever happens."""

    async def write() -> str:
        """Write something."""
        ledger.note("write", "began")
        ledger.note("write", "ended")
        return "it was written"

    async def work_slowly() -> str:
        """Work slowly."""
        ledger.note("work_slowly", "began")
        await world.sleep(0.02)
        ledger.note("work_slowly", "ended")
        return "it was done"

    return [tool(write), tool(work_slowly)]


def client_tools(ledger: EffectLedger) -> list[Tool]:
    """Return the tool of the client; it may not run twice either."""

    async def ask() -> str:
        """Ask the user."""
        ledger.note("ask", "began")
        ledger.note("ask", "ended")
        return ANSWER_OF_CLIENT

    return [tool(ask)]
