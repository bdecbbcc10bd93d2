"""Several servers on NATS JetStream: what the store costs beside them, and how soon others notice something.

Three servers with three copies of each stream, on files that they sync for each message. The ceiling publishes the same
bytes under the same conditions into the same streams with the driver alone, in the same run.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import nats

from bench.fleet import TAKEOVERS, measure_takeovers, measure_tokens
from bench.steps import BEFORE_TOOL
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.jetstream import JetStreamStore
from tests.nats_engine import NatsCluster, running_cluster

SESSIONS = 100
APPENDS_A_SESSION = 60
ROUNDS = 5
Append = Callable[[str], Awaitable[None]]


class JetStreamPoint(msgspec.Struct):
    """Medians over rounds."""

    appends_per_s: float
    raw_appends_per_s: float
    of_raw: float
    """Median of the ratios of rounds that follow one another."""
    live_token_p50_ms: float
    live_token_p99_ms: float
    takeover_p50_ms: float
    takeover_worst_ms: float


@asynccontextmanager
async def our_appends(url: str) -> AsyncIterator[Append]:
    """Appends of a store."""
    store = JetStreamStore(url)
    await store.open()
    sessions: dict[str, tuple[int, int]] = {}

    async def append(session: str) -> None:
        end, epoch = sessions.get(session) or (0, await store.claim(session, at=0.0))
        end = await store.append(session, Batch(BEFORE_TOOL, end, epoch, Sync.FULL))
        sessions[session] = end, epoch

    try:
        yield append
    finally:
        await store.close()


@asynccontextmanager
async def raw_appends(cluster: NatsCluster, name: str) -> AsyncIterator[Append]:
    """The ceiling: messages of the same bytes, each under the condition of the last one of its subject."""
    client = await nats.connect(cluster.hosts.split(","))
    body = b"".join(BEFORE_TOOL)
    seqs: dict[str, int] = {}

    async def append(session: str) -> None:
        number = int(session.rpartition("-")[2]) % 16
        headers = {"Nats-Expected-Last-Subject-Sequence": str(seqs.get(session, 0))}
        answer = await client.request(f"{name}.{number}.raw.{session}", body, timeout=30, headers=headers)
        seqs[session] = msgspec.json.decode(answer.data)["seq"]

    try:
        yield append
    finally:
        await client.close()


async def _appends_per_s(append: Append, prefix: str) -> float:
    names = [f"{prefix}-{number}" for number in range(SESSIONS)]
    await asyncio.gather(*map(append, names))  # claimed

    async def work(name: str) -> None:
        for _ in range(APPENDS_A_SESSION):
            await append(name)

    began_at = time.perf_counter()
    await asyncio.gather(*map(work, names))
    return SESSIONS * APPENDS_A_SESSION / (time.perf_counter() - began_at)


async def measure_appends(cluster: NatsCluster) -> tuple[float, float, float]:
    """Return the appends a second of the store, those of the ceiling, and the ratio."""
    ours, raws = [], []
    async with our_appends(cluster.url("appends")) as our, raw_appends(cluster, "appends") as raw:
        for number in range(ROUNDS):
            ours.append(await _appends_per_s(our, f"r{number}"))
            raws.append(await _appends_per_s(raw, f"r{number}"))
    ratio = statistics.median(one / other for one, other in zip(ours, raws, strict=True))
    return statistics.median(ours), statistics.median(raws), ratio


def run(_folder: Path) -> JetStreamPoint:
    """Measure, print, return."""
    with running_cluster(3) as cluster:
        ours, raw, ratio = asyncio.run(measure_appends(cluster))
        tokens = asyncio.run(measure_tokens(cluster.url("tokens")))
        takeovers = measure_takeovers(
            cluster.url(f"takeover_{number}", streams=2) for number in range(TAKEOVERS)
        )
    result = JetStreamPoint(
        round(ours),
        round(raw),
        round(ratio, 3),
        round(1000 * statistics.median(tokens), 2),
        round(1000 * tokens[int(0.99 * len(tokens))], 2),
        round(1000 * statistics.median(takeovers), 1),
        round(1000 * takeovers[-1], 1),
    )
    for name, value in msgspec.structs.asdict(result).items():
        print(f"  {name.replace('_', ' '):24} {value}")
    return result
