"""`midstream sessions questions | answer | resume | cancel | withdraw`: actions of a person on sessions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import click
import msgspec

from midstream.cli import Invocation
from midstream.cli.output import Output, one_line
from midstream.cli.prompts import answer_command, question_lines
from midstream.cli.session_options import complete, server_options, source_options
from midstream.cli.session_sources import ServerSource, SessionNow, Source, resolve
from midstream.cli.terminal import Ink, columns
from midstream.cli.transcript import INDENT
from midstream.cli.visible_text import reveal_line
from midstream.errors import ConflictError, QuestionClosedError, UsageError
from midstream.protocol.frames import AnswerPayload, encode
from midstream.session.calls import Choice
from midstream.session.questions import Question


@click.command()
@click.argument("session", required=False, shell_complete=complete)
@source_options
def questions(session: str | None, source: Source, output: Output) -> None:
    """List open questions, oldest first: of all sessions, or of SESSION and its sub-agents."""
    found = source.questions(resolve(source, session).id if session else None)
    output.print_list(
        found,
        lambda each: (each.session, each.call_id, each.kind.value, each.name, each.arguments, each.text),
        table=lambda: _cards(found, output.ink, columns()),
        shown=reveal_line,
        none="There are no open questions.",
    )


def _cards(found: Sequence[Question], ink: Ink, width: int) -> Iterator[str]:
    for question in found:
        yield ink.dim(f"── {reveal_line(question.session)}")
        yield from question_lines(question, ink, width)
        yield ink.dim(f"{INDENT}{answer_command(question)}")


@click.command()
@click.argument("session", shell_complete=complete)
@click.argument("choice", type=click.Choice([choice.value for choice in Choice]))
@click.option("--call", "call_id", metavar="ID", help="The call, if several questions are open.")
@click.option(
    "--text",
    default="",
    help="The response, the reason for a denial, or the result of a call that took effect.",
)
@click.option("--arguments", metavar="JSON", help="With allow: run with these arguments (JSON) instead.")
@click.option("--digest", help="Refuse if the arguments have another digest.")
@click.option("--yes", is_flag=True, help="Do not show the call and ask for confirmation before it may run.")
@server_options
@click.pass_obj
def answer(
    invocation: Invocation,
    session: str,
    choice: str,
    call_id: str | None,
    text: str,
    arguments: str | None,
    digest: str | None,
    yes: bool,  # noqa: FBT001 - click passes options so
    source: ServerSource,
    output: Output,
) -> None:
    """Answer an open question of SESSION or of a sub-agent below it.

    On a terminal, `allow` and `rerun` first show the whole call and request confirmation, unless --digest is given.
    """
    if choice == Choice.RESPOND and not text:
        raise UsageError("the choice `respond` needs a text; give --text")
    name = resolve(source, session).id
    question = _select_question(source.questions(name), name, call_id)
    if choice in _RUNS and not (yes or digest) and sys.stdin.isatty():
        for row in question_lines(question, invocation.talk, columns()):
            click.echo(row, err=True, color=True)
        click.confirm(f"Answer: {choice}?", abort=True, err=True)
    payload = AnswerPayload(
        question.turn,
        question.response,
        question.call_id,
        digest or question.digest,
        Choice(choice),
        text,
        arguments,
    )
    source.send_command(question.session, "answer", body=encode(payload))
    output.print_json({"session": question.session, "call_id": question.call_id, "choice": choice})
    click.echo(f"Answered: {reveal_line(question.name)}: {choice}.", err=True)


_RUNS = (Choice.ALLOW, Choice.RERUN)
"""Choices after which the call runs."""


def _select_question(found: Sequence[Question], session: str, call_id: str | None) -> Question:
    fitting = [question for question in found if call_id in (None, question.call_id)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        what = "no question is open" if call_id is None else f"no question about call {call_id!r} is open"
        raise QuestionClosedError(f"{what} in session {session!r}")  # as for an answer that came second
    named = ", ".join(f"{each.call_id!r} of {each.session!r}" for each in fitting)
    raise UsageError(f"several questions are open ({named}); give --call and the session of the question")


def _command(name: str, option: str, meaning: str, purpose: str) -> click.Command:
    """Return a command that sends a command to a session.

    Args:
        option: Name of the option that limits it to a number.
        meaning, purpose: Help of that option, and of the command.
    """

    @click.command(name, help=purpose)
    @click.argument("session", shell_complete=complete)
    @click.option(f"--{option}", "number", type=click.IntRange(min=1), help=meaning)
    @server_options
    def command(session: str, number: int | None, source: ServerSource, output: Output) -> None:
        found = resolve(source, session).id
        if number is not None:
            _refuse_other(source.snapshot(found), found, name, number)
        result = source.send_command(found, name, number=None if number is None else (option, number))
        output.print_json({"session": found, **msgspec.to_builtins(result)})
        state = "a turn runs" if result.is_running else "no turn runs"
        click.echo(f"{one_line(found)}: {state} after event {result.event_id}.", err=True)

    return command


def _refuse_other(now: SessionNow, session: str, what: str, number: int) -> None:
    """Refuse a command for a message that is not queued, or for another turn than the running one.

    Raises:
        ConflictError: The server would ignore the command.
    """
    running = now.running.turn if now.running else None
    if what == "withdraw":
        is_found, named = number in {each.number for each in now.queue}, f"message {number} is not queued"
    else:
        is_found, named = number == running, f"turn {number} does not run"
    if what == "resume" and running is None:
        return  # the server refuses another turn than the last one
    if not is_found:
        raise ConflictError(f"{named} in session {session!r}; nothing was changed")


COMMANDS = (
    questions,
    answer,
    _command(
        "resume",
        "turn",
        "Resume only this turn.",
        "Resume the last turn of SESSION, which was interrupted or failed.",
    ),
    _command("cancel", "turn", "Stop only this turn.", "Stop the running turn of SESSION, if any."),
    _command(
        "withdraw",
        "number",
        "Withdraw only this message (default: all queued messages).",
        "Withdraw queued messages of SESSION.",
    ),
)
"""The commands of `midstream sessions` in this module."""
