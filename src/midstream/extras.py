"""Extras: which one an integration needs is named where its packages are missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from midstream.errors import MissingExtraError


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Name the extra where one of the packages that are imported inside is missing.

    Raises:
        MissingExtraError: One of them is not installed; the message has the command that installs them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"the package {error.name!r} is not installed: pip install 'midstream[{name}]'"
        raise MissingExtraError(message, package=error.name or "") from error
