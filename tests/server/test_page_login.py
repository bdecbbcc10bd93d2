"""The page of a server with a local user: logged in by a link, once, without a credential left in the address."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Dialog, expect

from midstream.engine.agent import Agent
from midstream.environment import World
from midstream.server.app import App, asgi
from midstream.server.auth.access import Access, this_user
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel, text
from tests.server.devtools import CHROMIUM
from tests.server.known_people import ADA, BOB, guarded_app
from tests.server.serving import served
from tests.server.test_page import WAIT_MS, open_chat
from tests.spec import spec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]


def local_app(login: str) -> App:
    access = Access(authenticate=this_user("key"), login=login)
    return asgi(Agent(ScriptedModel(lambda _: text("Hello."))), store=MemoryStore(), access=access)


async def test_a_link_logs_in_one_browser_and_disappears_from_its_address(browser: Browser) -> None:
    login = World().new_id("login")
    async with served(local_app(login)) as server:
        chat = await open_chat(browser, f"{server.url}/#login={login}&open=my-session")
        assert chat.session == "my-session"
        await chat.send_message("hi")
        await chat.sees("Hello.")
        [kept] = await chat.page.context.cookies()
        assert (kept["httpOnly"], kept["sameSite"]) == (True, "Strict")
        assert login not in await chat.page.content()
        await chat.page.reload()
        await chat.sees("Hello.")

        other = await open_chat(browser, f"{server.url}/#login={login}")
        await expect(other.page.get_by_text("This browser is not logged in")).to_be_visible(timeout=WAIT_MS)
        assert await other.page.context.cookies() == []


@pytest.mark.long
@spec("SEC-18")
@pytest.mark.parametrize("agrees", [False, True])
async def test_a_link_for_another_principal_needs_a_confirmation(browser: Browser, *, agrees: bool) -> None:
    questions: list[str] = []

    async def answer(dialog: Dialog) -> None:
        questions.append(dialog.message)
        await (dialog.accept() if agrees else dialog.dismiss())

    async with served(guarded_app()) as server:
        links = [
            (await server.http.post("/v1/login-links", headers=who)).json()["token"] for who in (ADA, BOB)
        ]
        page = await (await browser.new_context()).new_page()
        page.on("dialog", answer)
        names = []
        for link in links:
            await page.goto("about:blank")
            async with page.expect_response(lambda each: "/v1/sessions?" in each.url, timeout=WAIT_MS):
                await page.goto(f"{server.url}/#login={link}")
            names.append(await page.evaluate("fetch('/v1/me').then((answer) => answer.json())"))
        assert [name["id"] for name in names] == ["ada", "bob" if agrees else "ada"]
        [question] = questions
        assert "'ada'" in question
        assert "'bob'" in question
        await page.close()


CHAT_PROGRAM = """async ([url, token, transport]) => {
  const { connect } = await import(`${url}/static/client/midstream.js`);
  const client = await connect({ url, transport, headers: () => ({ authorization: token }) });
  const words = [];
  for await (const { record } of client.send("s1", "hi")) if (record.type === "delta") words.push(record.text);
  return words.join("");
}"""


@contextlib.asynccontextmanager
async def blank_site() -> AsyncIterator[str]:
    """Serve another site of this machine, with empty pages."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            body = b"<!doctype html>"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n" + body)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.long
@pytest.mark.parametrize("transport", ["websocket", "sse", "poll"])
async def test_a_page_of_an_allowed_site_sends_its_token(browser: Browser, transport: str) -> None:
    """A WebSocket uses a ticket, plain HTTP the header itself."""
    async with blank_site() as site, served(guarded_app(allowed_origins=[site])) as server:
        page = await (await browser.new_context()).new_page()
        await page.goto(f"{site}/")
        assert await page.evaluate(CHAT_PROGRAM, [server.url, ADA["authorization"], transport]) == "Hello."
        sent = await server.http.get("/v1/sessions", headers=ADA)
        assert [line["id"] for line in sent.json()["sessions"]] == ["s1"]
        await page.close()
