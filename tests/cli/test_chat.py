"""Chats from a script and on a terminal: nothing is lost or shown twice, whichever process dies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from midstream.cli import Invocation
from midstream.cli.chat import ChatSession
from midstream.cli.chats import Chats
from midstream.cli.exits import FAILURE
from midstream.cli.terminal import width_of
from midstream.client.sync import connect
from midstream.errors import StoreFullError
from midstream.local_keys import KEY_FILE
from midstream.paths import Paths, make_folder
from tests.cli.conftest import Run
from tests.cli.on_terminal import Terminal
from tests.cli.processes import WAIT_S, Serving, run
from tests.forked import Forked

LONG = "".join(f"w{number} " for number in range(100)) + "end"


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[Serving]:
    with Serving(tmp_path, port=port) as serving:
        yield serving


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Path]]:
    """One server for all tests that leave it unchanged, and the file of its key."""
    with Serving(tmp_path_factory.mktemp("shared")) as serving:
        yield serving, Paths.find().data / KEY_FILE


@pytest.fixture
def running(shared: tuple[Serving, Path], home: Path) -> Serving:
    """The shared server, with its key in the home of this test; sessions have the names of their tests."""
    serving, key = shared
    shutil.copy2(key, make_folder(Paths.find().data) / KEY_FILE)
    return serving


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"MIDSTREAM_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}


def exported(server: Serving, session: str) -> list[dict[str, Any]]:
    done = run("sessions", "export", session, "--store", server.store)
    return [json.loads(line) for line in done.stdout.splitlines()]


def start_chat(
    server: Serving,
    environment: dict[str, str],
    *options: str,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[str] = subprocess.PIPE,
) -> Forked:
    """Start a chat process."""
    variables = {**os.environ, **environment}
    return Forked("midstream", "chat", server.url, *options, stdin=stdin, stdout=stdout, env=variables)


def visible_words(text: str) -> str:
    """Return the text of a terminal as one line, without the echo of Ctrl-C."""
    return " ".join(text.replace("^C", " ").split())


# --- from a script ----------------------------------------------------------------------------------------------


def test_the_answer_goes_to_stdout_and_messages_to_stderr(
    running: Serving, environment: dict[str, str]
) -> None:
    done = run("chat", running.url, "--message", "look", environment=environment)
    assert (done.returncode, done.stdout) == (0, "I will look.\nThere is nothing there.\n")
    assert '✓ look {"where": "the harbour"} ok' in done.stderr


def test_a_transport_is_chosen_by_its_name(running: Serving, environment: dict[str, str]) -> None:
    arguments = ("--message", "look", "--transport")
    done = run("chat", running.url, *arguments, "poll", environment=environment)
    assert (done.returncode, done.stdout) == (0, "I will look.\nThere is nothing there.\n")
    assert "'auto', 'websocket', 'sse', 'poll'" in run("chat", running.url, *arguments, "pigeon").stderr


def test_stdin_is_the_message_if_it_is_not_a_terminal(running: Serving, environment: dict[str, str]) -> None:
    done = run("chat", running.url, environment=environment, typed="hello")
    assert (done.returncode, done.stdout) == (0, "You said: hello.\n")
    assert run("chat", running.url, environment=environment, typed=" \n").returncode == 2


def test_input_that_is_not_text_is_not_sent(running: Serving, environment: dict[str, str]) -> None:
    process = start_chat(running, environment, stdin=subprocess.PIPE)
    out, output = process.communicate(b"\xff\xfe", WAIT_S)
    assert (process.wait(), out) == (2, b"")
    assert b"not valid UTF-8" in output


def test_a_closed_stdout_ends_the_chat_without_a_message(
    running: Serving, environment: dict[str, str]
) -> None:
    with start_chat(running, environment, "--message", "long") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read().splitlines()[1:] == []  # the message itself is printed there
        assert process.wait(WAIT_S) == 1


def test_an_invalid_session_name_is_refused_before_anything_is_stored(
    running: Serving, environment: dict[str, str]
) -> None:
    done = run("chat", running.url, "--session", "../../x", "--message", "hello", environment=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'../../x'" in done.stderr
    assert not (Path(environment["MIDSTREAM_HOME"]) / "chats").exists()


def test_a_url_path_without_midstream_is_reported(running: Serving, environment: dict[str, str]) -> None:
    done = run("chat", f"{running.url}/nowhere", "--message", "hello", environment=environment)
    assert (done.returncode, done.stdout) == (5, "")
    assert "does not serve midstream at this path" in done.stderr


def test_the_reason_of_a_failing_connection_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = Paths(tmp_path, tmp_path)
    talk = ChatSession(Invocation(places, "never"), Chats(tmp_path), "http://nowhere", "s", is_json=False)
    full = StoreFullError("no space left")
    for is_reconnecting in (True, False, True, False):
        talk._print_connection(full, is_reconnecting=is_reconnecting)
    talk._print_connection(None, is_reconnecting=True)
    talk._print_connection(None, is_reconnecting=False)
    lines = capsys.readouterr().err.splitlines()
    assert [line.strip() for line in lines] == [
        "~ retrying: no space left [store_full]",
        "~ the connection was lost; reconnecting",
        "~ connected again",
    ]


def test_json_is_one_line_for_every_event_of_the_turn(running: Serving, environment: dict[str, str]) -> None:
    arguments = ("chat", running.url, "--json", "--message", "look", "--session", "one")
    done = run(*arguments, environment=environment)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events == exported(running, "one")[1:]  # all but the epoch, which no turn caused
    assert (done.stderr, events[-1]["record"]["type"]) == ("", "turn_ended")


def test_a_failed_turn_has_exit_code_5(running: Serving, environment: dict[str, str]) -> None:
    done = run("chat", running.url, "--message", "fail", environment=environment)
    assert (done.returncode, done.stdout) == (5, "")
    assert "no such key [model_rejected]" in done.stderr


def test_an_unreachable_server_is_reported_at_once(run: Run, server: Serving) -> None:
    server.kill()
    done = run("chat", server.url, "--message", "hello")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "[connection_lost]" in done.stderr


def test_there_is_nothing_to_resume_before_the_first_chat(run: Run, running: Serving) -> None:
    done = run("chat", running.url, "--resume")
    assert (done.exit_code, "start one without --resume" in done.stderr) == (3, True)


def test_a_chat_without_a_message_is_resumed_with_a_message(
    running: Serving, environment: dict[str, str]
) -> None:
    run("chat", running.url, "--session", "empty", environment=environment, typed=" ")
    done = run("chat", running.url, "--resume", "--message", "hello", environment=environment)
    assert (done.returncode, done.stdout) == (0, "You said: hello.\n")
    assert "session empty has no interrupted turn" in done.stderr


def test_resume_continues_in_the_last_session(running: Serving, environment: dict[str, str]) -> None:
    run("chat", running.url, "--session", "first", "--message", "one", environment=environment)
    run("chat", running.url, "--message", "two", "--resume", environment=environment)
    assert sum(each["record"]["type"] == "message_accepted" for each in exported(running, "first")) == 2


def test_the_answer_is_shown_in_a_session_that_was_deleted_or_set_back(
    running: Serving, environment: dict[str, str]
) -> None:
    mine = ("chat", running.url, "--session", "reused", "--message")
    run(*mine, "look", environment=environment)
    run("sessions", "delete", "reused", "--yes", "--url", running.url, environment=environment)
    done = run(*mine, "hello", environment=environment)  # its events have positions that were shown before
    assert (done.returncode, done.stdout) == (0, "You said: hello.\n")


@pytest.mark.slow
def test_a_resumed_chat_shows_the_rest_and_announces_an_event_that_may_appear_twice(
    server: Serving, environment: dict[str, str]
) -> None:
    with start_chat(server, environment, "--json", "--message", "long") as killed:
        assert killed.stdout is not None
        before = [killed.stdout.readline() for _ in range(20)]
        killed.kill()
        before += killed.stdout.readlines()
    done = run("chat", server.url, "--json", "--resume", environment=environment)
    after = done.stdout.splitlines()
    if (
        "that event may appear twice" in done.stderr
    ):  # killed after printing an event and before its checkpoint
        doubtful = json.loads(after[0])["id"]
        assert f"while it printed event {doubtful};" in done.stderr
        before = [line for line in before if json.loads(line)["id"] != doubtful]
    events = [json.loads(line) for line in [*before, *after]]
    assert events == exported(server, "-")[1:]
    assert "".join(each["record"].get("text", "") for each in events) == LONG


@pytest.mark.slow
def test_a_chat_continues_after_a_kill_and_restart_of_the_server(
    server: Serving, environment: dict[str, str], tmp_path: Path
) -> None:
    with start_chat(server, environment, "--json", "--message", "long") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(20)]
        server.kill()
        with Serving(tmp_path, port=server.port) as again:
            lines += process.stdout.readlines()
            assert process.wait(WAIT_S) == 0
            assert [json.loads(line) for line in lines] == exported(again, "-")[1:]


@pytest.mark.slow
@pytest.mark.parametrize("is_chat_killed", [False, True])
def test_a_file_has_the_answer_once_whichever_process_was_killed(
    server: Serving, environment: dict[str, str], tmp_path: Path, *, is_chat_killed: bool
) -> None:
    written = tmp_path / "answer.txt"
    with written.open("w") as file:
        process = start_chat(server, environment, "--session", "mine", "--message", "long", stdout=file)
    assert process.stderr is not None
    assert process.stderr.readline().split() == [b"you", b"long"]
    with connect(server.url) as client, contextlib.closing(client.follow("mine", "0-0")) as events:
        assert any("w20" in event.transcript for event in events)
    if is_chat_killed:
        process.kill()
        process.communicate(timeout=WAIT_S)
        rest = run("chat", server.url, "--session", "mine", "--resume", environment=environment)
        written.write_text(written.read_text() + rest.stdout)
        shown = run("sessions", "show", "mine", "--store", server.store, "--raw").stdout
    else:
        server.kill()
        with Serving(tmp_path, port=server.port) as again:
            assert process.communicate(timeout=WAIT_S) is not None
            shown = run("sessions", "show", "mine", "--store", again.store, "--raw").stdout
    assert written.read_text() == f"{LONG}\n"
    assert [word for word in shown.split() if word.startswith("w") and word[1:].isdecimal()] == LONG.split()[
        :-1
    ]


def kill_in_mid_answer(server: Serving, environment: dict[str, str], session: str) -> None:
    """Kill a chat that has started to show an answer."""
    with start_chat(server, environment, "--session", session, "--json", "--message", "long") as killed:
        assert killed.stdout is not None
        assert any(b'"w5' in line for line in iter(killed.stdout.readline, b""))
        killed.kill()


@pytest.mark.slow
def test_resume_finds_every_unfinished_turn_after_later_chats(
    server: Serving, environment: dict[str, str]
) -> None:
    for session in ("first", "second"):
        kill_in_mid_answer(server, environment, session)
    done = run("chat", server.url, "--message", "hello", environment=environment)
    assert done.stdout == "You said: hello.\n"
    listed = run("resume", "--url", server.url, environment=environment).stdout.splitlines()
    assert {line.split("\t")[0] for line in listed} == {"first", "second"}
    done = run("chat", server.url, "--resume", environment=environment)
    assert (done.returncode, done.stdout) == (0, f"{LONG}\n{LONG}\n")
    assert "continuing session first" in done.stderr
    done = run("chat", server.url, "--resume", environment=environment)
    assert (done.stdout, run("resume", "--url", server.url, environment=environment).stdout) == ("", "")


@pytest.mark.slow
def test_the_missed_rest_of_a_turn_is_shown_before_the_next_one_of_its_session(
    server: Serving, environment: dict[str, str]
) -> None:
    kill_in_mid_answer(server, environment, "mine")
    done = run("chat", server.url, "--session", "mine", "--message", "hello", environment=environment)
    assert (done.stdout, LONG in done.stderr) == ("You said: hello.\n", True)
    assert run("resume", "--url", server.url, environment=environment).stdout == ""


# --- on a terminal ----------------------------------------------------------------------------------------------


def test_a_chat_on_a_terminal_lasts_until_ctrl_d(running: Serving, environment: dict[str, str]) -> None:
    terminal = Terminal(["chat", running.url, "--session", "talk"], environment)
    terminal.until("you    ")
    terminal.press("hello\n")
    terminal.until("agent  You said: hello.")
    terminal.until("you    ")
    terminal.press("look\n")
    terminal.until("✓ look")
    terminal.until("agent  There is nothing there.")
    terminal.until("you    ")
    terminal.press("\x04")
    assert terminal.read_to_end().code == 0


def test_help_fits_80_columns_and_sends_nothing_to_the_agent(
    server: Serving, environment: dict[str, str]
) -> None:
    terminal = Terminal(["chat", server.url, "--session", "a-session-of-mine"], environment)
    terminal.until("you    ")
    assert "Ctrl-C detaches from a running turn" in terminal.text
    terminal.press("/help\n")
    terminal.until("--session a-session-of-mine --resume")
    terminal.until("you    ")
    assert [line for line in terminal.text.splitlines() if width_of(line) > 80] == []
    terminal.press("/quit\n")
    assert terminal.read_to_end().code == 0
    assert run("sessions", "list", "--store", server.store).stdout == ""


def test_an_error_ends_the_turn_and_not_the_chat(running: Serving, environment: dict[str, str]) -> None:
    terminal = Terminal(["chat", running.url], environment)
    terminal.until("you    ")
    terminal.press("fail\n")
    terminal.until("turn 1 failed: no such key [model_rejected]")
    terminal.until("you    ")
    terminal.press("hello\n")
    terminal.until("You said: hello.")
    terminal.until("you    ")
    terminal.press("\x03")
    terminal.press("\n")  # a Ctrl-C just before Python's `input` waits is handled with the next key
    assert terminal.read_to_end().code == 130


@pytest.mark.slow
def test_one_ctrl_c_detaches_and_resume_shows_the_rest(running: Serving, environment: dict[str, str]) -> None:
    terminal = Terminal(["chat", running.url, "--session", "once", "--message", "long"], environment)
    terminal.until("w5 ")
    terminal.press("\x03")
    first = terminal.read_to_end()
    assert first.code == 130
    assert f"To resume: midstream chat {running.url} --session once --resume" in visible_words(first.text)
    assert "w99" not in first.text

    terminal = Terminal(["chat", running.url, "--session", "once", "--resume"], environment)
    terminal.until("end")
    terminal.until("you    ")
    terminal.press("\x04")
    second = terminal.read_to_end()
    shown = [word for word in visible_words(first.text + second.text).split() if word[1:].isdecimal()]
    assert [word for word in shown if word.startswith("w")] == LONG.split()[:-1]
    assert [each["record"]["status"] for each in exported(running, "once")[-1:]] == ["completed"]


def test_two_ctrl_c_cancel_the_turn(running: Serving, environment: dict[str, str]) -> None:
    terminal = Terminal(["chat", running.url, "--session", "twice", "--message", "long"], environment)
    terminal.until("w5 ")
    terminal.press("\x03")
    terminal.until("stops it")
    terminal.press("\x03")
    seen = terminal.read_to_end()
    assert (seen.code, "turn 1 cancelled" in seen.text) == (130, True)
    assert exported(running, "twice")[-1]["record"]["status"] == "cancelled"


def test_for_scripts_the_first_ctrl_c_can_cancel_the_turn(
    running: Serving, environment: dict[str, str]
) -> None:
    arguments = ["chat", running.url, "--session", "scripted", "--message", "long", "--cancel-on-interrupt"]
    terminal = Terminal(arguments, environment)
    terminal.until("w5 ")
    terminal.press("\x03")
    assert terminal.read_to_end().code == 130
    assert exported(running, "scripted")[-1]["record"]["status"] == "cancelled"


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["unopened", "undecided"])
@pytest.mark.parametrize("transport", ["websocket", "sse", "poll"])
def test_a_defect_of_the_server_ends_the_chat_with_one_error(
    tmp_path: Path, environment: dict[str, str], agent: str, transport: str
) -> None:
    with Serving(tmp_path, agent=agent) as serving:
        arguments = ("chat", serving.url, "--message", "hi", "--transport", transport)
        done = run(*arguments, environment=environment)
    assert done.returncode == FAILURE
    assert done.stderr.count("[internal]") == 1
    assert "Traceback" not in done.stderr
