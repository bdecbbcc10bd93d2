"""`midstream sessions questions | answer | resume | cancel | withdraw`: what a person does about sessions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import click
import msgspec

from midstream.cli import Surroundings
from midstream.cli.prompts import how_to_answer, question_lines
from midstream.cli.session_options import complete, server_options, source_of, source_options
from midstream.cli.sources import ServerSource, resolve
from midstream.cli.terminal import Ink, clean, columns
from midstream.cli.transcript import INDENT
from midstream.cli.visible_text import json_of, reveal_line
from midstream.errors import NotFoundError, UsageError
from midstream.protocol.frames import AnswerPayload, encode
from midstream.session.calls import Choice
from midstream.session.questions import Question
from midstream.store.key_place import KeyPlace


@click.command()
@click.argument("session", required=False, shell_complete=complete)
@source_options
@click.pass_obj
def questions(
    surroundings: Surroundings,
    session: str | None,
    store: str | None,
    url: str | None,
    key_file: KeyPlace | None,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """List open questions, oldest first: of all sessions, or of SESSION and its sub-agents."""
    source = source_of(surroundings, store, url, key_file)
    found = source.questions(resolve(source, session).id if session else None)
    if is_json:
        for question in found:
            click.echo(json_of(question))
    elif surroundings.out.is_terminal:
        for row in _cards(found, surroundings.out, columns()):
            click.echo(row, color=True)
    else:
        for question in found:
            place = (question.session, question.call_id, question.kind.value)
            cells = (*place, question.name, question.arguments, question.text)
            click.echo("\t".join(reveal_line(cell) for cell in cells))
    if not found:
        click.echo("No open questions.", err=True)


def _cards(found: Sequence[Question], ink: Ink, width: int) -> Iterator[str]:
    for question in found:
        yield ink.dim(f"── {reveal_line(question.session)}")
        yield from question_lines(question, ink, width)
        yield ink.dim(f"{INDENT}{how_to_answer(question)}")


@click.command()
@click.argument("session", shell_complete=complete)
@click.argument("choice", type=click.Choice([choice.value for choice in Choice]))
@click.option("--call", "call_id", metavar="ID", help="The call, if several questions are open.")
@click.option(
    "--text", default="", help="The response, the reason of a denial, or the result of a call that happened."
)
@click.option("--arguments", metavar="JSON", help="With allow: run with these arguments (JSON) instead.")
@click.option("--digest", help="Refuse if the arguments are not those with this digest.")
@click.option("--yes", is_flag=True, help="Do not show the call and ask for confirmation before it may run.")
@server_options
@click.pass_obj
def answer(
    surroundings: Surroundings,
    session: str,
    choice: str,
    call_id: str | None,
    text: str,
    arguments: str | None,
    digest: str | None,
    yes: bool,  # noqa: FBT001 - see below
    url: str,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """Answer an open question of SESSION or of a sub-agent below it.

    On a terminal, `allow` and `rerun` first show the whole call and ask for confirmation, unless --digest names its
    arguments.
    """
    if choice == Choice.RESPOND and not text:
        raise UsageError("the choice `respond` needs a text; give --text")
    source = ServerSource(url)
    name = resolve(source, session).id
    question = _the_one(source.questions(name), name, call_id)
    if choice in _RUNS and not (yes or digest) and sys.stdin.isatty():
        for row in question_lines(question, surroundings.talk, columns()):
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
    if is_json:
        told = {"session": question.session, "call_id": question.call_id, "choice": choice}
        click.echo(json_of(told))
    click.echo(f"Answered: {reveal_line(question.name)}: {choice}.", err=True)


_RUNS = (Choice.ALLOW, Choice.RERUN)
"""Choices after which the call runs."""


def _the_one(found: Sequence[Question], session: str, call_id: str | None) -> Question:
    fitting = [question for question in found if call_id in (None, question.call_id)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        what = "no question is open" if call_id is None else f"no question about call {call_id!r} is open"
        raise NotFoundError(
            f"{what} in session {session!r}; `midstream sessions questions` lists the open ones"
        )
    named = ", ".join(f"{each.call_id!r} of {each.session!r}" for each in fitting)
    raise UsageError(f"several questions are open ({named}); give --call and the session of the question")


@click.command("resume")
@click.argument("session", shell_complete=complete)
@click.option("--turn", type=click.IntRange(min=1), help="Resume this turn and no other.")
@server_options
def resume_turn(
    session: str,
    turn: int | None,
    url: str,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """Resume the last turn of SESSION, which was interrupted or failed."""
    _send_command(url, session, "resume", ("turn", turn), is_json=is_json)


@click.command()
@click.argument("session", shell_complete=complete)
@click.option("--turn", type=click.IntRange(min=1), help="Stop this turn and no later one.")
@server_options
def cancel(
    session: str,
    turn: int | None,
    url: str,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """Stop the running turn of SESSION, if any."""
    _send_command(url, session, "cancel", ("turn", turn), is_json=is_json)


@click.command()
@click.argument("session", shell_complete=complete)
@click.option(
    "--number", type=click.IntRange(min=1), help="This message only (default: all queued messages)."
)
@server_options
def withdraw(
    session: str,
    number: int | None,
    url: str,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """Withdraw queued messages of SESSION."""
    _send_command(url, session, "withdraw", ("number", number), is_json=is_json)


def _send_command(
    url: str, session: str, what: str, number: tuple[str, int | None], *, is_json: bool
) -> None:
    source = ServerSource(url)
    name = resolve(source, session).id
    query = None if number[1] is None else (number[0], number[1])
    told = source.send_command(name, what, number=query)
    if is_json:
        click.echo(json_of({"session": name, **msgspec.to_builtins(told)}))
    state = "a turn runs" if told.is_running else "no turn runs"
    click.echo(f"{clean(name, is_one_line=True)}: {state} after event {told.event_id}.", err=True)
