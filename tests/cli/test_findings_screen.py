"""Lines for people: narrow, clean, and silent at first."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.cli.findings_screen import ProgressLine, check_lines, report_lines, summary
from midstream.cli.terminal import PLAIN, width_of
from midstream.doctor.findings import HistoryReport, LocatedFinding, Status
from midstream.doctor.installation import Check, CheckResult
from midstream.environment import World


class ScreenClock(World):
    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    found = LocatedFinding(
        "dangling-call", "a call has no result", "added " + "words " * 30, 3, 4, 5, "id" * 40, "lost" * 40
    )
    report = HistoryReport(
        "x.json", Status.LOSSY, "anthropic", "bedrock-claude", 1000, 3, (found,) * 7, ("a note " * 20,)
    )
    lines = list(report_lines(report, PLAIN, width, limit=2))
    lines += check_lines(Check("file system", CheckResult.PROBLEM, "words " * 40), PLAIN, width)
    assert max(map(width_of, lines)) <= width


def test_a_store_has_records_in_sessions() -> None:
    found = LocatedFinding("journal-gap", "records are missing", "cut", message=7)
    report = HistoryReport("x.db", Status.LOSSY, "midstream", "any", 1000, 3, (found,))
    _, about, place, _ = report_lines(report, PLAIN, 80, limit=1)
    assert about.strip() == "midstream for any, 1,000 records in 3 sessions, 1 finding"
    assert place.strip() == "record 7: journal-gap: records are missing"


def test_a_summary_has_counts_with_singular_and_plural() -> None:
    assert summary({Status.CLEAN: 1}) == "1 history: 1 clean."
    assert summary({Status.CLEAN: 2, Status.MISSING: 1}) == "3 histories: 2 clean, 1 missing."


def test_progress_starts_late_is_one_line_and_is_removed_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = ScreenClock()
    with ProgressLine(is_terminal=True, world=world) as progress:
        progress.next("a.jsonl")
        assert capsys.readouterr().err == ""
        world.at += 0.4
        progress.tick(5 * 2**20)
        assert capsys.readouterr().err == "\r\x1b[Kfile 1: a.jsonl 5 MB"
        progress.tick(6 * 2**20)
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "\r\x1b[K"


def test_progress_is_silent_if_the_output_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    world = ScreenClock()
    with ProgressLine(is_terminal=False, world=world) as progress:
        world.at += 9.0
        progress.next(Path("a").name)
    assert capsys.readouterr().err == ""
