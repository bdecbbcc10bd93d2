"""A connection belongs to one task; a cancelled call waits for its thread only for the grace."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import pytest

from midstream.environment import World
from midstream.frameworks import tool_connections
from midstream.frameworks.tool_connections import HeldContext, run_bounded

WAIT_S = 60.0


class RecordedConnection:
    """Records its events, and their tasks."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.notes: list[str] = []
        self.tasks: set[asyncio.Task[object] | None] = set()
        self.is_slow = is_slow
        self.began = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.notes.append("in")
        self.tasks.add(asyncio.current_task())
        self.began.set()
        if self.is_slow:
            await asyncio.Event().wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.notes.append("out")
        self.tasks.add(asyncio.current_task())


async def test_one_task_enters_and_leaves_whichever_task_uses_it() -> None:
    connection = RecordedConnection()
    async with asyncio.timeout(WAIT_S):
        held = HeldContext(connection, World())
        await asyncio.gather(held.wait_until_open(), held.wait_until_open())
        assert (connection.notes, held.has_ended) == (["in"], False)
        await asyncio.create_task(held.close())
    assert (connection.notes, len(connection.tasks), held.has_ended) == (["in", "out"], 1, True)


async def test_closing_abandons_an_opening() -> None:
    connection = RecordedConnection(is_slow=True)
    async with asyncio.timeout(WAIT_S):
        held = HeldContext(connection, World())
        opening = asyncio.create_task(held.wait_until_open())
        await connection.began.wait()
        await held.close()
        with pytest.raises(ConnectionError, match="closed while it was being opened"):
            await opening
    assert connection.notes == ["in"]


async def test_a_call_that_ignores_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_connections, "GRACE_S", 0.01)
    began, release = asyncio.Event(), asyncio.Event()

    async def stubborn() -> str:
        began.set()
        try:
            await release.wait()
        except asyncio.CancelledError:
            await release.wait()
        return "late"

    async with asyncio.timeout(WAIT_S):
        calling = asyncio.create_task(run_bounded(stubborn(), World()))
        await began.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        release.set()
        assert await run_bounded(stubborn(), World()) == "late"


async def test_a_connection_is_closed_completely_even_if_the_caller_is_cancelled() -> None:
    leaving, may_leave, has_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class SlowToLeave(RecordedConnection):
        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            leaving.set()
            await may_leave.wait()
            has_left.set()

    held = HeldContext(SlowToLeave(), World())
    await held.wait_until_open()
    closing = asyncio.create_task(held.close())
    async with asyncio.timeout(WAIT_S):
        await leaving.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    may_leave.set()
    async with asyncio.timeout(WAIT_S):
        await has_left.wait()
