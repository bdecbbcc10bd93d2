"""Paths of files: XDG folders, one home for all, and no folder created before it is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from midstream.paths import Paths, make_folder


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MIDSTREAM_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")


def test_the_xdg_folders_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    places = Paths.find()
    assert (places.store.name, places.store.parents[1]) == ("sessions.db", places.data / "projects")
    assert places.state == tmp_path / "state" / "midstream"
    assert places.secrets == tmp_path / "state" / "midstream" / "secrets.db"
    assert list(tmp_path.iterdir()) == []


def test_a_relative_xdg_folder_counts_as_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "data")
    assert Paths.find().data == tmp_path / ".local" / "share" / "midstream"


def test_home_overrides_all_and_the_flag_overrides_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    assert Paths.find() == Paths(tmp_path / "home", tmp_path / "home")
    assert Paths.find(tmp_path / "flag") == Paths(tmp_path / "flag", tmp_path / "flag")


def test_each_project_has_a_store_of_its_own_and_a_chosen_home_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stores = []
    for folder in ("a/my agent", "b/my agent"):
        (tmp_path / folder).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / folder)
        stores.append(Paths.find().store)
        assert Paths.find().store == stores[-1]
        assert stores[-1].parent.name.startswith("my-agent-")
        assert Paths.find(tmp_path / "home").store == tmp_path / "home" / "sessions.db"
    assert len({*stores}) == 2


def test_macos_and_windows_have_their_own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Paths.find().data == tmp_path / "Library" / "Application Support" / "midstream"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert Paths.find().state == tmp_path / "local" / "midstream"


def test_a_created_folder_is_private_to_its_user(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert make_folder(tmp_path / "a" / "b").is_dir()
