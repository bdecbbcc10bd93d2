"""The list of sessions on the page, in a real browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import pytest
from playwright.async_api import Browser, expect

from midstream.errors import ModelRejectedError
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.testing.scripted_model import Gate, ScriptedStep, text
from tests.server.devtools import CHROMIUM
from tests.server.serving import command, make_app, post, served
from tests.server.test_page import WAIT_MS, open_chat

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]


@pytest.mark.long
async def test_every_session_can_be_reached_by_paging_and_by_search(browser: Browser) -> None:
    async with served(make_app(lambda _: text("hello"))) as server:
        for number in range(120):
            await post(server.http, command(words=f"subject {number}"), session=f"n{number}")
        chat = await open_chat(browser, server.url)
        lines = chat.page.locator("#sessions li")
        await expect(lines).to_have_count(50, timeout=WAIT_MS)
        await chat.page.click("#more")
        await expect(lines).to_have_count(100, timeout=WAIT_MS)
        await chat.page.click("#more")
        await expect(lines).to_have_count(120, timeout=WAIT_MS)
        await expect(chat.page.locator("#more")).to_be_hidden()
        await chat.page.fill("#search", "SUBJECT 7")
        await expect(lines).to_have_count(11, timeout=WAIT_MS)
        await chat.page.fill("#search", "nothing of the kind")
        await expect(chat.page.locator("#sessions-none")).to_be_visible(timeout=WAIT_MS)
        await chat.page.fill("#search", "n42")
        await lines.locator("a").click()
        await expect(chat.turn.locator(".message")).to_have_text("subject 42", timeout=WAIT_MS)
        assert chat.problems == []


@pytest.mark.long
async def test_the_page_and_the_api_agree_on_the_status_of_a_session(browser: Browser) -> None:
    gate = asyncio.Event()

    def response(request: ModelRequest) -> Sequence[ScriptedStep]:
        message = request.history.entries[-1]
        if message == UserMessage.of("fail"):
            return [TextDelta("I try. "), ModelRejectedError("no such model")]
        return [TextDelta("I wait. "), Gate(gate), Finished()]

    async with served(make_app(response)) as server:

        async def word() -> str:
            page = (await server.http.get("/v1/sessions?limit=1")).json()
            status: str = page["sessions"][0]["status"]
            return status

        chat = await open_chat(browser, server.url)
        listed = chat.page.locator("#sessions a[aria-current] .when")
        await chat.send_message("fail")
        await chat.sees_end("failed")
        await expect(listed).to_have_text("failed", timeout=WAIT_MS)
        await expect(chat.turn.locator(".turn-status")).to_have_text(re.compile("^Failed "))
        assert await word() == "failed"
        await chat.send_message("wait")
        await chat.sees_end("running")
        await expect(listed).to_have_text("running", timeout=WAIT_MS)
        await expect(chat.turn.locator(".turn-status")).to_have_text(re.compile("^Running "))
        assert await word() == "running"
        await chat.page.click("#stop")
        await chat.sees_end("cancelled")
        await expect(listed).to_have_text("cancelled", timeout=WAIT_MS)
        await expect(chat.turn.locator(".turn-status")).to_have_text(re.compile("^Cancelled "))
        assert await word() == "cancelled"
