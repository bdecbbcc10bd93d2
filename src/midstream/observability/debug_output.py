"""Debugging output on stderr, for programs without their own logging.

`MIDSTREAM_DEBUG=1` shows the decisions about each turn, `MIDSTREAM_DEBUG_NETWORK=1` the requests to providers and their
answers. Both are loggers. A line that a handler of the program writes to the screen is not written twice.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

VARIABLE = "MIDSTREAM_DEBUG"
LOGGER = "midstream.agents.pool"
"""The logger with a line for each turn: ids, kinds and counts, without content of a conversation."""
NETWORK_VARIABLE = "MIDSTREAM_DEBUG_NETWORK"
NETWORK_LOGGER = "midstream.network"
"""The logger with a line for each request and each piece of an answer, with the beginning of its body."""

_FORM = "%(asctime)s midstream: %(message)s"


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]  # its stream is stderr, whatever that is
    """Writes records to stderr that no other handler writes there."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self._log = log

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record: False if another handler writes it to the screen."""
        others = (handler for handler in _handlers_of(self._log) if handler is not self)
        if any(_is_on_screen(handler) and record.levelno >= handler.level for handler in others):
            return False
        return bool(super().filter(record))


def show_enabled_lines() -> None:
    """Show the lines whose variable is 1. A second call has no effect."""
    _show(VARIABLE, LOGGER)
    _show(NETWORK_VARIABLE, NETWORK_LOGGER)


def _show(variable: str, name: str) -> None:
    log = logging.getLogger(name)
    if os.environ.get(variable) != "1" or any(isinstance(each, _Shown) for each in log.handlers):
        return
    handler = _Shown(log)
    handler.setFormatter(logging.Formatter(_FORM))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)


def _is_on_screen(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)


def _handlers_of(log: logging.Logger) -> Iterator[logging.Handler]:
    """Return every handler that a record of this logger reaches."""
    place: logging.Logger | None = log
    while place is not None:
        yield from place.handlers
        place = place.parent if place.propagate else None
