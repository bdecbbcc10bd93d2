"""The description of the HTTP interface: complete, true, and tried by somebody who knows nothing else."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest
from starlette.routing import Route

from midstream.server.openapi import OPERATIONS, description
from midstream.testing.models import text
from tests.house.source import ROOT
from tests.server.serving import KEYS, chunk, make_app, served

CONFIGURATION = Path(__file__).parent / "schemathesis.toml"
SCHEMATHESIS = ROOT / ".venv" / "schemathesis" / "bin" / "schemathesis"
NOT_OF_PROGRAMS = {"/"}
"""The page; WebSockets are no part of OpenAPI."""


def test_every_route_is_described_and_every_description_has_a_route() -> None:
    routes = {
        (method, route.path)
        for route in make_app()._router.routes
        if isinstance(route, Route) and route.path not in NOT_OF_PROGRAMS
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert {(each.method, each.path) for each in OPERATIONS} == routes


def test_every_reference_within_it_leads_somewhere() -> None:
    told = json.dumps(description())
    names = set(description()["components"]["schemas"])
    assert {each.partition('"')[0] for each in told.split("#/components/schemas/")[1:]} <= names


async def test_it_is_served() -> None:
    async with served(make_app()) as server:
        answer = await server.http.get("/v1/openapi.json")
    assert (answer.status_code, answer.json()) == (200, json.loads(json.dumps(description())))


@pytest.mark.skipif(
    not SCHEMATHESIS.exists(), reason="schemathesis is not installed (make .venv/.schemathesis)"
)
async def test_who_knows_only_the_description_finds_nothing_wrong() -> None:
    """`make api-search` looks longer."""
    async with served(make_app([text("ready")] * 1000)) as server:
        await server.http.post("/v1/sessions/s1/chunks", json=chunk(), headers=KEYS)
        options = ["--phases", "fuzzing", "--max-examples", "4", "--seed", "1", "--no-color"]
        # What has no end, or takes its time, is no answer to it; the others are.
        for name in ("events", "open_events", "poll", "open_poll", "probe_events"):
            options += ["--exclude-operation-id", name]
        options += ["--request-timeout", "5"]
        looking = await asyncio.create_subprocess_exec(
            SCHEMATHESIS,
            f"--config-file={CONFIGURATION}",
            "run",
            f"{server.url}/v1/openapi.json",
            *options,
            stdout=PIPE,
            stderr=STDOUT,
        )
        said, _ = await asyncio.wait_for(looking.communicate(), 50.0)
    assert looking.returncode == 0, said.decode()
