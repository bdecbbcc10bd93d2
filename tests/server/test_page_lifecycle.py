"""What browsers do to pages that nobody looks at: frozen, put aside, without a network; and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from midstream.core.settings import StreamSettings
from midstream.testing.models import text
from tests.client.proxies import Proxy, Upgrades
from tests.server.devtools import DevTools, Tab, devtools
from tests.server.serving import make_app, served
from tests.server.test_page import CHROMIUM, FLAGS, HALF, WAIT_MS, WAIT_S, WHOLE, WORDS, opened, two_halves
from tests.server.test_page import browser as browser  # noqa: PLC0414 - a fixture is found by its name
from tests.server.test_page_tabs import said_elsewhere, turns, until
from tests.server.test_page_transports import CONNECT, SPEAK, asked, page_at
from tests.spec import spec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]


THROTTLED = "--enable-features=IntensiveWakeUpThrottling:grace_period_seconds/1"
"""A tab in the background has its timers once a minute, a second after it went there and not after five minutes."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevTools]:
    assert CHROMIUM is not None
    async with devtools(CHROMIUM, [*FLAGS, THROTTLED], tmp_path_factory.mktemp("profile")) as browser:
        yield browser


FOLLOW = """(session) => {
  globalThis.words = "";
  globalThis.listening = (async () => {
    for await (const { record } of (globalThis.stream = client.follow(session, "0-0")))
      if (record?.type === "delta") words += record.text;
  })();
}"""
SAY = """(session, text) => {
  globalThis.words = "";
  globalThis.stream = client.send(session, text);
  globalThis.listening = (async () => {
    for await (const { record } of stream) if (record?.type === "delta") words += record.text;
    return "whole";
  })().catch((error) => error.code);
}"""
BACKGROUND = """async () => {
  globalThis.sockets = 0;
  globalThis.beats = 0;
  const Socket = WebSocket;
  globalThis.WebSocket = class extends Socket {
    constructor(address) {
      super(address);
      sockets += 1;
      this.addEventListener("message", ({ data }) => (beats += data.includes('"heartbeat"')));
    }
  };
  globalThis.ticks = 0;
  const tick = () => setTimeout(() => (ticks += 1, tick()), 20);
  tick();
}"""
TAKE_UP = """async () => {
  globalThis.words = "";
  [globalThis.stream] = await client.resumeInterrupted();
  globalThis.listening = (async () => {
    for await (const { record } of stream) if (record?.type === "delta") words += record.text;
    return "whole";
  })();
}"""
SEES_HALF = f"words === {json.dumps(''.join(WORDS[:HALF]))}"


async def tab_at(chromium: DevTools, url: str) -> Tab:
    """Open a tab that is a client."""
    tab = await chromium.open(f"{url}/static/client/package.json")
    await tab.call(f"(options) => ({CONNECT})([options, false])", {})
    return tab


async def test_a_tab_that_is_frozen_hands_the_connection_to_a_living_one(chromium: DevTools) -> None:
    app = turns(text("Hello."), text(" Without it."))
    async with served(app) as server:
        first = await tab_at(chromium, server.url)
        await first.call(SAY, "s1", "hello")
        assert await first.evaluate("listening") == "whole"
        tabs = [first, *[await tab_at(chromium, server.url) for _ in range(2)]]
        for tab in tabs:
            await tab.call(FOLLOW, "s1")
            await tab.until("words === 'Hello.'")
        await until(lambda: app.open_streams == 1)
        async with first.frozen():
            await said_elsewhere(app, "s1", "go on")
            for tab in tabs[1:]:
                await tab.until("words === 'Hello. Without it.'")
            await until(lambda: app.open_streams == 1)
        await first.until("words === 'Hello. Without it.'")
        await until(lambda: app.open_streams == 1)
        await leave(tabs)


@spec("STREAM-81")
async def test_a_tab_in_the_background_is_not_stalled_by_its_timers(chromium: DevTools) -> None:
    """Three silent heartbeats would be 0.9 s here: less than the first timer of such a tab takes."""
    app = turns(text("Hello."), text(" Heard at once."))
    app.settings = StreamSettings(heartbeat_s=0.3)
    async with served(app) as server:
        tab = await tab_at(chromium, server.url)
        await tab.call(SAY, "s1", "hello")
        assert await tab.evaluate("listening") == "whole"
        await tab.call(BACKGROUND)
        await tab.call(FOLLOW, "s1")
        await tab.until("words === 'Hello.'")
        async with tab.frozen():
            pass  # from here on it is hidden
        await tab.until("document.hidden && stream.connection.phase === 'live'")
        sockets = await tab.evaluate("sockets")
        async with asyncio.timeout(WAIT_S):
            before = None
            while before != (ticks := await tab.evaluate("ticks")):  # until its timers are held back
                before = ticks
                await tab.until(f"beats >= {await tab.evaluate('beats') + 3}")
        seen = await tab.evaluate("beats")
        await tab.until(f"beats >= {seen + 5}")
        assert await tab.evaluate("[sockets, stream.connection.phase]") == [sockets, "live"]
        await said_elsewhere(app, "s1", "go on")
        await tab.until("words === 'Hello. Heard at once.'")
        assert await tab.evaluate("sockets") == sockets
        await leave([tab])


async def leave(tabs: list[Tab]) -> None:
    for tab in tabs:
        await tab.evaluate("client.close()")


async def test_a_tab_that_is_frozen_while_it_speaks_goes_on_when_it_is_back(chromium: DevTools) -> None:
    gate = asyncio.Event()
    app = make_app(two_halves(gate))
    async with served(app) as server:
        tab = await tab_at(chromium, server.url)
        await tab.call(SAY, "s1", "go on")
        await tab.until(SEES_HALF)
        async with tab.frozen():
            await until(lambda: app.open_streams == 0)
            gate.set()
        assert [await tab.evaluate("listening"), await tab.evaluate("words")] == ["whole", WHOLE]
        await leave([tab])


@spec("STREAM-82")
async def test_what_a_frozen_tab_left_is_taken_up_by_another_and_the_first_one_yields(
    chromium: DevTools,
) -> None:
    gate = asyncio.Event()
    app = make_app(two_halves(gate))
    async with served(app) as server:
        tab, other = await tab_at(chromium, server.url), await tab_at(chromium, server.url)
        await tab.call(SAY, "s1", "go on")
        await tab.until(SEES_HALF)
        assert await other.evaluate("client.resumeInterrupted().then((streams) => streams.length)") == 0
        async with tab.frozen():
            await until(lambda: app.open_streams == 0)
            await other.call(TAKE_UP)
            await until(lambda: app.open_streams == 1)
        assert await tab.evaluate("listening") == "stream_fenced"
        gate.set()
        assert await other.evaluate("listening") == "whole"
        assert "".join(WORDS[HALF:]) in str(await other.evaluate("words"))
        await leave([tab, other])


async def test_a_page_that_is_put_aside_has_no_connection_until_it_is_back(browser: Browser) -> None:
    app = turns(text("Hello."), text("Meanwhile."))
    async with served(app) as server:
        chat = await opened(browser, server.url)
        await chat.say("hello")
        await chat.sees("Hello.")
        await until(lambda: app.open_streams == 1)
        move = "(kind) => dispatchEvent(new PageTransitionEvent(kind, { persisted: true }))"
        await chat.page.evaluate(move, "pagehide")
        await until(lambda: app.open_streams == 0)
        await said_elsewhere(app, chat.session, "go on")
        await chat.page.evaluate(move, "pageshow")
        await chat.sees("Meanwhile.")
        await until(lambda: app.open_streams == 1)
        await chat.page.context.close()


SLOW = """async () => {
  const { connect } = await import("/static/client/midstream.js");
  const slow = {  // a wait of a second lasts a minute
    now: () => performance.now() / 60,
    set: (act, milliseconds) => setTimeout(act, milliseconds * 60),
    clear: (timer) => clearTimeout(timer),
  };
  globalThis.client = await connect({ clock: slow, transport: "websocket", chance: () => 0 });
}"""
WAITS = "() => stream.connection.phase === 'waiting' && stream.connection.retryAt - Date.now() > 500"
"""A second away by its own clock, and that is a minute."""


@spec("STREAM-81")
async def test_a_network_that_is_back_is_used_at_once(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        proxy = Proxy(server.url)
        async with proxy.listening():
            page = await page_at(browser, proxy.url)
            await page.evaluate(SLOW)
            await page.evaluate(SPEAK, ["s1", "go on"])
            output = page.locator("output")
            await expect(output).to_have_text("".join(WORDS[:HALF]), timeout=WAIT_MS, use_inner_text=False)
            await page.context.set_offline(True)
            proxy.upgrades = Upgrades.DROPPED
            proxy.cut()
            await page.wait_for_function(WAITS)
            assert await page.evaluate("stream.connection.isReconnecting")
            gate.set()
            proxy.upgrades = Upgrades.PASSED
            await page.context.set_offline(False)
            assert await asked(page, "speaking") == WHOLE
            assert not await page.evaluate("stream.connection.isReconnecting")
            await page.context.close()
