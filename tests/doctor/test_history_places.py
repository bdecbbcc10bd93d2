"""The search for histories below a folder: each once, without cycles."""

from __future__ import annotations

from pathlib import Path

from midstream.doctor.history_places import HistoryPlace, places_in
from tests.doctor.files import put


def test_folders_are_searched_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.json", "a.jsonl", "c.txt", ".hidden.json", "sub/d.db"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "z.json").symlink_to(tmp_path / "b.json")
    found = [(place.path.relative_to(tmp_path).as_posix(), place.is_named) for place in places_in([tmp_path])]
    assert found == [("a.jsonl", False), ("b.json", False), ("sub/d.db", False)]


def test_a_given_file_is_examined_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_text("")
    assert list(places_in([path, path])) == [HistoryPlace(path, is_named=True)]


def test_a_storage_of_opencode_is_one_place(tmp_path: Path) -> None:
    storage = put(tmp_path, "opencode.valid")
    assert [place.path for place in places_in([tmp_path])] == [storage]
    assert [place.path for place in places_in([storage])] == [storage]


def test_an_empty_folder_and_a_missing_one_are_given_places(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert list(places_in([path])) == [HistoryPlace(path, is_named=True)]
