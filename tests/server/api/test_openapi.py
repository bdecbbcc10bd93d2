"""The description of the HTTP interface is complete and true; schemathesis searches it for faults."""

from __future__ import annotations

import asyncio
import json

import pytest

from midstream.server.api.route_table import document
from tests.server.api_search import SCHEMATHESIS, described, looking
from tests.server.serving import KEYS, command, make_app, served

SEARCH_S = 240.0
"""Seconds for thousands of requests; a quiet machine needs a tenth of them."""
DIALECTS = r"^/v1/(a2a|ag-ui|chat|langgraph|mcp|stream)\b"
"""Paths that other suites test: those of A2A, MCP and Durable Streams, and the clients of the others."""


def test_every_reference_within_the_description_resolves() -> None:
    text = json.dumps(document())
    names = set(document()["components"]["schemas"])
    assert {each.partition('"')[0] for each in text.split("#/components/schemas/")[1:]} <= names


async def test_a_frame_that_is_no_command_needs_no_stream_as_described() -> None:
    headers = {
        each["name"]: each["required"]
        for each in document()["paths"]["/v1/sessions/{session_id}/commands"]["post"]["parameters"]
        if each["in"] == "header"
    }
    async with served(make_app()) as server:
        response = await server.http.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
        asked = await server.http.post("/v1/sessions/s1/commands", json={"type": "ping"})
    assert (response.status_code, asked.status_code) == (200, 200)
    assert not any(headers.values())


async def test_the_description_is_served() -> None:
    async with served(make_app()) as server:
        answer = await server.http.get("/v1/openapi.json")
    assert (answer.status_code, answer.json()) == (200, json.loads(json.dumps(document())))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not SCHEMATHESIS.exists(), reason="schemathesis is not installed (make .venv/.schemathesis)"
)
async def test_a_search_that_has_only_the_description_finds_no_fault() -> None:
    """`make api-search` searches longer, in every phase, also the dialects and the operations without an end."""
    options = [
        "--phases=coverage",
        "--seed=1",
        "--no-color",
        "--request-timeout=60",
        f"--exclude-path-regex={DIALECTS}",
    ]
    endless = ("events", "open_events", "poll", "open_poll", "probe_events", "thread_events")
    options += [f"--exclude-operation-id={name}" for name in endless]
    async with described() as server:
        process = await looking(server, *options, is_quiet=True)
        try:
            output, _ = await asyncio.wait_for(process.communicate(), SEARCH_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, output.decode()
