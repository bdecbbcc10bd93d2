"""Edge cases of the page: second tabs, double clicks, hidden tabs, odd addresses, an absent server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

import pytest
from playwright.async_api import Browser, Page, Route, WebSocketRoute, expect

from midstream.errors import ModelUnavailableError
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.testing.scripted_model import Gate, ScriptedStep, text
from tests.server.devtools import CHROMIUM
from tests.server.known_people import ADA, guarded_app
from tests.server.serving import make_app, served
from tests.server.test_page import HALF, WAIT_MS, WORDS, Chat, open_chat, two_halves
from tests.server.test_page_people import PAY, purse
from tests.server.test_page_tabs import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]

LOOK_HIDDEN = """() => {
  Object.defineProperty(document, "hidden", { get: () => true, configurable: true });
  Object.defineProperty(document, "visibilityState", { get: () => "hidden", configurable: true });
  window.requestAnimationFrame = () => 0; // a hidden tab gets none
  document.dispatchEvent(new Event("visibilitychange"));
}"""
NO_WAIT_ENDS = """(most) => {
  const set = setTimeout;
  window.setTimeout = (act, wait, ...more) => (wait > most ? 0 : set(act, wait, ...more));
}"""
"""Block timers above so many milliseconds before the next attempt: only the user ends such a wait."""


def numbered(request: ModelRequest) -> Sequence[ScriptedStep]:
    """Answer each message with its number."""
    messages = [entry for entry in request.history.entries if isinstance(entry, UserMessage)]
    return text(f"Answer {len(messages)}.")


async def another(browser: Browser, url: str, chat: Chat) -> Chat:
    """Open the session of a page in another browser."""
    return await open_chat(browser, f"{url}/#{chat.session}")


async def notice(page: Page) -> str:
    """Return the text of the page's notice, once there is one."""
    await expect(page.locator("#notice")).to_be_visible(timeout=WAIT_MS)
    return await page.locator("#notice").inner_text()


@pytest.mark.long
async def test_a_session_begun_by_another_tab_appears(browser: Browser) -> None:
    async with served(make_app(numbered)) as server:
        first = await open_chat(browser, server.url)
        second = await another(browser, server.url, first)
        await first.send_message("begin")
        await first.sees("Answer 1.")
        await second.sees("Answer 1.")
        await second.send_message("and then")
        for chat in (first, second):
            await chat.sees("Answer 2.")
            await expect(chat.page.locator(".turn .message")).to_have_text(["begin", "and then"])


@pytest.mark.long
async def test_a_message_from_an_outdated_tab_loads_the_earlier_turns(browser: Browser) -> None:
    async with served(make_app(numbered)) as server:
        first = await open_chat(browser, server.url)
        second = await another(browser, server.url, first)

        async def refuse(route: Route) -> None:
            await route.abort()

        await second.page.route(
            f"**/v1/sessions/{first.session}", refuse
        )  # It receives no event of the beginning.
        await first.send_message("begin")
        await first.sees_end("completed")
        await second.send_message("and then")
        await second.sees("Answer 2.")
        await expect(second.page.locator(".turn .message")).to_have_text(["begin", "and then"])


@pytest.mark.long
async def test_a_double_click_on_send_does_not_stop_the_turn(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        chat = await open_chat(browser, server.url)
        await chat.page.fill("#text", "go on")
        await chat.page.locator("#send").dblclick()
        await chat.sees("".join(WORDS[:HALF]))
        await expect(chat.page.locator("#text")).to_be_focused()
        gate.set()
        await chat.sees_end("completed")


@pytest.mark.long
async def test_a_click_on_send_leaves_the_focus_in_the_text_box(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        chat = await open_chat(browser, server.url)
        await chat.page.fill("#text", "go on")
        await chat.page.click("#send")
        await chat.sees_some(WORDS[0])
        await expect(chat.page.locator("#text")).to_be_focused()
        gate.set()


@pytest.mark.long
async def test_stop_ends_the_turn_and_returns_the_focus_to_the_text_box(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go on")
        await chat.sees_some(WORDS[0])
        await chat.page.click("#stop")
        await chat.sees_end("cancelled")
        await expect(chat.page.locator("#text")).to_be_focused()


@pytest.mark.long
async def test_the_title_of_a_hidden_tab_shows_a_waiting_question(browser: Browser) -> None:
    async with served(make_app([PAY, text("Done.")], tools=[purse([])])) as server:
        chat = await open_chat(browser, server.url)
        await chat.page.evaluate(LOOK_HIDDEN)
        await chat.send_message("pay")
        await expect(chat.page).to_have_title("Waiting for you: pay \u2013 midstream", timeout=WAIT_MS)


@pytest.mark.long
async def test_the_title_of_a_hidden_tab_shows_a_question_of_a_session_begun_elsewhere(
    browser: Browser,
) -> None:
    async with served(make_app([PAY, text("Done.")], tools=[purse([])])) as server:
        first = await open_chat(browser, server.url)
        hidden = await another(browser, server.url, first)
        await hidden.page.evaluate(LOOK_HIDDEN)
        await first.send_message("pay")
        await expect(hidden.page).to_have_title("Waiting for you: pay \u2013 midstream", timeout=WAIT_MS)


@pytest.mark.long
async def test_a_malformed_address_disables_nothing(browser: Browser) -> None:
    async with served(make_app([text("Hello.")])) as server:
        page = await (await browser.new_context()).new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(f"{server.url}/#%")
        assert "new one" in await notice(page)
        await page.click("#new")
        await page.fill("#text", "hi")
        await page.press("#text", "Enter")
        await expect(page.locator(".parts > .text")).to_have_text("Hello.", timeout=WAIT_MS)
        assert problems == []


@pytest.mark.long
async def test_an_invalid_session_name_is_reported_and_not_retried(browser: Browser) -> None:
    async with served(make_app([text("Hello.")])) as server:
        page = await (await browser.new_context()).new_page()
        await page.goto(f"{server.url}/#{'x' * 400}")
        assert "Choose another session" in await notice(page)
        await expect(page.locator("#light")).to_have_attribute("data-state", "idle")


@pytest.mark.long
async def test_an_unauthenticated_or_unauthorized_user_sees_a_notice(browser: Browser) -> None:
    async with served(guarded_app()) as server:
        page = await (await browser.new_context()).new_page()
        await page.goto(f"{server.url}/#some-session")
        assert "midstream login" in await notice(page)
        await expect(page.locator("#light")).to_have_attribute("data-state", "idle")
        await page.context.set_extra_http_headers(ADA)

        async def forbid(route: Route) -> None:
            problem = (
                '{"type": "urn:midstream:error:access", "code": "access", "detail": "no", "retry": "never"}'
            )
            await route.fulfill(status=403, body=problem, content_type="application/problem+json")

        await page.route("**/v1/sessions/other-session*", forbid)
        await page.goto(f"{server.url}/#other-session")
        await expect(page.locator("#notice")).to_contain_text(
            "You may not read this session", timeout=WAIT_MS
        )


@pytest.mark.long
async def test_a_second_message_before_the_first_was_sent_stays_in_the_box_with_a_notice(
    browser: Browser,
) -> None:
    async with served(make_app([text("heard")])) as server:
        chat = await open_chat(browser, server.url)
        await chat.page.evaluate("() => { WebSocket.prototype.send = () => {}; }")  # A black hole.
        await chat.send_message("first")
        await chat.send_message("second")
        assert "stays in the box" in await notice(chat.page)
        assert await chat.page.input_value("#text") == "second"


@pytest.mark.long
async def test_a_click_on_retry_reconnects_at_once(browser: Browser) -> None:
    gate, away = asyncio.Event(), asyncio.Event()
    sockets: list[WebSocketRoute] = []

    async def connect(socket: WebSocketRoute) -> None:
        sockets.append(socket)
        if away.is_set():
            await socket.close(code=1011)
        else:
            socket.connect_to_server()

    async with served(make_app(two_halves(gate))) as server:
        chat = Chat(await (await browser.new_context()).new_page(), [])
        await chat.page.route_web_socket("**/stream", connect)
        await chat.page.add_init_script("Math.random = () => 0;")  # No wait is short by random jitter.
        await chat.page.goto(server.url)
        await expect(chat.page.locator("#retry")).to_be_hidden()
        await chat.send_message("go on")
        await chat.sees_some(WORDS[0])
        await chat.page.evaluate(NO_WAIT_ENDS, 100)
        away.set()
        await sockets[-1].close(code=1011)
        await until(
            lambda: len(sockets) == 2
        )  # The first attempt is immediate, the second follows after a second.
        await expect(chat.page.locator("#retry")).to_be_visible(timeout=WAIT_MS)
        away.clear()
        await chat.page.click("#retry")
        await chat.sees_light("live")
        await expect(chat.page.locator("#retry")).to_be_hidden()
        gate.set()
        await chat.sees_end("completed")


@pytest.mark.long
async def test_a_click_on_retry_loads_a_page_that_was_opened_without_its_server(browser: Browser) -> None:
    async with served(make_app(numbered)) as server:
        first = await open_chat(browser, server.url)
        await first.send_message("begin")
        await first.sees_end("completed")
        away = asyncio.Event()
        away.set()
        tries: list[str] = []

        async def route(request: Route) -> None:
            tries.append(request.request.url)
            await (request.abort() if away.is_set() else request.continue_())

        page = await (await browser.new_context()).new_page()
        await page.route("**/v1/sessions/s-*", route)
        await page.add_init_script(f"({NO_WAIT_ENDS})(1000)")
        await page.goto(f"{server.url}/#{first.session}")
        await expect(page.locator("#light-text")).to_have_text(
            re.compile(r"^Reconnecting( in \d s)?$"), timeout=WAIT_MS
        )
        await until(lambda: len(tries) == 3)  # After them it waits for two seconds.
        away.clear()
        await page.click("#retry")
        await expect(page.locator(".parts > .text")).to_have_text("Answer 1.", timeout=WAIT_MS)


async def test_a_lost_session_is_not_shown_as_running(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go on")
        await chat.sees_some(WORDS[0])
        gone = (
            '{"type": "error", "code": "session_not_found", "message": "no such session", "retry": "never"}'
        )

        async def lose(socket: WebSocketRoute) -> None:
            socket.send(gone)

        await chat.page.route_web_socket("**/stream", lose)
        await chat.page.click("#cut")
        await expect(chat.page.locator("#notice")).to_contain_text(
            "no longer has this session", timeout=WAIT_MS
        )
        await chat.sees_end("lost")
        await expect(chat.turn.locator(".turn-status").last).to_have_text("Lost with its session")
        await expect(chat.page.locator("#stop")).to_be_hidden()
        gate.set()


def cut_after(words: Sequence[str], gate: asyncio.Event) -> Callable[[ModelRequest], Sequence[ScriptedStep]]:
    """Stream text, wait, fail; the next attempt streams another text."""
    attempts: list[int] = []

    def response(_: ModelRequest) -> Sequence[ScriptedStep]:
        attempts.append(1)
        if len(attempts) == 1:
            return [*(TextDelta(word) for word in words), Gate(gate), ModelUnavailableError("cut")]
        return [TextDelta("Short."), Finished()]

    return response


@pytest.mark.long
async def test_removing_the_text_of_a_failed_attempt_does_not_scroll_the_reader(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(cut_after([f"line {n}\n\n" for n in range(200)], gate))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go on")
        await chat.sees_some("line 199")
        await expect(chat.page.locator("#to-end")).to_be_hidden()
        place = await chat.page.evaluate("() => (document.getElementById('scroller').scrollTop = 900)")
        await expect(chat.page.locator("#to-end")).to_have_text("To the end", timeout=WAIT_MS)
        gate.set()
        await chat.sees_end("completed")
        await expect(chat.page.locator("#to-end")).to_have_text("New text below", timeout=WAIT_MS)
        assert await chat.page.evaluate("() => document.getElementById('scroller').scrollTop") == place
        await chat.page.click("#to-end")
        await expect(chat.page.locator("#to-end")).to_be_hidden(timeout=WAIT_MS)


@pytest.mark.long
async def test_a_draft_stays_with_its_session(browser: Browser) -> None:
    async with served(make_app(numbered)) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("begin")
        await chat.sees_end("completed")
        one = chat.session
        await chat.page.fill("#text", "a draft")
        await chat.page.click("#new")
        await expect(chat.page.locator("#text")).to_have_value("")
        await chat.page.click(f'#sessions a[href="#{one}"]')
        await expect(chat.page.locator("#text")).to_have_value("a draft")


@pytest.mark.long
async def test_the_focus_stays_in_the_list_when_that_is_refreshed(browser: Browser) -> None:
    async with served(make_app(numbered)) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("begin")
        await chat.sees_end("completed")
        link = chat.page.locator(f'#sessions a[href="#{chat.session}"]')
        await link.focus()
        async with chat.page.expect_response("**/v1/questions"):
            await chat.page.evaluate(
                "() => document.getElementById('search').dispatchEvent(new Event('input'))"
            )
        await expect(link).to_be_focused()


@pytest.mark.long
async def test_an_answer_given_without_a_server_is_marked_as_stored(browser: Browser) -> None:
    async with served(make_app([PAY, text("Done.")], tools=[purse([])])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("pay")
        card = chat.page.locator("form.question")
        await expect(card).to_be_visible(timeout=WAIT_MS)
        await chat.page.evaluate("() => { WebSocket.prototype.send = () => {}; }")  # A black hole.
        await card.locator('[data-choice="allow"]').click()
        await expect(card.locator(".kept")).to_have_text(
            "Your answer is kept here until the server has it.", timeout=WAIT_MS
        )
        await chat.page.reload()
        await chat.sees("Done.")
