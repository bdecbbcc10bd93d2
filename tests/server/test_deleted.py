"""A deleted session: its readers receive the deletion wherever they are connected, and none of its data is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

from midstream.errors import StoreBusyError
from midstream.protocol.sse import ServerSentEvent, SseDecoder
from midstream.store.contract import Store
from midstream.store.memory import Memory, MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import Stall, text
from midstream.testing.store_fakes import StoreInFront
from tests.server.known_people import ADA, BOB, guarded_app, post_message
from tests.server.serving import KEYS, WAIT_S, Served, Socket, command, make_app, opening, served
from tests.spec import spec

GONE = "session_not_found"
OTHER_KEYS = {**KEYS, "x-idempotency-key": "another stream"}


async def _ended(server: Served, session: str = "s1") -> None:
    runner = await server.app.host.session(session)
    while runner.state.is_live:
        await runner.wait(runner.newest.position)


async def _run_turn(server: Served) -> None:
    """Run a whole turn in `s1`."""
    assert (
        await server.http.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
    ).status_code == 200
    await _ended(server)


@asynccontextmanager
async def _events(server: Served, headers: dict[str, str]) -> AsyncIterator[list[ServerSentEvent]]:
    """Follow by server-sent events; yield the list of events, which is complete after the block."""
    received: list[ServerSentEvent] = []
    is_welcome = asyncio.Event()

    async def follow() -> None:
        decoder = SseDecoder()
        async with server.http.stream("GET", "/v1/sessions/s1/events", headers=headers) as answer:
            try:
                async for piece in answer.aiter_raw():
                    received.extend(decoder.feed(piece))
                    is_welcome.set()
            except httpx2.RemoteProtocolError:  # Cut.
                return
            raise AssertionError("a clean end would be the turn's")

    following = asyncio.create_task(follow())
    await asyncio.wait_for(is_welcome.wait(), WAIT_S)
    yield received
    await asyncio.wait_for(following, WAIT_S)


@spec("STREAM-68")
async def test_readers_over_each_transport_receive_the_deletion() -> None:
    async with served(make_app([text("hello")] * 2)) as server:
        await _run_turn(server)
        newest = (await server.http.get("/v1/sessions/s1")).json()["event_id"]
        async with Socket(server.socket()) as socket, _events(server, {}) as received:
            await socket.send({"type": "open"})
            assert (await socket.receive())["type"] == "welcome"
            name = {"x-midstream-connection": "c1"}
            opened = await server.http.get(f"/v1/sessions/s1/poll?n=0&after={newest}", headers=name)
            assert [frame["type"] for frame in opened.json()["frames"]] == ["welcome"]
            poll = asyncio.create_task(
                server.http.get(f"/v1/sessions/s1/poll?n=1&after={newest}", headers=name)
            )
            async with asyncio.timeout(WAIT_S):
                while len(server.app.connections) < 3:  # noqa: ASYNC110 - no event reports a new connection
                    await asyncio.sleep(0)
            assert (await server.http.delete("/v1/sessions/s1")).status_code == 204
            last = await socket.receive()
            assert (last["type"], last["code"], last.get("retry", "never")) == ("error", GONE, "never")
            assert await socket.receive_close() == (1008, GONE)
            answer = await asyncio.wait_for(poll, WAIT_S)
            polled = answer.json()
            # A poll that was not admitted yet is refused; a waiting one is answered.
            found = (
                [polled["code"]] if answer.status_code == 404 else [each["code"] for each in polled["frames"]]
            )
            assert found == [GONE]
            assert not polled.get("more")
        assert (received[-1].event, json.loads(received[-1].data)["code"]) == ("error", GONE)
        assert (await server.http.get("/v1/sessions")).json()["sessions"] == []


@spec("STREAM-68")
async def test_a_reader_at_another_process_receives_the_deletion() -> None:
    memory = Memory()
    async with served(make_app([text("hello")] * 2, store=MemoryStore(memory))) as owner:
        await _run_turn(owner)
        async with (
            served(make_app([text("hello")] * 2, store=MemoryStore(memory))) as other,
            Socket(other.socket()) as reader,
        ):
            await reader.send({"type": "open"})
            assert (await reader.receive())["type"] == "welcome"
            assert (await owner.http.delete("/v1/sessions/s1")).status_code == 204
            assert (await reader.receive())["code"] == GONE
            assert await reader.receive_close() == (1008, GONE)


@spec("STREAM-68")
async def test_a_deletion_during_a_turn_is_refused_without_effect() -> None:
    async with served(guarded_app([[Stall()]])) as server:
        assert (await post_message(server.http, "s1", ADA)).status_code == 200
        assert (await server.http.put("/v1/sessions/s1/readers/bob", headers=ADA)).status_code == 200
        async with Socket(server.socket(headers=BOB)) as reader:
            await reader.send({"type": "open"})
            assert (await reader.receive())["type"] == "welcome"
            refused = await server.http.delete("/v1/sessions/s1", headers=ADA)
            assert (refused.status_code, refused.json()["code"]) == (409, "session_busy")
            assert "cancel" in refused.json()["next"]
            stopped = await server.http.post("/v1/sessions/s1/cancel", headers=ADA)
            assert stopped.status_code == 202
            await reader.receive_until("turn_ended")
            assert (await server.http.delete("/v1/sessions/s1", headers=ADA)).status_code == 204
            assert (await reader.receive())["code"] == GONE
        # Its name is free, and nothing of it is left: no transcript, no reader, no owner.
        assert (await post_message(server.http, "s1", BOB)).status_code == 200
        owner = (await server.http.get("/v1/sessions/s1/owner", headers=BOB)).json()
        assert (owner["principal"], owner["readers"]) == ("bob", [])
        assert (await server.http.get("/v1/sessions/s1", headers=ADA)).status_code == 404


@spec("STREAM-68")
async def test_a_client_of_a_deleted_session_does_not_reconnect() -> None:
    async with served(make_app([text("hello")])) as server:
        await _run_turn(server)
        assert (await server.http.delete("/v1/sessions/s1")).status_code == 204
        async with Socket(server.socket()) as late:
            await late.send(opening(event_id="1-3", next_seqno=1))
            frame = await late.receive()
        assert (frame["type"], frame["code"], frame.get("retry", "never")) == ("error", GONE, "never")


@spec("STREAM-68")
async def test_a_refused_deletion_deletes_nothing_and_readers_receive_no_end() -> None:
    store = DeletionRefusingStore(MemoryStore())
    async with served(make_app([text("hello")] * 2, store=store)) as server:
        await _run_turn(server)
        async with Socket(server.socket()) as reader:
            await reader.send({"type": "open"})
            assert (await reader.receive())["type"] == "welcome"
            store.is_busy = True
            deleting = asyncio.create_task(server.http.delete("/v1/sessions/s1"))
            async with asyncio.timeout(WAIT_S):
                await store.was_called.wait()
            waiting = await server.http.post("/v1/sessions/s1/commands", json=command(), headers=OTHER_KEYS)
            assert (waiting.status_code, waiting.json()["code"]) == (503, "unavailable"), (
                "nothing begins meanwhile"
            )
            store.may_answer.set()
            refused = await deleting
            assert (refused.status_code, refused.json()["code"]) == (503, "store_busy")
            store.is_busy = False
            taken = await server.http.post("/v1/sessions/s1/commands", json=command(), headers=OTHER_KEYS)
            assert taken.status_code == 200
            received = await reader.receive_until("turn_ended")
            assert all(frame["type"] != "error" for frame in received)
            assert (await server.http.delete("/v1/sessions/s1")).status_code == 204
            assert (await reader.receive())["code"] == GONE


@spec("STREAM-68")
async def test_one_of_two_concurrent_deletions_is_refused_and_no_turn_begins_meanwhile() -> None:
    store = DeletionRefusingStore(MemoryStore())
    async with served(make_app([text("hello")] * 2, store=store)) as server:
        await _run_turn(server)
        store.is_busy = True
        deleting = asyncio.create_task(server.http.delete("/v1/sessions/s1"))
        async with asyncio.timeout(WAIT_S):
            await store.was_called.wait()
        second = await server.http.delete("/v1/sessions/s1")
        assert (second.status_code, second.json()["code"]) == (503, "unavailable")
        waiting = await server.http.post("/v1/sessions/s1/commands", json=command(), headers=OTHER_KEYS)
        assert (waiting.status_code, waiting.json()["code"]) == (503, "unavailable"), "the first one lasts"
        store.may_answer.set()
        assert (await deleting).json()["code"] == "store_busy"
        store.is_busy = False
        assert (await server.http.delete("/v1/sessions/s1")).status_code == 204


@spec("STREAM-68")
async def test_readers_at_the_running_node_receive_the_deletion_by_another_process(tmp_path: Path) -> None:
    store = BusyAfterRelease(SQLiteStore(tmp_path / "m.db"))
    async with (
        served(make_app([text("hello")] * 2, store=SQLiteStore(tmp_path / "m.db"))) as owner,
        served(make_app([text("hello")] * 2, store=store)) as other,
    ):
        await _run_turn(owner)
        async with Socket(owner.socket()) as reader:
            await reader.send({"type": "open"})
            assert (await reader.receive())["type"] == "welcome"
            refused = await other.http.delete("/v1/sessions/s1")
            assert (refused.status_code, refused.json()["code"]) == (503, "store_busy")
            taken = await owner.http.post("/v1/sessions/s1/commands", json=command(), headers=OTHER_KEYS)
            assert taken.status_code == 200
            received = await reader.receive_until("turn_ended")
            assert all(frame["type"] != "error" for frame in received)
            store.is_over = True
            assert (await other.http.delete("/v1/sessions/s1")).status_code == 204
            assert (await reader.receive())["code"] == GONE
            assert await reader.receive_close() == (1008, GONE)
        assert (await owner.http.get("/v1/sessions/s1")).status_code == 404


@spec("STREAM-68", "TURN-76")
async def test_a_deletion_proceeds_when_the_running_node_is_slow_to_confirm_its_release() -> None:
    memory = Memory()
    slow = NeverAnswering(MemoryStore(memory))
    store = BusyAfterRelease(MemoryStore(memory))
    async with (
        served(make_app([text("hello")] * 2, store=slow)) as owner,
        served(make_app([text("hello")] * 2, store=store)) as other,
    ):
        await _run_turn(owner)
        refused = await other.http.delete("/v1/sessions/s1")
        assert (refused.status_code, refused.json()["code"]) == (503, "store_busy")
        assert slow.was_called, "it had let go, and its answer never came"
        store.is_over = True
        assert (await other.http.delete("/v1/sessions/s1")).status_code == 204
        slow.may_answer.set()


class NeverAnswering(StoreInFront):
    """A store that blocks when its node answers a command of another process."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.was_called = False
        self.may_answer = asyncio.Event()

    async def before_operation(self, operation: str, session: str) -> None:
        if operation == "answer":
            self.was_called = True
            await self.may_answer.wait()


class DeletionRefusingStore(StoreInFront):
    """A store that is busy on deletions, while a test requires it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.is_busy = False
        self.was_called = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def before_operation(self, operation: str, session: str) -> None:
        if operation == "delete" and self.is_busy:
            self.was_called.set()
            await self.may_answer.wait()
            raise StoreBusyError("somebody else has the disk")


class BusyAfterRelease(StoreInFront):
    """A store that is busy when its node has released the session to delete, until that is over."""

    is_over = False

    async def before_operation(self, operation: str, session: str) -> None:
        if operation == "delete" and not self.is_over:
            found = await self.store.find(session)
            if found is not None and found.is_free:
                raise StoreBusyError("somebody else has the disk")
