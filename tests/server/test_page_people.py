"""Human decisions on the page: approvals, questions, calls in doubt, the queue, resumed turns, sub-agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, expect

from midstream.engine.agent import Agent, sub_agent
from midstream.errors import ModelRejectedError
from midstream.history.messages import UserMessage
from midstream.models.responses import ModelRequest, TextDelta
from midstream.protocol.stream_settings import StreamSettings
from midstream.server.app import App, asgi
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import Gate, ScriptedModel, ScriptedStep, calls, text
from midstream.tools.function_tools import Tool, question, report_progress, tool
from tests.engine.test_permission_prompts import PUSH, PermissionModel
from tests.server.devtools import CHROMIUM
from tests.server.serving import Served, make_app, served
from tests.server.test_page import WAIT_MS, Chat, open_chat
from tests.spec import spec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]
PAY = calls(("pay", '{"sum":3}'))


def purse(paid: list[int]) -> Tool:
    """Return a tool that a person must allow."""

    @tool(needs_approval=True)
    def pay(sum: int) -> str:  # noqa: A002 - the model's name for it
        """Pay."""
        paid.append(sum)
        return f"paid {sum}"

    return pay


async def question_card(chat: Chat, kind: str) -> Locator:
    """Wait for a question of this kind and return its card."""
    card = chat.page.locator(f'.question[data-kind="{kind}"]')
    await expect(card).to_have_count(1, timeout=WAIT_MS)
    return card


async def test_a_call_runs_only_after_it_is_allowed(browser: Browser) -> None:
    paid: list[int] = []
    async with served(make_app([PAY, text("Done.")], tools=[purse(paid)])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("pay 3")
        card = await question_card(chat, "approval")
        await expect(card.locator("pre")).to_contain_text('"sum": 3')
        await expect(chat.turn.locator(".turn-status")).to_contain_text("Waiting for you")
        await expect(chat.page.locator("#sessions .asking .when")).to_have_text(
            "waiting for you", timeout=WAIT_MS
        )
        assert paid == []
        await card.locator('[data-choice="allow"]').click()
        await chat.sees("Done.")
        await expect(card).to_have_count(0)
        await expect(chat.turn.locator(".decided")).to_have_text("Allowed")
        assert paid == [3]
        assert chat.problems == []


@pytest.mark.long
@pytest.mark.parametrize("reloaded", [False, True])
async def test_arguments_can_be_changed_before_a_call_also_after_a_reload(
    browser: Browser, *, reloaded: bool
) -> None:
    paid: list[int] = []
    async with served(make_app([PAY, text("Done.")], tools=[purse(paid)])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("pay 3")
        if reloaded:
            await question_card(chat, "approval")
            await chat.page.reload()
        card = await question_card(chat, "approval")
        await card.locator('[data-choice="edit"]').click()
        await card.locator("textarea").fill("[2]")
        await card.locator('[data-choice="allow"]').click()
        await expect(card.locator(".problem")).to_have_text("These arguments are no JSON object.")
        await card.locator("textarea").fill('{"sum": 2}')
        await card.locator('[data-choice="allow"]').click()
        await chat.sees("Done.")
        await chat.turn.locator(".call summary").click()
        await expect(chat.turn.locator(".call .body pre").first).to_contain_text('"sum": 2')
        assert paid == [2]


@pytest.mark.long
async def test_a_denial_carries_its_reason_and_an_answer_from_elsewhere_closes_the_card(
    browser: Browser,
) -> None:
    paid: list[int] = []
    script = [PAY, PAY, text("Not then.")]
    async with served(make_app(script, tools=[purse(paid)])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("pay 3")
        card = await question_card(chat, "approval")
        await card.locator("input").fill("it is too much")
        await card.locator('[data-choice="deny"]').click()
        await expect(chat.turn.locator(".decided").first).to_have_text(
            "Denied: it is too much", timeout=WAIT_MS
        )
        await expect(chat.turn.locator(".call").first).to_have_attribute("data-state", "denied")
        await question_card(chat, "approval")
        (waiting,) = (await server.http.get("/v1/questions")).json()["questions"]
        place = {name: waiting[name] for name in ("turn", "response", "call_id", "digest")}
        url = f"/v1/sessions/{chat.session}/answer"
        assert (await server.http.post(url, json={**place, "choice": "deny"})).status_code == 202
        await chat.sees("Not then.")
        await expect(chat.page.locator(".question")).to_have_count(0)
        assert paid == []


async def test_a_question_can_be_answered_with_a_text_or_an_option(browser: Browser) -> None:
    script = [
        calls(("ask_user", '{"question": "Which one?", "options": ["red", "blue"]}')),
        calls(("ask_user", '{"question": "Why?"}')),
        text("I see."),
    ]
    async with served(make_app(script, tools=[question()])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("choose")
        card = await question_card(chat, "question")
        await expect(card.locator(".why")).to_have_text("Which one?")
        await card.locator(".options button", has_text="blue").click()
        await expect(card.locator(".why")).to_have_text("Why?", timeout=WAIT_MS)
        await card.locator("input").fill("It is calm.")
        await card.locator("input").press("Enter")
        await chat.sees("I see.")
        await expect(chat.turn.locator(".decided")).to_have_text(["Answered: blue", "Answered: It is calm."])


async def test_a_person_decides_a_call_in_doubt(browser: Browser, port: int) -> None:
    store = MemoryStore()
    started = asyncio.Event()

    def make(*, hangs: bool) -> App:
        @tool(on_doubt="hold")
        async def launch() -> str:
            """Launch it."""
            started.set()
            if hangs:
                await asyncio.Event().wait()
            return "launched"

        return asgi(
            Agent(ScriptedModel([calls(("launch", "{}")), text("Good.")]), tools=[launch]), store=store
        )

    async with served(make(hangs=True), port=port, stop_within_s=1) as first:
        chat = await open_chat(browser, first.url)
        await chat.send_message("launch it")
        await asyncio.wait_for(started.wait(), WAIT_MS / 1000)
    async with served(make(hangs=False), port=port):
        card = await question_card(chat, "doubt")
        await expect(card).to_contain_text("died before its outcome was known")
        await card.locator("input").fill("it flies")
        await card.locator('[data-choice="happened"]').click()
        await chat.sees("Good.")
        await expect(chat.turn.locator(".decided")).to_have_text("Confirmed to have happened: it flies")


def _two_turns(gate: asyncio.Event) -> Callable[[ModelRequest], list[ScriptedStep]]:
    def response(request: ModelRequest) -> list[ScriptedStep]:
        messages = [entry for entry in request.history.entries if isinstance(entry, UserMessage)]
        return (
            [TextDelta("thinking"), Gate(gate), *text(" done")] if len(messages) == 1 else text("next done")
        )

    return response


@pytest.mark.long
async def test_queued_messages_are_listed_and_can_be_taken_back(browser: Browser) -> None:
    gate = asyncio.Event()
    async with served(make_app(_two_turns(gate))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("first")
        await chat.sees("thinking")
        await chat.send_message("second")
        await expect(chat.page.locator("#queued li")).to_have_count(1, timeout=WAIT_MS)
        await chat.send_message("third")
        await expect(chat.page.locator("#queued .name")).to_have_text(["second", "third"], timeout=WAIT_MS)
        await chat.page.reload()
        await expect(chat.page.locator("#queued .name")).to_have_text(["second", "third"], timeout=WAIT_MS)
        await chat.page.locator("#queued li", has_text="third").locator("button").click()
        await expect(chat.page.locator("#queued .name")).to_have_text(["second"], timeout=WAIT_MS)
        await expect(chat.page.locator("#text")).to_have_value("third")
        gate.set()
        await chat.sees("next done")
        await chat.sees_end("completed")
        await expect(chat.page.locator("#queue")).to_be_hidden()
        await expect(chat.page.locator(".turn .message")).to_have_text(["first", "second"])


@pytest.mark.long
@spec("TURN-90")
async def test_a_turn_with_a_missing_tool_reports_it_and_continues_by_a_button(
    browser: Browser, tmp_path: Path
) -> None:
    paid: list[int] = []
    path = tmp_path / "journal.db"
    async with served(make_app([PAY, text("Done.")], tools=[purse(paid)], store=SQLiteStore(path))) as server:
        first = await open_chat(browser, server.url)
        await first.send_message("pay 3")
        await question_card(first, "approval")
    app = make_app([PAY, text("Without it.")], store=SQLiteStore(path))
    app.settings = StreamSettings(heartbeat_s=0.3)  # The reason for the wait comes with a heartbeat.
    async with served(app) as server:
        chat = await open_chat(browser, server.url)
        await chat.page.goto(f"{server.url}/#{first.session}")
        await expect(chat.page.locator("#notice")).to_contain_text("Serve that agent", timeout=WAIT_MS)
        await expect(chat.turn.locator(".resume")).to_have_text("Continue", timeout=WAIT_MS)
        await chat.turn.locator(".resume").click()
        await expect(chat.page.locator("#notice")).to_be_hidden(timeout=WAIT_MS)
        await (await question_card(chat, "approval")).locator('[data-choice="allow"]').click()
        await chat.sees("Without it.")
        await chat.sees_end("completed")
        await expect(chat.turn.locator(".resume")).to_be_hidden()
        assert (paid, chat.problems) == ([], [])


@pytest.mark.long
async def test_a_failed_turn_can_be_resumed(browser: Browser) -> None:
    lives: list[list[ScriptedStep]] = [
        [TextDelta("half a"), ModelRejectedError("the key has expired")],
        text("the other half"),
    ]
    async with served(make_app(lambda _: lives.pop(0))) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("go")
        await chat.sees_end("failed")
        await expect(chat.turn.locator(".turn-status")).to_contain_text("the key has expired")
        await chat.turn.locator(".resume").click()
        await chat.sees("the other half")
        await chat.sees_end("completed")
        await expect(chat.turn.locator(".turn-status")).to_contain_text("resumed")
        await expect(chat.turn.locator(".resume")).to_be_hidden()
        await expect(chat.page.locator(".turn")).to_have_count(1)


@pytest.mark.long
async def test_a_sub_agent_is_shown_below_its_call_with_its_questions(browser: Browser) -> None:
    paid: list[int] = []
    gate = asyncio.Event()

    @tool(has_effects=False)
    async def look() -> str:
        """Look."""
        report_progress("half way")
        await gate.wait()
        return "seen"

    clerk = Agent(
        ScriptedModel([calls(("look", "{}"), text="I look."), PAY, text("It is paid.")]),
        tools=[purse(paid), look],
        name="clerk",
    )
    boss = Agent(
        ScriptedModel([calls(("clerk", '{"task":"pay"}')), text("Done.")]),
        tools=[sub_agent(clerk, description="Pays.")],
    )
    async with served(asgi(boss, store=MemoryStore())) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("let the clerk pay")
        work = chat.page.locator(".work")
        await expect(work.locator(".text").first).to_have_text("I look.", timeout=WAIT_MS)
        await expect(work.locator(".progress").first).to_have_text("half way", timeout=WAIT_MS)
        gate.set()
        await (await question_card(chat, "approval")).locator('[data-choice="allow"]').click()
        await expect(work.locator(".text").last).to_have_text("It is paid.", timeout=WAIT_MS)
        await expect(chat.page.locator(".turn > .responses > .response > .parts > .text").last).to_have_text(
            "Done.", timeout=WAIT_MS
        )
        assert paid == [3]
        await expect(chat.page.locator("#sessions li")).to_have_count(1)


@pytest.mark.long
async def test_a_narrow_page_shows_a_question_without_horizontal_scrolling(browser: Browser) -> None:
    async with served(make_app([PAY, text("Done.")], tools=[purse([])])) as server:
        chat = await _narrow(browser, server)
        await chat.send_message("pay 3")
        card = await question_card(chat, "approval")
        box = await card.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert await chat.page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.long
@spec("SEC-71")
async def test_a_call_can_be_allowed_only_after_its_whole_arguments_were_on_screen(browser: Browser) -> None:
    paid: list[str] = []

    @tool(needs_approval=True)
    def pay(why: str) -> str:
        """Pay."""
        paid.append(why[-7:])
        return "paid"

    asks = calls(("pay", json.dumps({"why": "a long story " * 600 + "the end"})))
    async with served(make_app([asks, text("Done.")], tools=[pay])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("pay 3")
        card = await question_card(chat, "approval")
        for choice in ("allow", "edit"):
            await expect(card.locator(f'[data-choice="{choice}"]')).to_be_disabled()
        await expect(card.locator('[data-choice="deny"]')).to_be_enabled()
        await expect(card.locator(".unseen")).to_be_visible()
        await card.locator("input").focus()
        await card.locator("input").press("Enter")
        await card.locator("pre").evaluate("(box) => box.scrollTo(0, box.scrollHeight)")
        await expect(card.locator(".unseen")).to_be_hidden(timeout=WAIT_MS)
        assert paid == []
        await card.locator('[data-choice="allow"]').click()
        await chat.sees("Done.")
        assert paid == ["the end"]


@pytest.mark.long
@spec("SEC-74")
async def test_enter_in_the_reason_field_denies_the_call(browser: Browser) -> None:
    paid: list[int] = []
    async with served(make_app([PAY, text("Not then.")], tools=[purse(paid)])) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("pay 3")
        card = await question_card(chat, "approval")
        await card.locator("input").press("Enter")
        await card.locator("input").fill("too much")
        await card.locator("input").press("Enter")
        await chat.sees("Not then.")
        await expect(chat.turn.locator(".decided")).to_have_text("Denied: too much")
        assert paid == []


UNSEEN = "\U000e0041\u2028\u00ad\u202e\ufe0f\u200b\ue000"
VISIBLE_FORM = "".join(f"\u27e8U+{ord(each):04X}\u27e9" for each in UNSEEN)


@pytest.mark.long
@spec("SEC-70", "SEC-72", "SEC-74")
async def test_invisible_characters_are_shown_by_their_code_also_at_the_end_of_a_long_name_on_a_phone(
    browser: Browser,
) -> None:
    name = "pay_the_invoice_of_the_supplier_for_last_month_and_this" + UNSEEN

    @tool(name=name, needs_approval=True)
    def pay(to: str) -> str:
        """Pay."""
        return f"paid {to}"

    asks = calls((name, json.dumps({"to": f"ann{UNSEEN}"}, ensure_ascii=False)))
    async with served(make_app([asks, text("Done.")], tools=[pay])) as server:
        chat = await open_chat(browser, server.url)
        await chat.page.set_viewport_size({"width": 380, "height": 800})
        await chat.send_message("pay")
        card = await question_card(chat, "approval")
        await expect(card.locator("pre")).to_contain_text(f"ann{VISIBLE_FORM}")
        await expect(card.locator(".asked-name")).to_have_text(name.replace(UNSEEN, VISIBLE_FORM))
        for place in (card.locator(".asked-name"), chat.turn.locator(".call .name")):
            cut = await place.evaluate(
                "(box) => box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflow !== 'visible'"
            )
            edge = await place.evaluate("(box) => box.getBoundingClientRect().right")
            assert (cut, edge <= 380) == (False, True)
        assert await chat.page.evaluate("document.documentElement.scrollWidth") <= 380
        await card.locator('[data-choice="edit"]').click()
        assert await card.locator("textarea").input_value() == (
            '{\n  "to": "ann\\udb40\\udc41\\u2028\\u00ad\\u202e\\ufe0f\\u200b\\ue000"\n}'
        )


@pytest.mark.long
@spec("SEC-70")
async def test_the_table_of_invisible_characters_is_that_of_the_browsers_unicode_data(
    browser: Browser,
) -> None:
    async with served(make_app()) as server:
        chat = await open_chat(browser, server.url)
        differing = await chat.page.evaluate(DIFFERING, f"{server.url}/static/visible.js")
        assert differing == []


DIFFERING = """async (url) => {
  const { visible } = await import(url);
  const unseen =
    /[\\p{Cc}\\p{Cf}\\p{Co}\\p{Cs}\\p{Zl}\\p{Zp}\\p{Zs}\\p{Default_Ignorable_Code_Point}\\u2800]/u;
  const differing = [];
  for (let code = 0; code <= 0x10ffff; code += 1) {
    const character = String.fromCodePoint(code);
    const isUnseen = unseen.test(character) && ![" ", "\\t", "\\n"].includes(character);
    if ((visible(character) !== character) !== isUnseen) differing.push(code.toString(16));
  }
  return differing;
}"""


async def _narrow(browser: Browser, server: Served) -> Chat:
    chat = await open_chat(browser, server.url)
    await chat.page.set_viewport_size({"width": 390, "height": 844})
    return chat


@pytest.mark.long
async def test_a_permission_request_of_a_coding_agent_is_shown_within_its_answer(
    browser: Browser,
) -> None:
    coder = PermissionModel(PUSH)
    async with served(asgi(Agent(coder), store=MemoryStore())) as server:
        chat = await open_chat(browser, server.url)
        await chat.send_message("build it")
        card = await question_card(chat, "approval")
        await expect(card.locator("pre")).to_contain_text("git push")
        await expect(card.locator('[data-choice="edit"]')).to_have_count(0)
        await expect(chat.turn.locator(".turn-status")).to_contain_text("Waiting for you")
        await chat.page.reload()
        card = await question_card(chat, "approval")
        await card.locator('[data-choice="allow"]').click()
        await chat.sees("Let me see. Done.")
        await expect(card).to_have_count(0)
        await expect(chat.turn.locator(".decided")).to_have_text("Allowed")
        assert coder.done == ['{"command":"git push"}']
        assert chat.problems == []
