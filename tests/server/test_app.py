"""The app runs alone or mounted, starts once, and responds to every failure with a problem."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import Message

from midstream.engine.agent import Agent
from midstream.errors import StoreDamagedError
from midstream.server.app import App, asgi
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedModel, Stall, text
from tests.server.serving import KEYS, asgi_client, command, make_app

COMMANDS = "/v1/sessions/s1/commands"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"


class UnopenedStore(MemoryStore):
    """A store that cannot be opened while it is broken."""

    is_broken = True

    async def open(self) -> None:
        if self.is_broken:
            raise StoreDamagedError("this file is no database")
        await super().open()


async def live(app: App, script: list[str]) -> list[Message]:
    """Send lifespan messages to the app, as an ASGI server does."""
    reported = iter([{"type": f"lifespan.{event}"} for event in script])
    content: list[Message] = []

    async def receive() -> Message:
        return next(reported)

    async def send(message: Message) -> None:
        content.append(message)

    await app({"type": "lifespan"}, receive, send)
    return content


async def test_the_lifespan_of_the_app_starts_and_stops_the_host() -> None:
    app = make_app()
    assert await live(app, ["startup", "shutdown"]) == [
        {"type": "lifespan.startup.complete"},
        {"type": "lifespan.shutdown.complete"},
    ]
    assert app.host.is_draining


async def test_a_store_that_cannot_be_opened_fails_the_start_with_its_reason() -> None:
    assert await live(make_app(store=UnopenedStore()), ["startup"]) == [
        {"type": "lifespan.startup.failed", "message": "store_damaged: this file is no database"}
    ]


async def test_a_failed_start_is_retried_by_the_next_request() -> None:
    store = UnopenedStore()
    async with asgi_client(make_app([text("hi")], store=store)) as client:
        refused = await client.post(COMMANDS, json=command(), headers=KEYS)
        store.is_broken = False
        taken = await client.post(COMMANDS, json=command(), headers=KEYS)
    assert (refused.status_code, refused.json()["code"]) == (500, "store_damaged")
    assert taken.status_code == 200


async def test_a_mounted_app_starts_once_with_its_first_requests() -> None:
    app = make_app(lambda _: text("hi"))
    outer = Starlette(routes=[Mount("/agent", app)])
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=outer), base_url="http://outer"
    ) as client:
        answers = await asyncio.gather(
            *(
                client.post(f"/agent/v1/sessions/s{n}/commands", json=command(), headers=KEYS)
                for n in range(5)
            )
        )
        page = await client.get("/agent/")
        file = await client.get("/agent/static/index.html")
        missing = await client.get("/agent/nowhere")
        wrong = await client.delete("/agent/v1/sessions")
    await app.stop()
    assert [answer.status_code for answer in answers] == [200] * 5
    assert page.content == file.content
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"]


async def test_a_mounted_app_responds_to_its_own_errors() -> None:
    """The handlers of the outer app must not replace our problems."""

    async def swallow(*_: object) -> None:
        raise AssertionError("the outer app was asked")

    app = make_app()
    outer = Starlette(routes=[Mount("/agent", app)], exception_handlers={404: swallow})
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=outer), base_url="http://outer"
    ) as client:
        answer = await client.get("/agent/v1/sessions/nobody")
    await app.stop()
    assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")


async def test_a_bug_is_answered_as_internal_and_raised_for_the_log() -> None:
    store = MemoryStore()
    app = make_app(store=store)
    await app.start()
    store.find = None  # type: ignore[assignment,method-assign] # a bug
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://testserver") as client:
        answer = await client.get("/v1/sessions/s1/records")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "NoneType" not in answer.text

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://x") as client:
        with pytest.raises(TypeError):
            await client.get("/v1/sessions/s1/records")
    await app.stop()


async def test_a_store_can_be_given_as_a_path(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    for _ in range(2):
        app = asgi(Agent(ScriptedModel([text("hi")])), store=path)
        async with asgi_client(app) as client:
            answer = await client.post(COMMANDS, json=command(), headers=KEYS)
    assert (answer.status_code, answer.headers["x-midstream-replayed"]) == (200, "true")


async def test_a_draining_app_refuses_new_work_and_serves_reads() -> None:
    app = make_app([[Stall()]])
    async with asgi_client(app) as client:
        await client.post(COMMANDS, json=command(), headers=KEYS)
        app.drain()
        app.drain()
        refused = await client.post(COMMANDS, json=command(), headers={**KEYS, "x-idempotency-key": "k2"})
        shown = await client.get("/v1/sessions/s1")
        events = await client.get("/v1/sessions/s1/events")
    assert (refused.status_code, refused.json()["code"]) == (503, "draining")
    assert (events.status_code, events.json()["code"], events.headers["retry-after"]) == (
        503,
        "draining",
        "1",
    )
    assert shown.json()["status"] == "running"


async def test_a_request_to_an_already_closed_store_gets_a_draining_problem() -> None:
    app = make_app()
    async with asgi_client(app) as client:
        assert (await client.get("/v1/sessions")).status_code == 200
        await app.stop(grace_s=0.0)
        late = await client.get("/v1/sessions")
    assert (late.status_code, late.json()["code"], late.headers["retry-after"]) == (503, "draining", "1")


@pytest.mark.parametrize("steps", range(1, 5))
async def test_a_cancelled_stop_still_closes_the_store(steps: int) -> None:
    app = asgi(Agent(ScriptedModel([])), store=(store := MemoryStore()))
    await app.start()
    stopping = asyncio.create_task(app.stop())
    for _ in range(steps):
        await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait({stopping}, timeout=60)
    async with asyncio.timeout(60):
        while store.node:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0)


async def test_a_late_request_does_not_start_a_stopped_app() -> None:
    store = MemoryStore()
    app = make_app(store=store)
    async with asgi_client(app) as client:
        await app.stop(grace_s=0.0)
        late = await client.get("/v1/sessions")
    assert (late.status_code, late.json()["code"]) == (503, "draining")
    assert store.node == "", "it was not opened"


def test_every_endpoint_is_in_the_reference() -> None:
    routes = [route for route in routes_of(make_app()) if isinstance(route, Route | WebSocketRoute)]
    page = PAGE.read_text(encoding="utf-8")
    described = [re.sub(r":\w+}", "}", route.path).replace("{session_id}", "{id}") for route in routes]
    assert len(described) > 9
    assert [path for path in described if f"{path}`" not in page] == []


def routes_of(app: App) -> list[BaseRoute]:
    return app._router.routes


async def test_the_app_uses_only_the_given_world() -> None:
    app = make_app(world=FakeWorld(at=7.0))
    assert app.host.world.monotonic() == 7.0
