"""Every described endpoint, requested by each kind of caller: owner, reader, neighbour, stranger, guesser.

New routes are included automatically: a route without a description fails `test_openapi.py`, and an operation
outside the tables below is for the owner alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import websockets

from midstream.dialects.run_fold import derived_run_id
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
from tests.server.known_people import ADA, BOB, EVE, KNOWN, OPERATOR, post_message
from tests.server.serving import KEYS, Served, Socket, command, opening, served

LARGE = "large " * 20_000
DIGEST = blob_of(LARGE).digest
PEOPLE = {**KNOWN, "the-token-of-eve": Principal("eve")}
GUESSER = {"authorization": "Bearer a-guess-of-somebody"}
READER_OPERATIONS = {"show", "records", "blob", "read_session_stream"}
"""Operations that a reader may use as an owner does."""
STREAM_OPERATIONS = {"events", "open_events", "poll", "open_poll"}
"""Operations that a reader may use without a stream of its own."""
TICKET_OPERATIONS = {"commands", "ticket"}
"""Operations that depend on their subject: a reader may have a ticket for reading."""
SESSIONLESS_OPERATIONS = {
    *("openapi", "questions", "sessions", "me", "login_link", "logout"),
    *("credentials", "revoke", "revoke_all"),
    *("probe_events", "probe_poll", "probe_chunks"),
    *("graph_info", "search_assistants", "assistant", "assistant_schemas", "assistant_graph"),
    *("create_thread", "search_threads"),
}
"""Operations for every authenticated caller."""
OPERATOR_OPERATIONS = {"metrics", "nodes"}
CHATS = {
    "chat": {"neighbour": (404, "session_not_found"), "reader": (403, "access")},
    "chat_stream": {"neighbour": (204, ""), "reader": (200, "")},
    "chat_messages": {"neighbour": (200, ""), "reader": (200, "")},
    "ag_ui_run": {"neighbour": (404, "session_not_found"), "reader": (403, "access")},
    "ag_ui_connect": {"neighbour": (200, ""), "reader": (200, "")},
    "ag_ui_read": {"neighbour": (404, "not_found"), "reader": (200, "")},
}
"""Operations that name their session in the body, or as a chat: an unknown one looks like one of another principal."""
PLAIN = {"create_plain_stream", "append_to_plain_stream", "delete_plain_stream", "read_plain_stream"}
"""Operations that name a plain stream, whose rules are those of sessions."""
MCP = {"mcp", "mcp_read", "end_mcp_session"}
"""Operations that name their session in the body: tests/server/api/test_mcp_endpoint.py covers other callers.
"""
A2A = {
    *("a2a", "a2a_send", "a2a_stream", "a2a_list", "a2a_get"),
    *("a2a_cancel", "a2a_subscribe", "a2a_follow"),
}
"""Operations that name their session in a task: tests/server/api/test_a2a_endpoint.py covers other callers.
"""
SUBSCRIPTIONS = {
    *("create_subscription", "show_subscription", "delete_subscription"),
    *("link_streams", "unlink_stream", "claim_wake"),
}
"""Operations on a subscription, which belongs to its owner."""
WAKES = {"report_callback", "report_ack", "release_wake"}
"""Operations that only a worker with the token of its wake may use."""
_RUN: dict[str, object] = {"assistant_id": "agent", "input": {"messages": "hi"}}
THREADS: dict[str, tuple[dict[str, object], bool]] = {
    **{name: ({}, True) for name in ("thread", "thread_state", "thread_history", "search_history")},
    **{name: ({}, True) for name in ("runs", "run", "read_run", "join_run")},
    "thread_events": ({"channels": ["lifecycle"]}, True),
    **dict.fromkeys(("create_run", "stream_run", "wait_run"), (_RUN, False)),
    "graph_command": ({"id": 1, "method": "run.start", "params": _RUN}, False),
    **{name: ({}, False) for name in ("change_thread", "delete_thread", "cancel_graph_run")},
}
"""Operations that name their session as a thread: the body, and whether a reader may use it."""
OPEN = {"health", "ready", "login", "challenge", "agent_card", "webhook_keys"}
OF_SESSIONS = [each for each in OPERATIONS if "{session_id}" in each.path]


@tool(has_effects=False)
def dump() -> str:
    """Return much."""
    return LARGE


@asynccontextmanager
async def _shared() -> AsyncIterator[Served]:
    """Serve a session of Ada's with full content, which Bob may read."""
    app = asgi(
        Agent(ScriptedModel([calls(("dump", "{}")), text("Hello.")]), tools=[dump]),
        store=MemoryStore(),
        access=Access(authenticate=bearer(PEOPLE.get)),
        observers=[Prometheus()],
    )
    async with served(app) as server:
        assert (await post_message(server.http, "s1", ADA)).status_code == 200
        runner = await app.host.session("s1")
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
        assert (await server.http.put("/v1/sessions/s1/readers/bob", headers=ADA)).status_code == 200
        yield server


async def _send_request(
    server: Served, operation: Operation, who: dict[str, str], *, with_stream: bool = True
) -> tuple[int, str]:
    """Send one request; return the status, and the code of a problem."""
    path = operation.path.format(
        **dict.fromkeys(("session_id", "chat", "run", "thread", "stream", "subscription"), "s1"),
        digest=DIGEST,
        reader="bob",
        credential="0" * 16,
        assistant="agent",
        run_id=derived_run_id("s1", 1, 0),
        task="s1~1",
    )
    body = command() if operation.name == "commands" else {}
    if operation.name == "chat":
        body = {"id": "s1", "messages": [{"role": "user", "parts": [{"type": "text", "text": "hi"}]}]}
    if operation.name == "create_subscription":
        body = {"type": "pull-wake", "streams": ["other"], "wake_stream": "pool"}
    if operation.name == "link_streams":
        body = {"streams": ["other"]}
    if operation.name == "claim_wake":
        body = {"worker": "w"}
    if operation.name.startswith("ag_ui"):
        message = {"id": "m", "role": "user", "content": "hi"}
        body = {"threadId": "s1", "runId": "r", "messages": [message]}
    if operation.name in A2A:
        who = {**who, "a2a-version": "1.0"}
    if operation.name in THREADS:
        body, _ = THREADS[operation.name]
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
    """Return all state that a caller without rights must not change."""
    response = [
        await server.http.get(f"/v1/sessions/s1{what}", headers=ADA) for what in ("", "/owner", "/records")
    ]
    return [(answer.status_code, answer.content) for answer in response]


def test_the_tables_name_every_operation() -> None:
    known = (
        READER_OPERATIONS
        | STREAM_OPERATIONS
        | TICKET_OPERATIONS
        | SESSIONLESS_OPERATIONS
        | OPEN
        | OPERATOR_OPERATIONS
        | PLAIN
        | MCP
        | A2A
        | SUBSCRIPTIONS
        | WAKES
        | CHATS.keys()
        | THREADS.keys()
    )
    names = {each.name for each in OPERATIONS}
    assert known <= names
    rest = names - known
    assert {each.name for each in OF_SESSIONS if each.name in rest} == rest, "what else is a session's"


@pytest.mark.parametrize("who", [{}, GUESSER], ids=["stranger", "guesser"])
async def test_an_unauthenticated_caller_is_refused_on_every_endpoint(who: dict[str, str]) -> None:
    async with _shared() as server:
        before = await _state_of(server)
        for operation in OPERATIONS:
            answer = await _send_request(server, operation, who)
            if operation.name == "challenge":
                assert answer == (404, "not_found"), "this server does not authenticate users of its machine"
            elif operation.name in OPEN - {"login"}:
                assert answer == (200, ""), operation.name
            else:
                assert answer == (401, "unauthorized"), operation.name
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
                answer = await _send_request(server, operation, EVE, with_stream=with_stream)
                assert answer == (404, "session_not_found"), operation.name
        assert await _send_request(server, _named("metrics"), EVE) == (403, "access")
        listed = [
            (await server.http.get("/v1/sessions", headers=who)).json()["sessions"] for who in (EVE, BOB, ADA)
        ]
        assert [len(lines) for lines in listed] == [0, 1, 1]
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with server.socket(headers=EVE):
                pass
        assert refused.value.response.status_code == 404
        assert await _state_of(server) == before


async def test_a_reader_can_read_and_change_nothing_on_any_endpoint() -> None:
    async with _shared() as server:
        before = await _state_of(server)
        for operation in OF_SESSIONS:
            response = await _send_request(server, operation, BOB)
            if operation.name in READER_OPERATIONS:
                assert response == (200, ""), operation.name
            elif operation.name == "ticket":
                assert response == (201, ""), operation.name
            else:
                assert response == (403, "access"), operation.name
            if operation.name in STREAM_OPERATIONS:
                assert await _send_request(server, operation, BOB, with_stream=False) == (200, ""), (
                    operation.name
                )
        async with Socket(server.socket(headers=BOB)) as reader:
            await reader.send({"type": "open"})
            assert (await reader.receive())["type"] == "welcome"
        async with Socket(server.socket(headers=BOB)) as speaker:
            await speaker.send(opening())
            assert (await speaker.receive())["code"] == "access"
        assert await _state_of(server) == before


@pytest.mark.parametrize(("who", "token"), [("neighbour", EVE), ("reader", BOB)])
async def test_a_chat_has_the_access_rules_of_its_session(who: str, token: dict[str, str]) -> None:
    async with _shared() as server:
        before = await _state_of(server)
        for name, expected in CHATS.items():
            assert await _send_request(server, _named(name), token) == expected[who], name
        shown = (await server.http.get("/v1/chat/s1/messages", headers=token)).json()["messages"]
        assert bool(shown) == (who == "reader")
        assert await _state_of(server) == before


async def test_a_thread_has_the_access_rules_of_its_session() -> None:
    async with _shared() as server:
        before = await _state_of(server)
        for name, (_, may_read) in THREADS.items():
            assert await _send_request(server, _named(name), EVE) == (404, "session_not_found"), name
            expected = (200, "") if may_read else (403, "access")
            assert await _send_request(server, _named(name), BOB) == expected, name
        found = [
            len((await server.http.post("/v1/langgraph/threads/search", json={}, headers=who)).json())
            for who in (EVE, BOB, ADA)
        ]
        assert found == [0, 1, 1]
        assert await _state_of(server) == before


@pytest.mark.parametrize("who", [ADA, OPERATOR], ids=["owner", "operator"])
async def test_an_owner_and_an_operator_may_use_every_endpoint(who: dict[str, str]) -> None:
    async with _shared() as server:
        assert (await server.http.put("/v1/stream/s1", headers=ADA)).status_code == 201
        await _subscribed(server)
        last = {"delete", "delete_plain_stream", "delete_subscription", "logout", "revoke_all"}
        for operation in sorted(OPERATIONS, key=lambda each: each.name in last):
            if operation.name == "delete_thread":  # It would leave nothing for the other operations.
                continue
            if operation.name in WAKES:
                assert await _send_request(server, operation, who) == (401, "unauthorized"), operation.name
                continue
            status, code = await _send_request(
                server, operation, who, with_stream=operation.name == "commands"
            )
            if operation.name in {"challenge", "revoke", "end_mcp_session"}:
                assert (status, code) == (404, "not_found"), operation.name
            elif operation.name in OPERATOR_OPERATIONS and who is ADA:
                assert (status, code) == (403, "access")
            else:
                assert status not in {401, 403, 404}, (operation.name, status, code)


async def _subscribed(server: Served) -> None:
    """Let Ada create a subscription to a stream of hers."""
    made = await server.http.put(
        "/v1/stream/pool", headers={**ADA, "content-type": "application/json"}, content="[]"
    )
    assert made.status_code == 201
    body = {"type": "pull-wake", "streams": ["s1"], "pattern": "events/*", "wake_stream": "pool"}
    made = await server.http.put("/v1/stream/__ds/subscriptions/s1", headers=ADA, json=body)
    assert made.status_code == 201, made.text


def _named(name: str) -> Operation:
    return next(each for each in OPERATIONS if each.name == name)


async def test_a_plain_stream_belongs_to_its_owner() -> None:
    async with _shared() as server:
        path, text = "/v1/stream/s9", {"content-type": "text/plain"}
        made = await server.http.put(path, content="one", headers={**ADA, **text})
        assert made.status_code == 201
        for method in ("GET", "POST", "PUT", "DELETE"):
            response = await server.http.request(method, path, content="x", headers={**EVE, **text})
            assert (response.status_code, response.json()["code"]) == (404, "session_not_found"), method
        forked = {**EVE, **text, "stream-forked-from": path}
        assert (await server.http.put("/v1/stream/s8", headers=forked)).status_code == 404
        assert (await server.http.get(path, headers=ADA)).text == "one"
        assert "~" not in (await server.http.get("/v1/sessions", headers=ADA)).text
        assert (await server.http.delete(path, headers=ADA)).status_code == 204
        assert (await server.http.put(path, content="two", headers={**EVE, **text})).status_code == 201


async def test_a_subscription_belongs_to_its_owner_and_sees_only_the_streams_of_its_owner() -> None:
    async with _shared() as server:
        text = {"content-type": "text/plain"}
        await _subscribed(server)
        for operation in (_named(name) for name in SUBSCRIPTIONS):
            for who in (EVE, BOB):
                assert await _send_request(server, operation, who) == (404, "session_not_found"), (
                    operation.name
                )
        for name in WAKES:
            assert await _send_request(server, _named(name), EVE) == (401, "unauthorized"), name
        await server.http.put("/v1/stream/events/eve", content="x", headers={**EVE, **text})
        await server.http.put("/v1/stream/events/ada", content="x", headers={**ADA, **text})
        claim = "/v1/stream/__ds/subscriptions/s1/claim"
        claimed = await server.http.post(claim, headers=ADA, json={"worker": "w"})
        assert claimed.status_code == 200, claimed.text
        assert {each["path"] for each in claimed.json()["streams"]} == {"s1", "events/ada"}
        body = {"type": "pull-wake", "streams": ["events/ada"], "wake_stream": "pool"}
        made = await server.http.put("/v1/stream/__ds/subscriptions/s2", headers=EVE, json=body)
        assert made.status_code == 404, "both streams are Ada's"
        release = {"wake_id": claimed.json()["wake_id"], "generation": claimed.json()["generation"]}
        token = {"authorization": f"Bearer {claimed.json()['token']}"}
        for subscription, expected in (("s2", 401), ("s1", 204), ("s1", 409)):
            path = f"/v1/stream/__ds/subscriptions/{subscription}/release"
            response = await server.http.post(path, headers=token, json=release)
            assert response.status_code == expected, response.text
        gone = await server.http.delete("/v1/stream/__ds/subscriptions/s1", headers=ADA)
        assert gone.status_code == 204
        again = await server.http.put("/v1/stream/eves", headers={**EVE, "content-type": "application/json"})
        assert again.status_code == 201
        mine = {**body, "streams": ["eves"], "wake_stream": "eves"}
        made = await server.http.put("/v1/stream/__ds/subscriptions/s1", headers=EVE, json=mine)
        assert made.status_code == 201, "the name is free again"
