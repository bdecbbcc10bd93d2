"""Unmodified clients of LangGraph with a served agent: cut at random bytes, the server killed, another one used."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import httpx2
import pytest

from tests.dialects import langgraph_stream
from tests.dialects.chat_agent import FIRST
from tests.dialects.langgraph_stream import (
    CHANNELS,
    HOME,
    MODES,
    judge_events,
    judge_run,
    lacking,
    play,
    read_events,
    read_run,
    run_client,
    words_of,
)
from tests.dialects.ui_stream import cut_chats, read_on_elsewhere, run_node, run_servers
from tests.guides.guide_programs import URL

pytestmark = pytest.mark.fault
needs_npm = pytest.mark.skipif(bool(lacking()), reason=lacking())


async def test_a_run_joined_again_after_a_sigkill_has_each_word_once(tmp_path: Path) -> None:
    result = await play("runs", tmp_path, cuts=2, kills=1, words=1500, seed=5)
    assert result["attempts"] == [1, 2], "the kill was not in the middle of the answer"


async def test_the_events_of_a_thread_have_no_gap_in_seq_across_sigkills(tmp_path: Path) -> None:
    result = await play("events", tmp_path, cuts=8, kills=2, words=800, seed=6)
    assert result["voided"] > 0, "no kill was in the middle of the answer"


@needs_npm
@pytest.mark.parametrize("story", ["protocol", pytest.param("hook", marks=pytest.mark.long)])
async def test_an_npm_client_with_cuts_and_a_killed_server_has_each_word_once(
    tmp_path: Path, story: str
) -> None:
    await play(story, tmp_path, cuts=2, kills=1, words=600, seed=8)


async def test_a_client_continues_at_another_server_that_takes_over_the_turn(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = ("--store", request.getfixturevalue("engine").url)
    words, thread = 800, "00000000-0000-4000-8000-00000000000a"
    async with run_servers(tmp_path, words, *options, count=2) as servers:
        reader = await read_on_elsewhere(
            servers, lambda url: read_run(url, thread, "hi"), cuts=2, cut_bytes=(500, 5000)
        )
        judge_run(reader, servers[1], words)


async def test_every_server_gives_an_event_the_same_id_and_the_same_number(tmp_path: Path) -> None:
    words, thread = 100, "00000000-0000-4000-8000-00000000000b"
    async with run_servers(tmp_path, words, count=2) as [first, second]:
        events = await read_events(first.url, thread, "hi")
        judge_events(events, first, words)
        run, found = "", []
        for each in (first, second):
            async with httpx2.AsyncClient(base_url=f"{each.url}/v1/langgraph") as client:
                run = run or (await client.get(f"/threads/{thread}/runs")).json()[0]["run_id"]
                place = f"/threads/{thread}/runs/{run}/stream"
                found.append((await client.get(place, params={"stream_mode": MODES})).text)
        assert found[0] == found[1]
        assert await read_events(second.url, thread, "hi") == events


@needs_npm
async def test_a_page_that_is_opened_later_has_the_messages_of_the_thread(tmp_path: Path) -> None:
    words, thread = 50, "00000000-0000-4000-8000-00000000000c"
    async with run_servers(tmp_path, words) as [server]:
        reader = await read_run(server.url, thread, "hi")
        result = await run_client(server.url, "opened", thread=thread)
        assert [words_of(each) for each in result["messages"]] == [
            words_of(each) for each in reader.values["messages"]
        ]


GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "langgraph-api.md").read_text(encoding="utf-8")
(PAGE,) = re.findall(r"^```js\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
_AROUND = """
import { JSDOM } from "jsdom";
const dom = new JSDOM("<!doctype html><div id=root></div>", { url: "http://page.example/" });
globalThis.window = dom.window;
globalThis.document = dom.window.document;
const { createRoot } = await import("react-dom/client");
const root = dom.window.document.getElementById("root");
createRoot(root).render(createElement(Chat, { threadId: "guide" }));
const until = async (isThere) => {
  for (const end = Date.now() + 120_000; Date.now() < end; ) {
    if (isThere()) return;
    await new Promise((done) => setTimeout(done, 10));
  }
  throw new Error(root.textContent);
};
await until(() => root.querySelector("button:enabled"));
root.querySelector("button").click();
// The hook ends its loading some milliseconds before it draws the last words.
await until(() => root.textContent.includes(LAST_WORD) && root.querySelector("button:enabled"));
console.log(JSON.stringify([...root.querySelectorAll("p")].map((each) => each.textContent)));
process.exit(0);
"""


@pytest.mark.long
@needs_npm
async def test_the_page_of_the_guide_shows_each_word_once_through_cuts_and_a_kill(tmp_path: Path) -> None:
    words, cuts = 800, 4
    async with (
        run_servers(tmp_path, words) as [server],
        cut_chats(server, random.Random(3), cuts=cuts, kills=1, cut_bytes=(500, 5000)) as relay,
    ):
        page = PAGE.replace(URL, relay.url).replace('"agent"', '"chat"')
        around = _AROUND.replace("LAST_WORD", f'"word{words - 1} "')
        shown = json.loads(await run_node(page + around, home=HOME))
    assert shown[1] == FIRST
    assert shown[-1] == "".join(f"word{number} " for number in range(words))


def test_the_long_form_has_every_story() -> None:
    assert set(langgraph_stream.STORIES) == {"runs", "events", "stream", "protocol", "hook", "thread"}
    assert "checkpoints" in CHANNELS
