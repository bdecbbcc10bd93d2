"""Attacks on credentials: after a revocation, by programs in a server's place, and by guessing."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.attack.attack import attack
from tests.attack.ground import AGENT, Ground, Target
from tests.certificates import certificate
from tests.spec import spec

ADA, BOB, ROOT = "the-token-of-ada-1", "the-token-of-bob-1", "the-token-of-root-1"
LINES = f"{ADA} ada\n{BOB} bob\n{ROOT} root *\n"
JSON = {"x_midstream": "1"}
EVENTS = "/v1/sessions/s1/events"
ENDS_S = 30.0
"""The stated bound of 10 s, and a margin for a machine under load."""


def _log_in(target: Target, token: str) -> str:
    """Return a login cookie of a principal."""
    answer = target.ask("POST", "/v1/login", {}, token=token)
    assert answer.status == 200, answer.body
    return answer.cookie


def _exchange(target: Target) -> dict[str, dict[str, str]]:
    """Return a credential of each kind that Ada's token can be exchanged for, as headers of a request."""
    assert target.send_message("s1", authorization=f"Bearer {ADA}").status == 200
    cookie = _log_in(target, ADA)
    link = target.ask("POST", "/v1/login-links", cookie=cookie, **JSON).json["token"]
    second = target.ask("POST", "/v1/login", {"login": link})
    assert second.status == 200
    viewers = [
        target.ask("POST", "/v1/sessions/s1/viewers", {}, **shown).json["token"]
        for shown in ({"authorization": f"Bearer {ADA}"}, {"cookie": cookie, **JSON})
    ]
    return {
        "a cookie": {"cookie": cookie},
        "a cookie of a cookie": {"cookie": second.cookie},
        "a viewer token": {"authorization": f"Bearer {viewers[0]}"},
        "a viewer token of a cookie": {"authorization": f"Bearer {viewers[1]}"},
    }


def _statuses(target: Target, minted: dict[str, dict[str, str]]) -> dict[str, int]:
    return {name: target.ask("GET", "/v1/sessions/s1", **shown).status for name, shown in minted.items()}


def _follow(target: Target, **headers: str) -> http.client.HTTPResponse:
    """Open an event stream and return it after its first line."""
    parts = urlsplit(target.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ENDS_S)
    connection.request(
        "GET", EVENTS, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.readline() == b"retry: 1000\n"
    return answer


def _read_to_end(stream: http.client.HTTPResponse) -> bytes:
    """Return all lines that a stream sends until it is cut."""
    seen = b""
    try:
        while line := stream.readline():
            seen += line
    except (http.client.IncompleteRead, ConnectionResetError):
        pass
    return seen


@attack(quick=True)
@spec("SEC-1", "SEC-2", "SEC-3")
def attack_a_revoked_line_ends_its_credentials(ground: Ground) -> None:
    tokens = ground.write_secret("tokens", LINES)
    with ground.serving("--token-file", tokens) as target:
        minted = _exchange(target)
        link = target.ask("POST", "/v1/login-links", token=ADA).json["token"]
        ticket = target.ask("POST", "/v1/sessions/s1/tickets", {}, token=ADA).json["token"]
        assert set(_statuses(target, minted).values()) == {200}
        ground.write_secret("tokens", LINES.replace(f"{ADA} ada\n", ""))
        assert _statuses(target, minted) == dict.fromkeys(minted, 401)
        assert target.ask("POST", "/v1/login", {"login": link}).status == 401
        assert target.ask("GET", f"{EVENTS}?ticket={ticket}").status == 401
        assert target.ask("GET", "/v1/sessions", token=ADA).status == 401
        assert target.ask("GET", "/v1/sessions", token=BOB).status == 200
    # A restart does not restore them, nor does the line with another right.
    ground.write_secret("tokens", LINES.replace(f"{ADA} ada\n", f"{ADA} ada scope=read\n"))
    with ground.serving("--token-file", tokens) as target:
        assert _statuses(target, minted) == dict.fromkeys(minted, 401)


@attack()
@spec("SEC-3", "SEC-6")
def attack_live_streams_end_within_the_bound(ground: Ground) -> None:
    tokens = ground.write_secret("tokens", LINES)
    with ground.serving("--token-file", tokens) as target:
        minted = _exchange(target)
        streams = [_follow(target, x_midstream="1", **shown) for shown in minted.values()]
        streams.append(_follow(target, authorization=f"Bearer {ADA}"))
        ground.write_secret("tokens", LINES.replace(f"{ADA} ada\n", ""))
        for stream in streams:
            assert b'"unauthorized"' in _read_to_end(stream)


@attack()
@spec("SEC-6")
def attack_a_revocation_holds_in_all_processes_of_a_store(ground: Ground) -> None:
    tokens = ground.write_secret("tokens", LINES)
    with ground.serving("--token-file", tokens) as first, ground.serving("--token-file", tokens) as second:
        # Browsers mix up the ports of a host, so the name of a cookie contains the port.
        ports = [target.url.rpartition(":")[2] for target in (first, second)]
        minted = {
            name: {
                key: value.replace(f"midstream-{ports[0]}", f"midstream-{ports[1]}")
                for key, value in shown.items()
            }
            for name, shown in _exchange(first).items()
        }
        assert set(_statuses(second, minted).values()) == {200}
        streams = [_follow(second, x_midstream="1", **shown) for shown in minted.values()]
        assert first.ask("DELETE", "/v1/access?principal=ada", token=ROOT).json["count"] == len(minted)
        assert _statuses(second, minted) == dict.fromkeys(minted, 401)
        for stream in streams:
            assert b'"unauthorized"' in _read_to_end(stream)
        assert second.ask("GET", "/v1/sessions/s1", token=ADA).status == 200  # the line is still there


@attack(quick=True)
@spec("SEC-5", "SEC-8")
def attack_a_logout_ends_the_credentials_of_the_cookie(ground: Ground) -> None:
    tokens = ground.write_secret("tokens", LINES)
    with ground.serving("--token-file", tokens) as target:
        minted = _exchange(target)
        # Another user neither sees nor revokes them.
        assert target.ask("GET", "/v1/access", token=BOB).json["credentials"] == []
        rows = target.ask("GET", "/v1/access", token=ADA).json["credentials"]
        assert len(rows) == len(minted)
        assert target.ask("DELETE", f"/v1/access/{rows[0]['id']}", token=BOB).status == 404
        assert target.ask("DELETE", "/v1/access?principal=ada", token=BOB).status == 403
        assert target.ask("DELETE", "/v1/access?principal=*", token=ADA).status == 403
        assert target.ask("POST", "/v1/logout", **minted["a cookie"], **JSON).status == 204
        expected = {name: 200 if name == "a viewer token" else 401 for name in minted}
        assert _statuses(target, minted) == expected


@attack()
@spec("SEC-4", "SEC-11")
def attack_a_new_key_and_a_restart_end_earlier_credentials(ground: Ground) -> None:
    with ground.serving() as target:
        port = int(target.url.rpartition(":")[2])
        token = ground.run("token", target.url).stdout.strip()
        assert target.ask("GET", "/v1/sessions", token=token).status == 200
        cookie = _log_in(target, token)
    with ground.serving(port=port) as target:
        assert target.ask("GET", "/v1/sessions", token=token).status == 401, "the token of an earlier start"
        assert target.ask("GET", "/v1/sessions", cookie=cookie).status == 200
    (ground.home / "server-key").unlink()
    with ground.serving(port=port) as target:
        assert target.ask("GET", "/v1/sessions", cookie=cookie).status == 401


class Impostor:
    """A program that listens on a port and records all that it receives.


    Args:
        forwards_to: A server to which it forwards everything, or None: then it answers as a server without
            keys.
    """

    def __init__(self, forwards_to: str | None = None) -> None:
        self.received = b""
        self._forwards_to = forwards_to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(ENDS_S)

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(ENDS_S)
        request = connection.recv(65536)
        head, _, body = request.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head.decode("latin-1").split("\r\n")[1:])
        while len(body) < int(fields.get("content-length", "0")):
            body += connection.recv(65536)
        self.received += head + b"\r\n\r\n" + body
        if self._forwards_to is None:
            answer = b'{"sessions":[],"next":null,"token":"login-x","status":"ok"}'
            connection.sendall(
                b"HTTP/1.1 404 Not Found\r\n" if b"/v1/challenge" in head else b"HTTP/1.1 200 OK\r\n"
            )
            connection.sendall(b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(answer), answer))
            return
        parts = urlsplit(self._forwards_to)
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=ENDS_S) as behind:
            behind.sendall(head.replace(self.url[7:].encode(), parts.netloc.encode()) + b"\r\n\r\n" + body)
            while piece := behind.recv(65536):
                connection.sendall(piece)


@contextmanager
def _impostor(forwards_to: str | None = None) -> Iterator[Impostor]:
    impostor = Impostor(forwards_to)
    try:
        yield impostor
    finally:
        impostor.close()


@attack()
@spec("SEC-10")
def attack_a_program_in_the_servers_place_receives_no_token(ground: Ground) -> None:
    with ground.serving() as target:
        for forwards_to in (None, target.url):
            with _impostor(forwards_to) as impostor:
                for command in (("token",), ("login",), ("sessions", "list", "--url")):
                    ground.run(*command, impostor.url)
                assert b"/v1/challenge" in impostor.received
                assert b"authorization" not in impostor.received.lower()
                if forwards_to is not None:  # a proof for another address: no request is sent
                    assert impostor.received.count(b"HTTP/1.1") == impostor.received.count(b"/v1/challenge")
        assert "the-token" not in ground.run("token", target.url).stderr


@attack()
@spec("SEC-13")
def attack_a_token_of_one_origin_is_not_sent_to_another(ground: Ground) -> None:
    with _impostor() as impostor:
        for value, url in (
            (f"https://agents.example {ROOT}", ""),
            (f"http://127.0.0.1:1 {ROOT}", ""),
            (ROOT, "https://agents.example"),
        ):
            ground.run("sessions", "list", "--url", impostor.url, MIDSTREAM_TOKEN=value, MIDSTREAM_URL=url)
        bare = ground.run("sessions", "list", "--url", impostor.url, MIDSTREAM_TOKEN=ROOT)
        assert (bare.returncode, "MIDSTREAM_TOKEN='https://agents.example TOKEN'" in bare.stderr) == (2, True)
        assert ROOT.encode() not in impostor.received
        ground.run("sessions", "list", "--url", impostor.url, MIDSTREAM_TOKEN=f"{impostor.url} {ROOT}")
        assert ROOT.encode() in impostor.received


def _gateway(*options: str | Path) -> tuple[str | Path, ...]:
    return ("gateway", "--upstream", "scripted", "--port", "0", *options)


@attack()
@spec("SEC-14", "SEC-15", "SEC-16", "SEC-17")
def attack_a_gateways_key_can_be_neither_guessed_nor_read(ground: Ground) -> None:
    short = ground.write_secret("short", "short\n")
    refused = {
        ("--token", "x" * 15): "fewer than 16 characters",
        ("--token-file", str(short)): "fewer than 16 characters",
        ("--token", "x" * 16, "--host", "0.0.0.0", "--allow-host", "a", "--allow-plain-text"): "--token-file",
    }
    for options, words in refused.items():
        done = ground.run(*_gateway(*options))
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    with ground.start(*_gateway()) as target:
        key = Path(target.ready["key_file"]).read_text().strip()
        assert key not in json.dumps(target.ready)
        wrong = [target.ask("GET", "/v1/models", token=f"guess-{n}") for n in range(60)]
        assert {answer.status for answer in wrong} == {401, 429}
        assert [answer.status for answer in wrong[40:]] == 20 * [429]
        assert int(wrong[-1].headers["retry-after"]) >= 1
        assert target.ask("GET", "/v1/models", token=key).status == 200
        assert key not in target.stop()
    Path(target.ready["key_file"]).chmod(0o644)
    done = ground.run(*_gateway())
    assert (done.returncode, "chmod 600" in done.stderr) == (2, True)


@attack()
@spec("SEC-16")
def attack_no_secret_is_on_a_command_line_or_in_an_agents_environment(ground: Ground) -> None:
    key, keys_token = "the-key-of-the-gateway", "the-token-of-the-keys"
    shown = ground.folder / "shown"
    agent = ground.folder / "agent"
    agent.write_text(f"#!/bin/sh\nenv >> {shown}\ncat /proc/$$/cmdline >> {shown}\nexit 1\n")
    agent.chmod(0o755)
    options = ("gateway", "--upstream", "claude", "--agent-path", agent, "--port", "0")
    secrets = {"MIDSTREAM_GATEWAY_TOKEN": key, "MIDSTREAM_KEY_TOKEN": keys_token}
    with ground.start(*options, **secrets, NEEDED="by the agent") as target:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        assert target.ask("POST", "/v1/chat/completions", body, token=key).status >= 400
        lines = [
            (place / "cmdline").read_bytes()
            for place in Path("/proc").iterdir()
            if place.name.isdigit() and _is_below(int(place.name), target.process.pid)
        ]
    assert len(lines) >= 1
    seen = b"".join(lines) + shown.read_bytes()
    assert b"NEEDED=by the agent" in seen
    assert key.encode() not in seen
    assert keys_token.encode() not in seen


def _is_below(pid: int, root: int) -> bool:
    """Return whether a process is another one or its descendant."""
    while pid not in (0, root):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == root


@attack()
@spec("SEC-27")
def attack_one_person_cannot_give_both_of_two_approvals(ground: Ground) -> None:
    """Neither twice, nor with a login or a viewer token of the same person, nor for a tool of their own client."""
    tokens = ground.write_secret("tokens", LINES)
    spec = {"name": "pay", "description": "Pay.", "parameters": {"type": "object"}}
    tool = {"spec": spec, "needs_approval": True, "approvers": 2}
    payload = {"type": "send", "parts": [{"type": "text", "text": "pay"}], "tools": [tool]}
    keys = {"x_idempotency_key": "k1", "x_idempotent_encryption_key": "s" * 43}
    (ground.folder / "target.py").write_text(AGENT.replace(", tools=[pay]", ""))
    with ground.serving("--token-file", tokens) as target:
        frame = {"type": "command", "seqno": 0, "payload": payload}
        assert target.ask("POST", "/v1/sessions/s1/commands", frame, token=ADA, **keys).status == 200
        cookie = _log_in(target, ADA)
        viewer = target.ask("POST", "/v1/sessions/s1/viewers", {}, token=ADA).json["token"]
        answers: list[int] = []
        for shown in (
            {"authorization": f"Bearer {ADA}"},
            {"authorization": f"Bearer {ADA}"},
            {"cookie": cookie, **JSON},
            {"authorization": f"Bearer {viewer}"},
            {"authorization": f"Bearer {BOB}"},
        ):
            question = _pending(target, ADA)
            place = {name: question[name] for name in ("turn", "response", "call_id", "digest")}
            body = {"type": "answer", "choice": "allow", "by": "bob", **place}
            answers.append(target.ask("POST", "/v1/sessions/s1/answer", body, **shown).status)
        assert answers == [202, 409, 409, 403, 404]
        records = target.ask("GET", "/v1/sessions/s1/records", token=ROOT).body
        assert b'"type":"call_started"' not in records
        question = _pending(target, ROOT)
        assert json.dumps([question["approvers"], question["approved_by"]]) == '[2, ["ada"]]'


@attack()
@spec("SEC-18", "SEC-17")
def attack_a_link_changes_no_login_without_a_question(ground: Ground) -> None:
    tokens = ground.write_secret("tokens", LINES)
    with ground.serving("--token-file", tokens) as target:
        victim = _log_in(target, ADA)
        link = target.ask("POST", "/v1/login-links", token=BOB).json["token"]
        asked = target.ask("POST", "/v1/login", {"login": link}, cookie=victim)
        assert (asked.status, asked.code, asked.cookie) == (409, "other_login", "")
        assert target.ask("GET", "/v1/me", cookie=victim).json["id"] == "ada"
        meant = target.ask("POST", "/v1/login", {"login": link, "replace": True}, cookie=victim)
        assert meant.json["id"] == "bob"
        assert target.ask("GET", "/v1/me", cookie=victim).status == 401, "the former login has ended"
    with ground.serving() as target:
        assert "login" not in target.ready["page"]
        assert "login=" not in target.stop()


@attack()
@spec("SEC-19", "SEC-20", "SEC-21", "SEC-22")
def attack_a_credential_stays_within_its_scope(ground: Ground) -> None:
    tokens = ground.folder / "tokens"

    def add(*options: str) -> str:
        done = ground.run("access", "add", tokens, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    owner, reader, one, sending, approver = (
        add("ada", "--comment", "her laptop"),
        add("ada", "--scope", "read"),
        add("ada", "--sessions", "a-*"),
        add("ada", "--scope", "send"),
        add("eve", "--role", "approver", "--days", "1"),
    )
    text = tokens.read_text()
    assert not any(token in text for token in (owner, reader, one, approver))
    with ground.serving("--token-file", tokens) as target:
        assert target.send_message("s1", "pay", authorization=f"Bearer {owner}").status == 200
        assert target.ask("GET", "/v1/sessions/s1", token=reader).status == 200
        assert target.ask("POST", "/v1/sessions/s1/cancel", token=reader).status == 403
        assert target.ask("DELETE", "/v1/sessions/s1", token=reader).status == 403
        assert target.ask("GET", "/v1/sessions/s1", token=one).status == 404
        assert target.send_message("b-1", authorization=f"Bearer {one}").status == 404
        assert target.send_message("a-1", authorization=f"Bearer {one}").status == 200
        for scoped in (reader, one):
            for method in ("GET", "DELETE"):
                assert target.ask(method, "/v1/access", token=scoped).status == 403
        speaker = target.ask("GET", "/v1/sessions", token=sending)
        assert (speaker.status, speaker.json["sessions"]) == (200, [])
        cookie = _log_in(target, reader)  # credentials issued for it have its scope
        assert target.ask("POST", "/v1/sessions/s1/cancel", cookie=cookie, **JSON).status == 403
        assert target.send_message("s1", "else", key="k2", authorization=f"Bearer {approver}").status == 403
        assert target.ask("DELETE", "/v1/sessions/s1", token=approver).status == 403
        assert target.ask("GET", "/v1/sessions/s1", token=approver).status == 200
    tokens.write_text(f"{ADA} ada acme\n{BOB} bob\n")
    done = ground.run("serve", "target:agent", "--port", "0", "--token-file", tokens)
    assert (done.returncode, "give every principal a tenant, or none" in done.stderr) == (2, True)


def _pending(target: Target, token: str) -> dict[str, str]:
    """Return the open question once it is there."""
    for _ in range(600):
        found: list[dict[str, str]] = target.ask("GET", "/v1/questions", token=token).json["questions"]
        if found:
            return found[0]
    raise AssertionError("no question")


@attack(quick=True)
@spec("SEC-23", "SEC-24")
def attack_the_audit_log_has_every_act(ground: Ground) -> None:
    tokens, log = ground.write_secret("tokens", LINES), ground.folder / "audit.jsonl"
    with ground.serving("--token-file", tokens, "--audit-log", log) as target:
        assert target.send_message("s1", "pay", authorization=f"Bearer {ADA}").status == 200
        question = _pending(target, ADA)
        answer = {name: question[name] for name in ("turn", "response", "call_id", "digest")}
        body = {"type": "answer", "choice": "allow", **answer}
        assert target.ask("POST", "/v1/sessions/s1/answer", body, token=BOB).status == 404
        assert target.ask("POST", "/v1/sessions/s1/answer", body, token=ADA).status == 202
        assert target.ask("PUT", "/v1/sessions/s1/readers/bob", token=ADA).status == 200
        records = target.ask("GET", "/v1/sessions/s1/records", token=BOB).body.splitlines()
        answered = [json.loads(line)["record"] for line in records if b"question_answered" in line]
        assert [each["by"] for each in answered] == ["ada"]
        assert target.ask("DELETE", "/v1/access", token=ADA).status == 200
        assert target.ask("GET", "/v1/sessions", token="a-guess-of-eve-1234").status == 401
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    acts = [(line["event"], line["outcome"], line["principal"], line.get("session", "")) for line in lines]
    for expected in (
        ("send", "admitted", "ada", "s1"),
        ("answer", "session_not_found", "bob", "s1"),
        ("answer", "admitted", "ada", "s1"),
        ("share", "admitted", "ada", "s1"),
        ("read", "admitted", "bob", "s1"),
        ("revoke", "admitted", "ada", ""),
        ("list", "unauthorized", "", ""),
    ):
        assert expected in acts, expected
    assert not any(token in log.read_text() for token in (ADA, BOB, ROOT))
    assert log.stat().st_mode & 0o777 == 0o600


@attack()
@spec("SEC-26")
def attack_nothing_is_sent_in_plain_text_by_mistake(ground: Ground) -> None:
    tokens = ground.write_secret("tokens", LINES)
    options = ("serve", "target:agent", "--port", "0", "--host", "0.0.0.0", "--token-file", tokens)
    done = ground.run(*options, "--allow-host", "agents.example")
    assert (done.returncode, "--tls-cert" in done.stderr, "--allow-plain-text" in done.stderr) == (
        2,
        True,
        True,
    )


@attack()
@spec("SEC-26")
def attack_a_server_with_a_certificate_accepts_no_plain_text(ground: Ground) -> None:
    tokens = ground.write_secret("tokens", LINES)
    pem = certificate(ground.folder / "server.pem")
    done = ground.run("serve", "target:agent", "--port", "0", "--tls-cert", pem, "--tls-key", pem)
    assert (done.returncode, "chmod 600" in done.stderr) == (2, True)
    pem.chmod(0o600)
    with ground.serving("--token-file", tokens, "--tls-cert", pem, "--tls-key", pem) as target:
        assert target.url.startswith("https://127.0.0.1:")
        parts = urlsplit(target.url)
        trusted = ssl.create_default_context(cafile=pem)
        connection = http.client.HTTPSConnection("127.0.0.1", parts.port, timeout=ENDS_S, context=trusted)
        connection.request("POST", "/v1/login", "{}", {"authorization": f"Bearer {ADA}"})
        answer = connection.getresponse()
        cookie = answer.headers["set-cookie"]
        assert (answer.status, cookie.startswith("__Host-midstream="), "Secure" in cookie) == (
            200,
            True,
            True,
        )
        connection.close()
        plain = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=ENDS_S)
        plain.request("GET", "/v1/sessions", headers={"authorization": f"Bearer {ADA}"})
        try:
            plain.getresponse()
        except (http.client.HTTPException, OSError):
            plain.close()
        else:
            raise AssertionError("an answer in plain text")
        listed = ground.run(
            *("sessions", "list", "--url", target.url),
            MIDSTREAM_TOKEN=f"{target.url} {ADA}",
            SSL_CERT_FILE=str(pem),
        )
        assert (listed.returncode, "There are no sessions" in listed.stderr) == (0, True), listed.stderr
