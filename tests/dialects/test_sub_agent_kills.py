"""A server is killed between a sub-agent's question and its answer, and between the answer and its effect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import httpx2
import pytest
from langgraph_sdk import get_client
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitResult, RequestParamsMeta

from midstream.environment import World
from tests.dialects import a2a_kills, ag_ui_cuts, ui_stream
from tests.dialects.ui_stream import KillableServer, run_servers
from tests.server.serving import WAIT_S

pytestmark = pytest.mark.fault
Json = dict[str, Any]
_T = TypeVar("_T")
TRIES_MAX = 200
PAUSE_S = 0.1


class FamilyServer(KillableServer):
    """Serves an agent whose sub-agents ask."""

    agent = "tests.dialects.asking_sub_agents:agent"

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    async def questions(self) -> list[Json]:
        """Return the open questions of all sessions."""
        async with httpx2.AsyncClient(base_url=self.url, timeout=WAIT_S) as http:
            found: list[Json] = (await http.get("/v1/questions")).json()["questions"]
            return found

    async def kill_after_answer(self, answering: asyncio.Task[_T]) -> _T:
        """Kill the server after a sub-agent's answer and before its effect; return the client's result."""
        async with asyncio.timeout(WAIT_S):
            while await self.questions():
                assert not answering.done(), answering.result()
                await World().sleep(PAUSE_S)
            await self.kill()
            self.hold.unlink()
            await self.start()
            return await answering

    @property
    def hold(self) -> Path:
        """Return the file whose presence stops sub-agents from continuing after an answer."""
        return self.ledger.with_name(self.ledger.name + ".hold")

    def judge(self) -> None:
        """Check that the answer had its effect once."""
        assert self.ledger.read_text(encoding="utf-8") == "blue\n"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FamilyServer]:
    async with run_servers(tmp_path, 0, kind=FamilyServer) as [found]:
        assert isinstance(found, FamilyServer)
        found.hold.touch()
        yield found


async def until_answered(send: Callable[[], Awaitable[_T]], *breaks: type[Exception]) -> _T:
    """Send a request repeatedly until its answer arrives."""
    for _ in range(TRIES_MAX):
        with contextlib.suppress(*breaks):
            return await send()
        await World().sleep(PAUSE_S)
    raise AssertionError("the request was never answered")


async def test_an_interrupt_of_langgraph_survives_both_kills(server: FamilyServer) -> None:
    client = get_client(url=f"{server.url}/v1/langgraph", api_key=None)

    async def resume(values: Json) -> Json:
        """Answer interrupts until the run has ended."""
        found = await until_answered(
            lambda: client.runs.wait("t", "agent", command={"resume": values}), httpx.HTTPError
        )
        return cast("Json", found)

    async with client:
        words: Json = {"messages": [{"role": "user", "content": "deep"}]}
        begun: Any = await client.runs.wait("t", "agent", input=words, if_not_exists="create")
        await server.restart()
        state: Any = await client.threads.get_state("t")
        assert state["interrupts"] == begun["__interrupt__"]
        (question,) = begun["__interrupt__"]
        answering = asyncio.create_task(resume({question["id"]: "blue"}))
        found = await server.kill_after_answer(answering)
        (decision,) = found["__interrupt__"]
        found = await resume({decision["id"]: True})
        assert found["messages"][-1]["content"] == "noted blue"
    server.judge()


@pytest.mark.skipif(bool(ag_ui_cuts.lacking()), reason=ag_ui_cuts.lacking())
async def test_an_interrupt_of_ag_ui_survives_both_kills(server: FamilyServer) -> None:
    async def run(number: int, payload: object = None) -> Json:
        """Return the end of a run that answers the interrupt of the run before it."""
        answer = [
            {"interruptId": asked["id"], "status": "resolved", "payload": payload} for asked in open_ones
        ]
        body = ag_ui_cuts.body_of("t", f"r{number}", "deep", **({"resume": answer} if answer else {}))
        events = await ag_ui_cuts.read_run(server.url, body)
        assert ag_ui_cuts.findings(events) == []
        outcome: Json = events[-1][1]["outcome"]
        return outcome

    open_ones: list[Json] = []
    begun = await run(0)
    await server.restart()
    assert await run(0) == begun
    open_ones = begun["interrupts"]
    outcome = await server.kill_after_answer(asyncio.create_task(run(1, "blue")))
    open_ones = outcome["interrupts"]
    assert await run(2, {"approved": True}) == {"type": "success"}
    result = await ag_ui_cuts.run_client(server.url, "open", id="t")
    assert result["messages"][-1]["content"] == "noted blue"
    server.judge()


@pytest.mark.skipif(bool(ui_stream.lacking()), reason=ui_stream.lacking())
async def test_a_question_in_a_chat_of_the_ai_sdk_survives_both_kills(server: FamilyServer) -> None:
    async with httpx2.AsyncClient(base_url=server.url, timeout=WAIT_S) as http:
        message = {"id": "m", "role": "user", "parts": [{"type": "text", "text": "deep"}]}
        begun = (await http.post("/v1/chat", json={"id": "t", "messages": [message]})).text
        await server.restart()
        assert (await http.get("/v1/chat/t~1.0/stream")).text == begun
    client = ui_stream.run_client(server.url, "reopened", id="t", messages=[message], words=["blue"])
    result = await server.kill_after_answer(asyncio.create_task(client))
    assert [[part["type"] for part in asked] for asked in result["asked"]] == [
        ["tool-ask_user"],
        ["tool-note"],
    ]
    assert ui_stream.text_of(result["messages"][-1]) == "noted blue"
    server.judge()


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_form_of_mcp_survives_both_kills(server: FamilyServer, mode: str) -> None:
    kills: list[str] = []
    given = asyncio.Event()

    async def on_form(context: Any, params: Any) -> ElicitResult:  # noqa: ANN401 - of the SDK
        if "note" in params.message:
            return ElicitResult(action="accept", content={"confirm": True})
        if not kills:
            kills.append(params.message)
            await server.restart()
        given.set()
        return ElicitResult(action="accept", content={"answer": "blue"})

    async def call() -> Json:
        meta = cast("RequestParamsMeta", {"midstream/call": "once"})
        url = f"{server.url}/v1/mcp"
        try:
            async with Client(url, mode=mode, elicitation_callback=on_form) as client:
                result = await client.call_tool("ask", {"message": "deep"}, meta=meta)
                return cast("Json", result.structured_content)
        except* (MCPError, httpx2.HTTPError) as broken:
            raise ConnectionError("the call was cut") from broken

    calling = asyncio.create_task(until_answered(call, ConnectionError))
    await asyncio.wait_for(given.wait(), WAIT_S)
    found = await server.kill_after_answer(calling)
    assert found["answer"] == "noted blue"
    assert kills == ["Which paint?"]
    server.judge()


@pytest.mark.long
@pytest.mark.skipif(bool(a2a_kills.lacking()), reason=a2a_kills.lacking())
async def test_the_required_input_of_an_a2a_task_survives_both_kills(server: FamilyServer) -> None:
    async def send(name: str, words: str, **place: str) -> Json:
        message = {"messageId": name, "role": "ROLE_USER", "parts": [{"text": words}], **place}
        asked = {"url": server.url, "message": message, "binding": "JSONRPC", "is_streaming": False}
        found: Json = (await a2a_kills.run_client(asked))["task"]
        return found

    task = await send("m", "deep", contextId="c")
    await server.restart()
    async with httpx2.AsyncClient(base_url=server.url, timeout=WAIT_S) as http:
        response = await http.get(f"/v1/a2a/tasks/{task['id']}", headers={"a2a-version": "1.0"})
    assert response.json()["status"] == task["status"]
    assert task["status"]["message"]["parts"][0]["text"] == "Which paint?"
    answering = asyncio.create_task(send("a", "blue", taskId=task["id"]))
    task = await server.kill_after_answer(answering)
    assert task["status"]["message"]["parts"][0]["text"] == "May note run?"
    task = await send("b", "yes", taskId=task["id"])
    assert a2a_kills.texts(task)[-1] == "noted blue"
    messages = [each["messageId"] for each in task["history"] if each["role"] == "ROLE_USER"]
    assert messages == ["m", "a", "b"]
    server.judge()
