"""Secrets from the environment: in a variable, or in a file whose path is in a second variable."""

from __future__ import annotations

import os
from pathlib import Path

from midstream.errors import UsageError
from midstream.file_safety import read_own


def read_secret_variable(variable: str, file_variable: str, called: str) -> str:
    """Return a secret from the environment, or "". The file takes precedence over the variable.

    Args:
        called: Name of the secret in messages, such as "the key token".

    Raises:
        UsageError: The file cannot be read, or other users may read it.
    """
    named = os.environ.get(file_variable, "")
    if not named:
        return os.environ.get(variable, "")
    try:
        body = read_own(Path(named), f"the file of {called}", is_secret=True, is_named=True)
        return body.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{called} in {named!r} cannot be read: {type(error).__name__}") from error


def drop_secret_variables() -> None:
    """Remove the secrets of this program from its environment, because agents and tools inherit it.

    These are tokens, and URLs of stores, which may contain a password.
    """
    for name in [*os.environ]:
        if name.startswith("MIDSTREAM_") and name.endswith(("_TOKEN", "_STORE")):
            del os.environ[name]
