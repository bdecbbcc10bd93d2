"""Stored responses, through crashes and neighbours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from midstream.errors import EntryMovedError, StoreFullError
from midstream.server.gateway import stored
from midstream.server.gateway.stored import LOST, Entry, StoredResponses
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.worlds import FakeWorld
from tests.integrations.chat_server import chat_server, silence
from tests.server.gateway.serving import TOKEN
from tests.spec import spec

ENTRY = Entry({"id": "r1", "status": "completed"}, [{"role": "user", "content": "hi"}], "s1", own=1)
OPEN = Entry({"id": "r1", "status": "in_progress"}, [])


async def opened(memory: Memory, world: FakeWorld) -> StoredResponses:
    store = MemoryStore(memory, world=world)
    await store.open()
    return StoredResponses(store, world)


async def test_a_response_is_found_until_it_is_too_old() -> None:
    world = FakeWorld()
    responses = await opened(Memory(), world)
    await responses.begin("r1", OPEN)
    found = await responses.find("r1")
    assert found is not None
    assert found.is_open
    await responses.end("r1", ENTRY, b"event: a\n\nevent: b\n\n")
    assert await responses.find("r1") == ENTRY
    assert await responses.events("r1") == [b"event: a\n\n", b"event: b\n\n"]
    await world.advance(stored.KEPT_S + 1)
    assert await responses.find("r1") is None


async def test_long_events_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "EVENTS_BYTES_MAX", 3)
    responses = await opened(Memory(), FakeWorld())
    await responses.end("r1", ENTRY, b"event: a\n\n")
    assert await responses.events("r1") == []


@spec("REUSE-76")
async def test_an_answer_whose_process_died_has_failed_once_it_is_silent() -> None:
    world, memory = FakeWorld(), Memory()
    dead, alive = await opened(memory, world), await opened(memory, world)
    await dead.begin("r1", OPEN)
    await world.advance(stored.LOST_AFTER_S - 1)
    found = await alive.find("r1")
    assert found is not None
    assert found.response["status"] == "in_progress"
    await world.advance(2)
    found = await alive.find("r1")
    assert found is not None
    assert (found.response["status"], found.response["error"]["message"]) == ("failed", LOST)
    with pytest.raises(EntryMovedError):  # it was only slow: it may not say otherwise now
        await dead.end("r1", ENTRY, b"")


@spec("REUSE-76")
async def test_who_lives_says_so() -> None:
    world, memory = FakeWorld(), Memory()
    ours, theirs = await opened(memory, world), await opened(memory, world)
    await ours.begin("r1", OPEN)
    tending = world.spawn(ours.tend(), name="tending")
    for _ in range(10):
        await world.advance(stored.BEAT_S)
    found = await theirs.find("r1")
    assert found is not None
    assert found.is_open
    await ours.end("r1", ENTRY, b"")
    tending.cancel()


async def test_what_is_too_old_is_removed() -> None:
    world, memory = FakeWorld(), Memory()
    responses = await opened(memory, world)
    await responses.end("r1", ENTRY, b"event: a\n\n")
    await world.advance(stored.KEPT_S + 1)
    tending = world.spawn(responses.tend(), name="tending")
    await world.advance(0.1)
    assert memory.values == {stored.RESPONSES: {}, stored.EVENTS: {}}
    tending.cancel()


async def test_an_entry_that_cannot_be_read_counts_as_none() -> None:
    world, memory = FakeWorld(), Memory()
    responses = await opened(memory, world)
    store = MemoryStore(memory, world=world)
    await store.open()
    await store.kv_put(stored.RESPONSES, "r1", b"{", expected=0, at=world.now())
    assert await responses.find("r1") is None
    await responses.delete("r1")
    await responses.delete("r1")


@spec("REUSE-75")
async def test_a_full_store_fails_a_background_answer_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    from midstream.testing.models import ScriptedModel, text
    from tests.server.gateway.serving import called, make_gateway

    class Full(MemoryStore):
        async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
            raise StoreFullError("the disk is full")

    async with called(make_gateway(ScriptedModel([text("done")]), store=Full())) as client:
        whole = await client.post("/v1/responses", json={"input": "hi", "model": "m"})
        assert (whole.status_code, whole.json()["status"]) == (200, "completed")
        assert "an answer is not stored: store_full" in caplog.text
        later = await client.post("/v1/responses", json={"input": "hi", "background": True})
        assert (later.status_code, later.json()["error"]["code"]) == (503, "store_full")


class Process:
    """`midstream gateway` in a process of its own."""

    def __init__(self, home: Path, upstream: str) -> None:
        program = (
            "from midstream.server.gateway import stored; stored.LOST_AFTER_S = 0.2; stored.BEAT_S = 0.05;"
            "from midstream.cli import main; main()"
        )
        command = [sys.executable, "-c", program, "--home", str(home), "gateway", "--port", "0", "--json"]
        command += ["--token", TOKEN, "--upstream", f"openai-compatible:{upstream}", "--model", "m"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]

    def end(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@spec("REUSE-76")
async def test_an_answer_of_a_killed_gateway_ends_as_failed_and_says_why(tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with chat_server(silence(), silence()) as upstream, httpx2.AsyncClient(headers=headers) as client:
        first = Process(tmp_path, upstream.url)
        body = {"input": "hi", "model": "m", "background": True}
        made = (await client.post(f"{first.url}/v1/responses", json=body)).json()
        assert made["status"] == "in_progress"
        first.end()
        second = Process(tmp_path, upstream.url)
        try:
            for _ in range(2000):
                found = (await client.get(f"{second.url}/v1/responses/{made['id']}")).json()
                if found["status"] != "in_progress":
                    break
            assert (found["status"], found["error"]["message"]) == ("failed", LOST)
        finally:
            second.end(signal.SIGTERM)
