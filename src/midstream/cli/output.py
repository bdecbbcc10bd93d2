"""Output of a command's results: text, or JSON with `--json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from midstream.cli import Invocation
from midstream.cli.terminal import COLUMNS, Ink, clean, columns
from midstream.cli.visible_text import json_of

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])  # whatever click decorates


def one_line(text: str) -> str:
    """Return text of another program as a safe cell of a table."""
    return clean(text, is_one_line=True)


class Output:
    """Prints the results of one command."""

    def __init__(self, ink: Ink, *, is_json: bool) -> None:
        self.ink = ink
        self.is_json = is_json

    @property
    def width(self) -> int:
        """Columns of the terminal; 80 if stdout is not a terminal."""
        return columns() if self.ink.is_terminal else COLUMNS

    def print_one(self, value: object, text: str, *, err: bool = True) -> None:
        """Print a result as JSON on stdout, or as text, by default on stderr."""
        if self.is_json:
            click.echo(json_of(value))
        else:
            click.echo(text, err=err)

    def print_json(self, value: object) -> None:
        """Print a result as JSON."""
        if self.is_json:
            click.echo(json_of(value))

    def print_rows(self, rows: Iterable[str]) -> None:
        """Print lines of colored text."""
        for row in rows:
            click.echo(row, color=True)

    def print_list(
        self,
        found: Sequence[T],
        cells: Callable[[T], Iterable[str]],
        *,
        table: Callable[[], Iterable[str]] | None = None,
        shown: Callable[[str], str] = one_line,
        none: str = "",
    ) -> None:
        """Print results: as JSON lines, as a table on a terminal, else as tab-separated lines.

        Args:
            cells: Returns the cells of one result.
            table: Returns the lines of the table; None for tab-separated lines also on a terminal.
            shown: Makes a cell safe to print.
            none: Message on stderr without results.
        """
        if self.is_json:
            for line in found:
                click.echo(json_of(line))
        elif table is not None and self.ink.is_terminal:
            self.print_rows(table())
        else:
            for line in found:
                click.echo("\t".join(map(shown, cells(line))))
        if none and not found:
            click.echo(none, err=True)


def json_option(text: str = "Print JSON.") -> Callable[[F], F]:
    """Add `--json` to a command, which receives the parameter `output`."""

    def output_of(ctx: click.Context, _: click.Parameter, is_json: bool) -> Output:  # noqa: FBT001 - click passes it so
        invocation = ctx.find_object(Invocation)
        assert invocation is not None, "the command belongs to `midstream_command`"
        return Output(invocation.out, is_json=is_json)

    return click.option("--json", "output", is_flag=True, help=text, callback=output_of)
