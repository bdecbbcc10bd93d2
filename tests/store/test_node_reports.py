"""Reports of servers, as displayed."""

from __future__ import annotations

import msgspec
import pytest

from midstream.store.contract import KeyValueEntry
from midstream.store.node_reports import ALONE_S, REPORT_S, SILENT_S, NodeReport, lines_of


def _row(name: str, report: NodeReport, at: float) -> KeyValueEntry:
    return KeyValueEntry(name, 1, msgspec.json.encode(report), at)


def _report(started_at: float, every_s: float = REPORT_S, **figures: float) -> NodeReport:
    return NodeReport("serve", "1.0", "agent", "host", 7, started_at, every_s, 2, figures)


@pytest.mark.parametrize(
    ("every_s", "age_s", "state"),
    [
        (REPORT_S, SILENT_S - 1, "serving"),
        (REPORT_S, SILENT_S + 1, "silent"),
        (ALONE_S, SILENT_S + ALONE_S - 1, "serving"),
        (ALONE_S, SILENT_S + ALONE_S + 1, "silent"),
    ],
)
def test_a_node_is_silent_when_its_newest_report_is_too_old(every_s: float, age_s: float, state: str) -> None:
    (line,) = lines_of([_row("n", _report(0.0, every_s), at=100.0)], now=100.0 + age_s)
    assert (line.state, line.report_age_s) == (state, age_s)


def test_figures_are_shown_and_the_oldest_server_comes_first() -> None:
    rows = [
        _row("young", _report(20.0, leases=3.0, appends_waiting=5.0, loop_lag_seconds=0.25), at=50.0),
        _row("old", _report(10.0, is_draining=1.0), at=50.0),
        KeyValueEntry("damaged", 1, b"{", 50.0),
    ]
    old, young = lines_of(rows, now=51.0)
    assert (old.node, old.state, old.worker) == ("old", "draining", 2)
    assert (young.node, young.leases, young.appends_waiting, young.loop_lag_s) == ("young", 3, 5, 0.25)
