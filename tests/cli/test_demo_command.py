"""The demo as users run it: a process that ends with the table, and fails if it proves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from midstream.cli.terminal import width_of
from midstream.demo.check import journal_of
from tests.cli.on_terminal import Terminal
from tests.cli.processes import WAIT_S, run

WELL = "Nothing lost, nothing shown twice, nothing run twice."


@pytest.mark.slow
def test_the_scripted_demo_proves_its_claims(tmp_path: Path) -> None:
    done = run("demo", "--model", "scripted", "--once", "--keep", tmp_path / "kept")
    assert (done.returncode, done.stderr) == (0, "")
    assert WELL in done.stdout
    assert "✂ 1 connection reset" in done.stdout
    assert "☠ SIGKILL" in done.stdout
    assert max(width_of(line) for line in done.stdout.splitlines() if "/" not in line) <= 80
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["write_note", "(turn", "2)", "1", "0", "unknown", "0"] in rows
    assert ["write_note", "(turn", "3)", "1", "1", "ok", "0"] in rows
    (characters,) = [row for row in rows if row[:1] == ["characters"]]
    assert characters[1] == characters[2]
    assert characters[3:] == ["0", "0"]
    assert (tmp_path / "kept" / "notes" / "keeper.txt").read_text().startswith("Mary Quinn")
    assert run("sessions", "list", "--store", tmp_path / "kept" / "sessions.db").stdout.count("\t3\t") == 1


@pytest.mark.slow
def test_the_server_keeps_running_until_ctrl_c(tmp_path: Path) -> None:
    terminal = Terminal(["demo", "--model", "scripted", "--keep", str(tmp_path)], {"TERM": "xterm"})
    terminal.until("The server is still running: ")
    terminal.until("Ctrl-C stops it.")
    address = terminal.text.partition("still running: ")[2].split()[0]
    page, _, session = address.partition("&open=")
    with urllib.request.urlopen(page, timeout=60) as answer:
        assert answer.status == 200
    assert len(journal_of(tmp_path / "sessions.db", session)) > 50
    terminal.press("\x03")
    assert terminal.read_to_end().code == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(page, timeout=60)


@pytest.mark.slow
def test_json_goes_to_stdout_and_the_story_to_stderr(tmp_path: Path) -> None:
    done = run("demo", "--model", "scripted", "--once", "--json", "--keep", tmp_path)
    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"]) == (0, [])
    assert found["verdict"]["words"]["lost"] == 0
    assert found["timings"]["restart_to_words"] > 0
    assert WELL in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_receives_a_signal_leaves_no_server_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    terminal = Terminal(["demo", "--model", "scripted", "--keep", str(tmp_path)], {"TERM": "xterm"})
    _send_signal(terminal, number)


@pytest.mark.slow
def test_a_demo_in_the_background_of_a_shell_also_leaves_none(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a process that starts now inherits it
    try:
        terminal = Terminal(["demo", "--model", "scripted", "--keep", str(tmp_path)], {"TERM": "xterm"})
    finally:
        signal.signal(signal.SIGINT, before)
    _send_signal(terminal, signal.SIGTERM)


@pytest.mark.slow
def test_a_second_signal_does_not_interrupt_the_stop_of_the_server(tmp_path: Path) -> None:
    terminal = Terminal(["demo", "--model", "scripted", "--keep", str(tmp_path)], {"TERM": "xterm"})
    _send_signal(terminal, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM)


def _send_signal(terminal: Terminal, *numbers: signal.Signals) -> None:
    terminal.until("A conversation.")
    pid = int(terminal.text.partition("server, process ")[2].partition(",")[0])
    for number in numbers:
        terminal.process.send_signal(number)
    assert terminal.read_to_end().code == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_taken_port_is_reported_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("demo", "--model", "scripted", "--once", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr == (
        f"midstream: another program listens on port {port}: choose another --port (0 takes a free one). [port_taken]\n"
    )


def test_without_its_wheels_the_local_model_is_replaced_with_a_notice(tmp_path: Path) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import importlib.util as util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'xllamacpp' else found(name, package)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "midstream", "demo", "--once", "--port", str(port)],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert "The local model is not installed" in done.stderr
    assert "[port_taken]" in done.stderr
