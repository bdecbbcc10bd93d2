"""`midstream serve` as a process: it prints its address, and errors in one line."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from midstream.local_keys import headers_for
from tests.cli.conftest import Run
from tests.cli.processes import APP, WAIT_S, Serving, run
from tests.spec import spec


def test_it_prints_its_address_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    with Serving(tmp_path) as server:
        assert server.listening["agent"] == "tested"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read())["status"] == "ok"
        connection.close()
        assert server.interrupt() == (0, "")


def test_a_taken_port_is_reported_in_one_line(tmp_path: Path) -> None:
    with Serving(tmp_path) as server:
        done = run(
            "--home", tmp_path / "other", "serve", "told:agent", "--port", str(server.port), cwd=tmp_path
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"midstream: another program listens on 127.0.0.1:{server.port}: stop it, or choose another port "
            "(0 takes a free one). [port_taken]\n"
        )


def test_a_missing_agent_is_reported_in_one_line(run: Run) -> None:
    done = run("serve", "no_such_app:agent")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "[agent_not_found]" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), "--token-file or --auth"),
        (("--host", "0.0.0.0", "--no-auth"), "serves this machine only"),
        (("--host", "0.0.0.0", "--token-file", "tokens"), "--allow-host"),
        (("--host", "0.0.0.0", "--token-file", "tokens", "--allow-host", "a"), "--allow-plain-text"),
        (("--tls-cert", "tokens"), "give --tls-cert and --tls-key"),
        (("--no-auth", "--token-file", "tokens"), "give one of them"),
        (("--token-file", "open-tokens"), "readable by other users"),
        (("--token-file", "short-tokens"), "line 1 of"),
        (("--auth", "told:agent"), "MODULE:NAME"),
        (("--allow-origin", "*"), "an origin must look like 'https://app.example'"),
        (("--allow-origin", "https://app.example/path"), "an origin must look like 'https://app.example'"),
    ],
)
def test_a_public_address_without_authentication_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    (tmp_path / "told.py").write_text(APP)
    for name, token, mode in (
        ("tokens", "a-token-of-ada-1", 0o600),
        ("open-tokens", "a-token-of-ada-1", 0o644),
        ("short-tokens", "short", 0o600),
    ):
        (tmp_path / name).write_text(f"{token} ada\n")
        (tmp_path / name).chmod(mode)
    monkeypatch.chdir(tmp_path)
    done = run("serve", "told:agent", "--port", "0", *options)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


@spec("SEC-87")
def test_pages_of_the_allowed_origins_can_use_the_server_without_cookies(tmp_path: Path) -> None:
    named = ["https://app.example", "http://localhost:5173"]
    options = ["--no-auth", *(word for origin in named for word in ("--allow-origin", origin))]
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with Serving(tmp_path, options=options) as server:
        for origin in named:
            status, headers = _request(server, "OPTIONS", {"origin": origin, **asked})
            assert (status, headers["access-control-allow-origin"]) == (204, origin)
            assert "access-control-allow-credentials" not in headers
            assert _request(server, "GET", {"origin": origin})[0] == 200
        for method in ("OPTIONS", "GET"):
            status, headers = _request(server, method, {"origin": "https://evil.example", **asked})
            assert (status, "access-control-allow-origin" in headers) == (403, False)
        assert server.interrupt()[0] == 0


def _request(server: Serving, method: str, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request(method, "/v1/sessions", headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}


def test_transport_settings_can_change_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "streams.toml"
    path.write_text("heartbeat_s = 7\n")
    with Serving(tmp_path, options=["--settings", str(path)]) as server:
        assert _welcome(server)["heartbeat_s"] == 7.0
        path.write_text("is_recovery_on = false\nheartbeat_s = 300\n")
        deadline = time.monotonic() + WAIT_S
        while not _welcome(server)["is_degraded"]:
            assert time.monotonic() < deadline
        assert _welcome(server)["heartbeat_s"] == 300.0
        assert server.interrupt()[0] == 0


def test_invalid_settings_are_refused_at_the_start(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "streams.toml"
    path.write_text("heartbeat_s = 0\n")
    done = run("serve", "told:agent", "--port", "0", "--settings", str(path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "expected 0.1 to 300 seconds" in done.stderr


def test_retention_options_are_sent_to_clients(tmp_path: Path) -> None:
    options = {
        "--keep-events-days": "1.5",
        "--keep-events-count": "2000",
        "--keep-events-mib": "0.5",
        "--keep-sessions-days": "30",
    }
    with Serving(tmp_path, options=[word for pair in options.items() for word in pair]) as server:
        assert _welcome(server)["retention"] == {
            "events_for_s": 129_600.0,
            "events_max": 2000,
            "bytes_max": 524_288,
            "sessions_for_s": 2_592_000.0,
        }
        assert server.interrupt()[0] == 0


def test_without_retention_limits_clients_receive_none(tmp_path: Path) -> None:
    names = ("--keep-events-days", "--keep-events-count", "--keep-events-mib", "--keep-sessions-days")
    with Serving(tmp_path, options=[word for name in names for word in (name, "all")]) as server:
        reported = _welcome(server)["retention"]
        assert reported == dict.fromkeys(("events_for_s", "events_max", "bytes_max", "sessions_for_s"))
        assert server.interrupt()[0] == 0


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "many", ""])
@pytest.mark.parametrize("name", ["events-days", "events-count", "events-mib", "sessions-days"])
def test_an_invalid_retention_limit_is_refused(run: Run, name: str, limit: str) -> None:
    done = run("serve", "no_such_app:agent", f"--keep-{name}", limit)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"'--keep-{name}': {limit!r} is not a limit" in done.stderr
    assert "'all'" in done.stderr


def test_the_limit_of_events_is_a_whole_number(run: Run) -> None:
    done = run("serve", "no_such_app:agent", "--keep-events-count", "1.5")
    assert "'1.5' is not a limit; give a whole number above 0, or 'all'" in done.stderr


def _welcome(server: Serving) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as connection:
        keys = {"x-idempotency-key": "k", "x-idempotent-encryption-key": "s" * 43, **headers_for(server.url)}
        connection.request("GET", "/v1/sessions/s1/poll?n=0", headers=keys)
        welcome: dict[str, Any] = json.loads(connection.getresponse().read())["frames"][0]
        return welcome


def test_it_serves_metrics(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--metrics", "--otel", "--log-format", "json"]) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/metrics", headers=headers_for(server.url))
        page = connection.getresponse().read().decode()
        connection.close()
    assert "midstream_streams 0.0" in page


def test_a_store_that_is_not_a_database_is_reported_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text(APP)
    (tmp_path / "bad.db").write_text("this is no database, but a text of some length\n" * 100)
    monkeypatch.chdir(tmp_path)
    done = run("serve", "told:agent", "--port", "0", "--store", tmp_path / "bad.db")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "[store_damaged]" in done.stderr


MCP_SERVER = """
import os, sys
from mcp.server.mcpserver import MCPServer
open(sys.argv[1], "w").write(str(os.getpid()))
server = MCPServer("tested")
server.add_tool(lambda: "", name="look")
server.run()
"""


def _ends(pid: int) -> bool:
    """Return whether a process that is not our child ends."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("end", [Serving.terminate, Serving.kill])
def test_tools_of_an_mcp_server_are_added_and_it_ends_with_the_server(
    tmp_path: Path, end: Callable[[Serving], object]
) -> None:
    (tmp_path / "tools.py").write_text(MCP_SERVER)
    command = shlex.join([sys.executable, str(tmp_path / "tools.py"), str(tmp_path / "pid")])
    with Serving(tmp_path, options=["--mcp", f"harbour={command}"]) as server:
        done = run("chat", server.url, "--message", "hello", "--json", cwd=tmp_path)
        assert '"type":"tools_changed","turn":1' in done.stdout
        assert '"added":["harbour__look"]' in done.stdout
        end(server)
    assert _ends(int((tmp_path / "pid").read_text()))


def test_a_store_can_be_given_by_a_url(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--store", "sqlite:///by-url.db"]) as server:
        assert server.listening["store"] == "sqlite:///by-url.db"
        assert run("chat", server.url, "--session", "s", typed="hello").returncode == 0
        assert server.interrupt() == (0, "")
    assert (tmp_path / "by-url.db").is_file()
    listed = run("sessions", "list", "--store", "sqlite:///by-url.db", "--json", cwd=tmp_path)
    assert '"id":"s"' in listed.stdout, listed.stderr
    refused = run("serve", "told:agent", "--store", "redis://x", cwd=tmp_path)
    assert refused.returncode == 2
    assert "unknown scheme" in refused.stderr
    assert "sqlite:" in refused.stderr


def test_sessions_are_encrypted_under_a_given_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    with Serving(tmp_path, options=["--key-file", str(keys)]) as server:
        done = run("chat", server.url, "--session", "s", typed="the word is canary-7f3a")
        assert done.returncode == 0, done.stderr
        assert server.interrupt() == (0, "")
    assert keys.stat().st_mode & 0o777 == 0o600
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("sessions.db*") if file.is_file())
    assert b"canary-7f3a" not in stored
    assert stored.startswith(b"SQLite")
    with Serving(tmp_path, options=["--key-file", str(keys)]) as server:
        token = run("token", server.url).stdout.strip()
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            connection.request("GET", "/v1/sessions/s", headers={"authorization": f"Bearer {token}"})
            assert b"canary-7f3a" in connection.getresponse().read()


def test_a_missing_key_file_is_not_created_for_an_existing_store(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text(APP)
    (tmp_path / "s.db").touch()
    monkeypatch.chdir(tmp_path)
    done = run("serve", "told:agent", "--store", "s.db", "--key-file", "keys")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "cannot be read" in done.stderr
    assert not (tmp_path / "keys").exists()
