"""`midstream resume`: resume a turn that was interrupted or failed, and show the rest of it."""

from __future__ import annotations

import asyncio

import click

from midstream.cli import Invocation
from midstream.cli.chat import ChatSession
from midstream.cli.chats import Chats
from midstream.cli.output import Output
from midstream.cli.session_options import complete, server_options
from midstream.cli.session_sources import ListedSession, ServerSource
from midstream.cli.session_sources import resolve as resolved
from midstream.cli.sessions import session_cells
from midstream.errors import NothingToResumeError
from midstream.session.child_names import PART_MARK
from midstream.session.records import TurnStatus

_LEFT = (TurnStatus.INTERRUPTED, TurnStatus.FAILED)


@click.command(short_help="Resume a turn that was interrupted or failed.")
@click.argument("session", required=False, shell_complete=complete)
@server_options
@click.pass_context
def resume(
    ctx: click.Context,
    session: str | None,
    source: ServerSource,
    output: Output,
) -> None:
    """Resume the last turn of SESSION and show the rest of it. Without SESSION, list all that can be resumed.

    A running turn (this terminal has detached, or it waits for a person) is shown from this terminal's last event.
    """
    url = source.url.rstrip("/")
    invocation: Invocation = ctx.obj
    chats = Chats(invocation.places.state / "chats")
    if session is None:
        _list(source, set(chats.find_interrupted(url)), output)
        return
    name = resolved(source, session).id
    chats.set_last(url, name)
    talk = ChatSession(invocation, chats, url, name, is_json=output.is_json)
    left = asyncio.run(talk.go_on())
    if left is None:
        raise NothingToResumeError(f"the last turn of session {name!r} has ended")
    ctx.exit(left)


def _list(source: ServerSource, left: set[str], output: Output) -> None:
    found = [line for line in source.list() if line.id in left or _can_go_on(source, line)]
    output.print_list(found, session_cells, none="There is no turn to resume.")
    if found:
        click.echo("`midstream resume SESSION` resumes one.", err=True)


def _can_go_on(source: ServerSource, line: ListedSession) -> bool:
    """Return whether a session can be resumed; a sub-agent continues with its parent session."""
    return PART_MARK not in line.id and line.status in _LEFT and source.snapshot(line.id).is_resumable
