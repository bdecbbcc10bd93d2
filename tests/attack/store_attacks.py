"""Attacks by a program that can write the files of a server's store, or its folder, and cannot read its memory."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

from midstream.engine.forwarding import encode_command
from midstream.session.call_references import CallRef
from midstream.session.calls import Choice
from midstream.session.turn.commands import Answer, ModelStreamed
from tests.attack.attack import attack
from tests.attack.ground import WAIT_S, Ground, Target
from tests.cli.processes import APP
from tests.spec import spec

SESSION = "(select id from session where name = '{}')"
ADA, ROOT = "the-token-of-ada-1", "the-token-of-root-1"


class Store:
    """A store in a ground's folder, and the servers of an agent that pays into a ledger."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.path = ground.folder / "sessions.db"
        self.ledger = ground.folder / "ledger"
        (ground.folder / "told.py").write_text(APP)

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("serve", "told:agent", "--store", str(self.path), "--port", "0", "--no-auth")

    def serving(self, *options: str) -> AbstractContextManager[Target]:
        return self.ground.start(*self.arguments, *options)

    @contextmanager
    def database(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=WAIT_S)) as connection:
            yield connection

    def insert_command(self, session: str, body: bytes) -> None:
        """Insert a row into the inbox, and wait until the server has answered or removed it."""
        with self.database() as db:
            (node,) = db.execute("select node from session where name = ?", (session,)).fetchone()
            added = "insert into inbox (session, sender, body) values (?, ?, ?) returning number"
            (number,) = db.execute(added, (session, node, body)).fetchone()
            ends_at = time.monotonic() + WAIT_S
            while time.monotonic() < ends_at:
                row = db.execute("select answer from inbox where number = ?", (number,)).fetchone()
                if row is None or row[0] is not None:
                    return
                threading.Event().wait(0.01)
        raise AssertionError("the row of the inbox was not decided")


def wait_for(target: Target, session: str, kind: str) -> None:
    """Wait until a journal has a record of this kind."""
    ends_at = time.monotonic() + WAIT_S
    while time.monotonic() < ends_at:
        answer = target.ask("GET", f"/v1/sessions/{session}/records")
        if f'"type":"{kind}"'.encode() in answer.body:
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"no {kind} in {session}: {answer.body!r}")


def open_question(target: Target, session: str) -> dict[str, Any]:
    [found] = target.ask("GET", f"/v1/questions?session={session}").json["questions"]
    asked: dict[str, Any] = found
    return asked


def allow(target: Target, session: str) -> None:
    asked = open_question(target, session)
    names = ("turn", "response", "call_id", "digest")
    body = {"type": "answer", "choice": "allow", **{name: asked[name] for name in names}}
    answer = target.ask("POST", f"/v1/sessions/{session}/answer", body)
    assert answer.status < 300, answer.body
    wait_for(target, session, "turn_ended")


@spec("SEC-48", "SEC-49")
@attack(quick=True)
def attack_a_row_in_the_inbox_approves_nothing_and_loses_only_itself(ground: Ground) -> None:
    store = Store(ground)
    with store.serving() as target:
        assert target.send_message("a", "pay").status == 200
        wait_for(target, "a", "question_asked")
        asked = open_question(target, "a")
        ref = CallRef(asked["turn"], asked["response"], asked["call_id"])
        approval = encode_command(Answer(ref, asked["digest"], Choice.ALLOW))
        internal = b'{"command":{"kind":"%b","command":{}}}' % ModelStreamed.__name__.encode()
        deep = b'{"command":{"kind":"Answer","command":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
        for body in (approval, internal, deep, b"", deep):
            store.insert_command("a", body)
        assert open_question(target, "a") == asked
        assert not store.ledger.exists()
        allow(target, "a")
        assert store.ledger.read_text() == "3\n"


@spec("SEC-43", "SEC-46")
@attack()
def attack_a_record_in_the_journal_of_a_stopped_server_approves_nothing(ground: Ground) -> None:
    store = Store(ground)
    with store.serving() as target:
        for session in ("a", "b"):
            assert target.send_message(session, "pay", key=session).status == 200
            wait_for(target, session, "question_asked")
        allow(target, "b")
    a, b = SESSION.format("a"), SESSION.format("b")
    with store.database() as db:
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
    with store.serving() as target:
        refused = target.ask("GET", "/v1/sessions/a")
        assert (refused.status, refused.code) == (500, "store_damaged")
        assert target.ask("GET", "/v1/sessions/b").status == 200
        assert {line["id"] for line in target.ask("GET", "/v1/sessions").json["sessions"]} == {"a", "b"}
        assert target.send_message("c").status == 200
        wait_for(target, "c", "turn_ended")
    assert store.ledger.read_text() == "3\n"
    found = ground.run("verify", store.path)
    assert (found.returncode, "a: damaged" in found.stdout) == (6, True), found


@spec("SEC-50")
@attack(quick=True)
def attack_a_used_login_link_that_is_restored_logs_no_one_in(ground: Ground) -> None:
    tokens = ground.write_secret("tokens", f"{ADA} ada\n")
    with ground.serving("--token-file", tokens) as target:
        word = target.ask("POST", "/v1/login-links", token=ADA, x_midstream="1").json["token"]
        store = Store(ground)
        with store.database() as db:
            rows = db.execute("select namespace, key, version, body, at from key_value").fetchall()
        assert target.ask("POST", "/v1/login", {"login": word}).status == 200
        assert target.ask("POST", "/v1/login", {"login": word}).status == 401
        with store.database() as db:
            for namespace, key, version, body, at in rows:
                row = (namespace, key, version + 7, body, at)
                db.execute("insert into key_value values (?, ?, ?, ?, ?) on conflict do nothing", row)
        assert target.ask("POST", "/v1/login", {"login": word}).status in (401, 500)


@spec("SEC-40", "SEC-42")
@attack()
def attack_a_start_without_the_key_file_writes_nothing_into_an_encrypted_store(ground: Ground) -> None:
    store, keys = Store(ground), str(ground.folder / "keys")
    with store.serving("--key-file", keys) as target:
        assert target.send_message("a").status == 200
        wait_for(target, "a", "turn_ended")
    before = store.path.read_bytes()
    refused = ground.run(*store.arguments)
    assert refused.returncode != 0
    assert "--key-file" in refused.stderr, refused.stderr
    assert store.path.read_bytes() == before
    with store.serving("--key-file", keys) as target:
        assert [line["title"] for line in target.ask("GET", "/v1/sessions").json["sessions"]] == ["hi"]


@spec("SEC-55", "SEC-56")
@attack()
@spec("SEC-2", "SEC-6", "SEC-42")
def attack_damaged_access_rows_allow_nothing_and_lose_only_themselves(ground: Ground) -> None:
    """Damages credentials, revocations and owners in the database of a running server."""
    tokens = ground.write_secret("tokens", f"{ADA} ada\n{ROOT} root *\n")
    store = Store(ground)
    with ground.serving("--token-file", tokens) as target:
        for session in ("s1", "s2"):
            assert target.send_message(session, authorization=f"Bearer {ADA}").status == 200
        revoked, kept = [target.ask("POST", "/v1/login", {}, token=ADA).cookie for _ in range(2)]
        assert target.ask("DELETE", "/v1/access?principal=ada", token=ROOT).json["count"] == 2
        with store.database() as db:
            for namespace in ("access-revoked", "access-tenancy"):
                db.execute("update key_value set body = x'7b7d' where namespace = ?", (namespace,))
            db.execute("update key_value set at = 1 where namespace = 'access-revoked'")
            db.execute("update key_value set body = x'00' where namespace = 'access-nodes' and key = 's1'")
        for cookie in (revoked, kept):
            assert target.ask("GET", "/v1/sessions", cookie=cookie).status == 401
        assert [each["id"] for each in target.ask("GET", "/v1/sessions", token=ADA).json["sessions"]] == [
            "s2"
        ]
        assert target.ask("GET", "/v1/sessions/s1", token=ADA).status == 404
        assert len(target.ask("GET", "/v1/sessions", token=ROOT).json["sessions"]) == 2
        assert target.ask("POST", "/v1/login", {}, token=ADA).status == 200
        for path in ("/v1/access?principal=ada", "/v1/access?principal=*"):
            assert target.ask("DELETE", path, token=ROOT).status == 200
        cookie = target.ask("POST", "/v1/login", {}, token=ADA).cookie
        assert target.ask("GET", "/v1/sessions/s2", cookie=cookie).status == 200


@attack()
def attack_links_and_pipes_beside_the_store_are_refused_at_once(ground: Ground) -> None:
    store = Store(ground)
    with store.serving() as target:
        assert target.send_message("a").status == 200
        wait_for(target, "a", "turn_ended")
    victim = ground.folder / "victim"
    victim.write_text("precious")
    for name, is_link in (
        ("sessions.db-wal", True),
        ("sessions.db-wal", False),
        ("sessions.db-shm", True),
        ("sessions.db.nodes", True),
        ("sessions.db.store-key", False),
    ):
        place, kept = ground.folder / name, ground.folder / "kept"
        if place.exists():
            place.rename(kept)
        if is_link:
            place.symlink_to(victim)
        else:
            os.mkfifo(place)
        refused = ground.run(*store.arguments)
        assert (refused.returncode, name in refused.stderr) == (2, True), (name, refused.stderr)
        place.unlink()
        if kept.exists():
            kept.rename(place)
    assert victim.read_text() == "precious"
    with store.serving() as target:
        assert target.ask("GET", "/v1/sessions/a").status == 200
