"""The page while tabs are reloaded and hidden, connections die, and its server is killed, from before its
session.

A short form runs in the suite; `MIDSTREAM_FAULT_FULL=1` runs thirty trials, with seeds from `PAGE_CHAOS_SEED`
on.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from random import Random

import pytest
from playwright.async_api import Browser, Page, WebSocketRoute, expect

from tests.fault.extent import IS_FULL
from tests.server.devtools import CHROMIUM
from tests.server.test_browser_guide import Lives, lives
from tests.server.test_page import NOT_YET_KEPT, WAIT_MS, dying_after, lives_of_lines
from tests.server.test_page_situations import LOOK_HIDDEN

FIRST_SEED = int(os.environ.get("PAGE_CHAOS_SEED") or 1)
TRIALS = 30 if IS_FULL else 1
TURNS = 3
END_MS = 4 * WAIT_MS

pytestmark = [
    pytest.mark.long,
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]

LOOK_SHOWN = """() => {
  delete document.hidden;
  delete document.visibilityState;
  window.requestAnimationFrame = (act) => setTimeout(act, 16);
  document.dispatchEvent(new Event("visibilitychange"));
}"""


async def wait_until_stored(page: Page, turn: int) -> None:
    """Wait until a written message is stored here or at the server: a reload before that loses it."""
    await expect(page.locator(".turn")).to_have_count(turn, timeout=WAIT_MS)
    await expect(page.locator("#turns")).not_to_contain_text(NOT_YET_KEPT, timeout=WAIT_MS)


class Trial:
    """Three tabs of one session: two for input, in two browsers, and a hidden one."""

    def __init__(self, server: Lives, random: Random) -> None:
        self._server = server
        self._random = random
        self.pages: list[Page] = []
        self.hidden: Page | None = None
        self.kills = self.reloads = self.cuts = 0

    async def open(self, browser: Browser) -> None:
        """Open the tabs; the second and third name a session that has not begun."""
        first = await browser.new_context()
        second = await browser.new_context()
        routes: list[WebSocketRoute] = []
        await second.route_web_socket("**/stream", dying_after(lives_of_lines(self._random), routes))
        page = await first.new_page()
        await page.goto(self._server.url)
        await expect(page.locator("#text")).to_be_enabled(timeout=WAIT_MS)
        other, self.hidden = await second.new_page(), await first.new_page()
        for each in (other, self.hidden):
            await each.goto(page.url)
            await expect(each.locator("#text")).to_be_enabled(timeout=WAIT_MS)
        await self.hidden.evaluate(LOOK_HIDDEN)
        self.pages = [page, other]

    async def play(self, turn: int) -> None:
        """Send a message in either tab, by click or key, and break one to three things."""
        page = self._random.choice(self.pages)
        await expect(page.locator(".turn[data-status=completed]")).to_have_count(turn - 1, timeout=END_MS)
        await page.fill("#text", f"turn {turn}")
        if self._random.random() < 0.5:
            await page.locator("#send").dblclick()
        else:
            await page.press("#text", "Enter")
        await wait_until_stored(page, turn)
        for _ in range(self._random.randint(1, 3)):
            await asyncio.wait_for(self._break(), END_MS / 1000)
        for each in self.pages:
            await expect(each.locator(".turn[data-status=completed]")).to_have_count(turn, timeout=END_MS)

    async def _break(self) -> None:
        page = self._random.choice(self.pages)
        match self._random.choice(("kill", "reload", "cut")):
            case "kill":
                self.kills += 1
                await self._server.kill()
                await self._server.begin()
            case "reload":
                self.reloads += 1
                await page.reload()
            case _:
                self.cuts += 1
                await page.locator("#cut").dispatch_event("click")

    async def check(self) -> None:
        """Assert that every tab has each message and each answer once, as the journal has them."""
        assert self.hidden is not None
        await self.hidden.evaluate(LOOK_SHOWN)
        fetched = await self.pages[0].evaluate(
            "() => fetch(`/v1/sessions/${location.hash.slice(1)}/records`).then((answer) => answer.text())"
        )
        records = [json.loads(line)["record"] for line in fetched.splitlines()]
        assert sum(record["type"] == "message_accepted" for record in records) == TURNS
        assert [record["status"] for record in records if record["type"] == "turn_ended"] == [
            "completed"
        ] * TURNS
        answers = [
            "".join(part["text"] for part in record["body"]["parts"])
            for record in records
            if record["type"] == "response_completed"
        ]
        for each in (*self.pages, self.hidden):
            await expect(each.locator(".turn .message")).to_have_text(
                [f"turn {turn}" for turn in range(1, TURNS + 1)], timeout=END_MS
            )
            await expect(each.locator(".turn .parts > .text")).to_have_text(
                answers, timeout=END_MS, use_inner_text=False
            )


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + TRIALS))
async def test_each_tab_shows_each_word_once_under_failures_from_before_the_session_began(
    browser: Browser, tmp_path: Path, seed: int
) -> None:
    async with lives(tmp_path) as server:
        trial = Trial(server, Random(seed))
        await trial.open(browser)
        for turn in range(1, TURNS + 1):
            await trial.play(turn)
        await trial.check()
        print(f"seed {seed}: {trial.kills} kills, {trial.reloads} reloads, {trial.cuts} cuts")  # noqa: T201
        for context in browser.contexts:
            await context.close()
