"""Lines from a terminal, while an event loop does other work."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from collections.abc import Iterator

import pytest

from midstream.cli.keyboard import Keyboard

WAIT_S = 60.0


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A terminal on stdin, and the end where a test writes the typed keys."""
    master, slave = pty.openpty()
    with os.fdopen(slave) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield master
    os.close(master)


async def test_lines_arrive_one_at_a_time_however_they_were_typed(keys: int) -> None:
    keyboard = Keyboard()
    os.write(keys, b"one\ntw")
    assert Keyboard.is_available()
    assert await asyncio.wait_for(keyboard.line(), WAIT_S) == "one"
    os.write(keys, b"o\nthree\n")
    assert [await asyncio.wait_for(keyboard.line(), WAIT_S) for _ in range(2)] == ["two", "three"]


async def test_a_line_without_a_waiter_is_not_lost(keys: int) -> None:
    keyboard = Keyboard()
    waiting = asyncio.create_task(keyboard.line())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    os.write(keys, b"late\n")
    assert await asyncio.wait_for(keyboard.line(), WAIT_S) == "late"


async def test_earlier_input_is_not_an_answer(keys: int) -> None:
    keyboard = Keyboard()
    os.write(keys, b"yes\nyes\n")
    assert await asyncio.wait_for(keyboard.line(), WAIT_S) == "yes"
    keyboard.discard_input()
    os.write(keys, b"no\n")
    assert await asyncio.wait_for(keyboard.line(), WAIT_S) == "no"


async def test_ctrl_d_is_the_end_of_input(keys: int) -> None:
    os.write(keys, b"\x04")
    assert await asyncio.wait_for(Keyboard().line(), WAIT_S) is None


def test_no_question_is_asked_if_stdin_is_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:  # noqa: PTH123 - it is no path of ours
        monkeypatch.setattr(sys, "stdin", nothing)
        assert not Keyboard.is_available()
