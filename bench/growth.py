"""How the time of a repair grows: 20,000 messages against 10,000, for every format and every shape that hurts.

Linear is twice the time; the bar is 2.3. Each ratio is between the best of some rounds that take turns, in seconds
of the processor: a machine that is busy elsewhere makes neither of them longer. Beside it the ratio with Python's
garbage collector paused: the collector walks what is alive, so its share grows in steps, and not by our doing.
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
"""Each makes about as many messages as it is asked for, in chat shape."""
MESSAGES = 20_000
ROUNDS = 5
BAR = 2.3
"""How much longer the whole may take than its half."""


class Growth(msgspec.Struct):
    """The best times of one shape in one format."""

    format: str
    shape: str
    messages: int
    half_seconds: float
    seconds: float
    ratio: float
    ratio_uncollected: float
    """The same with the garbage collector paused."""
    is_met: bool
    """Whether the ratio, with the collector at work, is below the bar."""


def history(form: str, shape: str, count: int) -> list[Json]:
    """Make a history of one shape, written in one format and not repaired."""
    chat = SHAPES[shape](count)
    return chat if form == "openai-chat" else convert(chat, source="openai-chat", target=form).messages


def run(folder: Path) -> list[Growth]:
    """Measure every format on every shape."""
    del folder
    rows = [measured(form, shape) for form in FORMATS for shape in SHAPES]
    print(table(rows))
    return rows


def measured(form: str, shape: str, messages: int = MESSAGES) -> Growth:
    """Compare a history with its half."""
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
    """Lay out the rows for a terminal."""
    lines = [f"{'format':<18}{'shape':<20}{'half ms':>9}{'ms':>9}{'ratio':>8}{'no gc':>8}  bar {BAR}"]
    lines += [
        f"{row.format:<18}{row.shape:<20}{row.half_seconds * 1e3:>9.1f}{row.seconds * 1e3:>9.1f}"
        f"{row.ratio:>8.2f}{row.ratio_uncollected:>8.2f}  {'met' if row.is_met else 'MISSED'}"
        for row in rows
    ]
    return "\n".join(lines)
