"""`midstream access`: credentials that a server issued, and the token file that it reads."""

from __future__ import annotations

from pathlib import Path

import click

from midstream.cli.input_file import InputFile
from midstream.cli.option_groups import FiniteRange
from midstream.cli.output import Output, json_option, one_line
from midstream.cli.session_options import server_options
from midstream.cli.session_sources import IssuedCredential, ServerSource
from midstream.cli.times import time_of
from midstream.cli.token_lines import add_token, locked_tokens, read_tokens, write_tokens
from midstream.errors import UsageError
from midstream.server.auth.principals import Action
from midstream.server.auth.token_file import HASHED, ROLES, parse_line


@click.group()
def access() -> None:
    """List and revoke credentials of a server; write token files.

    Cookies, login links, viewer tokens and tickets are credentials that a server issues. Each ends with the
    credential from which it was derived.
    """


@access.command("list")
@server_options
def list_credentials(source: ServerSource, output: Output) -> None:
    """List the credentials that you issued; an operator gets those of all principals."""
    page = source.credentials()
    output.print_list(page.credentials, _cells, none="No credentials were issued.")
    if not page.is_complete:
        click.echo("There are more; revoke some of these to see the rest.", err=True)


@access.command()
@click.argument("credential")
@server_options
def revoke(credential: str, source: ServerSource, output: Output) -> None:
    """Revoke the credential with this id (see `list`), and all derived credentials."""
    _report(source.revoke(credential), output)


@access.command()
@click.argument("principal", required=False)
@server_options
def revoke_all(principal: str | None, source: ServerSource, output: Output) -> None:
    """Revoke all credentials of PRINCIPAL: yours by default, `*` for everyone, `TENANT:NAME` in a tenant.

    A line of a token file stays valid until it is removed from the file.
    """
    _report(source.revoke_all(principal), output)


@access.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("subject")
@click.option("--tenant", default="", help="Tenant of the principal.")
@click.option(
    "--role", type=click.Choice(ROLES), help="operator: all rights; approver: read, and answer questions."
)
@click.option(
    "--scope",
    "actions",
    multiple=True,
    type=click.Choice([action.value for action in Action]),
    help="Permit only this action; may be repeated (default: all).",
)
@click.option(
    "--sessions", metavar="NAME|PREFIX*", help="Permit only this session, or those with this prefix."
)
@click.option(
    "--days", type=FiniteRange(min=0, min_open=True), help="Days until the token ends (default: never)."
)
@click.option("--comment", default="", help="Comment at the end of the line.")
@json_option("Print one JSON object.")
def add(
    file: Path,
    subject: str,
    tenant: str,
    role: str | None,
    actions: tuple[str, ...],
    sessions: str | None,
    days: float | None,
    comment: str,
    output: Output,
) -> None:
    """Add a new token for SUBJECT to the token file FILE, and print the token once.

    FILE contains only the token's digest. If missing, it is created with access for you only.
    """
    settings = {"role": role or "", "scope": ",".join(actions), "sessions": sessions or ""}
    token = add_token(file, subject, tenant, settings, days=days, comment=comment)
    output.print_one({"subject": subject, "token": token, "file": str(file)}, token, err=False)
    if not output.is_json:
        click.echo(f"The token of {one_line(subject)} is not stored: copy it now.", err=True)


@access.command("hash")
@click.argument("file", type=InputFile())
@json_option("Print one JSON object.")
def hash_tokens(file: Path, output: Output) -> None:
    """Replace the tokens in FILE by their digests. The tokens, and all logins with them, stay valid."""
    lines, count = [], 0
    with locked_tokens(file):
        for number, line in enumerate(read_tokens(file).splitlines(), 1):
            try:
                parsed = parse_line(line)
            except UsageError as error:
                raise UsageError(f"line {number} of {file}: {error.message}; nothing was changed") from error
            if parsed is not None and parsed.is_plain:
                word = line.split()[0]
                line = line.replace(word, f"{HASHED}{parsed.digest}", 1)
                count += 1
            lines.append(line)
        if count:
            write_tokens(file, "\n".join(lines) + "\n")
    output.print_one({"replaced": count}, f"{count} tokens were replaced by their digests.", err=False)


def _cells(line: IssuedCredential) -> tuple[str, ...]:
    whose = line.session or line.principal
    return (line.id, line.kind, whose, line.issued_by, time_of(line.issued_at), time_of(line.ends_at))


def _report(count: int, output: Output) -> None:
    output.print_one({"revoked": count}, f"{count} credentials were revoked.", err=False)
