"""Commands of a request to the session that it has opened: each is on the disk when its function returns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from midstream.dialects.ui_messages import find_change
from midstream.engine.runner import Runner
from midstream.errors import (
    FrameTooLargeError,
    JournalMovedError,
    MidstreamError,
    SessionBusyError,
    UnavailableError,
)
from midstream.protocol.frames import FRAME_BYTES_MAX
from midstream.server.auth.caller import Caller
from midstream.session.records import ClientTool
from midstream.session.session import Received
from midstream.session.turn.commands import Cancel, Command, SendMessage

STOPPING_S = 30.0
"""Seconds for a turn to stop."""
BEGINS_MAX = 8
"""Attempts of a request to begin something while others change the session."""
_Found = TypeVar("_Found")


async def submit(runner: Runner, command: Command | Received) -> None:
    """Submit a command, and wait for its records: another process may own the session.

    Raises:
        MidstreamError: It was refused.
    """
    await runner.wait(await runner.submit(command) - 1)


async def stop_turn(runner: Runner) -> None:
    """Stop the open turn, and wait until it has ended: who sends the next message does not wait for it any more.

    Raises:
        UnavailableError: It has not ended in time; its tools still run.
    """
    turn = runner.state.turns
    await runner.submit(Cancel(turn))
    try:
        async with asyncio.timeout(STOPPING_S):
            while runner.state.is_live and runner.state.turns == turn:
                await runner.wait(runner.newest.position)
    except TimeoutError:
        raise UnavailableError("the turn before is still being stopped", retry_after_s=1.0) from None


async def find_or_begin(
    find: Callable[[], Awaitable[_Found | None]],
    begin: Callable[[], Awaitable[None]],
    retried: tuple[type[MidstreamError], ...] = (JournalMovedError, SessionBusyError),
) -> _Found:
    """Return what a request begins, also where an equal request has begun it.

    Args:
        find: Returns it where it has begun.
        begin: Begins it; refused where another request was first.
        retried: Refusals after which to look again.

    Raises:
        UnavailableError: Others change the session all the time.
    """
    for _ in range(BEGINS_MAX):
        if (found := await find()) is not None:
            return found
        with suppress(*retried):
            await begin()
    raise UnavailableError("other requests of this session are too many: retry", retry_after_s=1.0)


async def submit_resent(
    runner: Runner,
    visitor: Caller,
    received: Received,
    messages: Sequence[dict[str, Any]],
    tools: tuple[ClientTool, ...],
) -> None:
    """Submit what is new of a chat whose client sends all its messages, the last of them a user's.

    Args:
        received: Its place in its stream, without a command.
        messages: As UI messages.
        tools: What the client runs.

    Raises:
        FrameTooLargeError: What is new is too large.
        MidstreamError: It was refused, such as where another message came first.
    """
    state = runner.state
    change = find_change(state.history.entries, messages)
    if len(msgspec.json.encode((change.message, change.before))) > FRAME_BYTES_MAX:
        raise FrameTooLargeError(f"what is new of this chat has {FRAME_BYTES_MAX} bytes at most")
    command = SendMessage(change.message, tools, keep=change.keep, before=change.before, turns=state.turns)
    visitor.count_command(command)
    await submit(runner, replace(received, command=command))
