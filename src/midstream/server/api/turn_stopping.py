"""Stop the open turn of a session for a client that goes on without it."""

from __future__ import annotations

import asyncio

from midstream.engine.runner import Runner
from midstream.errors import UnavailableError
from midstream.session.turn.commands import Cancel

STOPPING_S = 30.0
"""Seconds for a turn to stop."""


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
