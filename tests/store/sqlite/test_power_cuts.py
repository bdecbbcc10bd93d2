"""Power cuts at any moment: synced records are there, and no journal has a gap."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import apsw
import pytest

from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.group_commit import Durability
from midstream.testing.fake_worlds import FakeWorld
from tests.search import tried
from tests.store.disk import Disk, Note, Operation, after_power_cut

CUTS = tried(250)
SESSIONS = ("a", "b", "c")
PRUNED = b"what the first ones fold to"


async def _run(path: Path, disk: Disk, durability: Durability, chance: random.Random) -> None:
    """Append here and there; note in the disk's log the promises from then on."""
    store = SQLiteStore(path, vfs=disk.name, durability=durability, world=FakeWorld())
    await store.open()
    ends = dict.fromkeys(SESSIONS, 0)
    synced_ends = dict(ends)
    epochs = {session: await store.claim(session, at=1.0) for session in SESSIONS}
    used_epochs = dict.fromkeys(SESSIONS, 0)
    for number in range(80):
        session = chance.choice(SESSIONS)
        if number % 10 == 9:
            epochs[session] = await store.claim(session, at=1.0)
        bodies = [chance.randbytes(chance.randrange(20, 3000)) for _ in range(chance.randint(1, 3))]
        sync = chance.choice([Sync.FULL, Sync.NORMAL, Sync.NORMAL] if number % 40 < 20 else [Sync.FULL])
        ends[session] = await store.append(
            session,
            Batch(
                bodies,
                expected=ends[session],
                epoch=epochs[session],
                sync=sync,
                seal=b"%d" % (ends[session] + len(bodies)) if sync is Sync.FULL else b"",
            ),
        )
        used_epochs[session] = epochs[session]
        if durability == "power" or sync is Sync.FULL:
            synced_ends = dict(ends)
        for is_read in (False, chance.random() < 0.2):
            if is_read:
                await store.read(session, after=0, limit=1)
            disk.log.append(Note(synced_ends, dict(used_epochs)))
        if number % 20 == 19 and ends[session] > 1:
            position = ends[session] - chance.randrange(2)
            [stored] = await store.read(session, after=position - 1, limit=1)
            assert await store.prune(session, PRUNED, position=position, epoch=stored.epoch)
        if number % 25 == 24:
            assert store._opened is not None
            await store._opened.commits.clear_log()
        if chance.random() < 0.1:  # Deltas only.
            ends[session] = await store.append(
                session, Batch([b"word"], expected=ends[session], epoch=epochs[session], sync=Sync.NORMAL)
            )
    await store.close()


def _last_note(log: list[Operation]) -> Note:
    nothing = dict.fromkeys(SESSIONS, 0)
    notes = (operation for operation in reversed(log) if isinstance(operation, Note))
    return next(notes, Note(nothing, nothing))


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["default", "power"])
async def test_after_a_power_cut_each_journal_is_gapless_and_holds_all_synced_records(
    folder: Path, durability: Durability
) -> None:
    chance = random.Random(7)
    disk = Disk(f"power-{durability}")
    await _run(folder / "x.db", disk, durability, chance)
    all_ends = _last_note(disk.log).ends
    has_schema = next(n for n, operation in enumerate(disk.log) if isinstance(operation, Note))
    lost_records = 0
    for number in range(CUTS):
        log = disk.log[: chance.randrange(has_schema, len(disk.log) + 1)]
        found = await _read_state(folder / str(number), after_power_cut(log, chance))
        promised = _last_note(log)
        broken = {
            session: (found.ends[session], promised.ends[session], found.epochs[session])
            for session in SESSIONS
            if found.ends[session] < promised.ends[session]
            # A reader that saw a lost record must be informed: its epoch is never reused.
            or found.epochs[session] <= promised.epochs[session]
        }
        assert broken == {}, f"cut {number} of {durability}"
        lost_records += sum(all_ends.values()) - sum(found.ends.values())
    assert lost_records > 0, "no cut ever lost anything: the disk does not lose its power"


async def _read_state(folder: Path, files: dict[str, bytes]) -> Note:
    """Return the ends of the journals, and the epochs of their next nodes."""
    _write(folder, files)
    store = SQLiteStore(folder / "x.db", durability="process")  # Nothing more is cut.
    await store.open()
    found = Note({}, {})
    for session in SESSIONS:
        journal = await store.read(session, after=0, limit=1000)
        oldest, end = (journal[0].position, journal[-1].position) if journal else (1, 0)
        assert [record.position for record in journal] == [*range(oldest, end + 1)]
        assert [record.position for record in journal if record.body == PRUNED] in ([oldest], [])
        assert oldest == 1 or journal[0].body == PRUNED
        line = await store.find(session)
        assert int(line.seal if line and line.seal else 0) <= end, "sealed with what is not there"
        found.ends[session] = end
        found.epochs[session] = await store.claim(session, at=2.0)
    await store.close()
    shutil.rmtree(folder)
    return found


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for file, content in files.items():
        if not file.endswith("-shm"):  # Memory, not disk.
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(content)


def test_the_disk_of_these_tests_loses_unsynced_data(folder: Path) -> None:
    disk = Disk("power-itself")
    db = apsw.Connection(str(folder / "x.db"), vfs=disk.name)
    db.execute("pragma synchronous = off; create table t (a)")
    db.close()
    outcomes = {bool(after_power_cut(disk.log, random.Random(seed)).get("x.db")) for seed in range(50)}
    assert outcomes == {True, False}
