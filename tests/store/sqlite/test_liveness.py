from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.errors import UsageError
from midstream.store.sqlite.liveness import NodeLock, Peers, is_alive, sweep
from tests.spec import spec


def test_a_node_is_alive_while_it_holds_its_lock(tmp_path: Path) -> None:
    lock = NodeLock(tmp_path / "nodes", "o1")
    assert is_alive(tmp_path / "nodes", "o1")
    assert is_alive(tmp_path / "nodes", "o1"), "looking does not kill"
    lock.give_up()
    lock.give_up()
    assert not is_alive(tmp_path / "nodes", "o1")


def test_an_unknown_node_is_dead(tmp_path: Path) -> None:
    assert not is_alive(tmp_path, "o1")


def test_the_file_of_a_dead_node_is_removed_by_the_first_check(tmp_path: Path) -> None:
    NodeLock(tmp_path, "o1").drop()
    assert [path.name for path in tmp_path.iterdir()] == ["o1.lock"]
    assert not is_alive(tmp_path, "o1")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_removes_dead_nodes_only(tmp_path: Path) -> None:
    living = NodeLock(tmp_path, "living")
    NodeLock(tmp_path, "dead").drop()
    sweep(tmp_path)
    assert [path.stem for path in tmp_path.iterdir()] == ["living"]
    living.give_up()


def test_a_sweep_never_removes_a_file_that_is_being_locked(tmp_path: Path) -> None:
    is_over = threading.Event()

    def sweep_on() -> None:
        while not is_over.is_set():
            sweep(tmp_path)

    sweeper = threading.Thread(target=sweep_on)
    sweeper.start()
    try:
        for number in range(300):
            lock = NodeLock(tmp_path, f"o{number}")
            assert is_alive(tmp_path, lock.node)
            lock.give_up()
    finally:
        is_over.set()
        sweeper.join()


def test_a_failed_lock_reports_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        NodeLock(tmp_path / "file", "o1")
    with pytest.raises(UsageError, match="local file system"):
        NodeLock(tmp_path / "no" / "folder", "o1")


class Circle:
    """Two nodes, one of which observes the other, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.us, self.other = NodeLock(folder, "us"), NodeLock(folder, "other")
        self._file = folder / "other.lock"
        self.peers = Peers(folder, self.us, lease_s=10.0)
        self.now = 100.0

    def pass_s(self, seconds: float, *, step_s: float = 0.5, beats: bool = False) -> None:
        for _ in range(int(seconds / step_s)):
            self.now += step_s
            # The real ones are seconds apart; these, too close for a file system's clock, are numbered.
            if beats:
                os.utime(self._file, ns=(int(self.now * 1e9),) * 2)
            self.peers.check_all(now=self.now)

    def give_up(self) -> None:
        self.us.give_up()
        self.other.give_up()


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    circle = Circle(tmp_path)
    assert circle.peers.check_all(now=circle.now)
    assert circle.peers.living == {"other"}
    yield circle
    circle.give_up()


def test_a_node_that_sends_heartbeats_stays_alive_for_any_time(circle: Circle) -> None:
    circle.pass_s(100, beats=True)
    assert circle.peers.living == {"other"}
    assert circle.peers.frozen == frozenset()
    assert circle.peers.may_hold("other")


def test_a_node_silent_for_a_lease_is_frozen_until_its_next_heartbeat(circle: Circle) -> None:
    circle.pass_s(9.5)
    assert circle.peers.may_hold("other")
    circle.pass_s(1)
    assert circle.peers.living == frozenset()
    assert circle.peers.frozen == {"other"}
    assert not circle.peers.may_hold("other")
    circle.pass_s(0.5, beats=True)
    assert circle.peers.may_hold("other")
    assert circle.peers.living == {"other"}


def test_a_pause_of_the_observer_does_not_count_as_silence(circle: Circle) -> None:
    circle.now += 3600  # It was stopped, or the machine was suspended.
    circle.peers.check_all(now=circle.now)
    circle.pass_s(8)
    assert circle.peers.may_hold("other")


def test_a_dead_or_new_node_is_noticed_at_the_next_check(circle: Circle, tmp_path: Path) -> None:
    circle.other.drop()
    assert circle.peers.check_all(now=circle.now)
    assert circle.peers.living | circle.peers.frozen == frozenset()
    third = NodeLock(tmp_path, "third")
    assert circle.peers.check_all(now=circle.now)
    assert not circle.peers.check_all(now=circle.now)
    assert circle.peers.living == {"third"}
    third.give_up()


def test_a_node_sends_heartbeats_only_while_another_node_observes_it(circle: Circle, tmp_path: Path) -> None:
    def beat_of(name: str) -> int:
        return (tmp_path / f"{name}.lock").stat().st_mtime_ns

    os.utime(tmp_path / "us.lock", ns=(0, 0))
    circle.pass_s(2)
    assert beat_of("us") > 0
    circle.other.drop()
    circle.pass_s(1)
    os.utime(tmp_path / "us.lock", ns=(0, 0))
    circle.pass_s(5)
    assert beat_of("us") == 0


def test_two_concurrent_checks_of_a_dead_node_both_find_it_dead(tmp_path: Path) -> None:
    for number in range(50):
        NodeLock(tmp_path, f"o{number}").drop()
    answers: list[bool] = []
    lookers = [
        threading.Thread(target=lambda: answers.extend(is_alive(tmp_path, f"o{n}") for n in range(50)))
        for _ in range(4)
    ]
    for looker in lookers:
        looker.start()
    for looker in lookers:
        looker.join()
    assert not any(answers)


def test_the_lock_and_its_folder_are_private_to_this_user(tmp_path: Path) -> None:
    lock = NodeLock(tmp_path / "nodes", "o1")
    assert (tmp_path / "nodes").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "nodes" / "o1.lock").stat().st_mode & 0o777 == 0o600
    lock.give_up()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_its_dead_parent_alive(tmp_path: Path) -> None:
    lock = NodeLock(tmp_path, "o1")
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


@spec("SEC-55", "SEC-56", "SEC-57")
def test_a_file_that_is_no_lock_file_is_not_locked_and_stays(tmp_path: Path) -> None:
    target = tmp_path / "target.lock"
    target.write_text("precious")
    folder = tmp_path / "nodes"
    folder.mkdir()
    (folder / "link.lock").symlink_to(target)
    (folder / "folder.lock").mkdir()
    os.mkfifo(folder / "pipe.lock")
    for node in ("link", "folder", "pipe", "../target", "..", "", "x" * 500, "a\0b"):
        assert not is_alive(folder, node)
    sweep(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["folder.lock", "link.lock", "pipe.lock"]
    assert target.read_text() == "precious"
    with pytest.raises(UsageError, match=r"link\.lock"):
        NodeLock(folder, "link")
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    with pytest.raises(UsageError, match="is not a folder"):
        NodeLock(linked, "o1")
