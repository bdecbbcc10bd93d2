"""The selection of deaths: a few for every day, all of them for `make fault`; and the table of their results."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from midstream.environment import Fault
from tests.fault.matrix import CaseReport, Kill, KillCase, Side

APPENDS = (Fault.BEFORE_APPEND, Fault.AFTER_APPEND, Fault.AFTER_PUBLISH)
ROUND_TOOLS = (Fault.BEFORE_TOOL, Fault.AFTER_TOOL)
CHECKPOINTS = (Fault.BEFORE_CHECKPOINT, Fault.AFTER_CHECKPOINT)
IN_RECOVERY = (Fault.BEFORE_CLAIM, Fault.AFTER_CLAIM, *APPENDS)


def _server(point: Fault, count: int) -> Kill:
    return Kill("server", point, count)


def _client(point: Fault, count: int) -> Kill:
    return Kill("client", point, count)


EVERY_DAY: tuple[KillCase, ...] = (
    # The first message: sent, stored, acknowledged; then the model streams.
    *(KillCase((_server(point, 1),)) for point in (Fault.BEFORE_CLAIM, Fault.AFTER_CLAIM, *APPENDS)),
    KillCase((_server(Fault.BEFORE_ACK, 1),)),
    *(KillCase((_server(point, 12),)) for point in APPENDS),
    # Two concurrent reads, a write, the slow tool; the client's result is stored and not acknowledged.
    *(KillCase((_server(point, count),)) for point in ROUND_TOOLS for count in (1, 3, 5)),
    KillCase((_server(Fault.BEFORE_ACK, 2),)),
    # Recovery dies too; the slow tool is run, and the last text is interrupted.
    *(KillCase((_server(Fault.AFTER_TOOL, 2), _server(point, 1))) for point in IN_RECOVERY),
    KillCase(
        (_server(Fault.AFTER_TOOL, 5), _server(Fault.AFTER_PUBLISH, 8), _server(Fault.BEFORE_APPEND, 3))
    ),
    # The client, before and after it has stored its events, and around its own tool; then both.
    *(KillCase((_client(point, count),)) for point in CHECKPOINTS for count in (1, 8)),
    *(KillCase((_client(point, 1),)) for point in ROUND_TOOLS),
    KillCase((_server(Fault.BEFORE_TOOL, 3), _client(Fault.AFTER_CHECKPOINT, 6))),
    # A cancel by the user.
    KillCase((_server(Fault.BEFORE_ACK, 2),), is_cancelled=True),
    KillCase((_server(Fault.AFTER_TOOL, 4), _client(Fault.BEFORE_CHECKPOINT, 9)), is_cancelled=True),
)
"""About thirty deaths: every point, in every part of the turn."""


def every_case(reference: CaseReport, cancelled: CaseReport) -> Iterator[KillCase]:
    """Yield the whole matrix, from the number of times that each point is reached without a death."""
    times = reference.reached
    for point in (*APPENDS, *ROUND_TOOLS, Fault.BEFORE_CLAIM, Fault.AFTER_CLAIM, Fault.BEFORE_ACK):
        yield from _each("server", point, times)
    for point in (*CHECKPOINTS, *ROUND_TOOLS):
        yield from _each("client", point, times)
    appends = times["server"][Fault.BEFORE_APPEND]
    for count in range(1, appends + 1, 3):
        for point in IN_RECOVERY:
            yield KillCase((_server(Fault.AFTER_APPEND, count), _server(point, 1)))
        yield KillCase((_server(Fault.AFTER_PUBLISH, count), _client(Fault.AFTER_CHECKPOINT, count)))
    for count in range(1, cancelled.reached["server"][Fault.BEFORE_APPEND] + 1):
        for point in APPENDS[:2]:
            yield KillCase((_server(point, count),), is_cancelled=True)
    for count in range(1, cancelled.reached["client"][Fault.BEFORE_CHECKPOINT] + 1, 2):
        yield KillCase((_client(Fault.AFTER_CHECKPOINT, count),), is_cancelled=True)


def _each(side: Side, point: Fault, times: dict[str, dict[str, int]]) -> Iterator[KillCase]:
    for count in range(1, times[side][point] + 1):
        yield KillCase((Kill(side, point, count),))


def summary(reports: Sequence[CaseReport]) -> dict[str, Any]:
    """Return the figures of a matrix, for the table and for the file."""
    deaths: dict[str, int] = defaultdict(int)
    for report in reports:
        for point in report.deadly:
            deaths[point.value] += 1
    takeover = [seconds for report in reports for seconds in report.takeover_s]
    from_start = [seconds for report in reports for seconds in report.from_start_s]
    return {
        "cases": len(reports),
        "deaths": sum(deaths.values()),
        "deaths_by_point": dict(sorted(deaths.items())),
        "cases_in_which_a_point_was_not_reached": sum(
            report.deaths < report.case.count(",") + 1 for report in reports
        ),
        "cases_with_a_problem": sum(bool(report.problems) for report in reports),
        "tool_executions": sum(report.runs for report in reports),
        "announced_reruns_of_reads": sum(report.reruns for report in reports),
        "calls_with_unknown_outcome": sum(report.unknown for report in reports),
        "takeover_from_process_start_s": _spread(takeover),
        "takeover_from_host_start_s": _spread(from_start),
        "seconds_per_case": _spread([report.seconds for report in reports]),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 4),
        "most": round(ordered[-1], 4),
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures for a terminal."""
    lines = []
    for name, value in figures.items():
        content = value
        if isinstance(value, dict):
            content = ", ".join(f"{key} {number}" for key, number in value.items())
        lines.append(f"  {name.replace('_', ' '):42} {content}")
    return "\n".join(lines)


def figures_of(story: str, reports: Sequence[CaseReport]) -> dict[str, int]:
    """Return the results of the cases of one story."""
    ours = [each for each in reports if each.case.startswith(f"{story}:")]
    return {
        "cases": len(ours),
        "deaths": sum(each.deaths for each in ours),
        "duplicate_effects": sum(each.duplicates for each in ours),
        "reruns": sum(each.reruns for each in ours),
        "unknown": sum(each.unknown for each in ours),
        "problems": sum(bool(each.problems) for each in ours),
    }


def lines_of(figures: dict[str, dict[str, int]]) -> str:
    """Return the figures of stories for a terminal."""
    return "\n".join(
        f"  {story:22} " + ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in each.items())
        for story, each in figures.items()
    )
