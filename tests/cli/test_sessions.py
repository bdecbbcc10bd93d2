"""Listing, export and deletion of sessions, with output that cannot act on the terminal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from midstream.cli.terminal import width_of
from midstream.session.records import decode
from midstream.store.sqlite import SQLiteStore
from tests.cli.conftest import Run
from tests.cli.on_terminal import OnTerminal
from tests.cli.processes import run as run_forked


def test_a_listing_through_a_pipe_is_one_line_of_cells_per_session(run: Run, store: Path) -> None:
    done = run("sessions", "list", "--store", store)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("harvest-2", "1", "completed"),
        ("harbour-1", "2", "completed"),
    ]
    assert rows[1][4] == "What is in the harbour?"


def test_the_store_of_serve_is_the_default(run: Run, store: Path) -> None:
    assert run("sessions", "list").stdout == run("sessions", "list", "--store", store).stdout


def test_json_has_one_object_per_line_with_every_field(run: Run, store: Path) -> None:
    lines = [json.loads(line) for line in run("sessions", "list", "--json").stdout.splitlines()]
    assert [sorted(line) for line in lines] == 2 * [
        ["created_at", "id", "status", "title", "turns", "updated_at"]
    ]


def test_on_a_terminal_of_80_columns_a_listing_is_a_table(on_terminal: OnTerminal, store: Path) -> None:
    seen = on_terminal("sessions", "list", "--store", store)
    lines = seen.text.splitlines()
    assert lines[0].split() == ["SESSION", "TURNS", "STATUS", "CHANGED", "TITLE"]
    assert max(map(width_of, lines)) <= 80
    assert "…" in lines[1]


def test_a_limited_listing_reports_that_there_are_more(run: Run, store: Path) -> None:
    done = run("sessions", "list", "--limit", "1")
    assert len(done.stdout.splitlines()) == 1
    assert "--limit 0" in done.stderr


def test_a_transcript_shows_the_messages_and_the_outcome_of_each_call(run: Run, store: Path) -> None:
    done = run("sessions", "show", "harb")
    assert "you    What is in the harbour?" in done.stdout
    assert "agent  I will look." in done.stdout
    assert '✓ look {"where": "the harbour"} ok 0.0 s' in done.stdout
    assert done.stdout.count("completed after") == 2


@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["export"], ["list"]], ids=" ".join)
def test_no_text_of_a_session_acts_on_the_terminal(run: Run, store: Path, command: list[str]) -> None:
    for session in [[], []] if command == ["list"] else [["harbour-1"], ["harvest-2"]]:
        done = run("sessions", *command, *session)
        assert done.exit_code == 0
        assert not set(done.output) & {"\x1b", "\x07", "\u202e", "\x9b"}


def test_raw_prints_the_text_unchanged(run: Run, store: Path) -> None:
    assert "\x1b]0;pwned\x07" in run("sessions", "show", "--raw", "harb").stdout


def test_an_export_is_every_record_and_unchanged_by_escaping(run: Run, store: Path) -> None:
    lines = [json.loads(line) for line in run("sessions", "export", "harbour-1").stdout.splitlines()]
    assert [line["id"] for line in lines] == [f"1-{position}" for position in range(1, len(lines) + 1)]
    for line in lines:
        decode(json.dumps(line["record"]).encode())
    results = [
        line["record"]["result"]["content"] for line in lines if line["record"]["type"] == "call_ended"
    ]
    assert results == 2 * ["nothing in the harbour\n\x1b]0;pwned\x07\x1b[31mred\u202e gnitirw"]


def test_a_dash_is_the_last_changed_session(run: Run, store: Path) -> None:
    assert json.loads(run("sessions", "show", "--json", "-").stdout)["id"] == "harvest-2"


def test_an_ambiguous_prefix_lists_the_matching_sessions(run: Run, store: Path) -> None:
    done = run("sessions", "show", "har")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "midstream: 'har' is ambiguous: 'harvest-2', 'harbour-1'; give more of the id. [usage]\n"
    )


def test_an_unknown_session_is_not_found(run: Run, store: Path) -> None:
    done = run("sessions", "show", "nobody")
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == (
        "midstream: no session 'nobody'. `midstream sessions list` lists the sessions. [session_not_found]\n"
    )


def test_a_missing_store_is_not_created(run: Run, tmp_path: Path) -> None:
    done = run("sessions", "list", "--store", tmp_path / "no.db")
    assert done.exit_code == 3
    assert not (tmp_path / "no.db").exists()


async def test_reading_does_not_disturb_a_server_that_uses_the_store(run: Run, store: Path) -> None:
    working = SQLiteStore(store)
    await working.open()
    await working.claim("harbour-1", at=1.0)
    nodes = sorted((store.parent / "sessions.db.nodes").iterdir())
    shown = await asyncio.to_thread(run, "sessions", "show", "harbour-1")
    assert shown.exit_code == 0
    assert sorted((store.parent / "sessions.db.nodes").iterdir()) == nodes
    refused = await asyncio.to_thread(run, "sessions", "delete", "--yes", "harbour-1")
    assert (refused.exit_code, "[lease_held]" in refused.stderr) == (4, True)
    await working.close()


def test_deletion_needs_yes_without_a_terminal(run: Run, store: Path) -> None:
    done = run("sessions", "delete", "harbour-1")
    assert (done.exit_code, "--yes" in done.stderr) == (2, True)
    assert run("sessions", "show", "harbour-1").exit_code == 0


def test_deletion_on_a_terminal_asks_and_accepts_a_no(on_terminal: OnTerminal, store: Path) -> None:
    arguments = ("sessions", "delete", "harbour-1", "--store", store)
    seen = on_terminal(*arguments, answers={"permanently? [y/N]:": "n\n"})
    assert seen.code == 130
    seen = on_terminal(*arguments, answers={"permanently? [y/N]:": "y\n"})
    assert (seen.code, "1 session deleted." in seen.text) == (0, True)


def test_a_dry_run_lists_the_sessions_and_removes_nothing(run: Run, store: Path) -> None:
    done = run("sessions", "delete", "--dry-run", "harb", "-", "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"id": "harbour-1", "is_deleted": False},
        {"id": "harvest-2", "is_deleted": False},
    ]
    assert "2 sessions would be deleted." in done.stderr
    assert len(run("sessions", "list").stdout.splitlines()) == 2


def test_a_deleted_session_is_gone(run: Run, store: Path) -> None:
    assert run("sessions", "delete", "--yes", "harbour-1").exit_code == 0
    assert [line.split("\t")[0] for line in run("sessions", "list").stdout.splitlines()] == ["harvest-2"]


def test_a_shell_completes_ids_from_the_store(store: Path) -> None:
    words = f"midstream sessions show --store {store} har"
    asked = {"_MIDSTREAM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "5"}
    done = run_forked(environment=asked)
    assert done.stdout.splitlines() == ["plain,harvest-2", "plain,harbour-1"]


def test_completion_without_a_store_offers_nothing(tmp_path: Path) -> None:
    asked = {
        "_MIDSTREAM_COMPLETE": "bash_complete",
        "COMP_WORDS": f"midstream sessions show --store {tmp_path / 'no.db'} a",
        "COMP_CWORD": "5",
    }
    done = run_forked(environment=asked)
    assert (done.stdout.strip(), done.stderr) == ("", "")
