"""Shared parts of the tests of escrowed sessions: an app whose clients hold the keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2

from midstream.engine.agent import Agent
from midstream.environment import World
from midstream.server.app import App, asgi
from midstream.server.auth.access import Access
from midstream.store.contract import Store
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.escrow import escrow_store
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.scripted_model import Script, ScriptedModel
from midstream.tools.function_tools import Tool
from tests.server.serving import SECRET, command

OTHER = "o" * 43
SHOWN = {"x-idempotent-encryption-key": SECRET}
WRONG = {"x-idempotent-encryption-key": OTHER}


def escrowed_app(
    folder: Path,
    script: Script = (),
    *,
    memory: Memory | None = None,
    inner: Store | None = None,
    tools: Sequence[Tool | Callable[..., Any]] = (),
    access: Access | None = None,
    world: World = World(),
) -> App:
    """Make an app with a scripted model and sessions that only their clients can open."""
    path = folder / "keys"
    if not path.exists():
        FileKeys.make(path)
    store = escrow_store(inner or MemoryStore(memory, world=world), FileKeys(path), world=world)
    return asgi(Agent(ScriptedModel(script), tools=tools), store=store, access=access, world=world)


async def send_message(
    http: httpx2.AsyncClient, session: str = "s1", *, key: str = "k1", secret: str = SECRET, words: str = "hi"
) -> httpx2.Response:
    """Send a message over plain HTTP."""
    headers = {"x-idempotency-key": key, "x-idempotent-encryption-key": secret}
    return await http.post(f"/v1/sessions/{session}/commands", json=command(words=words), headers=headers)


async def follow_to_end(http: httpx2.AsyncClient, session: str = "s1", *, key: str = "k1") -> str:
    """Return the whole event stream of a turn."""
    headers = {"x-idempotency-key": key, **SHOWN}
    answer = await http.get(f"/v1/sessions/{session}/events", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.text


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition, for ten seconds at most."""
    async with asyncio.timeout(60):
        while not await is_so():  # noqa: ASYNC110 - the awaited state has no event
            await asyncio.sleep(0)
