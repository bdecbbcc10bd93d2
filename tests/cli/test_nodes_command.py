"""`midstream nodes`, and limits that hold for all servers of a store together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from midstream.cli.nodes_command import HEADINGS, _table
from midstream.environment import World
from midstream.local_keys import headers_for
from midstream.store.node_reports import NodeLine
from tests.cli.conftest import Run
from tests.cli.processes import WAIT_S, Serving
from tests.fault.stored import use_postgres
from tests.search import with_long

pytestmark = pytest.mark.fault
ALICE, OPERATOR = "alice-token-of-43-characters", "operator-token-of-43-characters"
STALE_S = 2.5
"""Age in seconds that the counts of another server may have."""


@pytest.fixture(params=with_long(["postgresql", "sqlite"], 1))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "shared.db")
    return use_postgres(tmp_path, request.getfixturevalue("engine"))


@contextmanager
def _pair(folder: Path, store: str) -> Iterator[tuple[str, str]]:
    """Run two servers with users, behind a trusted proxy; return their addresses."""
    tokens = folder / "tokens"
    tokens.write_text(f"{ALICE} alice\n{OPERATOR} operator role=operator\n")
    tokens.chmod(0o600)
    options = ["--token-file", str(tokens), "--trust-proxy", "127.0.0.1"]
    with (
        Serving(folder, options=options, store=store) as one,
        Serving(folder, options=options, store=store) as other,
    ):
        _wait_for(lambda: all(len(_nodes(each.url)) == 2 for each in (one, other)))
        yield one.url, other.url


def _nodes(url: str, token: str = OPERATOR) -> list[dict[str, Any]]:
    answer = httpx2.get(f"{url}/v1/nodes", headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["nodes"]
    return found


def _wait_for(condition: Any) -> None:  # noqa: ANN401 - any callable
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        _pause()


def _pause(seconds: float = 0.05) -> None:
    asyncio.run(World().sleep(seconds))


def test_nodes_are_listed_from_the_store_and_by_a_server(store: str, tmp_path: Path, run: Run) -> None:
    with Serving(tmp_path, options=["--workers", "2"], store=store) as server:

        def by_store() -> list[dict[str, Any]]:
            return [json.loads(line) for line in run("nodes", "--store", store, "--json").stdout.splitlines()]

        _wait_for(lambda: len(by_store()) == 2)
        assert {line["worker"] for line in by_store()} == {1, 2}
        assert {(line["state"], line["kind"], line["name"]) for line in by_store()} == {
            ("serving", "serve", "tested")
        }
        answer = httpx2.get(f"{server.url}/v1/nodes", headers=headers_for(server.url))
        assert [line["node"] for line in answer.json()["nodes"]] == [line["node"] for line in by_store()]
        shown = run("nodes", "--url", server.url).stdout.splitlines()
        assert [line.split("\t")[1] for line in shown] == ["serve tested worker 1", "serve tested worker 2"]
        keys = {"x-idempotency-key": "k", "x-idempotent-encryption-key": "s" * 43}
        frame = {
            "type": "command",
            "seqno": 0,
            "payload": {"type": "send", "parts": [{"type": "text", "text": "long"}]},
        }
        for number in range(3):
            headers = {**keys, **headers_for(server.url)}
            path = f"{server.url}/v1/sessions/s{number}/commands"
            assert httpx2.post(path, json=frame, headers=headers).status_code == 200
        _wait_for(lambda: sum(line["leases"] for line in by_store()) == 3)
        assert sum(line["turns"] for line in by_store()) >= 3
        assert server.terminate() == 0
    assert by_store() == []


def test_a_killed_server_is_silent(tmp_path: Path, run: Run) -> None:
    store = str(tmp_path / "shared.db")
    with Serving(tmp_path, store=store) as server:
        _wait_for(lambda: "serving" in run("nodes", "--store", store).stdout)
        server.kill()
    assert "serving" in run("nodes", "--store", store).stdout  # its report is not old yet


def test_wrong_credentials_are_counted_at_all_servers(store: str, tmp_path: Path) -> None:
    with _pair(tmp_path, store) as (one, other), httpx2.Client(timeout=WAIT_S) as client:
        headers = {"authorization": f"Bearer {'wrong' * 9}", "x-forwarded-for": "203.0.113.7"}

        def guess(url: str) -> int:
            return client.get(f"{url}/v1/sessions", headers=headers).status_code

        passed = [guess(one) for _ in range(15)]
        assert passed == [401] * 15
        pause_s = 0.3
        while (status := guess(other)) == 401:
            passed.append(status)
            assert len(passed) <= 15 + STALE_S / pause_s + 6, "the other server counts for itself"
            _pause(pause_s)
        assert status == 429
        # The right credential, and other addresses, are accepted by both.
        headers = {"authorization": f"Bearer {ALICE}", "x-forwarded-for": "203.0.113.8"}
        assert client.get(f"{other}/v1/sessions", headers=headers).status_code == 200


def test_streams_of_a_principal_are_counted_at_all_servers(store: str, tmp_path: Path) -> None:
    bearer = {"authorization": f"Bearer {ALICE}"}
    keys = {"x-idempotency-key": "k", "x-idempotent-encryption-key": "s" * 43, **bearer}
    frame = {
        "type": "command",
        "seqno": 0,
        "payload": {"type": "send", "parts": [{"type": "text", "text": "hi"}]},
    }
    limits = httpx2.Limits(max_connections=200)
    with (
        _pair(tmp_path, store) as (one, other),
        httpx2.Client(timeout=WAIT_S, limits=limits) as client,
        contextlib.ExitStack() as streams,
    ):
        assert client.post(f"{one}/v1/sessions/s/commands", json=frame, headers=keys).status_code == 200

        def follow(url: str) -> int:
            request = client.stream("GET", f"{url}/v1/sessions/s/events?after=0-0", headers=bearer)
            return streams.enter_context(request).status_code

        assert [follow(one) for _ in range(40)] == [200] * 40
        _wait_for(lambda: {line["streams"] for line in _nodes(one)} == {0, 40})
        _pause(STALE_S)
        statuses = [follow(other) for _ in range(11)]
        assert statuses == [200] * 10 + [429]


def test_a_narrow_terminal_shows_fewer_columns() -> None:
    line = NodeLine(
        node="node-1",
        kind="serve",
        name="agent",
        machine="machine-1",
        pid=12345,
        worker=1,
        version="0.1.0",
        state="serving",
        started_at=0.0,
        report_age_s=0.5,
        streams=1,
        sessions=2,
        leases=3,
        followed=0,
        turns=4,
        appends_waiting=5,
        loop_lag_s=0.001,
    )
    assert _table([line], 200)[0].split() == [*HEADINGS]
    for width in (120, 80, 70):
        rows = _table([line], width)
        assert max(map(len, rows)) <= width
        assert {"SERVER", "STATE", "REPORT", "SESSIONS", "LEASES", "QUEUE"} <= {*rows[0].split()}
