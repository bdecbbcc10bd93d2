"""Several tabs of one session: one connection, and every word in each tab, whichever one closes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from midstream.environment import World
from midstream.history.messages import UserMessage
from midstream.models.responses import ModelRequest
from midstream.server.app import App
from midstream.server.pages import FOLDER
from midstream.session.turn.commands import SendMessage
from midstream.testing.scripted_model import ScriptedStep, text
from midstream.version import __version__
from tests.server.devtools import CHROMIUM
from tests.server.serving import make_app, served
from tests.server.test_page import WAIT_MS, WAIT_S, WORDS, Chat, open_chat, two_halves
from tests.spec import spec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]
HALF = "".join(WORDS[: len(WORDS) // 2])
WHOLE = "".join(WORDS)
LOOK_S = 0.02
WORLD = World()
LEADS = """(name) => new Promise((resolve) => {
  const channel = new BroadcastChannel(name);
  const ask = () => channel.postMessage({ ask: true });
  const asking = setInterval(ask, 20);
  channel.onmessage = ({ data: { at } }) => {
    if (!at) return;
    clearInterval(asking);
    channel.close();
    resolve(at);
  };
  ask();
})"""
"""Ask, as another tab does, for the leader and its position."""
STOPPED_IN_ITS_CHANGES = """async () => {
  const { IndexedStorage } = await import("/static/client/storage.js");
  const storage = await IndexedStorage.open();
  for (const key of ["one", "other"]) storage.apply([{ op: "delete", key }]);
  storage.load();
  storage.storeTransport("elsewhere", null);
  storage.loadTransport("elsewhere");
  storage.updateSecret("elsewhere", "s", (kept) => kept);
  debugger;
}"""
HOLD = """(stores) => new Promise((resolve) => {
  indexedDB.open("midstream").onsuccess = ({ target }) => {
    const store = target.result.transaction(stores, "readwrite").objectStore(stores[0]);
    globalThis.isHeld = true;
    const goOn = () => (store.count().onsuccess = () => isHeld && goOn());
    goOn();
    resolve();
  };
})"""
"""Lock the stores of the database."""
IMPATIENT = "{ const set = setTimeout; setTimeout = (act, wait, ...more) => set(act, wait / 5, ...more); }"
"""Shorten, for the tabs opened next, waits of five seconds to one."""


def turns(*responses: Sequence[ScriptedStep] | Callable[[ModelRequest], Sequence[ScriptedStep]]) -> App:
    """Make an app with a model that answers one turn after the other."""

    def response(request: ModelRequest) -> Sequence[ScriptedStep]:
        content = sum(isinstance(entry, UserMessage) for entry in request.history.entries)
        steps = responses[content - 1]
        return steps(request) if callable(steps) else steps

    return make_app(response)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await WORLD.sleep(LOOK_S)


async def send_elsewhere(app: App, session: str, words: str) -> None:
    """Send a message in the session as another client."""
    runner = await app.host.session(session, create=False)
    await runner.submit(SendMessage(UserMessage.of(words)))


async def tabs_of(chat: Chat, count: int) -> list[Chat]:
    """Open more tabs of the same session, and wait until each shows it."""
    tabs = [chat]
    for _ in range(count - 1):
        tab = Chat(await chat.page.context.new_page(), chat.problems)
        await tab.page.goto(chat.page.url)
        await tab.sees_light("live")
        tabs.append(tab)
    return tabs


async def see(tabs: list[Chat], words: str) -> None:
    await asyncio.gather(*(tab.sees(words) for tab in tabs))


@contextlib.asynccontextmanager
async def frozen(page: Page, at: str = "1") -> AsyncIterator[None]:
    """Suspend a tab, as a browser does with background tabs; its connections stay open.

    It stops at a statement: of its own, or where `frozen` directs it.
    """
    debugger = await page.context.new_cdp_session(page)
    await debugger.send("Debugger.enable")
    paused = asyncio.Event()
    debugger.once("Debugger.paused", lambda _: paused.set())
    if at == "1":
        await debugger.send("Debugger.pause")
    stopping = asyncio.create_task(page.evaluate(at))
    try:
        async with asyncio.timeout(WAIT_S):
            await paused.wait()
        yield
    finally:
        await debugger.send("Debugger.resume")
        await stopping


async def leads(chat: Chat) -> None:
    """Wait until the page's tabs have a leader that the server has welcomed."""
    url = chat.page.url.partition("/#")[0]
    await asyncio.wait_for(chat.page.evaluate(LEADS, f"midstream {url} {chat.session}"), WAIT_S)


async def test_tabs_share_a_connection_and_another_one_leads_after_the_first_is_closed(
    browser: Browser,
) -> None:
    gate = asyncio.Event()
    app = turns(text("Hello."), two_halves(gate), text("Still here."))
    async with served(app) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("hello")
        await chat.sees("Hello.")
        first, *others = await tabs_of(chat, 3)
        await until(lambda: app.open_streams == 1)
        await send_elsewhere(app, chat.session, "go on")
        await see([first, *others], HALF)
        assert app.open_streams == 1
        await first.page.close()
        gate.set()
        await see(others, WHOLE)
        await until(lambda: app.open_streams == 1)
        await send_elsewhere(app, chat.session, "and now?")
        await see(others, "Still here.")
        assert app.open_streams == 1
        assert [await tab.page.locator(".turn").count() for tab in others] == [3, 3]
        assert chat.problems == []


@pytest.mark.long
async def test_a_cut_of_the_leader_costs_no_tab_a_word(browser: Browser) -> None:
    gate = asyncio.Event()
    app = turns(text("Hello."), two_halves(gate))
    async with served(app) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("hello")
        await chat.sees("Hello.")
        tabs = await tabs_of(chat, 3)
        await until(lambda: app.open_streams == 1)
        await send_elsewhere(app, chat.session, "go on")
        await see(tabs, HALF)
        await chat.page.locator("#cut").evaluate("button => button.click()")
        gate.set()
        await see(tabs, WHOLE)
        await until(lambda: app.open_streams == 1)


@pytest.mark.long
async def test_a_frozen_leader_loses_the_lead_and_follows_after_it_wakes(browser: Browser) -> None:
    app = turns(text("Hello."), text("Without it."))
    async with served(app) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("hello")
        await chat.sees("Hello.")
        await leads(chat)
        async with frozen(chat.page):
            others = (await tabs_of(chat, 3))[1:]
            # The connection of the frozen one, which no tab reads, and that of the new leader.
            await until(lambda: app.open_streams == 2)
            await send_elsewhere(app, chat.session, "go on")
            await see(others, "Without it.")
        await chat.sees("Without it.")
        await until(lambda: app.open_streams == 1)
        assert chat.problems == []


@pytest.mark.long
@spec("STREAM-97")
async def test_a_tab_frozen_during_a_transaction_blocks_no_other(browser: Browser) -> None:
    """A transaction that waited for the frozen page would block all others from the database."""
    async with served(turns(text("Hello."), text("Without it."))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("hello")
        await chat.sees("Hello.")
        async with frozen(chat.page, STOPPED_IN_ITS_CHANGES):
            (other,) = (await tabs_of(chat, 2))[1:]
            await other.send_message("go on")
            await other.sees("Without it.")
            await other.sees_end("completed")
        await chat.sees("Without it.")
        assert chat.problems == []
        await chat.page.context.close()


@pytest.mark.long
@spec("STREAM-97")
async def test_a_session_is_shown_without_the_lock_of_a_hanging_tab_after_a_wait(
    browser: Browser,
) -> None:
    app = turns(text("Hello."), text("Meanwhile."), text("After all."))
    async with served(app) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("hello")
        await chat.sees_end("completed")
        await leads(chat)
        await chat.page.context.add_init_script(IMPATIENT)
        await chat.page.evaluate(HOLD, ["streams", "secrets", "commands"])
        (other,) = (await tabs_of(chat, 2))[1:]
        await send_elsewhere(app, chat.session, "go on")
        await other.sees("Meanwhile.")
        await other.send_message("and now?")
        await expect(other.page.locator(".turn.pending .message")).to_have_text("and now?")
        await chat.page.evaluate("isHeld = false")
        await see([chat, other], "After all.")
        await expect(other.page.locator(".turn")).to_have_count(3)
        assert chat.problems == []
        await chat.page.context.close()


@pytest.mark.long
async def test_a_message_sent_in_one_tab_appears_in_all(browser: Browser) -> None:
    gate = asyncio.Event()
    app = turns(text("Hello."), two_halves(gate))
    async with served(app) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("hello")
        await chat.sees("Hello.")
        tabs = await tabs_of(chat, 2)
        await until(lambda: app.open_streams == 1)
        await tabs[0].send_message("go on")
        await see(tabs, HALF)
        gate.set()
        await see(tabs, WHOLE)
        for tab in tabs:
            await expect(tab.turn).to_have_attribute("data-status", "completed", timeout=WAIT_MS)
        await until(lambda: app.open_streams == 1)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_folder_of_the_client_is_a_package() -> None:
    folder = FOLDER / "client"
    package = json.loads((folder / "package.json").read_text())
    assert package["version"] == __version__
    named = [package["main"], package["types"], *package["exports"]["."].values()]
    assert all((folder / Path(name)).is_file() for name in named)
