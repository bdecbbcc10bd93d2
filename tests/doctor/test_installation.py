"""The checks of the machine, which leave nothing behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from midstream.doctor.installation import CheckResult, checks, file_system_of, has_wal_reset_bug
from midstream.environment import World

NAMES = ["versions", "sqlite", "file system", "permissions", "locks", "disk clock", "clock", "port"]


class _Dated(World):
    def __init__(self, at: float) -> None:
        self._at = at

    def now(self) -> float:
        return self._at


def test_a_good_machine_has_no_problem_and_is_left_unchanged(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    done = list(checks(tmp_path, port=0))
    assert [check.name for check in done] == NAMES
    assert [check for check in done if check.verdict is not CheckResult.OK] == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    assert all(check.verdict is not CheckResult.PROBLEM for check in checks(tmp_path / "a" / "b", port=0))
    assert list(tmp_path.iterdir()) == []


def test_open_permissions_a_wrong_clock_and_a_taken_port_are_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        found = {
            check.name: check for check in checks(tmp_path, port=door.getsockname()[1], world=_Dated(10.0))
        }
    reported = {name: check.verdict for name, check in found.items() if check.verdict is not CheckResult.OK}
    assert reported == {
        "permissions": CheckResult.WARNING,
        "disk clock": CheckResult.WARNING,
        "clock": CheckResult.PROBLEM,
        "port": CheckResult.WARNING,
    }


@pytest.mark.parametrize(
    ("version", "has_bug"),
    [
        ("3.6.23", False),
        ("3.7.0", True),
        ("3.40.1", True),
        ("3.44.5", True),
        ("3.44.6", False),
        ("3.45.0", True),
        ("3.50.6", True),
        ("3.50.7", False),
        ("3.51.2", True),
        ("3.51.3", False),
        ("3.54.1", False),
    ],
)
def test_sqlite_versions_that_can_lose_pages_are_known(version: str, *, has_bug: bool) -> None:
    assert has_wal_reset_bug(version) is has_bug


def test_the_file_system_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("dev / ext4 rw 0 0\nsrv /data nfs4 rw 0 0\nx /data/my\\040disk xfs rw 0 0\nbroken\n")
    found = [
        file_system_of(Path(folder), mounts) for folder in ("/etc", "/data/a", "/data/my disk/a", "/database")
    ]
    assert found == ["ext4", "nfs4", "xfs", "ext4"]
    assert file_system_of(Path("/etc"), tmp_path / "none") == ""
