"""One line of progress on stderr: only on a terminal, and only for slow work."""

from __future__ import annotations

from typing import Self

import click

from midstream.cli.terminal import clean, columns, shorten
from midstream.environment import World

QUIET_S = 0.3
"""Seconds before progress is printed."""
PAUSE_S = 0.1
"""Seconds between two updates."""


class StatusLine:
    """A line that is overwritten by each update, and removed at the end.

    Args:
        is_terminal: Whether stderr is a terminal; otherwise nothing is printed.
    """

    def __init__(self, *, is_terminal: bool, world: World) -> None:
        self._is_terminal = is_terminal
        self._world = world
        self._quiet_until = world.monotonic() + QUIET_S
        self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Update the progress."""
        if self._is_terminal and self._world.monotonic() >= self._quiet_until:
            self._quiet_until = self._world.monotonic() + PAUSE_S
            line = shorten(clean(text, is_one_line=True), columns() - 1)
            click.echo(f"\r\x1b[K{line}", err=True, nl=False, color=True)
            self._is_shown = True

    def clear(self) -> None:
        """Remove the line before other output."""
        if self._is_shown:
            click.echo("\r\x1b[K", err=True, nl=False, color=True)
            self._is_shown = False
