"""Cost of durability: steps with effects on SQLite, compared with SQLite alone on this machine.

    python -m bench.steps [--json FILE] [--folder DIR] [--rounds N] [--sessions 1,10,100]

A step has the appends of one tool call with effects: `response_completed` + `call_started`, synced, then
`call_ended` + `step_committed` + `attempt_started`, not synced by itself. Each session does one step after the other,
and sessions run concurrently. The ceiling is group commit on apsw with the same payload and without checks.

Times are medians over rounds in which the contestants alternate, as shared disks change from one second to the next.
Syncs and bytes are counted in a separate run, in a file system written in Python: every write to the disk, with
checkpoints and closing.
"""
# ruff: noqa: N802 - the methods of a file system have SQLite's names

from __future__ import annotations

import argparse
import asyncio
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import apsw
import msgspec

from midstream.history.messages import Response, Text, ToolCall, ToolResult
from midstream.session.calls import CallPlan
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    ResponseCompleted,
    StepCommitted,
    Sync,
    encode,
)
from midstream.store.contract import Batch, Store
from midstream.store.guard.guarded_store import guard_store
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.database import PAGE_BYTES

STEPS_A_ROUND = 10_000
STEPS_A_SESSION_MAX = 600
"""A round of one session has 600 steps, of ten 6000, of a hundred 10,000: about a second each."""


class Point(msgspec.Struct):
    """Results of one contestant with one number of sessions."""

    name: str
    sessions: int
    steps_per_s: float
    of_ceiling: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_step: float
    syncs_per_step: float
    bytes_per_step: float


class Round(msgspec.Struct):
    """One measured run."""

    steps: int
    seconds: float
    cpu_s: float
    latencies_s: list[float]


Step = Callable[[str], Awaitable[None]]
"""Runs one step of the named session."""
Contestant = Callable[[Path, "str | None"], AbstractAsyncContextManager[Step]]
"""Opens a new database (path, VFS), and yields a function that runs steps in it."""


# --- the payload, encoded once, so that only the store is measured


def payload() -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return the bodies of a step's two appends: 1.1 KB in five records of 48 to 501 bytes."""
    call = ToolCall("call_0123456789abcdef01234567", "run_command", '{"command": "make test", "cwd": "."}')
    text = Text("I will run the tests now and look at the first failure that they show me. " * 2)
    at = 1_790_000_000.123
    first = (
        ResponseCompleted(3, 7, 1, Response((text, call)), at, (CallPlan(call.id, "d" * 32),)),
        CallStarted(3, 7, call.id, 1, at),
    )
    second = (
        CallEnded(3, 7, ToolResult(call.id, "collected 311 items; 311 passed in 4.2 s. " * 6), at),
        StepCommitted(3, 7),
        AttemptStarted(3, 8, 1, at),
    )
    return tuple(encode(record) for record in first), tuple(encode(record) for record in second)


BEFORE_TOOL, AFTER_TOOL = payload()


# --- the contestants


@asynccontextmanager
async def our_store(path: Path, vfs: str | None) -> AsyncIterator[Step]:
    """Yield a step on `SQLiteStore` as a host uses it: guarded, with position and epoch, two appends a step."""
    async with steps_into(guard_store(SQLiteStore(path, vfs=vfs))) as step:
        yield step


@asynccontextmanager
async def steps_into(store: Store) -> AsyncIterator[Step]:
    """Open a store, and yield a step: two appends at the expected position, one of each durability."""
    await store.open()
    ends: dict[str, tuple[int, int]] = {}

    async def step(session: str) -> None:
        if session not in ends:
            ends[session] = await store.claim(session, at=0.0), 0
        epoch, end = ends[session]
        end = await store.append(session, Batch(BEFORE_TOOL, expected=end, epoch=epoch, sync=Sync.FULL))
        end = await store.append(session, Batch(AFTER_TOOL, expected=end, epoch=epoch, sync=Sync.NORMAL))
        ends[session] = epoch, end

    try:
        yield step
    finally:
        await store.close()


@asynccontextmanager
async def raw_group_commit(path: Path, vfs: str | None) -> AsyncIterator[Step]:
    """Yield a step of the ceiling: a thread inserts all waiting rows and commits them, without checks."""
    loop = asyncio.get_running_loop()
    waiting: queue.SimpleQueue[Inserts | None] = queue.SimpleQueue()
    db = apsw.Connection(str(path), vfs=vfs)
    db.execute(f"pragma page_size = {PAGE_BYTES}")
    db.execute("pragma journal_mode = wal")
    db.execute(
        "create table record (session integer, position integer, epoch integer, body blob,"
        " primary key (session, position))"
    )
    writer = threading.Thread(target=_write_all, args=(db, waiting, loop))
    writer.start()
    ends: dict[str, int] = {}

    async def append(session: str, bodies: Sequence[bytes], *, is_full: bool) -> None:
        end = ends.get(session, 0)
        ends[session] = end + len(bodies)
        rows = [(int(session), end + n, 1, body) for n, body in enumerate(bodies, start=1)]
        done: asyncio.Future[None] = loop.create_future()
        waiting.put(Inserts(rows, is_full, done))
        await done

    async def step(session: str) -> None:
        await append(session, BEFORE_TOOL, is_full=True)
        await append(session, AFTER_TOOL, is_full=False)

    try:
        yield step
    finally:
        waiting.put(None)
        await asyncio.to_thread(writer.join)
        db.close()


class Inserts(msgspec.Struct):
    """One append of the ceiling."""

    rows: list[tuple[int, int, int, bytes]]
    is_full: bool
    done: asyncio.Future[None]


def _write_all(
    db: apsw.Connection,
    waiting: queue.SimpleQueue[Inserts | None],
    loop: asyncio.AbstractEventLoop,
) -> None:
    was_full = None
    while True:
        batch = [waiting.get()]
        while not waiting.empty():
            batch.append(waiting.get())
        inserts = [one for one in batch if one is not None]
        if inserts:
            is_full = any(one.is_full for one in inserts)
            if is_full is not was_full:
                db.execute(f"pragma synchronous = {'full' if is_full else 'normal'}")
                was_full = is_full
            db.execute("begin immediate")
            db.executemany(
                "insert into record values (?, ?, ?, ?)",
                [row for one in inserts for row in one.rows],
            )
            db.execute("commit")
            loop.call_soon_threadsafe(_resolve, inserts)
        if len(inserts) < len(batch):
            return


def _resolve(inserts: Sequence[Inserts]) -> None:
    for one in inserts:
        one.done.set_result(None)


CONTESTANTS: dict[str, Contestant] = {"ceiling": raw_group_commit, "store": our_store}


# --- measuring


async def run(contestant: Contestant, sessions: int, path: Path, vfs: str | None = None) -> Round:
    """Run one round of a contestant in a new database; opening and closing are not timed."""
    steps = min(STEPS_A_SESSION_MAX, STEPS_A_ROUND // sessions)
    latencies: list[float] = []
    async with contestant(path, vfs) as step:

        async def work(session: str) -> None:
            for _ in range(steps):
                began = time.perf_counter()
                await step(session)
                latencies.append(time.perf_counter() - began)

        names = [str(number) for number in range(1, sessions + 1)]
        await asyncio.gather(*map(step, names))  # claims and first pages
        began, began_cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(work, names))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    return Round(steps * sessions, seconds, cpu_s, latencies)


class Counting(apsw.VFS):
    """The default file system of SQLite, which counts every write and sync."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "")
        self.name = name
        self.syncs = 0
        self.written = 0

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> CountingFile:
        return CountingFile(self, name, flags)


class CountingFile(apsw.VFSFile):
    """A file of `Counting`."""

    def __init__(self, counting: Counting, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._counting = counting

    def xWrite(self, data: bytes, offset: int) -> None:
        self._counting.written += len(data)
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._counting.syncs += 1
        super().xSync(flags)


async def measure(
    contestants: dict[str, Contestant], sessions: int, folder: Path, rounds: int
) -> list[Point]:
    """Measure all contestants. The first one is the ceiling."""
    done: dict[str, list[Round]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, contestant in contestants.items():
            path = folder / f"{name}-{sessions}-{number}.db"
            done[name].append(await run(contestant, sessions, path))
    ceiling = statistics.median(_speed(one) for one in done[next(iter(contestants))])
    points = []
    for name, contestant in contestants.items():
        counting = Counting(f"counting-{name}-{sessions}")
        counted = await run(contestant, sessions, folder / f"{counting.name}.db", counting.name)
        counted_steps = counted.steps + sessions  # with the untimed first steps
        latencies = sorted(second for one in done[name] for second in one.latencies_s)
        speed = statistics.median(_speed(one) for one in done[name])
        points.append(
            Point(
                name=name,
                sessions=sessions,
                steps_per_s=speed,
                of_ceiling=speed / ceiling,
                p50_ms=1000 * latencies[len(latencies) // 2],
                p99_ms=1000 * latencies[len(latencies) * 99 // 100],
                cpu_ms_per_step=1000 * statistics.median(o.cpu_s / o.steps for o in done[name]),
                syncs_per_step=counting.syncs / counted_steps,
                bytes_per_step=counting.written / counted_steps,
            )
        )
    return points


def _speed(one: Round) -> float:
    return one.steps / one.seconds


# --- output


def table(points: Sequence[Point]) -> str:
    """Return the points as text for a terminal."""
    head = ("", "sessions", "steps/s", "of ceiling", "p50 ms", "p99 ms", "CPU ms", "syncs", "KB")
    lines = [f"{head[0]:10}" + "".join(f"{word:>11}" for word in head[1:])]
    lines += [
        f"{p.name:10}{p.sessions:11}{p.steps_per_s:11.0f}{p.of_ceiling:11.2f}{p.p50_ms:11.2f}"
        f"{p.p99_ms:11.2f}{p.cpu_ms_per_step:11.3f}{p.syncs_per_step:11.3f}"
        f"{p.bytes_per_step / 1000:11.1f}"
        for p in points
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the points to this file")
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", default="1,10,100")
    chosen = parser.parse_args()
    points: list[Point] = []
    for sessions in map(int, chosen.sessions.split(",")):
        with tempfile.TemporaryDirectory(dir=chosen.folder, prefix=".bench-") as folder:
            points += asyncio.run(measure(CONTESTANTS, sessions, Path(folder), chosen.rounds))
    print(table(points))
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(points)))


if __name__ == "__main__":
    main()
