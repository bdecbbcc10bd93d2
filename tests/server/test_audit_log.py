"""The audit log: whole lines of bounded size, only appended, in a file of this user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.errors import UsageError
from midstream.server.audit_log import LINE_BYTES_MAX, AuditLog
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@spec("SEC-25")
def test_lines_are_appended_to_a_file_of_this_user(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for number in range(2):
        log = AuditLog(path, FakeWorld(at=1_700_000_000.5))
        log.write("read", "admitted", principal="ada", session=f"s{number}")
        log.close()
        log.close()
    assert _lines(path)[1] == {
        "at": "2023-11-14T22:13:20.500Z",
        "event": "read",
        "outcome": "admitted",
        "principal": "ada",
        "address": "",
        "session": "s1",
    }
    assert path.stat().st_mode & 0o777 == 0o600


@spec("SEC-25")
@pytest.mark.parametrize("words", ["x" * 100_000, "\u20ac" * 100_000, "\x00\n" * 50_000, '"' * 9_000])
def test_a_line_is_bounded_and_stays_one_object(tmp_path: Path, words: str) -> None:
    path = tmp_path / "audit.jsonl"
    names = ("principal", "address", "credential", "session", "method", "path", "call", "choice", "target")
    AuditLog(path).write("read", "admitted", **dict.fromkeys(names, words))
    assert len(path.read_bytes()) <= LINE_BYTES_MAX
    [line] = _lines(path)
    assert line["principal"].endswith("\u2026")
    assert len(line["at"]) == 24


@spec("SEC-25")
def test_a_file_that_was_moved_away_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.write("read", "admitted")
    path.rename(tmp_path / "audit.1")
    log.write("delete", "admitted")
    assert [line["event"] for line in _lines(tmp_path / "audit.1") + _lines(path)] == ["read", "delete"]


@spec("SEC-14")
def test_a_link_or_a_file_writable_by_others_is_refused(tmp_path: Path) -> None:
    path, link = tmp_path / "audit.jsonl", tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(UsageError):
        AuditLog(link)
    assert not path.exists()
    path.touch()
    path.chmod(0o622)
    with pytest.raises(UsageError, match="only you may write"):
        AuditLog(path)
