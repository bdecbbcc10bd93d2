"""One client and two servers of one database: the newer connection ends the older one, wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import websockets

from midstream.session.records import CommandAccepted, StreamTaken, TurnEnded
from tests.fault.workers import WAIT_S, Worker, lines, problems, records, until, until_there
from tests.server.serving import Socket, abort, command, opening
from tests.spec import spec


def socket_of(worker: Worker) -> Socket:
    url = f"{worker.url.replace('http', 'ws')}/v1/sessions/s/stream"
    return Socket(websockets.connect(url, max_size=None))


@spec("STREAM-8", "STREAM-50", "STREAM-101", "STREAM-102", "STREAM-103")
async def test_a_newer_connection_at_another_process_ends_the_older_one_before_its_first_frame(
    tmp_path: Path,
) -> None:
    async with Worker(tmp_path) as node, Worker(tmp_path) as other:
        async with socket_of(node) as first, socket_of(other) as second, socket_of(node) as third:
            await first.send(opening(connection=1))
            await first.send(command(words="work"))
            await first.receive_until("call_started")
            await until(lambda: len(lines(tmp_path)) == 1)

            await second.send(opening(connection=2, next_seqno=1))
            assert (await second.receive())["type"] == "welcome"
            assert (await first.receive_until("error"))[-1]["code"] == "stream_fenced"
            assert await first.receive_close() == (1008, "stream_fenced")

            for worker in (node, other):  # later frames of an older one go to any process
                answer = await worker.post("s", abort(1), connection=1)
                assert (answer.status_code, answer.json()["code"]) == (409, "stream_fenced")
                async with socket_of(worker) as late:
                    await late.send(opening(connection=1, next_seqno=1))
                    assert (await late.receive())["code"] == "stream_fenced"

            await third.send(opening(connection=3, next_seqno=1))
            assert (await third.receive())["type"] == "welcome"
            assert (await second.receive_until("error"))[-1]["code"] == "stream_fenced"

            answer = await other.post("s", abort(1), connection=3)
            assert answer.json() == {"type": "ack", "seqno": 1}
            (tmp_path / "go").touch()
            await third.receive_until("turn_ended")
        found = await until_there(tmp_path, "s", TurnEnded)
    assert [each.connection for each in found if isinstance(each, StreamTaken)] == [2, 3]
    assert [each.seqno for each in found if isinstance(each, CommandAccepted)] == [0, 1]
    assert found == records(tmp_path, "s")
    assert problems(tmp_path, ["s"]) == []


@spec("STREAM-101")
async def test_the_process_that_takes_a_session_over_has_its_newest_connection(
    tmp_path: Path,
) -> None:
    async with Worker(tmp_path) as node, Worker(tmp_path) as heir:
        async with socket_of(node) as newer:
            await newer.send(opening(connection=2))
            await newer.send(command(words="work"))
            await newer.receive_until("call_started")
            await until(lambda: len(lines(tmp_path)) == 1)
            await node.kill()
        answer = await heir.post("s", abort(1), connection=1)
        assert (answer.status_code, answer.json()["code"]) == (409, "stream_fenced")
        async with socket_of(heir) as late, socket_of(heir) as next_one:
            await late.send(opening(connection=1, next_seqno=1))
            assert (await late.receive())["code"] == "stream_fenced"
            await next_one.send(opening(connection=3, next_seqno=1))
            await next_one.receive_until("turn_ended")
    assert problems(tmp_path, ["s"]) == []


@spec("STREAM-40", "STREAM-101", "STREAM-103")
async def test_a_command_of_a_newer_connection_may_arrive_at_the_process_of_the_older_one(
    tmp_path: Path,
) -> None:
    """As behind a load balancer: the newer connection was opened at the other server."""
    async with Worker(tmp_path) as node, Worker(tmp_path) as other:
        async with node.open_stream("s", opening(connection=1), name="first") as first:
            await _until_line(first, "welcome")
            assert (
                await node.post("s", command(words="work"), connection=1, name="first")
            ).status_code == 200
            await until(lambda: len(lines(tmp_path)) == 1)
        async with other.open_stream("s", opening(connection=2, next_seqno=1), name="second") as second:
            await _until_line(second, "welcome")
            answer = await node.post("s", abort(1), connection=2, name="second")
            assert answer.json() == {"type": "ack", "seqno": 1}
            late = await node.post("s", abort(2), connection=1, name="first")
            assert (late.status_code, late.json()["code"]) == (409, "stream_fenced")
            await _until_line(second, "turn_ended")
    assert [each.seqno for each in records(tmp_path, "s") if isinstance(each, CommandAccepted)] == [0, 1]
    assert problems(tmp_path, ["s"]) == []


async def _until_line(stream: AsyncIterator[str], word: str) -> None:
    async with asyncio.timeout(WAIT_S):
        async for line in stream:
            if word in line:
                return
    raise AssertionError(f"no {word!r} in the stream")
