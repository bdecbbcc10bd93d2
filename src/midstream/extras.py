"""Extras: an error about a missing package has the command that installs its extra."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from midstream.errors import MissingExtraError


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Raise an error with the extra if an import in the block fails.

    Raises:
        MissingExtraError: A package is not installed; the message has the command that installs them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"the package {error.name!r} is not installed: pip install 'midstream[{name}]'"
        raise MissingExtraError(message, package=error.name or "") from error
