"""The thread protocol over HTTP: commands, and all events of a thread as one stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from midstream.dialects.langgraph_protocol import CHANNELS
from midstream.server.app import App
from tests.server.api.test_langgraph_runs_endpoint import answer, burn, graph, user_input
from tests.server.known_people import ADA, guarded_app
from tests.server.serving import WAIT_S, make_app, served

Json = dict[str, Any]
BASE = "/v1/langgraph/threads/t"


def app() -> App:
    return make_app(answer, tools=[burn])


async def command(http: httpx2.AsyncClient, method: str, number: int = 1, **params: object) -> Json:
    response: Json = (
        await http.post(f"{BASE}/commands", json={"id": number, "method": method, "params": params})
    ).json()
    return response


async def events(http: httpx2.AsyncClient, last: str, **body: object) -> list[Json]:
    """Return the events up to the lifecycle event with this name."""
    found: list[Json] = []
    body = {"channels": sorted(CHANNELS), **body}
    async with http.stream("POST", f"{BASE}/stream/events", json=body) as got:
        assert got.status_code == 200, await got.aread()
        async for event in _events(got):
            found.append(event)
            if event["method"] == "lifecycle" and event["params"]["data"]["event"] == last:
                return found
    raise AssertionError(found)


async def _events(got: httpx2.Response) -> AsyncIterator[Json]:
    async for line in got.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


async def test_a_command_answers_an_interrupt_and_the_thread_continues() -> None:
    async with served(app()) as server, asyncio.timeout(WAIT_S):
        http = server.http
        begun = await command(http, "run.start", assistant_id="agent", input=user_input("burn", id="m1"))
        assert (begun["type"], begun["meta"]) == ("success", {"applied_through_seq": 0})
        paused = await events(http, "interrupted")
        asked = next(each["params"]["data"] for each in paused if each["method"] == "input.requested")
        assert (await command(http, "agent.getTree"))["result"]["tree"]["status"] == "interrupted"
        entry = {"namespace": [], "interrupt_id": asked["interrupt_id"], "response": True}
        assert (await command(http, "input.respond", 7, **entry))["id"] == 7
        since = paused[-1]["seq"]
        rest = await events(http, "completed", since=since)
        assert [each["seq"] for each in rest] == [*range(since + 1, since + 1 + len(rest))]
        tools = [each["params"]["data"]["event"] for each in rest if each["method"] == "tools"]
        assert tools == ["tool-started", "tool-finished"]
        assert await events(http, "completed") == paused + rest
        repeated = await command(http, "input.respond", **entry)
        assert repeated["type"] == "success", "a repetition of an answer whose reply was lost"
        late = await command(http, "input.respond", **{**entry, "response": False})
        assert (late["type"], late["error"]) == ("error", "no_such_interrupt")
        again = await command(http, "run.start", assistant_id="agent", input=user_input("hi"))
        assert again["meta"]["applied_through_seq"] == rest[-1]["seq"]


async def test_a_thread_without_messages_can_be_followed_before_its_first_run() -> None:
    async with served(app()) as server, asyncio.timeout(WAIT_S):
        http = server.http
        await http.post("/v1/langgraph/threads", json={"thread_id": "t"})
        following = asyncio.create_task(events(http, "completed", channels=["lifecycle"]))
        await command(http, "run.start", assistant_id="agent", input=user_input("hi"))
        assert [each["params"]["data"]["event"] for each in await following] == ["running", "completed"]


@pytest.mark.parametrize(
    ("method", "params", "error"),
    [
        ("state.fork", {}, "unknown_command"),
        ("run.start", {"assistant_id": 3}, "invalid_argument"),
        ("input.respond", {}, "invalid_argument"),
        ("input.respond", {"responses": []}, "invalid_argument"),
        ("input.respond", {"interrupt_id": "x", "response": 1, "goto": "agent"}, "not_supported"),
    ],
)
async def test_invalid_commands_get_protocol_errors(method: str, params: Json, error: str) -> None:
    async with served(app()) as server, asyncio.timeout(WAIT_S):
        response = await command(server.http, method, **params)
        assert (response["type"], response["id"], response["error"]) == ("error", 1, error)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"channels": []}, 400),
        ({"channels": ["nothing"]}, 400),
        ({"channels": ["values"], "since": -1}, 400),
        ({"channels": ["values"]}, 404),
    ],
)
async def test_unsupported_streams_are_refused(body: Json, status: int) -> None:
    async with served(app()) as server, asyncio.timeout(WAIT_S):
        refused = await server.http.post(f"{BASE}/stream/events", json=body)
        assert refused.status_code == status


async def test_a_thread_of_another_principal_cannot_be_followed() -> None:
    async with served(guarded_app(answer)) as server, asyncio.timeout(WAIT_S):
        start = {
            "id": 1,
            "method": "run.start",
            "params": {"assistant_id": "agent", "input": user_input("hi")},
        }
        begun = await server.http.post(f"{BASE}/commands", json=start, headers=ADA)
        assert begun.json()["type"] == "success"
        bob = {"authorization": "Bearer the-token-of-bob"}
        refused = await server.http.post(f"{BASE}/stream/events", json={"channels": ["values"]}, headers=bob)
        assert refused.status_code in (403, 404)
        assert (await server.http.get(f"{BASE}/state", headers=bob)).status_code in (403, 404)


async def test_the_sdk_stream_yields_messages_tools_and_the_output() -> None:
    async with graph() as client:
        async with client.threads.stream(assistant_id="agent") as thread:
            await thread.run.start(input=user_input("burn"))
            async for _ in thread.subscribe(["input"]):
                break
            interrupts = list(thread.interrupts)
            while not interrupts:
                await asyncio.sleep(0)
                interrupts = list(thread.interrupts)
            await thread.run.respond("approve")
            output: Any = await thread.output
            assert output["messages"][-1]["content"] == "Done."
        async with client.threads.stream(thread.thread_id, assistant_id="agent") as thread:
            await thread.run.start(input=user_input("hi"))
            messages = [each async for each in thread.messages]
            assert [str(await each.text) for each in messages] == ["You said hi."]
