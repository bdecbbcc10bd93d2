"""Our own journals: whole ones are clean; missing or damaged records are reported with their position."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from midstream.doctor.examination import examine
from midstream.doctor.findings import Status
from midstream.doctor.journals import ReadRecord, is_export, judge
from midstream.errors import ConflictError
from midstream.history.messages import UserMessage
from midstream.session.records import EpochStarted, MessageAccepted, Sync, decode, encode
from midstream.session.session import Session, fold, prune_session
from midstream.store.contract import Batch, SessionListing
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.guard.guarded_store import guard_store
from midstream.store.sqlite import SQLiteStore
from tests.cli.conftest import Run
from tests.cli.conftest import run as run  # noqa: PLC0414 - a fixture is found by its name

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
    mark = SessionListing(is_live=True, at=2.0, title="Hello.", turns=1, status="running")
    await opened.append("harbour", Batch(RECORDS, expected=0, epoch=epoch, sync=Sync.FULL, mark=mark))
    await opened.close()
    return path


def _body(path: Path) -> bytes:
    return path.read_bytes()


def test_a_database_of_ours_is_clean_and_its_open_turns_are_not_a_defect(store: Path) -> None:
    done = examine(store)
    assert (done.report.status, done.report.format, done.remedy) == (Status.CLEAN, "midstream", None)
    assert (done.report.conversations, done.report.messages) == (1, 2)
    assert done.report.notes == ("a turn is open; the next node continues it",)


def test_a_damaged_database_is_reported(store: Path) -> None:
    body = bytearray(store.read_bytes())
    body[100:2048] = b"\xff" * 1948
    store.write_bytes(body)
    report = examine(store).report
    assert (report.status, report.reason) == (Status.UNREADABLE, "damaged")


def test_the_database_of_another_program_is_not_a_history(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(84))
    assert examine(path).report.reason in ("no-history", "damaged")


def test_gaps_and_unreadable_records_are_findings() -> None:
    stored = [
        ReadRecord(1, 1, RECORDS[0]),
        ReadRecord(3, 1, RECORDS[1]),
        ReadRecord(4, 1, b'{"type": "of tomorrow"}'),
    ]
    assert [(found.code, found.message) for found in judge(stored).findings] == [
        ("journal-gap", 3),
        ("unreadable-record", 4),
    ]


def test_an_exported_session_is_recognized_and_its_gaps_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    lines = [{"id": f"1-{at}", "record": json.loads(body)} for at, body in enumerate(RECORDS, 1)]
    assert all(map(is_export, lines))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert examine(path).report.status is Status.CLEAN
    path.write_text(json.dumps(lines[0]) + "\n" + json.dumps({**lines[1], "id": "1-7"}) + "\n")
    done = examine(path)
    assert (done.report.status, [(found.code, found.line) for found in done.report.findings]) == (
        Status.LOSSY,
        [("journal-gap", 2)],
    )
    assert done.remedy is not None
    copy = done.remedy.beside().path
    assert copy.read_text() == json.dumps(lines[0]) + "\n"
    assert examine(copy).report.status is Status.CLEAN
    assert examine(path, named="codex").report.reason == "wrong-format"


async def test_a_damaged_session_is_cut_in_the_copy_and_the_others_stay(store: Path) -> None:
    with closing(apsw.Connection(str(store))) as db:
        db.execute("update record set body = x'7b' where position = 2")
        db.execute(
            "insert into session (id, name, epoch, created_at, changed_at) values (2, 'pier', 1, 1, 1)"
        )
        db.execute(
            "insert into record (session_id, position, epoch, body) select 2, position, epoch, ? from record "
            "where position = 1",
            (RECORDS[0],),
        )
    before = _body(store)
    done = examine(store)
    assert [(each.code, each.file, each.message, each.repair) for each in done.report.findings] == [
        ("unreadable-record", "harbour", 2, "the copy ends before it")
    ]
    assert done.remedy is not None
    with pytest.raises(ConflictError, match="stop the server"):
        done.remedy.in_place()
    copy = done.remedy.beside().path
    assert _body(store) == before
    again = examine(copy).report
    assert (again.status, again.messages, again.conversations, again.notes) == (Status.CLEAN, 2, 2, ())
    opened = SQLiteStore(copy)
    await opened.open()
    assert await opened.claim("harbour", at=2.0) > 1, "the copy is a store"
    await opened.close()


def test_a_session_can_be_rendered_by_the_rules_of_a_provider(store: Path) -> None:
    report = examine(store, profile="strict-template").report
    assert (report.status, report.profile) == (Status.CLEAN, "strict-template")


def test_misplaced_pages_are_reported(store: Path) -> None:
    body = bytearray(store.read_bytes())
    fourth = 3 * int.from_bytes(body[16:18])  # a page without sessions
    body[fourth + 1 : fourth + 3] = b"\5\0"
    store.write_bytes(body)
    found = examine(store).report.findings
    assert [(each.code, each.repair) for each in found] == [("damaged-file", "none: restore a copy")]


def test_a_pruned_journal_is_not_a_gap_and_folds_from_its_first_record() -> None:
    begins = encode(prune_session(Session(position=8, epoch=1, turns=0), at=1.0))
    done = judge([ReadRecord(8, 1, begins), ReadRecord(9, 1, RECORDS[1])])
    assert done.findings == []
    assert done.session == fold([(1, decode(begins)), (1, decode(RECORDS[1]))])
    assert [
        each.code for each in judge([ReadRecord(8, 1, begins), ReadRecord(10, 1, RECORDS[1])]).findings
    ] == ["journal-gap"]
    assert [each.code for each in judge([ReadRecord(2, 1, RECORDS[1])]).findings] == ["journal-gap"]


@pytest.fixture
async def sealed(tmp_path: Path) -> tuple[Path, Path]:
    path, keys = tmp_path / "sessions.db", tmp_path / "keys"
    FileKeys.make(keys)
    opened = encrypt_store(SQLiteStore(path), FileKeys(keys))
    await opened.open()
    epoch = await opened.claim("harbour", at=1.0)
    mark = SessionListing(is_live=True, at=2.0, title="Hello.", turns=1, status="running")
    await opened.append("harbour", Batch(RECORDS, expected=0, epoch=epoch, sync=Sync.FULL, mark=mark))
    await opened.close()
    return path, keys


def _doctor(run: Run, *arguments: object) -> tuple[int, dict[str, Any]]:
    done = run("doctor", "--json", *arguments)
    report: dict[str, Any] = json.loads(done.stdout)
    return done.exit_code, report


def test_an_encrypted_store_is_examined_with_its_key_file(run: Run, sealed: tuple[Path, Path]) -> None:
    path, keys = sealed
    code, report = _doctor(run, path)
    assert (code, report["status"], report["reason"]) == (7, "unreadable", "encrypted")
    assert "--key-file" in report["problem"]
    code, report = _doctor(run, "--key-file", keys, "--for", "anthropic", path)
    assert (code, report["status"], report["messages"]) == (0, "clean", 2)


def test_a_wrong_key_file_is_reported_and_no_copy_is_written(run: Run, sealed: tuple[Path, Path]) -> None:
    path, keys = sealed
    other = keys.with_name("other")
    FileKeys.make(other)
    code, report = _doctor(run, "--fix", "--key-file", other, path)
    assert (code, report["reason"], report["written"]) == (7, "encrypted", "")


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (
            "update record set body = x'0100' where position = 2",
            [("unreadable-record", 1), ("unreadable-record", 2)],  # of one append: none of it is authentic
        ),
        ("delete from record where position = 2", [("unreadable-record", 1), ("journal-gap", 3)]),
        ("delete from record where position = 1", [("journal-gap", 2)]),
    ],
)
def test_changes_of_an_encrypted_store_are_found_and_no_copy_is_made(
    run: Run, sealed: tuple[Path, Path], damage: str, found: list[tuple[str, int]]
) -> None:
    path, keys = sealed
    with closing(apsw.Connection(str(path))) as db:
        db.execute(damage)
    code, report = _doctor(run, "--fix", "--key-file", keys, path)
    assert [(each["code"], each["message"]) for each in report["findings"]] == found
    assert (code, report["written"]) == (7, "")


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("update record set body = x'7b7d' where position = 5", [("unreadable-record", 5)]),
        ("delete from record where position = 5", [("journal-gap", 6)]),
        ("delete from record where position = 6", [("journal-gap", 6)]),
    ],
)
async def test_a_copy_of_an_authenticated_store_ends_before_the_damaged_append(
    tmp_path: Path, run: Run, damage: str, found: list[tuple[str, int]]
) -> None:
    path = tmp_path / "sessions.db"
    store = guard_store(SQLiteStore(path))
    await store.open()
    epoch = await store.claim("harbour", at=1.0)
    bodies = [encode(EpochStarted(number, "a", float(number))) for number in range(6)]
    for expected in (0, 3):
        batch = Batch(bodies[expected : expected + 3], expected=expected, epoch=epoch, sync=Sync.FULL)
        await store.append("harbour", batch)
    await store.close()
    with closing(apsw.Connection(str(path))) as db:
        db.execute(damage)
    _, report = await asyncio.to_thread(_doctor, run, "--fix", path)
    assert [(each["code"], each["message"]) for each in report["findings"]] == found
    Path(report["written"]).replace(path)  # noqa: ASYNC240 - a rename of a small file
    for companion in ("-wal", "-shm"):
        path.with_name(path.name + companion).unlink(missing_ok=True)
    await store.open()
    assert [each.body for each in await store.read("harbour", after=0, limit=9)] == bodies[:3]
    epoch = await store.claim("harbour", at=2.0)
    assert await store.append("harbour", Batch([b"{}"], expected=3, epoch=epoch, sync=Sync.FULL)) == 4
    await store.close()
