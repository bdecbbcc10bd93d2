"""Commands of a request to its session. Each function returns after the append."""

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
"""Attempts of a request while other requests change the session."""
_Found = TypeVar("_Found")


async def submit(runner: Runner, command: Command | Received) -> None:
    """Submit a command, and wait for its records, also if another process runs the session.

    Raises:
        MidstreamError: The command was refused.
    """
    await runner.wait(await runner.submit(command) - 1)


async def stop_turn(runner: Runner) -> None:
    """Stop the open turn, and wait until it has ended, so that the next message is not queued.

    Raises:
        UnavailableError: The turn has not ended in time; its tools still run.
    """
    turn = runner.state.turns
    await runner.submit(Cancel(turn))
    try:
        async with asyncio.timeout(STOPPING_S):
            while runner.state.is_live and runner.state.turns == turn:
                await runner.wait(runner.newest.position)
    except TimeoutError:
        raise UnavailableError("the previous turn is still stopping", retry_after_s=1.0) from None


async def find_or_begin(
    find: Callable[[], Awaitable[_Found | None]],
    begin: Callable[[], Awaitable[None]],
    retried: tuple[type[MidstreamError], ...] = (JournalMovedError, SessionBusyError),
) -> _Found:
    """Return the thing that a request begins, such as a turn, or that an equal request has begun.

    Args:
        find: Returns it if it has begun, else None.
        begin: Begins it; raises if another request was faster.
        retried: Errors after which to try again.

    Raises:
        UnavailableError: Other requests keep changing the session.
    """
    for _ in range(BEGINS_MAX):
        if (found := await find()) is not None:
            return found
        with suppress(*retried):
            await begin()
    raise UnavailableError("too many other requests change this session: retry", retry_after_s=1.0)


async def submit_resent(
    runner: Runner,
    caller: Caller,
    received: Received,
    messages: Sequence[dict[str, Any]],
    tools: tuple[ClientTool, ...],
) -> None:
    """Submit the new messages of a chat whose client sends all messages, of which the last is a user message.

    Args:
        received: The stream of the request, without a command.
        messages: All messages as UI messages.
        tools: Tools of the client.

    Raises:
        FrameTooLargeError: The new messages are too large.
        MidstreamError: The command was refused, for example because another message was first.
    """
    state = runner.state
    change = find_change(state.history.entries, messages)
    if len(msgspec.json.encode((change.message, change.before))) > FRAME_BYTES_MAX:
        raise FrameTooLargeError(f"the new messages of this chat may have at most {FRAME_BYTES_MAX} bytes")
    command = SendMessage(change.message, tools, keep=change.keep, before=change.before, turns=state.turns)
    caller.count_command(command)
    await submit(runner, replace(received, command=command))
