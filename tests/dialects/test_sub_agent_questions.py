"""Questions of sub-agents in A2A, AG-UI, AI SDK, LangGraph and MCP: shown, and answered once, by their clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx import HTTPStatusError
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient
from mcp.client.client import Client
from mcp_types import ElicitResult

from midstream.dialects.a2a_messages import A2aOptions, read_message
from midstream.dialects.a2a_stream import A2aFold
from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.run_fold import RunFold
from midstream.protocol.frames import secret_digest_of
from midstream.server.api.run_folds import RunFolds
from midstream.server.app import App, asgi
from midstream.server.auth.access import Access, bearer
from midstream.session.call_references import CallRef
from midstream.session.calls import Choice
from midstream.session.session import Received
from midstream.session.turn.commands import Answer
from midstream.store.memory import MemoryStore
from tests.dialects import a2a_kills, ag_ui_cuts, ui_stream
from tests.dialects.asking_sub_agents import agent
from tests.dialects.chat_agent import LEDGER_VARIABLE
from tests.search import with_long
from tests.server.known_people import ADA, BOB, KNOWN
from tests.server.serving import WAIT_S, Served, served

Json = dict[str, Any]
RESULTS = {
    "one": (["blue"], "noted blue"),
    "two": (["blue", "red"], "noted blue; noted red"),
    "own": (["red"], "blue; noted red"),
    "deep": (["blue"], "noted blue"),
}
"""The notes if the first question is answered with blue and the second with red, and the final answer."""


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ledger.txt"
    monkeypatch.setenv(LEDGER_VARIABLE, str(path))
    return path


def read_notes(ledger: Path) -> list[str]:
    return ledger.read_text(encoding="utf-8").splitlines()


def make_app(access: Access | None = None) -> App:
    return asgi(agent, store=MemoryStore(), access=access)


def user_message(words: str) -> Json:
    return {"messages": [{"role": "user", "content": words}]}


@asynccontextmanager
async def graph(server: Served, headers: Json | None = None) -> AsyncIterator[LangGraphClient]:
    client = get_client(url=f"{server.url}/v1/langgraph", api_key=None, headers=headers or {})
    async with client, asyncio.timeout(WAIT_S):
        yield client


# --- LangGraph --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("story", RESULTS)
async def test_langgraph_shows_interrupts_of_sub_agents_and_accepts_their_answers(
    story: str, ledger: Path
) -> None:
    expected, answer = RESULTS[story]
    async with served(make_app()) as server, graph(server) as client:
        found: Any = await client.runs.wait(story, "agent", input=user_message(story), if_not_exists="create")
        questions = found["__interrupt__"]
        assert len(questions) == (2 if story in ("two", "own") else 1)
        state: Any = await client.threads.get_state(story)
        history: Any = await client.threads.get_history(story)
        assert state["tasks"][0]["interrupts"] == history[0]["interrupts"] == questions
        for status, listed in (("interrupted", [story]), ("busy", []), ("idle", [])):
            threads = await client.threads.search(status=status)  # type: ignore[arg-type]
            assert [each["thread_id"] for each in threads] == listed
        words = dict(zip((each["id"] for each in questions), ("blue", "red"), strict=False))
        found = await client.runs.wait(story, "agent", command={"resume": words})
        decisions = {each["id"]: True for each in found["__interrupt__"]}
        action = found["__interrupt__"][0]["value"]["action_requests"][0]
        assert (action["name"], action["args"]) == ("note", {"what": expected[0]})
        again = (client.runs.wait(story, "agent", command={"resume": decisions}) for _ in range(3))
        for found in await asyncio.gather(*again):  # the same answers are the same run
            assert found["messages"][-1]["content"] == answer
        with pytest.raises(HTTPStatusError):
            await client.runs.wait(story, "agent", command={"resume": dict.fromkeys(decisions, "reject")})
        assert sorted(read_notes(ledger)) == expected
        assert (await client.threads.get(story))["status"] == "idle"


async def test_a_sub_agent_of_another_thread_cannot_be_answered(ledger: Path) -> None:
    access = Access(authenticate=bearer(KNOWN.get))
    async with (
        served(make_app(access)) as server,
        graph(server, ADA) as ada,
        graph(server, BOB) as bob,
    ):
        found: Any = await ada.runs.wait("hers", "agent", input=user_message("one"), if_not_exists="create")
        resume = {found["__interrupt__"][0]["id"]: "stolen"}
        await bob.runs.wait("his", "agent", input=user_message("one"), if_not_exists="create")
        await ada.runs.wait("other", "agent", input=user_message("one"), if_not_exists="create")
        for client, thread in ((bob, "hers"), (bob, "his"), (ada, "other")):
            with pytest.raises(HTTPStatusError):
                await client.runs.wait(thread, "agent", command={"resume": resume})
        state: Any = await ada.threads.get_state("hers")
        assert state["interrupts"] == found["__interrupt__"]


# --- AG-UI ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.skipif(bool(ag_ui_cuts.lacking()), reason=ag_ui_cuts.lacking())
@pytest.mark.parametrize("story", RESULTS)
async def test_ag_ui_shows_interrupts_of_sub_agents_and_accepts_their_answers(
    story: str, ledger: Path
) -> None:
    expected, answer = RESULTS[story]
    async with served(make_app()) as server:
        result = await ag_ui_cuts.run_client(server.url, "people", id="p", text=story, words=["blue", "red"])
        assert (result["errors"], result["finishes"]) == ([], 3)
        assert result["messages"][-1]["content"] == answer
        events = await ag_ui_cuts.read_run(server.url, ag_ui_cuts.body_of("p", "run-p-0"))
        assert ag_ui_cuts.findings(events) == []
        asked = events[-1][1]["outcome"]["interrupts"]
        assert asked[-1]["metadata"]["midstream"]["agents"][-1] == "clerk"
        assert sorted(read_notes(ledger)) == expected


# --- the AI SDK -------------------------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.skipif(bool(ui_stream.lacking()), reason=ui_stream.lacking())
@pytest.mark.parametrize(
    ("story", "way"),
    [
        *((story, "people") for story in RESULTS),
        *with_long([("own", "reversed"), ("two", "alone"), ("own", "alone")], 1),
    ],
)
async def test_a_chat_shows_questions_of_sub_agents_and_accepts_their_answers(
    story: str, way: str, ledger: Path
) -> None:
    expected, answer = RESULTS[story]
    words = ["red", "blue"] if way == "reversed" else ["blue", "red"]
    async with served(make_app()) as server:
        result = await ui_stream.run_client(server.url, way, id="c", text=story, words=words)
        assert (result["errors"], ui_stream.text_of(result["messages"][-1])) == ([], answer)
        (*_, asked), *_ = result["asked"]
        assert (asked["type"], asked["input"]) == ("tool-ask_user", {"question": "Which paint?"})
        assert asked["toolMetadata"]["midstream"]["agents"][-1] == "clerk"
        notes = [part for part in result["messages"][-1]["parts"] if part["type"] == "tool-note"]
        assert sorted(part["output"] for part in notes) == [f"noted {each}" for each in expected]
        assert sorted(read_notes(ledger)) == expected
        # The calls of sub-agents are in no history, so the next message changes nothing in it.
        runner = await server.app.host.session("c")
        before = runner.state.history.entries
        again = {"id": "c", "messages": [*result["messages"], chat_message("two")]}
        repeated = await server.http.post("/v1/chat", json=again)
        assert repeated.text.count("Which paint?") >= 2
        assert runner.state.history.entries[: len(before)] == before


def chat_message(words: str) -> Json:
    return {"id": f"message of {words}", "role": "user", "parts": [{"type": "text", "text": words}]}


async def start_chat(server: Served, chat: str, words: str, headers: Json | None = None) -> list[Json]:
    """Start a chat; return the calls of sub-agents that wait for an answer, as their parts."""
    body = {"id": chat, "messages": [chat_message(words)]}
    response = await server.http.post("/v1/chat", json=body, headers=headers or {})
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    shown = [each for each in chunks if "toolMetadata" in each]
    return [{**each, "type": f"tool-{each['toolName']}", "state": "input-available"} for each in shown]


async def answer_in_chat(
    server: Served, chat: str, part: Json, words: str, headers: Json | None = None
) -> tuple[int, str]:
    """Send an answer as the client does; return the status and the name of the run that it starts."""
    given = {**part, "state": "output-available", "output": words}
    messages = [chat_message("any"), {"id": "answer", "role": "assistant", "parts": [given]}]
    response = await server.http.post(
        "/v1/chat", json={"id": chat, "messages": messages}, headers=headers or {}
    )
    return response.status_code, response.headers.get("x-workflow-run-id", "")


@pytest.mark.parametrize("is_given", [False, True])
async def test_an_answer_to_a_sub_agent_in_a_chat_takes_effect_once_however_often_it_is_sent(
    ledger: Path, *, is_given: bool
) -> None:
    async with served(make_app()) as server:
        first, second = await start_chat(server, "c", "two")
        if is_given:  # a server died after the answer
            host = server.app.host
            fold = await RunFolds(host, RunFold).now(await host.session("c"), "c")
            question = fold.questions[0]
            child = await host.session(question.session)
            ref = CallRef(question.turn, question.response, question.call_id)
            await child.submit(Answer(ref, question.digest, Choice.RESPOND, "blue"))
        sending = (answer_in_chat(server, "c", first, "blue") for _ in range(3))
        assert await asyncio.gather(*sending) == [(200, "c~1.1")] * 3
        assert await answer_in_chat(server, "c", first, "red") == (200, "c~1.1")  # too late
        assert await answer_in_chat(server, "c", second, "red") == (200, "c~1.2")
        shown = (await server.http.get("/v1/chat/c/stream")).text  # as a newly opened page
        assert shown.count("tool-approval-request") == 2
        assert ('{"what":"blue"}' in shown, '{"what":"red"}' in shown) == (True, True)


async def test_a_sub_agent_of_another_chat_cannot_be_answered(ledger: Path) -> None:
    access = Access(authenticate=bearer(KNOWN.get))
    async with served(make_app(access)) as server:
        (part,) = await start_chat(server, "hers", "one", ADA)
        await start_chat(server, "other", "one", ADA)
        await start_chat(server, "his", "one", BOB)
        for headers, chat in ((BOB, "hers"), (BOB, "his"), (ADA, "other")):
            await answer_in_chat(server, chat, part, "stolen", headers)
        shown = await server.http.get("/v1/questions", headers=ADA)
        assert len(shown.json()["questions"]) == 2
        assert await answer_in_chat(server, "hers", part, "blue", ADA) == (200, "hers~1.1")


# --- MCP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize("story", RESULTS)
async def test_mcp_shows_forms_of_sub_agents_and_accepts_their_answers(
    story: str, mode: str, ledger: Path
) -> None:
    words, shown = ["red", "blue"], list[str]()
    expected, answer = RESULTS[story]

    async def on_form(context: Any, params: Any) -> ElicitResult:  # noqa: ANN401 - of the SDK
        shown.append(params.message)
        content: Any = {"confirm": True} if "May `note` run?" in params.message else {"answer": words.pop()}
        return ElicitResult(action="accept", content=content)

    async with (
        served(make_app()) as server,
        asyncio.timeout(WAIT_S),
        Client(f"{server.url}/v1/mcp", mode=mode, elicitation_callback=on_form) as client,
    ):
        result = await client.call_tool("ask", {"message": story})
        assert result.structured_content is not None
        assert sorted(read_notes(ledger)) == expected
        assert result.structured_content["answer"] == answer
        assert len(shown) == (4 if story == "two" else 3 if story == "own" else 2)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_an_mcp_client_without_forms_receives_a_sub_agents_question_as_text(
    mode: str, ledger: Path
) -> None:
    async with served(make_app()) as server, Client(f"{server.url}/v1/mcp", mode=mode) as client:
        result = await client.call_tool("ask", {"message": "one"})
        assert result.structured_content is not None
        assert result.structured_content["waiting"] == ["Which paint?"]


# --- A2A --------------------------------------------------------------------------------------------------------------


def questions_of(task: Json) -> list[Json]:
    assert task["status"]["state"] == "TASK_STATE_INPUT_REQUIRED", task["status"]
    (found,) = [each["data"]["questions"] for each in task["status"]["message"]["parts"] if "data" in each]
    listed: list[Json] = found
    return listed


async def post(server: Served, message: Json) -> Json:
    response = await server.http.post(
        "/v1/a2a/message:send", json={"message": message}, headers={"a2a-version": "1.0"}
    )
    task: Json = response.json()["task"]
    return task


@pytest.mark.fault
@pytest.mark.skipif(bool(a2a_kills.lacking()), reason=a2a_kills.lacking())
@pytest.mark.parametrize(
    ("story", "binding"),
    with_long([("two", "HTTP+JSON"), ("one", "JSONRPC"), ("own", "JSONRPC"), ("deep", "JSONRPC")], 1),
)
async def test_a2a_requires_the_input_of_sub_agents_and_accepts_it(
    story: str, binding: str, ledger: Path
) -> None:
    expected, answer = RESULTS[story]
    async with served(make_app()) as server:

        async def send(name: str, part: Json, **place: str) -> Json:
            message = {"messageId": name, "role": "ROLE_USER", "parts": [part], **place}
            asked = {"url": server.url, "message": message, "binding": binding, "is_streaming": True}
            result = await a2a_kills.run_client(asked)
            assert result["folds"][0]["status"] == result["task"]["status"]
            found: Json = result["task"]
            return found

        task = await send("m", {"text": story}, contextId="c")
        asked = questions_of(task)
        assert len(asked) == (2 if story in ("two", "own") else 1)
        words = dict(zip((each["id"] for each in asked), ("blue", "red"), strict=False))
        number = 0
        while task["status"]["state"] == "TASK_STATE_INPUT_REQUIRED":
            (*_, last) = questions_of(task)
            given: Json = {"data": {"questionId": last["id"], "answer": words.get(last["id"], "yes")}}
            number += 1
            task = await send(f"a{number}", given, taskId=task["id"])
        assert task["status"]["state"] == "TASK_STATE_COMPLETED"
        assert a2a_kills.texts(task)[-1] == answer
        assert sorted(read_notes(ledger)) == expected
        names = [each["messageId"] for each in task["history"] if each["role"] == "ROLE_USER"]
        assert names == ["m", *(f"a{each + 1}" for each in range(number))]


async def test_an_a2a_answer_to_a_sub_agent_takes_effect_once_however_often_it_is_sent(ledger: Path) -> None:
    async with served(make_app()) as server:

        async def send(name: str, part: Json, **place: str) -> Json:
            message = {"messageId": name, "role": "ROLE_USER", "parts": [part], **place}
            headers = {"a2a-version": "1.0"}
            response = await server.http.post(
                "/v1/a2a/message:send", json={"message": message}, headers=headers
            )
            found: Json = response.json()
            return found

        task = (await send("m", {"text": "two"}, contextId="c"))["task"]
        first, second = questions_of(task)
        assert first["id"] != second["id"]
        listed = (await server.http.get("/v1/a2a/tasks", headers={"a2a-version": "1.0"})).json()["tasks"]
        assert questions_of(listed[0]) == [first, second]
        sending = (send("a1", {"text": "blue"}, taskId=task["id"]) for _ in range(3))
        for found in await asyncio.gather(*sending):
            after = found["task"]
            assert [each["reason"] for each in questions_of(after)] == ["confirmation", "input_required"]
        late = {"data": {"questionId": first["id"], "answer": "red"}}
        refused = await send("a2", late, taskId=task["id"])
        assert "error" in refused
        assert questions_of(after)[1] == second


@pytest.mark.parametrize("is_given", [False, True])
async def test_an_a2a_answer_reaches_its_question_if_a_server_died_before_or_after_it(
    ledger: Path, *, is_given: bool
) -> None:
    async with served(make_app()) as server:
        host = server.app.host
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "two"}], "contextId": "c"}
        task = await post(server, message)
        runner = await host.session("c")
        message = {"messageId": "a", "role": "ROLE_USER", "parts": [{"text": "blue"}], "taskId": task["id"]}
        second = (await RunFolds(host, A2aFold).now(runner, "c")).questions[1]
        sent = read_message({"message": message}, A2aOptions())
        mark = f"{sent.stream} {interrupt_id_of(second)}"
        await runner.submit(Received(mark, secret_digest_of(sent.digest), 0, sent.digest, None))
        if is_given:
            ref = CallRef(second.turn, second.response, second.call_id)
            child = await host.session(second.session)
            await child.submit(Answer(ref, second.digest, Choice.RESPOND, "blue"))
        for _ in range(2):
            found = questions_of(await post(server, message))
            assert [each["reason"] for each in found] == ["input_required", "confirmation"]
        assert found[1]["metadata"]["midstream"]["arguments"] == {"what": "blue"}
