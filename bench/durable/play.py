"""The same turn for every contestant: the calls of the model, the work of the tools, and the fault point.

| scenario | calls |
| --- | --- |
| `seq` | c1, c2, c3, one after the other |
| `par` | p1, p2, p3 in one response |
| `steps` | many calls without work, one after the other, to be timed |

The ledger represents the outside world: it counts effects.
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
"""Seconds that the calls of a batch take. p1 has ended, and its result can be stored, before the process dies in p2."""


class Play:
    """The model and the tools of one contestant in one process.

    Args:
        database: URL of an empty PostgreSQL database for all data of a contestant; "" means files in the folder.
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
        """Return the location of midstream's journals: a file of this name, or the database."""
        return self.database or str(self.folder / name)

    def calls(self, requested: int, results: Iterable[str] = ()) -> list[str]:
        """Return the names of the calls in the model's next response, [] for the answer.

        Args:
            requested: The number of earlier calls.
            results: The texts of the results in the request. Those of the last request are counted.
        """
        if self._scenario == "steps":
            return [f"s{requested}"] if requested < self._steps else []
        self._note(f"model {requested}")
        for text in results:
            self._note(f"received {' '.join(text.split())}")
        if self._dies == "in_model" and requested:
            _die()
        if self._scenario == "par":
            return [] if requested else ["p1", "p2", "p3"]
        return [f"c{requested + 1}"] if requested < 3 else []  # noqa: PLR2004 - see the module's table

    async def work(self, name: str) -> str:
        """Run a tool call."""
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
"""Runs or resumes the turn of a session; returns the answer."""
Contestant = Callable[[Play], AbstractAsyncContextManager[Turn]]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
