"""One line of progress on stderr."""

from __future__ import annotations

import pytest

from midstream.cli.status_line import PAUSE_S, QUIET_S, StatusLine
from midstream.environment import World


class StatusLineClock(World):
    at = 0.0

    def monotonic(self) -> float:
        return self.at


def test_a_line_appears_late_is_replaced_at_intervals_and_is_removed_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = StatusLineClock()
    with StatusLine(is_terminal=True, world=clock) as line:
        line.show("soon done")
        assert capsys.readouterr().err == ""
        clock.at += QUIET_S
        line.show("1 of\x1b[2J 3")
        assert capsys.readouterr().err == "\r\x1b[K1 of 3"
        line.show("2 of 3")
        assert capsys.readouterr().err == ""
        clock.at += PAUSE_S
        line.show("3 of 3")
        assert capsys.readouterr().err == "\r\x1b[K3 of 3"
    assert capsys.readouterr().err == "\r\x1b[K"
    line.clear()
    assert capsys.readouterr().err == ""


def test_there_is_no_line_if_stderr_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clock = StatusLineClock()
    with StatusLine(is_terminal=False, world=clock) as line:
        clock.at += QUIET_S
        line.show("1 of 3")
    assert capsys.readouterr().err == ""
