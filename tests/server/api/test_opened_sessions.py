"""Opening of a session by the client's name for it, for the duration of a request."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from midstream import Agent
from midstream.engine.host import Host
from midstream.errors import SessionNotFoundError, UsageError
from midstream.history.messages import UserMessage
from midstream.server.api.opened_sessions import opened_existing_session, opened_session
from midstream.server.auth.principals import Action
from midstream.session.turn.commands import SendMessage
from midstream.testing.scripted_model import ScriptedModel, text


def request() -> Request:
    """Return a request of a client on a server without authentication."""
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""})


async def test_a_created_session_is_awake_and_attached_for_the_length_of_the_block() -> None:
    async with Host(Agent(ScriptedModel([text("yes")])), "memory:") as host:
        async with opened_session(host, request(), "s", Action.SEND, begins=True) as (runner, secret):
            assert (runner.session_id, runner.readers, secret) == ("s", 1, None)
            await runner.submit(SendMessage(UserMessage.of("hi")))
        assert runner.readers == 0
        async with opened_session(host, request(), "s", Action.READ) as (again, _):
            assert again.state.turns == 1
        with pytest.raises(ZeroDivisionError):
            async with opened_session(host, request(), "s", Action.READ):
                raise ZeroDivisionError
        assert again.readers == 0


async def test_reading_a_missing_session_does_not_create_it() -> None:
    async with Host(Agent(ScriptedModel([])), "memory:") as host:
        with pytest.raises(SessionNotFoundError):
            async with opened_session(host, request(), "s", Action.READ):
                pass
        with pytest.raises(UsageError):
            async with opened_session(host, request(), "no name", Action.SEND, begins=True):
                pass
        assert [info async for info in host.store.list()] == []


async def test_a_missing_session_is_none_for_an_optional_reader() -> None:
    async with Host(Agent(ScriptedModel([text("yes")])), "memory:") as host:
        async with opened_existing_session(host, request(), "s") as runner:
            assert runner is None
        async with opened_session(host, request(), "s", Action.SEND, begins=True) as (begun, _):
            await begun.submit(SendMessage(UserMessage.of("hi")))
        async with opened_existing_session(host, request(), "s") as runner:
            assert runner is begun
        assert begun.readers == 0
