"""Requests that wait for an upstream end when it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from midstream.agents.single_flight import SingleFlight
from midstream.environment import World
from midstream.errors import ModelUnavailableError

T = TypeVar("T")


async def _events(words: str) -> str:
    return words


async def test_an_answer_is_yielded_as_it_arrives() -> None:
    assert await SingleFlight("u").answer(_events("yes")) == "yes"


async def test_closing_ends_waiting_requests_and_refuses_new_ones() -> None:
    openings = SingleFlight("u")
    waiting = World().spawn(openings.answer(asyncio.Event().wait()), name="waiting")
    await World().sleep(0)
    openings.close()
    openings.close()
    with pytest.raises(ModelUnavailableError, match="u was closed"):
        await waiting
    with pytest.raises(ModelUnavailableError, match="u was closed"):
        await openings.answer(_events("yes"))


async def test_a_cancelled_request_is_cancelled_even_during_the_close() -> None:
    openings = SingleFlight("u")
    waiting = World().spawn(openings.answer(asyncio.Event().wait()), name="waiting")
    await World().sleep(0)
    openings.close()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


class Cutting(World):
    """Cancels the waiter of the first result after its arrival, before it is taken."""

    def __init__(self) -> None:
        self.waiting: asyncio.Task[str] | None = None

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        task = super().spawn(work, name=name)
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            task.add_done_callback(lambda _: waiting.cancel())
        return task


async def test_an_answer_without_a_waiter_is_released() -> None:
    world, left = Cutting(), list[str]()

    async def note_answer(answer: str) -> None:
        left.append(answer)

    world.waiting = World().spawn(
        SingleFlight("u", world).answer(_events("yes"), note_answer), name="waiting"
    )
    waiting = world.waiting
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert left == ["yes"]
