from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from midstream.errors import UsageError
from midstream.store.owner import OwnerLock, is_alive, sweep


def test_an_owner_lives_as_long_as_it_holds_its_lock(tmp_path: Path) -> None:
    lock = OwnerLock(tmp_path / "owners", "o1")
    assert is_alive(tmp_path / "owners", "o1")
    assert is_alive(tmp_path / "owners", "o1"), "looking does not kill"
    lock.give_up()
    lock.give_up()
    assert not is_alive(tmp_path / "owners", "o1")


def test_an_owner_nobody_knows_is_dead(tmp_path: Path) -> None:
    assert not is_alive(tmp_path, "o1")


def test_a_dead_owners_file_goes_with_the_first_who_looks(tmp_path: Path) -> None:
    OwnerLock(tmp_path, "o1").drop()
    assert [path.name for path in tmp_path.iterdir()] == ["o1.lock"]
    assert not is_alive(tmp_path, "o1")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_removes_dead_owners_only(tmp_path: Path) -> None:
    living = OwnerLock(tmp_path, "living")
    OwnerLock(tmp_path, "dead").drop()
    sweep(tmp_path)
    assert [path.stem for path in tmp_path.iterdir()] == ["living"]
    living.give_up()


def test_a_sweep_never_takes_away_what_is_just_being_locked(tmp_path: Path) -> None:
    is_over = threading.Event()

    def sweep_on() -> None:
        while not is_over.is_set():
            sweep(tmp_path)

    sweeper = threading.Thread(target=sweep_on)
    sweeper.start()
    try:
        for number in range(300):
            lock = OwnerLock(tmp_path, f"o{number}")
            assert is_alive(tmp_path, lock.owner)
            lock.give_up()
    finally:
        is_over.set()
        sweeper.join()


def test_a_lock_that_cannot_be_taken_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="local file system"):
        OwnerLock(tmp_path / "file", "o1")


def test_the_lock_and_its_folder_are_this_users_only(tmp_path: Path) -> None:
    lock = OwnerLock(tmp_path / "owners", "o1")
    assert (tmp_path / "owners").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "owners" / "o1.lock").stat().st_mode & 0o777 == 0o600
    lock.give_up()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_its_dead_parent_alive(tmp_path: Path) -> None:
    lock = OwnerLock(tmp_path, "o1")
    ready, is_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(is_ready, b"x")
        signal.pause()
    os.read(ready, 1)
    try:
        lock.drop()
        assert not is_alive(tmp_path, "o1")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(is_ready)
