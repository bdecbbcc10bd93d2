"""Human decisions over HTTP: answering questions, resuming a failed turn, taking a message back."""

from __future__ import annotations

import asyncio

from midstream.engine.runner import Runner
from midstream.errors import (
    ModelRejectedError,
)
from midstream.history.messages import Step
from midstream.testing.scripted_model import Gate, ScriptedStep, calls, text
from midstream.tools.function_tools import tool
from tests.server.serving import WAIT_S, asgi_client, command, make_app, post


@tool(needs_approval=True)
def triple(number: int) -> int:
    """Triple a number."""
    return 3 * number


async def _rests(runner: Runner) -> None:
    async with asyncio.timeout(WAIT_S):
        while runner.state.is_live:
            await runner.wait(runner.newest.position)


async def test_a_question_is_listed_until_it_is_answered_once() -> None:
    app = make_app([calls(("triple", '{"number": 2}')), text("ok")], tools=[triple])
    async with asgi_client(app) as client:
        assert (await client.get("/v1/questions")).json() == {"questions": [], "is_complete": True}
        await post(client, command())
        runner = await app.host.session("s1")
        while not runner.state.rests_on_people:
            await runner.wait(runner.newest.position)
        (asked,) = (await client.get("/v1/questions?session=s1")).json()["questions"]
        assert (asked["name"], asked["arguments"], asked["choices"]) == (
            "triple",
            '{"number": 2}',
            ["allow", "deny"],
        )
        place = {name: asked[name] for name in ("turn", "response", "call_id", "digest")}
        url = "/v1/sessions/s1/answer"
        answers = [
            await client.post(url, json=given)
            for given in (
                {**place, "choice": "respond"},
                {**place, "choice": "maybe"},
                {**place, "choice": "allow", "digest": "0"},
                {**place, "choice": "allow"},
                {**place, "choice": "deny"},
            )
        ]
        assert [(answer.status_code, answer.json().get("code")) for answer in answers] == [
            (409, "answer_mismatch"),
            (400, "malformed_frame"),
            (409, "answer_mismatch"),
            (202, None),
            (409, "question_closed"),
        ]
        await _rests(runner)
        (step, _) = runner.state.history.entries[1:]
        assert isinstance(step, Step)
        assert [result.content for result in step.results] == ["6"]
        assert (await client.get("/v1/questions")).json()["questions"] == []


async def test_a_failed_turn_can_be_resumed_and_a_queued_message_taken_back() -> None:
    gate = asyncio.Event()
    lives: list[list[ScriptedStep]] = [[ModelRejectedError("no key")], [Gate(gate), *text("ok")]]
    app = make_app(lambda _: lives.pop(0))
    async with asgi_client(app) as client:
        await post(client, command())
        runner = await app.host.session("s1")
        await _rests(runner)
        assert (await client.get("/v1/sessions/s1")).json()["is_resumable"]
        assert (await client.post("/v1/sessions/s1/resume?turn=7")).json()["code"] == "nothing_to_resume"
        assert (await client.post("/v1/sessions/s1/resume")).json()["is_running"]
        await post(client, command(words="and this"), **{"x-idempotency-key": "k2"})
        (waiting,) = (await client.get("/v1/sessions/s1")).json()["queue"]
        assert waiting["number"] == 1
        assert (await client.post("/v1/sessions/s1/withdraw?number=1")).status_code == 202
        assert (await client.get("/v1/sessions/s1")).json()["queue"] == []
        gate.set()
        await _rests(runner)
        assert (await client.post("/v1/sessions/s1/resume")).json()["code"] == "nothing_to_resume"
        assert runner.state.turns == 1
