"""The page in Firefox: new sessions, double clicks, reloads, kills of its server, cards, hidden tabs.

`make long` performs one kill in the chaos, `make fault` twenty.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from midstream.testing.scripted_model import text
from tests.fault.extent import IS_FULL
from tests.server.bidi import ENTER, Firefox, FirefoxTab, firefox
from tests.server.lives_process import words_of
from tests.server.serving import make_app, served
from tests.server.test_browser_guide import Lives, lives
from tests.server.test_page import HALF, NOT_YET_KEPT, WHOLE, WORDS, two_halves
from tests.server.test_page_people import PAY, purse
from tests.server.test_page_situations import numbered

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
KILLS = 20 if IS_FULL else 1
BREAKS_OF_A_TURN_MAX = 3

pytestmark = [
    pytest.mark.long,
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(1500 if IS_FULL else 400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        FIREFOX is None, reason="no firefox here: apt-get install --no-install-recommends firefox-esr"
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Firefox]:
    assert FIREFOX is not None
    async with firefox(FIREFOX, tmp_path_factory.mktemp("profile")) as launched:
        yield launched


USER_TEXTS = ".turn .message"
ANSWERS = ".turn .parts > .text"


async def open_page(browser: Firefox, url: str, *, is_hidden: bool = False) -> FirefoxTab:
    """Open the page in a tab, and wait until it accepts input."""
    tab = await browser.open(url, is_hidden=is_hidden)
    await ready(tab)
    return tab


async def ready(tab: FirefoxTab) -> None:
    await tab.until("document.getElementById('text')?.disabled === false")


async def address_of(tab: FirefoxTab) -> str:
    return str(await tab.evaluate("location.href"))


async def write(tab: FirefoxTab, words: str) -> None:
    await tab.click("#text")
    await tab.type(words)


async def sees(tab: FirefoxTab, selector: str, *texts: str) -> None:
    """Wait until the elements have these texts."""
    found = f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)"
    await tab.until(f"JSON.stringify({found}) === JSON.stringify({json.dumps(texts)})")


async def sees_some(tab: FirefoxTab, words: str) -> None:
    await tab.until(f"document.querySelector('#turns').textContent.includes({json.dumps(words)})")


async def wait_until_stored(tab: FirefoxTab, words: str) -> None:
    """Wait until a written message is stored here or at the server: a reload before that loses it."""
    await tab.until(
        f"[...document.querySelectorAll({json.dumps(USER_TEXTS)})].at(-1)?.textContent === {json.dumps(words)}"
        f" && !document.querySelector('#turns').textContent.includes({json.dumps(NOT_YET_KEPT)})"
    )


async def completed(tab: FirefoxTab, turns: int = 1) -> None:
    await tab.until(f"document.querySelectorAll('.turn[data-status=completed]').length === {turns}")


async def test_a_session_begun_by_another_tab_appears(browser: Firefox) -> None:
    async with served(make_app(numbered)) as server:
        first = await open_page(browser, server.url)
        second = await open_page(browser, await address_of(first))
        await write(first, f"begin{ENTER}")
        for tab in (first, second):
            await sees(tab, ANSWERS, "Answer 1.")
        await write(second, f"and then{ENTER}")
        for tab in (first, second):
            await sees(tab, ANSWERS, "Answer 1.", "Answer 2.")
            await sees(tab, USER_TEXTS, "begin", "and then")
            await tab.close()


async def test_a_double_click_on_send_does_not_stop_the_turn(browser: Firefox) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        tab = await open_page(browser, server.url)
        await write(tab, "go on")
        await tab.click("#send", times=2)
        await sees(tab, ANSWERS, "".join(WORDS[:HALF]))
        assert await tab.evaluate("document.activeElement.id") == "text"
        gate.set()
        await completed(tab)
        await tab.close()


async def test_an_answer_continues_after_a_reload_with_each_word_once(browser: Firefox) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        tab = await open_page(browser, server.url)
        await write(tab, f"go on{ENTER}")
        await sees_some(tab, WORDS[HALF - 1])
        await tab.reload()
        await sees_some(tab, WORDS[HALF - 1])
        gate.set()
        await completed(tab)
        await sees(tab, ANSWERS, WHOLE)
        await tab.close()


async def test_a_server_killed_during_an_answer_finishes_it_after_its_restart(
    browser: Firefox, tmp_path: Path
) -> None:
    async with lives(tmp_path, is_held=True) as server:
        tab = await open_page(browser, server.url)
        await write(tab, f"go on{ENTER}")
        await sees_some(tab, "life1word5")
        await server.kill()
        await tab.until("document.getElementById('light').dataset.state === 'reconnecting'")
        server.release()
        await server.begin()
        await completed(tab)
        await sees(tab, ANSWERS, words_of(2))
        await tab.close()


async def test_answering_a_card_runs_the_call_once(browser: Firefox) -> None:
    paid: list[int] = []
    async with served(make_app([PAY, text("Done.")], tools=[purse(paid)])) as server:
        tab = await open_page(browser, server.url)
        await write(tab, f"pay{ENTER}")
        await tab.click('form.question [data-choice="allow"]')
        await completed(tab)
        await sees_some(tab, "Done.")
        assert paid == [3]
        await tab.close()


async def test_the_title_of_a_hidden_tab_shows_a_waiting_question(browser: Firefox) -> None:
    async with served(make_app([PAY, text("Done.")], tools=[purse([])])) as server:
        first = await open_page(browser, server.url)
        hidden = await open_page(browser, await address_of(first), is_hidden=True)
        assert await hidden.evaluate("document.hidden")
        await write(first, f"pay{ENTER}")
        await hidden.until("document.title === 'Waiting for you: pay \u2013 midstream'")
        for tab in (first, hidden):
            await tab.close()


async def _break(random: Random, server: Lives, tab: FirefoxTab) -> int:
    """Kill the server, reload the page, or cut its connection, after a random moment; return the number of kills."""
    await tab.evaluate(f"new Promise((resolve) => setTimeout(resolve, {1500 * random.random()}))")
    match random.choice(("kill", "kill", "reload", "cut")):
        case "kill":
            await server.kill()
            await server.begin()
            return 1
        case "reload":
            await tab.reload()
        case _:
            await tab.evaluate("document.getElementById('cut').click()")
    return 0


async def test_each_tab_shows_each_word_once_under_random_failures(browser: Firefox, tmp_path: Path) -> None:
    random, kills, turn = Random(7), 0, 0
    async with lives(tmp_path) as server:
        first = await open_page(browser, server.url)
        tabs = [first, await open_page(browser, await address_of(first))]
        while kills < KILLS:
            turn += 1
            tab = random.choice(tabs)
            await ready(tab)
            await tab.evaluate("document.getElementById('text').focus()")
            await write(tab, f"turn {turn}{ENTER}")
            await wait_until_stored(tab, f"turn {turn}")
            for _ in range(random.randint(1, BREAKS_OF_A_TURN_MAX)):
                kills += await _break(random, server, random.choice(tabs))
            for each in tabs:
                await completed(each, turn)
        records = await first.evaluate(
            "fetch(`/v1/sessions/${location.hash.slice(1)}/records`).then((answer) => answer.text())"
        )
        found = [json.loads(line)["record"] for line in records.splitlines()]
        answers = [
            "".join(part["text"] for part in record["body"]["parts"])
            for record in found
            if record["type"] == "response_completed"
        ]
        assert sum(record["type"] == "message_accepted" for record in found) == turn
        for each in tabs:
            await sees(each, USER_TEXTS, *(f"turn {number}" for number in range(1, turn + 1)))
            await sees(each, ANSWERS, *answers)
        print(f"{kills} kills in {turn} turns")  # noqa: T201
        for each in tabs:
            await each.close()
