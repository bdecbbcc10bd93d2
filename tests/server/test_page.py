"""The chat page in a real browser, against a real server: failures are repaired in view of the reader."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from msgspec import Struct
from playwright.async_api import (
    Browser,
    BrowserContext,
    Locator,
    Page,
    Route,
    WebSocketRoute,
    expect,
)

from midstream.engine.agent import Agent
from midstream.environment import World
from midstream.errors import ModelUnavailableError
from midstream.history.messages import UserMessage
from midstream.models.responses import (
    Finished,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
)
from midstream.server.app import App, asgi
from midstream.session.session import QUEUE_MAX
from midstream.session.turn.commands import SendMessage, WhenBusy
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import (
    Gate,
    Pause,
    ScriptedModel,
    ScriptedStep,
    calls,
    steps_since_user,
    text,
)
from midstream.tools.function_tools import tool
from tests.server.devtools import CHROMIUM
from tests.server.serving import Json, Served, make_app, served, words_of
from tests.spec import spec

WAIT_S = 60.0
WAIT_MS = 1000 * WAIT_S
WORDS = [f"word{number} " for number in range(60)]
WHOLE = "".join(WORDS)
HALF = len(WORDS) // 2
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
KEPT = """() => new Promise((resolve) => {
  const request = indexedDB.open("midstream");
  request.onsuccess = () => {
    const streams = request.result.transaction("streams").objectStore("streams").count();
    streams.onsuccess = () => resolve(streams.result);
  };
})"""
"""Number of streams that a page's database keeps for a later page."""
NOT_YET_KEPT = "Being kept here"
"""The page's note beside a message that a reload would lose."""
BIDI = "safe\u202egnp.exe\u2066 end"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),  # One browser for all; each test has its own profile in it.
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]


class Chat(Struct):
    """The page as its reader sees it."""

    page: Page
    problems: list[str]

    @property
    def words(self) -> Locator:
        return self.page.locator(".turn").last.locator(".parts > .text")

    @property
    def turn(self) -> Locator:
        return self.page.locator(".turn").last

    async def send_message(self, words: str) -> None:
        await self.page.fill("#text", words)
        await self.page.press("#text", "Enter")

    async def sees(self, words: str) -> None:
        """Wait until the last response is exactly this."""
        await expect(self.words.last).to_have_text(words, timeout=WAIT_MS, use_inner_text=False)

    async def sees_some(self, words: str) -> None:
        await expect(self.words.last).to_contain_text(words, timeout=WAIT_MS)

    async def sees_end(self, status: str) -> None:
        await expect(self.turn).to_have_attribute("data-status", status, timeout=WAIT_MS)

    async def sees_light(self, state: str) -> None:
        await expect(self.page.locator("#light")).to_have_attribute("data-state", state, timeout=WAIT_MS)

    async def sees_kept(self, words: str) -> None:
        """Wait until a message that has not reached the server is stored: a reload before that loses it."""
        pending = self.page.locator(".turn.pending")
        await expect(pending.locator(".message")).to_have_text(words, timeout=WAIT_MS)
        await expect(pending.locator(".foot")).to_have_text(
            "Kept here until the server has it", timeout=WAIT_MS
        )

    @property
    def session(self) -> str:
        return self.page.url.partition("#")[2]


async def open_chat(browser: Browser, url: str) -> Chat:
    context = await browser.new_context()
    page = await context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if "Security Policy" in line.text else None)
    await page.goto(url)
    await expect(page.locator("#empty")).to_be_visible(timeout=WAIT_MS)
    return Chat(page, problems)


async def records_of(server: Served, session: str) -> list[Json]:
    answer = await server.http.get(f"/v1/sessions/{session}/records")
    return [json.loads(line) for line in answer.text.splitlines()]


async def types_of(server: Served, session: str) -> list[str]:
    """Return the kinds of records in a session; none where the session does not exist yet."""
    records = await records_of(server, session)
    return [event["record"]["type"] for event in records if "record" in event]


def two_halves(gate: asyncio.Event) -> Callable[[ModelRequest], Sequence[ScriptedStep]]:
    """Stream the first half, wait for the gate, stream the rest. Every attempt does the same."""

    def response(_: ModelRequest) -> Sequence[ScriptedStep]:
        first = [TextDelta(word) for word in WORDS[:HALF]]
        rest = [TextDelta(word) for word in WORDS[HALF:]]
        return [*first, Gate(gate), *rest, Finished()]

    return response


def without_frames(*kept_back: str) -> Callable[[WebSocketRoute], None]:
    """Withhold frames with such text from a page's first socket: it receives no change."""
    routes: list[WebSocketRoute] = []

    def route(socket: WebSocketRoute) -> None:
        is_first = not routes
        routes.append(socket)
        server = socket.connect_to_server()

        def pass_on(frame: str | bytes) -> None:
            if not (is_first and any(word in str(frame) for word in kept_back)):
                socket.send(frame)

        server.on_message(pass_on)

    return route


def dying_after(
    messages: Callable[[], int], sockets: list[WebSocketRoute]
) -> Callable[[WebSocketRoute], None]:
    """Close every socket of a page after so many messages of the server."""

    def route(socket: WebSocketRoute) -> None:
        sockets.append(socket)
        left = [messages()]
        server = socket.connect_to_server()

        async def pass_on(frame: str | bytes) -> None:
            left[0] -= 1
            if left[0] >= 0:
                socket.send(frame)
            elif left[0] == -1:
                await socket.close(code=1011)
                await server.close()

        server.on_message(pass_on)

    return route


def lives_of_lines(random: Random) -> Callable[[], int]:
    """Draw the number of messages of each connection; never two empty ones in a row: a page would wait long."""
    before = 12

    def draw() -> int:
        nonlocal before
        before = random.randint(0 if before >= 2 else 2, 12)
        return before

    return draw


async def no_line_until(context: BrowserContext, is_up: asyncio.Event, *, but: int = 0) -> None:
    """Block all transports of a page until the event; its first socket after `but` messages."""

    routes: list[WebSocketRoute] = []

    async def connect(socket: WebSocketRoute) -> None:
        routes.append(socket)
        if is_up.is_set():
            socket.connect_to_server()
        elif len(routes) == 1 and but:
            dying_after(lambda: but, [])(socket)
        else:
            await socket.close(code=1011)

    async def ask(request: Route) -> None:
        await (request.continue_() if is_up.is_set() else request.abort())

    await context.route_web_socket("**/stream", connect)
    await context.route("**/v1/sessions/*/events", ask)
    await context.route("**/v1/sessions/*/poll*", ask)


def held_until(gate: asyncio.Event) -> Callable[[Route], Awaitable[None]]:
    """Hold requests until the event."""

    async def route(request: Route) -> None:
        await gate.wait()
        await request.continue_()

    return route


async def test_text_appears_as_it_streams_and_equals_the_journal(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go on")
        await chat.sees("".join(WORDS[:HALF]))
        await chat.sees_end("running")
        gate.set()
        await chat.sees(WHOLE)
        await chat.sees_end("completed")
        assert words_of(await records_of(server, chat.session)) == WHOLE
        await expect(chat.turn.locator(".message")).to_have_text("go on")
        await expect(chat.page.locator("#sessions a[aria-current] .name")).to_have_text(
            "go on", timeout=WAIT_MS
        )
        assert chat.problems == []


async def test_a_page_reconnects_after_a_cut_with_every_word_once(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go on")
        await chat.sees("".join(WORDS[:HALF]))
        await chat.page.click("#cut")
        await chat.sees_light("reconnecting")
        await expect(chat.page.locator("#light-text")).to_have_text(re.compile(r"Reconnecting in \d s"))
        gate.set()  # The model continues without a connected reader.
        await chat.sees_light("live")
        await chat.sees(WHOLE)
        await chat.sees_end("completed")
        await expect(chat.turn.locator(".turn-status")).to_contain_text("1 cut survived")
        assert await chat.page.locator(".turn").count() == 1


async def test_an_answer_continues_after_a_reload(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(two_halves(gate))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go on")
        await chat.sees("".join(WORDS[:HALF]))
        await chat.page.reload()
        await chat.sees("".join(WORDS[:HALF]))
        await chat.sees_light("live")
        gate.set()
        await chat.sees(WHOLE)
        await chat.sees_end("completed")
        kinds = [event["record"]["type"] for event in await records_of(server, chat.session)]
        assert kinds.count("message_accepted") == 1


@pytest.mark.long
async def test_a_message_written_without_a_server_is_sent_after_a_reload(browser: Browser) -> None:
    """The message is in the browser's database before it is sent, so a page that dies loses nothing."""
    async with served(make_app([text("heard")])) as server:
        chat = await open_chat(browser, server.url)
        await chat.page.evaluate("() => { WebSocket.prototype.send = () => {}; }")  # A black hole.
        await chat.send_message("are you there?")
        await chat.sees_kept("are you there?")
        await chat.page.reload()
        await chat.sees("heard")
        await chat.sees_end("completed")
        await expect(chat.page.locator(".turn")).to_have_count(1)


async def test_tool_calls_are_rows_that_change_from_running_to_their_outcome(browser: Browser) -> None:
    gate = asyncio.Event()

    @tool(has_effects=False)
    async def look_up(word: str) -> str:
        """Look a word up."""
        await gate.wait()
        return f"{word}: found"

    @tool(has_effects=False)
    async def fail() -> str:
        """Never works."""
        raise ValueError("no such luck")

    script = [
        [
            ThinkingDelta("hm, tools"),
            *calls(("look_up", '{"word": "midstream"}'), ("fail", "{}"), text="Looking."),
        ],
        text("That was it."),
    ]
    async with served(make_app(script, tools=[look_up, fail])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("look it up")
        first, second = chat.page.locator(".call").nth(0), chat.page.locator(".call").nth(1)
        await expect(first).to_have_attribute("data-state", "running", timeout=WAIT_MS)
        await expect(second).to_have_attribute("data-state", "error", timeout=WAIT_MS)
        gate.set()
        await expect(first).to_have_attribute("data-state", "ok", timeout=WAIT_MS)
        await chat.sees("That was it.")
        await expect(first.locator("pre").nth(1)).to_be_hidden()
        await first.locator("summary").click()
        await expect(first.locator("pre").nth(1)).to_have_text("midstream: found")
        await expect(chat.page.locator(".thinking .text")).to_be_hidden()
        await chat.page.click(".thinking summary")
        await expect(chat.page.locator(".thinking .text")).to_have_text("hm, tools")


@pytest.mark.long
@spec("REUSE-54")
async def test_a_tool_that_the_upstream_runs_is_shown_within_the_text(browser: Browser) -> None:
    gate = asyncio.Event()
    start, end = UpstreamCallStarted("u", "grep", '{"for": "x"}'), UpstreamCallEnded("u", "line 1")
    script: list[list[ScriptedStep]] = [
        [TextDelta("I look. "), start, Gate(gate), end, TextDelta("Found."), Finished()]
    ]
    async with served(make_app(script)) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("look it up")
        ran = chat.page.locator(".parts > .elsewhere")
        await expect(ran).to_have_attribute("data-state", "running", timeout=WAIT_MS)
        late = await chat.page.context.new_page()
        await late.goto(chat.page.url)
        await expect(late.locator(".parts > .elsewhere")).to_have_attribute(
            "data-state", "running", timeout=WAIT_MS
        )
        gate.set()
        await expect(ran).to_have_attribute("data-state", "ok", timeout=WAIT_MS)
        await expect(late.locator(".parts > .elsewhere")).to_have_attribute(
            "data-state", "ok", timeout=WAIT_MS
        )
        await expect(ran.locator(".state")).to_have_text(re.compile("elsewhere"))
        await ran.locator("summary").click()
        await expect(ran.locator("pre").nth(1)).to_have_text("line 1")
        await expect(chat.page.locator(".parts > *").last).to_have_text("Found.")
        assert await chat.page.locator(".calls > .call").count() == 0


@pytest.mark.long
@pytest.mark.parametrize("way", ["button", "escape"])
async def test_stop_ends_the_turn_and_keeps_its_text(browser: Browser, way: str) -> None:
    async with served(make_app(two_halves(asyncio.Event()))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go on")
        await chat.sees("".join(WORDS[:HALF]))
        if way == "button":
            await chat.page.click("#stop")
        else:
            await chat.page.keyboard.press("Escape")
        await chat.sees_end("cancelled")
        await chat.sees("".join(WORDS[:HALF]))
        await expect(chat.page.locator("#send")).to_be_visible()
        kinds = [event["record"]["type"] for event in await records_of(server, chat.session)]
        assert kinds.count("cancel_requested") == 1


@pytest.mark.long
@pytest.mark.parametrize("place", ["same browser", "other browser"])
async def test_a_second_page_sees_the_turn_and_can_stop_it(browser: Browser, place: str) -> None:
    async with served(make_app(two_halves(asyncio.Event()))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go on")
        await chat.sees("".join(WORDS[:HALF]))
        context = chat.page.context if place == "same browser" else await browser.new_context()
        other = Chat(await context.new_page(), [])
        await other.page.goto(chat.page.url)
        await other.sees("".join(WORDS[:HALF]))
        await other.sees_light("live")
        await other.page.keyboard.press("Escape")
        await other.sees_end("cancelled")
        await chat.sees_end("cancelled")


@pytest.mark.long
async def test_a_failed_attempt_is_announced_and_its_text_removed(browser: Browser) -> None:
    def response(request: ModelRequest) -> Sequence[ScriptedStep]:
        if request.attempt == 1:
            return [TextDelta("half of a sen"), ModelUnavailableError("cut off")]
        return text("The whole sentence.")

    async with served(make_app(response)) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("speak")
        await chat.sees("The whole sentence.")
        await chat.sees_end("completed")
        await expect(chat.turn.locator(".again")).to_contain_text("this is attempt 2")
        await expect(chat.turn).not_to_contain_text("half of a sen")


async def test_a_turn_continues_after_a_restart_of_the_server(
    browser: Browser, tmp_path: Path, port: int
) -> None:
    gate = asyncio.Event()

    def make() -> App:
        return asgi(Agent(ScriptedModel(two_halves(gate))), store=SQLiteStore(tmp_path / "journal.db"))

    async with served(make(), port=port) as first:
        chat = await open_chat(browser, first.url)
        await chat.send_message("go on")
        await chat.sees("".join(WORDS[:HALF]))
    await chat.sees_light("reconnecting")
    async with served(make(), port=port):
        gate.set()
        await chat.sees_light("live")
        await chat.sees(WHOLE)
        await chat.sees_end("completed")
        await expect(chat.turn.locator(".again")).to_contain_text("this is attempt 2")
        await expect(chat.turn.locator(".turn-status")).to_contain_text("1 server restart survived")


@pytest.mark.long
async def test_after_an_older_copy_was_restored_the_page_shows_the_state_of_the_server(
    browser: Browser, tmp_path: Path, port: int
) -> None:
    def make(folder: str) -> App:
        script = ScriptedModel([text("hello")])
        return asgi(Agent(script), store=SQLiteStore(tmp_path / folder / "journal.db"))

    (tmp_path / "now").mkdir()
    async with served(make("now"), port=port) as first:
        chat = await open_chat(browser, first.url)
        await chat.send_message("one")
        await chat.sees_end("completed")
    shutil.copytree(tmp_path / "now", tmp_path / "older")
    async with served(make("now"), port=port):
        await chat.sees_light("live")
        await chat.send_message("two")
        await expect(chat.page.locator(".turn")).to_have_count(2)
        await chat.sees_end("completed")
    async with served(make("older"), port=port):
        await expect(chat.page.locator(".turn")).to_have_count(1, timeout=WAIT_MS)
        await chat.sees_light("live")
        await chat.send_message("three")
        await expect(chat.turn.locator(".message")).to_have_text("three")
        await chat.sees_end("completed")


@pytest.mark.long
async def test_a_session_that_the_server_lost_is_reported_and_its_transcript_stays(
    browser: Browser, port: int
) -> None:
    async with served(make_app([text("hello")]), port=port) as first:
        chat = await open_chat(browser, first.url)
        await chat.send_message("one")
        await chat.sees_end("completed")
    async with served(make_app(), port=port):
        await expect(chat.page.locator("#notice")).to_contain_text("no longer has this", timeout=WAIT_MS)
        await chat.sees("hello")
        await chat.sees_light("idle")
        await expect(chat.page.locator("#text")).to_be_disabled()
        await chat.page.click("#new")
        await expect(chat.page.locator("#text")).to_be_enabled()


@pytest.mark.long
async def test_connections_that_die_after_a_few_messages_lose_and_repeat_nothing(browser: Browser) -> None:
    sockets: list[WebSocketRoute] = []
    context = await browser.new_context()
    await context.route_web_socket("**/stream", dying_after(lambda: 2, sockets))
    chat = Chat(await context.new_page(), [])
    slowly = [step for word in WORDS for step in (TextDelta(word), Pause(0.03))]
    async with served(make_app([[*slowly, Finished()]])) as server:
        await chat.page.goto(server.url)
        await chat.send_message("go on")
        await chat.sees(WHOLE)
        await chat.sees_end("completed")
        assert words_of(await records_of(server, chat.session)) == WHOLE
        assert len(sockets) >= 3  # The first can carry no more than the welcome and the ack.


@pytest.mark.long
async def test_a_message_with_a_lost_ack_is_shown_once_after_a_reload(browser: Browser) -> None:
    gate, is_asked = asyncio.Event(), asyncio.Event()

    def response(request: ModelRequest) -> Sequence[ScriptedStep]:
        is_asked.set()
        return two_halves(gate)(request)

    context = await browser.new_context()
    await context.route_web_socket("**/stream", without_frames('"ack"', '"events":'))
    chat = Chat(await context.new_page(), [])
    async with served(make_app(response)) as server:
        await chat.page.goto(server.url)
        await chat.send_message("go on")
        await asyncio.wait_for(is_asked.wait(), WAIT_S)
        await expect(chat.page.locator(".turn.pending")).to_have_count(1)
        await chat.page.reload()
        await chat.sees("".join(WORDS[:HALF]))
        await expect(chat.page.locator(".turn.pending")).to_have_count(0)
        gate.set()
        await chat.sees(WHOLE)
        await chat.sees_end("completed")
        await expect(chat.page.locator(".turn")).to_have_count(1)


@pytest.mark.long
async def test_input_is_disabled_until_the_page_is_ready(browser: Browser) -> None:
    """A key pressed while the page's scripts are loading would have no handler."""
    gate = asyncio.Event()
    context = await browser.new_context()
    await context.route("**/static/client/storage.js", held_until(gate))
    chat = Chat(await context.new_page(), [])
    async with served(make_app([text("heard")])) as server:
        await chat.page.goto(server.url, wait_until="commit")
        await expect(chat.page.locator("#text")).to_be_disabled()
        await expect(chat.page.locator("#send")).to_be_disabled()
        sending = asyncio.create_task(chat.send_message("are you there?"))
        gate.set()
        await sending
        await chat.sees("heard")


@pytest.mark.long
async def test_an_unsent_message_is_shown_after_a_reload_without_socket_and_server(
    browser: Browser,
) -> None:
    is_up, gate = asyncio.Event(), asyncio.Event()
    context = await browser.new_context()
    await no_line_until(context, is_up)
    await context.route("**/v1/sessions/*", held_until(gate))
    chat = Chat(await context.new_page(), [])
    pending = chat.page.locator(".turn.pending .message")
    async with served(make_app([text("heard")])) as server:
        await chat.page.goto(server.url)
        await chat.send_message("are you there?")
        await chat.sees_kept("are you there?")
        await chat.page.reload()
        await chat.sees_kept("are you there?")
        gate.set()
        await chat.sees_light("reconnecting")
        assert await pending.count() == 1
        is_up.set()
        await chat.sees("heard")
        await expect(chat.page.locator(".turn")).to_have_count(1)


@pytest.mark.long
async def test_a_message_stays_visible_when_the_connection_dies_between_its_ack_and_its_events(
    browser: Browser,
) -> None:
    is_up = asyncio.Event()
    context = await browser.new_context()
    chat = Chat(await context.new_page(), [])
    async with served(make_app([text("heard")])) as server:
        await chat.page.goto(server.url)
        await chat.page.evaluate("() => { WebSocket.prototype.send = () => {}; }")  # A black hole.
        await chat.send_message("are you there?")
        await chat.sees_kept("are you there?")
        await no_line_until(context, is_up, but=2)
        await chat.page.reload()
        async with asyncio.timeout(WAIT_S):  # The light is amber before the first message, too.
            while "message_accepted" not in await types_of(server, chat.session):
                await World().sleep(0.02)
        await chat.sees_light("reconnecting")
        assert await chat.page.locator(".turn").count() == 1
        is_up.set()
        await chat.sees("heard")
        await expect(chat.page.locator(".turn")).to_have_count(1)


@pytest.mark.long
async def test_a_message_sent_while_the_session_is_loading_stays_visible(browser: Browser) -> None:
    is_up, gate = asyncio.Event(), asyncio.Event()
    context = await browser.new_context()
    chat = Chat(await context.new_page(), [])
    async with served(make_app([text("heard")])) as server:
        await chat.page.goto(server.url)
        await chat.send_message("one")
        await chat.sees("heard")
        await chat.sees_end("completed")
        await no_line_until(context, is_up)
        await context.route("**/v1/sessions/*", held_until(gate))
        await chat.page.reload()
        await chat.send_message("two")
        await expect(chat.page.locator(".turn.pending .message")).to_have_text("two")
        gate.set()
        await expect(chat.page.locator(".turn .message")).to_have_text(["one", "two"])
        is_up.set()
        await chat.sees_end("completed")
        await chat.sees("heard")
        await expect(chat.page.locator(".turn .message")).to_have_text(["one", "two"])


async def naming_failure(which: str, trial: Awaitable[None]) -> None:
    """Wait for one of several concurrent trials; its failure names it."""
    try:
        await trial
    except Exception as error:
        error.add_note(which)
        raise


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_each_turn_is_complete_and_each_tool_runs_once_under_random_failures(browser: Browser) -> None:
    """Run the readers concurrently, since each of them mostly waits."""
    async with asyncio.TaskGroup() as readers:
        for seed in (1, 2):
            readers.create_task(naming_failure(f"seed {seed}", _six_turns(browser, Random(seed))))


async def _six_turns(browser: Browser, random: Random) -> None:
    """Run six turns over sockets that die at random, with reloads and cuts at random words."""
    runs: list[int] = []

    @tool(has_effects=True)
    async def note(turn: int) -> str:
        """Note that it ran."""
        runs.append(turn)
        return "noted"

    def words_of_turn(turn: int) -> list[str]:
        return [f"t{turn}w{number} " for number in range(50)]

    def response(request: ModelRequest) -> Sequence[ScriptedStep]:
        turn = sum(isinstance(entry, UserMessage) for entry in request.history.entries)
        if steps_since_user(request.history) == 0:
            return calls(("note", f'{{"turn": {turn}}}'), text="First a note.")
        return [step for word in words_of_turn(turn) for step in (TextDelta(word), Pause(0.01))] + [
            Finished()
        ]

    context = await browser.new_context()
    await context.route_web_socket("**/stream", dying_after(lives_of_lines(random), []))
    chat = Chat(await context.new_page(), [])
    async with served(make_app(response, tools=[note])) as server:
        await chat.page.goto(server.url)
        for turn in range(1, 7):
            await chat.send_message(f"turn {turn}")
            for _ in range(random.randint(0, 2)):
                await chat.sees_some(f"t{turn}w{random.randrange(40)} ")
                if random.random() < 0.5:
                    await chat.page.reload()
                else:
                    await chat.page.locator("#cut").dispatch_event("click")
            await expect(chat.page.locator(".turn")).to_have_count(turn, timeout=WAIT_MS)
            await chat.sees_end("completed")
            await chat.sees("".join(words_of_turn(turn)))
            await expect(chat.turn.locator(".call[data-state=ok]")).to_have_count(1)
        assert runs == [1, 2, 3, 4, 5, 6]
        kinds = [event["record"]["type"] for event in await records_of(server, chat.session)]
        assert kinds.count("message_accepted") == 6
        # The transcript shows the end at once; the stream is removed when its own connection has delivered
        # it.
        async with asyncio.timeout(WAIT_MS / 1000):
            while await chat.page.evaluate(KEPT):
                pass


@pytest.mark.long
async def test_a_long_session_is_loaded_from_its_snapshot_in_the_middle_of_a_turn(browser: Browser) -> None:
    """Beyond 5000 records the page takes the snapshot; no word is missing between it and the events."""
    gate = asyncio.Event()
    long = [f"{number} " for number in range(5200)]

    def response(request: ModelRequest) -> Sequence[ScriptedStep]:
        if steps_since_user(request.history) == 0:
            return calls(("look_up", '{"word": "x"}'), text="Looking.")
        return [*(TextDelta(word) for word in long), Gate(gate), TextDelta("and the end"), Finished()]

    @tool(has_effects=False)
    async def look_up(word: str) -> str:
        """Look a word up."""
        return word

    async with served(make_app(response, tools=[look_up])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go on")
        await chat.sees_some("5199")
        await chat.page.reload()
        await chat.sees_some("5199")
        await expect(chat.page.locator(".call")).to_have_attribute("data-state", "ok")
        await chat.sees_end("running")
        gate.set()
        await chat.sees("".join(long) + "and the end")
        await chat.sees_end("completed")
        await expect(chat.turn.locator(".message")).to_have_text("go on")


async def test_hostile_text_is_shown_and_never_executed(browser: Browser) -> None:
    @tool(has_effects=False)
    async def echo(word: str) -> str:
        """Echo."""
        return word

    arguments = json.dumps({"word": HOSTILE + BIDI}, ensure_ascii=False)
    script = [
        [ThinkingDelta(HOSTILE), *calls(("echo", arguments), text=HOSTILE)],
        text(f"{HOSTILE} {BIDI}", tokens=3),
    ]
    async with served(make_app(script, tools=[echo])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message(HOSTILE)
        await chat.sees_end("completed")
        await chat.sees(f"{HOSTILE} {BIDI}")
        await expect(chat.turn.locator(".message")).to_have_text(HOSTILE)
        await expect(chat.turn.locator(".call pre").nth(1)).to_contain_text(HOSTILE)
        # In the arguments and results that a reader judges, characters that reverse the text are named, not
        # applied.
        await expect(chat.turn.locator(".call .preview")).not_to_contain_text("\u202e")
        await expect(chat.turn.locator(".call pre").nth(1)).to_contain_text("\u27e8U+202E\u27e9")
        await chat.page.reload()
        await chat.sees(f"{HOSTILE} {BIDI}")
        assert await chat.page.locator("#turns img, #turns script, #sessions img").count() == 0
        assert "owned" not in (await chat.page.title()).split("<")[0]
        assert chat.problems == []


@pytest.mark.long
async def test_a_refused_message_returns_to_the_text_box(browser: Browser) -> None:
    """More messages wait than the limit allows: the next one is refused, and its text is kept."""
    async with served(make_app(two_halves(asyncio.Event()))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("first")
        await chat.sees("".join(WORDS[:HALF]))
        runner = await server.app.host.session(chat.session)
        for number in range(QUEUE_MAX):
            waiting = SendMessage(UserMessage.of(f"waiting {number}"), when_busy=WhenBusy.QUEUE)
            await runner.submit(waiting)
        await expect(chat.page.locator("#queued li")).to_have_count(QUEUE_MAX, timeout=WAIT_MS)
        await chat.send_message("one too many")
        await expect(chat.page.locator("#notice")).to_contain_text("was not sent", timeout=WAIT_MS)
        await expect(chat.page.locator("#text")).to_have_value("one too many")
        await chat.sees("".join(WORDS[:HALF]))


@pytest.mark.long
async def test_each_session_has_its_address_and_a_link_in_the_list(browser: Browser) -> None:
    async with served(make_app([text("hello")])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("one")
        await chat.sees_end("completed")
        first = chat.session
        await chat.page.click("#new")
        await expect(chat.page.locator("#empty")).to_be_visible()
        await chat.send_message("two")
        await chat.sees_end("completed")
        assert chat.session != first
        await chat.page.locator("#sessions a", has_text="one").click()
        await expect(chat.turn.locator(".message")).to_have_text("one", timeout=WAIT_MS)
        assert chat.session == first
        await expect(chat.page.locator(".turn")).to_have_count(1)
