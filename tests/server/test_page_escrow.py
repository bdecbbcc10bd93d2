"""Pages at servers that encrypt each session under its client's secret, which only this browser has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from playwright.async_api import Browser, BrowserContext, Page, expect

from midstream.history.messages import UserMessage
from midstream.models.responses import ModelRequest
from midstream.store.encryption.ciphers import FileKeys
from midstream.testing.scripted_model import ScriptedStep, text
from tests.cli.processes import Serving, run
from tests.server.devtools import CHROMIUM
from tests.server.escrowing import escrowed_app
from tests.server.serving import make_app, served
from tests.server.test_page import HALF, WAIT_MS, WHOLE, WORDS, Chat, two_halves
from tests.server.test_page_transports import SEND, connect_at, page_at, send, value_of
from tests.spec import spec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
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
LOOK = """async (session, viewerToken) => {
  let words = "";
  try {
    for await (const { record } of client.follow(session, "0-0", { viewerToken })) {
      if (record?.type === "delta") words += record.text;
      if (record?.type === "turn_ended") return words;
    }
  } catch (error) {
    return error.code;
  }
}"""
CHANGED = """async (session) => {
  const reader = client.follow(session, "0-0");
  const events = reader[Symbol.asyncIterator]();
  await events.next();
  await client.changeSecret(session);
  reader.cut();
  globalThis.hearing = (async () => {
    for (;;) {
      const { record } = (await events.next()).value;
      if (record.type === "turn_ended" && record.turn === 3) return "heard";
    }
  })();
}"""
FORMER = """(url) => new Promise((resolve, reject) => {
  const opening = indexedDB.open("midstream", 2);
  opening.onupgradeneeded = () => {
    opening.result.createObjectStore("streams", { keyPath: "key" });
    opening.result.createObjectStore("secrets", { keyPath: "key" });
    opening.result.createObjectStore("commands", { keyPath: ["key", "seqno"] });
    opening.result.createObjectStore("transports", { keyPath: "server" });
  };
  opening.onsuccess = () => {
    const writing = opening.result.transaction(["streams", "secrets", "commands"], "readwrite");
    const kept = { key: "k", session: "s1", url, cursor: null, turn: 0, acked: 0, nextSeqno: 1, life: 0 };
    const frame = '{"type":"command","seqno":0,"payload":{"type":"send","parts":[{"type":"text","text":"hi"}]}}';
    writing.objectStore("streams").put({ ...kept, isDetached: false, isWhole: false, touchedAt: Date.now() });
    writing.objectStore("secrets").put({ key: "k", secret: "f".repeat(43) });
    writing.objectStore("commands").put({ key: "k", seqno: 0, frame });
    writing.oncomplete = () => resolve(opening.result.close());
    writing.onabort = () => reject(writing.error);
  };
})"""
SESSIONS = """() => new Promise((resolve) => {
  indexedDB.open("midstream").onsuccess = ({ target }) => {
    const counting = target.result.transaction("sessions").objectStore("sessions").count();
    counting.onsuccess = () => resolve(counting.result);
  };
})"""
"""Number of sessions with stored secrets."""
TAKEN_UP = """(async () => {
  let words = "";
  const [stream] = await client.resumeInterrupted();
  for await (const { record } of stream) if (record?.type === "delta") words += record.text;
  return words;
})()"""


class BrowserOutput:
    """Output of a browser: requested addresses and console lines."""

    def __init__(self, context: BrowserContext) -> None:
        self.lines: list[str] = []
        context.on("request", lambda request: self.lines.append(request.url))
        context.on("console", lambda message: self.lines.append(message.text))
        context.on("page", self._page)

    def _page(self, page: Page) -> None:
        page.on("websocket", lambda socket: self.lines.append(socket.url))
        page.on("framenavigated", lambda frame: self.lines.append(frame.url))


@spec("STREAM-84", "STREAM-94", "STREAM-95")
async def test_the_page_continues_a_session_that_only_its_browser_can_open(
    browser: Browser, tmp_path: Path, port: int
) -> None:
    FileKeys.make(tmp_path / "keys")
    options = ["--encrypt", "client", "--key-file", str(tmp_path / "keys")]
    context = await browser.new_context()
    received = BrowserOutput(context)
    server = await asyncio.to_thread(Serving, tmp_path, port=port, options=options)
    try:
        chat = Chat(await context.new_page(), [])
        link = await asyncio.to_thread(run, "login", server.url)
        await chat.page.goto(link.stdout.strip())
        for words in ("one", "two"):
            await chat.send_message(words)
            await chat.sees(f"You said: {words}.")
            await chat.sees_end("completed")
        await chat.page.reload()
        await chat.sees("You said: two.")
        await expect(chat.page.locator("#sessions li")).to_have_count(1, timeout=WAIT_MS)
        server.kill()
        server = await asyncio.to_thread(Serving, tmp_path, port=port, options=options)
        await chat.send_message("three")
        await chat.sees("You said: three.")
        await expect(chat.page.locator(".turn")).to_have_count(3)
        secret = await chat.page.evaluate(SECRET, chat.session)
        assert len(secret) == 43
        assert not any(secret in each for each in received.lines)
        assert await chat.page.evaluate("localStorage.length + sessionStorage.length") == 0
        await open_in_another_browser(browser, chat, secret)
    finally:
        server.kill()
        await context.close()


async def open_in_another_browser(browser: Browser, chat: Chat, secret: str) -> None:
    known = await chat.page.context.storage_state()  # The login, and nothing of IndexedDB.
    context = await browser.new_context(storage_state=known)
    page = await context.new_page()
    await page.goto(chat.page.url)
    await expect(page.locator("#notice")).to_contain_text("that this browser can open", timeout=WAIT_MS)
    await page.evaluate(KEEP, [chat.session, secret])
    await page.reload()
    await expect(page.locator(".turn")).to_have_count(3, timeout=WAIT_MS)
    await context.close()


def numbered(request: ModelRequest) -> Sequence[ScriptedStep]:
    """Answer with the number of the turn."""
    return text(str(sum(isinstance(entry, UserMessage) for entry in request.history.entries)))


@pytest.mark.long
@spec("STREAM-84", "STREAM-88", "STREAM-89")
async def test_the_secret_is_presented_over_each_transport_and_a_viewer_token_in_its_place(
    browser: Browser, tmp_path: Path
) -> None:
    async with served(escrowed_app(tmp_path, numbered)) as server:
        page = await page_at(browser, server.url)
        other = await page_at(browser, server.url)
        for transport in ("websocket", "sse", "poll"):
            await connect_at(page, server.url, transport=transport)
            assert await send(page, transport, "one") == "1"
            assert await send(page, transport, "two") == "2"
            assert await value_of(page, f"({LOOK})('{transport}', '')") == "1"
            assert await value_of(other, f"({LOOK})('{transport}', '')") == "wrong_secret"
            token = await value_of(page, f"client.createViewerToken('{transport}', {{ forS: 60 }})")
            assert await value_of(other, f"({LOOK})('{transport}', '{token}')") == "1"
        await value_of(page, "client.revokeViewerTokens('poll')")
        assert await value_of(other, f"({LOOK})('poll', '{token}')") == "wrong_secret"
        before = await value_of(page, "client.secret('sse')")
        await page.evaluate(CHANGED, "sse")
        assert await value_of(page, "client.secret('sse')") != before
        assert await send(page, "sse", "three") == "3"
        assert await value_of(page, "hearing") == "heard"
        await value_of(other, f"client.keepSecret('sse', '{before}')")
        assert await value_of(other, "client.fetch('sse').then((answer) => answer.status)") == 403
        for each in (page, other):
            await each.context.close()


@pytest.mark.long
@spec("STREAM-96")
async def test_a_secret_changed_in_one_tab_is_presented_by_the_live_streams_of_another(
    browser: Browser, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    async with served(escrowed_app(tmp_path, two_halves(gate))) as server:
        page = await page_at(browser, server.url)
        await page.evaluate(SEND, ["s1", "go on"])
        output = page.locator("output")
        await expect(output).to_have_text("".join(WORDS[:HALF]), timeout=WAIT_MS, use_inner_text=False)
        before = await value_of(page, "client.secret('s1')")
        other = await page.context.new_page()
        await connect_at(other, server.url)
        for _ in range(2):
            await value_of(other, "client.changeSecret('s1')")
        await page.evaluate("client.cut()")
        gate.set()
        assert await value_of(page, "speaking") == WHOLE
        assert (
            await value_of(page, "client.secret('s1')")
            == await value_of(other, "client.secret('s1')")
            != before
        )
        await page.context.close()


@pytest.mark.long
@spec("STREAM-95")
async def test_a_server_without_encryption_leaves_no_secret_of_a_session_stored(browser: Browser) -> None:
    async with served(make_app([text("one")])) as server:
        page = await page_at(browser, server.url)
        assert await send(page, "s1", "one") == "one"
        await page.wait_for_function(f"async () => (await ({SESSIONS})()) === 0")
        await page.context.close()


@pytest.mark.long
async def test_the_database_of_an_older_page_is_taken_over(browser: Browser) -> None:
    """Its database had no secrets of sessions: the unsent message is still there."""
    async with served(make_app([text("Hello.")])) as server:
        page = await (await browser.new_context()).new_page()
        await page.goto(f"{server.url}/static/client/package.json")
        await page.evaluate(FORMER, server.url)
        await connect_at(page, server.url)
        assert await value_of(page, TAKEN_UP) == "Hello."
        await page.context.close()
