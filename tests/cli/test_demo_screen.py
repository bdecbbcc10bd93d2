"""The demo on a terminal."""

from __future__ import annotations

from midstream.cli.demo_screen import WIDTH, DemoScreen, table
from midstream.cli.terminal import PLAIN, width_of
from midstream.demo.check import Timings
from tests.demo.test_check import judge_run

TIMES = Timings(0.5, 1.0, None, 2.0)


def test_the_table_fits_80_columns() -> None:
    lines = list(table(judge_run(), TIMES, PLAIN))
    assert max(map(width_of, lines)) <= 80
    assert any(line.split() == ["characters", "7", "7", "0", "0"] for line in lines)
    assert any("not seen" in line for line in lines)


def test_a_chapter_has_its_number_and_is_wrapped() -> None:
    written: list[str] = []
    DemoScreen(written.append, PLAIN).chapter(3, "word " * 40)
    lines = "".join(written).strip("\n").split("\n")
    assert (lines[0][:5], lines[1][:4], max(map(width_of, lines)) <= WIDTH) == (" 3  w", "    ", True)
