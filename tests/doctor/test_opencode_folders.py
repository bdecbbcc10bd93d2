"""A storage folder of opencode: broken files, lost parts, and a copy of only the broken files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.doctor.examination import examine
from midstream.doctor.findings import Status
from midstream.doctor.opencode_folders import examine_storage, is_storage
from midstream.errors import ConflictError, UnreadableHistoryError
from tests.doctor.files import put


def test_a_part_without_its_message_is_reported(tmp_path: Path) -> None:
    storage = put(tmp_path, "opencode.valid")
    (storage / "part" / "msg_9").mkdir()
    report = examine(storage).report
    assert [(found.code, found.file) for found in report.findings] == [("orphan-part", "part/msg_9")]


def test_a_truncated_file_is_omitted_from_the_copy(tmp_path: Path) -> None:
    storage = put(tmp_path, "opencode.valid")
    (storage / "part" / "msg_2" / "prt_2.json").write_text('{"id": "prt_2", "ty')
    done = examine(storage)
    assert (done.report.status, done.report.findings[0].code) == (Status.LOSSY, "broken-file")
    assert done.remedy is not None
    copy = done.remedy.beside().path
    files = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*.json"))
    assert files == [
        "message/ses_1/msg_1.json",
        "message/ses_1/msg_2.json",
        "part/msg_1/prt_1.json",
        "part/msg_2/prt_3.json",
        "session/p1/ses_1.json",
    ]


def test_in_place_a_file_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    storage = put(tmp_path, "opencode.broken")
    remedy = examine(storage).remedy
    assert remedy is not None
    part = storage / "part" / "msg_2" / "prt_3.json"
    part.write_text(
        json.dumps({**json.loads(part.read_text()), "state": {"status": "completed", "output": "x"}})
    )
    with pytest.raises(ConflictError):
        remedy.in_place()
    assert "completed" in part.read_text()


def test_another_profile_finds_the_faults_that_its_provider_refuses(tmp_path: Path) -> None:
    storage = put(tmp_path, "opencode.valid")
    tool = storage / "part" / "msg_2" / "prt_3.json"
    tool.write_text(tool.read_text().replace("call_A", "call A"))
    assert examine(storage).report.status is Status.CLEAN
    assert examine(storage, profile="anthropic").report.findings != ()


def test_another_folder_is_not_a_storage(tmp_path: Path) -> None:
    assert not is_storage(tmp_path)
    with pytest.raises(UnreadableHistoryError):
        examine_storage(tmp_path, None, lambda _: None)
