"""Output of `midstream doctor`: reports and checks as lines of text, and a progress line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from midstream.cli.status_line import StatusLine
from midstream.cli.terminal import Ink, clean, shorten, width_of
from midstream.doctor import journals
from midstream.doctor.findings import JOURNAL, HistoryReport, LocatedFinding, Status
from midstream.doctor.installation import Check, CheckResult
from midstream.environment import World

INDENT = "  "

_WORDS = {
    Status.CLEAN: "clean",
    Status.FINDINGS: "with findings",
    Status.LOSSY: "with findings that need a loss",
    Status.UNREADABLE: "unreadable",
    Status.MISSING: "missing",
}


def report_lines(report: HistoryReport, ink: Ink, width: int, *, limit: int) -> Iterator[str]:
    """Yield lines about the findings in one history."""
    name = clean(report.path, is_one_line=True)
    sign = {Status.CLEAN: ink.green("✓"), Status.FINDINGS: ink.yellow("!")}.get(report.status, ink.red("✗"))
    yield f"{sign} {ink.bold(_tail_of(name, width - 2) if ink.is_terminal else name)}"
    if report.format:
        yield from _wrap(_about(report), INDENT, width)
    if report.problem:
        yield from _wrap(f"{report.problem} [{report.reason}]", INDENT, width)
    for each in report.findings[:limit]:
        yield from _finding_lines(each, ink, width)
    if len(report.findings) > limit:
        yield from _wrap(f"... and {len(report.findings) - limit} more; --json has all", INDENT, width)
    for note in report.notes:
        yield from _wrap(f"note: {note}", INDENT, width)
    if report.written:
        yield f"{INDENT}{ink.green('wrote')} {_tail_of(clean(report.written, is_one_line=True), width - 8)}"
        if report.backup:
            yield f"{INDENT}the original is {_tail_of(clean(report.backup, is_one_line=True), width - 18)}"


def _about(report: HistoryReport) -> str:
    parts, whole = ("record", "sessions") if report.format == JOURNAL else ("message", "conversations")
    talks = f" in {report.conversations} {whole}" if report.conversations > 1 else ""
    found = f", {_count(len(report.findings), 'finding')}" if report.findings else ""
    return f"{report.format} for {report.profile}, {_count(report.messages, parts)}{talks}{found}"


def _finding_lines(found: LocatedFinding, ink: Ink, width: int) -> Iterator[str]:
    place = _place(found)
    about = f" ({shorten(clean(found.call_id, is_one_line=True), 40)})" if found.call_id else ""
    yield from _wrap(f"{place}: {found.code}{about}: {found.rule}", INDENT, width)
    lost = f"; lost: {shorten(clean(found.lost, is_one_line=True), 40)}" if found.lost.strip() else ""
    for line in _wrap(f"repair: {found.repair}{lost}", 2 * INDENT, width):
        yield ink.red(line) if lost else ink.dim(line)


def _place(found: LocatedFinding) -> str:
    places = [clean(found.file, is_one_line=True)] if found.file else []
    if found.line:
        places.append(f"line {found.line}")
    if found.message >= 0:
        places.append(f"{'record' if found.code in journals.LOST else 'message'} {found.message}")
    if found.part >= 0:
        places.append(f"part {found.part}")
    return ", ".join(places) or "the whole"


def check_lines(check: Check, ink: Ink, width: int) -> Iterator[str]:
    """Yield lines about the result of one check."""
    sign = {
        CheckResult.OK: ink.green("✓"),
        CheckResult.WARNING: ink.yellow("!"),
        CheckResult.PROBLEM: ink.red("✗"),
    }
    head = f"{check.name:<12} "
    first, *rest = _wrap(check.words, "", width - len(head) - 2) or [""]
    yield f"{sign[check.verdict]} {ink.bold(head)}{first}"
    for line in rest:
        yield f"{' ' * (len(head) + 2)}{line}"


def summary(statuses: Mapping[Status, int]) -> str:
    """Return the summary line."""
    counts = ", ".join(
        f"{statuses[status]} {words}" for status, words in _WORDS.items() if statuses.get(status)
    )
    histories = "history" if sum(statuses.values()) == 1 else "histories"
    return f"{sum(statuses.values())} {histories}: {counts}."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _wrap(text: str, indent: str, width: int) -> list[str]:
    words = clean(text, is_one_line=True)
    return textwrap.wrap(
        words, width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def _tail_of(path: str, width: int) -> str:
    if width_of(path) <= width:
        return path
    tail = path
    while width_of(tail) > width - 1:
        tail = tail[1:]
    return f"…{tail}"


class ProgressLine(StatusLine):
    """Progress line: the current file, and the bytes that were read."""

    def __init__(self, *, is_terminal: bool, world: World) -> None:
        super().__init__(is_terminal=is_terminal, world=world)
        self._files = 0
        self._name = ""

    def next(self, name: str) -> None:
        """Begin the next file."""
        self._files += 1
        self._name = name
        self.tick(0)

    def tick(self, done: int) -> None:
        """Set the number of bytes that were read."""
        size = f" {done / 2**20:,.0f} MB" if done >= 2**20 else ""
        self.show(f"file {self._files}: {self._name}{size}")
