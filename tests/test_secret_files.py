"""Files with secrets: only regular ones of this user, which no other user can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from midstream.errors import UsageError
from midstream.secret_files import SECRET_BYTES_MAX, read_secret_file

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes and links are POSIX")


def _file(folder: Path, content: bytes = b"secret\n", mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_private_file_is_read(tmp_path: Path) -> None:
    assert read_secret_file(_file(tmp_path), what="the key") == "secret\n"
    with pytest.raises(FileNotFoundError):
        read_secret_file(tmp_path / "missing", what="the key")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o610])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match="chmod 600"):
        read_secret_file(_file(tmp_path, mode=mode), what="the key")


def test_a_link_is_followed_only_where_a_person_named_it(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(_file(tmp_path))
    with pytest.raises(UsageError, match="symbolic link"):
        read_secret_file(link, what="the key")
    assert read_secret_file(link, what="the key", follows_links=True) == "secret\n"
    _file(tmp_path, mode=0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_secret_file(link, what="the key", follows_links=True)


def test_what_is_no_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(UsageError, match="regular file"):
            read_secret_file(path, what="the key")


@pytest.mark.parametrize(
    ("content", "words"), [(b"x" * (SECRET_BYTES_MAX + 1), "larger than"), (b"\xff\xfe", "not text")]
)
def test_what_holds_something_else_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_secret_file(_file(tmp_path, content), what="the key")
