"""`midstream backup`: one file that holds the sessions of a moment."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run, tell


async def test_a_copy_has_the_sessions(run: Run, tmp_path: Path) -> None:
    await tell(tmp_path / "sessions.db", {"s-1": ["hi"], "s-2": ["ho"]})
    copy = tmp_path / "copy.db"
    done = run("backup", copy, "--store", tmp_path / "sessions.db", "--json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert (told["path"], told["sessions"], told["bytes"]) == (str(copy), 2, copy.stat().st_size)
    shown = [
        run("sessions", "show", "s-1", "--store", tmp_path / name).stdout
        for name in ("sessions.db", "copy.db")
    ]
    assert shown[0] == shown[1] != ""


async def test_it_refuses_what_exists_and_names_what_it_did(run: Run, tmp_path: Path) -> None:
    await tell(tmp_path / "sessions.db", {"s-1": ["hi"]})
    for arguments, code, words in (
        ((), 0, "1 sessions"),
        ((), 2, "--force"),
        (("--force",), 0, "1 sessions"),
    ):
        done = run("backup", tmp_path / "copy.db", "--store", tmp_path / "sessions.db", *arguments)
        assert (done.exit_code, done.stdout) == (code, "")
        assert words in done.stderr


def test_without_a_database_nothing_is_made(run: Run, tmp_path: Path) -> None:
    done = run("backup", tmp_path / "copy.db", "--store", tmp_path / "none.db")
    assert done.exit_code != 0
    assert "no database" in done.stderr
    assert not (tmp_path / "copy.db").exists()
