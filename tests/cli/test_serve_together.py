"""Two `midstream serve` on PostgreSQL or JetStream: one is killed in mid-answer, the other one finishes it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest

from midstream.local_keys import headers_for
from tests.cli.conftest import Run
from tests.cli.processes import WAIT_S, Serving
from tests.fault.stored import use_jetstream, use_postgres
from tests.nats_engine import NatsCluster
from tests.postgres_engine import Engine

pytestmark = pytest.mark.fault


def _send_message(server: Serving, words: str) -> None:
    keys = {"x-idempotency-key": "k", "x-idempotent-encryption-key": "s" * 43, **headers_for(server.url)}
    payload = {"type": "send", "parts": [{"type": "text", "text": words}]}
    frame = {"type": "command", "seqno": 0, "payload": payload}
    answer = httpx2.post(f"{server.url}/v1/sessions/s/commands", json=frame, headers=keys, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text


@pytest.fixture(params=["postgresql", "nats"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store for several servers, with a password."""
    if request.param == "nats":
        cluster: NatsCluster = request.getfixturevalue("nats_server")
        return use_jetstream(tmp_path, cluster).replace("nats://", "nats://user:not-shown@")
    engine: Engine = request.getfixturevalue("engine")
    return use_postgres(tmp_path, engine).replace("postgres@", "postgres:not-shown@")


def test_the_other_server_finishes_the_answer_of_a_killed_one(url: str, tmp_path: Path, run: Run) -> None:
    texts: dict[int, str] = {}
    with Serving(tmp_path, store=url) as one, Serving(tmp_path, store=url) as other:
        assert "not-shown" not in json.dumps([one.listening, other.listening])
        _send_message(one, "long")
        path = f"{other.url}/v1/sessions/s/events?after=0-0"
        with httpx2.stream("GET", path, headers=headers_for(other.url), timeout=WAIT_S) as events:
            for line in events.iter_lines():
                if not line.startswith("data: "):
                    continue
                record = json.loads(line[6:])
                if record["type"] == "attempt_started":
                    texts[record["response"]] = ""
                if record["type"] == "delta":
                    texts[record["response"]] += record["text"]
                    if "w5 " in record["text"] and one._process.poll() is None:
                        one.kill()
                if record["type"] == "turn_ended":
                    assert record["status"] == "completed"
                    break
        shown = run("sessions", "show", "s", "--store", url).stdout
    expected = "".join(f"w{number} " for number in range(100)) + "end"
    assert texts == {1: expected}
    assert "w99 end" in shown
