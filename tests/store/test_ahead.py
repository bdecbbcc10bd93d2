"""What is written ahead of its commit: there for whoever opens the database next, in its order, once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from midstream import places
from midstream.core.records import Sync
from midstream.errors import JournalMovedError, LeaseHeldError, LeaseLostError, UsageError
from midstream.store import ahead
from midstream.store.ahead import AHEAD_BYTES, CAN_SYNC, Ahead, AheadFile, seen_in, take_in
from midstream.store.commits import BEHIND_S
from midstream.store.owner import OwnerLock
from midstream.store.reading import reading
from midstream.store.sqlite import SQLiteStore
from midstream.store.writing import AT_ONCE_BYTES_MAX
from midstream.testing.worlds import FakeWorld
from tests.fault.workers import until
from tests.store.stores import bodies, claimed, in_the_database, say

SAID = [Ahead(7, position, 3, b'{"text":"%d"}' % position) for position in range(1, 6)]


class Place:
    """A folder of owners, and what was brought in from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[Ahead] = []

    def take_in(self, owner: str = "next") -> AheadFile | None:
        return take_in(self.folder, owner, self.found.extend, may_write=True)

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.ahead"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def _put(file: AheadFile, entries: list[Ahead] = SAID) -> list[bool]:
    return [file.put(each) for each in entries]


def test_what_a_dead_owner_wrote_is_brought_in_and_its_file_is_gone(place: Place) -> None:
    file = AheadFile(place.folder, "dead")
    assert _put(file) == [True] * 5
    place.take_in()
    assert (place.found, place.files) == (SAID, ["next.ahead"])


def test_what_is_in_the_database_is_not_brought_in_again(place: Place) -> None:
    file = AheadFile(place.folder, "dead")
    _put(file)
    file.forget(5)
    assert bytes(AHEAD_BYTES) == (place.folder / "dead.ahead").read_bytes()
    _put(file, SAID[3:])
    place.take_in()
    assert place.found == SAID[3:]


def test_some_that_are_in_the_database_stay_until_all_are(place: Place) -> None:
    file = AheadFile(place.folder, "dead")
    _put(file)
    file.forget(2)
    assert file.entries == SAID[2:]
    place.take_in()
    assert place.found == SAID


def test_a_closed_file_is_gone_unless_it_has_what_the_database_has_not(place: Place) -> None:
    for owner, entries in (("empty", SAID[:0]), ("full", SAID)):
        file = AheadFile(place.folder, owner)
        _put(file, entries)
        file.close()
    assert place.files == ["full.ahead"]


@pytest.mark.parametrize("cut", range(0, len(SAID[0].body) + 36, 3))
def test_of_an_entry_that_is_not_whole_nothing_is_brought_in(place: Place, cut: int) -> None:
    """A power cut may leave any page of it behind, or none."""
    _put(AheadFile(place.folder, "dead"), SAID[:2])
    path = place.folder / "dead.ahead"
    body = bytearray(path.read_bytes())
    second = 64 + len(SAID[0].body) + 36
    body[second + cut] ^= 1
    path.write_bytes(body)
    place.take_in()
    assert place.found == SAID[:1]


@pytest.mark.parametrize("length", [0, 1, 4096, AHEAD_BYTES - 1])
def test_a_file_whose_owner_died_when_it_made_it_is_removed(place: Place, length: int) -> None:
    (place.folder / "dead.ahead").write_bytes(bytes(length))
    assert place.take_in() is not None
    assert (place.found, place.files) == ([], ["next.ahead"])


def test_what_has_no_room_is_not_put(place: Place) -> None:
    file = AheadFile(place.folder, "a")
    large = Ahead(1, 1, 1, b"x" * (AHEAD_BYTES // 3))
    assert _put(file, [large] * 3) == [True, True, False]
    assert _put(file, [Ahead(1, 3, 1, b"")]) == [False]
    file.forget(2)
    assert file.put(large)
    last = AHEAD_BYTES - 64 - 2 * 36 - len(large.body) - 36
    assert _put(file, [Ahead(1, 2, 1, b"x" * (last + 1)), Ahead(1, 2, 1, b"x" * last)]) == [False, True]
    place.take_in()
    assert len(place.found) == 2


def test_an_owner_that_somebody_sees_puts_nothing_any_more(place: Place) -> None:
    lock = OwnerLock(place.folder, "first")
    first = place.take_in("first")
    assert first is not None
    _put(first, SAID[:2])
    second_lock = OwnerLock(place.folder, "second")
    second = place.take_in("second")
    assert second is not None
    assert place.found == SAID[:2]
    assert [*_put(first, SAID[2:]), *_put(second)] == [False] * 8
    assert place.files == ["first.ahead", "second.ahead"]
    place.found.clear()
    place.take_in("third")
    assert place.found == SAID[:2], "what was refused is not there"
    assert SAID[2].body not in (place.folder / "first.ahead").read_bytes()
    lock.give_up()
    second_lock.give_up()


def test_a_file_that_cannot_be_made_is_said_and_nothing_is_left(place: Place) -> None:
    with pytest.raises(UsageError):
        AheadFile(place.folder / "missing", "a")
    assert take_in(place.folder / "missing", "a", place.found.extend, may_write=True) is None


def test_who_may_not_write_takes_in_what_others_wrote(place: Place) -> None:
    _put(AheadFile(place.folder, "dead"))
    assert take_in(place.folder, "next", place.found.extend, may_write=False) is None
    assert (place.found, place.files) == (SAID, [])


def test_what_cannot_be_brought_in_stays(place: Place) -> None:
    def fail(_found: object) -> None:
        raise OSError("full")

    _put(AheadFile(place.folder, "dead"))
    with pytest.raises(OSError, match="full"):
        take_in(place.folder, "next", fail, may_write=True)
    assert place.files == ["dead.ahead"]
    place.take_in()
    assert place.found == SAID


# --- several at once, and what survives a power cut


@pytest.mark.parametrize("cut", range(0, 4 + 8 + 36, 3))
def test_a_seal_comes_with_its_record_or_both_are_not_there(place: Place, cut: int) -> None:
    sealed = [SAID[0], Ahead(7, 2, 3, b"body", b"the seal"), SAID[2]]
    assert AheadFile(place.folder, "dead").put_all(sealed, is_synced=False)
    assert seen_in(place.folder) == sealed
    path = place.folder / "dead.ahead"
    content = bytearray(path.read_bytes())
    content[64 + len(SAID[0].body) + 36 + cut] ^= 1
    path.write_bytes(content)
    assert seen_in(place.folder) == sealed[:1]


def test_several_that_are_written_in_one_go_stand_behind_what_was_there(place: Place) -> None:
    file = AheadFile(place.folder, "dead")
    _put(file, SAID[:1])
    assert file.put_all(SAID[1:4], is_synced=False)
    _put(file, SAID[4:])
    assert file.entries == SAID == seen_in(place.folder)
    assert not file.is_promised
    place.take_in()
    assert place.found == SAID


def test_of_several_all_have_room_or_none_is_put(place: Place) -> None:
    file = AheadFile(place.folder, "a")
    large = Ahead(1, 1, 1, b"x" * (AHEAD_BYTES // 3))
    assert not file.put_all([large] * 3, is_synced=False)
    assert not file.put_all([SAID[0], SAID[1]._replace(body=b"")], is_synced=False)
    assert seen_in(place.folder) == [] == file.entries
    assert file.put_all([large] * 2, is_synced=False)


def test_several_that_somebody_else_may_not_have_seen_are_not_put(place: Place) -> None:
    lock, file = OwnerLock(place.folder, "first"), AheadFile(place.folder, "first")
    _put(file, SAID[:1])
    take_in(place.folder, "second", place.found.extend, may_write=False)
    assert not file.put_all(SAID[1:], is_synced=False)
    assert file.entries == SAID[:1]
    assert SAID[1].body not in (place.folder / "first.ahead").read_bytes()
    assert not file.put(SAID[1])
    lock.give_up()


class Syncs:
    """The module `os`, noting what is synced, on a disk that may not answer for it, or have no room."""

    def __init__(self, *, answers: bool = True, has_room: bool = True) -> None:
        self.synced: list[str] = []
        self._answers = answers
        self._has_room = has_room

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        self._note(descriptor)
        os.fsync(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        self._note(descriptor)
        os.fdatasync(descriptor)

    def pwrite(self, descriptor: int, content: bytes, start: int) -> int:
        return os.pwrite(descriptor, content if self._has_room else content[:20], start)

    def _note(self, descriptor: int) -> None:
        if not self._answers:
            raise OSError(5, "no answer")
        self.synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)


linux_only = pytest.mark.skipif(not CAN_SYNC, reason="nothing is promised that is not in the database")


@linux_only
def test_what_is_promised_is_synced_and_so_is_the_place_of_its_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, syncs = AheadFile(place.folder, "a"), Syncs()
    monkeypatch.setattr(ahead, "os", syncs)
    monkeypatch.setattr(places, "os", syncs)
    assert file.put_all(SAID[:1], is_synced=False)
    assert (syncs.synced, file.is_promised) == ([], False)
    assert file.put_all(SAID[1:2], is_synced=True)
    assert syncs.synced == [place.folder.name, place.folder.parent.name, "a.ahead"]
    assert file.is_promised
    assert file.put_all(SAID[2:], is_synced=True)
    assert syncs.synced[3:] == ["a.ahead"]
    file.forget(4)
    assert file.is_promised
    file.forget(1)
    assert not file.is_promised


@linux_only
@pytest.mark.parametrize("disk", [Syncs(answers=False), Syncs(has_room=False)], ids=["fails", "is full"])
def test_what_the_disk_does_not_answer_for_is_not_there(
    place: Place, monkeypatch: pytest.MonkeyPatch, disk: Syncs
) -> None:
    file = AheadFile(place.folder, "a")
    _put(file, SAID[:2])
    monkeypatch.setattr(ahead, "os", disk)
    assert not file.put_all(SAID[2:], is_synced=True)
    assert file.entries == SAID[:2] == seen_in(place.folder)
    assert SAID[2].body not in (place.folder / "a.ahead").read_bytes()
    assert not file.put(SAID[2]), "nor is anything put any more"
    assert file.is_stopped


def test_who_looks_before_there_are_owners_sees_nothing(tmp_path: Path) -> None:
    assert seen_in(tmp_path / "missing") == []
    (tmp_path / "dead.ahead").write_bytes(b"")
    assert seen_in(tmp_path) == []


# --- in a store


async def test_words_wait_for_their_commit_and_are_there_for_who_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):
        assert all(say(store, b"%d" % number, expected=number, epoch=epoch) for number in range(1, 4))
        assert in_the_database(path) == [b"0"]
        assert await bodies(store) == [b"0", b"1", b"2", b"3"] == in_the_database(path)
        found = await store.find("s")
        assert found is not None
        assert found.end == 4


async def test_they_are_committed_soon_though_nobody_asks(tmp_path: Path) -> None:
    path, world = tmp_path / "x.db", FakeWorld()
    async with claimed(path, world) as (store, epoch):
        assert say(store, b"1", expected=1, epoch=epoch)
        await world.advance(BEHIND_S)
        await until(lambda: in_the_database(path) == [b"0", b"1"])


async def test_a_closed_store_has_committed_them(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):
        assert say(store, b"1", expected=1, epoch=epoch)
    assert in_the_database(path) == [b"0", b"1"]
    assert [*(tmp_path / "x.db.owners").iterdir()] == []


@pytest.mark.parametrize("sync", [Sync.FULL, Sync.NORMAL])
async def test_what_follows_them_is_behind_them(tmp_path: Path, sync: Sync) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):
        assert say(store, b"1", expected=1, epoch=epoch)
        assert await store.append("s", [b"2", b"3"], expected=2, epoch=epoch, sync=sync) == 4
        assert say(store, b"4", expected=4, epoch=epoch)
        assert await bodies(store) == [b"0", b"1", b"2", b"3", b"4"] == in_the_database(path)


@linux_only
async def test_what_survives_a_power_cut_is_written_ahead_as_well_and_committed_soon(tmp_path: Path) -> None:
    path, world = tmp_path / "x.db", FakeWorld()
    async with claimed(path, world) as (store, epoch):
        assert await store.append("s", [b"1", b"2"], expected=1, epoch=epoch, sync=Sync.FULL) == 3
        assert in_the_database(path) == [b"0"]
        await world.advance(BEHIND_S)
        await until(lambda: in_the_database(path) == [b"0", b"1", b"2"])


@pytest.mark.parametrize("body", [b"x" * (AT_ONCE_BYTES_MAX + 1), b""], ids=["large", "empty"])
async def test_what_is_not_written_ahead_is_committed_with_all_that_was(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):
        assert await store.append("s", [b"1"], expected=1, epoch=epoch, sync=Sync.FULL) == 2
        assert await store.append("s", [b"2", body], expected=2, epoch=epoch, sync=Sync.FULL) == 4
        assert in_the_database(path) == [b"0", b"1", b"2", body]


@linux_only
async def test_a_seal_is_written_ahead_with_its_record_and_an_older_one_never_comes_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):

        async def append(number: int, sync: Sync) -> None:
            seal = b"%d" % (number + 1)
            await store.append("s", [b"%d" % number], expected=number, epoch=epoch, sync=sync, seal=seal)

        await append(1, Sync.FULL)
        await append(2, Sync.FULL)
        assert in_the_database(path) == [b"0"]
        [file] = (tmp_path / "x.db.owners").glob("*.ahead")
        old = file.read_bytes()
        assert await _seal_of(store) == b"3"
        await append(3, Sync.FULL)
        assert await _seal_of(store) == b"4"
        (tmp_path / "x.db.owners" / "dead.ahead").write_bytes(old)
        assert await _found_at(path) == [b"0", b"1", b"2", b"3"]
        assert await _seal_of(store) == b"4"


async def _seal_of(store: SQLiteStore) -> bytes:
    found = await store.find("s")
    assert found is not None
    return found.seal


async def test_an_append_that_does_not_fit_is_refused_as_ever(tmp_path: Path) -> None:
    async with claimed(tmp_path / "x.db") as (store, epoch):
        assert await store.append("s", [b"1"], expected=1, epoch=epoch, sync=Sync.FULL) == 2
        for sync in (Sync.FULL, Sync.NORMAL):
            with pytest.raises(JournalMovedError):
                await store.append("s", [b"x"], expected=1, epoch=epoch, sync=sync)
            with pytest.raises(LeaseLostError):
                await store.append("s", [b"x"], expected=2, epoch=epoch + 1, sync=sync)
        asked = [
            store.append("s", [b"%d" % number], expected=number, epoch=epoch, sync=Sync.FULL)
            for number in (2, 3, 3)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert answers[:2] == [3, 4]
        assert isinstance(answers[2], JournalMovedError)
        assert await bodies(store) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("sync", [Sync.FULL, Sync.NORMAL])
async def test_who_lost_its_epoch_to_its_own_process_is_told_nothing(tmp_path: Path, sync: Sync) -> None:
    async with claimed(tmp_path / "x.db") as (store, epoch):
        assert say(store, b"1", expected=1, epoch=epoch)
        assert await store.claim("s", at=2.0) == epoch + 1
        assert not say(store, b"2", expected=2, epoch=epoch)
        with pytest.raises(LeaseLostError):
            await store.append("s", [b"2"], expected=2, epoch=epoch, sync=sync)
        assert await bodies(store) == [b"0", b"1"]


@linux_only
async def test_a_disk_that_does_not_answer_for_the_file_leaves_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):
        assert await store.append("s", [b"1"], expected=1, epoch=epoch, sync=Sync.FULL) == 2
        monkeypatch.setattr(ahead, "os", Syncs(answers=False))
        assert await store.append("s", [b"2"], expected=2, epoch=epoch, sync=Sync.FULL) == 3
        assert in_the_database(path) == [b"0", b"1", b"2"]
        monkeypatch.undo()
        assert await store.append("s", [b"3"], expected=3, epoch=epoch, sync=Sync.FULL) == 4
        assert in_the_database(path) == [b"0", b"1", b"2", b"3"], "nothing is written ahead any more"


async def test_a_closed_store_has_committed_what_it_was_asked_for_last(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):
        asked = asyncio.ensure_future(store.append("s", [b"1"], expected=1, epoch=epoch, sync=Sync.FULL))
        await asyncio.sleep(0)
    assert await asked == 2
    assert in_the_database(path) == [b"0", b"1"]
    assert [*(tmp_path / "x.db.owners").iterdir()] == []


async def test_a_deleted_session_leaves_none_behind(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):
        assert say(store, b"a secret", expected=1, epoch=epoch)
        assert await store.delete("s")
        [ahead] = (tmp_path / "x.db.owners").glob("*.ahead")
        assert b"secret" not in ahead.read_bytes()
        assert await bodies(store) == []


async def test_with_power_as_durability_nothing_is_written_ahead_without_a_sync(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "x.db", durability="power")
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await store.append("s", [b"0"], expected=0, epoch=epoch, sync=Sync.NORMAL)
    assert not say(store, b"1", expected=1, epoch=epoch)
    await store.close()


async def test_whoever_opens_the_database_sees_all_that_was_told_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):
        assert say(store, b"1", expected=1, epoch=epoch)
        other = SQLiteStore(path)
        await other.open()
        try:
            said = [b"0", b"1"]
            assert await bodies(other) == said
            for _ in range(3):
                body = b"%d" % len(said)
                if not say(store, body, expected=len(said), epoch=epoch):
                    await store.append("s", [body], expected=len(said), epoch=epoch, sync=Sync.NORMAL)
                said.append(body)
                assert await bodies(other) == said
        finally:
            await other.close()


PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
from midstream.core.records import Sync
from midstream.store.sqlite import SQLiteStore

async def main():
    store = SQLiteStore(Path(sys.argv[1]))
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await store.append("s", [b"0"], expected=0, epoch=epoch, sync=Sync.FULL)
    for number in range(1, int(sys.argv[2]) + 1):
        if sys.argv[4] == "words":
            assert store.append_at_once("s", lambda: b"%d" % number, expected=number, epoch=epoch)
        else:
            await store.append("s", [b"%d" % number], expected=number, epoch=epoch, sync=Sync.FULL)
    print("said", flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    store.append_at_once("s", lambda: b"of a zombie", expected=number + 1, epoch=epoch)
    print("woken", flush=True)
    try:
        await store.append("s", [b"of a zombie"], expected=number + 1, epoch=epoch, sync=Sync.NORMAL)
    except Exception as error:
        print(type(error).__name__, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["words", pytest.param("promised", marks=linux_only)])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_what_a_killed_process_had_told_is_not_lost(tmp_path: Path, count: int, kind: str) -> None:
    path = tmp_path / "x.db"
    command = [sys.executable, "-c", PROGRAM, str(path), str(count), "SIGKILL", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("said\n", -signal.SIGKILL), done.stderr
    told = [b"%d" % number for number in range(count + 1)]
    if count < 100:  # some of more may have been committed
        assert in_the_database(path) == [b"0"]
    with reading(path) as reader:
        assert [each.body for each in reader.records("s", 0, 1000)] == told
    for _ in range(2):  # taken in once
        assert asyncio.run(_found_at(path)) == told
    assert [*(tmp_path / "x.db.owners").iterdir()] == []


async def _found_at(path: Path) -> list[bytes]:
    store = SQLiteStore(path)
    await store.open()
    found = await bodies(store)
    await store.close()
    return found


@pytest.mark.skipif(os.name != "posix", reason="stops a process")
@pytest.mark.parametrize("kind", ["words", "promised"])
def test_a_frozen_process_that_wakes_up_tells_nobody_anything(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.db"
    command = [sys.executable, "-c", PROGRAM, str(path), "3", "SIGSTOP", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as frozen:
        try:
            assert frozen.stdout is not None
            assert frozen.stdout.readline() == "said\n"
            os.waitid(os.P_PID, frozen.pid, os.WSTOPPED | os.WNOWAIT)
            assert asyncio.run(_take_over(path)) == [b"0", b"1", b"2", b"3", b"ours"]
            frozen.send_signal(signal.SIGCONT)
            assert frozen.communicate(timeout=60)[0] == f"woken\n{LeaseLostError.__name__}\n"
        finally:
            frozen.kill()
    assert in_the_database(path) == [b"0", b"1", b"2", b"3", b"ours"]


async def _take_over(path: Path) -> list[bytes]:
    """Claim the session of a frozen owner, and append to it."""
    store = SQLiteStore(path, lease_s=0.05)
    await store.open()
    watching = asyncio.create_task(_watch(store))
    async with asyncio.timeout(60):
        epoch = None
        while epoch is None:
            with contextlib.suppress(LeaseHeldError):
                epoch = await store.claim("s", at=2.0)
    await store.append("s", [b"ours"], expected=4, epoch=epoch, sync=Sync.FULL)
    found = await bodies(store)
    watching.cancel()
    await store.close()
    return found


async def _watch(store: SQLiteStore) -> None:
    while True:
        await store.watch({})


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_in_whatever_order_all_that_was_told_is_there_once(
    tmp_path: Path, seed: int
) -> None:
    chance, path = random.Random(seed), tmp_path / "x.db"
    said: list[bytes] = []
    left: list[SQLiteStore] = []
    store = SQLiteStore(path)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    for step in range(150):
        body = b"%d" % step
        match chance.choice([*["say"] * 4, *["append"] * 3, "read", "look", "crash", "claim"]):
            case "say":
                if say(store, body, expected=len(said), epoch=epoch):
                    said.append(body)
            case "append":
                sync = chance.choice([Sync.NORMAL, Sync.FULL])
                several = [body] * chance.randint(1, 3)
                await store.append("s", several, expected=len(said), epoch=epoch, sync=sync)
                said += several
            case "read":
                assert await bodies(store) == said
            case "look" if chance.random() < 0.3:
                other = SQLiteStore(path)
                await other.open()
                assert await bodies(other) == said
                await other.close()
            case "crash" if chance.random() < 0.5:
                assert store._opened is not None
                store._opened.lock.drop()  # as the system does it
                left.append(store)
                store = SQLiteStore(path)
                await store.open()
                assert await bodies(store) == said
                epoch = await store.claim("s", at=1.0)
            case "claim":
                epoch = await store.claim("s", at=1.0)
        with reading(path) as reader:
            assert [each.body for each in reader.records("s", 0, 1000)] == said
    for each in [*left, store]:
        await each.close()
    assert in_the_database(path) == said
