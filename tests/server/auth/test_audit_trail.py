"""The audited requests, their events, and refusal of acts that cannot be audited."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import pytest

from midstream.client import connect
from midstream.server.api.route_table import OPERATIONS
from midstream.server.audit_log import AuditLog
from midstream.server.auth.audit_trail import event_of
from midstream.store.memory import MemoryStore
from tests.server.known_people import ADA, guarded_app, post_message, status_and_code
from tests.server.serving import asgi_client, served
from tests.spec import spec

WAIT_S = 60.0
NOT_WRITTEN = {"health", "ready", "openapi", "me", "challenge", "probe_events", "probe_poll", "probe_chunks"}
NOT_WRITTEN |= {"graph_info", "search_assistants", "assistant", "assistant_schemas", "assistant_graph"}
NOT_WRITTEN |= {"end_mcp_session", "agent_card"}
NOT_WRITTEN |= {"webhook_keys"}


@spec("SEC-24")
def test_every_operation_is_an_audit_event_or_listed_as_none() -> None:
    found = {
        each.name: event_of(
            {"type": "http", "method": each.method},
            re.sub(r"\{\w+\}", "s1", each.path),
        )
        for each in OPERATIONS
    }
    assert {name for name, event in found.items() if not event} == NOT_WRITTEN
    assert {found["delete"], found["answer"], found["viewer"], found["records"]} == {
        "delete",
        "answer",
        "share",
        "read",
    }


def test_a_poll_is_audited_once_for_its_connection() -> None:
    scope = {"type": "http", "method": "GET", "query_string": b"wait=1&n=0"}
    path = "/v1/sessions/s1/poll"
    assert event_of(scope, path) == "read"
    assert event_of({**scope, "query_string": b"n=7"}, path) == ""


@spec("SEC-24")
@pytest.mark.skipif(os.name != "posix", reason="a folder without write permission")
async def test_an_act_that_cannot_be_audited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    app = guarded_app(store=MemoryStore(), audit=log)
    async with asgi_client(app) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        path.unlink()
        path.mkdir()
        assert status_and_code(await client.delete("/v1/sessions/s1", headers=ADA)) == (503, "unavailable")
        assert status_and_code(await post_message(client, "s2", ADA)) == (503, "unavailable")
        path.rmdir()
        assert (await client.get("/v1/sessions/s1", headers=ADA)).status_code == 200
        assert status_and_code(await client.get("/v1/sessions/s2", headers=ADA)) == (404, "session_not_found")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["outcome"]) for line in lines] == [
        ("read", "admitted"),
        ("read", "session_not_found"),
    ]


@spec("SEC-24")
async def test_acts_on_a_chat_are_audited_with_its_session(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    app = guarded_app(store=MemoryStore(), audit=AuditLog(path))
    message = {"role": "user", "parts": [{"type": "text", "text": "hi"}]}
    async with asgi_client(app) as client:
        body = {"id": "c", "messages": [message]}
        assert (await client.post("/v1/chat", json=body, headers=ADA)).status_code == 200
        assert (await client.get("/v1/chat/c~1.0/stream", headers=ADA)).status_code == 200
        path.unlink()
        path.mkdir()
        assert status_and_code(await client.post("/v1/chat", json={**body, "id": "d"}, headers=ADA)) == (
            503,
            "unavailable",
        )
        path.rmdir()
        assert await app.host.store.find("d") is None
        assert (await client.get("/v1/chat/c/messages", headers=ADA)).status_code == 200
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["session"], line["principal"]) for line in lines] == [("read", "c", "ada")]


@spec("SEC-24")
async def test_acts_on_a_thread_are_audited_with_its_session(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    app = guarded_app(store=MemoryStore(), audit=AuditLog(path))
    base = "/v1/langgraph/threads"
    run = {"assistant_id": "agent", "input": {"messages": "hi"}}
    async with asgi_client(app) as client:
        made = await client.post(base, json={"thread_id": "t"}, headers=ADA)
        assert made.status_code == 200
        assert (await client.post(f"{base}/t/runs/wait", json=run, headers=ADA)).status_code == 200
        assert (await client.get(f"{base}/t/state", headers=ADA)).status_code == 200
        assert (await client.delete(f"{base}/t", headers=ADA)).status_code == 204
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["session"], line["principal"]) for line in lines] == [
        ("send", "t", "ada"),
        ("send", "t", "ada"),
        ("read", "t", "ada"),
        ("delete", "t", "ada"),
    ]


@spec("SEC-24")
async def test_acts_on_an_ag_ui_thread_are_audited_with_its_session(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    app = guarded_app(store=MemoryStore(), audit=AuditLog(path))
    run = {"threadId": "t", "runId": "r", "messages": [{"id": "u", "role": "user", "content": "hi"}]}
    async with asgi_client(app) as client:
        assert (await client.post("/v1/ag-ui", json=run, headers=ADA)).status_code == 200
        assert (await client.get("/v1/ag-ui/threads/t/runs/r", headers=ADA)).status_code == 200
        assert (await client.post("/v1/ag-ui/connect", json=run, headers=ADA)).status_code == 200
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["outcome"], line.get("session"), line["principal"]) for line in lines] == [
        ("send", "admitted", "t", "ada"),
        ("read", "admitted", "t", "ada"),
        ("read", "admitted", "t", "ada"),
    ]


@spec("SEC-24")
async def test_acts_of_an_mcp_client_are_audited_with_the_session_of_the_call(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    app = guarded_app(store=MemoryStore(), audit=AuditLog(path))
    async with asgi_client(app) as client:
        begun = await client.post(
            "/v1/mcp", json={"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {}}, headers=ADA
        )
        headers = {**ADA, "mcp-session-id": begun.headers["mcp-session-id"]}
        params = {"name": "ask", "arguments": {"message": "hi", "session": "t"}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        response = await client.post("/v1/mcp", json=body, headers=headers)
        last = re.findall(r"^id: (.*)$", response.text, re.MULTILINE)[-1]
        assert (await client.get("/v1/mcp", headers={**headers, "last-event-id": last})).status_code == 200
        assert (await client.delete("/v1/mcp", headers=headers)).status_code == 204
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["outcome"], line.get("session"), line["principal"]) for line in lines] == [
        ("send", "admitted", "t", "ada"),
        ("read", "admitted", "t", "ada"),
    ]


async def test_acts_on_streams_and_subscriptions_are_audited_with_their_journals(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    app = guarded_app(store=MemoryStore(), audit=AuditLog(path))
    json_type = {"content-type": "application/json"}
    subscription = "/v1/stream/__ds/subscriptions/sub"
    async with asgi_client(app) as client:
        assert (await client.put("/v1/stream/a/b", headers={**ADA, **json_type})).status_code == 201
        body = {"type": "pull-wake", "streams": ["a/b"], "wake_stream": "a/b"}
        assert (await client.put(subscription, json=body, headers=ADA)).status_code == 201
        sent = await client.post("/v1/stream/a/b", content="[1]", headers={**ADA, **json_type})
        assert sent.status_code == 204
        wake = (await client.post(f"{subscription}/claim", json={"worker": "w"}, headers=ADA)).json()
        token = {"authorization": f"Bearer {wake['token']}"}
        report = {"wake_id": wake["wake_id"], "generation": wake["generation"]}
        assert (await client.post(f"{subscription}/release", json=report, headers=token)).status_code == 204
        refused = await client.post(f"{subscription}/release", json=report, headers=ADA)
        assert refused.status_code == 401
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [
        (line["event"], line["outcome"], line.get("session", ""), line.get("principal", "")) for line in lines
    ]
    assert ("send", "admitted", "~a~b", "ada") in found
    assert found[-2:] == [
        ("send", "admitted", "~__ds~sub", ""),
        ("send", "unauthorized", "", ""),
    ]
    assert {each[2] for each in found} == {"~a~b", "~__ds~sub", ""}


@spec("SEC-24")
async def test_each_command_of_a_connection_has_one_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    app = guarded_app(store=MemoryStore(), audit=AuditLog(path))
    async with (
        served(app) as server,
        connect(server.url, headers=ADA, state=tmp_path / "state.db", transport="websocket") as client,
    ):
        for word in ("hi", "again"):
            async for _ in client.send("s", word):
                pass
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(line["event"], line["outcome"], line.get("session"), line["principal"]) for line in lines]
    assert found == [(event, "admitted", "s", "ada") for event in ("read", "send", "read", "send")]


@spec("SEC-24")
@pytest.mark.skipif(os.name != "posix", reason="a folder without write permission")
async def test_a_command_of_a_connection_that_cannot_be_audited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    app, was_refused = guarded_app(store=MemoryStore(), audit=AuditLog(path)), asyncio.Event()
    async with (
        asyncio.timeout(WAIT_S),
        served(app) as server,
        connect(
            server.url,
            headers=ADA,
            state=tmp_path / "state.db",
            transport="websocket",
            on_reconnecting=lambda _session, _is_reconnecting: was_refused.set(),
        ) as client,
    ):
        async for _ in client.send("s", "hi"):
            pass
        runner = await app.host.session("s")
        waiting = client.send("s", "again")
        path.unlink()
        path.mkdir()
        asking = asyncio.create_task(anext(waiting))
        await was_refused.wait()
        assert (asking.done(), runner.state.turns) == (False, 1)
        path.rmdir()
        await asking
        async for _ in waiting:
            pass
        assert runner.state.turns == 2
