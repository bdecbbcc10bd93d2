"""Stopping a turn for a client that goes on without it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from midstream.models.responses import Finished, TextDelta
from midstream.server.api.turn_requests import stop_turn
from midstream.session.records import TurnStatus
from midstream.testing.scripted_model import Gate
from tests.server.serving import WAIT_S, called, make_app


async def test_a_turn_has_ended_when_its_stop_returns() -> None:
    gate = asyncio.Event()
    app = make_app([[TextDelta("Hello "), Gate(gate), TextDelta("you"), Finished()]])
    async with called(app), asyncio.timeout(WAIT_S):
        await app.start()
        runner = await app.host.session("s1", create=True)
        async with aclosing(app.host.send("s1", "hi")) as events:
            async for event in events:
                if "Hello" in str(event):
                    break
        await stop_turn(runner)
        assert not runner.state.is_live
        ended = runner.state.last_turn
        assert ended is not None
        assert ended.status is TurnStatus.CANCELLED
