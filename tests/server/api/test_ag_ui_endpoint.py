"""AG-UI over HTTP: runs are started once, read again, answered and refused, and always end with an end event."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx2
import pytest

from midstream.dialects.ag_ui_messages import CONTINUES
from midstream.dialects.ag_ui_stream import stream_name
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.protocol.frames import secret_digest_of
from midstream.session.session import Received
from midstream.session.turn.commands import CallFinished
from midstream.testing.scripted_model import Gate, Response, calls, steps_since_user, text
from midstream.tools.function_tools import question, tool
from tests.dialects.ag_ui_cuts import Event, body_of, events_of, findings
from tests.server.serving import Served, make_app, served

pytest.importorskip("ag_ui_validate")
Json = dict[str, Any]
LOOK: Json = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
PATH = "/v1/ag-ui"


@tool(needs_approval=True)
def burn(what: str) -> str:
    """Burn something."""
    return f"burnt {what}"


async def run(server: Served, body: Json, last: str = "", path: str = PATH) -> list[Event]:
    """Return the events of a request's run; they are a valid stream."""
    headers = {"last-event-id": last} if last else {}
    answer = await server.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    events = events_of(answer.text)
    assert findings(events) == []
    assert events[-1][1]["type"] in ("RUN_FINISHED", "RUN_ERROR")
    return events


def messages_in(events: list[Event]) -> list[Json]:
    """Return the messages of the newest snapshot."""
    found: list[Json] = [e for _, e in events if e["type"] == "MESSAGES_SNAPSHOT"][-1]["messages"]
    return found


def answer(request: ModelRequest) -> Response:
    """Obey the last message, then answer."""
    if steps_since_user(request.history):
        return text("Done.")
    words = str([each for each in request.history.entries if isinstance(each, UserMessage)][-1])
    if "ask" in words:
        return calls(("ask_user", '{"question": "Which?"}'))
    if "burn" in words:
        return calls(("burn", '{"what": "a"}'), ("burn", '{"what": "b"}'))
    if "look" in words:
        return calls(("look", "{}"), ("look", "{}"))
    return text("Hello you.")


async def test_a_repeated_or_concurrent_request_starts_one_run() -> None:
    asked = Counter[str]()

    def counted(request: ModelRequest) -> Response:
        asked["times"] += 1
        return answer(request)

    async with served(make_app(counted)) as server:
        found = await asyncio.gather(*(run(server, body_of("t", "r")) for _ in range(5)))
        assert all(each == found[0] for each in found)
        assert await run(server, {**body_of("t", "r"), "messages": []}) == found[0]
        again = await run(server, body_of("t", "r"), found[0][3][0])
        assert [each for each in again if each[0]] == found[0][4:]
        assert asked["times"] == 1


async def test_a_new_message_continues_the_thread_and_stops_the_running_turn() -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    def slow(request: ModelRequest) -> Response:
        if "slow" in str(request.history.entries[-1]):
            begun.set()
            return [TextDelta("Hel"), Gate(gate), TextDelta("lo"), Finished()]
        return answer(request)

    async with served(make_app(slow)) as server:
        first = asyncio.create_task(run(server, body_of("t", "r1", "slow")))
        await asyncio.wait_for(begun.wait(), 60)
        messages = [*body_of("t", "")["messages"], {"id": "m2", "role": "user", "content": "now"}]
        messages[0]["content"] = "slow"
        second = await run(server, {**body_of("t", "r2"), "messages": messages})
        stopped = await first
        assert (stopped[-1][1]["type"], stopped[-1][1]["code"]) == ("RUN_ERROR", "cancelled")
        assert second[-1][1]["outcome"] == {"type": "success"}
        assert "".join(event.get("delta", "") for _, event in second) == "Hello you."


@pytest.mark.parametrize("given", [0, 1])
async def test_a_repeated_request_delivers_the_results_that_its_dead_server_left_undelivered(
    given: int,
) -> None:
    async with served(make_app(answer)) as server:
        begun = await run(server, body_of("t", "r1", "look", tools=[LOOK]))
        names = begun[-1][1]["outcome"]["pendingToolCallIds"]
        results = [{"id": n, "role": "tool", "toolCallId": n, "content": f"ran {n}"} for n in names]
        body = body_of("t", "r2", "look", tools=[LOOK])
        body["messages"] += results
        runner = await server.app.host.session("t")
        marker = stream_name("r2", CONTINUES)
        await runner.submit(Received(marker, secret_digest_of("x"), 0, "another", None))
        if given:
            from midstream.history.messages import ToolResult

            await runner.submit(CallFinished(1, 1, ToolResult("c1", f"ran {names[0]}")))
        events = await run(server, body)
        found = [each["content"] for each in messages_in(events) if each["role"] == "tool"]
        assert found == [f"ran {name}" for name in names]
        assert await run(server, body) == events


async def test_interrupts_are_answered_together_and_the_same_resume_is_the_same_run() -> None:
    async with served(make_app(answer, tools=[burn])) as server:
        begun = await run(server, body_of("t", "r1", "burn"))
        asked = begun[-1][1]["outcome"]["interrupts"]
        assert len(asked) == 2
        resume = [
            {"interruptId": each["id"], "status": "resolved", "payload": {"approved": number == 0}}
            for number, each in enumerate(asked)
        ]
        for bad in (
            resume[:1],
            [{**resume[0], "interruptId": "0" * 32}],
            [],
            [{**resume[0], "payload": 7}, resume[1]],
        ):
            refused = await run(server, {**body_of("t", "r2"), "resume": bad})
            assert refused[-1][1]["type"] == "RUN_ERROR"
        body = {**body_of("t", "r2", "burn"), "resume": resume}
        events = await run(server, body)
        assert events[-1][1]["outcome"] == {"type": "success"}
        assert await run(server, body) == events
        connected = await run(server, body_of("t", "x"), path=f"{PATH}/connect")
        assert connected[-1][1]["runId"] == events[-1][1]["runId"] == "r2"
        results = [e["content"] for _, e in events if e["type"] == "TOOL_CALL_RESULT"]
        assert any("burnt a" in each for each in results)


async def test_a_question_is_answered_with_a_text() -> None:
    async with served(make_app(answer, tools=[question()])) as server:
        begun = await run(server, body_of("t", "r1", "ask"))
        (asked,) = begun[-1][1]["outcome"]["interrupts"]
        assert (asked["reason"], asked["message"]) == ("input_required", "Which?")
        given = [{"interruptId": asked["id"], "status": "resolved", "payload": "that"}]
        events = await run(server, {**body_of("t", "r2"), "resume": given})
        assert "that" in [e["content"] for _, e in events if e["type"] == "TOOL_CALL_RESULT"]


async def test_a_request_without_new_input_is_refused() -> None:
    async with served(make_app(answer)) as server:
        path = f"{PATH}/threads/t/runs/r"
        assert (await server.http.get(path)).status_code == 404
        empty = await run(server, {**body_of("t", "r"), "messages": []})
        assert empty[-1][1]["type"] == "RUN_ERROR"
        first = await run(server, body_of("t", "r"))
        assert (await server.http.get(path, headers={"last-event-id": "yesterday"})).status_code == 400
        assert (await server.http.get(f"{path}2")).status_code == 404
        nothing = await run(server, {**body_of("t", "r2"), "messages": []})
        assert nothing[-1][1]["type"] == "RUN_ERROR"
        behind = await run(server, body_of("t", "r"), first[-1][0])
        assert behind[-1] == first[-1]


async def test_a_stopping_server_leaves_the_body_without_an_end_event() -> None:
    gate = asyncio.Event()
    async with served(make_app([[TextDelta("Hel"), Gate(gate), Finished()]])) as server:
        pieces: list[str] = []
        with pytest.raises(httpx2.HTTPError):
            await _read_until_cut(server, pieces)
        kinds = [event["type"] for _, event in events_of("".join(pieces))]
        assert not {"RUN_FINISHED", "RUN_ERROR"} & {*kinds}


async def _read_until_cut(server: Served, pieces: list[str]) -> None:
    async with server.http.stream("POST", PATH, json=body_of("t", "r")) as body:
        async for piece in body.aiter_text():
            pieces.append(piece)
            if "Hel" in piece:
                server.stop.set()
