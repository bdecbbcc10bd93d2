"""Lines of token files, written by commands."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from midstream.cli.terminal import clean
from midstream.environment import World
from midstream.errors import UsageError
from midstream.file_safety import read_secret_text, replace_own
from midstream.server.auth.token_file import HASHED, digest_of_token, parse_line, without_comment

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
    """Add a line with a new token to a token file, and return the token; the file has its digest only.

    Args:
        settings: By their names; those that are "" are left out.
        days: Days until the token ends; None for never.

    Raises:
        UsageError: A word has another form, or the file cannot be used.
    """
    world = World()
    now = datetime.fromtimestamp(world.now(), UTC)
    token = world.new_secret()
    words = [
        *(f"{name}={value}" for name, value in settings.items() if value),
        f"expires={_stamp(now + timedelta(days=days))}" if days else "",
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
        raise UsageError(f"{strange[0]} has a space, which no line of a token file can have")
    parse_line(line)
    write_tokens(file, f"{read_tokens(file)}{line}\n")
    return token


def read_tokens(file: Path) -> str:
    """Return the text of a token file; of a new one where there is none."""
    try:
        text = read_secret_text(file, "the tokens", is_named=True)
    except FileNotFoundError:
        return _NEW_FILE
    return text if not text or text.endswith("\n") else f"{text}\n"


def write_tokens(file: Path, text: str) -> None:
    """Write a token file whole: a server that reads it meanwhile gets the former text or the new one."""
    replace_own(file.resolve(), text.encode())


def _stamp(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
