"""Exchanges between a test and a program, as files in a folder: orders to it, records of what it did.

Imports nothing of this repository.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEPARATOR = " | "
"""The separator of `midstream.testing.upstream_contract`."""


class Orders:
    """Both sides of the folder: the test writes orders, and one or more programs take them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("next", "always", "runs"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def order(self, what: str, value: object = 1) -> None:
        """Write an order for the first program that takes it."""
        self._write(self.folder / "next" / what, value)

    def take(self, what: str) -> Any:  # noqa: ANN401 - any JSON
        """Take an order, once; None if there is none."""
        order = self.folder / "next" / what
        mine = order.with_suffix(f".{os.getpid()}")
        try:
            order.rename(mine)
        except FileNotFoundError:
            return None
        value = json.loads(mine.read_text())
        mine.unlink()
        return value

    def declare(self, what: str, value: object = 1) -> None:
        """Set a value that holds from now on."""
        self._write(self.folder / "always" / what, value)

    def holds(self, what: str) -> Any:  # noqa: ANN401 - any JSON
        """Return the value that holds, or None."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.folder / "always" / what).read_text())
        return None

    def _write(self, path: Path, value: object) -> None:
        """Write the whole file before it becomes visible."""
        draft = self.folder / f"{path.name}.{os.getpid()}"
        draft.write_text(json.dumps(value))
        draft.replace(path)

    def lift(self, what: str) -> None:
        """Remove a value that holds."""
        (self.folder / "always" / what).unlink(missing_ok=True)

    def record(self, what: str, **fields: object) -> None:
        """Append a record of an occurrence."""
        with (self.folder / f"{what}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")

    def recorded(self, what: str) -> list[dict[str, Any]]:
        """Return the recorded occurrences in order."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"{what}.jsonl").read_text(encoding="utf-8").split("\n")
            return [json.loads(line) for line in lines if line]
        return []

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Mark an answer of this process as running."""
        mine = self.folder / "runs" / str(os.getpid())
        mine.touch()
        try:
            yield
        finally:
            mine.unlink(missing_ok=True)

    def runs(self) -> int:
        """Return how many answers are running in living processes."""
        return sum(_lives(int(run.name)) for run in (self.folder / "runs").iterdir())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    return True
