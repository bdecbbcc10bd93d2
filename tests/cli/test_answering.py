"""Questions at the terminal, and their announcement where there is no terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.cli.answering import LOOK_AGAIN_S, Answering
from midstream.cli.keyboard import Keyboard
from midstream.cli.screen import Screen
from midstream.cli.terminal import PLAIN
from midstream.client import Event
from midstream.errors import ConnectionLostError
from midstream.session.calls import CHOICES, Choice, QuestionKind
from midstream.session.questions import Question
from midstream.session.records import CloseReason, QuestionAsked, QuestionClosed
from midstream.testing.fake_worlds import FakeWorld
from tests.cli.on_terminal import Terminal
from tests.cli.processes import Serving, run
from tests.cli.test_chat import visible_words
from tests.spec import spec


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as serving:
        yield serving


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"MIDSTREAM_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}


def payments(server: Serving) -> list[str]:
    ledger = server.store.parent / "ledger"
    return ledger.read_text().split() if ledger.exists() else []


def start_chat(server: Serving, environment: dict[str, str], words: str) -> Terminal:
    arguments = ["chat", server.url, "--session", "mine", "--message", words]
    return Terminal(arguments, environment)


def test_an_approval_is_given_in_the_chat(server: Serving, environment: dict[str, str]) -> None:
    terminal = start_chat(server, environment, "pay")
    terminal.until("? pay  may this run?")
    terminal.until('"sum": 3')
    terminal.until("[y]es")
    assert payments(server) == []
    terminal.press("what?\n")
    terminal.until("[y]es")
    terminal.press("y\n")
    terminal.until("~ counting")
    terminal.until("agent  I was told: paid 3")
    assert terminal.read_to_end().code == 0
    assert payments(server) == ["3"]


@spec("SEC-71")
def test_long_arguments_are_shown_to_their_end_before_they_may_run(
    server: Serving, environment: dict[str, str]
) -> None:
    terminal = start_chat(server, environment, "pay much")
    terminal.until("all of it ⟨U+202E⟩")
    terminal.until("Enter shows more")
    terminal.press("y\n")
    terminal.until("Enter shows more")
    assert payments(server) == []
    terminal.press("\n")
    terminal.until("Enter shows more")
    terminal.press("\n")
    terminal.until("[y]es")
    assert "and more" in terminal.text.replace("\n         ", "")
    terminal.press("y\n")
    assert terminal.read_to_end().code == 0
    assert payments(server) == ["3"]


def test_a_denial_has_a_reason_and_arguments_can_be_edited(
    server: Serving, environment: dict[str, str]
) -> None:
    terminal = start_chat(server, environment, "pay")
    terminal.until("[y]es")
    terminal.press("n too much\n")
    terminal.until("⊘ pay")
    seen = visible_words(terminal.read_to_end().text)
    assert "They said: too much" in seen
    assert payments(server) == []

    terminal = start_chat(server, environment, "pay")
    terminal.until("[y]es")
    terminal.press("e\n")
    terminal.until("arguments as JSON")
    terminal.press('{"sum": 2}\n')
    terminal.until('✓ pay {"sum": 2} ok')
    assert terminal.read_to_end().code == 0
    assert payments(server) == ["2"]


def test_a_question_is_answered_with_the_number_of_an_option(
    server: Serving, environment: dict[str, str]
) -> None:
    terminal = start_chat(server, environment, "ask")
    terminal.until("Which one?")
    terminal.until("2  blue")
    terminal.until("your answer >")
    terminal.press("2\n")
    terminal.until("I was told: blue")
    assert terminal.read_to_end().code == 0


def test_a_sub_agents_output_is_indented_and_its_question_is_asked(
    server: Serving, environment: dict[str, str]
) -> None:
    terminal = start_chat(server, environment, "delegate")
    terminal.until("│ I pay.")
    terminal.until("? clerk: pay  may this run?")
    terminal.until("[y]es")
    terminal.press("yes\n")
    terminal.until('│ ✓ pay {"sum": 7} ok')
    terminal.until("│ It is paid.")
    terminal.until("✓ clerk")
    terminal.until("agent  I was told: It is paid.")
    assert terminal.read_to_end().code == 0
    assert payments(server) == ["7"]


def test_an_answer_from_elsewhere_closes_the_question(server: Serving, environment: dict[str, str]) -> None:
    terminal = start_chat(server, environment, "pay")
    terminal.until("[y]es")
    done = run("sessions", "answer", "mine", "deny", "--url", server.url)
    assert (done.returncode, done.stderr) == (0, "Answered: pay: deny.\n")
    terminal.until("~ operator answered: deny")
    assert terminal.read_to_end().code == 0


def test_a_question_survives_the_terminal_and_is_asked_again(
    server: Serving, environment: dict[str, str]
) -> None:
    terminal = start_chat(server, environment, "pay")
    terminal.until("[y]es")
    terminal.press("\x03")
    assert terminal.read_to_end().code == 130
    terminal = Terminal(["resume", "mine", "--url", server.url], environment)
    terminal.until("? pay  may this run?")
    terminal.until("[y]es")
    terminal.press("y\n")
    terminal.until("I was told: paid 3")
    assert terminal.read_to_end().code == 0
    assert payments(server) == ["3"]


def test_ctrl_d_leaves_a_question_open_and_shows_how_to_answer_it(
    server: Serving, environment: dict[str, str]
) -> None:
    terminal = start_chat(server, environment, "pay")
    terminal.until("[y]es")
    terminal.press("\x04")
    terminal.until("midstream sessions answer mine")
    assert run("sessions", "answer", "mine", "allow", "--url", server.url).returncode == 0
    terminal.until("I was told: paid 3")
    assert terminal.read_to_end().code == 0


# --- cases that a working server does not show ----------------------------------------------------------------------

ASKED = Question(
    "s", 1, 1, "c1", QuestionKind.APPROVAL, "d", "pay", "{}", CHOICES[QuestionKind.APPROVAL], 5.0
)


class Flaky:
    """A client whose server is unreachable at first."""

    def __init__(self, away: int) -> None:
        self.away = away

    async def questions(self, session: str | None = None) -> tuple[Question, ...]:
        if self.away:
            self.away -= 1
            raise ConnectionLostError(f"nobody knows what {session!r} asks")
        return (ASKED,)

    async def answer(
        self,
        session: str,
        question: QuestionAsked | Question,
        choice: Choice | str,
        *,
        text: str = "",
        arguments: str | None = None,
    ) -> None:
        raise AssertionError((session, question, choice, text, arguments))


async def test_open_questions_are_requested_again_from_an_unreachable_server() -> None:
    printed: list[str] = []
    screen = Screen(printed.append, printed.append, PLAIN, 80)
    world = FakeWorld()
    answering = Answering(
        Flaky(2),
        "s",
        screen,
        printed.append,
        PLAIN,
        80,
        keyboard=None,
        url="http://x",
        world=world,
    )
    await answering.refresh()
    for _ in range(2):
        assert (printed, answering.work is not None) == ([], True)
        await world.settle()
        await world.advance(LOOK_AGAIN_S)
        await answering.go_on()
    assert [line.strip() for line in printed] == [
        "? pay  may this run?",
        "{}",
        "~ allow or deny: midstream sessions answer s CHOICE --call c1 --url http://x",
    ]
    assert answering.work is None


class Silent(Keyboard):
    """A keyboard without input."""

    def discard_input(self) -> None:
        """Do nothing: there is no input."""

    async def line(self) -> str | None:
        await asyncio.Event().wait()
        return None


async def test_a_closed_question_is_no_longer_asked() -> None:
    prompts: list[str] = []
    screen = Screen(prompts.append, prompts.append, PLAIN, 80)
    answering = Answering(
        Flaky(0), "s", screen, prompts.append, PLAIN, 80, keyboard=Silent(), url="http://x", world=FakeWorld()
    )
    await answering.refresh()
    assert answering.work is not None
    await answering.take(Event("1-9", QuestionClosed(1, 1, "c1", CloseReason.WITHDRAWN, 6.0)))
    assert answering.work is None
