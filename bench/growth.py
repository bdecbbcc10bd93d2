"""Growth of the time of a repair from 10,000 to 20,000 messages, for every format and every hard shape.

Linear growth is a ratio of 2; the bar is 2.3. Each ratio compares the best of several interleaved rounds, in CPU time,
so that other work on the machine changes it little. A second ratio is measured with Python's garbage collector paused:
the collector visits all live objects, so its share grows in steps that do not depend on the repair.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.long_histories import half_answered, one_id, orphans, quarter_broken, requests, valid
from midstream.history.operations import convert_by_name as convert
from midstream.history.operations import repair_by_name as repair

Json = dict[str, Any]
FORMATS = (
    "anthropic",
    "openai-chat",
    "openai-responses",
    "gemini",
    "mistral",
    "bedrock",
    "pydantic-ai",
    "langchain",
)


def _broken(count: int) -> list[Json]:
    chat = valid("openai-chat", None, shape="simple", count=count)
    return quarter_broken("openai-chat", chat)


SHAPES: dict[str, Callable[[int], list[Json]]] = {
    "a quarter broken": _broken,
    "parallel calls": lambda count: half_answered(count * 2 // 3),
    "requests in a row": requests,
    "orphans": orphans,
    "one id": one_id,
}
"""Functions by shape. Each returns about the requested number of messages, in the chat format."""
MESSAGES = 20_000
ROUNDS = 5
BAR = 2.3
"""Upper limit for the ratio of the whole to its half."""


class Growth(msgspec.Struct):
    """Best times of one shape in one format."""

    format: str
    shape: str
    messages: int
    half_seconds: float
    seconds: float
    ratio: float
    ratio_uncollected: float
    """The ratio with the garbage collector paused."""
    is_met: bool
    """Whether the ratio with the collector running is below the bar."""


def history(form: str, shape: str, count: int) -> list[Json]:
    """Return a history of one shape in one format, not repaired."""
    chat = SHAPES[shape](count)
    return chat if form == "openai-chat" else convert(chat, source="openai-chat", target=form).messages


def run(folder: Path) -> list[Growth]:
    """Measure every format with every shape."""
    del folder
    rows = [measure(form, shape) for form in FORMATS for shape in SHAPES]
    print(table(rows))
    return rows


def measure(form: str, shape: str, messages: int = MESSAGES) -> Growth:
    """Measure a history and its half."""
    half, whole = history(form, shape, messages // 2), history(form, shape, messages)
    before, after = _best(form, half, whole)
    gc.disable()
    try:
        plain_before, plain_after = _best(form, half, whole)
    finally:
        gc.enable()
    ratio = after / before
    return Growth(form, shape, messages, before, after, ratio, plain_after / plain_before, ratio < BAR)


def _best(form: str, half: list[Json], whole: list[Json]) -> tuple[float, float]:
    before = after = float("inf")
    for _ in range(ROUNDS):
        before = min(before, _seconds(form, half))
        after = min(after, _seconds(form, whole))
    return before, after


def _seconds(form: str, messages: list[Json]) -> float:
    gc.collect()
    start = time.process_time()
    repair(messages, format=form)
    return time.process_time() - start


def table(rows: list[Growth]) -> str:
    """Return the rows as text for a terminal."""
    lines = [f"{'format':<18}{'shape':<20}{'half ms':>9}{'ms':>9}{'ratio':>8}{'no gc':>8}  bar {BAR}"]
    lines += [
        f"{row.format:<18}{row.shape:<20}{row.half_seconds * 1e3:>9.1f}{row.seconds * 1e3:>9.1f}"
        f"{row.ratio:>8.2f}{row.ratio_uncollected:>8.2f}  {'met' if row.is_met else 'MISSED'}"
        for row in rows
    ]
    return "\n".join(lines)
