"""Every endpoint that is described, asked by everybody: its owner, a reader, a neighbour, a stranger, a guesser.

New routes come in by themselves: a route without a description fails `test_openapi.py`, and what the tables below do
not name is for the owner alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import websockets

from midstream.engine.agent import Agent
from midstream.observability.prometheus import Prometheus
from midstream.server.api.openapi import Operation
from midstream.server.api.route_table import OPERATIONS
from midstream.server.app import asgi
from midstream.server.auth.access import Access, bearer
from midstream.server.auth.principals import Principal
from midstream.session.blobs import blob_of
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel, calls, text
from midstream.tools.function_tools import tool
from tests.server.people import ADA, BOB, EVE, KNOWN, OPERATOR, say
from tests.server.serving import KEYS, Served, Socket, command, opening, served

LARGE = "large " * 20_000
DIGEST = blob_of(LARGE).digest
PEOPLE = {**KNOWN, "the-token-of-eve": Principal("eve")}
GUESSER = {"authorization": "Bearer a-guess-of-somebody"}
LOOKS = {"show", "records", "blob"}
"""What a reader gets as an owner does."""
FOLLOWS = {"events", "open_events", "poll", "open_poll"}
"""What a reader gets without a stream of its own."""
ASKED_FOR_MORE = {"commands", "ticket"}
"""What depends on what it is about: a reader may have a ticket for looking."""
OF_NO_SESSION = {
    *("openapi", "questions", "sessions", "me", "login_link", "logout"),
    *("credentials", "revoke", "revoke_all"),
    *("probe_events", "probe_poll", "probe_chunks"),
}
"""For whoever is known."""
OF_OPERATORS = {"metrics", "nodes"}
OPEN = {"health", "ready", "login", "challenge"}
OF_SESSIONS = [each for each in OPERATIONS if "{session_id}" in each.path]


@tool(has_effects=False)
def dump() -> str:
    """Return much."""
    return LARGE


@asynccontextmanager
async def _shared() -> AsyncIterator[Served]:
    """Serve a session of Ada's, with all there is in it, which Bob may look at."""
    app = asgi(
        Agent(ScriptedModel([calls(("dump", "{}")), text("Hello.")]), tools=[dump]),
        store=MemoryStore(),
        access=Access(authenticate=bearer(PEOPLE.get)),
        observers=[Prometheus()],
    )
    async with served(app) as server:
        assert (await say(server.http, "s1", ADA)).status_code == 200
        runner = await app.host.session("s1")
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
        assert (await server.http.put("/v1/sessions/s1/readers/bob", headers=ADA)).status_code == 200
        yield server


async def _asked(
    server: Served, operation: Operation, who: dict[str, str], *, with_stream: bool = True
) -> tuple[int, str]:
    """Ask once; return the status, and the code of a problem."""
    path = operation.path.format(session_id="s1", digest=DIGEST, reader="bob", credential="0" * 16)
    body = command() if operation.name == "commands" else {}
    if operation.name == "challenge":
        body = {"nonce": "n" * 43}
    if operation.name.startswith("open_"):
        body = opening() if with_stream else {"type": "open"}
    keys = KEYS if with_stream else {}
    query = {"wait": "1"} if operation.name.endswith("poll") and "sessions" in path else {}
    if operation.method == "GET":
        request = server.http.build_request("GET", path, headers={**keys, **who}, params=query)
    else:
        request = server.http.build_request(
            operation.method, path, headers={**keys, **who, "x-midstream": "1"}, params=query, json=body
        )
    answer = await server.http.send(request, stream=True)
    try:
        if answer.headers.get("content-type") != "application/problem+json":
            return answer.status_code, ""
        await answer.aread()
        return answer.status_code, answer.json()["code"]
    finally:
        await answer.aclose()


async def _state_of(server: Served) -> list[object]:
    """Return all that somebody without rights must leave as it is."""
    told = [
        await server.http.get(f"/v1/sessions/s1{what}", headers=ADA) for what in ("", "/owner", "/records")
    ]
    return [(answer.status_code, answer.content) for answer in told]


def test_the_tables_name_every_operation() -> None:
    known = LOOKS | FOLLOWS | ASKED_FOR_MORE | OF_NO_SESSION | OPEN | OF_OPERATORS
    names = {each.name for each in OPERATIONS}
    assert known <= names
    rest = names - known
    assert {each.name for each in OF_SESSIONS if each.name in rest} == rest, "what else is a session's"


@pytest.mark.parametrize("who", [{}, GUESSER], ids=["stranger", "guesser"])
async def test_who_is_not_known_is_let_in_nowhere(who: dict[str, str]) -> None:
    async with _shared() as server:
        before = await _state_of(server)
        for operation in OPERATIONS:
            told = await _asked(server, operation, who)
            if operation.name == "challenge":
                assert told == (404, "not_found"), "this server does not authenticate the user of its machine"
            elif operation.name in OPEN - {"login"}:
                assert told == (200, ""), operation.name
            else:
                assert told == (401, "unauthorized"), operation.name
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with server.socket(headers=who):
                pass
        assert refused.value.response.status_code == 401
        assert await _state_of(server) == before


async def test_a_neighbour_finds_no_session_on_any_endpoint() -> None:
    async with _shared() as server:
        before = await _state_of(server)
        for operation in OF_SESSIONS:
            for with_stream in (True, False):
                told = await _asked(server, operation, EVE, with_stream=with_stream)
                assert told == (404, "session_not_found"), operation.name
        assert await _asked(server, _named("metrics"), EVE) == (403, "access")
        listed = [
            (await server.http.get("/v1/sessions", headers=who)).json()["sessions"] for who in (EVE, BOB, ADA)
        ]
        assert [len(lines) for lines in listed] == [0, 1, 1]
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with server.socket(headers=EVE):
                pass
        assert refused.value.response.status_code == 404
        assert await _state_of(server) == before


async def test_a_reader_looks_and_does_nothing_on_any_endpoint() -> None:
    async with _shared() as server:
        before = await _state_of(server)
        for operation in OF_SESSIONS:
            told = await _asked(server, operation, BOB)
            if operation.name in LOOKS:
                assert told == (200, ""), operation.name
            elif operation.name == "ticket":
                assert told == (201, ""), operation.name
            else:
                assert told == (403, "access"), operation.name
            if operation.name in FOLLOWS:
                assert await _asked(server, operation, BOB, with_stream=False) == (200, ""), operation.name
        async with Socket(server.socket(headers=BOB)) as reader:
            await reader.say({"type": "open"})
            assert (await reader.hear())["type"] == "welcome"
        async with Socket(server.socket(headers=BOB)) as speaker:
            await speaker.say(opening())
            assert (await speaker.hear())["code"] == "access"
        assert await _state_of(server) == before


@pytest.mark.parametrize("who", [ADA, OPERATOR], ids=["owner", "operator"])
async def test_an_owner_and_an_operator_get_all_there_is(who: dict[str, str]) -> None:
    async with _shared() as server:
        last = {"delete", "logout", "revoke_all"}
        for operation in sorted(OPERATIONS, key=lambda each: each.name in last):
            status, code = await _asked(server, operation, who, with_stream=operation.name == "commands")
            if operation.name in {"challenge", "revoke"}:
                assert (status, code) == (404, "not_found"), operation.name
            elif operation.name in OF_OPERATORS and who is ADA:
                assert (status, code) == (403, "access")
            else:
                assert status not in {401, 403, 404}, (operation.name, status, code)


def _named(name: str) -> Operation:
    return next(each for each in OPERATIONS if each.name == name)
