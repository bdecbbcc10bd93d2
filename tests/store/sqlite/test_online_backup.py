"""Copies of a database while servers work on it."""

from __future__ import annotations

import asyncio
import contextlib
import stat
import sys
from pathlib import Path

import apsw
import pytest

from midstream.errors import NotFoundError, StoreDamagedError, UsageError
from midstream.store.sqlite import SQLiteStore, online_backup
from midstream.store.sqlite.online_backup import back_up
from tests.store.stores import append, bodies, found_in

PROGRAM = Path(__file__).with_name("node_process.py")
WAIT_S = 60.0


async def test_each_copy_of_a_busy_database_is_of_one_moment(folder: Path) -> None:
    path, appends = folder / "x.db", 3000
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), str(path), "s", str(appends), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    counts: list[int] = []
    async with asyncio.timeout(WAIT_S):
        assert await process.stdout.readline() == b"owns\n"
        while process.returncode is None and len(counts) < 20:
            copy = folder / f"copy-{len(counts)}.db"
            done = await asyncio.to_thread(back_up, path, copy)
            found = await found_in(copy)
            assert found == [b"%d" % number for number in range(done.records)]
            counts.append(done.records)
        with contextlib.suppress(ProcessLookupError):  # A fast one is done before the copies.
            process.kill()
        await process.wait()
    assert counts == sorted(counts)
    assert counts[-1] > counts[0], "nothing was written between the copies"


async def test_a_session_continues_in_a_copy_while_its_node_is_alive(
    store: SQLiteStore, folder: Path
) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    done = back_up(folder / "x.db", folder / "copy.db")
    assert (done.sessions, done.records, done.bytes) == (1, 1, (folder / "copy.db").stat().st_size)
    assert stat.S_IMODE((folder / "copy.db").stat().st_mode) == 0o600
    copy = SQLiteStore(folder / "copy.db")
    await copy.open()
    later = await copy.claim("s", at=2.0)
    await append(copy, b"b", expected=1, epoch=later)
    assert (later, await bodies(copy), await bodies(store)) == (epoch + 1, [b"a", b"b"], [b"a"])
    await copy.close()


async def test_an_existing_file_is_replaced_only_on_request(store: SQLiteStore, folder: Path) -> None:
    await append(store, b"a", expected=0, epoch=await store.claim("s", at=1.0))
    target = folder / "copy.db"
    target.write_text("mine")
    with pytest.raises(UsageError, match=r"exists.*--force"):
        back_up(folder / "x.db", target)
    assert target.read_text() == "mine"
    back_up(folder / "x.db", target, may_replace=True)
    assert await found_in(target) == [b"a"]
    (folder / "link.db").symlink_to(folder / "x.db")
    for same in ("x.db", "link.db"):
        with pytest.raises(UsageError, match="the database itself"):
            back_up(folder / "x.db", folder / same, may_replace=True)


async def test_a_failed_copy_leaves_nothing_behind(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    for number in range(200):
        await append(store, b"%d" % number * 1000, expected=number, epoch=epoch)
    await store.close()
    damaged = bytearray((folder / "x.db").read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 16_384] = bytes(16_384)
    (folder / "damaged.db").write_bytes(damaged)
    before = _names(folder)
    with pytest.raises(NotFoundError, match="no database"):
        back_up(folder / "none.db", folder / "copy.db")
    with pytest.raises(StoreDamagedError, match="damaged"):
        back_up(folder / "damaged.db", folder / "copy.db")
    with pytest.raises(UsageError, match="cannot be written"):
        back_up(folder / "x.db", folder / "no" / "copy.db")
    assert _names(folder) == before


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(("-wal", "-shm"))}


async def test_progress_rises_to_one(
    store: SQLiteStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, bytes(100_000), expected=0, epoch=epoch)
    monkeypatch.setattr(online_backup, "PAGES_PER_STEP", 10)
    shares: list[float] = []
    back_up(folder / "x.db", folder / "copy.db", progress=shares.append)
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


async def test_another_programs_database_is_refused(folder: Path) -> None:
    db = apsw.Connection(str(folder / "other.db"))
    db.execute("create table t (a)")
    db.close()
    with pytest.raises(UsageError, match="belongs to another program"):
        back_up(folder / "other.db", folder / "copy.db")
