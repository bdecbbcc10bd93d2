"""The shared parts of the commands that listen."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from midstream.cli.gateway import gateway
from midstream.cli.listening import (
    COLLECT_AFTER,
    FILES_MAX,
    address_options,
    log_to_stderr,
    loop_factory,
    raise_file_limit,
    report_options,
    tune_garbage_collector,
)
from midstream.cli.serve import serve
from midstream.observability.debug_output import NETWORK_LOGGER, NETWORK_VARIABLE
from tests.cli.processes import APP, WAIT_S
from tests.forked import Forked
from tests.spec import spec


def options_of(command: click.Command) -> dict[str | None, dict[str, object]]:
    """Return the options by name, without their variables, which contain the name of the command."""
    return {each.name: {**each.to_info_dict(), "envvar": None} for each in command.params}


def test_serve_and_gateway_have_the_same_options_to_listen() -> None:
    ours, theirs = options_of(serve), options_of(gateway)
    shared = {
        "host",
        "allowed_hosts",
        "allows_plain_text",
        "tls_cert",
        "tls_key",
        "log_format",
        "log_level",
        "is_json",
        "connections_max",
        "connections_per_address_max",
        "connections_reserved",
        "held_kib_max",
        "held_kib_per_address_max",
    }
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert (ours["port"]["default"], theirs["port"]["default"]) == (8000, 8100)


def test_an_address_has_its_own_port_and_no_host_names_by_default() -> None:
    @click.command()
    @address_options(port=81)
    @report_options
    def listen(**options: object) -> None:
        click.echo(sorted(options.items()))

    assert CliRunner().invoke(listen, []).output == (
        "[('allowed_hosts', ()), ('allows_plain_text', False), ('connections_max', 8192), "
        "('connections_per_address_max', 256), ('connections_reserved', 32), ('held_kib_max', 32768), "
        "('held_kib_per_address_max', 1024), ('host', '127.0.0.1'), ('is_json', False), ('log_format', 'text'), "
        "('log_level', 'warning'), ('port', 81), ('tls_cert', None), ('tls_key', None)]\n"
    )
    wrong = CliRunner().invoke(listen, ["--port", "70000"])
    assert (wrong.exit_code, "0<=x<=65535" in wrong.output) == (2, True)


def test_a_log_line_has_its_session_and_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr("warning", "text")
    log = logging.getLogger("midstream.test")
    log.info("quiet")
    log.warning("it stalled\x1b[2J", extra={"session": "s1"})
    line = capsys.readouterr().err
    assert "quiet" not in line
    assert line.endswith("WARNING midstream.test: it stalled [session s1]\n")


def test_no_log_level_writes_content_or_addresses_with_their_query(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    monkeypatch.delenv(NETWORK_VARIABLE, raising=False)
    log_to_stderr("debug", "json")
    network = logging.getLogger(NETWORK_LOGGER)
    network.debug("a prompt")
    logging.getLogger("httpx2").info("HTTP Request: POST https://tools.example/mcp?key=secret")
    logging.getLogger("mcp.client.streamable_http").debug("arguments")
    logging.getLogger("openai._base_client").debug("Request options: a prompt")
    assert capsys.readouterr().err == ""
    logging.getLogger("httpx2").warning("loud")
    logging.getLogger("agent_of_the_user").debug("own")
    monkeypatch.setenv(NETWORK_VARIABLE, "1")
    network.debug("wanted")
    lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["loud", "own", "wanted"]


def test_the_garbage_collector_of_a_server_runs_less_often_and_skips_earlier_objects() -> None:
    before = gc.get_threshold()
    try:
        tune_garbage_collector()
        assert (gc.get_threshold(), gc.get_freeze_count() > 0) == (COLLECT_AFTER, True)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


class CyclicObject:
    """An object like a session with reference cycles: it lives for a while and has a hundred parts."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        self.parts = [[number] for number in range(100)]
        CyclicObject.alive += 1

    def __del__(self) -> None:
        CyclicObject.alive -= 1


@pytest.mark.slow
def test_uncollected_objects_of_a_server_are_limited() -> None:
    before, most = gc.get_threshold(), 0
    awake: deque[CyclicObject] = deque(maxlen=1_000)
    try:
        tune_garbage_collector()
        for _ in range(8_000):
            awake.append(CyclicObject())
            most = max(most, CyclicObject.alive)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
    assert most < 6_000  # 490,000 of their objects, besides the live ones


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limit")
def test_a_server_raises_the_limit_of_open_files() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        raise_file_limit()
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert allowed == (FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_faster_event_loop_is_used_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert type(runner.get_loop()).__module__ == "uvloop"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory() is None


@contextlib.contextmanager
def _listening(command: list[str], folder: Path) -> Iterator[int]:
    """Start a server; yield its port."""
    process = Forked("midstream", "--home", folder, *command, cwd=folder)
    try:
        assert process.stdout is not None
        yield int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def _answer_of(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as peer:
        peer.sendall(request)
        return peer.recv(64)


@spec("SEC-83")
@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_the_limits_of_connections_are_options(command: str, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(APP)
    (tmp_path / "gateway.toml").write_text(
        "connections-max = 2\nconnections-reserved = 1\nheld-kib-max = 1\n"
    )
    flags = ["--connections-max", "2", "--connections-reserved", "1", "--held-kib-max", "1"]
    start = {
        "serve": ["serve", "told:agent", "--json", "--port", "0", *flags],
        "gateway": ["gateway", "--upstream", "scripted", "--json", "--port", "0", "--config", "gateway.toml"],
    }
    with _listening(start[command], tmp_path) as port:
        assert _answer_of(port, b"GET / HTTP/1.1\r\nx-slow: " + b"x" * 2048).startswith(b"HTTP/1.1 503 ")
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
                slow.sendall(b"GET / HTTP/1.1\r\n")
            assert _answer_of(port, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").startswith(
                b"HTTP/1.1 503 "
            )
