"""`midstream store`, and every command that takes `--store`, on PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, record_sessions
from tests.cli.test_gateway import ask_chat_completions, key_of, start, stop
from tests.postgres_engine import Engine

PASSWORD = "word-that-is-never-shown"


@pytest.fixture
def url(engine: Engine, tmp_path: Path) -> str:
    """A schema of its own, with a password in the URL."""
    schema = "cli_" + "".join(each for each in tmp_path.name if each.isalnum())[:40].lower()
    return f"{engine.url}&schema={schema}".replace("postgres@", f"postgres:{PASSWORD}@")


def test_migrate_prepares_a_store_once(run: Run, url: str) -> None:
    for before in (0, 1):
        done = run("store", "migrate", url, "--json")
        assert (done.exit_code, json.loads(done.stdout)) == (0, {"before": before, "after": 1})
    done = run("store", "migrate", url)
    assert done.exit_code == 0
    assert "up to date (schema 1)" in done.stderr
    assert PASSWORD not in done.stderr


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("sessions.db", 2, "needs no preparation"),
        ("postgresql://u:secret@127.0.0.1:1/db", 4, "cannot be reached"),
    ],
)
def test_migrate_reports_an_error_in_one_line(run: Run, name: str, code: int, words: str) -> None:
    done = run("store", "migrate", name)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert words in done.stderr
    assert "secret" not in done.stderr


def test_the_commands_read_and_delete_sessions(run: Run, url: str) -> None:
    missing = run("sessions", "list", "--store", url)
    assert "nothing was stored" in missing.stderr
    asyncio.run(record_sessions(url, {"harbour-1": ["What is there?"], "harvest-2": ["hi"]}))
    assert [
        json.loads(line)["id"]
        for line in run("sessions", "list", "--store", url, "--json").stdout.splitlines()
    ] == [
        "harvest-2",
        "harbour-1",
    ]
    assert "There is nothing." in run("sessions", "show", "harbour", "--store", url).stdout
    assert run("sessions", "export", "harbour-1", "--store", url).stdout.count("turn_ended") == 1
    assert run("pool", "ls", "--store", url).exit_code == 0
    assert run("cache", "harbour-1", "--store", url).exit_code == 0
    assert run("sessions", "delete", "harbour-1", "--yes", "--store", url).exit_code == 0
    left = run("sessions", "list", "--store", url, "--json").stdout
    assert [json.loads(line)["id"] for line in left.splitlines()] == ["harvest-2"]


def test_a_gateway_and_its_pool_use_it(run: Run, url: str, tmp_path: Path) -> None:
    for _ in range(2):  # the second one finds what the first one stored
        process, ready = start(tmp_path, "--store", url)
        try:
            assert PASSWORD not in json.dumps(ready)
            status, body = ask_chat_completions(ready["url"], key_of(ready))
            assert (status, "You said: hi" in body) == (200, True)
        finally:
            assert stop(process) == 0
    assert run("sessions", "list", "--store", url, "--json").exit_code == 0


def test_a_backup_is_left_to_the_tools_of_the_database(run: Run, url: str, tmp_path: Path) -> None:
    done = run("backup", tmp_path / "copy.db", "--store", url)
    assert done.exit_code == 2
    assert "pg_dump" in done.stderr
    assert PASSWORD not in done.stderr


def test_a_store_is_copied_from_a_file_to_a_database_and_back(run: Run, url: str, tmp_path: Path) -> None:
    asyncio.run(
        record_sessions(tmp_path / "sessions.db", {"harbour-1": ["What is there?"], "harvest-2": ["hi"]})
    )
    done = run("store", "copy", tmp_path / "sessions.db", url, "--json")
    assert done.exit_code == 0, done.stderr
    there = run("store", "copy", url, tmp_path / "back.db", "--json")
    assert json.loads(there.stdout) == json.loads(done.stdout)
    assert run("store", "copy", url, tmp_path / "back.db").exit_code == 0
    exported = [
        run("sessions", "export", "harbour-1", "--store", name).stdout
        for name in (tmp_path / "sessions.db", url, tmp_path / "back.db")
    ]
    assert exported[0] == exported[1] == exported[2] != ""
    assert run("store", "copy", url, url).exit_code == 2
    assert run("store", "copy", tmp_path / "none.db", tmp_path / "new.db").exit_code != 0
    assert not (tmp_path / "new.db").exists()
