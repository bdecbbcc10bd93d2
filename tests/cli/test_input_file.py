"""Files that a command reads or changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize(
    "command",
    [
        ["restore"],
        ["access", "hash"],
        ["cache", "--diff", __file__],
        ["verify", "--against"],
        ["backup", "copy.db", "--store"],
        ["doctor"],
    ],
)
def test_a_missing_file_is_not_found(run: Run, tmp_path: Path, command: list[str]) -> None:
    done = run(*command, tmp_path / "missing")
    assert (done.exit_code, str(tmp_path / "missing") in done.output) == (3, True)


def test_a_missing_file_of_settings_is_wrong_use(run: Run, tmp_path: Path) -> None:
    done = run("verify", "--key-file", tmp_path / "missing")
    assert (done.exit_code, "[usage]" in done.stderr) == (2, True)
