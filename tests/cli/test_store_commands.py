"""Every command that reads a store, on PostgreSQL: its output, its exit code, and no password in either."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest

from midstream.cli import COMMANDS
from midstream.local_keys import headers_for
from tests.cli.conftest import Run
from tests.cli.processes import WAIT_S, Serving
from tests.fault.stored import use_postgres
from tests.postgres_engine import Engine

pytestmark = pytest.mark.fault
PASSWORD = "not-shown"
WITHOUT_STORE = {"access", "chat", "conformance", "demo", "login", "resume", "token"}
"""Commands that use a server, or need no store."""
SERVING = {"acp", "gateway", "serve"}


def _send_message(server: Serving, session: str, words: str) -> None:
    keys = {"x-idempotency-key": "k", "x-idempotent-encryption-key": "s" * 43, **headers_for(server.url)}
    payload = {"type": "send", "parts": [{"type": "text", "text": words}]}
    frame = {"type": "command", "seqno": 0, "payload": payload}
    path = f"{server.url}/v1/sessions/{session}"
    answer = httpx2.post(f"{path}/commands", json=frame, headers=keys, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    events = f"{path}/events?after=0-0"
    with httpx2.stream("GET", events, headers=headers_for(server.url), timeout=WAIT_S) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: ") and json.loads(line[6:])["type"] in {"turn_ended", "question_asked"}:
                return


def _check(run: Run, words: tuple[str, ...], code: int, expected: str) -> None:
    done = run(*words)
    output = done.stdout + done.stderr
    assert (done.exit_code, expected in output) == (code, True), (words, output)
    assert PASSWORD not in output, words


def test_every_command_works_with_the_url_of_a_database(engine: Engine, tmp_path: Path, run: Run) -> None:
    url = use_postgres(tmp_path, engine).replace("postgres@", f"postgres:{PASSWORD}@")
    copy = str(tmp_path / "copy.db")
    with Serving(tmp_path, store=url) as server:
        _send_message(server, "b", "look")
        _send_message(server, "c", "ask")
        rows: list[tuple[tuple[str, ...], int, str]] = [
            (("sessions", "list", "--store", url), 0, "look"),
            (("sessions", "show", "b", "--store", url), 0, "nothing in the harbour"),
            (("sessions", "questions", "--store", url), 0, "Which one?"),
            (("sessions", "export", "b", "--store", url), 0, "epoch_started"),
            (("cache", "b", "--store", url), 0, "1 turn"),
            (("verify", url), 0, "unchained"),
            (("pool", "ls", "--store", url), 0, ""),
            (("nodes", "--store", url), 0, "serve tested"),
            (("gateway", "--store", url, "usage"), 0, "There is no usage"),
            (("doctor", url), 0, "1 history"),
            (("doctor", "--json", url), 0, '"format": "midstream"'),
            (("doctor", "--fix", url), 2, "midstream store copy"),
            (("backup", copy, "--store", url), 2, "pg_dump"),
            (("store", "migrate", url), 0, "up to date"),
            (("store", "copy", url, copy), 0, "the same as in the source"),
            (("doctor", copy), 0, ""),
            (("restore", copy, "--store", url), 2, "the tools of its database"),
            (("sessions", "delete", "b", "--yes", "--store", url), 4, "use its server with --url"),
        ]
        for words, code, expected in rows:
            _check(run, words, code, expected)
        server.terminate()
        _check(run, ("sessions", "delete", "b", "--yes", "--store", url), 0, "1 session deleted")
        assert {words[0] for words, *_ in rows} | WITHOUT_STORE | SERVING == {*COMMANDS}
