"""Pages at servers that encrypt each session under its client's secret: this browser has it, and no other one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Browser, BrowserContext, Page, expect

from midstream.store.ciphers import FileKeys
from midstream.testing.models import text
from tests.cli.processes import Serving
from tests.server.escrowing import escrowed_app
from tests.server.serving import served
from tests.server.test_page import CHROMIUM, WAIT_MS, Chat
from tests.server.test_page import browser as browser  # noqa: PLC0414 - a fixture is found by its name
from tests.server.test_page_transports import asked, page_at, says
from tests.spec import spec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]
SECRET = """async (session) => {
  const { connect } = await import("/static/client/midstream.js");
  const [one, other] = await Promise.all([connect(), connect()]); // as of two tabs
  const [secret, same] = await Promise.all([one.secret(session), other.secret(session)]);
  one.close();
  other.close();
  return secret === same ? secret : "";
}"""
KEEP = """async ([session, secret]) => {
  const { connect } = await import("/static/client/midstream.js");
  const client = await connect();
  await client.keepSecret(session, secret);
  client.close();
}"""
LOOK = """async ([session, word]) => {
  let words = "";
  try {
    for await (const { record } of client.follow(session, "0-0", { word })) {
      if (record?.type === "delta") words += record.text;
      if (record?.type === "turn_ended") return words;
    }
  } catch (error) {
    return error.code;
  }
}"""
STATUS = "(session) => client.fetch(session).then((answer) => answer.status)"


class Heard:
    """What a browser says aloud: addresses it asks for, and words on its console."""

    def __init__(self, context: BrowserContext) -> None:
        self.said: list[str] = []
        context.on("request", lambda request: self.said.append(request.url))
        context.on("console", lambda message: self.said.append(message.text))
        context.on("page", self._page)

    def _page(self, page: Page) -> None:
        page.on("websocket", lambda socket: self.said.append(socket.url))
        page.on("framenavigated", lambda frame: self.said.append(frame.url))


@spec("STREAM-84", "STREAM-94", "STREAM-95")
async def test_the_page_goes_on_in_a_session_that_only_its_browser_can_open(
    browser: Browser, tmp_path: Path
) -> None:
    FileKeys.make(tmp_path / "keys")
    options = ["--encrypt", "client", "--key-file", str(tmp_path / "keys")]
    context = await browser.new_context()
    heard = Heard(context)
    server = await asyncio.to_thread(Serving, tmp_path, options=options)
    try:
        chat = Chat(await context.new_page(), [])
        await chat.page.goto(server.listening["page"])
        for words in ("one", "two"):
            await chat.say(words)
            await chat.sees(f"You said: {words}.")
            await chat.sees_end("completed")
        await chat.page.reload()
        await chat.sees("You said: two.")
        await expect(chat.page.locator("#sessions li")).to_have_count(1, timeout=WAIT_MS)
        server.kill()
        server = await asyncio.to_thread(Serving, tmp_path, port=server.port, options=options)
        await chat.say("three")
        await chat.sees("You said: three.")
        await expect(chat.page.locator(".turn")).to_have_count(3)
        secret = await chat.page.evaluate(SECRET, chat.session)
        assert len(secret) == 43
        assert not any(secret in each for each in heard.said)
        assert await chat.page.evaluate("localStorage.length + sessionStorage.length") == 0
        await another_browser_opens_it_when_it_is_told(browser, chat, secret)
    finally:
        server.kill()
        await context.close()


async def another_browser_opens_it_when_it_is_told(browser: Browser, chat: Chat, secret: str) -> None:
    known = await chat.page.context.storage_state()  # the login, and nothing of IndexedDB
    context = await browser.new_context(storage_state=known)
    page = await context.new_page()
    await page.goto(chat.page.url)
    await expect(page.locator("#notice")).to_contain_text("that this browser can open", timeout=WAIT_MS)
    await page.evaluate(KEEP, [chat.session, secret])
    await page.reload()
    await expect(page.locator(".turn")).to_have_count(3, timeout=WAIT_MS)
    await context.close()


@spec("STREAM-84", "STREAM-88", "STREAM-89")
@pytest.mark.parametrize("transport", ["websocket", "sse", "poll"])
async def test_the_secret_is_shown_over_each_transport(
    browser: Browser, tmp_path: Path, transport: str
) -> None:
    app = escrowed_app(tmp_path, [text("One."), text("Two."), text("Three.")])
    async with served(app) as server:
        page = await page_at(browser, server.url, transport=transport)
        assert await says(page, "s1", "one") == "One."
        assert await says(page, "s1", "two") == "Two."
        assert await page.evaluate(LOOK, ["s1", ""]) == "One."
        assert await page.evaluate(STATUS, "s1") == 200
        word = await page.evaluate("client.letLook('s1', { forS: 60 })")
        other = await page_at(browser, server.url, transport=transport)
        assert await other.evaluate(STATUS, "s1") == 403
        assert await other.evaluate(LOOK, ["s1", ""]) == "wrong_secret"
        assert await other.evaluate(LOOK, ["s1", word]) == "One."
        await page.evaluate("client.withdrawViewers('s1')")
        assert await other.evaluate(LOOK, ["s1", word]) == "wrong_secret"
        before = await page.evaluate("client.secret('s1')")
        await asked(page, "client.changeSecret('s1')")
        assert await page.evaluate("client.secret('s1')") != before
        assert await says(page, "s1", "three") == "Three."
        await other.evaluate("(secret) => client.keepSecret('s1', secret)", before)
        assert await other.evaluate(STATUS, "s1") == 403
        for each in (page, other):
            await each.context.close()
