"""A tool that several people must allow: each of them, and nobody twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from midstream.errors import ToolDefinitionError
from midstream.server.app import App
from midstream.server.auth.principals import Principal
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import calls, text
from midstream.tools.function_tools import tool
from tests.server.people import ADA, BOB, EVE, OPERATOR, guarded_app, say, told
from tests.server.serving import KEYS, called, command, make_app
from tests.spec import spec

KNOWN = {
    "the-token-of-ada": Principal("ada"),
    "the-token-of-bob": Principal("bob", is_approver=True),
    "the-token-of-eve": Principal("eve"),
    "the-token-of-the-operator": Principal("root", is_operator=True),
}
paid: list[int] = []


@tool(needs_approval=True, approvers=2)
def pay(amount: int) -> str:
    """Pay somebody."""
    paid.append(amount)
    return f"paid {amount}"


SCRIPT = [calls(("pay", '{"amount": 250}')), text("It is paid.")]


@pytest.fixture(autouse=True)
def ledger() -> list[int]:
    paid.clear()
    return paid


@asynccontextmanager
async def _asked(folder: Path) -> AsyncIterator[tuple[App, httpx2.AsyncClient]]:
    """Serve a session of Ada's whose turn waits for approvals."""
    app = guarded_app(SCRIPT, known=KNOWN, store=SQLiteStore(folder / "sessions.db"), tools=[pay])
    async with called(app) as client:
        if (await client.get("/v1/sessions/s1", headers=ADA)).status_code != 200:
            assert (await say(client, "s1", ADA)).status_code == 200
        yield app, client


async def _question(app: App, client: httpx2.AsyncClient, who: dict[str, str]) -> dict[str, Any]:
    """Return the open question, once it is there."""
    runner = await app.host.session("s1")
    while True:
        found = (await client.get("/v1/questions?session=s1", headers=who)).json()["questions"]
        if found:
            return dict(found[0])
        await runner.wait(runner.newest.position)


async def _answer(
    app: App, client: httpx2.AsyncClient, who: dict[str, str], choice: str = "allow", **more: str
) -> httpx2.Response:
    question = await _question(app, client, who)
    place = {name: question[name] for name in ("turn", "response", "call_id", "digest")}
    body = {"type": "answer", **place, "choice": choice, **more}
    return await client.post("/v1/sessions/s1/answer", json=body, headers=who)


async def _end(app: App) -> None:
    runner = await app.host.session("s1")
    while runner.state.is_live:
        await runner.wait(runner.newest.position)


@spec("SEC-27")
async def test_a_call_runs_after_two_people_have_allowed_it_also_across_a_restart(tmp_path: Path) -> None:
    async with _asked(tmp_path) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        again = await _answer(app, client, ADA)
        assert told(again) == (409, "answer_mismatch")
        assert "another person" in again.json()["detail"]
        question = await _question(app, client, ADA)
        assert (question["approvers"], question["approved_by"], paid) == (2, ["ada"], [])
        assert question["text"] == "2 people must allow this; so far ada did."
    async with _asked(tmp_path) as (app, client):
        assert told(await _answer(app, client, ADA)) == (409, "answer_mismatch")
        assert told(await client.post("/v1/sessions/s1/cancel", headers=EVE)) == (404, "session_not_found")
        assert (await _answer(app, client, BOB)).status_code == 202
        await _end(app)
        records = (await client.get("/v1/sessions/s1/records", headers=ADA)).text
    assert paid == [250]
    assert records.count('"type":"question_answered"') == 2


@spec("SEC-27")
async def test_one_denial_is_enough(tmp_path: Path) -> None:
    async with _asked(tmp_path) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        assert (await _answer(app, client, BOB, "deny")).status_code == 202
        await _end(app)
    assert paid == []


@spec("SEC-27")
async def test_an_approval_of_other_arguments_is_none_of_these(tmp_path: Path) -> None:
    async with _asked(tmp_path) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        assert (await _answer(app, client, BOB, arguments='{"amount": 9}')).status_code == 202
        question = await _question(app, client, ADA)
        assert (question["arguments"], question["approved_by"], paid) == ('{"amount": 9}', ["bob"], [])
        assert told(await _answer(app, client, BOB)) == (409, "answer_mismatch")
        assert (await _answer(app, client, OPERATOR)).status_code == 202
        await _end(app)
    assert paid == [9]


@spec("SEC-27")
async def test_a_server_that_authenticates_nobody_runs_no_such_call() -> None:
    app = make_app(SCRIPT, tools=[pay])
    async with called(app) as client:
        assert (
            await client.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
        ).status_code == 200
        assert told(await _answer(app, client, {})) == (409, "answer_mismatch")
        assert (await _answer(app, client, {}, "deny")).status_code == 202
        await _end(app)
    assert paid == []


@pytest.mark.parametrize(("needs_approval", "approvers"), [(False, 2), (True, 0), (True, 11)])
def test_a_rule_that_cannot_hold_is_refused(needs_approval: bool, approvers: int) -> None:  # noqa: FBT001
    with pytest.raises(ToolDefinitionError, match="approvers"):
        tool(needs_approval=needs_approval, approvers=approvers)(len)
