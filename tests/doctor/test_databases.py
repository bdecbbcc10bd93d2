"""opencode's database: read unchanged, also while opencode uses it; repaired row by row."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from midstream.doctor.examination import Examined, examine
from midstream.doctor.findings import Status
from midstream.doctor.shapes import Json
from midstream.errors import ConflictError, UnavailableError
from midstream.history.repair.placeholders import UNKNOWN

SCHEMA = """
create table session (id text primary key, project_id text, time_created integer, revert text);
create table message (id text primary key, session_id text, time_created integer, data text);
create table part (id text primary key, message_id text, session_id text, time_created integer, data text);
create table session_message (
    id text primary key, session_id text, type text, seq integer, time_created integer, data text
);
"""


def _tool(name: str, status: str, **state: object) -> Json:
    return {"type": "tool", "callID": name, "tool": "bash", "state": {"status": status, "input": {}, **state}}


class Rows:
    """A database of opencode's, in the mode in which opencode leaves it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with closing(self.connect()) as db:
            db.execute("pragma journal_mode = wal")
            db.execute(SCHEMA).fetchall()

    def connect(self) -> apsw.Connection:
        return apsw.Connection(str(self.path))

    def add(self, table: str, *values: object) -> None:
        with closing(self.connect()) as db:
            db.execute(f"insert into {table} values ({', '.join('?' * len(values))})", values)

    def session(self, id_: str = "ses_1") -> None:
        self.add("session", id_, "p", 1, None)

    def message(self, id_: str, role: str, *parts: Json, session: str = "ses_1", at: int = 1) -> None:
        self.add("message", id_, session, at, json.dumps({"role": role}))
        for number, part in enumerate(parts):
            self.add("part", f"prt_{id_}_{number}", id_, session, at, json.dumps(part))

    def newer(self, id_: str, kind: str, data: Json, *, seq: int, session: str = "ses_1") -> None:
        self.add("session_message", id_, session, kind, seq, 1, json.dumps(data))


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path / "opencode.db")


def _data(path: Path, table: str, id_: str) -> Any:  # noqa: ANN401 - any JSON
    with closing(apsw.Connection(str(path))) as db:
        found = db.execute(f"select data from {table} where id = ?", (id_,)).fetchone()
    return json.loads(found[0]) if found else None


def _findings_of(done: Examined) -> list[tuple[str, str | None, str]]:
    return [(found.code, found.call_id, found.file) for found in done.report.findings]


def _broken(rows: Rows) -> None:
    rows.session()
    rows.message("msg_2", "assistant", _tool("late", "running", time={"start": 7}), at=2)
    rows.message("msg_9", "user", {"type": "text", "text": "Look."}, at=1)


def test_sessions_are_read_in_their_order_and_nothing_is_left_behind(rows: Rows) -> None:
    rows.session()
    rows.message("msg_1", "user", {"type": "text", "text": "Look."})
    rows.message("msg_2", "assistant", _tool("a", "completed", output="x"), _tool("b", "error", error="no"))
    rows.session("ses_2")
    rows.message("msg_3", "user", {"type": "text", "text": "Hm."}, session="ses_2")
    done = examine(rows.path)
    assert (done.report.status, done.remedy) == (Status.CLEAN, None)
    assert (done.report.format, done.report.messages, done.report.conversations) == ("opencode", 3, 2)
    assert [each.name for each in rows.path.parent.iterdir()] == ["opencode.db"]


def test_an_open_call_is_found_and_the_copy_is_closed_and_clean(rows: Rows) -> None:
    _broken(rows)
    before = rows.path.read_bytes()
    done = examine(rows.path)
    assert _findings_of(done) == [("dangling-call", "late", "message msg_2")]
    assert done.remedy is not None
    copy = done.remedy.beside().path
    assert (copy.name, rows.path.read_bytes()) == ("opencode.repaired.db", before)
    state = _data(copy, "part", "prt_msg_2_0")["state"]
    assert (state["status"], state["error"], state["time"]) == ("error", UNKNOWN, {"start": 7, "end": 7})
    assert examine(copy).report.status is Status.CLEAN
    assert sorted(each.name for each in rows.path.parent.iterdir()) == ["opencode.db", "opencode.repaired.db"]


def test_in_place_the_rows_change_while_opencode_has_it_open_and_a_backup_stays(rows: Rows) -> None:
    with closing(rows.connect()) as opencode:
        _broken(rows)
        opencode.execute("update session set project_id = 'q'")
        done = examine(rows.path)
        assert done.remedy is not None
        backup = done.remedy.in_place().backup
        assert backup is not None
        assert opencode.execute("select count(*) from part where data like '%\"error\"%'").fetchone() == (1,)
    assert backup.name == "opencode.db.bak"
    assert examine(rows.path).report.status is Status.CLEAN
    assert _findings_of(examine(backup)) == [("dangling-call", "late", "message msg_2")]


def test_a_row_that_changed_meanwhile_is_not_overwritten(rows: Rows) -> None:
    _broken(rows)
    done = examine(rows.path)
    with closing(rows.connect()) as db:
        finished = json.dumps(_tool("late", "completed", output="in time"))
        db.execute("update part set data = ? where id = 'prt_msg_2_0'", (finished,))
    assert done.remedy is not None
    for write in (done.remedy.in_place, done.remedy.beside):
        with pytest.raises(ConflictError, match="part prt_msg_2_0 was changed meanwhile"):
            write()
    assert _data(rows.path, "part", "prt_msg_2_0")["state"]["output"] == "in time"
    assert not list(rows.path.parent.glob("*.repaired*"))
    assert not list(rows.path.parent.glob(".*"))


def test_a_folder_without_write_permission_is_reported(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(rows)
    done = examine(rows.path)
    assert done.remedy is not None

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(UnavailableError, match="No space left"):
        done.remedy.beside()
    assert [each.name for each in rows.path.parent.iterdir()] == ["opencode.db"]


def test_documents_that_are_not_json_are_omitted_from_the_copy_and_stay_in_place(rows: Rows) -> None:
    rows.session()
    rows.message("msg_1", "user", {"type": "text", "text": "Look."})
    rows.message("msg_2", "assistant", {"type": "text", "text": "Seen."}, at=2)
    with closing(rows.connect()) as db:
        db.execute("update message set data = '{\"role' where id = 'msg_2'")
        db.execute("insert into part values ('prt_x', 'msg_1', 'ses_1', 1, x'00ff')")
    done = examine(rows.path)
    assert _findings_of(done) == [("broken-row", None, "part prt_x"), ("broken-row", None, "message msg_2")]
    assert (done.report.status, done.report.findings[0].lost) == (Status.LOSSY, "a row")
    assert done.remedy is not None
    copy = done.remedy.beside().path
    assert (examine(copy).report.status, examine(copy).report.messages) == (Status.CLEAN, 1)
    done.remedy.in_place()
    assert _findings_of(examine(rows.path)) == _findings_of(done)


def test_parts_without_their_message_are_reported(rows: Rows) -> None:
    rows.session()
    rows.add("part", "prt_1", "msg_gone", "ses_1", 1, "{}")
    done = examine(rows.path)
    assert (_findings_of(done), done.remedy) == ([("orphan-part", None, "message msg_gone")], None)


def test_sessions_of_the_newer_tables_are_read_if_the_older_are_empty(rows: Rows) -> None:
    rows.session()
    done_call = {
        "type": "tool",
        "id": "a",
        "name": "f",
        "state": {"status": "completed", "input": {}, "content": []},
    }
    failed = {
        "type": "tool",
        "id": "e",
        "name": "f",
        "state": {"status": "error", "error": {"message": "no"}},
    }
    pending = {"type": "tool", "id": "b", "name": "f", "state": {"status": "pending", "input": '{"cut'}}
    rows.newer("2", "assistant", {"content": [done_call, failed, pending, "odd"], "cost": 1}, seq=2)
    rows.newer("1", "user", {"text": "Look."}, seq=1)
    rows.newer("0", "model-switched", {"model": {}}, seq=0)
    done = examine(rows.path)
    assert (_findings_of(done), done.report.messages) == ([("dangling-call", "b", "session_message 2")], 2)
    assert done.remedy is not None
    copy = done.remedy.beside().path
    closed = _data(copy, "session_message", "2")
    assert closed["content"][:2] == [done_call, failed]
    assert closed["content"][2]["state"] == {
        "status": "error",
        "input": {},
        "content": [],
        "structured": {},
        "error": {"type": "unknown", "message": UNKNOWN},
    }
    assert closed["cost"] == 1
    assert examine(copy).report.status is Status.CLEAN


def test_the_rules_of_a_provider_can_be_applied(rows: Rows) -> None:
    rows.session()
    rows.message("msg_1", "assistant", {"type": "text", "text": "I begin."})
    assert examine(rows.path).report.status is Status.CLEAN
    document = examine(rows.path, profile="anthropic").report
    assert (document.profile, [found.code for found in document.findings]) == (
        "anthropic",
        ["starts-with-response"],
    )


def test_a_wrong_format_name_is_refused(rows: Rows) -> None:
    document = examine(rows.path, named="codex").report
    assert (document.reason, document.problem) == (
        "wrong-format",
        "this is opencode, not codex; leave --format out",
    )


def test_a_damaged_database_is_reported(rows: Rows) -> None:
    _broken(rows)
    body = bytearray(rows.path.read_bytes())
    body[4096:] = b"\xff" * (len(body) - 4096)
    rows.path.write_bytes(bytes(body))
    document = examine(rows.path).report
    assert (document.status, document.reason) == (Status.UNREADABLE, "damaged")


def test_a_locked_database_is_reported(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.doctor.sqlite_files.BUSY_TIMEOUT_MS", 10)
    _broken(rows)
    done = examine(rows.path)
    assert done.remedy is not None
    with closing(rows.connect()) as db:
        db.execute("begin immediate")
        db.execute("update session set project_id = 'q'")
        with pytest.raises(UnavailableError, match="locked"):
            done.remedy.in_place()
