"""A file is whole, old or new, whatever fails in the middle; a backup is never overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.doctor.file_reading import stamp_of
from midstream.doctor.file_writing import copy_of, write_beside, write_folder_beside, write_in_place
from midstream.errors import ConflictError, MidstreamError, UnavailableError
from tests.search import tried

STEPS = ("replace", "fsync", "open")


class ProcessKilled(BaseException):
    """The process dies here: nothing after this line runs but Python's unavoidable cleanup."""


@pytest.mark.parametrize(
    ("name", "copy"),
    [("a.jsonl", "a.repaired.jsonl"), ("a.b.json", "a.b.repaired.json"), ("a", "a.repaired")],
)
def test_a_copy_has_a_name_after_its_original(name: str, copy: str) -> None:
    assert copy_of(Path(name)).name == copy


def test_the_original_of_a_copy_is_unchanged_and_the_mode_is_kept(tmp_path: Path) -> None:
    path = _original(tmp_path)
    path.chmod(0o640)
    written = write_beside(path, [b"new ", b"text"])
    assert (written.path.read_bytes(), path.read_bytes(), written.backup) == (b"new text", b"old text", None)
    assert written.path.stat().st_mode & 0o777 == 0o640
    assert write_beside(path, [b"newer"]).path.read_bytes() == b"newer"


def test_an_interrupt_at_the_moment_a_draft_is_created_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _original(tmp_path)
    create = os.open

    def create_and_interrupt(*args: Any, **options: Any) -> int:  # noqa: ANN401 - as os.open has them
        os.close(create(*args, **options))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", create_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_beside(path, [b"new"])
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_in_place_every_original_is_kept(tmp_path: Path) -> None:
    path = _original(tmp_path)
    first = write_in_place(path, [b"second"], stamp_of(path))
    second = write_in_place(path, [b"third"], stamp_of(path))
    kept = [first.backup, second.backup]
    assert [each and (each.name, each.read_bytes()) for each in kept] == [
        ("session.jsonl.bak", b"old text"),
        ("session.jsonl.bak2", b"second"),
    ]
    assert path.read_bytes() == b"third"


def test_in_place_a_link_is_followed_and_its_target_replaced(tmp_path: Path) -> None:
    path = _original(tmp_path)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    write_in_place(link, [b"new"], stamp_of(path))
    assert (link.is_symlink(), path.read_bytes()) == (True, b"new")


def test_a_file_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = _original(tmp_path)
    stamp = stamp_of(path)
    with path.open("ab") as other:
        other.write(b", and a line more")
    with pytest.raises(ConflictError):
        write_in_place(path, [b"new"], stamp)
    assert path.read_bytes() == b"old text, and a line more"
    assert not list(tmp_path.glob(".*"))


@given(pieces=st.lists(st.binary(max_size=8), max_size=6), dies_at=st.integers(0, 12), in_place=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=tried(200))
def test_a_death_at_any_step_leaves_no_half_written_file(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], dies_at: int, *, in_place: bool
) -> None:
    path = _original(tmp_path_factory.mktemp("killed"))
    stamp = stamp_of(path)
    with pytest.MonkeyPatch.context() as patch:
        _die_at(patch, dies_at)
        try:
            if in_place:
                write_in_place(path, _dying(pieces, dies_at), stamp)
            else:
                write_beside(path, _dying(pieces, dies_at))
        except ProcessKilled:
            pass
    whole = {b"old text", b"".join(pieces)}
    assert path.read_bytes() in (whole if in_place else {b"old text"})
    seen = [each for each in path.parent.iterdir() if not each.name.startswith(".")]
    assert all(each.read_bytes() in whole for each in seen)
    if path.read_bytes() != b"old text":
        assert (path.parent / "session.jsonl.bak").read_bytes() == b"old text"


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failing_disk_is_reported_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = _original(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(UnavailableError, match="No space left"):
        write_beside(path, [b"new"])
    assert [each.name for each in tmp_path.iterdir()] == ["session.jsonl"]


def test_a_folder_is_copied_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "storage"
    (folder / "part").mkdir(parents=True)
    names = [Path("part", name) for name in ("a", "b", "c")]
    for name in names:
        (folder / name).write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _raise_killed)
        with pytest.raises(ProcessKilled):
            write_folder_beside(folder, names, {})
    assert [each.name for each in tmp_path.iterdir()] == ["storage"]
    written = write_folder_beside(folder, names, {names[1]: b"new", names[2]: None}).path
    assert {each.name: each.read_text() for each in (written / "part").iterdir()} == {"a": "old", "b": "new"}
    with pytest.raises(MidstreamError, match="already exists"):
        write_folder_beside(folder, names, {})


def _original(folder: Path) -> Path:
    path = folder / "session.jsonl"
    path.write_bytes(b"old text")
    return path


def _raise_killed(*_: object, **__: object) -> None:
    raise ProcessKilled


def _dying(pieces: list[bytes], dies_at: int) -> Iterator[bytes]:
    for number, piece in enumerate(pieces):
        if number + 6 == dies_at:
            raise ProcessKilled
        yield piece


def _die_at(patch: pytest.MonkeyPatch, dies_at: int) -> None:
    """Kill the process at the n-th of the relevant steps."""
    count = 0

    def wrapped(real: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **named: object) -> object:
            nonlocal count
            count += 1
            if count == dies_at:
                raise ProcessKilled
            return real(*arguments, **named)

        return step

    for name in STEPS:
        patch.setattr(os, name, wrapped(getattr(os, name)))
