from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstream.errors import UsageError
from midstream.file_safety import (
    READ_BYTES_MAX,
    create_own,
    create_own_database,
    create_own_once,
    find_own,
    follow_own_links,
    open_own,
    quarantine,
    read_own,
    read_secret_text,
    replace_own,
    require_own_database,
    require_own_folder,
    require_regular_database,
)
from tests.spec import spec

STRANGER = 12_345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.mark.parametrize("write", [replace_own, create_own_once])
def test_an_interrupt_at_the_moment_a_draft_is_created_leaves_no_file(
    write: Callable[[Path, bytes], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.open

    def create_and_interrupt(*args: Any, **options: Any) -> int:  # noqa: ANN401 - as os.open has them
        os.close(create(*args, **options))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", create_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "settings", b"new")
    assert list(tmp_path.iterdir()) == []


def _link(place: Path) -> None:
    target = place.with_name("target")
    target.write_text("precious")
    place.symlink_to(target)


def _dangling_link(place: Path) -> None:
    place.symlink_to(place.with_name("nothing"))


def _pipe(place: Path) -> None:
    os.mkfifo(place)


@spec("SEC-55", "SEC-56")
@pytest.mark.parametrize("make", [_link, _dangling_link, _pipe, Path.mkdir])
def test_a_file_that_is_not_regular_is_refused_without_waiting(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    place = tmp_path / "x.lock"
    make(place)
    before = place.lstat()
    for attempt in (
        lambda: find_own(place, "the file"),
        lambda: open_own(place, "the file", os.O_RDWR | os.O_CREAT),
        lambda: read_own(place, "the file"),
        lambda: require_own_database(place, "the file"),
        lambda: require_regular_database(place, "the file"),
    ):
        with pytest.raises(UsageError, match=r"the file .*x\.lock"):
            attempt()
    assert place.lstat() == before
    assert not (tmp_path / "nothing").exists()


@as_root
@spec("SEC-55")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "x"
    place.write_text("theirs")
    os.chown(place, STRANGER, STRANGER)
    with pytest.raises(UsageError, match=f"belongs to user {STRANGER}"):
        read_own(place, "the file")
    folder = tmp_path / "nodes"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(UsageError, match="belongs to"):
        require_own_folder(folder, "the folder")
    require_regular_database(place, "the database")  # Of another program, for reading.


@spec("SEC-56")
def test_a_link_of_this_user_to_a_named_file_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("mine")
    link.symlink_to("target")
    assert follow_own_links(link, "the file") == target
    assert read_own(link, "the file", is_named=True) == b"mine"
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(UsageError, match="too many"):
        follow_own_links(loop, "the file")


@as_root
@spec("SEC-56")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("mine")
    link.symlink_to(target)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(UsageError, match="belongs to"):
        read_own(link, "the file", is_named=True)


@spec("SEC-57")
def test_reads_are_bounded_and_a_secret_must_be_private(tmp_path: Path) -> None:
    place = tmp_path / "x"
    replace_own(place, b"12345")
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert read_own(place, "the file", bytes_max=5, is_secret=True) == b"12345"
    with pytest.raises(UsageError, match="larger than 4 bytes"):
        read_own(place, "the file", bytes_max=4)
    place.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_own(place, "the file", is_secret=True)


def test_writing_replaces_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    place = tmp_path / "x"
    _link(place)
    replace_own(place, b"new")
    assert (place.is_symlink(), place.read_bytes()) == (False, b"new")
    assert (tmp_path / "target").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "x"]


def test_of_two_concurrent_creations_of_a_file_the_first_one_wins(tmp_path: Path) -> None:
    place = tmp_path / "x"
    assert create_own_once(place, b"first")
    assert not create_own_once(place, b"second")
    assert not create_own(place)
    assert place.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@spec("SEC-56")
def test_a_database_is_checked_with_its_companions(tmp_path: Path) -> None:
    place = tmp_path / "x.db"
    create_own_database(place, "the database")
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    require_own_database(place, "the database")
    _link(tmp_path / "x.db-wal")
    for examine in (require_own_database, require_regular_database, create_own_database):
        with pytest.raises(UsageError, match=r"x\.db-wal"):
            examine(place, "the database")


@spec("SEC-57")
def test_an_unsuitable_file_is_moved_aside_and_not_its_target(tmp_path: Path) -> None:
    place = tmp_path / "x"
    _link(place)
    aside = quarantine(place)
    assert aside is not None
    assert (aside.is_symlink(), place.is_symlink()) == (True, False)
    assert (tmp_path / "target").read_text() == "precious"
    assert quarantine(place) is None


def _secret(folder: Path, content: bytes = b"secret\n", mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_private_file_can_be_read(tmp_path: Path) -> None:
    assert read_secret_text(_secret(tmp_path), "the key") == "secret\n"
    with pytest.raises(FileNotFoundError):
        read_secret_text(tmp_path / "missing", "the key")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o610])
def test_a_file_accessible_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match="chmod 600"):
        read_secret_text(_secret(tmp_path, mode=mode), "the key")


def test_a_link_is_followed_only_where_a_person_named_it(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(_secret(tmp_path))
    with pytest.raises(UsageError, match="symbolic link"):
        read_secret_text(link, "the key")
    assert read_secret_text(link, "the key", is_named=True) == "secret\n"
    _secret(tmp_path, mode=0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_secret_text(link, "the key", is_named=True)


def test_a_read_of_a_fifo_or_folder_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(UsageError, match="regular file"):
            read_secret_text(path, "the key")


@pytest.mark.parametrize(
    ("content", "words"), [(b"x" * (READ_BYTES_MAX + 1), "larger than"), (b"\xff\xfe", "not text")]
)
def test_a_file_with_other_content_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_secret_text(_secret(tmp_path, content), "the key")
