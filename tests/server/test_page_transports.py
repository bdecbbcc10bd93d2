"""The browser client in realistic networks: no upgrades, buffered responses, cuts, six connections to a host."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from playwright.async_api import Browser, Page, WebSocketRoute, expect

from midstream.environment import World
from midstream.server.auth.access import Access, tokens
from midstream.server.auth.principals import Principal
from midstream.testing.scripted_model import text
from tests.client.proxies import OfficeProxy, Upgrades
from tests.server.devtools import CHROMIUM
from tests.server.serving import make_app, served, words_of
from tests.server.test_page import HALF, WAIT_MS, WAIT_S, WHOLE, WORDS, naming_failure, records_of, two_halves
from tests.server.test_page_tabs import until
from tests.spec import spec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]
TOKEN = "a token of the server's"
DAY_S = 24 * 3600.0
CONNECT = """async ([options, isFast]) => {
  const { connect } = await import("/static/client/midstream.js");
  const fast = {  // three times as fast, so that a silence is found out in less than two seconds
    now: () => 3 * performance.now(),
    set: (act, milliseconds) => setTimeout(act, milliseconds / 3),
    clear: (timer) => clearTimeout(timer),
  };
  globalThis.client = await connect({ ...options, ...(isFast ? { clock: fast } : {}) });
}"""
CONNECT_SHOWING = """async (token) => {
  const { connect } = await import("/static/client/midstream.js");
  globalThis.client = await connect({ headers: () => ({ authorization: `Bearer ${token}` }) });
}"""
SEND = """([session, words]) => {
  const output = document.body.appendChild(document.createElement("output"));
  globalThis.speaking = (async () => {
    for await (const { record } of (globalThis.stream = client.send(session, words)))
      if (record?.type === "delta") output.textContent += record.text;
    return output.textContent;
  })();
}"""
REMEMBERED = """() => new Promise((resolve, reject) => {
  const opening = indexedDB.open("midstream");
  opening.onsuccess = () => {
    const reading = opening.result.transaction("transports").objectStore("transports").getAll();
    reading.onsuccess = () => resolve(reading.result);
    reading.onerror = () => reject(reading.error);
  };
})"""

KEPT = """() => new Promise((resolve, reject) => {
  const opening = indexedDB.open("midstream");
  opening.onsuccess = () => {
    const reading = opening.result.transaction(["streams", "secrets"]);
    const [stream, secret] = ["streams", "secrets"].map((name) => reading.objectStore(name).getAll());
    reading.oncomplete = () => resolve([stream.result[0] ?? null, secret.result[0] ?? null]);
    reading.onabort = () => reject(reading.error);
  };
})"""


async def page_at(browser: Browser, url: str, *, is_fast: bool = False, **options: Any) -> Page:  # noqa: ANN401 - JSON
    """Open a page with its own profile that is a client."""
    page = await (await browser.new_context()).new_page()
    await connect_at(page, url, is_fast=is_fast, **options)
    return page


async def connect_at(page: Page, url: str, *, is_fast: bool = False, **options: Any) -> None:  # noqa: ANN401 - JSON
    await page.goto(f"{url}/static/client/package.json")  # Of the server, with no client of its own.
    await page.evaluate(CONNECT, [options, is_fast])


async def send(page: Page, session: str, words: str) -> str:
    await page.evaluate(SEND, [session, words])
    received: str = await value_of(page, "speaking")
    return received


async def value_of(page: Page, expression: str) -> Any:  # noqa: ANN401 - JSON
    """Return the final value of an expression."""
    return await asyncio.wait_for(page.evaluate(expression), WAIT_S)


async def remembered(page: Page) -> tuple[str, float]:
    """Wait for the transport that a page has stored for its server, and for its lifetime in seconds."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await page.evaluate(REMEMBERED)):
            await World().sleep(0.02)
    return found[0]["transport"], found[0]["until"] / 1000 - World().now()


def ways(proxy: OfficeProxy) -> list[str]:
    """Return the requested transports of a session, in order."""
    kinds = {"upgrade": "websocket", "events": "sse", "poll": "poll"}
    asked = (each for each in proxy.asked if "/probe/" not in each)
    return [kinds[word] for each in asked if (word := each.rpartition("/")[2]) in kinds]


@pytest.mark.long
@spec("STREAM-42", "STREAM-43", "STREAM-80", "STREAM-109")
async def test_a_working_transport_is_found_and_remembered(browser: Browser) -> None:
    """Run behind proxies of each kind at once: most of the time is their silence."""
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"upgrades": Upgrades.REFUSED}, "sse"),
        ({"upgrades": Upgrades.SILENT}, "sse"),
        ({"upgrades": Upgrades.SWALLOWED}, "sse"),
        ({"upgrades": Upgrades.DROPPED, "is_buffering": True}, "poll"),
    ]
    async with asyncio.TaskGroup() as proxies:
        for harm, transport in kinds:
            proxies.create_task(naming_failure(str(harm), _finds_and_remembers(browser, harm, transport)))


async def _finds_and_remembers(browser: Browser, harm: dict[str, Any], transport: str) -> None:
    app = make_app([text("Hello.")])
    async with served(app) as server:
        proxy = OfficeProxy(server.url, **harm)
        async with proxy.listening():
            page = await page_at(browser, proxy.url, is_fast=True)
            assert await send(page, "s1", "hi") == "Hello."
            kept, for_s = await remembered(page)
            assert (kept, DAY_S - 120 < for_s <= DAY_S) == (transport, True)
            proxy.asked.clear()
            await connect_at(page, proxy.url, is_fast=True)
            assert await send(page, "s1", "once more") == "Hello."
            assert set(ways(proxy)) == {transport}
            await page.context.close()
        records = await server.http.get("/v1/sessions/s1/records")
    assert records.text.count('"type":"message_accepted"') == 2


@pytest.mark.long
@spec("STREAM-80")
async def test_a_transport_that_failed_by_loss_is_soon_tried_again(browser: Browser) -> None:
    """A server that is just starting refuses its first sockets; that must not exclude them for a day."""
    async with served(make_app([text("Hello.")])) as server:
        page = await (await browser.new_context()).new_page()

        async def lose(socket: WebSocketRoute) -> None:
            await socket.close(code=1011)

        await page.context.route_web_socket("**/v1/sessions/*/stream", lose)
        await connect_at(page, server.url)
        assert await send(page, "s1", "hi") == "Hello."
        kept, for_s = await remembered(page)
        assert (kept, 480 < for_s <= 600) == ("sse", True)
        await page.context.close()


@pytest.mark.long
@spec("STREAM-108")
async def test_after_an_outage_of_the_server_the_page_uses_a_websocket_again(browser: Browser) -> None:
    async with served(make_app([text("Hello.")])) as server:
        proxy = OfficeProxy(server.url)
        async with proxy.listening():
            page = await page_at(browser, proxy.url, is_fast=True)
            proxy.is_away = True
            await page.evaluate(SEND, ["s1", "hi"])
            await until(lambda: len(ways(proxy)) >= 4)  # Two more than the number that excludes a transport.
            proxy.is_away = False
            assert await value_of(page, "speaking") == "Hello."
            assert set(ways(proxy)) == {"websocket"}
            assert await page.evaluate(REMEMBERED) == []
            await page.context.close()


@pytest.mark.long
@spec("STREAM-80")
async def test_websockets_that_need_a_ticket_are_not_judged_without_one(browser: Browser) -> None:
    """The server would refuse it, which proves nothing about the network."""
    access = Access(authenticate=tokens({TOKEN: Principal("ann")}))
    async with served(make_app([text("Hello.")], access=access)) as server:
        page = await (await browser.new_context()).new_page()

        async def lose(socket: WebSocketRoute) -> None:
            await socket.close(code=1011)

        await page.context.route_web_socket("**/v1/sessions/*/stream?*", lose)
        await page.goto(f"{server.url}/static/client/package.json")
        await page.evaluate(CONNECT_SHOWING, TOKEN)
        assert await send(page, "s1", "hi") == "Hello."
        kept, for_s = await remembered(page)
        assert (kept, 480 < for_s <= 600) == ("sse", True)
        await page.context.close()


@pytest.mark.long
@spec("STREAM-42")
async def test_without_any_websocket_the_next_transport_is_used(browser: Browser) -> None:
    """A page of https may open none to http; an old Node has none."""
    async with served(make_app([text("Hello.")])) as server:
        proxy = OfficeProxy(server.url)
        async with proxy.listening():
            page = await (await browser.new_context()).new_page()
            await page.add_init_script(
                "WebSocket = class { constructor() { throw new DOMException('', 'SecurityError'); } }"
            )
            await connect_at(page, proxy.url)
            assert await send(page, "s1", "hi") == "Hello."
            assert (await remembered(page))[0] == "sse"
            await connect_at(page, proxy.url, transport="websocket")
            assert await value_of(page, "client.send('s1', 'hi').ended.then(({ code }) => code)") == "usage"
            await page.context.close()


@pytest.mark.parametrize("transport", ["websocket", "sse", "poll"])
async def test_network_cuts_cost_no_word_over_any_transport(browser: Browser, transport: str) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server, OfficeProxy(server.url).listening() as proxy:
        page = await page_at(browser, proxy.url, transport=transport)
        seen: list[str] = []
        page.on("request", lambda request: seen.append(request.url))
        page.on("websocket", lambda socket: seen.append(socket.url))
        page.on("console", lambda message: seen.append(message.text))
        output = page.locator("output")
        await page.evaluate(SEND, ["s1", "go on"])
        await expect(output).to_have_text("".join(WORDS[:HALF]), timeout=WAIT_MS, use_inner_text=False)
        stream, secret = await page.evaluate(KEPT)
        assert (len(secret["secret"]), stream["key"], "secret" in stream) == (43, secret["key"], False)
        proxy.cut()
        await until(lambda: ways(proxy).count(transport) >= 2)
        proxy.cut()
        gate.set()
        assert await value_of(page, "speaking") == WHOLE
        assert set(ways(proxy)) == {transport}
        assert words_of(await records_of(server, "s1")) == WHOLE
        assert await page.evaluate(KEPT) == [None, None]
        assert seen != []
        assert [each for each in seen if secret["secret"] in each] == []
        await page.context.close()


@pytest.mark.long
async def test_a_refusal_over_plain_http_has_the_servers_own_code(browser: Browser) -> None:
    async with served(make_app()) as server:
        page = await page_at(browser, server.url, transport="sse")
        code = await value_of(page, "async () => (await client.follow('nobody', '1-1').ended).code")
        assert code == "session_not_found"
        await page.context.close()


SPEAK_OFTEN = """(sessions) => {
  globalThis.heard = sessions.map(() => "");
  globalThis.streams = sessions.map((session) => client.send(session, "go on"));
  const listen = async (stream, at) => {
    try {
      for await (const { record } of stream) if (record?.type === "delta") heard[at] += record.text;
    } catch (error) {
      if (error.status !== "cancelled") throw error;
      heard[at] += "!";
    }
    return heard[at];
  };
  globalThis.speaking = Promise.all(streams.map(listen));
}"""


@pytest.mark.long
@spec("STREAM-83")
async def test_more_streams_than_browser_connections_all_receive_and_send(browser: Browser) -> None:
    gate = asyncio.Event()
    half = "".join(WORDS[:HALF])
    async with served(make_app(two_halves(gate))) as server:
        context = await browser.new_context()
        tabs = [await context.new_page() for _ in range(2)]
        for number, tab in enumerate(tabs):
            await connect_at(tab, server.url, transport="sse")
            await tab.evaluate(SPEAK_OFTEN, [f"s{number}-{each}" for each in range(4)])
        for tab in tabs:
            await tab.wait_for_function("(half) => heard.every((each) => each === half)", arg=half)
        await tabs[1].evaluate("void streams[3].abort()")  # It is sent while all others wait for changes.
        await value_of(tabs[1], "streams[3].ended")
        gate.set()
        assert await value_of(tabs[0], "speaking") == [WHOLE] * 4
        assert await value_of(tabs[1], "speaking") == [WHOLE] * 3 + [f"{half}!"]
        await context.close()
