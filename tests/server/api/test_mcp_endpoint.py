"""MCP over HTTP: calls by the official client and by raw requests, questions, tasks, cancellation and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp_types import ElicitRequestFormParams, ElicitResult
from msgspec import Struct

from midstream.dialects.mcp_messages import MODERN, TASKS, McpOptions, McpTool
from midstream.engine.agent import Agent
from midstream.environment import Cancellable, World
from midstream.history.messages import UserMessage
from midstream.models.responses import ModelRequest
from midstream.server.api.mcp_endpoint import BACK_S
from midstream.server.app import asgi
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import Gate, Response, ScriptedModel, calls, steps_since_user, text
from midstream.tools.function_tools import question, tool
from tests.server.known_people import ADA, guarded_app
from tests.server.serving import WAIT_S, Served, served

Json = dict[str, Any]
EVE = {"authorization": "Bearer the-token-of-bob"}
HEADERS = {"accept": "application/json, text/event-stream"}
MODES = ["legacy", "auto"]


@tool(needs_approval=True)
def burn(what: str) -> str:
    """Burn something."""
    return f"burnt {what}"


class ObedientModel:
    """A model that obeys the last message."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.calls = 0

    def __call__(self, request: ModelRequest) -> Response:
        words = str([each for each in request.history.entries if isinstance(each, UserMessage)][-1])
        if steps_since_user(request.history):
            return text("Done.")
        self.calls += 1
        self.begun.set()
        if "burn" in words:
            return calls(("burn", '{"what": "tree"}'))
        if "ask" in words:
            return calls(("ask_user", '{"question": "Which?"}'))
        if "wait" in words:
            return [*text("So far.")[:-1], Gate(self.gate), *text(" And on.")]
        return text("Hello you")


@contextlib.asynccontextmanager
async def serving(
    world: World | None = None,
    options: McpOptions = McpOptions(),
) -> AsyncIterator[tuple[Served, ObedientModel]]:
    script = ObedientModel()
    agent = Agent(ScriptedModel(script), tools=[burn, question()])
    async with served(asgi(agent, store=MemoryStore(), world=world, mcp=options)) as server:
        yield server, script


class RawMcpClient(Struct):
    """A hand-written client in an MCP session."""

    http: httpx2.AsyncClient
    headers: dict[str, str]

    async def post(self, method: str, params: Json, rpc_id: object = 1) -> httpx2.Response:
        body = {"jsonrpc": "2.0", "id": rpc_id, "method": method, "params": params}
        return await self.http.post("/v1/mcp", json=body, headers=self.headers)

    async def call(self, words: str, rpc_id: object = 1, **more: object) -> list[Json]:
        """Call `ask`; return the messages of its stream."""
        params = {"name": "ask", "arguments": {"message": words}, "_meta": {"progressToken": "p"}, **more}
        return messages_of((await self.post("tools/call", params, rpc_id)).text)

    async def notify(self, body: Json) -> int:
        response = await self.http.post("/v1/mcp", json={"jsonrpc": "2.0", **body}, headers=self.headers)
        return response.status_code


async def initialized(
    server: Served, version: str = "2025-11-25", headers: Json | None = None, **capabilities: object
) -> RawMcpClient:
    params = {"protocolVersion": version, "capabilities": capabilities}
    body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    response = await server.http.post("/v1/mcp", json=body, headers={**HEADERS, **(headers or {})})
    assert response.json()["result"]["protocolVersion"] == version
    return RawMcpClient(
        server.http, {**HEADERS, **(headers or {}), "mcp-session-id": response.headers["mcp-session-id"]}
    )


async def modern(server: Served, method: str, params: Json, *, tasks: bool = True) -> httpx2.Response:
    headers, body = modern_request(method, params, tasks=tasks)
    return await server.http.post("/v1/mcp", json=body, headers=headers)


def modern_request(method: str, params: Json, *, tasks: bool = False) -> tuple[Json, Json]:
    capabilities: Json = {"extensions": {TASKS: {}}} if tasks else {}
    prefix = "io.modelcontextprotocol/"
    meta = {f"{prefix}protocolVersion": MODERN, f"{prefix}clientCapabilities": capabilities}
    name = params.get("taskId") or params.get("name") or ""
    headers = {**HEADERS, "mcp-protocol-version": MODERN, "mcp-method": method, "mcp-name": name}
    params = {**params, "_meta": {**meta, **params.get("_meta", {})}}
    return headers, {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def messages_of(body: str) -> list[Json]:
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]


def last_id(body: str) -> str:
    return [line[4:] for line in body.splitlines() if line.startswith("id: ")][-1]


@contextlib.asynccontextmanager
async def client_of(
    server: Served, mode: str, on_form: Callable[..., Any] | None = None
) -> AsyncIterator[Client]:
    async with Client(f"{server.url}/v1/mcp", mode=mode, elicitation_callback=on_form) as client:
        yield client


# --- the official client ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_the_official_client_calls_follows_progress_and_continues_a_session(mode: str) -> None:
    words: list[str] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        words.append(message or "")

    async with serving() as (server, script), client_of(server, mode) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["ask"]
        first = await client.call_tool("ask", {"message": "hi"}, progress_callback=on_progress)
        assert "".join(words) == "Hello you"
        assert first.structured_content is not None
        session = first.structured_content["session"]
        second = await client.call_tool("ask", {"message": "again", "session": session})
        assert second.structured_content == {"answer": "Hello you", "session": session}
        waited = await client.call_tool("ask", {"message": "", "session": session})
        assert (waited.structured_content, script.calls) == (second.structured_content, 2)
        refused = await client.call_tool("ask", {"message": "", "session": "none"})
        assert refused.is_error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("words", "content"), [("burn", {"confirm": True}), ("ask", {"answer": "Both"})])
async def test_the_official_client_shows_questions_to_its_user(mode: str, words: str, content: Json) -> None:
    async def on_form(_: object, params: ElicitRequestFormParams) -> ElicitResult:
        assert params.message
        return ElicitResult(action="accept", content=content)

    async with serving() as (server, _), client_of(server, mode, on_form) as client:
        result = await client.call_tool("ask", {"message": words})
        assert result.structured_content is not None
        session = result.structured_content["session"]
        assert result.structured_content["answer"] == "Done."
        records = (await server.http.get(f"/v1/sessions/{session}/records")).text
        assert ("burnt tree" if words == "burn" else "Both") in records


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_without_forms_reads_open_questions_and_waits_for_the_answer_later(mode: str) -> None:
    async with serving() as (server, script), client_of(server, mode) as client:
        result = await client.call_tool("ask", {"message": "burn"})
        assert result.structured_content is not None
        assert "burn" in result.structured_content["waiting"][0]
        session = result.structured_content["session"]
        (open_one,) = (await server.http.get("/v1/questions")).json()["questions"]
        answer = {name: open_one[name] for name in ("turn", "response", "call_id", "digest")}
        response = await server.http.post(
            f"/v1/sessions/{session}/answer", json={"type": "answer", "choice": "allow", **answer}
        )
        assert response.status_code == 202, response.text
        waited = await client.call_tool("ask", {"message": "", "session": session})
        assert (waited.structured_content, script.calls) == ({"answer": "Done.", "session": session}, 1)


# --- raw requests: one call, its streams and its end
# ------------------------------------------------------------------


async def test_a_repeated_request_joins_its_call_and_another_request_cannot_reuse_its_id() -> None:
    async with serving() as (server, script):
        peer = await initialized(server)
        at_once = await asyncio.gather(*(peer.call("hi", 5) for _ in range(3)))
        assert [each[-1] for each in at_once] == [at_once[0][-1]] * 3
        assert (await peer.call("hi", 5)) == at_once[0]
        assert script.calls == 1
        assert (await peer.post("tools/call", {"name": "ask", "arguments": {"message": "ho"}}, 5)).json()[
            "error"
        ]
        other = await initialized(server)
        assert (await other.call("hi", 5))[-1]["result"] != at_once[0][-1]["result"]
        assert script.calls == 2


async def test_a_stream_can_be_resumed_after_its_last_event() -> None:
    async with serving() as (server, _):
        peer = await initialized(server)
        params = {"name": "ask", "arguments": {"message": "hi"}, "_meta": {"progressToken": 1}}
        whole = (await peer.post("tools/call", params)).text
        ids = [line[4:] for line in whole.splitlines() if line.startswith("id: ")]
        for number, name in enumerate(ids):
            rest = await server.http.get("/v1/mcp", headers={**peer.headers, "last-event-id": name})
            expected = messages_of(whole)[number:] or messages_of(whole)[-1:]
            assert messages_of(rest.text) == expected
        refused = await server.http.get("/v1/mcp", headers=peer.headers)
        assert (refused.status_code, refused.headers["allow"]) == (405, "DELETE, POST")
        for headers, status in (
            ({**peer.headers, "last-event-id": "x"}, 404),
            ({"last-event-id": ids[0]}, 400),
        ):
            assert (await server.http.get("/v1/mcp", headers=headers)).status_code == status


async def test_a_long_stream_is_closed_and_resumed_by_another_request() -> None:
    async with serving(options=McpOptions(stream_s=0.05)) as (server, script):
        peer = await initialized(server)
        params = {"name": "ask", "arguments": {"message": "wait"}, "_meta": {"progressToken": 1}}
        begun = (await peer.post("tools/call", params)).text
        assert "retry: 3000" in begun
        script.gate.set()
        body = begun
        while "result" not in body:
            headers = {**peer.headers, "last-event-id": last_id(body)}
            body = (await server.http.get("/v1/mcp", headers=headers)).text
            begun += body
        words = [each["params"]["message"] for each in messages_of(begun) if "params" in each]
        assert "".join(words) == "So far. And on."
        old = await initialized(server, "2025-06-18")
        assert "id: " in (await old.post("tools/call", params)).text


@pytest.mark.parametrize("more", [{}, {"midstream/call": "chosen"}])
@pytest.mark.parametrize("session", ["", "mine"])
async def test_a_cancelled_call_stops_its_turn(session: str, more: Json) -> None:
    async with serving() as (server, script):
        peer = await initialized(server)
        arguments = {"message": "wait", **({"session": session} if session else {})}
        asked = asyncio.create_task(peer.call("wait", 3, arguments=arguments, _meta=more))
        await script.begun.wait()
        cancelled = {"method": "notifications/cancelled", "params": {"requestId": 3}}
        assert await peer.notify(cancelled) == 202
        assert (await asked)[-1]["error"]["code"] == -32800
        assert await peer.notify({"method": "notifications/cancelled", "params": {"requestId": 9}}) == 202


class DueTimersWorld(World):
    """The real world, where the timers of disconnected clients are due at once and counted."""

    def __init__(self) -> None:
        self.left = 0

    def later(self, seconds: float, do: Callable[[], None]) -> Cancellable:
        self.left += seconds == BACK_S
        return super().later(0.0 if seconds == BACK_S else seconds, do)


@pytest.mark.parametrize("chosen", [False, True])
async def test_a_modern_client_cancels_by_disconnecting_unless_its_call_has_an_id(*, chosen: bool) -> None:
    async with serving(DueTimersWorld()) as (server, script):
        meta = {"midstream/call": "mine"} if chosen else {}
        params = {"name": "ask", "arguments": {"message": "wait", "session": "s"}, "_meta": meta}
        leaving = asyncio.create_task(modern(server, "tools/call", params, tasks=False))
        await asyncio.wait_for(script.begun.wait(), WAIT_S)
        leaving.cancel()
        await asyncio.wait([leaving])
        runner = await server.app.host.session("s")
        if chosen:
            script.gate.set()
            again = messages_of((await modern(server, "tools/call", params, tasks=False)).text)
            assert again[-1]["result"]["structuredContent"]["answer"] == "So far. And on."
            assert script.calls == 1
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
        assert runner.state.last_turn is not None
        assert runner.state.last_turn.status.value == ("completed" if chosen else "cancelled")


async def test_a_modern_client_that_reconnects_cancels_nothing() -> None:
    async with serving(DueTimersWorld()) as (server, script):
        params = {
            "name": "ask",
            "arguments": {"message": "wait", "session": "s"},
            "_meta": {"progressToken": 1},
        }
        headers, body = modern_request("tools/call", params)
        reading = {**HEADERS, "mcp-protocol-version": MODERN}
        async with server.http.stream("POST", "/v1/mcp", json=body, headers=headers) as stream:
            text = ""
            async for piece in stream.aiter_text():
                text += piece
                if "far." in text:
                    break
            last = last_id(text.rpartition("\n\n")[0])
            back = server.http.build_request("GET", "/v1/mcp", headers={**reading, "last-event-id": last})
            rest = await server.http.send(
                back, stream=True
            )  # The connection of the first request breaks later.
        script.gate.set()
        messages = messages_of((await rest.aread()).decode())
        assert messages[-1]["result"]["structuredContent"]["answer"] == "So far. And on."


async def test_a_modern_client_that_only_waits_cancels_nothing_by_disconnecting() -> None:
    world = DueTimersWorld()
    async with serving(world) as (server, script):
        peer = await initialized(server)
        asked = asyncio.create_task(peer.call("", 1, arguments={"message": "wait", "session": "s"}))
        await script.begun.wait()
        waiting = {"name": "ask", "arguments": {"message": "", "session": "s"}}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(modern(server, "tools/call", waiting, tasks=False), 0.5)
        script.gate.set()
        assert (await asked)[-1]["result"]["structuredContent"]["answer"] == "So far. And on."
        assert world.left == 0


async def test_a_call_on_a_busy_session_is_refused_and_does_not_disturb_it() -> None:
    async with serving() as (server, script):
        peer = await initialized(server)
        arguments = {"message": "wait", "session": "s"}
        asked = asyncio.create_task(peer.call("", 1, arguments=arguments))
        await script.begun.wait()
        refused = await peer.post(
            "tools/call", {"name": "ask", "arguments": {**arguments, "message": "x"}}, 2
        )
        assert refused.json()["result"]["isError"]
        script.gate.set()
        assert (await asked)[-1]["result"]["structuredContent"]["answer"] == "So far. And on."


# --- tasks ------------------------------------------------------------------------------------------------------------


async def test_a_task_of_a_handshake_client_can_be_polled_and_waited_for() -> None:
    async with serving() as (server, script):
        peer = await initialized(server)
        params: Json = {"name": "ask", "arguments": {"message": "wait"}, "task": {"ttl": 60000}}
        task = (await peer.post("tools/call", params)).json()["result"]["task"]
        assert task["status"] == "working"
        assert (await peer.post("tools/call", params)).json()["result"]["task"]["taskId"] == task["taskId"]
        name = {"taskId": task["taskId"]}
        assert (await peer.post("tasks/get", name, 2)).json()["result"]["status"] == "working"
        waiting = asyncio.create_task(peer.post("tasks/result", name, 3))
        script.gate.set()
        result = messages_of((await waiting).text)[-1]
        assert (result["id"], result["result"]["structuredContent"]["answer"]) == (3, "So far. And on.")
        assert result["result"]["_meta"]["io.modelcontextprotocol/related-task"] == name
        assert (await peer.post("tasks/get", name, 4)).json()["result"]["status"] == "completed"
        assert (await peer.post("tasks/cancel", name, 5)).json()["error"]["code"] == -32602
        assert script.calls == 1


async def test_a_task_of_a_handshake_client_asks_questions_and_can_be_cancelled() -> None:
    async with serving() as (server, _):
        peer = await initialized(server, elicitation={})
        params: Json = {"name": "ask", "arguments": {"message": "burn"}, "task": {}}
        tasks = [
            (await peer.post("tools/call", params, n)).json()["result"]["task"]["taskId"] for n in (1, 2)
        ]
        body = {"jsonrpc": "2.0", "id": 3, "method": "tasks/result", "params": {"taskId": tasks[0]}}
        async with server.http.stream("POST", "/v1/mcp", json=body, headers=peer.headers) as stream:
            found: list[Json] = []
            async for line in stream.aiter_lines():
                found += messages_of(line)
                if found and found[-1].get("method") == "elicitation/create":
                    related = found[-1]["params"]["_meta"]["io.modelcontextprotocol/related-task"]
                    assert related == {"taskId": tasks[0]}
                    answer = {"action": "accept", "content": {"confirm": True}}
                    assert await peer.notify({"id": found.pop()["id"], "result": answer}) == 202
        assert found[-1]["result"]["structuredContent"]["answer"] == "Done."
        assert (await peer.post("tasks/get", {"taskId": tasks[1]}, 4)).json()["result"]["status"] in {
            *("working", "input_required")
        }
        cancelled = (await peer.post("tasks/cancel", {"taskId": tasks[1]}, 5)).json()["result"]
        assert cancelled["status"] == "cancelled"
        ended = messages_of((await peer.post("tasks/result", {"taskId": tasks[1]}, 6)).text)
        assert ended[-1]["error"]["code"] == -32800


async def test_a_long_call_of_a_modern_client_becomes_a_task_and_a_short_one_does_not() -> None:
    async with serving(options=McpOptions(task_after_s=WAIT_S)) as (server, _):
        short = messages_of(
            (await modern(server, "tools/call", {"name": "ask", "arguments": {"message": "hi"}})).text
        )
        assert short[-1]["result"]["resultType"] == "complete"
    async with serving(options=McpOptions(task_after_s=0.3)) as (server, script):
        params = {"name": "ask", "arguments": {"message": "wait"}, "_meta": {"midstream/call": "one"}}
        task = (await modern(server, "tools/call", params)).json()["result"]
        assert (task["resultType"], task["status"]) == ("task", "working")
        script.gate.set()
        status = "working"
        while status == "working":
            found = (await modern(server, "tasks/get", {"taskId": task["taskId"]})).json()["result"]
            status = found["status"]
        assert found["result"]["structuredContent"]["answer"] == "So far. And on."
        assert (await modern(server, "tasks/get", {"taskId": task["taskId"]}, tasks=False)).status_code == 400


# --- refusals ---------------------------------------------------------------------------------------------------------


async def test_a_tool_can_be_called_only_in_its_permitted_task_modes() -> None:
    tools = (McpTool("never", task="forbidden"), McpTool("always", task="required"))
    async with serving(options=McpOptions(tools)) as (server, script):
        peer = await initialized(server)
        for params in ({"name": "never", "task": {}}, {"name": "always"}):
            assert (await peer.post("tools/call", params)).json()["error"]["code"] == -32601
        assert (await peer.post("tools/call", {"name": "none"})).json()["error"]["code"] == -32602
        assert messages_of((await peer.post("tools/call", {"name": "never"}, 2)).text)[-1]["result"][
            "content"
        ]
        old = await initialized(server, "2025-06-18")
        words = (await old.post("tools/call", {"name": "always"}, 2)).text
        assert "retry:" not in words
        assert messages_of(words)[-1]["result"]["content"]
        assert script.calls == 2


async def test_an_mcp_session_is_required_and_ends_with_its_deletion() -> None:
    async with serving() as (server, _):
        peer = await initialized(server)
        stranger = RawMcpClient(server.http, HEADERS)
        assert (await stranger.post("tools/list", {})).status_code == 400
        assert (await peer.post("ping", {})).json() == {"jsonrpc": "2.0", "id": 1, "result": {}}
        assert (await peer.post("logging/setLevel", {})).json()["error"]["code"] == -32601
        assert (await server.http.delete("/v1/mcp", headers=peer.headers)).status_code == 204
        for response in (
            await peer.post("ping", {}),
            await server.http.delete("/v1/mcp", headers=peer.headers),
        ):
            assert response.status_code == 404


async def test_calls_of_other_principals_are_not_found() -> None:
    app = guarded_app([text("Secret")], store=MemoryStore())
    async with served(app) as server:
        ada, eve = await initialized(server, headers=ADA), await initialized(server, headers=EVE)
        params = {"name": "ask", "arguments": {"message": "hi", "session": "hers"}, "task": {}}
        task = (await ada.post("tools/call", params)).json()["result"]["task"]
        stream = (await ada.post("tasks/result", {"taskId": task["taskId"]}, 2)).text
        assert "Secret" in stream
        for method in ("tasks/get", "tasks/result", "tasks/cancel"):
            assert (await eve.post(method, {"taskId": task["taskId"]}, 3)).json()["error"]["code"] == -32602
        read = await server.http.get("/v1/mcp", headers={**eve.headers, "last-event-id": last_id(stream)})
        assert read.status_code == 404
        words = (
            await eve.post("tools/call", {**params, "arguments": {"message": "", "session": "hers"}}, 4)
        ).text
        assert "Secret" not in words
        words = (await eve.post("tools/call", params, 5)).text
        assert "no session" in words
        assert (await initialized(server, headers=EVE)).headers
        assert (await server.http.post("/v1/mcp", json={})).status_code == 401
