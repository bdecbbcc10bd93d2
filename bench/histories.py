"""Cost of `repair` for 10,000 messages of every format, simple and rich, valid and broken.

Figures are CPU times, the best of several rounds, with a bar for each state. `bench/peers.py` measures other libraries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.long_histories import quarter_broken, valid
from midstream.history.operations import repair_by_name as repair

MESSAGES = 10_000
VALID_MAX_MS = 120.0
REPAIRED_MAX_MS = 200.0
ROUNDS = 5

PROFILES: dict[str, tuple[str | None, ...]] = {
    "anthropic": (None, "vertex", "portable"),
    "openai-chat": (None, "deepseek", "kimi", "minimax", "strict-template", "portable"),
    "openai-responses": (None, "portable"),
    "gemini": (None, "gemini-3", "portable"),
    "mistral": (None, "mistral-v3", "portable"),
    "bedrock": (None, "bedrock-mistral", "portable"),
    "pydantic-ai": (None, "anthropic", "portable"),
    "langchain": (None, "portable"),
}


class Point(msgspec.Struct):
    """Best of several rounds with one history."""

    format: str
    profile: str
    shape: str
    state: str
    messages: int
    cpu_ms: float
    wall_ms: float
    bar_ms: float

    @property
    def is_over(self) -> bool:
        """Whether the CPU time is above the bar."""
        return self.cpu_ms > self.bar_ms


def run(folder: Path) -> list[Point]:
    """Measure every format and profile, print, return."""
    del folder
    points = [
        point
        for form, profiles in PROFILES.items()
        for profile in profiles
        for shape in ("simple", "rich")
        for point in _measure(form, profile, shape)
    ]
    print(table(points))
    return points


def _measure(form: str, profile: str | None, shape: str) -> list[Point]:
    whole = valid(form, profile, shape=shape, count=MESSAGES)
    assert repair(whole, format=form, profile=profile).messages is whole
    points = []
    states = (("valid", whole, VALID_MAX_MS), ("broken", quarter_broken(form, whole), REPAIRED_MAX_MS))
    for state, messages, bar_ms in states:
        cpu_ms, wall_ms = best_ms(lambda each=messages: repair(each, format=form, profile=profile))  # type: ignore[misc]  # a default binds it
        points.append(Point(form, profile or "its own", shape, state, len(messages), cpu_ms, wall_ms, bar_ms))
    return points


def best_ms(work: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """Return the least CPU time and the least wall time of several rounds."""
    cpu_s = wall_s = float("inf")
    for _ in range(rounds):
        began_cpu_s, began_s = time.process_time(), time.perf_counter()
        work()
        cpu_s = min(cpu_s, time.process_time() - began_cpu_s)
        wall_s = min(wall_s, time.perf_counter() - began_s)
    return cpu_s * 1e3, wall_s * 1e3


def table(points: list[Point]) -> str:
    """Return the points as text for a terminal."""
    rows = [
        f"{'format':<18}{'profile':<17}{'shape':<8}{'state':<8}{'messages':>9}{'CPU ms':>8}{'wall':>8}{'bar':>6}"
    ]
    rows += [
        f"{p.format:<18}{p.profile:<17}{p.shape:<8}{p.state:<8}{p.messages:>9}{p.cpu_ms:>8.1f}{p.wall_ms:>8.1f}"
        f"{p.bar_ms:>6.0f}{'  OVER' if p.is_over else ''}"
        for p in points
    ]
    over = sum(point.is_over for point in points)
    rows.append(f"{len(points)} rows, {over} over their bar")
    return "\n".join(rows)
