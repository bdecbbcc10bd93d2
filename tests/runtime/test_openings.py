"""Requests that wait for an upstream end when it is closed."""

from __future__ import annotations

import asyncio

import pytest

from midstream.errors import ModelUnavailableError
from midstream.runtime.openings import Openings
from midstream.world import World


async def _said(words: str) -> str:
    return words


async def test_an_answer_is_given_as_it_comes() -> None:
    assert await Openings("u").answer(_said("yes")) == "yes"


async def test_closing_ends_what_waits_and_lets_nothing_begin() -> None:
    openings = Openings("u")
    waiting = World().spawn(openings.answer(asyncio.Event().wait()), name="waiting")
    await World().sleep(0)
    openings.close()
    openings.close()
    with pytest.raises(ModelUnavailableError, match="u was closed"):
        await waiting
    with pytest.raises(ModelUnavailableError, match="u was closed"):
        await openings.answer(_said("yes"))


async def test_who_is_cancelled_is_cancelled_also_while_it_closes() -> None:
    openings = Openings("u")
    waiting = World().spawn(openings.answer(asyncio.Event().wait()), name="waiting")
    await World().sleep(0)
    openings.close()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
