"""Durable Streams with `midstream serve`: the conformance suite, and servers killed under producers and readers.

    python -m tests.dialects.plain_streams [--kills 200] [--seed N] [--suite docs/reference/durable-streams.md]

Producers send each message until it is accepted, with the same place (`Producer-Epoch`, `Producer-Seq`);
readers continue at their last offset. Afterwards each message is in the stream, and at each reader, once and in
order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from midstream.environment import World
from tests import nats_engine, postgres_engine
from tests.dialects.ui_stream import KillableServer, long_form, node, run_servers

Json = dict[str, Any]

HOME = Path(sys.prefix, "plain_streams")
"""The folder in which npm has installed the packages of tests/dialects/streams (tools/judges.py)."""
SUITE = Path(__file__).parent / "streams" / "conformance.test.mjs"
ORIGIN = "https://example.com"
"""The page whose preflight the suite sends."""
RECEIVERS = "http://127.0.0.1"
"""The addresses at which the suite receives webhooks."""
STORY_S = 600.0
SUITE_S = 420.0
REQUEST_S = 30.0
PRODUCERS = 3
PAUSE_S = 0.05
AT_ONCE = 16
"""Messages that producers may be ahead of a kill."""


def lacking() -> str:
    """Return the missing requirements of the suite, or nothing."""
    installed = HOME / "node_modules" / "@durable-streams" / "server-conformance-tests"
    return (
        "" if installed.exists() else "npm did not install the suite of Durable Streams here (make dialects)"
    )


class StreamStory:
    """Producers and readers of one stream.


    Args:
        urls: The servers, on one store.     chance: Chooses a server for each request.
    """

    def __init__(self, urls: Sequence[str], chance: random.Random) -> None:
        self.urls = urls
        self.chance = chance
        self.accepted = 0
        self.repeated = 0
        self.is_over = asyncio.Event()
        self.more = asyncio.Condition()

    def url(self) -> str:
        return f"{self.chance.choice(self.urls)}/v1/stream/s"

    async def create(self, client: httpx2.AsyncClient) -> None:
        made = await client.put(self.url(), headers={"content-type": "application/json"})
        assert made.status_code == 201, made.text

    async def produce(self, client: httpx2.AsyncClient, name: str) -> int:
        """Send until the story is over; return how many messages were accepted."""
        seq = 0
        while not self.is_over.is_set():
            await self._send(client, name, seq)
            seq += 1
            async with self.more:
                self.accepted += 1
                self.more.notify_all()
        return seq

    async def _send(self, client: httpx2.AsyncClient, name: str, seq: int) -> None:
        place = {"producer-id": name, "producer-epoch": "0", "producer-seq": str(seq)}
        headers = {"content-type": "application/json", **place}
        while True:
            with contextlib.suppress(httpx2.TransportError):
                body = json.dumps({"by": name, "n": seq})
                response = await client.post(self.url(), content=body, headers=headers)
                assert response.status_code in {200, 204, 503}, response.text
                self.repeated += response.status_code == 204
                if response.status_code != 503:
                    return
            await World().sleep(PAUSE_S)

    async def poll(self, client: httpx2.AsyncClient, found: list[Json]) -> None:
        """Read by long polls until the stream is closed."""
        offset, is_closed = "-1", False
        while not is_closed:
            try:
                query = {"offset": offset, "live": "long-poll"}
                response = await client.get(self.url(), params=query)
            except httpx2.TransportError:
                await World().sleep(PAUSE_S)
                continue
            if response.status_code == 503:
                await World().sleep(PAUSE_S)
                continue
            assert response.status_code in {200, 204}, response.text
            found += response.json() if response.status_code == 200 else []
            offset = response.headers["stream-next-offset"]
            is_closed = "stream-closed" in response.headers

    async def follow(self, client: httpx2.AsyncClient, found: list[Json]) -> None:
        """Read server-sent events until the stream is closed."""
        offset, is_closed = "-1", False
        while not is_closed:
            with contextlib.suppress(httpx2.TransportError):
                query = {"offset": offset, "live": "sse"}
                async with client.stream("GET", self.url(), params=query) as body:
                    name, data = "", []
                    async for line in body.aiter_lines():
                        if line.startswith("event:"):
                            name = line[6:].strip()
                        elif line.startswith("data:") and name == "data":
                            data.append(line[5:])
                        elif line.startswith("data:"):
                            control = json.loads(line[5:])
                            found += json.loads("".join(data) or "[]")
                            data, offset = [], control["streamNextOffset"]
                            is_closed = control.get("streamClosed", False)
            if not is_closed:
                await World().sleep(PAUSE_S)

    async def close(self, client: httpx2.AsyncClient) -> list[Json]:
        """Close the stream; return all its contents."""
        closed = await client.post(self.url(), headers={"stream-closed": "true"})
        assert closed.status_code == 204, closed.text
        found: list[Json] = []
        await self.poll(client, found)
        return found


async def play(
    servers: Sequence[KillableServer], urls: Sequence[str], kills: int, chance: random.Random
) -> Json:
    """Kill the servers in turn under producers and readers; return the counts."""
    story = StreamStory(urls, chance)
    limits = httpx2.Timeout(REQUEST_S)
    async with asyncio.timeout(STORY_S + 5 * kills), httpx2.AsyncClient(timeout=limits) as client:
        await story.create(client)
        polled: list[Json] = []
        followed: list[Json] = []
        readers = [
            asyncio.create_task(story.poll(client, polled)),
            asyncio.create_task(story.follow(client, followed)),
        ]
        producers = [asyncio.create_task(story.produce(client, f"p{n}")) for n in range(PRODUCERS)]
        for number in range(kills):
            wanted = story.accepted + chance.randrange(1, AT_ONCE)
            async with story.more:
                while story.accepted < wanted:
                    await story.more.wait()
            await World().sleep(chance.random() * 0.02)  # anywhere within a request
            server = servers[number % len(servers)]
            await server.kill()
            await server.start()
        story.is_over.set()
        counts = await asyncio.gather(*producers)
        stored = await story.close(client)
        await asyncio.gather(*readers)
    for found in (stored, polled, followed):
        for number, count in enumerate(counts):
            name = f"p{number}"
            numbers = [each["n"] for each in found if each["by"] == name]
            assert numbers == list(range(count)), f"{name}: {count} were accepted, in order and once"
    return {"kills": kills, "messages": sum(counts), "repeats": story.repeated}


async def follow_session(
    client: httpx2.AsyncClient, urls: Sequence[str], session: str, live: str, found: list[Json]
) -> None:
    """Read a session as a stream until its turn has ended, at one server after the other."""
    offset, number = "-1", 0
    while not any(each["record"]["type"] == "turn_ended" for each in found):
        url, number = f"{urls[number % len(urls)]}/v1/stream/sessions/{session}", number + 1
        with contextlib.suppress(httpx2.TransportError):
            async with client.stream("GET", url, params={"offset": offset, "live": live}) as body:
                if body.status_code == 503:
                    continue
                assert body.status_code in {200, 204}, await body.aread()
                if live == "long-poll":
                    found += json.loads(await body.aread() or b"[]")
                    offset = body.headers["stream-next-offset"]
                    continue
                data: list[Json] = []
                name = ""
                async for line in body.aiter_lines():
                    if line.startswith("event:"):
                        name = line[6:].strip()
                    elif line.startswith("data:") and name == "data":
                        data = json.loads(line[5:])
                    elif line.startswith("data:"):
                        offset = json.loads(line[5:])["streamNextOffset"]
                        found += data
                        data = []
                        if any(each["record"]["type"] == "turn_ended" for each in found):
                            return
        await World().sleep(PAUSE_S)


async def kill(folder: Path, kills: int, seed: int, *options: str, count: int = 1) -> Json:
    """Run `count` servers on one store, and kill them in turn."""
    async with run_servers(folder, 1, *options, count=count) as servers:
        return await play(servers, [each.url for each in servers], kills, random.Random(seed))


async def judge(folder: Path, *options: str, only: str = "") -> Json:
    """Run the suite against a server; return its report.


    Args:
        only: Pattern of the names of the tests to run; "" runs all.
    """
    about = ("--allow-origin", ORIGIN, "--allow-webhook", RECEIVERS, *options)
    async with run_servers(folder, 1, *about) as [server]:
        (HOME / SUITE.name).write_bytes(SUITE.read_bytes())
        report = folder / "report.json"
        process = await asyncio.create_subprocess_exec(
            *(node(), "node_modules/vitest/vitest.mjs", "run", SUITE.name, "--reporter=json"),
            *("--testTimeout=60000", f"--outputFile={report}"),
            *((f"--testNamePattern={only}",) if only else ()),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.STDOUT,
            cwd=HOME,
            env={**os.environ, "STREAMS_URL": server.url},
        )
        try:
            await asyncio.wait_for(process.wait(), SUITE_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        document: Json = json.loads(report.read_text(encoding="utf-8"))
        return document


def counts_of(report: Json) -> tuple[int, int, int]:
    """Return how many tests of a report passed, failed, and were skipped."""
    return report["numPassedTests"], report["numFailedTests"], report["numPendingTests"]


def failures_of(report: Json) -> list[str]:
    """Return the names of the failed tests of a report, each with the start of its error."""
    return [
        f"{each['fullName']}: {' '.join(each['failureMessages'])[:300]}"
        for each in report["testResults"][0]["assertionResults"]
        if each["status"] == "failed"
    ]


def table_of(report: Json) -> str:
    """Return a report as a table of the suite's groups."""
    groups: dict[str, dict[str, int]] = {}
    for each in report["testResults"][0]["assertionResults"]:
        found = groups.setdefault(each["ancestorTitles"][0], {"passed": 0, "failed": 0, "other": 0})
        found[each["status"] if each["status"] in found else "other"] += 1
    rows = [f"| {name} | {n['passed']} | {n['failed']} | {n['other']} |" for name, n in groups.items()]
    passed, failed, skipped = counts_of(report)
    rows.append(f"| **all** | {passed} | {failed} | {skipped} |")
    return "\n".join(["| group | passed | failed | skipped |", "| --- | --- | --- | --- |", *rows])


PAGE = """# Conformance to Durable Streams

`make dialects` runs `@durable-streams/server-conformance-tests` 0.3.6, unmodified, against `midstream serve` on each
store, and writes this page. The group "Reserved subscription APIs" tests subscriptions, both `webhook` and `pull-wake`.
`tests/server/api/test_subscription_delivery.py` has more tests of their deliveries. See
[the guide](../guides/durable-streams.md).

| store | passed | failed | skipped |
| --- | --- | --- | --- |
{stores}

The figure of `python -m bench dialects` is deliveries per second of CPU time, with 500 readers, divided by those of
midstream's own protocol in the same measurement. A session read as a stream has {session}. A plain stream, with one
word appended every 5 ms, has {plain}.

On SQLite:

{groups}
"""
FIGURES = Path(__file__).parents[2] / "bench" / "results" / "dialects.json"


def page_of(reports: dict[str, Json]) -> str:
    """Return the page with the reports of the suite, by the names of the stores."""
    rows = ["| {} | {} | {} | {} |".format(store, *counts_of(report)) for store, report in reports.items()]
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))["result"]
    found = {name: figures[name]["of_native"] for name in ("durable_streams", "plain_stream")}
    return PAGE.format(
        stores="\n".join(rows),
        session=found["durable_streams"],
        plain=found["plain_stream"],
        groups=table_of(reports["SQLite"]),
    )


async def judge_stores() -> dict[str, Json]:
    """Run the suite on each store that is installed here."""
    reports = {}
    with contextlib.ExitStack() as stack:
        options: dict[str, tuple[str, ...]] = {"SQLite": (), "memory": ("--store", "memory:")}
        if postgres_engine.is_installed():
            options["PostgreSQL"] = ("--store", stack.enter_context(postgres_engine.Engine()).url)
        if nats_engine.find_program() is not None:
            cluster = stack.enter_context(nats_engine.running_cluster())
            options["NATS JetStream"] = ("--store", cluster.url("streams"))
        for store, more in options.items():
            with tempfile.TemporaryDirectory() as made:
                reports[store] = await judge(Path(made), *more)
            sys.stdout.write(f"{store}: passed, failed, skipped: {counts_of(reports[store])}\n")
            sys.stdout.write("".join(f"{each}\n" for each in failures_of(reports[store])))
            sys.stdout.flush()
    return reports


def main(kills: int, seed: int, page: Path | None) -> int:
    write = sys.stdout.write
    write(f"seed {seed}\n")
    failed = 0
    if not lacking():
        reports = asyncio.run(judge_stores())
        failed = sum(counts_of(report)[1] for report in reports.values())
        if page is not None:
            page.write_text(page_of(reports), encoding="utf-8")
    else:
        write(f"{lacking()}\n")
    for count in (1, 2):
        with tempfile.TemporaryDirectory() as made:
            write(f"{count} servers: {asyncio.run(kill(Path(made), kills, seed, count=count))}\n")
    return int(failed > 0)


if __name__ == "__main__":
    found = long_form("plain_streams", sys.argv[1:], kills=200)
    sys.exit(main(found.kills, found.seed, found.suite))
