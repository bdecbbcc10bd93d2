"""Our own journals: whole ones are clean, whatever is missing or broken is told with its position."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.core.messages import UserMessage
from midstream.core.records import EpochStarted, MessageAccepted, Sync, encode
from midstream.doctor.examination import examine
from midstream.doctor.findings import Status
from midstream.doctor.journals import is_export, judged
from midstream.store.contract import Mark
from midstream.store.sqlite import SQLiteStore

RECORDS = [
    encode(EpochStarted(1, "owner-1", 1.0)),
    encode(MessageAccepted(1, UserMessage.of("Hello."), 2.0)),
]


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.db"
    opened = SQLiteStore(path)
    await opened.open()
    epoch = await opened.claim("harbour", at=1.0)
    mark = Mark(is_live=True, at=2.0, title="Hello.", turns=1, status="running")
    await opened.append("harbour", RECORDS, expected=0, epoch=epoch, sync=Sync.FULL, mark=mark)
    await opened.close()
    return path


def test_a_database_of_ours_is_clean_and_its_open_turns_are_no_defect(store: Path) -> None:
    done = examine(store)
    assert (done.report.status, done.report.format, done.remedy) == (Status.CLEAN, "midstream", None)
    assert (done.report.conversations, done.report.messages) == (1, 2)
    assert done.report.notes == ("1 turns are open: the next owner carries them on",)


def test_a_damaged_database_is_told(store: Path) -> None:
    body = bytearray(store.read_bytes())
    body[100:2048] = b"\xff" * 1948
    store.write_bytes(body)
    report = examine(store).report
    assert (report.status, report.reason) == (Status.UNREADABLE, "damaged")


def test_the_database_of_another_program_is_no_history(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(84))
    assert examine(path).report.reason in ("no-history", "damaged")


def test_gaps_and_records_that_cannot_be_read_are_findings() -> None:
    stored = [(1, 1, RECORDS[0]), (3, 1, RECORDS[1]), (4, 1, b'{"type": "of tomorrow"}')]
    assert [(found.code, found.message) for found in judged(stored)] == [
        ("journal-gap", 3),
        ("unreadable-record", 4),
    ]


def test_an_exported_session_is_known_and_its_gaps_are_told(tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    lines = [{"id": f"1-{at}", "record": json.loads(body)} for at, body in enumerate(RECORDS, 1)]
    assert all(map(is_export, lines))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert examine(path).report.status is Status.CLEAN
    path.write_text(json.dumps(lines[0]) + "\n" + json.dumps({**lines[1], "id": "1-7"}) + "\n")
    report = examine(path).report
    assert (report.status, [found.code for found in report.findings]) == (Status.LOSSY, ["journal-gap"])
    assert examine(path, named="codex").report.reason == "wrong-format"
