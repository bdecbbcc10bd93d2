"""`midstream gateway keys`: the keys of the gateway's users."""

from __future__ import annotations

from pathlib import Path

import click
from msgspec import Struct

from midstream.cli import Invocation
from midstream.cli.option_groups import FiniteRange
from midstream.cli.output import Output, json_option, one_line
from midstream.cli.times import time_of
from midstream.cli.token_lines import add_token, locked_tokens, read_tokens, write_tokens
from midstream.dialects.api_callers import UNLIMITED, Allowance
from midstream.errors import NotFoundError
from midstream.paths import Paths, make_folder
from midstream.server.auth.token_file import TokenLine, TokenUse, parse_line, read_token_file

USERS_FILE = "gateway-users"
"""Name of the token file in midstream's data folder."""
ID_CHARS = 12
"""Digits of a token's digest that identify a key."""
_COUNT = click.IntRange(min=1)


class KeyLine(Struct, frozen=True):
    """A user's key in the output.

    Args:
        id: Id of the key, which is not part of it.
        expires_at: Seconds since 1970; None for never.
    """

    id: str
    user: str
    expires_at: float | None
    allowance: Allowance


def users_file(places: Paths, named: Path | None) -> Path:
    """Return the token file of the users: the given one, else that of the data folder."""
    return named or make_folder(places.data) / USERS_FILE


@click.group()
def keys() -> None:
    """Create, list and revoke keys of the gateway's users.

    A running gateway reads the file again when it changes. `midstream gateway --users-file FILE keys ...` uses another
    file than that of midstream's data folder.
    """


@keys.command()
@click.argument("user")
@click.option("--tenant", default="", help="Tenant of the user.")
@click.option("--requests-per-minute", type=_COUNT, help="Limit of answers that begin within a minute.")
@click.option("--concurrent-requests", type=_COUNT, help="Limit of concurrent answers.")
@click.option("--tokens-per-day", type=_COUNT, help="Limit of input and output tokens of a day (UTC).")
@click.option("--tokens-per-month", type=_COUNT, help="Limit of input and output tokens of a month (UTC).")
@click.option(
    "--budget-per-month",
    type=FiniteRange(min=0, min_open=True),
    help="Limit of the cost of a month (UTC), in the currency of --input-price and --output-price.",
)
@click.option(
    "--model", "models", multiple=True, metavar="NAME", help="Permit only this model; may be repeated."
)
@click.option(
    "--days", type=FiniteRange(min=0, min_open=True), help="Days until the key ends (default: never)."
)
@click.option("--comment", default="", help="Comment at the end of the line.")
@json_option()
@click.pass_context
def add(
    context: click.Context,
    /,
    user: str,
    tenant: str,
    models: tuple[str, ...],
    days: float | None,
    comment: str,
    output: Output,
    **limits: float | None,
) -> None:
    """Add a new key for USER, and print the key once.

    Each limit of a key applies to the usage of all keys of the user together.
    """
    file = _file_of(context)
    settings = {name.replace("_", "-"): f"{value}" for name, value in limits.items() if value}
    key = add_token(file, user, tenant, {**settings, "models": ",".join(models)}, days=days, comment=comment)
    output.print_one({"user": user, "key": key, "file": str(file)}, key, err=False)
    if not output.is_json:
        click.echo(f"The key of {one_line(user)} is not stored: copy it now.", err=True)


@keys.command("list")
@json_option()
@click.pass_context
def list_keys(context: click.Context, output: Output) -> None:
    """List the keys, with their limits."""
    file = _file_of(context)
    lines = read_token_file(file, TokenUse.GATEWAY) if file.exists() else []
    output.print_list([*map(_shown, lines)], _cells, none="There are no keys of users.")


def _cells(line: KeyLine) -> tuple[str, ...]:
    ends = "never ends" if line.expires_at is None else f"ends {time_of(line.expires_at)}"
    limits = [
        f"{name.replace('_', '-')}={','.join(value) if isinstance(value, tuple) else f'{value:.16g}'}"
        for name in line.allowance.__struct_fields__
        if (value := getattr(line.allowance, name))
    ]
    return (line.id, line.user, ends, " ".join(limits) or "no limits")


@keys.command()
@click.argument("name", metavar="USER|ID")
@json_option()
@click.pass_context
def revoke(context: click.Context, name: str, output: Output) -> None:
    """Revoke all keys of a user (in a tenant: TENANT:USER), or the key with this id (see `list`).

    Their usage stays counted.
    """
    file = _file_of(context)
    count = _remove_lines(file, name) if file.exists() else 0
    if not count:
        raise NotFoundError(f"no key of {name!r} in {file}: `midstream gateway keys list` lists the keys")
    output.print_one({"revoked": count}, f"{count} key{'s' if count > 1 else ''} revoked.", err=False)


def _remove_lines(file: Path, name: str) -> int:
    """Remove the keys of a user or with this id; return how many."""
    kept, count = [], 0
    with locked_tokens(file):
        for line in read_tokens(file).splitlines():
            parsed = parse_line(line)
            if parsed is not None and name in (parsed.principal.name, parsed.digest[:ID_CHARS]):
                count += 1
            else:
                kept.append(line)
        if count:
            write_tokens(file, "\n".join(kept) + "\n")
    return count


def _file_of(context: click.Context) -> Path:
    invocation: Invocation = context.obj
    gateway = context.parent.parent if context.parent else None  # its options precede `keys`
    return users_file(invocation.places, gateway.params["users_file"] if gateway else None)


def _shown(line: TokenLine) -> KeyLine:
    principal = line.principal
    return KeyLine(line.digest[:ID_CHARS], principal.name, principal.expires_at, line.allowance or UNLIMITED)
