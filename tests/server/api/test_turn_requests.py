"""Commands of a request: sent once per request, and a turn is stopped for the next message."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from midstream.errors import FrameTooLargeError, JournalMovedError, SessionBusyError, UnavailableError
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, TextDelta
from midstream.protocol.frames import FRAME_BYTES_MAX
from midstream.server.api.turn_requests import BEGINS_MAX, find_or_begin, stop_turn, submit_resent
from midstream.server.auth.caller import UnauthenticatedCaller
from midstream.session.records import TurnStatus
from midstream.session.session import Received
from midstream.testing.scripted_model import Gate, text
from tests.server.serving import WAIT_S, asgi_client, make_app


async def test_stopping_a_turn_returns_after_the_turn_has_ended() -> None:
    gate = asyncio.Event()
    app = make_app([[TextDelta("Hello "), Gate(gate), TextDelta("you"), Finished()]])
    async with asgi_client(app), asyncio.timeout(WAIT_S):
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


async def test_a_turn_that_another_request_began_is_found_and_not_begun_again() -> None:
    found: list[str] = []

    async def find() -> str | None:
        return found[-1] if found else None

    async def begin_late() -> None:
        found.append("theirs")
        raise JournalMovedError("another request was first")

    async def begin() -> None:
        raise AssertionError("it is there")

    assert await find_or_begin(find, begin_late) == "theirs"
    assert await find_or_begin(find, begin) == "theirs"


async def test_a_request_gives_up_after_repeated_conflicts_or_a_refusal() -> None:
    tries: list[int] = []

    async def find() -> str | None:
        return None

    async def begin() -> None:
        tries.append(1)
        raise SessionBusyError("a turn runs")

    with pytest.raises(UnavailableError):
        await find_or_begin(find, begin)
    assert len(tries) == BEGINS_MAX
    with pytest.raises(SessionBusyError):
        await find_or_begin(find, begin, (JournalMovedError,))
    assert len(tries) == BEGINS_MAX + 1


async def test_only_new_messages_of_a_chat_are_sent_within_a_limit() -> None:
    app = make_app([text("Hello"), text("you")])
    async with asgi_client(app), asyncio.timeout(WAIT_S):
        await app.start()
        runner = await app.host.session("s1", create=True)
        messages = [{"role": "user", "parts": [{"type": "text", "text": "hi"}]}]
        await submit_resent(runner, UnauthenticatedCaller(), Received("a", "s", 0, "d", None), messages, ())
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
        messages += [
            {"role": "assistant", "parts": [{"type": "text", "text": "Hello"}]},
            {"role": "user", "parts": [{"type": "text", "text": "and?"}]},
        ]
        await submit_resent(runner, UnauthenticatedCaller(), Received("b", "s", 0, "d", None), messages, ())
        users = [each for each in runner.state.history.entries if isinstance(each, UserMessage)]
        assert users == [UserMessage.of("hi"), UserMessage.of("and?")]
        messages[-1] = {"role": "user", "parts": [{"type": "text", "text": "x" * FRAME_BYTES_MAX}]}
        with pytest.raises(FrameTooLargeError):
            await submit_resent(
                runner, UnauthenticatedCaller(), Received("c", "s", 0, "d", None), messages, ()
            )
