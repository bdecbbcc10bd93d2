"""`MIDSTREAM_DEBUG=1`: what is decided about each turn, on stderr, for programs that set up no logging of their own."""

from __future__ import annotations

import logging
import os

VARIABLE = "MIDSTREAM_DEBUG"
LOGGER = "midstream.runtime.pool"
"""Whose lines are shown: ids, kinds and counts, never words of a conversation."""

_FORM = "%(asctime)s midstream: %(message)s"


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]  # its stream is stderr, whatever that is
    """The handler of ours, so that no second one is added."""


def show_where_asked() -> None:
    """Show the lines where the variable is 1; calling it twice is harmless."""
    log = logging.getLogger(LOGGER)
    if os.environ.get(VARIABLE) != "1" or any(isinstance(each, _Shown) for each in log.handlers):
        return
    handler = _Shown()
    handler.setFormatter(logging.Formatter(_FORM))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
