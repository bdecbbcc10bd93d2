"""Secrets of the environment: a private file takes precedence over a variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.cli.env_secrets import read_secret_variable
from midstream.errors import UsageError

NAMES = ("A_TOKEN", "A_TOKEN_FILE", "the token")


def test_a_file_takes_precedence_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_secret_variable(*NAMES) == ""
    monkeypatch.setenv("A_TOKEN", "of the variable")
    assert read_secret_variable(*NAMES) == "of the variable"
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("of the file\n", encoding="ascii")
    monkeypatch.setenv("A_TOKEN_FILE", str(path))
    assert read_secret_variable(*NAMES) == "of the file"


@pytest.mark.parametrize(
    ("body", "mode", "words"),
    [(b"token", 0o644, "readable by other users"), (b"\xff", 0o600, "the token in .* cannot be read")],
)
def test_a_file_that_is_not_private_or_not_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, mode: int, words: str
) -> None:
    path = tmp_path / "token"
    path.write_bytes(body)
    path.chmod(mode)
    monkeypatch.setenv("A_TOKEN_FILE", str(path))
    with pytest.raises(UsageError, match=words):
        read_secret_variable(*NAMES)


def test_a_missing_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="FileNotFoundError"):
        read_secret_variable(*NAMES)
