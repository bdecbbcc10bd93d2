"""Actions on sessions from a script: list open questions, answer, resume, cancel, withdraw."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from midstream.local_keys import headers_for
from tests.cli.conftest import Run
from tests.cli.on_terminal import OnTerminal
from tests.cli.processes import Serving
from tests.server.serving import Json, command
from tests.spec import spec


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as serving:
        yield serving


def keys(server: Serving, key: str) -> dict[str, str]:
    return {"x-idempotency-key": key, "x-idempotent-encryption-key": "s" * 43, **headers_for(server.url)}


def send_message(server: Serving, session: str, words: str, *, until: str, key: str = "k1") -> None:
    """Send a message and read the events until a record of this kind arrives."""
    url = f"{server.url}/v1/sessions/{session}/commands"
    sent = httpx2.post(url, json=command(words=words), headers=keys(server, key), timeout=60)
    assert sent.status_code == 200
    follow(server, session, until=until, key=key)


def follow(server: Serving, session: str, *, until: str, key: str = "k1") -> None:
    """Read the events of a stream from its start until a record of this kind arrives."""
    url = f"{server.url}/v1/sessions/{session}/events"
    with httpx2.stream("GET", url, headers=keys(server, key), timeout=60) as events:
        assert any(f'"type":"{until}"' in line for line in events.iter_lines())


def lines(output: str) -> list[Json]:
    return [json.loads(line) for line in output.splitlines()]


def test_open_questions_are_the_same_from_the_server_and_from_the_store(run: Run, server: Serving) -> None:
    nothing = run("sessions", "questions", "--url", server.url)
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert nothing.stderr == "There are no open questions.\n"
    send_message(server, "a", "pay", until="question_asked")
    send_message(server, "b", "delegate", until="question_asked")
    asked = lines(run("sessions", "questions", "--url", server.url, "--json").stdout)
    assert [(each["session"], each["name"], each["arguments"]) for each in asked] == [
        ("a", "pay", '{"sum": 3}'),
        ("b::1.1.0", "pay", '{"sum": 7}'),
    ]
    assert lines(run("sessions", "questions", "--store", server.store, "--json").stdout) == asked
    of_one = run("sessions", "questions", "b", "--url", server.url)
    assert of_one.stdout == 'b::1.1.0\tc1\tapproval\tpay\t{"sum": 7}\t\n'


def test_on_a_terminal_a_question_has_the_command_that_answers_it(
    on_terminal: OnTerminal, server: Serving
) -> None:
    send_message(server, "a", "pay", until="question_asked")
    seen = on_terminal("sessions", "questions", "--store", server.store).text
    assert "? pay  may this run?" in seen
    assert "allow or deny: midstream sessions answer a CHOICE --call c1" in seen


@spec("SEC-71")
def test_on_a_terminal_a_call_is_shown_whole_before_it_is_allowed(
    on_terminal: OnTerminal, server: Serving
) -> None:
    send_message(server, "a", "pay much", until="question_asked")
    answer = ("sessions", "answer", "a", "allow", "--url", server.url)
    refused = on_terminal(*answer, answers={"Answer: allow? [y/N]: ": "n\n"})
    assert (refused.code, "and more" in refused.text.replace("\n         ", "")) == (130, True)
    allowed = on_terminal(*answer, answers={"Answer: allow? [y/N]: ": "y\n"})
    assert (allowed.code, "Answered: pay: allow." in allowed.text) == (0, True)


def test_an_answer_is_accepted_once(run: Run, server: Serving) -> None:
    send_message(server, "a", "pay", until="question_asked")
    wrong = run("sessions", "answer", "a", "respond", "--text", "yes", "--url", server.url)
    assert (wrong.exit_code, "[answer_mismatch]" in wrong.stderr) == (4, True)
    other = run("sessions", "answer", "a", "allow", "--digest", "00", "--url", server.url)
    assert (other.exit_code, "[answer_mismatch]" in other.stderr) == (4, True)
    done = run("sessions", "answer", "a", "allow", "--arguments", '{"sum": 1}', "--json", "--url", server.url)
    assert (done.exit_code, lines(done.stdout)) == (
        0,
        [{"session": "a", "call_id": "c1", "choice": "allow"}],
    )
    again = run("sessions", "answer", "a", "deny", "--url", server.url)
    assert (again.exit_code, "no question is open" in again.stderr) == (4, True)
    follow(server, "a", until="call_ended")
    assert (server.store.parent / "ledger").read_text() == "1\n"


def test_sessions_of_sub_agents_are_listed_and_completed_only_on_demand(run: Run, server: Serving) -> None:
    send_message(server, "boss-1", "delegate", until="question_asked")
    listed = [run("sessions", "list", *more, "--store", server.store).stdout for more in ([], ["--all"])]
    names = [[row.split("\t")[0] for row in rows.splitlines()] for rows in listed]
    assert names == [["boss-1"], ["boss-1::1.1.0", "boss-1"]]
    shown = [
        run("sessions", "show", name, "--store", server.store).stdout for name in ("-", "boss", "boss-1::")
    ]
    assert [each.partition(":")[0] for each in shown] == 3 * ["boss-1"]
    assert [each.startswith("boss-1::1.1.0:") for each in shown] == [False, False, True]


def test_a_sub_agents_question_is_answered_through_the_parent_session(run: Run, server: Serving) -> None:
    send_message(server, "b", "delegate", until="question_asked")
    done = run("sessions", "answer", "b", "allow", "--json", "--url", server.url)
    assert lines(done.stdout) == [{"session": "b::1.1.0", "call_id": "c1", "choice": "allow"}]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["answer", "a", "respond"], 2, "give --text"),
        (["answer", "a", "perhaps"], 2, "'perhaps' is not one of"),
        (["answer", "a", "allow", "--call", "c9"], 4, "no question about call 'c9' is open"),
        (["answer", "nowhere", "allow"], 3, "[session_not_found]"),
        (["resume", "a"], 0, "a turn runs"),
        (
            ["resume", "a", "--turn", "7"],
            4,
            "turn 7 does not run in session 'a'; nothing was changed. [conflict]",
        ),
        (["cancel", "nowhere"], 3, "[session_not_found]"),
        (
            ["cancel", "a", "--turn", "7"],
            4,
            "turn 7 does not run in session 'a'; nothing was changed. [conflict]",
        ),
        (
            ["withdraw", "a", "--number", "7"],
            4,
            "message 7 is not queued in session 'a'; nothing was changed.",
        ),
    ],
)
def test_an_error_is_reported_in_one_line(
    run: Run, server: Serving, arguments: list[str], code: int, words: str
) -> None:
    send_message(server, "a", "pay", until="question_asked")
    done = run("sessions", *arguments, "--url", server.url)
    assert (done.exit_code, words in done.stderr, done.stdout) == (code, True, "")


def test_a_waiting_message_is_withdrawn_and_the_turn_cancelled(run: Run, server: Serving) -> None:
    send_message(server, "a", "pay", until="question_asked")
    send_message(server, "a", "look", until="message_queued", key="k2")
    back = run("sessions", "withdraw", "a", "--number", "1", "--json", "--url", server.url)
    (result,) = lines(back.stdout)
    assert (result["session"], result["is_running"]) == ("a", True)
    stopped = run("sessions", "cancel", "a", "--turn", "1", "--json", "--url", server.url)
    assert [result["is_running"] for result in lines(stopped.stdout)] == [False]
    for late in (["withdraw", "a", "--number", "1"], ["cancel", "a", "--turn", "1"]):
        again = run("sessions", *late, "--url", server.url)
        assert (again.exit_code, "nothing was changed" in again.stderr, again.stdout) == (4, True, "")
    shown = run("sessions", "show", "a", "--store", server.store).stdout
    assert "~ message 1 was withdrawn" in shown
    assert "You said" not in shown


def test_a_failed_turn_is_resumed(run: Run, server: Serving) -> None:
    send_message(server, "a", "fail once", until="turn_ended")
    done = run("sessions", "resume", "a", "--url", server.url)
    assert (done.exit_code, done.stdout) == (0, "")
    events_of_a = f"{server.url}/v1/sessions/a/events?after=0-0"
    with httpx2.stream("GET", events_of_a, headers=headers_for(server.url), timeout=60) as events:
        assert any('"status":"completed"' in line for line in events.iter_lines())
    again = run("sessions", "resume", "a", "--turn", "1", "--url", server.url)
    assert (again.exit_code, "[nothing_to_resume]" in again.stderr) == (4, True)
