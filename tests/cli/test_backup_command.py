"""`midstream backup`: one file that holds the sessions of a moment."""

from __future__ import annotations

import json
from pathlib import Path

from midstream.store.sqlite import SQLiteStore
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


async def test_a_copy_is_put_back_and_the_database_of_before_is_kept(run: Run, tmp_path: Path) -> None:
    store, copy = tmp_path / "sessions.db", tmp_path / "copy.db"
    await tell(store, {"s-1": ["hi"]})
    assert run("backup", copy, "--store", store).exit_code == 0
    before = run("sessions", "show", "s-1", "--store", store).stdout
    await tell(store, {"s-2": ["ho"]})
    refused = run("restore", copy, "--store", store)
    assert (refused.exit_code, "--force" in refused.stderr) == (2, True)
    done = run("restore", copy, "--store", store, "--force", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["path"], told["sessions"]) == (str(store), 1)
    assert run("sessions", "show", "s-1", "--store", store).stdout == before != ""
    assert run("sessions", "show", "s-2", "--store", store).exit_code != 0
    assert run("sessions", "show", "s-2", "--store", told["replaced"]).exit_code == 0
    assert run("restore", copy, "--store", tmp_path / "new.db").exit_code == 0
    assert run("sessions", "show", "s-1", "--store", tmp_path / "new.db").stdout == before


async def test_nothing_is_put_in_the_place_of_a_database_that_a_server_uses(run: Run, tmp_path: Path) -> None:
    store, copy = tmp_path / "sessions.db", tmp_path / "copy.db"
    await tell(store, {"s-1": ["hi"]})
    assert run("backup", copy, "--store", store).exit_code == 0
    server = SQLiteStore(store)
    await server.open()
    try:
        refused = run("restore", copy, "--store", store, "--force")
    finally:
        await server.close()
    assert refused.exit_code != 0
    assert "stop it first" in refused.stderr
    (tmp_path / "copy.db").write_bytes(b"no database at all")
    assert run("restore", copy, "--store", store, "--force").exit_code != 0
    assert run("sessions", "show", "s-1", "--store", store).exit_code == 0
    assert "restore" not in str(_names(tmp_path))


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())
