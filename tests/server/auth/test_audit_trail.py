"""Which requests are written down, as which event, and what is refused where they cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from midstream.server.api.route_table import OPERATIONS
from midstream.server.audit_log import AuditLog
from midstream.server.auth.audit_trail import event_of
from midstream.store.memory import MemoryStore
from tests.server.people import ADA, guarded_app, say, told
from tests.server.serving import called
from tests.spec import spec

NOT_WRITTEN = {"health", "ready", "openapi", "me", "challenge", "probe_events", "probe_poll", "probe_chunks"}


@spec("SEC-24")
def test_every_operation_is_an_event_or_no_act() -> None:
    found = {
        each.name: event_of(
            {"type": "http", "method": each.method},
            each.path.format(session_id="s1", digest="d", reader="r", credential="c"),
        )
        for each in OPERATIONS
    }
    assert {name for name, event in found.items() if not event} == NOT_WRITTEN
    assert {found["delete"], found["answer"], found["viewer"], found["records"]} == {
        "delete",
        "answer",
        "share",
        "read",
    }


def test_a_poll_is_written_once_for_its_connection() -> None:
    scope = {"type": "http", "method": "GET", "query_string": b"wait=1&n=0"}
    path = "/v1/sessions/s1/poll"
    assert event_of(scope, path) == "read"
    assert event_of({**scope, "query_string": b"n=7"}, path) == ""


@spec("SEC-24")
@pytest.mark.skipif(os.name != "posix", reason="a folder without write permission")
async def test_nothing_is_done_that_cannot_be_written_down(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    app = guarded_app(store=MemoryStore(), audit=log)
    async with called(app) as client:
        assert (await say(client, "s1", ADA)).status_code == 200
        path.unlink()
        path.mkdir()
        assert told(await client.delete("/v1/sessions/s1", headers=ADA)) == (503, "unavailable")
        assert told(await say(client, "s2", ADA)) == (503, "unavailable")
        path.rmdir()
        assert (await client.get("/v1/sessions/s1", headers=ADA)).status_code == 200
        assert told(await client.get("/v1/sessions/s2", headers=ADA)) == (404, "session_not_found")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["outcome"]) for line in lines] == [
        ("read", "admitted"),
        ("read", "session_not_found"),
    ]
