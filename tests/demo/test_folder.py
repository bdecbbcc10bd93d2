"""The demo's folder: notes, and a ledger that keeps the lines of a killed process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from midstream.demo.folder import NOTES, Folder, LedgerEntry
from midstream.environment import World


def test_notes_are_written_once_and_never_overwritten(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "demo")
    folder.make()
    assert sorted(path.name for path in folder.notes.iterdir()) == sorted(NOTES)
    (folder.notes / "tides.txt").write_text("mine")
    folder.make()
    assert (folder.notes / "tides.txt").read_text() == "mine"


def test_the_ledger_distinguishes_sessions(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.log("read_file", "one/1/1/c1", "started", World())
    folder.log("write_note", "two/1/1/c1", "wrote 2/5", World())
    assert folder.entries("two") == [LedgerEntry(os.getpid(), "write_note", "two/1/1/c1", "wrote 2/5")]


@pytest.mark.parametrize("name", ["", "..", "../ledger.txt", "a/b", ".hidden", "/etc/passwd"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name of a note"):
        Folder(tmp_path).note(name)
