"""Secrets that the environment brings: in a variable, or in a file that a second variable names."""

from __future__ import annotations

import os
from pathlib import Path

from midstream.errors import UsageError
from midstream.file_safety import read_own


def read_secret_variable(variable: str, file_variable: str, called: str) -> str:
    """Return a secret of the environment, "" where it brings none. The file counts before the variable.

    Args:
        called: What messages call it, such as "the key token".

    Raises:
        UsageError: The file cannot be read, or others may read it.
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
    """Remove the secrets of this program from its environment, once they are read: agents and tools inherit it.

    Tokens are among them, and the addresses of stores, which may have a password.
    """
    for name in [*os.environ]:
        if name.startswith("MIDSTREAM_") and name.endswith(("_TOKEN", "_STORE")):
            del os.environ[name]
