"""The programs of the browser guide, as printed, in a real browser: also while their server is killed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Self

import pytest
from playwright.async_api import Browser, Page, Route, expect

from tests.fault.extent import IS_FULL
from tests.forked import AsyncForked
from tests.server.devtools import CHROMIUM
from tests.server.lives_process import HOLD, words_of
from tests.server.test_page import WAIT_MS, WAIT_S

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "browser.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```js\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
CHAT = next(program for program in PROGRAMS if "oninterrupted" in program)
ASK = next(program for program in PROGRAMS if "client.ask" in program)
RECORDS = "fetch('/v1/sessions/my-session/records').then((answer) => answer.text())"
A_FRAME = "new Promise(requestAnimationFrame)"
"""Let the page run before it is checked again."""
KILLED_SEEDS, KILLS = (range(1, 7), 25) if IS_FULL else (range(1, 2), 3)
KILLS_OF_A_TURN_MAX = 4
START_S = 90.0
"""Seconds for the start of a server, beside browsers and on a busy machine."""
END_S = 6 * WAIT_S
"""Seconds for the end of a turn after its last kill: the client is back after twice its server's absence."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]


class Lives:
    """A server that is killed and started again, at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hold = folder / HOLD
        self._process: AsyncForked | None = None
        self.url = ""

    async def begin(self) -> Self:
        port = self.url.rpartition(":")[2] or "0"
        self._process = await AsyncForked.started("tests.server.lives_process", self._folder, port)
        line = await asyncio.wait_for(self._process.stdout.readline(), START_S)
        self.url = line.decode().strip()
        return self

    def hold(self) -> None:
        """Stop the answers of a starting server at their half, so that the test acts in the middle of one."""
        self._hold.touch()

    def release(self) -> None:
        """Release the stopped answers."""
        self._hold.unlink()

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        await asyncio.wait_for(self._process.communicate(), WAIT_S)


@asynccontextmanager
async def lives(folder: Path, *, is_held: bool = False) -> AsyncIterator[Lives]:
    """Run a server whose answers stop at their half until `release` if `is_held`."""
    server = Lives(folder)
    if is_held:
        server.hold()
    await server.begin()
    try:
        yield server
    finally:
        await server.kill()


async def running(browser: Browser, server: Lives, program: str) -> tuple[Page, list[str]]:
    """Open a page with only this program; return it with its console output."""

    async def answer(route: Route) -> None:
        body = f'<!doctype html><html><body><script type="module">\n{program}</script></body></html>'
        await route.fulfill(body=body, content_type="text/html")

    context = await browser.new_context()
    await context.route("**/program", answer)
    page, content = await context.new_page(), []
    page.on("console", lambda message: content.append(message.text))
    page.on("pageerror", lambda error: content.append(str(error)))
    await page.goto(f"{server.url}/program")
    return page, content


async def test_every_program_of_the_guide_runs(browser: Browser, tmp_path: Path) -> None:
    async with lives(tmp_path) as server:
        for program in PROGRAMS:
            page, output = await running(browser, server, f"{program}\nconsole.log('ran to its end');")
            async with asyncio.timeout(WAIT_S):
                while "ran to its end" not in output:
                    await page.evaluate(A_FRAME)
            assert not [line for line in output if "Error" in line]


@pytest.mark.long
async def test_the_chat_of_the_guide_shows_each_word_once_while_its_server_is_killed(
    browser: Browser, tmp_path: Path
) -> None:
    async with lives(tmp_path, is_held=True) as server:
        page, _ = await running(browser, server, CHAT)
        await page.fill("input", "go on")
        await page.press("input", "Enter")
        answer = page.locator("p").last
        await expect(answer).to_contain_text("life1word5", timeout=WAIT_MS)
        await server.kill()
        server.release()
        await server.begin()
        await expect(answer).to_have_text(words_of(2), timeout=WAIT_MS, use_inner_text=False)


async def answers(page: Page) -> list[str]:
    """Return the text of each completed answer, as the journal has it."""
    records = [json.loads(line)["record"] for line in (await page.evaluate(RECORDS)).splitlines()]
    ended = sum(record["type"] == "turn_ended" for record in records)
    return [
        "".join(part["text"] for part in record["body"]["parts"])
        for record in records
        if record["type"] == "response_completed"
    ][:ended]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", KILLED_SEEDS)
async def test_the_chat_of_the_guide_shows_each_word_once_over_kills_at_random_moments(
    browser: Browser, tmp_path: Path, seed: int
) -> None:
    random, kills = Random(seed), 0
    async with lives(tmp_path) as server:
        page, _ = await running(browser, server, CHAT)
        shown = page.locator("p:visible")
        for turn in range(1, KILLS + 1):
            await page.fill("input", f"turn {turn}")
            await page.press("input", "Enter")
            for _ in range(random.randint(1, KILLS_OF_A_TURN_MAX)):
                await page.wait_for_timeout(
                    2000 * random.random()
                )  # A random moment: no condition is waited for.
                await server.kill()
                await server.begin()
                kills += 1
            async with asyncio.timeout(END_S):
                while len(ended := await answers(page)) < turn:
                    await page.evaluate(A_FRAME)
            await expect(shown).to_have_text(ended, timeout=1000 * END_S, use_inner_text=False)
            if kills >= KILLS:
                break
        print(f"seed {seed}: {kills} kills in {turn} turns")  # noqa: T201
        await page.context.close()


@pytest.mark.long
async def test_the_chat_of_the_guide_continues_after_a_reload_with_the_whole_answer(
    browser: Browser, tmp_path: Path
) -> None:
    async with lives(tmp_path, is_held=True) as server:
        page, _ = await running(browser, server, CHAT)
        await page.fill("input", "go on")
        await page.press("input", "Enter")
        await expect(page.locator("p").last).to_contain_text("life1word5", timeout=WAIT_MS)
        await page.reload()
        await expect(page.locator("p").last).to_contain_text("life1word9", timeout=WAIT_MS)
        assert (await page.locator("p").last.text_content() or "").startswith("life1word0 life1word1 ")
        server.release()
        await expect(page.locator("p").last).to_have_text(words_of(1), timeout=WAIT_MS, use_inner_text=False)


@pytest.mark.long
async def test_the_chat_of_the_guide_shows_why_a_turn_failed(browser: Browser, tmp_path: Path) -> None:
    async with lives(tmp_path) as server:
        page, _ = await running(browser, server, CHAT)
        await page.fill("input", "fail")
        await page.press("input", "Enter")
        await expect(page.locator("p").last).to_contain_text("no such model", timeout=WAIT_MS)


@pytest.mark.long
async def test_ask_returns_each_word_once_while_its_server_is_killed(
    browser: Browser, tmp_path: Path
) -> None:
    async with lives(tmp_path, is_held=True) as server:
        page, output = await running(browser, server, ASK)
        async with asyncio.timeout(WAIT_S):
            while "life1word5" not in await page.evaluate(RECORDS):
                await page.evaluate(A_FRAME)
        await server.kill()
        server.release()
        await server.begin()
        async with asyncio.timeout(WAIT_S):
            while words_of(2) not in output:
                await page.evaluate(A_FRAME)
