"""`midstream access`: credentials that a server issued, and the token file that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from midstream.cli.session_options import server_options
from midstream.cli.sources import IssuedCredential, ServerSource
from midstream.cli.terminal import clean
from midstream.cli.times import time_of
from midstream.cli.token_lines import add_token, read_tokens, write_tokens
from midstream.cli.visible_text import json_of
from midstream.errors import UsageError
from midstream.server.auth.principals import Action
from midstream.server.auth.token_file import HASHED, ROLES, parse_line


@click.group()
def access() -> None:
    """List and revoke credentials of a server; write token files.

    Cookies, login links, viewers' passes and tickets are credentials that a server issues. Each ends with the
    credential that it was issued for.
    """


@access.command("list")
@server_options
def list_credentials(
    url: str,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """List the credentials that you issued; an operator gets those of all principals."""
    page = ServerSource(url).credentials()
    for line in page.credentials:
        click.echo(json_of(line) if is_json else "\t".join(_cells(line)))
    if not page.credentials:
        click.echo("No credentials were issued.", err=True)
    if not page.is_complete:
        click.echo("There are more; revoke some of these to see the rest.", err=True)


@access.command()
@click.argument("credential")
@server_options
def revoke(
    credential: str,
    url: str,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """Revoke the credential of this id (see `list`), and all that were issued for it."""
    _report(ServerSource(url).revoke(credential), is_json=is_json)


@access.command()
@click.argument("principal", required=False)
@server_options
def revoke_all(
    principal: str | None,
    url: str,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """Revoke all credentials of PRINCIPAL: yours by default, `*` for everyone, `TENANT:NAME` in a tenant.

    A line of a token file stays good until it is removed from the file.
    """
    _report(ServerSource(url).revoke_all(principal), is_json=is_json)


@access.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("subject")
@click.option("--tenant", default="", help="Tenant of the principal.")
@click.option(
    "--role", type=click.Choice(ROLES), help="operator: everything; approver: read, and answer questions."
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
    "--days", type=click.FloatRange(min=0, min_open=True), help="Days until the token ends (default: never)."
)
@click.option("--comment", default="", help="Text behind the line, for people.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def add(
    file: Path,
    subject: str,
    tenant: str,
    role: str | None,
    actions: tuple[str, ...],
    sessions: str | None,
    days: float | None,
    comment: str,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """Add a new token for SUBJECT to the token file FILE, and print the token once.

    FILE has only the token's digest. It is created, for you only, if it does not exist.
    """
    settings = {"role": role or "", "scope": ",".join(actions), "sessions": sessions or ""}
    token = add_token(file, subject, tenant, settings, days=days, comment=comment)
    if is_json:
        click.echo(json_of({"subject": subject, "token": token, "file": str(file)}))
        return
    click.echo(token)
    click.echo(f"The token of {clean(subject, is_one_line=True)} is not stored: keep it now.", err=True)


@access.command("hash")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def hash_tokens(
    file: Path,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """Replace the tokens in FILE by their digests. The tokens, and all logins under them, stay good."""
    lines, count = [], 0
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
    click.echo(json_of({"replaced": count}) if is_json else f"{count} tokens were replaced by their digests.")


def _cells(line: IssuedCredential) -> Iterator[str]:
    whose = line.session or line.principal
    for cell in (line.id, line.kind, whose, line.issued_by, time_of(line.issued_at), time_of(line.ends_at)):
        yield clean(cell, is_one_line=True)


def _report(count: int, *, is_json: bool) -> None:
    click.echo(json_of({"revoked": count}) if is_json else f"{count} credentials were revoked.")
