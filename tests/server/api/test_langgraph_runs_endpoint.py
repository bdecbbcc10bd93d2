"""Runs of LangGraph's clients against sessions: created, followed, joined, cancelled, interrupted and resumed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import pytest
from httpx import HTTPStatusError
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient

from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.server.app import App
from midstream.testing.scripted_model import Gate, Response, calls, steps_since_user, text
from midstream.tools.function_tools import question, tool
from tests.dialects.langgraph_stream import lacking, run_client
from tests.server.known_people import ADA, guarded_app
from tests.server.serving import WAIT_S, make_app, served

Json = dict[str, Any]
BOB: Json = {"authorization": "Bearer the-token-of-bob"}


@tool(needs_approval=True)
def burn(what: str) -> str:
    """Burn something."""
    return f"burnt {what}"


def answer(request: ModelRequest) -> Response:
    """Ask a question or call `burn`, as the last message directs; then answer."""
    if steps_since_user(request.history):
        return text("Done.")
    last = [each for each in request.history.entries if isinstance(each, UserMessage)][-1]
    words = "".join(getattr(part, "text", "") for part in last.parts)
    if "ask" in words:
        return calls(("ask_user", '{"question": "Which?"}'))
    if "both" in words:
        return calls(("burn", '{"what": "a"}'), ("burn", '{"what": "b"}'))
    if "burn" in words:
        return calls(("burn", '{"what": "paper"}'))
    return text(f"You said {words}.")


def slow(gate: asyncio.Event) -> App:
    """Make an app whose agent stops in the middle of its answer to `slow`."""

    def answered(request: ModelRequest) -> Response:
        if "slow" in str(request.history.entries[-1]):
            return [TextDelta("Hello "), Gate(gate), TextDelta("you"), Finished()]
        return answer(request)

    return make_app(answered)


def user_input(words: str, **more: object) -> Json:
    return {"messages": [{"role": "user", "content": words, **more}]}


@asynccontextmanager
async def graph(app: App | None = None, headers: Json | None = None) -> AsyncIterator[LangGraphClient]:
    async with served(app or make_app(answer, tools=[burn, question()])) as server, asyncio.timeout(WAIT_S):
        client = get_client(url=f"{server.url}/v1/langgraph", api_key=None, headers=headers or {})
        async with client:
            yield client


async def last_text(client: LangGraphClient, thread: str) -> str:
    state: Any = await client.threads.get_state(thread)
    return str(state["values"]["messages"][-1]["content"])


async def test_a_run_streams_its_modes_and_can_be_joined_after_any_event() -> None:
    async with graph() as client:
        thread = (await client.threads.create())["thread_id"]
        begun: list[str] = []
        parts = [
            part
            async for part in client.runs.stream(
                thread,
                "agent",
                input=user_input("hi"),
                stream_mode=["values", "updates", "messages-tuple"],
                on_run_created=lambda run: begun.append(run["run_id"]),
            )
        ]
        kinds = [part.event for part in parts]
        assert kinds == ["metadata", "values", "messages", "messages", "updates", "values"]
        assert parts[0].data == {"run_id": begun[0], "attempt": 1}
        assert [each["content"] for each in parts[-1].data["messages"]] == ["hi", "You said hi."]
        for number, part in enumerate(parts):
            rest = client.runs.join_stream(
                thread, begun[0], stream_mode=["values", "updates", "messages-tuple"], last_event_id=part.id
            )
            assert [each async for each in rest] == parts[number + 1 :]
        only = client.runs.join_stream(thread, begun[0], stream_mode="updates", last_event_id="-1")
        assert [each.id async for each in only] == [parts[0].id, parts[4].id]
        assert await client.runs.join(thread, begun[0]) == parts[-1].data


async def test_an_approval_is_an_interrupt_and_its_answer_starts_the_next_run() -> None:
    async with graph() as client:
        thread = (await client.threads.create())["thread_id"]
        paused: Any = await client.runs.wait(thread, "agent", input=user_input("burn it"))
        (asked,) = paused["__interrupt__"]
        request = asked["value"]["action_requests"][0]
        assert (request["name"], request["args"]) == ("burn", {"what": "paper"})
        state: Any = await client.threads.get_state(thread)
        assert (state["next"], state["tasks"][0]["interrupts"]) == (["tools"], [asked])
        assert (await client.threads.get(thread))["status"] == "interrupted"
        edit = {"type": "edit", "edited_action": {"name": "burn", "args": {"what": "wood"}}}
        done: Any = await client.runs.wait(thread, "agent", command={"resume": {"decisions": [edit]}})
        assert [each["content"] for each in done["messages"]] == [
            "burn it",
            "",
            done["messages"][2]["content"],
            "Done.",
        ]
        assert done["messages"][2]["content"].endswith("burnt wood")
        runs = await client.runs.list(thread)
        assert [run["status"] for run in runs] == ["success", "success"]


@pytest.mark.parametrize(
    ("resume", "result"),
    [
        (True, "burnt paper"),
        ("no", "declined"),
        ({"type": "accept"}, "burnt paper"),
        ([{"type": "response", "args": "too hot"}], "too hot"),
        ({"decisions": [{"type": "reject", "message": "too hot"}]}, "too hot"),
    ],
)
async def test_decisions_are_accepted_in_every_form_that_clients_send(resume: object, result: str) -> None:
    async with graph() as client:
        await client.runs.wait("t", "agent", input=user_input("burn"), if_not_exists="create")
        done: Any = await client.runs.wait("t", "agent", command={"resume": resume})
        assert result in done["messages"][2]["content"]


async def test_a_text_answers_one_question_and_several_are_answered_by_id() -> None:
    async with graph() as client:
        await client.runs.wait("t", "agent", input=user_input("ask"), if_not_exists="create")
        done: Any = await client.runs.wait("t", "agent", command={"resume": "the small one"})
        assert done["messages"][2]["content"] == "the small one"
        paused: Any = await client.runs.wait("t", "agent", input=user_input("both"))
        first, second = paused["__interrupt__"]
        with pytest.raises(HTTPStatusError):
            await client.runs.wait("t", "agent", command={"resume": True})
        answers = {first["id"]: True, second["id"]: "reject"}
        done = await client.runs.wait("t", "agent", command={"resume": answers})
        results = [each["content"] for each in done["messages"] if each["type"] == "tool"][-2:]
        assert results[0] == "burnt a"
        assert results[1] != "burnt b"
        with pytest.raises(HTTPStatusError):
            await client.runs.wait("t", "agent", command={"resume": True})


async def test_the_same_message_sent_twice_is_one_run() -> None:
    async with graph() as client:
        sent = user_input("hi", id="m1")
        first = await client.runs.create("t", "agent", input=sent, if_not_exists="create")
        second = await client.runs.create("t", "agent", input=sent)
        assert first["run_id"] == second["run_id"]
        done: Any = await client.runs.join("t", first["run_id"])
        assert [each["id"] for each in done["messages"]] == ["m1", "ai-1"]


async def test_the_multitask_strategy_decides_the_effect_of_a_message_on_the_running_run() -> None:
    gate = asyncio.Event()
    async with graph(slow(gate)) as client:
        first = await client.runs.create("t", "agent", input=user_input("slow"), if_not_exists="create")
        with pytest.raises(HTTPStatusError, match="already running") as refused:
            await client.runs.create("t", "agent", input=user_input("two"), multitask_strategy="reject")
        assert refused.value.response.status_code == 409
        queued = await client.runs.create("t", "agent", input=user_input("two"))
        assert queued["status"] == "pending"
        assert (await client.runs.get("t", queued["run_id"]))["status"] == "pending"
        dropped = await client.runs.create("t", "agent", input=user_input("never"))
        await client.runs.cancel("t", dropped["run_id"])
        gate.set()
        done: Any = await client.runs.join("t", queued["run_id"])
        assert [each["content"] for each in done["messages"]] == ["slow", "Hello you", "two", "You said two."]
        assert (await client.runs.get("t", first["run_id"]))["status"] == "success"
        with pytest.raises(HTTPStatusError, match="no run"):
            await client.runs.get("t", dropped["run_id"])


async def test_a_run_can_be_cancelled_and_interrupted_by_the_next_one() -> None:
    gate = asyncio.Event()
    async with graph(slow(gate)) as client:
        first = await client.runs.create("t", "agent", input=user_input("slow"), if_not_exists="create")
        await client.runs.cancel("t", first["run_id"], wait=True)
        assert (await client.runs.get("t", first["run_id"]))["status"] == "interrupted"
        ends = [part async for part in client.runs.join_stream("t", first["run_id"], last_event_id="-1")]
        assert (ends[-1].event, ends[-1].data["error"]) == ("error", "UserInterrupt")
        joined: Any = await client.runs.join("t", first["run_id"])
        assert joined["__error__"]["error"] == "UserInterrupt"
        await client.runs.create("t", "agent", input=user_input("slow"))
        done: Any = await client.runs.wait(
            "t", "agent", input=user_input("three"), multitask_strategy="interrupt"
        )
        assert done["messages"][-1]["content"] == "You said three."


@pytest.mark.parametrize("wanted", ["cancel", "continue"])
async def test_a_disconnecting_client_stops_its_run_only_where_it_requested_that(
    wanted: Literal["cancel", "continue"],
) -> None:
    gate = asyncio.Event()
    async with graph(slow(gate)) as client:
        parts = client.runs.stream(
            "t",
            "agent",
            input=user_input("slow"),
            stream_mode="messages-tuple",
            on_disconnect=wanted,
            if_not_exists="create",
        )
        async for part in parts:
            if part.event == "messages":
                break
        await parts.aclose()  # type: ignore[attr-defined]
        run = (await client.runs.list("t"))[0]["run_id"]
        if wanted == "continue":
            gate.set()
        await client.runs.join("t", run)
        assert (await client.runs.get("t", run))["status"] == {
            "cancel": "interrupted",
            "continue": "success",
        }[wanted]


async def test_a_failed_run_reports_its_error_and_a_run_without_input_resumes_it() -> None:
    attempts: list[int] = []

    def failing(_: ModelRequest) -> Response:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("broken")
        return text("Repaired.")

    async with graph(make_app(failing)) as client:
        with pytest.raises(Exception, match=r"broken|failed"):
            await client.runs.wait("t", "agent", input=user_input("one"), if_not_exists="create")
        thread: Any = await client.threads.get("t")
        assert thread["status"] == "error"
        state: Any = await client.threads.get_state("t")
        assert state["tasks"][0]["error"]
        done: Any = await client.runs.wait("t", "agent", input=None)
        assert done["messages"][-1]["content"] == "Repaired."


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"assistant_id": "other"}, "no assistant"),
        ({"stream_mode": "events"}, "stream_mode"),
        ({"stream_mode": ["values", "debug"]}, "stream_mode"),
        ({"checkpoint_id": "1f"}, "checkpoint_id"),
        ({"interrupt_before": "*"}, "interrupt_before"),
        ({"webhook": "https://x.example"}, "webhook"),
        ({"multitask_strategy": "rollback"}, "multitask_strategy"),
        ({"command": {"goto": "agent"}}, "command.goto"),
        ({"input": {"messages": []}}, "messages"),
        ({"input": {"question": "?"}}, "messages"),
        ({"input": user_input("x", role="system")}, "system"),
        ({"input": user_input("")}, "no text"),
    ],
)
async def test_an_unsupported_option_is_refused_by_name(fields: Json, words: str) -> None:
    async with graph() as client, httpx.AsyncClient(base_url=str(client.http.client.base_url)) as http:
        body = {"assistant_id": "agent", "input": user_input("hi"), "if_not_exists": "create", **fields}
        refused = await http.post("/threads/t/runs/stream", json=body)
        assert refused.status_code in (400, 404), refused.text
        assert words in refused.json()["detail"]
        assert (await http.get("/threads/t")).status_code == 404, "it left something behind"


async def test_options_without_effect_are_named_and_messages_keep_their_files() -> None:
    async with graph() as client, httpx.AsyncClient(base_url=str(client.http.client.base_url)) as http:
        blocks = [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        ]
        body = {
            "assistant_id": "agent",
            "input": {"messages": [{"type": "human", "content": blocks}]},
            "if_not_exists": "create",
            "config": {"recursion_limit": 5},
            "metadata": {"a": 1},
        }
        answered = await http.post("/threads/t/runs/wait", json=body)
        assert answered.headers["x-midstream-ignored"] == "config, metadata"
        human = answered.json()["messages"][0]
        assert human["content"][1] == {"type": "image", "mime_type": "image/png", "base64": "aGk="}


async def test_a_thread_belongs_to_the_principal_that_created_it() -> None:
    async with served(guarded_app(answer, tools=[burn])) as server, asyncio.timeout(WAIT_S):
        url = f"{server.url}/v1/langgraph"
        ada, bob = (get_client(url=url, api_key=None, headers=each) for each in (ADA, BOB))
        async with ada, bob:
            await _are_apart(ada, bob)


async def _are_apart(ada: LangGraphClient, bob: LangGraphClient) -> None:
    for name in ("empty", "spoken"):
        await ada.threads.create(thread_id=name)
    await ada.runs.wait("spoken", "agent", input=user_input("hi"))
    for name in ("empty", "spoken"):
        with pytest.raises(HTTPStatusError) as refused:
            await bob.threads.get(name)
        assert refused.value.response.status_code in (401, 403, 404)
        with pytest.raises(HTTPStatusError):
            await bob.runs.wait(name, "agent", input=user_input("hi"))
    reported = []
    for name in ("spoken", "nobody"):
        with pytest.raises(HTTPStatusError) as refused:
            await bob.runs.create(name, "agent", input=user_input("hi"))
        reported.append(
            (refused.value.response.status_code, refused.value.response.json()["detail"].replace(name, ""))
        )
    assert reported[0] == reported[1], "names can be probed"
    found = await ada.threads.search()
    assert [each["thread_id"] for each in found] == ["spoken"]
    assert await last_text(ada, "spoken") == "You said hi."


@pytest.mark.skipif(bool(lacking()), reason=lacking())
async def test_the_react_hook_shows_an_interrupt_and_resumes_with_a_decision() -> None:
    async with served(make_app(answer, tools=[burn])) as server, asyncio.timeout(WAIT_S * 2):
        resume = {"decisions": [{"type": "approve"}]}
        result = await run_client(server.url, "decide", thread="t", text="burn", resume=resume, agent="agent")
        assert result["asked"][0]["action_requests"][0]["args"] == {"what": "paper"}
        assert [each["content"] for each in result["messages"] if each["type"] == "tool"] == ["burnt paper"]
        assert json.dumps(result["messages"]).count("Done.") == 1
