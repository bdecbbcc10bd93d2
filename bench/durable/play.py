"""The same turn for every contestant: what the model asks for, what the tools do, and where the process dies.

Scenario `seq`: the model asks for c1, c2, c3 one after the other. `par`: for p1, p2, p3 in one response. `steps`: for
many calls one after the other that do nothing, to be timed. The ledger is the world outside: it counts effects.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal

ANSWER = "all done"
STEP_ARGUMENT = "a" * 64
STEP_RESULT = "r" * 200
Where = Literal["", "in_model", "before_effect", "after_effect"]
SETTLES_S = {"p2": 0.5, "p3": 1.5}
"""Seconds that the calls of a batch take, so that p1 has ended, and is stored if it ever will be, when p2 dies."""


class Play:
    """One contestant's world in one process.

    Args:
        database: URL of an empty PostgreSQL database for all that a contestant stores; "" means files in the folder.
    """

    def __init__(
        self,
        folder: Path,
        scenario: str,
        *,
        dies: Where = "",
        is_resumed: bool = False,
        steps: int = 50,
        database: str = "",
    ) -> None:
        self.folder = folder
        self.database = database
        self.is_resumed = is_resumed
        self.first_noted_at = 0.0
        self._scenario = scenario
        self._dies = dies
        self._steps = steps

    def store(self, name: str) -> str:
        """Return where midstream keeps its journals: a file of this name, or the database."""
        return self.database or str(self.folder / name)

    def calls(self, asked: int, results: Iterable[str] = ()) -> list[str]:
        """Return the names of the calls in the model's next response, none for the answer. `asked` were before.

        `results` are the texts of the results in the request; those of the last request are counted.
        """
        if self._scenario == "steps":
            return [f"s{asked}"] if asked < self._steps else []
        self._note(f"model {asked}")
        for text in results:
            self._note(f"seen {' '.join(text.split())}")
        if self._dies == "in_model" and asked:
            _die()
        if self._scenario == "par":
            return [] if asked else ["p1", "p2", "p3"]
        return [f"c{asked + 1}"] if asked < 3 else []  # noqa: PLR2004 - see the text above

    async def work(self, name: str) -> str:
        """Be the tool."""
        if self._scenario == "steps":
            return STEP_RESULT
        await asyncio.sleep(SETTLES_S.get(name, 0.0))
        is_victim = name in ("c2", "p2")
        if is_victim and self._dies == "before_effect":
            _die()
        self._note(f"effect {name}")
        if is_victim and self._dies == "after_effect":
            _die()
        return f"result of {name}"

    def _note(self, line: str) -> None:
        self.first_noted_at = self.first_noted_at or time.perf_counter()
        ledger = os.open(self.folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(ledger, f"{line}\n".encode())
        os.fsync(ledger)
        os.close(ledger)


Turn = Callable[[str], Awaitable[str]]
"""Runs, or carries on with, the turn of a session; returns the answer."""
Contestant = Callable[[Play], AbstractAsyncContextManager[Turn]]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
