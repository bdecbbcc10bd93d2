"""`midstream cache`: the cached share of each turn's input, and the reasons for uncached input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from midstream.agents.cache_use import TurnCost, turn_costs
from midstream.agents.prefix_difference import first_difference
from midstream.cli.exits import VERIFICATION
from midstream.cli.input_file import InputFile
from midstream.cli.output import Output, one_line
from midstream.cli.session_options import complete, source_options
from midstream.cli.session_sources import Source, resolve
from midstream.cli.terminal import Ink, clean, pad, shorten
from midstream.errors import UsageError
from midstream.session.journal_reading import JournalReader

REQUEST_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of a request in a file: twice the limit of any provider."""
_COSTLY = {"divergence", "rebase", "tools-changed"}
"""Classes after which no input is from the cache."""


@click.command()
@click.argument("session", default="-", shell_complete=complete)
@click.option(
    "--diff",
    "requests",
    nargs=2,
    metavar="BEFORE AFTER",
    type=InputFile(),
    help="Compare two recorded requests (files with their JSON bodies) instead.",
)
@source_options
def cache(session: str, requests: tuple[Path, Path] | None, source: Source, output: Output) -> int:
    """Show the cached share of each turn, and the reason for the rest.

    SESSION is an id, a unique beginning of one, or - for the last changed session. With --diff, the command prints the
    first difference of two requests, and exits with 6 if there is one.
    """
    if requests:
        return _compare(*requests, output)
    found = resolve(source, session)
    journal = JournalReader()
    turns = turn_costs(journal.read(bytes(line.record)) for line in source.records(found.id))
    if output.is_json:
        for turn in turns:
            output.print_json({**msgspec.to_builtins(turn), "uncached_tokens": turn.uncached_tokens})
        return 0
    output.print_rows(table(turns, output.ink, output.width))
    click.echo(summary(turns), err=True)
    return 0


def table(turns: Sequence[TurnCost], ink: Ink, width: int) -> Iterator[str]:
    """Format turns for `width` columns."""
    if not turns:
        return
    room = max(12, *(len(turn.kind) for turn in turns))
    yield ink.bold(f"TURN  {pad('KIND', room)}     INPUT    CACHED  UNCACHED  WHY")
    for turn in turns:
        tokens = (turn.input_tokens, turn.cached_tokens, turn.uncached_tokens)
        numbers = "  ".join(f"{'-' if count < 0 else format(count, ','):>8}" for count in tokens)
        row = f"{pad(str(turn.turn), 4)}  {pad(turn.kind, room)}  {numbers}  "
        why = f"{turn.way}: {turn.reason}" if turn.way else turn.reason
        line = shorten(f"{row}{clean(why, is_one_line=True)}".rstrip(), width)
        yield ink.yellow(line) if turn.kind in _COSTLY else line


def summary(turns: Sequence[TurnCost]) -> str:
    """Return a line with the cached share of all turns."""
    counted = [turn for turn in turns if turn.input_tokens > 0]
    read = sum(turn.input_tokens for turn in counted)
    cached = sum(max(turn.cached_tokens, 0) for turn in counted)
    calls = sum(len(turn.calls) for turn in turns)
    count = f"{_format_count(len(turns), 'turn')}, {_format_count(calls, 'model call')}"
    if not read:
        return f"{count}; no provider counted tokens."
    return f"{count}: {cached:,} of {read:,} input tokens came from the cache ({100 * cached / read:.0f} %)."


def _format_count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _compare(before: Path, after: Path, output: Output) -> int:
    difference = first_difference(_body(before), _body(after))
    if difference is None:
        output.print_one(
            {"difference": None}, "The later request begins with the whole earlier one.", err=False
        )
        return 0
    share = 100 * difference.byte / max(difference.total, 1)
    text = one_line(f"{share:.0f} % of the earlier request is kept: {difference.words}.")
    report = {**msgspec.to_builtins(difference), "words": difference.words}
    output.print_one({"difference": report}, text, err=False)
    return VERIFICATION


def _body(path: Path) -> bytes:
    if path.stat().st_size > REQUEST_BYTES_MAX:
        raise UsageError(f"{str(path)!r} is larger than a request can be ({REQUEST_BYTES_MAX:,} bytes)")
    body = path.read_bytes()
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} does not contain a request (a JSON object): {error}") from error
    return body
