"""`midstream backup`: one file with the sessions of one moment."""

from __future__ import annotations

import json
from pathlib import Path

from midstream.store.sqlite import SQLiteStore
from tests.cli.conftest import Run, record_sessions


async def test_a_copy_has_the_sessions(run: Run, tmp_path: Path) -> None:
    await record_sessions(tmp_path / "sessions.db", {"s-1": ["hi"], "s-2": ["ho"]})
    copy = tmp_path / "copy.db"
    done = run("backup", copy, "--store", tmp_path / "sessions.db", "--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert (report["path"], report["sessions"], report["bytes"]) == (str(copy), 2, copy.stat().st_size)
    shown = [
        run("sessions", "show", "s-1", "--store", tmp_path / name).stdout
        for name in ("sessions.db", "copy.db")
    ]
    assert shown[0] == shown[1] != ""


async def test_it_refuses_an_existing_file_and_describes_its_result(run: Run, tmp_path: Path) -> None:
    await record_sessions(tmp_path / "sessions.db", {"s-1": ["hi"]})
    for arguments, code, words in (
        ((), 0, "1 sessions"),
        ((), 2, "--force"),
        (("--force",), 0, "1 sessions"),
    ):
        done = run("backup", tmp_path / "copy.db", "--store", tmp_path / "sessions.db", *arguments)
        assert (done.exit_code, done.stdout) == (code, "")
        assert words in done.stderr


def test_without_a_database_nothing_is_created(run: Run, tmp_path: Path) -> None:
    done = run("backup", tmp_path / "copy.db", "--store", tmp_path / "none.db")
    assert done.exit_code != 0
    assert "no database" in done.stderr
    assert not (tmp_path / "copy.db").exists()


async def test_a_copy_is_restored_and_the_previous_database_is_kept(run: Run, tmp_path: Path) -> None:
    store, copy = tmp_path / "sessions.db", tmp_path / "copy.db"
    await record_sessions(store, {"s-1": ["hi"]})
    assert run("backup", copy, "--store", store).exit_code == 0
    before = run("sessions", "show", "s-1", "--store", store).stdout
    await record_sessions(store, {"s-2": ["ho"]})
    refused = run("restore", copy, "--store", store)
    assert (refused.exit_code, "--force" in refused.stderr) == (2, True)
    done = run("restore", copy, "--store", store, "--force", "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["path"], report["sessions"]) == (str(store), 1)
    assert run("sessions", "show", "s-1", "--store", store).stdout == before != ""
    assert run("sessions", "show", "s-2", "--store", store).exit_code != 0
    assert run("sessions", "show", "s-2", "--store", report["replaced"]).exit_code == 0
    assert run("restore", copy, "--store", tmp_path / "new.db").exit_code == 0
    assert run("sessions", "show", "s-1", "--store", tmp_path / "new.db").stdout == before


async def test_a_database_in_use_by_a_server_is_not_replaced(run: Run, tmp_path: Path) -> None:
    store, copy = tmp_path / "sessions.db", tmp_path / "copy.db"
    await record_sessions(store, {"s-1": ["hi"]})
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
