"""Withdrawn turns: their lines stay in the file, and are not sent any more."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from midstream.doctor.jsonl_formats import Ledger
from midstream.doctor.shapes import Json


class Rollbacks:
    """The stretches of a file that a later line withdrew. Stores one number for each turn."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._turns = array("q")
        """Lines that begin a valid turn."""
        self._firsts = array("q")
        self._lasts = array("q")

    def note(self, number: int, line: Json) -> None:
        """Process the next line of the file."""
        if self._ledger.is_turn(line):
            self._turns.append(number)
        undone = self._ledger.turns_undone(line)
        if not undone or not self._turns:
            return
        first = self._turns[-min(undone, len(self._turns))]
        del self._turns[-undone:]
        while self._firsts and self._firsts[-1] >= first:
            self._firsts.pop()
            self._lasts.pop()
        self._firsts.append(first)
        self._lasts.append(number)

    def has(self, number: int) -> bool:
        """Whether a line was withdrawn."""
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number <= self._lasts[place]

    @property
    def lines(self) -> int:
        """Number of withdrawn lines."""
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)
