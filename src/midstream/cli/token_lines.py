"""Writing of token files by commands."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from midstream.cli.terminal import clean
from midstream.environment import World
from midstream.errors import UsageError
from midstream.file_safety import lock_own, read_secret_text, replace_own
from midstream.server.auth.token_file import (
    HASHED,
    digest_of_token,
    parse_line,
    require_one_tenancy,
    without_comment,
)

_NEW_FILE = "# Tokens of midstream, by their digests. A command adds the lines and prints each token once.\n"


def add_token(
    file: Path,
    subject: str,
    tenant: str,
    settings: Mapping[str, str],
    *,
    days: float | None = None,
    comment: str = "",
) -> str:
    """Add a line with the digest of a new token to a token file; return the token.

    Args:
        settings: Settings by name; those with "" are omitted.
        days: Days until the token ends; None for never.

    Raises:
        UsageError: A word is invalid, or the file cannot be used.
    """
    world = World()
    now = datetime.fromtimestamp(world.now(), UTC)
    try:
        ends = _stamp(now + timedelta(days=days)) if days else ""
    except OverflowError as error:
        raise UsageError(
            f"--days {days:g} is beyond the year 9999; give fewer, or none for no end"
        ) from error
    token = world.new_secret()
    words = [
        *(f"{name}={value}" for name, value in settings.items() if value),
        f"expires={ends}" if ends else "",
        f"added={_stamp(now)}",
        f"# {clean(comment, is_one_line=True)}" if comment else "",
    ]
    line = " ".join(filter(None, [f"{HASHED}{digest_of_token(token)}", subject, tenant, *words]))
    named = [word for word in (subject, tenant) if word]
    if not subject or "\n" in line or without_comment(line).split()[1 : 1 + len(named)] != named:
        raise UsageError(
            f"{subject!r} and {tenant!r} must be words without spaces that do not begin with '#'"
        )
    if strange := [name for name, value in settings.items() if len(value.split()) > 1]:
        raise UsageError(f"{strange[0]} contains a space, which a token file cannot represent")
    parse_line(line)  # an invalid line is refused before a file is created
    with locked_tokens(file):
        text = f"{read_tokens(file)}{line}\n"
        # Checked together: a server admits nobody by a file in which only some have a tenant.
        require_one_tenancy(each.principal for each in map(parse_line, text.splitlines()) if each is not None)
        write_tokens(file, text)
    return token


def locked_tokens(file: Path) -> AbstractContextManager[None]:
    """Let no other command change a token file between `read_tokens` and `write_tokens`; its folder must exist.

    Raises:
        UsageError: The lock file beside it cannot be used.
    """
    target = file.resolve()
    return lock_own(target.with_name(f".{target.name}.lock"), "the lock file of the tokens")


def read_tokens(file: Path) -> str:
    """Return the text of a token file; that of a new file if it is missing."""
    try:
        text = read_secret_text(file, "the tokens", is_named=True)
    except FileNotFoundError:
        return _NEW_FILE
    return text if not text or text.endswith("\n") else f"{text}\n"


def write_tokens(file: Path, text: str) -> None:
    """Replace a token file atomically: a server reads the old or the new text."""
    replace_own(file.resolve(), text.encode())


def _stamp(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
