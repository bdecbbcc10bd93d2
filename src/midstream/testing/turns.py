"""Runs a turn in a test and returns its records."""

from __future__ import annotations

import asyncio

from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.history.messages import UserMessage
from midstream.session.records import Record, TurnEnded, decode
from midstream.session.turn.commands import SendMessage

TURN_S = 30.0
"""Time limit of a test's turn, in seconds."""


async def run_turn(host: Host, session_id: str, words: str) -> tuple[Record, ...]:
    """Send a message to a session, wait for the turn's end, and return the records since.

    Raises:
        TimeoutError: The turn did not end within `TURN_S`.
        MidstreamError: The message was refused.
    """
    runner = await host.session(session_id, create=True)
    before = runner.newest.position
    await runner.submit(SendMessage(UserMessage.of(words)))
    return await records_until_end(runner, after=before)


async def records_until_end(runner: Runner, *, after: int) -> tuple[Record, ...]:
    """Follow a session from a position to the next end of a turn, and return the records."""
    records: list[Record] = []
    async with asyncio.timeout(TURN_S):
        while not (records and isinstance(records[-1], TurnEnded)):
            await runner.wait(after)
            for stored in await runner.read(after=after, limit=1000):
                records.append(decode(stored.body))
                after = stored.position
                if isinstance(records[-1], TurnEnded):
                    break
    return tuple(records)
