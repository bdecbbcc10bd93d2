"""Chats over HTTP: a request starts a turn once, and the client's copy of the conversation is authoritative."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest

from midstream.history.messages import Step, UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.server.api.chat_endpoint import REPEATED_S
from midstream.server.app import App
from midstream.session.turn.states import RunningCalls
from midstream.testing.scripted_model import Gate, Response, ScriptedModel, calls, text
from midstream.tools.function_tools import question, tool
from tests.server.known_people import ADA, BOB, EVE, TENANTS, Later, guarded_app
from tests.server.serving import WAIT_S, asgi_client, make_app, served
from tests.server.test_kept import _until as until

Json = dict[str, Any]


def user(words: str, name: str = "m1") -> Json:
    return {"id": name, "role": "user", "parts": [{"type": "text", "text": words}]}


def assistant(words: str, *parts: Json) -> Json:
    return {"id": "a1", "role": "assistant", "parts": [{"type": "text", "text": words}, *parts]}


async def post(
    client: httpx2.AsyncClient, *messages: Json, headers: Mapping[str, str] | None = None, **fields: object
) -> httpx2.Response:
    body = {"id": "c", "messages": messages, "trigger": "submit-message", **fields}
    return await client.post("/v1/chat", json=body, headers=headers)


def chunks(answer: httpx2.Response) -> list[Json]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-vercel-ai-ui-message-stream"] == "v1"
    *data, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(each) for each in data]


def text_of(answer: httpx2.Response) -> str:
    return "".join(chunk["delta"] for chunk in chunks(answer) if chunk["type"] == "text-delta")


def count(request: ModelRequest) -> Response:
    """Answer with the conversation that the model received: the user's texts and the number of responses."""
    messages = [entry.parts[0] for entry in request.history.entries if isinstance(entry, UserMessage)]
    steps = sum(isinstance(entry, Step) for entry in request.history.entries)
    return text(f"{[getattr(part, 'text', '') for part in messages]} {steps}")


def model_of(app: App) -> ScriptedModel:
    model = app.host.agent.model
    assert isinstance(model, ScriptedModel)
    return model


async def test_a_repeated_request_joins_its_turn() -> None:
    app = make_app([text("Hello you")])
    async with asgi_client(app) as client:
        first, again = await post(client, user("hi")), await post(client, user("hi"))
        assert text_of(first) == text_of(again) == "Hello you"
        assert first.headers["x-workflow-run-id"] == again.headers["x-workflow-run-id"] == "c~1.0"
        assert len(model_of(app).requests) == 1


async def test_a_request_repeated_during_its_turn_joins_it_and_both_receive_the_whole_answer() -> None:
    gate = asyncio.Event()
    app = make_app([[TextDelta("Hello "), Gate(gate), TextDelta("you"), Finished()]])
    async with asgi_client(app) as client, asyncio.timeout(WAIT_S):
        both = [asyncio.ensure_future(post(client, user("hi"))) for _ in range(2)]
        await until(lambda: app.open_streams == 2)
        gate.set()
        assert [text_of(each) for each in await asyncio.gather(*both)] == ["Hello you", "Hello you"]
        assert len(model_of(app).requests) == 1


async def test_a_regeneration_runs_once_per_request_and_again_after_the_repetition_window() -> None:
    world = Later()
    app = make_app(count, world=world)
    async with asgi_client(app) as client:
        await post(client, user("hi"))
        runs = []
        for _ in range(2):
            for _ in range(2):
                answer = await post(client, user("hi"), trigger="regenerate-message")
                runs.append(answer.headers["x-workflow-run-id"])
            world.ahead_s += REPEATED_S + 1
        assert runs == ["c~2.0", "c~2.0", "c~3.0", "c~3.0"]
        assert text_of(answer) == "['hi'] 0"  # The model does not receive the answer that is replaced.


async def test_the_history_of_the_client_replaces_that_of_the_session() -> None:
    async with asgi_client(make_app(count)) as client:
        first = text_of(await post(client, user("one")))
        kept = [user("one"), assistant(first)]
        assert text_of(await post(client, *kept, user("two", "m2"))) == "['one', 'two'] 1"
        assert (
            text_of(await post(client, user("uno"), assistant("si"), user("two", "m3"))) == "['uno', 'two'] 1"
        )
        assert text_of(await post(client, user("three", "m4"))) == "['three'] 0"
        shown = (await client.get("/v1/chat/c/messages")).json()["messages"]
        assert [message["id"] for message in shown] == ["c~u0", "c~4"]


async def test_a_chat_can_move_to_a_server_without_its_history() -> None:
    async with asgi_client(make_app(count)) as client:
        assert text_of(await post(client, user("one"), assistant("1"), user("two"))) == "['one', 'two'] 1"


async def test_the_next_message_stops_the_running_turn() -> None:
    gate = asyncio.Event()
    answers: list[Response] = [[TextDelta("Hel"), Gate(gate)], text("yes")]
    app = make_app(lambda _: answers.pop(0))
    async with asgi_client(app) as client, asyncio.timeout(WAIT_S):
        first = asyncio.ensure_future(post(client, user("hi")))
        await until(lambda: app.open_streams == 1)
        second = await post(client, user("hi"), user("more", "m2"))
        assert text_of(second) == "yes"
        assert [chunk["type"] for chunk in chunks(await first)][-2:] == ["abort", "finish"]


async def test_a_text_message_answers_a_question_of_the_agent() -> None:
    app = make_app([calls(("ask_user", '{"question": "which?"}')), text("thanks")], tools=[question()])
    async with asgi_client(app) as client, asyncio.timeout(WAIT_S):
        first = chunks(await post(client, user("hi")))
        assert [chunk["type"] for chunk in first[-3:]] == ["tool-input-available", "finish-step", "finish"]
        part = {"type": "tool-ask_user", "toolCallId": "c1", "state": "output-available", "output": "blue"}
        again = await post(client, user("hi"), assistant("", part))
        assert again.headers["x-workflow-run-id"] == "c~1.1"
        assert text_of(again) == "thanks"
        assert text_of(await post(client, user("hi"), assistant("", part))) == "thanks", "a repetition"
        whole = await client.get("/v1/chat/c/stream")
        assert [chunk["type"] for chunk in chunks(whole)].count("start") == 1
        assert text_of(whole) == "thanks"


async def test_a_chat_cannot_answer_a_tool_call_of_another_client() -> None:
    app = make_app([calls(("look", "{}")), text("thanks")])
    spec = {"spec": {"name": "look", "description": "", "parameters": {}}}
    async with asgi_client(app) as client, asyncio.timeout(WAIT_S):
        sent = {"type": "send", "parts": [{"type": "text", "text": "hi"}], "tools": [spec]}
        keys = {"x-idempotency-key": "k", "x-idempotent-encryption-key": "s" * 43}
        frame = {"type": "command", "seqno": 0, "payload": sent}
        await client.post("/v1/sessions/c/commands", json=frame, headers=keys)
        runner = await app.host.session("c")
        await until(lambda: isinstance(runner.state.turn, RunningCalls))
        part = {"type": "tool-look", "toolCallId": "c1", "state": "output-available", "output": "x"}
        await post(client, user("hi"), assistant("", part))
        assert runner.state.is_live


async def test_a_chat_belongs_to_the_principal_that_started_it() -> None:
    async with asgi_client(guarded_app()) as client:
        assert (await post(client, user("hi"))).status_code == 401
        assert text_of(await post(client, user("hi"), headers=ADA)) == "Hello."
        assert (await post(client, user("hi"), headers=BOB)).status_code == 404
        for path in ("c/stream", "c~1.0/stream", "unknown/stream"):
            assert (await client.get(f"/v1/chat/{path}", headers=BOB)).status_code == 204
        assert (await client.get("/v1/chat/c/messages", headers=BOB)).json()["messages"] == []
        assert text_of(await client.get("/v1/chat/c~1.0/stream", headers=ADA)) == "Hello."
        assert (await client.get("/v1/chat/c/stream")).status_code == 401


async def test_each_tenant_has_its_own_chats() -> None:
    async with asgi_client(guarded_app(known=TENANTS)) as client:
        mine = await post(client, user("hi"), headers=ADA)
        theirs = await post(client, user("hi"), headers=EVE)
        assert mine.headers["x-workflow-run-id"] == theirs.headers["x-workflow-run-id"] == "c~1.0"
        assert (await client.get("/v1/chat/c/messages", headers=BOB)).json()["messages"] == []


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"messages": []}, 400),
        ({"id": "a/b"}, 400),
        ({"id": "a~1"}, 400),
        ({"messages": [assistant("x")]}, 400),
    ],
)
async def test_an_invalid_chat_request_is_refused(fields: Json, status: int) -> None:
    async with asgi_client(make_app()) as client:
        body = {"id": "c", "messages": [user("hi")], **fields}
        assert (await client.post("/v1/chat", json=body)).status_code == status


async def test_a_run_can_be_read_from_any_chunk_and_from_its_end() -> None:
    async with asgi_client(make_app([text("Hello you")])) as client:
        everything = chunks(await post(client, user("hi")))
        for start in range(len(everything) + 1):
            found = await client.get(f"/v1/chat/c~1.0/stream?startIndex={start}")
            assert chunks(found) == everything[start:]
        last = await client.get("/v1/chat/c~1.0/stream?startIndex=-2")
        assert chunks(last) == everything[-2:]
        assert int(last.headers["x-workflow-stream-tail-index"]) == len(everything) - 1
        assert (await client.get("/v1/chat/c~1.0/stream?startIndex=x")).status_code == 400


async def test_reading_a_run_that_does_not_exist_returns_no_content() -> None:
    async with asgi_client(make_app([text("Hello you")])) as client:
        await post(client, user("hi"))
        for path in ("unknown", "c~2.0", "c~x.0", "c~1", "c~1.0.0", "c~0.0"):
            assert (await client.get(f"/v1/chat/{path}/stream")).status_code == 204, path


async def test_a_server_tool_runs_once_for_two_readers() -> None:
    ran = []

    @tool
    def note() -> str:
        """Note."""
        ran.append(1)
        return "noted"

    async with served(make_app([calls(("note", "{}")), text("done")], tools=[note])) as server:
        first = await post(server.http, user("hi"))
        again = await server.http.get("/v1/chat/c/stream")
        assert chunks(first) == chunks(again)
        assert ran == [1]
