"""Attacks by a program that can write the files of a running server's store, or its folder, and not its memory."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest

from midstream.engine.forwarding import encode_command
from midstream.local_keys import headers_for
from midstream.session.calls import Choice
from midstream.session.references import CallRef
from midstream.session.turn.commands import Answer, ModelStreamed
from tests.cli.processes import WAIT_S, Serving, run
from tests.server.serving import Json, command
from tests.spec import spec

SESSION = "(select id from session where name = '{}')"


def send(server: Serving, session: str, words: str, *, until: str) -> None:
    """Send a message, and read events until a record of this kind comes."""
    address = f"{server.url}/v1/sessions/{session}/commands"
    sent = httpx2.post(address, json=command(words=words), headers=keys(server, session), timeout=WAIT_S)
    assert sent.status_code == 200, sent.text
    follow(server, session, until=until)


def keys(server: Serving, session: str) -> dict[str, str]:
    shown = {"x-idempotency-key": f"key-of-{session}", "x-idempotent-encryption-key": "s" * 43}
    return {**shown, **headers_for(server.url)}


def follow(server: Serving, session: str, *, until: str) -> None:
    """Read the events of a stream from its beginning until a record of this kind comes."""
    address = f"{server.url}/v1/sessions/{session}/events"
    with httpx2.stream("GET", address, headers=keys(server, session), timeout=WAIT_S) as events:
        assert any(f'"type":"{until}"' in line for line in events.iter_lines())


def get(server: Serving, path: str) -> httpx2.Response:
    return httpx2.get(f"{server.url}{path}", headers=headers_for(server.url), timeout=WAIT_S)


def open_question(server: Serving, session: str) -> Json:
    [found] = get(server, f"/v1/questions?session={session}").json()["questions"]
    asked: Json = found
    return asked


@contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=WAIT_S)) as connection:
        yield connection


def wait_until_decided(path: Path, number: int) -> None:
    """Wait until the server has answered or removed a row of its inbox."""
    ends_at = time.monotonic() + WAIT_S
    with database(path) as db:
        while time.monotonic() < ends_at:
            row = db.execute("select answer from inbox where number = ?", (number,)).fetchone()
            if row is None or row[0] is not None:
                return
            threading.Event().wait(0.01)
    pytest.fail("the row of the inbox was not decided")


def insert_command(path: Path, session: str, body: bytes) -> int:
    with database(path) as db:
        (node,) = db.execute("select node from session where name = ?", (session,)).fetchone()
        row = (session, node, body)
        found = db.execute("insert into inbox (session, sender, body) values (?, ?, ?) returning number", row)
        (number,) = found.fetchone()
        return int(number)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as serving:
        yield serving


def ledger_of(server: Serving) -> Path:
    return server.store.with_name("ledger")


@spec("SEC-48", "SEC-49")
def test_a_row_in_the_inbox_of_a_running_server_approves_nothing(server: Serving) -> None:
    send(server, "a", "pay", until="question_asked")
    asked = open_question(server, "a")
    ref = CallRef(asked["turn"], asked["response"], asked["call_id"])
    approval = Answer(ref, asked["digest"], Choice.ALLOW)
    wait_until_decided(server.store, insert_command(server.store, "a", encode_command(approval)))
    assert open_question(server, "a") == asked
    assert not ledger_of(server).exists()


@spec("SEC-49")
def test_a_row_that_cannot_be_decoded_costs_itself(server: Serving) -> None:
    send(server, "a", "pay", until="question_asked")
    deep = b'{"said":{"kind":"Answer","command":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    internal = b'{"said":{"kind":"%b","command":{}}}' % ModelStreamed.__name__.encode()
    rows = [insert_command(server.store, "a", body) for body in (deep, internal, b"", deep)]
    for number in rows:
        wait_until_decided(server.store, number)
    answered = run("sessions", "answer", "a", "allow", "--url", server.url)
    assert answered.returncode == 0, answered.stderr
    follow(server, "a", until="turn_ended")


@spec("SEC-43")
def test_a_record_in_the_journal_of_a_stopped_server_approves_nothing(tmp_path: Path) -> None:
    with Serving(tmp_path) as server:
        send(server, "a", "pay", until="question_asked")
        send(server, "b", "pay", until="question_asked")
        answered = run("sessions", "answer", "b", "allow", "--url", server.url)
        assert answered.returncode == 0, answered.stderr
        follow(server, "b", until="turn_ended")
        server.terminate()
    paid = ledger_of(server).read_text()
    a, b = SESSION.format("a"), SESSION.format("b")
    with database(server.store) as db:
        db.execute(
            f"""
            insert into record (session_id, position, epoch, body)
            select {a}, (select max(position) + 1 from record where session_id = {a}),
                (select epoch from session where name = 'a'), body
            from record where session_id = {b} and cast(body as text) like '%"question_answered"%'
            """
        )
        assert db.execute("select changes()").fetchone() == (1,)
        db.execute("update session set is_live = 1, node = null where name = 'a'")
    with Serving(tmp_path) as server:
        refused = get(server, "/v1/sessions/a")
        assert (refused.status_code, refused.json()["code"]) == (500, "store_damaged")
        assert get(server, "/v1/sessions/b").status_code == 200
        assert {line["id"] for line in get(server, "/v1/sessions").json()["sessions"]} == {"a", "b"}
        send(server, "c", "hi", until="turn_ended")
    assert ledger_of(server).read_text() == paid
    found = run("verify", str(server.store))
    assert (found.returncode, "a: damaged" in found.stdout) == (6, True), found


@spec("SEC-40")
@pytest.mark.slow
def test_a_start_without_the_key_file_writes_nothing_into_an_encrypted_store(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    with Serving(tmp_path, options=("--key-file", str(keys))) as server:
        send(server, "a", "hi", until="turn_ended")
        server.terminate()
    before = server.store.read_bytes()
    arguments = ("serve", "told:agent", "--port", "0", "--store", str(server.store))
    refused = run(*arguments, cwd=tmp_path)
    assert refused.returncode != 0
    assert "--key-file" in refused.stderr
    assert server.store.read_bytes() == before
    with Serving(tmp_path, options=("--key-file", str(keys))) as server:
        assert [line["title"] for line in get(server, "/v1/sessions").json()["sessions"]] == ["hi"]


@spec("SEC-55", "SEC-56")
@pytest.mark.slow
def test_links_and_pipes_beside_the_store_are_refused_at_once(tmp_path: Path) -> None:
    with Serving(tmp_path) as server:
        send(server, "a", "hi", until="turn_ended")
        server.terminate()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    arguments = ("serve", "told:agent", "--port", "0", "--store", str(server.store))
    for name in ("sessions.db-wal", "sessions.db-shm", "sessions.db.nodes", "sessions.db.store-key"):
        place = tmp_path / name
        kept = tmp_path / "kept"
        if place.exists():
            place.rename(kept)
        for make in (place.symlink_to, lambda _victim, place=place: os.mkfifo(place)):
            make(victim)
            refused = run(*arguments, cwd=tmp_path)
            assert (refused.returncode, name in refused.stderr) == (2, True), (name, refused.stderr)
            place.unlink()
        if kept.exists():
            kept.rename(place)
    assert victim.read_text() == "precious"
    with Serving(tmp_path) as server:
        assert get(server, "/v1/sessions/a").status_code == 200
