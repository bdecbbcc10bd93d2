"""AG-UI's client, unmodified, with a served agent: cut at random bytes, a server killed, another one used."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from midstream.models.responses import ThinkingDelta
from midstream.testing.scripted_model import calls, text
from midstream.tools.function_tools import tool
from tests.dialects import ag_ui_cuts, ui_stream
from tests.dialects.ag_ui_cuts import body_of, findings, judge, lacking, play, read_run, run_client
from tests.dialects.ui_stream import CuttingRelay, read_on_elsewhere, run_servers
from tests.search import with_long
from tests.server.serving import make_app, served

pytestmark = [pytest.mark.fault, pytest.mark.skipif(bool(lacking()), reason=lacking())]
Json = dict[str, Any]
LOOK: Json = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
SUFFIXES_MAX = 12
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "ag-ui.md"


@tool(needs_approval=True)
def burn(what: str) -> str:
    """Burn something."""
    return f"burnt {what}"


@pytest.mark.parametrize("story", with_long(["run", "raw", "connect"], 1))
async def test_a_client_with_cuts_and_a_killed_server_has_each_word_once(tmp_path: Path, story: str) -> None:
    cuts = 3 if story == "connect" else 6
    read = await play(story, tmp_path, cuts=cuts, kills=1, words=600, seed=7, suffixes_max=SUFFIXES_MAX)
    assert read > SUFFIXES_MAX / 2


async def test_the_client_continues_at_another_server_that_takes_over_the_turn(
    tmp_path: Path,
) -> None:
    words = 800
    async with run_servers(tmp_path, words, count=2) as servers:
        result = await read_on_elsewhere(servers, lambda url: run_client(url, "run", id="taken"))
        judge(result, servers[1], words)
        events = await read_run(servers[1].url, body_of("taken", "run-taken"))
        assert findings(events) == []


async def test_tools_of_the_client_run_there_and_their_results_start_the_next_run() -> None:
    script = [calls(("look", "{}"), ("look", "{}")), calls(("look", "{}")), text("Seen")]
    async with served(make_app(script)) as server:
        result = await run_client(server.url, "client", id="c", tools=[LOOK])
        assert (result["finishes"], result["errors"]) == (3, [])
        results = [each for each in result["messages"] if each["role"] == "tool"]
        assert [each["content"] for each in results] == [f"ran {each['toolCallId']}" for each in results]
        assert len(results) == 3
        assert result["messages"][-1]["content"] == "Seen"


@pytest.mark.parametrize(
    ("approve", "args", "expected"),
    [(True, None, "burnt tree"), (True, {"what": "log"}, "burnt log"), (False, None, "declined")],
)
async def test_people_decide_about_interrupts(*, approve: bool, args: Json | None, expected: str) -> None:
    script = [calls(("burn", '{"what": "tree"}')), text("Done")]
    async with served(make_app(script, tools=[burn])) as server:
        outcome = await run_client(server.url, "people", id="p", approve=approve, args=args)
        assert outcome["finishes"] == 2
        (result,) = [each for each in outcome["messages"] if each["role"] == "tool"]
        assert expected in result["content"]
        assert outcome["messages"][-1]["content"] == "Done"


async def test_a_page_that_is_opened_later_has_all_messages() -> None:
    async with served(make_app([[ThinkingDelta("hm"), *text("Hello you")]])) as server:
        result = await run_client(server.url, "run", id="later")
        opened = await run_client(server.url, "open", id="later")
        assert opened["messages"] == result["messages"]
        unopened = await run_client(server.url, "open", id="nobody")
        assert (unopened["messages"], unopened["finishes"]) == ([], 1)


async def test_the_programs_of_the_guide_print_the_answer_despite_cut_connections(tmp_path: Path) -> None:
    programs = re.findall(r"```js\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    words = 300
    expected = "".join(f"word{number} " for number in range(words)) + "\n"
    async with (
        run_servers(tmp_path, words) as [server],
        CuttingRelay(server.port, random.Random(3), 5, ag_ui_cuts.CUT_BYTES["run"]) as relay,
    ):
        for program in programs:
            result = await ui_stream.run_node(program.replace("http://127.0.0.1:8000", relay.url))
            assert result == expected
        assert (relay.cuts, len(programs)) == (5, 2)
