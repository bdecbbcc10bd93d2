"""A2A over HTTP: tasks started once, followed, answered, cancelled, listed and refused, in both bindings."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from midstream.dialects.a2a_messages import A2aOptions
from midstream.engine.agent import Agent
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.server.app import App, asgi
from midstream.server.auth.access import Access, bearer
from midstream.server.auth.principals import Principal
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import (
    Gate,
    Response,
    Script,
    ScriptedModel,
    ScriptedStep,
    calls,
    steps_since_user,
    text,
)
from midstream.tools.function_tools import question, tool
from tests.server.serving import WAIT_S, Served, served

Json = dict[str, Any]
VERSION = {"a2a-version": "1.0"}
PATH = "/v1/a2a"
COMPLETED, INPUT_REQUIRED = "TASK_STATE_COMPLETED", "TASK_STATE_INPUT_REQUIRED"


@tool(needs_approval=True)
def burn(what: str) -> str:
    """Burn something."""
    return f"burnt {what}"


def answer(request: ModelRequest) -> Response:
    """Obey the last message, then answer."""
    if steps_since_user(request.history):
        return text("Done.")
    words = str([each for each in request.history.entries if isinstance(each, UserMessage)][-1])
    if "ask" in words:
        return calls(("ask_user", '{"question": "Which?"}'), ("ask_user", '{"question": "When?"}'))
    if "burn" in words:
        return calls(("burn", '{"what": "a"}'))
    return text("Hello you.")


def make(script: Script = answer, *, access: Access | None = None, **options: Any) -> App:  # noqa: ANN401 - of A2aOptions
    agent = Agent(ScriptedModel(script), tools=[burn, question()], name="helper")
    return asgi(agent, store=MemoryStore(), access=access, a2a=A2aOptions(**options))


def message(words: str = "hi", name: str = "m", **more: object) -> Json:
    return {"message": {"messageId": name, "role": "ROLE_USER", "parts": [{"text": words}], **more}}


async def rpc(server: Served, method: str, params: Json, **headers: str) -> Json:
    """Return the response to a method."""
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    response = await server.http.post(PATH, json=body, headers={**VERSION, **headers})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json"), (
        response.text
    )
    found: Json = response.json()
    assert (found["jsonrpc"], found["id"]) == ("2.0", 7)
    return found


async def result(server: Served, method: str, params: Json) -> Json:
    found = await rpc(server, method, params)
    assert "result" in found, found
    answered: Json = found["result"]
    return answered


async def error(server: Served, method: str, params: Json) -> int:
    code: int = (await rpc(server, method, params))["error"]["code"]
    return code


def events_of(body: str) -> list[Json]:
    return [
        json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")
    ]


async def events(server: Served, method: str, params: Json) -> list[Json]:
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    response = await server.http.post(PATH, json=body, headers=VERSION)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    return [each["result"] for each in events_of(response.text)]


async def test_a_repeated_or_concurrent_message_starts_one_task() -> None:
    asked = Counter[str]()

    def counted(request: ModelRequest) -> Response:
        asked["times"] += 1
        return answer(request)

    async with served(make(counted)) as server:
        found = await asyncio.gather(*(result(server, "SendMessage", message()) for _ in range(5)))
        assert all(each == found[0] for each in found)
        task = found[0]["task"]
        assert task["status"]["state"] == COMPLETED
        assert [each["parts"] for each in task["artifacts"]] == [[{"text": "Hello you."}]]
        assert [each["messageId"] for each in task["history"]] == ["m"]
        streamed = await events(server, "SendStreamingMessage", message())
        assert [*streamed[0]] == ["task"]
        assert streamed[-1]["statusUpdate"]["status"] == task["status"]
        assert await result(server, "GetTask", {"id": task["id"]}) == task
        assert asked["times"] == 1
        other = await result(server, "SendMessage", message("other"))
        assert other["task"]["contextId"] != task["contextId"]


async def test_tasks_of_one_context_run_one_after_another() -> None:
    async with served(make()) as server:
        first = (await result(server, "SendMessage", message(contextId="c")))["task"]
        second = (await result(server, "SendMessage", message(contextId="c", name="n")))["task"]
        assert (first["id"], second["id"], second["contextId"]) == ("c~1", "c~2", "c")
        assert await result(server, "GetTask", {"id": "c~1"}) == first
        assert len((await server.http.get("/v1/sessions/c")).json()["history"]) == 4


async def test_a_task_can_be_followed_from_any_moment_and_ends_every_stream() -> None:
    gate = asyncio.Event()
    script: Script = [[TextDelta("Hello "), Gate(gate), TextDelta("you"), Finished()]]
    async with served(make(script)) as server:
        begun = await result(
            server, "SendMessage", {**message(), "configuration": {"returnImmediately": True}}
        )
        name = begun["task"]["id"]
        assert begun["task"]["status"]["state"] == "TASK_STATE_WORKING"
        assert await error(server, "SendMessage", message(name="n", taskId=name)) == -32004
        assert (
            await error(server, "SendMessage", message(name="n", contextId=begun["task"]["contextId"]))
            == -32004
        )
        body = {"jsonrpc": "2.0", "id": 7, "method": "SubscribeToTask", "params": {"id": name}}
        url = f"{PATH}/tasks/{name}:subscribe"
        async with (
            server.http.stream("POST", PATH, json=body, headers=VERSION) as first,
            server.http.stream("GET", url, headers=VERSION) as second,
        ):
            lines = [each.aiter_lines() for each in (first, second)]
            firsts = [json.loads((await anext(each)).removeprefix("data: ")) for each in lines]
            assert "task" in firsts[1]
            assert firsts[0]["result"] == firsts[1]
            gate.set()
            rest = [events_of("\n".join([line async for line in each])) for each in lines]
        assert [each["result"] for each in rest[0]] == rest[1]
        assert rest[1][-1]["statusUpdate"]["status"]["state"] == COMPLETED
        assert await error(server, "SubscribeToTask", {"id": name}) == -32004


async def test_questions_are_answered_in_turn_and_once() -> None:
    async with served(make()) as server:
        task = (await result(server, "SendMessage", message("ask")))["task"]
        assert task["status"]["state"] == INPUT_REQUIRED
        words = [each["text"] for each in task["status"]["message"]["parts"] if "text" in each]
        assert words == ["Which?", "When?"]
        first = message("This one", "a1", taskId=task["id"])
        found = await asyncio.gather(*(result(server, "SendMessage", first) for _ in range(3)))
        assert all(each == found[0] for each in found)
        after = found[0]["task"]
        assert after["status"]["state"] == INPUT_REQUIRED
        assert [each["text"] for each in after["status"]["message"]["parts"] if "text" in each] == ["When?"]
        streamed = await events(server, "SendStreamingMessage", message("Now", "a2", taskId=task["id"]))
        assert [*streamed[0]] == ["task"]
        done = await result(server, "GetTask", {"id": task["id"]})
        assert done["status"]["state"] == COMPLETED
        content = [
            (each["messageId"], each["parts"][0]["text"])
            for each in done["history"]
            if "USER" in each["role"]
        ]
        assert content == [("m", "ask"), ("a1", "This one"), ("a2", "Now")]
        assert (await result(server, "SendMessage", first))["task"] == done
        assert await error(server, "SendMessage", message("More", "a3", taskId=task["id"])) == -32004


@pytest.mark.parametrize(
    ("value", "expected"),
    [("yes", "burnt a"), ({"approved": True, "editedArgs": {"what": "b"}}, "burnt b"), ("no", "declined")],
)
async def test_a_message_decides_an_approval(value: object, expected: str) -> None:
    async with served(make()) as server:
        task = (await result(server, "SendMessage", message("burn")))["task"]
        part = {"text": value} if isinstance(value, str) else {"data": value}
        assert await error(server, "SendMessage", message("perhaps", "p", taskId=task["id"])) == -32602
        given = message(name="d", taskId=task["id"])
        given["message"]["parts"] = [part]
        assert (await result(server, "SendMessage", given))["task"]["status"]["state"] == COMPLETED
        session = (await server.http.get(f"/v1/sessions/{task['contextId']}")).json()
        assert expected in json.dumps(session["history"])


async def test_a_question_can_be_addressed_by_its_id() -> None:
    async with served(make()) as server:
        task = (await result(server, "SendMessage", message("ask")))["task"]
        (asked,) = [
            each["data"]["questions"] for each in task["status"]["message"]["parts"] if "data" in each
        ]
        given = message(name="a", taskId=task["id"])
        given["message"]["parts"] = [{"data": {"questionId": asked[1]["id"], "answer": "Now"}}]
        after = (await result(server, "SendMessage", given))["task"]
        assert [each["text"] for each in after["status"]["message"]["parts"] if "text" in each] == ["Which?"]


async def test_a_task_is_cancelled_once() -> None:
    script: Script = [[TextDelta("Hello "), Gate(asyncio.Event())]]
    async with served(make(script)) as server:
        begun = await result(
            server, "SendMessage", {**message(), "configuration": {"returnImmediately": True}}
        )
        name = begun["task"]["id"]
        waiting = asyncio.create_task(result(server, "SendMessage", message()))
        cancelled = await result(server, "CancelTask", {"id": name})
        assert cancelled["status"]["state"] == "TASK_STATE_CANCELED"
        assert (await waiting)["task"] == cancelled == await result(server, "GetTask", {"id": name})
        assert await error(server, "CancelTask", {"id": name}) == -32002


async def test_tasks_are_listed_newest_first_in_pages() -> None:
    async with served(make()) as server:
        names = []
        for number in range(5):
            params = message(name=f"m{number}", contextId=f"c{number % 2}")
            names.append((await result(server, "SendMessage", params))["task"]["id"])
        found, token = list[Json](), ""
        while True:
            page = await result(server, "ListTasks", {"pageSize": 2, "pageToken": token, "historyLength": 0})
            assert (page["totalSize"], page["pageSize"]) == (5, len(page["tasks"]))
            found += page["tasks"]
            token = page["nextPageToken"]
            if not token:
                break
        assert [each["id"] for each in found] == names[::-1]
        assert not any("artifacts" in each or "history" in each for each in found)
        of_one = await result(server, "ListTasks", {"contextId": "c1", "includeArtifacts": True})
        assert [each["id"] for each in of_one["tasks"]] == ["c1~2", "c1~1"]
        assert all(each["artifacts"] and each["history"] for each in of_one["tasks"])
        assert (await result(server, "ListTasks", {"status": INPUT_REQUIRED}))["tasks"] == []
        assert (await result(server, "ListTasks", {"contextId": "none"}))["totalSize"] == 0
        later = {"statusTimestampAfter": "2999-01-01T00:00:00Z"}
        assert (await result(server, "ListTasks", later))["tasks"] == []
        for wrong in ({"pageSize": 0}, {"pageSize": 101}, {"pageToken": "x"}, {"status": "done"}):
            assert await error(server, "ListTasks", wrong) == -32602, wrong


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("GetTask", {"id": "nothing"}, -32001),
        ("GetTask", {"id": "c~1"}, -32001),
        ("CancelTask", {"id": "c~1"}, -32001),
        ("SubscribeToTask", {"id": "c~1"}, -32001),
        ("SendMessage", message(taskId="c~1"), -32001),
        ("SendMessage", message(contextId="no name"), -32602),
        ("SendMessage", message(taskId="c~1", contextId="d"), -32602),
        ("GetTask", {"id": "c~1", "historyLength": -1}, -32602),
        ("CreateTaskPushNotificationConfig", {"taskId": "c~1"}, -32003),
        ("GetExtendedAgentCard", {}, -32004),
        ("message/send", {}, -32601),
    ],
)
async def test_a_missing_task_or_method_is_refused(method: str, params: Json, code: int) -> None:
    async with served(make()) as server:
        assert await error(server, method, params) == code
        assert (await server.http.get("/v1/sessions")).json()["sessions"] == []


async def test_unsupported_versions_and_invalid_bodies_are_refused() -> None:
    async with served(make()) as server:
        body = {"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": "c~1"}}
        for version, code in (("", -32009), ("0.3", -32009), ("99.0", -32009), ("1.0.2", -32001)):
            response = await server.http.post(PATH, json=body, headers={"a2a-version": version})
            assert response.json()["error"]["code"] == code
        for wrong, code in ((b"{", -32700), (b"[]", -32600), (b'{"jsonrpc": "1.0", "method": "x"}', -32600)):
            headers = {**VERSION, "content-type": "application/json"}
            response = await server.http.post(f"{PATH}/", content=wrong, headers=headers)
            assert response.json()["error"]["code"] == code
        response = await server.http.post(
            PATH, content=b"{}", headers={**VERSION, "content-type": "text/plain"}
        )
        assert response.json()["error"]["code"] == -32005


async def test_the_http_binding_serves_all_operations() -> None:
    async with served(make()) as server:
        sent = await server.http.post(f"{PATH}/message:send", json=message(contextId="c"), headers=VERSION)
        task = sent.json()["task"]
        got = await server.http.get(f"{PATH}/tasks/c~1", params={"historyLength": 0}, headers=VERSION)
        assert got.json() == {name: value for name, value in task.items() if name != "history"}
        params = {"contextId": "c", "includeArtifacts": "true", "A2A-Version": "1.0"}
        listed = await server.http.get(f"{PATH}/tasks", params=params)
        assert listed.json()["tasks"] == [task]
        streamed = await server.http.post(
            f"{PATH}/message:stream", json=message(contextId="c"), headers=VERSION
        )
        assert [*events_of(streamed.text)[0]] == ["task"]
        refused = [
            await server.http.post(f"{PATH}/tasks/c~1:cancel", headers=VERSION),
            await server.http.post(f"{PATH}/tasks/c~1:subscribe", headers=VERSION),
            await server.http.get(f"{PATH}/tasks/d~1", headers=VERSION),
            await server.http.get(f"{PATH}/tasks/c~1/pushNotificationConfigs/x", headers=VERSION),
            await server.http.delete(f"{PATH}/tasks/c~1/pushNotificationConfigs/x", headers=VERSION),
            await server.http.get(f"{PATH}/extendedAgentCard", headers=VERSION),
            await server.http.get(f"{PATH}/tasks/c~1"),
        ]
        found = [(each.status_code, each.json()["error"]["details"][0]["reason"]) for each in refused]
        assert found == [
            (400, "TASK_NOT_CANCELABLE"),
            (400, "UNSUPPORTED_OPERATION"),
            (404, "TASK_NOT_FOUND"),
            (400, "PUSH_NOTIFICATION_NOT_SUPPORTED"),
            (400, "PUSH_NOTIFICATION_NOT_SUPPORTED"),
            (400, "UNSUPPORTED_OPERATION"),
            (400, "VERSION_NOT_SUPPORTED"),
        ]


async def test_an_answer_can_be_a_direct_message() -> None:
    app = make(is_direct=lambda sent: sent["messageId"].startswith("d"))
    async with served(app) as server:
        for name in ("d1", "d2"):
            (only,) = await events(server, "SendStreamingMessage", message(name=name))
            found = await result(server, "SendMessage", message(name=name))
            assert found == only
            assert (found["message"]["role"], found["message"]["parts"]) == (
                "ROLE_AGENT",
                [{"text": "Hello you."}],
            )
        assert "task" in await result(server, "SendMessage", message("ask", "d3"))


async def test_messages_with_one_id_are_distinct_where_ids_are_not_unique() -> None:
    async with served(make(has_unique_ids=False)) as server:
        tasks = [(await result(server, "SendMessage", message()))["task"]["id"] for _ in range(2)]
        assert len({*tasks}) == 2
        known = [
            (await result(server, "SendMessage", message(contextId="c")))["task"]["id"] for _ in range(2)
        ]
        assert known == ["c~1", "c~1"]


async def test_the_agent_card_is_public_and_tasks_are_visible_to_their_principal_and_readers() -> None:
    people = {"ada": Principal("ada"), "eve": Principal("eve")}
    app = make(access=Access(authenticate=bearer(people.get)))
    async with served(app) as server:
        card = await server.http.get("/.well-known/agent-card.json")
        assert card.json()["supportedInterfaces"][0]["url"] == f"{server.url}{PATH}"
        assert "bearer" in card.json()["securitySchemes"]
        again = await server.http.get(
            "/.well-known/agent-card.json", headers={"if-none-match": card.headers["etag"]}
        )
        assert again.status_code == 304
        body = {"jsonrpc": "2.0", "id": 7, "method": "SendMessage", "params": message()}
        assert (await server.http.post(PATH, json=body, headers=VERSION)).status_code == 401
        ada, eve = ({**VERSION, "authorization": f"Bearer {name}"} for name in ("ada", "eve"))
        mine = (await server.http.post(PATH, json=body, headers=ada)).json()["result"]["task"]
        theirs = (await server.http.post(PATH, json=body, headers=eve)).json()["result"]["task"]
        assert mine["contextId"] != theirs["contextId"], "equal messages of two principals are two tasks"
        asked = {"jsonrpc": "2.0", "id": 7, "method": "GetTask", "params": {"id": mine["id"]}}
        assert (await server.http.post(PATH, json=asked, headers=eve)).json()["error"]["code"] == -32001
        listed = await server.http.get(f"{PATH}/tasks", headers=eve)
        assert [each["id"] for each in listed.json()["tasks"]] == [theirs["id"]]
        url = f"/v1/sessions/{mine['contextId']}/readers/eve"
        shared = await server.http.put(url, headers={**ada, "x-midstream": "1"})
        assert shared.status_code == 200, shared.text
        asked = {"jsonrpc": "2.0", "id": 7, "method": "GetTask", "params": {"id": mine["id"]}}
        assert (await server.http.post(PATH, json=asked, headers=eve)).json()["result"] == mine
        for method in ("SendMessage", "CancelTask"):
            params = {"id": mine["id"], **message(contextId=mine["contextId"])}
            body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
            assert (await server.http.post(PATH, json=body, headers=eve)).status_code == 403, method
        removed = await server.http.delete(url, headers={**ada, "x-midstream": "1"})
        assert removed.status_code == 200, removed.text
        foreign = await server.http.get(f"{PATH}/tasks", params={"contextId": mine["contextId"]}, headers=eve)
        assert foreign.json()["tasks"] == []


async def test_a_client_that_disconnects_does_not_stop_its_task() -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    def response(_: ModelRequest) -> list[ScriptedStep]:
        begun.set()
        return [TextDelta("Hello "), Gate(gate), TextDelta("you"), Finished()]

    async with served(make(response)) as server:
        sending = server.http.post(f"{PATH}/message:send", json=message(contextId="c"), headers=VERSION)
        leaving = asyncio.create_task(sending)
        await asyncio.wait_for(begun.wait(), WAIT_S)
        leaving.cancel()
        await asyncio.wait([leaving])
        gate.set()
        answer = await server.http.post(f"{PATH}/message:send", json=message(contextId="c"), headers=VERSION)
        assert answer.json()["task"]["artifacts"][0]["parts"] == [{"text": "Hello you"}]
