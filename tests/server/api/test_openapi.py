"""The description of the HTTP interface: complete, true, and tried by somebody who knows nothing else."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.routing import Route

from midstream.engine.agent import Agent
from midstream.observability.prometheus import Prometheus
from midstream.protocol.frames import Open
from midstream.server.api.openapi import OPERATIONS, ReaderOpen, StreamOpen, description
from midstream.server.app import asgi
from midstream.server.auth.access import Access, bearer
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel
from tests.server.api_search import SCHEMATHESIS, described, looking
from tests.server.serving import KEYS, command, make_app, served

NOT_OF_PROGRAMS = {"/"}
"""The page; WebSockets are no part of OpenAPI."""


def test_every_route_is_described_and_every_description_has_a_route() -> None:
    app = asgi(
        Agent(ScriptedModel([])),
        store=MemoryStore(),
        access=Access(authenticate=bearer(lambda _: None)),
        observers=[Prometheus()],
    )
    routes = {
        (method, route.path)
        for route in app._router.routes
        if isinstance(route, Route) and route.path not in NOT_OF_PROGRAMS
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert {(each.method, each.path) for each in OPERATIONS} == routes


def test_every_reference_within_it_leads_somewhere() -> None:
    told = json.dumps(description())
    names = set(description()["components"]["schemas"])
    assert {each.partition('"')[0] for each in told.split("#/components/schemas/")[1:]} <= names


def test_an_open_is_described_with_all_it_has() -> None:
    for kind in (ReaderOpen, StreamOpen):
        assert {*kind.__struct_fields__} == {*Open.__struct_fields__}


async def test_a_frame_that_is_no_command_needs_no_stream_as_described() -> None:
    headers = {
        each["name"]: each["required"]
        for each in description()["paths"]["/v1/sessions/{session_id}/commands"]["post"]["parameters"]
        if each["in"] == "header"
    }
    async with served(make_app()) as server:
        said = await server.http.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
        asked = await server.http.post("/v1/sessions/s1/commands", json={"type": "ping"})
    assert (said.status_code, asked.status_code) == (200, 200)
    assert not any(headers.values())


async def test_it_is_served() -> None:
    async with served(make_app()) as server:
        answer = await server.http.get("/v1/openapi.json")
    assert (answer.status_code, answer.json()) == (200, json.loads(json.dumps(description())))


@pytest.mark.skipif(
    not SCHEMATHESIS.exists(), reason="schemathesis is not installed (make .venv/.schemathesis)"
)
async def test_who_knows_only_the_description_finds_nothing_wrong() -> None:
    """`make api-search` looks longer, in every phase and at what has no end."""
    options = [
        "--phases=coverage,fuzzing",
        "--max-examples=2",
        "--seed=1",
        "--no-color",
        "--request-timeout=10",
    ]
    endless = ("events", "open_events", "poll", "open_poll", "probe_events")
    options += [f"--exclude-operation-id={name}" for name in endless]
    async with described() as server:
        process = await looking(server, *options, is_quiet=True)
        said, _ = await asyncio.wait_for(process.communicate(), 50.0)
    assert process.returncode == 0, said.decode()
