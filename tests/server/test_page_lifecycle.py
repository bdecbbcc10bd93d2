"""Background pages: frozen, kept for the back button, without a network; and their return."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from playwright.async_api import Browser, expect

from midstream.protocol.stream_settings import StreamSettings
from midstream.server.app import App
from midstream.testing.scripted_model import text
from tests.client.proxies import OfficeProxy, Upgrades
from tests.server.devtools import CHROMIUM, DevTools, Tab
from tests.server.serving import make_app, served
from tests.server.test_page import HALF, KEPT, WAIT_MS, WAIT_S, WHOLE, WORDS, two_halves
from tests.server.test_page_tabs import send_elsewhere, turns, until
from tests.server.test_page_transports import CONNECT, SEND, page_at, value_of
from tests.spec import spec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]


FOLLOW = """(session) => {
  globalThis.words = "";
  globalThis.listening = (async () => {
    for await (const { record } of (globalThis.stream = client.follow(session, "0-0")))
      if (record?.type === "delta") words += record.text;
  })();
}"""
SEND_AND_READ = """(session, text) => {
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
ROWS = """(async () => {
  const { IndexedStorage } = await import("/static/client/storage.js");
  const { streams, secrets, commands } = await (await IndexedStorage.open()).load();
  return [streams, secrets, commands].map((rows) => rows.length);
})()"""
TAKE_UP = """async () => {
  globalThis.words = "";
  [globalThis.stream] = await client.resumeInterrupted();
  globalThis.listening = (async () => {
    for await (const { record } of stream) if (record?.type === "delta") words += record.text;
    return "whole";
  })();
}"""
PUT_ASIDE = """() => {
  globalThis.moves = [];
  for (const kind of ["pagehide", "pageshow"])
    addEventListener(kind, ({ persisted }) => moves.push(`${kind} ${persisted}`));
}"""
WRITE = """(words) => {
  document.querySelector("#text").value = words;
  document.querySelector("#composer").requestSubmit();
}"""
TEXTS = (
    "[...document.querySelectorAll('.turn .parts > .text')].map((element) => element.textContent).join('|')"
)
CONNECT_AND_TAKE_UP = """async () => {
  const { connect } = await import("/static/client/midstream.js");
  globalThis.heard = {};
  const oninterrupted = async (stream) => {
    heard[stream.session] = "";
    for await (const { record } of stream) if (record?.type === "delta") heard[stream.session] += record.text;
    heard.ended = (heard.ended ?? 0) + 1;
  };
  globalThis.client = await connect({ oninterrupted });
}"""
WATCH = """() => new Promise((resolve) => {
  indexedDB.open("midstream").onsuccess = ({ target }) => {
    (globalThis.watched = target.result).onclose = () => (globalThis.isClosed = true);
    resolve();
  };
})"""
"""See the browser close the connections to a database: it closes all at once."""
KEEP_NOTHING = "(isRecoveryOn) => void (client.settings = { isRecoveryOn })"
SEES_HALF = f"words === {json.dumps(''.join(WORDS[:HALF]))}"


async def tab_at(chromium: DevTools, url: str, **options: str) -> Tab:
    """Open a tab that is a client."""
    tab = await chromium.open(f"{url}/static/client/package.json")
    await tab.call(f"(options) => ({CONNECT})([options, false])", options)
    return tab


async def tabs_of_one(chromium: DevTools, url: str) -> list[Tab]:
    """Open three tabs that have read an answer; the first of them began and has the connection."""
    first = await tab_at(chromium, url)
    await first.call(SEND_AND_READ, "s1", "hello")
    assert await first.evaluate("listening") == "whole"
    tabs = [first, *[await tab_at(chromium, url) for _ in range(2)]]
    for tab in tabs:
        await tab.call(FOLLOW, "s1")
        await tab.until("words === 'Hello.'")
    return tabs


async def test_a_frozen_tab_hands_the_connection_to_a_live_one(chromium: DevTools) -> None:
    app = turns(text("Hello."), text(" Without it."))
    async with served(app) as server:
        first, *others = tabs = await tabs_of_one(chromium, server.url)
        await until(lambda: app.open_streams == 1)
        async with first.frozen():
            await send_elsewhere(app, "s1", "go on")
            for tab in others:
                await tab.until("words === 'Hello. Without it.'")
            await until(lambda: app.open_streams == 1)
        await first.until("words === 'Hello. Without it.'")
        await until(lambda: app.open_streams == 1)
        await close_clients(tabs)


@pytest.mark.long
async def test_a_crashed_tab_leaves_the_connection_to_a_live_one(chromium: DevTools) -> None:
    app = turns(text("Hello."), text(" Without it."))
    async with served(app) as server:
        first, *others = await tabs_of_one(chromium, server.url)
        await until(lambda: app.open_streams == 1)
        await first.crash()
        await send_elsewhere(app, "s1", "go on")
        for tab in others:
            await tab.until("words === 'Hello. Without it.'")
        await until(lambda: app.open_streams == 1)
        await close_clients(others)


@pytest.mark.long
async def test_a_database_closed_by_the_browser_is_opened_again(chromium: DevTools) -> None:
    """Its user clears the site's data during a turn: that turn is read to its end, and the next ones are stored."""
    gate = asyncio.Event()
    app = turns(two_halves(gate), text("Kept again."))
    async with served(app) as server:
        tab = await tab_at(chromium, server.url)
        await tab.call(SEND_AND_READ, "s1", "go on")
        await tab.until(SEES_HALF)
        await tab.evaluate(f"({WATCH})()")
        await tab.clear_site_data(server.url)
        await tab.until("globalThis.isClosed")
        gate.set()
        assert [await tab.evaluate("listening"), await tab.evaluate("words")] == ["whole", WHOLE]
        await tab.call(SEND_AND_READ, "s1", "and now?")
        assert [await tab.evaluate("listening"), await tab.evaluate("words")] == ["whole", "Kept again."]
        assert await tab.evaluate("client.isDurable")
        assert await tab.evaluate(f"({KEPT})()") == 0
        await close_clients([tab])


@pytest.mark.long
@spec("STREAM-81")
async def test_throttled_timers_do_not_stall_a_background_tab(chromium: DevTools) -> None:
    """Three silent heartbeats would be 0.9 s here: less than the first timer of such a tab takes."""
    app = turns(text("Hello."), text(" Heard at once."))
    app.settings = StreamSettings(heartbeat_s=0.3)
    async with served(app) as server:
        tab = await tab_at(chromium, server.url)
        await tab.call(SEND_AND_READ, "s1", "hello")
        assert await tab.evaluate("listening") == "whole"
        await tab.call(BACKGROUND)
        await tab.call(FOLLOW, "s1")
        await tab.until("words === 'Hello.'")
        async with tab.frozen():
            pass  # From here on it is hidden.
        await tab.until("document.hidden && stream.connection.phase === 'live'")
        sockets = await tab.evaluate("sockets")
        async with asyncio.timeout(WAIT_S):
            before = None
            while before != (ticks := await tab.evaluate("ticks")):  # Until its timers are throttled.
                before = ticks
                await tab.until(f"beats >= {await tab.evaluate('beats') + 3}")
        seen = await tab.evaluate("beats")
        await tab.until(f"beats >= {seen + 5}")
        assert await tab.evaluate("[sockets, stream.connection.phase]") == [sockets, "live"]
        await send_elsewhere(app, "s1", "go on")
        await tab.until("words === 'Hello. Heard at once.'")
        assert await tab.evaluate("sockets") == sockets
        await close_clients([tab])


async def close_clients(tabs: list[Tab]) -> None:
    for tab in tabs:
        await tab.evaluate("client.close()")


@pytest.mark.long
async def test_a_tab_frozen_while_sending_continues_after_its_return(chromium: DevTools) -> None:
    gate = asyncio.Event()
    app = make_app(two_halves(gate))
    async with served(app) as server:
        tab = await tab_at(chromium, server.url)
        await tab.call(SEND_AND_READ, "s1", "go on")
        await tab.until(SEES_HALF)
        async with tab.frozen():
            await until(lambda: app.open_streams == 0)
            gate.set()
        assert [await tab.evaluate("listening"), await tab.evaluate("words")] == ["whole", WHOLE]
        await close_clients([tab])


@pytest.mark.long
@spec("STREAM-82")
async def test_another_tab_takes_over_the_stream_of_a_frozen_one_which_then_yields(
    chromium: DevTools,
) -> None:
    gate = asyncio.Event()
    app = make_app(two_halves(gate))
    async with served(app) as server:
        tab, other = await tab_at(chromium, server.url), await tab_at(chromium, server.url)
        await tab.call(SEND_AND_READ, "s1", "go on")
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
        await close_clients([tab, other])


@pytest.mark.long
@spec("STREAM-30")
async def test_another_tab_never_clears_the_streams_of_a_live_one(
    chromium: DevTools,
) -> None:
    gate = asyncio.Event()
    app = make_app(two_halves(gate))
    async with served(app) as server:
        tab, other = await tab_at(chromium, server.url), await tab_at(chromium, server.url)
        await tab.call(SEND_AND_READ, "s1", "go on")
        await tab.until(SEES_HALF)
        kept = await other.evaluate(ROWS)
        assert kept[:2] == [1, 1]
        clear = "client.resumeInterrupted({ lookBackS: 0 }).then((streams) => streams.length)"
        assert await other.evaluate(clear) == 0
        assert await other.evaluate(ROWS) == kept
        async with tab.frozen():
            await until(lambda: app.open_streams == 0)
            assert await other.evaluate(clear) == 0
            assert await other.evaluate(ROWS) == [0, 0, 0]
        gate.set()
        await close_clients([tab, other])


@pytest.mark.long
@spec("STREAM-30", "STREAM-78", "STREAM-79")
async def test_the_next_page_takes_over_the_stored_streams_at_its_start(
    chromium: DevTools,
) -> None:
    gate = asyncio.Event()
    app = make_app(two_halves(gate))
    async with served(app) as server:
        tab = await tab_at(chromium, server.url)
        for session, is_kept in (("kept", True), ("unkept", False), ("another", True)):
            await tab.call(KEEP_NOTHING, is_kept)
            await tab.call(SEND_AND_READ, session, "go on")
            await tab.until(SEES_HALF)
        await tab.reload()
        await tab.evaluate(f"({CONNECT_AND_TAKE_UP})()")
        await until(lambda: app.open_streams == 2)
        assert await tab.evaluate("Object.keys(heard).sort()") == ["another", "kept"]
        gate.set()
        await tab.until("heard.ended === 2")
        for session in ("kept", "another"):
            assert "".join(WORDS[HALF:]) in await tab.evaluate(f"heard.{session}")
        await close_clients([tab])


async def away_and_back(tab: Tab, app: App, meanwhile: Callable[[], Awaitable[None]]) -> None:
    """Leave for another page, which puts this one in the cache, and return; assert that it is the same page."""
    here = await tab.evaluate("location.href")
    await tab.evaluate(f"({PUT_ASIDE})()")
    await tab.follow_link(f"{here.partition('#')[0]}?elsewhere")
    assert await tab.evaluate("globalThis.moves === undefined")
    await until(lambda: app.open_streams == 0)
    await meanwhile()
    await tab.back()
    await tab.until("globalThis.moves?.length === 2")
    assert await tab.evaluate("[location.href, ...moves]") == [here, "pagehide true", "pageshow true"]


@pytest.mark.parametrize("transport", ["websocket", "sse", "poll"])
async def test_a_page_cached_while_sending_continues_after_its_return(
    chromium: DevTools, transport: str
) -> None:
    gate = asyncio.Event()
    app = make_app(two_halves(gate))

    async def meanwhile() -> None:
        gate.set()

    async with served(app) as server:
        tab = await tab_at(chromium, server.url, transport=transport)
        await tab.call(SEND_AND_READ, "s1", "go on")
        await tab.until(SEES_HALF)
        await away_and_back(tab, app, meanwhile)
        assert [await tab.evaluate("listening"), await tab.evaluate("words")] == ["whole", WHOLE]
        assert await tab.evaluate(f"({KEPT})()") == 0
        await close_clients([tab])


@pytest.mark.long
async def test_a_cached_chat_page_shows_the_messages_of_its_absence_once(chromium: DevTools) -> None:
    app = turns(text("Hello."), text("Meanwhile."), text("Afterwards."))
    async with served(app) as server:
        tab = await chromium.open(f"{server.url}/#s1")
        await tab.until("document.querySelector('#empty')?.hidden === false")
        await tab.call(WRITE, "hello")
        await tab.until(f"({TEXTS}) === 'Hello.'")
        await tab.until("document.querySelector('.turn').dataset.status === 'completed'")
        await away_and_back(tab, app, lambda: send_elsewhere(app, "s1", "go on"))
        await tab.until(f"({TEXTS}) === 'Hello.|Meanwhile.'")
        await tab.call(WRITE, "and now?")
        await tab.until(f"({TEXTS}) === 'Hello.|Meanwhile.|Afterwards.'")


@pytest.mark.long
@spec("STREAM-82")
async def test_another_tab_takes_over_the_stream_of_a_cached_page(chromium: DevTools) -> None:
    gate = asyncio.Event()
    app = make_app(two_halves(gate))
    async with served(app) as server:
        tab, other = await tab_at(chromium, server.url), await tab_at(chromium, server.url)

        async def meanwhile() -> None:
            await other.call(TAKE_UP)
            await until(lambda: app.open_streams == 1)

        await tab.call(SEND_AND_READ, "s1", "go on")
        await tab.until(SEES_HALF)
        await away_and_back(tab, app, meanwhile)
        assert await tab.evaluate("listening") == "stream_fenced"
        gate.set()
        assert await other.evaluate("listening") == "whole"
        await close_clients([tab, other])


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
"""One second passes; by the page's clock that is a minute."""


@pytest.mark.long
@spec("STREAM-81")
async def test_a_returning_network_is_used_at_once(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        proxy = OfficeProxy(server.url)
        async with proxy.listening():
            page = await page_at(browser, proxy.url)
            await page.evaluate(SLOW)
            await page.evaluate(SEND, ["s1", "go on"])
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
            assert await value_of(page, "speaking") == WHOLE
            assert not await page.evaluate("stream.connection.isReconnecting")
            await page.context.close()
