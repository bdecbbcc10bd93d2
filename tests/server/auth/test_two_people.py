"""A tool that several people must allow: each one once, and all of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from midstream.engine.agent import Agent
from midstream.errors import ToolDefinitionError, UsageError
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta
from midstream.server.app import App, asgi
from midstream.server.auth.access import Access, bearer
from midstream.server.auth.principals import Principal
from midstream.session.permissions import Allowed, Ask, Permission
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import ScriptedModel, calls, text
from midstream.tools.function_tools import Approval, tool
from tests.server.known_people import ADA, BOB, EVE, OPERATOR, guarded_app, post_message, status_and_code
from tests.server.serving import KEYS, Json, asgi_client, command, make_app
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
async def _serve_turn(folder: Path) -> AsyncIterator[tuple[App, httpx2.AsyncClient]]:
    """Serve a session of Ada's with a turn that waits for approvals."""
    app = guarded_app(SCRIPT, known=KNOWN, store=SQLiteStore(folder / "sessions.db"), tools=[pay])
    async with asgi_client(app) as client:
        if (await client.get("/v1/sessions/s1", headers=ADA)).status_code != 200:
            assert (await post_message(client, "s1", ADA)).status_code == 200
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
    async with _serve_turn(tmp_path) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        again = await _answer(app, client, ADA)
        assert status_and_code(again) == (409, "answer_mismatch")
        assert "another person" in again.json()["detail"]
        question = await _question(app, client, ADA)
        assert (question["approvers"], question["approved_by"], paid) == (2, ["ada"], [])
        assert question["text"] == "2 people must allow this; so far ada did."
    async with _serve_turn(tmp_path) as (app, client):
        assert status_and_code(await _answer(app, client, ADA)) == (409, "answer_mismatch")
        assert status_and_code(await client.post("/v1/sessions/s1/cancel", headers=EVE)) == (
            404,
            "session_not_found",
        )
        assert (await _answer(app, client, BOB)).status_code == 202
        await _end(app)
        records = (await client.get("/v1/sessions/s1/records", headers=ADA)).text
    assert paid == [250]
    assert records.count('"type":"question_answered"') == 2


@spec("SEC-27")
async def test_one_denial_is_enough(tmp_path: Path) -> None:
    async with _serve_turn(tmp_path) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        assert (await _answer(app, client, BOB, "deny")).status_code == 202
        await _end(app)
    assert paid == []


@spec("SEC-27")
async def test_an_approval_of_other_arguments_does_not_count(tmp_path: Path) -> None:
    async with _serve_turn(tmp_path) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        assert (await _answer(app, client, BOB, arguments='{"amount": 9}')).status_code == 202
        question = await _question(app, client, ADA)
        assert (question["arguments"], question["approved_by"], paid) == ('{"amount": 9}', ["bob"], [])
        assert status_and_code(await _answer(app, client, BOB)) == (409, "answer_mismatch")
        assert (await _answer(app, client, OPERATOR)).status_code == 202
        await _end(app)
    assert paid == [9]


@spec("SEC-27")
async def test_a_server_without_authentication_runs_no_call_that_needs_two_people() -> None:
    app = make_app(SCRIPT, tools=[pay])
    async with asgi_client(app) as client:
        assert (
            await client.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
        ).status_code == 200
        assert status_and_code(await _answer(app, client, {})) == (409, "answer_mismatch")
        assert (await _answer(app, client, {}, "deny")).status_code == 202
        await _end(app)
    assert paid == []


@pytest.mark.parametrize(("needs_approval", "approvers"), [(False, 2), (True, 0), (True, 11)])
def test_an_approval_rule_that_cannot_be_met_is_refused(needs_approval: bool, approvers: int) -> None:  # noqa: FBT001
    with pytest.raises(ToolDefinitionError, match="approvers"):
        tool(needs_approval=needs_approval, approvers=approvers)(len)


class PermissionRequestingModel:
    """A model with an agent that requests a permission in the middle of its answer."""

    name = "coder"

    def __init__(self, terms: Ask) -> None:
        self._terms = terms

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        assert request.person is not None
        wanted = Permission("agent-1", "pay", "execute", '{"amount": 250}')
        decision = await request.person(wanted, self._terms)
        if isinstance(decision, Allowed):
            paid.append(json.loads(decision.arguments or wanted.arguments)["amount"])
        yield TextDelta("It is paid.")
        yield Finished()


@asynccontextmanager
async def _serve_agent(
    agent: Agent, *, tools: Sequence[Json] = ()
) -> AsyncIterator[tuple[App, httpx2.AsyncClient]]:
    """Serve a session of Ada's with this agent and these client tools."""
    access = Access(authenticate=bearer(KNOWN.get))
    app = asgi(agent, store=MemoryStore(), access=access)
    async with asgi_client(app) as client:
        body = command(tools=list(tools)) if tools else command()
        sent = await client.post("/v1/sessions/s1/commands", json=body, headers={**KEYS, **ADA})
        assert sent.status_code == 200
        yield app, client


@spec("SEC-27")
async def test_a_permission_of_an_upstream_agent_needs_two_people() -> None:
    async with _serve_agent(Agent(PermissionRequestingModel(Ask("Sure?", approvers=2)))) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        assert status_and_code(await _answer(app, client, ADA)) == (409, "answer_mismatch")
        question = await _question(app, client, BOB)
        assert (question["approvers"], question["approved_by"], paid) == (2, ["ada"], [])
        assert question["text"] == "Sure?\n2 people must allow this.\nada allowed this."
        assert (await _answer(app, client, BOB)).status_code == 202
        await _end(app)
    assert paid == [250]


@spec("SEC-27")
async def test_arguments_changed_by_one_person_are_shown_to_the_others_and_used_by_the_agent() -> None:
    async with _serve_agent(Agent(PermissionRequestingModel(Ask(approvers=2)))) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        assert (await _answer(app, client, BOB, arguments='{"amount": 9}')).status_code == 202
        question = await _question(app, client, ADA)
        assert (question["arguments"], question["approved_by"], paid) == ('{"amount": 9}', ["bob"], [])
        assert (await _answer(app, client, ADA)).status_code == 202
        await _end(app)
    assert paid == [9]


@spec("SEC-27")
async def test_one_denial_of_a_permission_is_enough() -> None:
    async with _serve_agent(Agent(PermissionRequestingModel(Ask(approvers=2)))) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        assert (await _answer(app, client, BOB, "deny")).status_code == 202
        await _end(app)
    assert paid == []


LOCAL = {"spec": {"name": "pay", "description": "Pay.", "parameters": {"type": "object"}}}


async def _is_started(client: httpx2.AsyncClient) -> bool:
    return '"type":"call_started"' in (await client.get("/v1/sessions/s1/records", headers=ADA)).text


@spec("SEC-27")
@pytest.mark.parametrize(
    ("approval", "declared"),
    [
        (None, {"needs_approval": True, "approvers": 2}),
        (lambda _call, _tool: Ask(approvers=2), {}),
        (lambda _call, _tool: Ask(), {"needs_approval": True, "approvers": 2}),
    ],
)
async def test_a_call_reaches_a_client_after_two_people_have_allowed_it(
    approval: Approval | None, declared: Json
) -> None:
    """The client declares the rule, or the server's own rule requires it of every client."""
    agent = Agent(ScriptedModel(SCRIPT), approval=approval)
    async with _serve_agent(agent, tools=[{**LOCAL, **declared}]) as (app, client):
        assert (await _answer(app, client, ADA)).status_code == 202
        assert status_and_code(await _answer(app, client, ADA)) == (409, "answer_mismatch")
        assert not await _is_started(client)
        assert (await _answer(app, client, BOB)).status_code == 202
        runner = await app.host.session("s1")
        while not await _is_started(client):
            await runner.wait(runner.newest.position)


@pytest.mark.parametrize(
    "declared", [{"approvers": 2}, *({"needs_approval": True, "approvers": n} for n in (0, 11))]
)
async def test_a_client_cannot_declare_a_rule_that_cannot_be_met(declared: Json) -> None:
    async with asgi_client(make_app(SCRIPT)) as client:
        body = command(tools=[{**LOCAL, **declared}])
        refused = await client.post("/v1/sessions/s1/commands", json=body, headers=KEYS)
    assert refused.status_code == 400


@pytest.mark.parametrize("approvers", [0, 11])
def test_terms_that_cannot_be_met_are_refused(approvers: int) -> None:
    with pytest.raises(UsageError, match="approvers"):
        Ask(approvers=approvers)
