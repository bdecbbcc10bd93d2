"""Unmodified clients of the AI SDK with a served agent: cut at random bytes, a server killed, another one used."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from midstream.history.messages import Step, UserMessage
from midstream.models.responses import ThinkingDelta
from midstream.testing.scripted_model import calls, text
from midstream.tools.function_tools import report_progress, tool
from tests.dialects import ui_stream
from tests.dialects.chat_agent import FIRST
from tests.dialects.ui_stream import (
    CuttingRelay,
    lacking,
    play,
    read_on_elsewhere,
    run_client,
    run_servers,
    text_of,
)
from tests.guides.guide_programs import URL
from tests.search import with_long
from tests.server.serving import make_app, served

pytestmark = [pytest.mark.fault, pytest.mark.skipif(bool(lacking()), reason=lacking())]
Json = dict[str, Any]
LOOK: Json = {"name": "look", "inputSchema": {"type": "object", "properties": {"at": {"type": "string"}}}}


@tool
def visit(at: str) -> dict[str, str]:
    """Visit a place."""
    source = {"type": "source-url", "sourceId": "s1", "url": "https://x.example/"}
    for part in (source, {"type": "data-map", "id": "m", "data": {"at": at}}):
        report_progress(json.dumps(part))
    return {"seen": at}


@tool(needs_approval=True)
def burn(what: str) -> str:
    """Burn something."""
    return f"burnt {what}"


def last(result: Json) -> Json:
    message: Json = result["messages"][-1]
    return message


def kinds(message: Json) -> list[str]:
    return [part["type"] for part in message["parts"]]


@pytest.mark.parametrize("story", with_long(["workflow", "standard"], 1))
async def test_a_client_with_cuts_and_a_killed_server_has_each_word_once(tmp_path: Path, story: str) -> None:
    await play(story, tmp_path, cuts=8, kills=1, words=400, seed=12)


async def test_another_server_of_the_store_continues_a_stream_at_the_same_chunk(tmp_path: Path) -> None:
    words = 400
    async with run_servers(tmp_path, words, count=2) as [first, second]:
        async with CuttingRelay(first.port, random.Random(1), 1, (3000, 3000)) as relay:
            asked = asyncio.create_task(run_client(relay.url, "workflow", id="c"))
            await relay.was_cut.wait()
            relay.port = second.port  # the client reads on there, while the turn runs at the first
            ui_stream.judge(await asked, first, words)
        found = []
        for each in (first, second):
            async with httpx2.AsyncClient(base_url=each.url) as client:
                found.append((await client.get("/v1/chat/c~1.0/stream?startIndex=5")).text)
        assert found[0] == found[1]


async def test_the_client_continues_at_another_server_that_takes_over_the_turn(
    tmp_path: Path,
) -> None:
    words = 800
    async with run_servers(tmp_path, words, count=2) as servers:
        result = await read_on_elsewhere(servers, lambda url: run_client(url, "workflow", id="taken"))
        ui_stream.judge(result, servers[1], words)


async def test_parts_of_an_answer_arrive_in_the_form_of_the_sdk() -> None:
    script = [[ThinkingDelta("hm"), *calls(("visit", '{"at": "sea"}'), text="I go.")], text("A tree")]
    async with served(make_app(script, tools=[visit])) as server:
        for story in ("workflow", "standard"):
            result = await run_client(server.url, story, id=story)
            message = last(result)
            assert kinds(message) == [
                *("step-start", "reasoning", "text", "tool-visit", "source-url", "data-map"),
                *("step-start", "text"),
            ]
            assert message["parts"][3]["output"] == {"seen": "sea"}
            assert text_of(message) == "I go.A tree"
            assert [part["type"] for part in result["data"]] == ["data-map"]
        # A page that is opened later, without and with the messages.
        shown = (await server.http.get("/v1/chat/standard/messages")).json()["messages"]
        for known in (list[Json](), shown):
            result = await run_client(server.url, "resume", id="standard", messages=known)
            assert text_of(last(result)) == "I go.A tree"
            assert len(result["messages"]) == max(1, len(known))


async def test_answers_are_regenerated_and_the_chat_continues() -> None:
    async with served(make_app(lambda _: text("Hello you"))) as server:
        result = await run_client(server.url, "regenerate", id="c")
        assert result["ids"][:2] == ["c~1", "c~2"]
        assert [message["role"] for message in result["messages"]] == ["user", "assistant"] * 2
        runner = await server.app.host.session("c")
        found = [type(entry) for entry in runner.state.history.entries]
        assert found == [UserMessage, Step] * 2


async def test_tools_of_the_client_run_there_once_each() -> None:
    script = [calls(("look", '{"at": "sea"}'), ("look", '{"at": "land"}')), text("Both")]
    async with served(make_app(script)) as server:
        result = await run_client(server.url, "client", id="c", tools=[LOOK])
        assert result["calls"] == ["look", "look"]
        outputs = [part["output"]["at"] for part in last(result)["parts"] if part["type"] == "tool-look"]
        assert outputs == ["sea", "land"]
        assert text_of(last(result)) == "Both"


@pytest.mark.parametrize(("story", "state"), [("approve", "output-available"), ("deny", "output-denied")])
async def test_a_person_decides_about_a_call_in_the_sdk(story: str, state: str) -> None:
    async with served(make_app([calls(("burn", '{"what": "it"}')), text("Well")], tools=[burn])) as server:
        result = await run_client(server.url, story, id="c")
        assert result["asked"]["state"] == "approval-requested"
        (part,) = [part for part in last(result)["parts"] if part["type"] == "tool-burn"]
        assert part["state"] == state
        assert text_of(last(result)) == "Well"


GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "ai-sdk.md").read_text(encoding="utf-8")
PAGE, PROGRAM = re.findall(r"^```js\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_the_page_of_the_guide_is_the_starter_that_the_browser_test_uses() -> None:
    starter = Path(__file__).parents[2] / "examples" / "ai_sdk" / "src" / "chat.jsx"
    assert PAGE in starter.read_text(encoding="utf-8")


async def test_the_program_of_the_guide_prints_the_answer_through_cuts_and_a_kill(tmp_path: Path) -> None:
    words, cuts = 600, 6
    async with (
        run_servers(tmp_path, words) as [server],
        ui_stream.cut_chats(
            server, random.Random(5), cuts=cuts, kills=1, cut_bytes=ui_stream.CUT_BYTES["workflow"]
        ) as relay,
    ):
        printed = await ui_stream.run_node(PROGRAM.replace(URL, relay.url))
        assert printed.rstrip("\n") == FIRST + "".join(f"word{number} " for number in range(words))
