"""Many sleeping sessions: bytes of each, cost of a node with them, and cost of a million tokens.

The bench creates stores with 1,000, 10,000 and 100,000 sessions on real servers, each session with one finished turn.
The bytes of a session are fitted over the sizes. CPU time is that of a process with all its threads, and of the store's
servers. Other work on the machine changes it little. `docs/design/ten_million_sessions.md` extrapolates from
these results.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import asyncpg
import msgspec
import nats

from midstream.engine.listing import batch_of
from midstream.session import session as sessions
from midstream.session.records import EpochStarted, Record, Sync
from midstream.session.session import Session
from midstream.session.turn.commands import Recover
from midstream.store.contract import Batch, Store
from midstream.store.store_registry import open_store
from tests.nats_engine import running_cluster
from tests.postgres_engine import running_engine
from tests.session.turn_stories import answers, asks, ended, sends, writes

SIZES = (1_000, 10_000, 100_000)
IDLE_SIZE = 10_000
IDLE_S = 125.0
"""Seconds in which a node is idle, with two sweeps of retention."""
SETTLE_S = 5.0
CONCURRENT_FILLS = 64
PAGE = 50
NODES = (2, 4, 8)
APPENDS_A_NODE, SESSIONS_A_NODE = 300, 10
TURNS, TOKENS, TOKEN_S = 40, 200, 0.02
READS = 5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Bytes of the tables of this schema, and of their indexes.
FIND_BYTES = """
select sum(pg_table_size(c.oid))::bigint, sum(pg_indexes_size(c.oid))::bigint
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relkind = 'r'
"""
# Connections that listen for notifications, and all connections except that of the bench.
FIND_CONNECTIONS = """
select count(*) filter (where query ilike 'listen%'), count(*) - 1
from pg_stat_activity where backend_type = 'client backend'
"""


class Size(msgspec.Struct):
    """A store with `sessions` sleeping sessions, and one node that starts on it."""

    sessions: int
    table_bytes: float
    index_bytes: float
    """0 if a store reports only the sum."""
    start_s: float
    """Seconds until a node has opened the store and found no turn to recover."""
    node_bytes: float
    """Memory of that node."""
    page_ms: float
    """Milliseconds for the list of the newest 50 sessions."""
    orphans_ms: float
    """Milliseconds for the search for turns without a node, which each node repeats."""


class Idle(msgspec.Struct):
    """An idle node with `IDLE_SIZE` sleeping sessions."""

    node_cores: float
    """Share of a core that the process uses, user and system, with sweeps of retention."""
    store_cores: float
    """Share of a core that the store's servers use for one node; 0 if the store is a file."""


class Tokens(msgspec.Struct):
    """Cost of a million tokens, in turns that stream 50 tokens a second each."""

    node_cpu_s: float
    store_cpu_s: float
    log_bytes: float
    """Bytes written to the write-ahead log; for JetStream the growth of its streams."""
    records: float


class Signals(msgspec.Struct):
    """Nodes that append concurrently, each to its own sessions, which no other node reads."""

    nodes: int
    appends_per_s: float
    sent_per_append: float
    received_per_append: float
    """Signals received by all nodes together."""
    connections_per_node: float


class StorePoint(msgspec.Struct):
    """One kind of store."""

    store: str
    record_bytes: int
    """Bytes of all records of one session."""
    records: int
    sizes: list[Size]
    bytes_per_session: float
    """Slope of the regression line through the sizes."""
    idle: Idle
    tokens: Tokens
    signals: list[Signals]


class Server(msgspec.Struct):
    """Servers of a store, with the measurements of the bench."""

    name: str
    url: Callable[[str], str]
    """Return the address of the store with this name."""
    pids: Sequence[int]
    stored: Callable[[str], Awaitable[tuple[float, float]]]
    """Return the bytes of the store with this name, and those of its indexes."""
    written: Callable[[str], Awaitable[float]]
    """Return all bytes written for the store so far."""
    traffic: Callable[[], Awaitable[tuple[float, float]]] | None = None
    """Return the messages that the servers received and sent. Each append itself is one of each."""


# --- sleeping sessions


def turn() -> list[tuple[list[Record], Session, Session]]:
    """Return the appends of a turn with one call: the records, and the session before and after them."""
    at = 1_700_000_000.0
    state = Session()
    done = []
    for command in (
        sends("Which of the tests in this folder fail, and why? Run them and look at the first one."),
        asks(writes("a")),
        ended("a", "collected 311 items; 310 passed, 1 failed in 4.2 s. " * 6),
        answers("One of 311 tests fails. " * 20, response=2),
    ):
        records: list[Record] = [EpochStarted(1, "node-0", at)] if not state.epoch else []
        after = sessions.fold([(1, record) for record in records], state)
        found = sessions.decide(after, command, epoch=1, at=at)
        records += found
        after = sessions.fold([(1, record) for record in found], after)
        done.append((records, state, after))
        state = after
    assert not state.is_live
    assert not sessions.decide(state, Recover(), epoch=1, at=at)
    return done


async def fill(store: Store, names: Sequence[str]) -> None:
    """Create sessions with one finished turn each."""
    appends = [batch_of(records, (), before, after, epoch=1) for records, before, after in turn()]
    waiting = iter(names)

    async def work() -> None:
        for name in waiting:
            epoch = await store.claim(name, at=time.time())
            for batch in appends:
                mark = batch.mark and msgspec.structs.replace(batch.mark, at=time.time())
                moved = msgspec.structs.replace(batch, epoch=epoch, mark=mark, sync=Sync.NORMAL)
                await store.append(name, moved)
            await store.release(name, epoch=epoch)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENT_FILLS):
            group.create_task(work())


# --- processes


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU seconds, user and system, of processes and their children, with those that have ended."""
    parents: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for each in Path("/proc").iterdir():
        if not each.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (each / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(each.name))
            spent[int(each.name)] = sum(map(int, fields[11:15])) / TICKS_PER_S
    total, open_ = 0.0, [*pids]
    while open_:
        pid = open_.pop()
        total += spent.get(pid, 0.0)
        open_ += parents.get(pid, [])
    return total


def resident_bytes(pid: int) -> int:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


@contextmanager
def node_process(url: str) -> Iterator[tuple[int, float]]:
    """Run a node in its own process; yield the process id and the seconds of its start."""
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.population", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield child.pid, float(child.stdout.readline())
    finally:
        child.kill()
        child.communicate()


async def _run_node(url: str) -> None:
    from midstream.engine.agent import Agent  # noqa: PLC0415 - only the child needs it
    from midstream.engine.host import Host  # noqa: PLC0415 - only the child needs it
    from midstream.testing.scripted_model import ScriptedModel  # noqa: PLC0415 - only the child needs it

    began_at = time.perf_counter()
    host = Host(Agent(ScriptedModel([])), url)
    await host.start()
    await host.wait_for_recovery()
    print(time.perf_counter() - began_at, flush=True)
    await asyncio.Event().wait()


# --- sizes


async def measure_sizes(server: Server, sizes: Sequence[int] = SIZES) -> tuple[list[Size], Idle]:
    """Fill one store, and measure it at each size. Measure an idle node at `IDLE_SIZE`."""
    found, made, idle = [], 0, Idle(0.0, 0.0)
    for size in sizes:
        async with _open(server.url("sizes")) as store:
            await fill(store, [f"session-{number:09}" for number in range(made, size)])
        made = size
        table, index = await server.stored("sizes")
        with node_process(server.url("sizes")) as (pid, start_s):
            await asyncio.sleep(SETTLE_S)
            memory = resident_bytes(pid)
        async with _open(server.url("sizes")) as store:
            await _list(store, live=None, limit=1)  # the first read fills the caches
            page_ms = await _median_ms(lambda store=store: _list(store, live=None, limit=PAGE))  # type: ignore[misc]
            orphans_ms = await _median_ms(lambda store=store: _list(store, live=True, limit=None))  # type: ignore[misc]
        found.append(Size(size, table, index, round(start_s, 3), memory, page_ms, orphans_ms))
        if size == IDLE_SIZE:
            idle = await measure_idle(server, "sizes")
    return found, idle


@asynccontextmanager
async def _open(url: str) -> AsyncIterator[Store]:
    store = open_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def _list(store: Store, *, live: bool | None, limit: int | None) -> None:
    async for _ in store.list(live=live, limit=limit):
        pass


async def _median_ms(work: Callable[[], Awaitable[None]]) -> float:
    times = []
    for _ in range(READS):
        began_at = time.perf_counter()
        await work()
        times.append(time.perf_counter() - began_at)
    return round(1000 * statistics.median(times), 2)


def slope(sizes: Sequence[Size]) -> float:
    """Return the bytes of one more session: the slope of the least-squares line through all sizes."""
    counts = [size.sessions for size in sizes]
    stored = [size.table_bytes + size.index_bytes for size in sizes]
    return statistics.linear_regression(counts, stored).slope


async def measure_idle(server: Server, name: str) -> Idle:
    """Measure an idle node with sleeping sessions."""
    quiet = cpu_s(server.pids)
    await asyncio.sleep(SETTLE_S)
    quiet = (cpu_s(server.pids) - quiet) / SETTLE_S
    with node_process(server.url(name)) as (pid, _):
        await asyncio.sleep(SETTLE_S)
        node, store_s, began_at = cpu_s([pid]), cpu_s(server.pids), time.monotonic()
        await asyncio.sleep(IDLE_S)
        passed_s = time.monotonic() - began_at
        node, store_s = cpu_s([pid]) - node, cpu_s(server.pids) - store_s
    return Idle(round(node / passed_s, 5), round(max(0.0, store_s / passed_s - quiet), 5))


# --- tokens


async def measure_tokens(server: Server) -> Tokens:
    """Measure turns that stream their tokens concurrently."""
    from midstream.engine.agent import Agent  # noqa: PLC0415 - as in a node
    from midstream.engine.host import Host  # noqa: PLC0415 - as in a node
    from midstream.testing.scripted_model import ScriptedModel, text  # noqa: PLC0415 - as in a node

    model = ScriptedModel([text("word " * TOKENS)], delay_s=TOKEN_S)
    async with Host(Agent(model), server.url("tokens")) as host:
        await asyncio.gather(*(host.ask(f"warm-{number}", "go") for number in range(TURNS)))
        node, store_s = cpu_s([os.getpid()]) - cpu_s(server.pids), cpu_s(server.pids)
        written, records = await server.written("tokens"), await _count(host.store)
        await asyncio.gather(*(host.ask(f"s-{number}", "go") for number in range(TURNS)))
        node = cpu_s([os.getpid()]) - cpu_s(server.pids) - node
        store_s = cpu_s(server.pids) - store_s
        written = await server.written("tokens") - written
        records = await _count(host.store) - records
    each = 1e6 / (TURNS * TOKENS)
    return Tokens(
        round(node * each, 1), round(store_s * each, 1), round(written * each), round(records * each)
    )


async def _count(store: Store) -> int:
    return sum([info.end async for info in store.list()])


# --- signals


async def measure_signals(server: Server, count: int) -> Signals:
    """Measure several nodes that append concurrently."""
    name = f"signals{count}"
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(_open(server.url(name))) for _ in range(count)]
        await asyncio.sleep(1.5)  # until the nodes have found each other
        epochs = {
            (at, number): await store.claim(f"s-{at}-{number}", at=0.0)
            for at, store in enumerate(stores)
            for number in range(SESSIONS_A_NODE)
        }
        counted = _SignalCounter(server, name, count)
        await stack.enter_async_context(counted.counting())
        begun = await counted.read()

        async def work(at: int, number: int) -> None:
            for end in range(APPENDS_A_NODE // SESSIONS_A_NODE):
                batch = Batch([b'{"type":"delta"}'], end, epochs[at, number], Sync.NORMAL)
                await stores[at].append(f"s-{at}-{number}", batch)

        began_at = time.perf_counter()
        await asyncio.gather(*(work(*key) for key in epochs))
        passed_s = time.perf_counter() - began_at
        await asyncio.sleep(0.3)
        sent, received, connections = [
            now - then for now, then in zip(await counted.read(), begun, strict=True)
        ]
        connections = (await counted.read())[2]
    appends = count * APPENDS_A_NODE
    if server.traffic is not None:
        sent, received = sent - appends, received - appends
    return Signals(
        count,
        round(appends / passed_s),
        round(sent / appends, 2),
        round(received / appends, 2),
        round(connections / count, 1),
    )


class _SignalCounter:
    """Counts the signals between nodes."""

    def __init__(self, server: Server, name: str, nodes: int) -> None:
        self._server = server
        self._nodes = nodes
        self._name = name
        self._received = 0
        self._operator: asyncpg.Connection | None = None

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        if self._server.traffic is not None:
            yield
            return
        self._operator = await asyncpg.connect(self._server.url("").partition("&schema")[0])
        await self._operator.add_listener(f"midstream_{self._name}", self._count)
        try:
            yield
        finally:
            await self._operator.close()

    def _count(self, *_: object) -> None:
        self._received += 1

    async def read(self) -> tuple[float, float, float]:
        """Return the signals sent, the signals received by all nodes together, and the open connections."""
        if self._operator is None:
            assert self._server.traffic is not None
            received, sent = await self._server.traffic()
            return received, sent, 1.0 * self._nodes
        listeners, connections = await self._operator.fetchrow(FIND_CONNECTIONS)
        return self._received, self._received * listeners, connections


# --- the servers


@contextmanager
def postgres() -> Iterator[Server]:
    """Run PostgreSQL without syncs, as only bytes and CPU time are measured."""
    with running_engine() as engine:

        async def fetch(statement: str, *values: object) -> asyncpg.Record:
            operator = await asyncpg.connect(engine.url)
            try:
                return await operator.fetchrow(statement, *values)
            finally:
                await operator.close()

        async def stored(name: str) -> tuple[float, float]:
            operator = await asyncpg.connect(engine.url)
            await operator.execute("vacuum")
            await operator.close()
            return tuple(await fetch(FIND_BYTES, name))

        async def written(_: str) -> float:
            return float((await fetch("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))[0])

        yield Server("PostgreSQL", lambda name: f"{engine.url}&schema={name}", [engine.pid], stored, written)


@contextmanager
def jetstream() -> Iterator[Server]:
    """Run one NATS server without syncs. Three servers need three times the bytes."""
    with running_cluster(1, is_synced=False) as cluster:
        [server] = cluster.servers

        async def stored(name: str) -> tuple[float, float]:
            client = await nats.connect(cluster.hosts.split(","))
            total = 0.0
            names = [f"{name}-{number}" for number in range(16)] + [f"{name}-kv"]
            for stream in names:
                answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=30)
                total += msgspec.json.decode(answer.data).get("state", {}).get("bytes", 0)
            await client.close()
            return total, 0.0

        async def written(name: str) -> float:
            return (await stored(name))[0]

        async def traffic() -> tuple[float, float]:
            shown = await asyncio.to_thread(server.read_monitor, "varz")
            return float(shown["in_msgs"]), float(shown["out_msgs"])

        yield Server("JetStream", cluster.url, [server.pid], stored, written, traffic)


def _file_bytes(folder: Path, name: str) -> float:
    return float(sum(path.stat().st_size for path in folder.glob(f"{name}.db*")))


@contextmanager
def sqlite(folder: Path) -> Iterator[Server]:
    """Use SQLite files in a folder."""

    async def stored(name: str) -> tuple[float, float]:
        return _file_bytes(folder, name), 0.0

    async def written(name: str) -> float:
        return (await stored(name))[0]

    yield Server("SQLite", lambda name: str(folder / f"{name}.db"), [], stored, written)


async def measure(server: Server, *, has_peers: bool) -> StorePoint:
    """Measure one kind of store."""
    bodies = [
        body
        for records, before, after in turn()
        for body in batch_of(records, (), before, after, epoch=1).bodies
    ]
    print(f"  {server.name}: sizes, idle, tokens", flush=True)
    sizes, idle = await measure_sizes(server)
    tokens = await measure_tokens(server)
    signals = [await measure_signals(server, count) for count in NODES] if has_peers else []
    return StorePoint(
        server.name,
        sum(map(len, bodies)),
        len(bodies),
        sizes,
        round(slope(sizes), 1),
        idle,
        tokens,
        signals,
    )


def run(folder: Path) -> list[StorePoint]:
    """Measure, print, return."""
    points = []
    with sqlite(folder) as server:
        points.append(asyncio.run(measure(server, has_peers=False)))
    for starting in (postgres, jetstream):
        with starting() as server:
            points.append(asyncio.run(measure(server, has_peers=True)))
    print(table(points))
    return points


def table(points: Sequence[StorePoint]) -> str:
    """Return the figures as text for a terminal."""
    lines = []
    for point in points:
        lines.append(
            f"{point.store}: {point.bytes_per_session:,.0f} bytes a session of {point.records} records with "
            f"{point.record_bytes:,}; idle node {100 * point.idle.node_cores:.2f} % of a core, "
            f"its store {100 * point.idle.store_cores:.2f} %"
        )
        lines += [
            f"  {size.sessions:9,} sessions: start {size.start_s:7.3f} s, node {size.node_bytes / 2**20:6.1f} MiB, "
            f"page {size.page_ms:8.2f} ms, open turns {size.orphans_ms:8.2f} ms"
            for size in point.sizes
        ]
        lines.append(
            f"  a million tokens: node {point.tokens.node_cpu_s:,.0f} s, store {point.tokens.store_cpu_s:,.0f} s, "
            f"{point.tokens.log_bytes / 2**20:,.0f} MiB, {point.tokens.records:,.0f} records"
        )
        lines += [
            f"  {each.nodes} nodes: {each.appends_per_s:,.0f} appends/s, {each.sent_per_append} signals sent and "
            f"{each.received_per_append} received for each, {each.connections_per_node} connections a node"
            for each in point.signals
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    asyncio.run(_run_node(sys.argv[1]))
