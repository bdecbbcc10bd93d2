"""The folder of the demo: a few notes, the database, and the ledger of the tools' executions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from midstream.environment import World

NOTES = {
    "bread.txt": (
        "Bread for the boat: 500 g flour, 350 g water, 10 g salt, a little yeast.\n"
        "Let it rise for twelve hours. Bake it hot for forty minutes.\n"
    ),
    "lighthouse.txt": (
        "The lighthouse at Grey Point was built in 1871. It is 32 metres tall.\n"
        "Its lamp turns once every ten seconds and can be seen from 20 miles away.\n"
        "Mary Quinn was the keeper. She kept the light for 41 years and wrote a diary.\n"
    ),
    "tides.txt": (
        "High water comes twice a day, about 50 minutes later every day.\n"
        "Spring tides come with the new moon and the full moon. They are the highest.\n"
        "The harbour falls dry for two hours at low water.\n"
    ),
}


@dataclass(frozen=True)
class LedgerEntry:
    """One line of the ledger: a process, an act, and a call (`session/turn/response/call`)."""

    pid: int
    tool: str
    key: str
    what: str


class Folder:
    """All files of the demo."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = path / "notes"
        self.store = path / "sessions.db"
        self.client = path / "client.db"
        self.client_secrets = path / "client-secrets.db"
        self.server_log = path / "server.log"
        self._ledger = path / "ledger.txt"

    def make(self) -> None:
        """Write the missing notes."""
        self.notes.mkdir(parents=True, exist_ok=True)
        for name, text in NOTES.items():
            if not (self.notes / name).exists():
                (self.notes / name).write_text(text, encoding="utf-8")
        self._ledger.touch()

    def note(self, name: str) -> Path:
        """Return the path of a note.

        Raises:
            ValueError: The name leads out of the folder.
        """
        path = self.notes / name
        if not name or path.parent != self.notes or name.startswith("."):
            raise ValueError(f"{name!r} is no name of a note")
        return path

    def all_notes(self) -> list[Path]:
        """Return the existing notes, without unfinished ones."""
        return sorted(path for path in self.notes.iterdir() if not path.name.startswith("."))

    def log(self, tool: str, key: str, what: str, world: World) -> None:
        """Append a line to the ledger in one write, so that it survives a kill."""
        line = f"{world.now():.3f} {os.getpid()} {tool} {key} {what}\n"
        ledger = os.open(self._ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(ledger, line.encode())
        finally:
            os.close(ledger)

    def entries(self, session: str) -> list[LedgerEntry]:
        """Return the executions of a session, in order."""
        entries = []
        for line in self._ledger.read_text(encoding="utf-8").splitlines():
            _, pid, tool, key, what = line.split(" ", 4)
            if key.startswith(f"{session}/"):
                entries.append(LedgerEntry(int(pid), tool, key, what))
        return entries
