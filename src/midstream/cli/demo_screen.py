"""Display of the demo on a terminal: chapters, notes, and the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from midstream.cli.screen import Screen
from midstream.cli.terminal import Ink, indent_lines, pad
from midstream.client import Event
from midstream.demo.check import DemoVerdict, Timings

WIDTH = 80


class DemoScreen:
    """Shows the demo.

    Args:
        write: Prints text.
    """

    def __init__(self, write: Callable[[str], None], ink: Ink) -> None:
        self.write = write
        self._ink = ink
        self._screen = Screen(write, write, ink, WIDTH)
        self.pause = self._screen.pause

    def chapter(self, number: int, text: str) -> None:
        """Print the heading of a chapter."""
        self._screen.pause()
        lines = indent_lines(text, "    ", WIDTH)
        self.write(self._ink.bold(f"\n {number}  {lines[0].lstrip()}\n"))
        self.write("".join(self._ink.bold(f"{line}\n") for line in lines[1:]))

    def note(self, text: str) -> None:
        """Show an action on the connection or the server."""
        self._screen.remark(self._ink.yellow(f"  {text}"))

    def show(self, event: Event) -> None:
        """Show an event of the turn."""
        self._screen.show(event.record)

    def end(self, verdict: DemoVerdict, timings: Timings) -> None:
        """Show the results of the checks."""
        self.chapter(6, "Checked from the outside")
        self.write("".join(f"{line}\n" for line in table(verdict, timings, self._ink)))


def table(verdict: DemoVerdict, timings: Timings, ink: Ink) -> Iterator[str]:
    """Format the verdict as lines of at most 80 columns."""
    words = verdict.words
    yield _row(ink, "Text: screen and SQLite file", "shown", "journal", "lost", "twice", is_head=True)
    pieces = (words.shown_pieces, words.journal_pieces, words.lost, words.twice)
    yield _row(ink, "tokens (pieces, one event each)", *pieces)
    missing = max(0, words.journal_characters - words.shown_characters)
    surplus = max(0, words.shown_characters - words.journal_characters)
    yield _row(ink, "characters", words.shown_characters, words.journal_characters, missing, surplus)
    yield ""
    yield _row(ink, "Tool calls, by the ledger", "started", "finished", "outcome", "twice", is_head=True)
    for each in verdict.executions:
        name = f"{each.tool} (turn {each.turn})"
        yield _row(ink, name, each.started, each.finished, each.outcome, max(0, each.started - 1))
    yield ""
    yield _row(ink, "History", is_head=True)
    fold = f"accepted: {verdict.entries} entries" if verdict.entries else "REFUSED"
    yield f" {pad('journal readable, each call has a result', 46)}{fold}"
    ends = ", ".join(verdict.statuses)
    yield f" {pad('how the turns ended', 46)}{ends}"
    yield ""
    yield _row(ink, "Time to recovery", is_head=True)
    for what, seconds in (
        ("connection cut -> next text on the screen", timings.cut_to_words),
        ("server restarted -> listening", timings.restart_to_listening),
        ("server restarted -> first recovered record", timings.restart_to_record),
        ("server restarted -> first new text on the screen", timings.restart_to_words),
    ):
        took = "not seen" if seconds is None else f"{seconds:.2f} s"
        yield f" {pad(what, 52)}{took:>12}"


def _row(ink: Ink, name: str, *cells: object, is_head: bool = False) -> str:
    line = f" {pad(name, 38)}" + "".join(f"{cell!s:>10}" for cell in cells).rstrip()
    return ink.bold(line.rstrip()) if is_head else line
