"""A bug in the server and a full disk on the page, in a real browser."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from playwright.async_api import Browser, expect

from midstream.errors import StoreFullError
from midstream.models.responses import ModelRequest
from midstream.store.contract import StoredRecord
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedStep, text
from midstream.testing.store_fakes import FailingStore
from tests.server.devtools import CHROMIUM
from tests.server.serving import make_app, served
from tests.server.test_page import WAIT_MS, open_chat

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]


class BrokenStore(MemoryStore):
    """A store with a bug: no journal can be read."""

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        raise RuntimeError("a bug of the store")


async def test_a_server_bug_is_shown_once_and_stops_the_reconnects(
    browser: Browser,
) -> None:
    async with served(make_app(store=BrokenStore())) as server:
        chat = await open_chat(browser, server.url)
        sockets: list[str] = []
        chat.page.on("websocket", lambda socket: sockets.append(socket.url))
        await chat.send_message("are you there?")
        await expect(chat.page.locator("#notice")).to_contain_text("(internal)", timeout=WAIT_MS)
        await chat.sees_light("idle")
        assert len(sockets) == 1
        await expect(chat.page.locator("#text")).to_have_value("are you there?")
        await expect(chat.page.locator(".turn")).to_have_count(0)


@pytest.mark.long
async def test_an_exception_in_a_turn_is_shown_as_its_end_without_promise_of_a_retry(
    browser: Browser,
) -> None:
    def response(_: ModelRequest) -> Sequence[ScriptedStep]:
        raise RuntimeError("a bug of the model")

    async with served(make_app(response)) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("are you there?")
        await chat.sees_end("failed")
        await expect(chat.turn.locator(".turn-status")).to_contain_text("a bug of the model")
        await expect(chat.turn.locator(".again")).to_have_text("The model did not answer (model).")
        await chat.sees_light("live")


@pytest.mark.long
async def test_a_full_disk_is_shown_until_there_is_space(browser: Browser) -> None:
    store = FailingStore(MemoryStore())
    async with served(make_app([text("with space again")], store=store)) as server:
        chat = await open_chat(browser, server.url)
        store.outage = StoreFullError("no space left: free some and try again")
        await chat.send_message("are you there?")
        await expect(chat.page.locator("#notice")).to_contain_text("free some", timeout=WAIT_MS)
        await expect(chat.page.locator("#notice")).to_contain_text("(store_full)")
        store.outage = None
        await chat.sees("with space again")
        await expect(chat.page.locator("#notice")).to_be_hidden()
