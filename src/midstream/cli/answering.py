"""Questions of a session at the terminal, one at a time, while the turn continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from midstream.cli.keyboard import Keyboard
from midstream.cli.prompts import QuestionPrompt, answer_command, question_lines
from midstream.cli.screen import Screen
from midstream.cli.terminal import COLUMNS, Ink
from midstream.cli.transcript import INDENT
from midstream.client import Event
from midstream.environment import World
from midstream.errors import ConflictError, UnavailableError
from midstream.session.calls import Choice
from midstream.session.questions import Question
from midstream.session.records import CallEnded, MessageQueued, QuestionAnswered, QuestionClosed

LOOK_AGAIN_S = 1.0
"""Seconds until a retry, if the server could not list the open questions."""

Place = tuple[str, int, int, str]
"""Session, turn, response and call id of a question."""


class QuestionClient(Protocol):
    """The methods of a client that `Answering` needs."""

    async def questions(self, session: str | None = None) -> tuple[Question, ...]:
        """See `Client.questions`."""

    async def answer(
        self,
        session: str,
        question: Question,
        choice: Choice,
        *,
        text: str = "",
        arguments: str | None = None,
    ) -> None:
        """See `Client.answer`."""


class Answering:
    """Shows questions and sends answers. `take` each event; also wait for `work`, and then call `go_on`.

    Args:
        session: The session; questions of its sub-agents belong to it.
        screen, ink, width: Display of the questions.
        prompt: Shows the prompt of the answer; "" after the input.
        keyboard: Source of the answers; None without a user at a terminal.
        url: The server, for the command that answers from elsewhere.
    """

    def __init__(
        self,
        client: QuestionClient,
        session: str,
        screen: Screen,
        prompt: Callable[[str], None],
        ink: Ink,
        width: int,
        *,
        keyboard: Keyboard | None,
        url: str,
        world: World | None = None,
    ) -> None:
        self._client = client
        self._session = session
        self._screen = screen
        self._prompt = prompt
        self._ink = ink
        self._width = width or COLUMNS
        self._keyboard = keyboard
        self._url = url
        self._world = world or World()
        self._open: dict[Place, Question] = {}
        self._decided: set[tuple[Place, float]] = set()
        """Questions with a sent answer, which the server may still list."""
        self._asking: QuestionPrompt | None = None
        self._is_behind = False
        """Whether the server may have an open question that is not known here yet."""
        self.work: asyncio.Task[str | None] | asyncio.Task[None] | None = None
        """The task that waits for input, or sends an answer; None without either."""

    async def refresh(self) -> None:
        """Fetch the open questions: at the beginning, and after each new question."""
        try:
            questions = await self._client.questions(self._session)
        except UnavailableError:  # the server cannot be reached: the stream reports that
            self._is_behind = True
            if self.work is None:
                self.work = self._world.spawn(self._world.sleep(LOOK_AGAIN_S), name="look again")
            return
        self._is_behind = False
        new = [
            question
            for question in questions
            if _place(question) not in self._open
            and (_place(question), question.asked_at) not in self._decided
        ]
        for question in new:
            self._open[_place(question)] = question
            if self._keyboard is None:
                self._show(self._lines_of(question))
                self._print_command(question)
        if self._keyboard is not None:
            self._prompt_next()

    async def take(self, event: Event) -> None:
        """Handle an event that asks, answers or closes a question."""
        if event.question is not None or isinstance(event.record, MessageQueued):
            await self.refresh()
            return
        record = event.innermost
        where = event.path[-1] if event.path else self._session
        match record:
            case QuestionAnswered() | QuestionClosed():
                self._close((where, record.turn, record.response, record.call_id))
            case CallEnded():
                self._close((where, record.turn, record.response, record.result.call_id))
            case _:
                pass

    def prompt_again(self) -> None:
        """Print the prompt again below new output."""
        if self._asking is not None:
            self._screen.pause()
            self._prompt(self._asking.prompt)

    async def go_on(self) -> None:
        """Handle the result of `work`."""
        work, self.work = self.work, None
        if work is None:
            return
        try:
            line = await work
        except ConflictError as error:
            self._screen.note(f"{error.message} [{error.code}]")
            self._decided.clear()
            await self.refresh()
            return
        if self._asking is None:  # the answer was sent, or a retry is due
            self._prompt_next()
            if self._is_behind:
                await self.refresh()
            return
        self._prompt("")
        if line is None:
            self._print_command(self._asking.question)
            self._asking, self._keyboard = None, None
        else:
            self._answer(self._asking, line)

    def stop(self) -> None:
        """Release the keyboard. An answer in transit arrives, or the next client asks again."""
        self._asking = None
        if self.work is not None:
            self.work.cancel()

    def _answer(self, asking: QuestionPrompt, line: str) -> None:
        decision = asking.take(line)
        if decision is None:
            self._put(asking)
            return
        self._asking = None
        question = asking.question
        self._open.pop(_place(question), None)
        self._decided.add((_place(question), question.asked_at))
        answer = self._client.answer(
            question.session, question, decision.choice, text=decision.text, arguments=decision.arguments
        )
        self.work = self._world.spawn(answer, name="answer")

    def _prompt_next(self) -> None:
        if self._asking is not None or self.work is not None or not self._open:
            return
        if self._keyboard is None:
            return
        question = next(iter(self._open.values()))
        self._asking = QuestionPrompt(question, self._lines_of(question))
        self._put(self._asking)

    def _put(self, asking: QuestionPrompt) -> None:
        """Show the new lines of a question, then wait for input."""
        self._show(asking.new_lines())
        if self._keyboard is not None:
            self._keyboard.discard_input()
            self._prompt(asking.prompt)
            self.work = self._world.spawn(self._keyboard.line(), name="keyboard")

    def _lines_of(self, question: Question) -> list[str]:
        return [*question_lines(question, self._ink, self._width)]

    def _show(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._screen.remark(line)

    def _print_command(self, question: Question) -> None:
        """Print the whole command that answers, without wrapping."""
        self._screen.remark(self._ink.yellow(f"{INDENT}~ {answer_command(question, self._url)}"))

    def _close(self, place: Place) -> None:
        self._open.pop(place, None)
        if self._asking is None or _place(self._asking.question) != place:
            return
        self._asking = None  # another answer was first, or the question was closed
        if self.work is not None:
            self.work.cancel()
            self.work = None
        self._prompt_next()


def _place(question: Question) -> Place:
    return (question.session, question.turn, question.response, question.call_id)
