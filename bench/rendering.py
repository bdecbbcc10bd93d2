"""Cost of rendering a session's history for a provider, before each model call."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from midstream.history.messages import (
    Finish,
    History,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    UserMessage,
)
from midstream.history.rendering import render

EXCHANGES = 1000
PROFILES = ("openai-chat", "anthropic", "responses", "gemini", "strict-template")
ROUNDS = 15


class Point(msgspec.Struct):
    """Best of several rounds."""

    profile: str
    steps: int
    ms: float
    growth: float
    """Ratio to the time of half as many steps: 2 is linear."""


def _history(steps: int) -> History:
    entries: list[UserMessage | Step] = []
    for number in range(steps // 2):
        call = ToolCall(f"call_{number}", "read", '{"path": "a.txt"}')
        response = Response((Text("I look."), call), Finish.CALLS)
        entries += [
            UserMessage.of(f"question {number}"),
            Step(response, (ToolResult(call.id, "the text of a file"),)),
            Step(Response((Text("It says so."),))),
        ]
    return History(tuple(entries))


def _best_ms(history: History, profile: str) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        render(history, "Be brief.", profile)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def run(folder: Path) -> list[Point]:
    """Measure, print, return."""
    del folder
    half, whole = _history(EXCHANGES // 2), _history(EXCHANGES)
    points = [
        Point(profile, EXCHANGES, ms, ms / _best_ms(half, profile))
        for profile in PROFILES
        for ms in [_best_ms(whole, profile)]
    ]
    print(f"{'profile':<18}{'steps':>10}{'ms':>8}{'x':>6}")
    for point in points:
        print(f"{point.profile:<18}{point.steps:>10}{point.ms:>8.1f}{point.growth:>6.2f}")
    return points
