"""What the commands that listen share."""

from __future__ import annotations

import asyncio
import logging
import sys

import click
import pytest
from click.testing import CliRunner

from midstream.cli.gateway import gateway
from midstream.cli.listening import address_options, log_to_stderr, loop_factory, telling_options
from midstream.cli.serve import serve


def options_of(command: click.Command) -> dict[str | None, dict[str, object]]:
    return {each.name: each.to_info_dict() for each in command.params}


def test_serve_and_gateway_listen_by_the_same_options() -> None:
    ours, theirs = options_of(serve), options_of(gateway)
    shared = {"host", "allowed_hosts", "log_format", "log_level", "is_json"}
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert (ours["port"]["default"], theirs["port"]["default"]) == (8000, 8100)


def test_an_address_has_a_port_of_its_own_and_no_names_unless_they_are_given() -> None:
    @click.command()
    @address_options(port=81)
    @telling_options
    def listen(**options: object) -> None:
        click.echo(sorted(options.items()))

    assert CliRunner().invoke(listen, []).output == (
        "[('allowed_hosts', ()), ('host', '127.0.0.1'), ('is_json', False), "
        "('log_format', 'text'), ('log_level', 'warning'), ('port', 81)]\n"
    )
    wrong = CliRunner().invoke(listen, ["--port", "70000"])
    assert (wrong.exit_code, "0<=x<=65535" in wrong.output) == (2, True)


def test_a_log_line_names_its_session_and_drives_no_terminal(
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


def test_the_faster_loop_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert type(runner.get_loop()).__module__ == "uvloop"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory() is None
