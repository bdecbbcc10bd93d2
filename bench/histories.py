"""What repairing a history costs: 10,000 messages, valid and broken, and the shapes on which others go quadratic.

Peers run in the same process on the same history where they are installed; each is told apart by what it does.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from midstream.history import convert, repair

Json = dict[str, Any]
MESSAGES = 10_000
HARD_MESSAGES = 8_000
ROUNDS = 3


class Point(msgspec.Struct):
    """The best of some rounds on one history."""

    who: str
    shape: str
    messages: int
    seconds: float
    exponent: float
    """Of growth from half the size: 1 is linear, 2 quadratic."""


def ordinary(count: int) -> list[Json]:
    """Questions, calls, results and answers."""
    messages: list[Json] = []
    while len(messages) < count:
        call_id = f"call_{len(messages)}"
        function = {"name": "read", "arguments": '{"path": "a.txt"}'}
        messages += [
            {"role": "user", "content": f"question {len(messages)}"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": "the text of a file"},
            {"role": "assistant", "content": "It says so."},
        ]
    return messages[:count]


def quarter_broken(count: int) -> list[Json]:
    """Every fourth turn lost its result."""
    chance = Random(1)  # noqa: S311 - the same history every time
    return [m for m in ordinary(count + count // 12) if m["role"] != "tool" or chance.random() > 1 / 4][
        :count
    ]


def parallel(count: int) -> list[Json]:
    """One reply with thousands of calls; half of them were answered."""
    function = {"name": "read", "arguments": "{}"}
    calls = [{"id": f"c{n}", "type": "function", "function": function} for n in range(count)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(0, count, 2)]
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
    ]


def requests(count: int) -> list[Json]:
    """Thousands of requests in a row."""
    return [{"role": "user", "content": f"question {number}"} for number in range(count)]


def orphans(count: int) -> list[Json]:
    """Thousands of results of nothing."""
    return [{"role": "tool", "tool_call_id": f"c{number}", "content": "x"} for number in range(count)]


def one_id(count: int) -> list[Json]:
    """Thousands of calls under one id, none answered."""
    function = {"name": "read", "arguments": "{}"}
    call = {"id": "same", "type": "function", "function": function}
    made: list[Json] = []
    for number in range(count // 2):
        made += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    return made


SHAPES: dict[str, tuple[Callable[[int], list[Json]], int]] = {
    "valid": (ordinary, MESSAGES),
    "a quarter broken": (quarter_broken, MESSAGES),
    "parallel calls": (parallel, HARD_MESSAGES),
    "requests in a row": (requests, HARD_MESSAGES),
    "orphans": (orphans, HARD_MESSAGES),
    "one id": (one_id, HARD_MESSAGES),
}


def _midstream(messages: list[Json]) -> Callable[[], object]:
    return lambda: repair(messages, format="openai-chat")


def _midstream_strict(messages: list[Json]) -> Callable[[], object]:
    return lambda: repair(messages, format="openai-chat", profile="strict-template")


def _pydantic_ai(messages: list[Json]) -> Callable[[], object]:
    clean = importlib.import_module("pydantic_ai._agent_graph")._clean_message_history  # noqa: SLF001 - it has no other name
    shapes = importlib.import_module("pydantic_ai.messages")

    read = shapes.ModelMessagesTypeAdapter.validate_python(
        convert(messages, source="openai-chat", target="pydantic-ai").messages
    )
    return lambda: clean(list(read))


def _langchain(messages: list[Json]) -> Callable[[], object]:
    core = importlib.import_module("langchain_core.messages")
    read = core.convert_to_messages(messages)
    return lambda: core.merge_message_runs(read)


WHO: dict[str, Callable[[list[Json]], Callable[[], object]]] = {
    "midstream": _midstream,
    "midstream, strict-template": _midstream_strict,
    "pydantic-ai clean": _pydantic_ai,
    "langchain merge_message_runs": _langchain,
}


def run(folder: Path) -> list[Point]:
    """Measure everybody who is installed on every shape."""
    del folder
    points = [
        point
        for shape in SHAPES
        for who, prepare in WHO.items()
        if (point := _measured(who, prepare, shape)) is not None
    ]
    print(table(points))
    return points


def table(points: list[Point]) -> str:
    """Lay out the points for a terminal."""
    rows = [f"{'shape':<20}{'who':<32}{'messages':>9}{'ms':>10}{'n^':>7}"]
    rows += [
        f"{p.shape:<20}{p.who:<32}{p.messages:>9}{p.seconds * 1e3:>10.1f}{p.exponent:>7.2f}" for p in points
    ]
    return "\n".join(rows)


def _measured(who: str, prepare: Callable[[list[Json]], Callable[[], object]], shape: str) -> Point | None:
    make, count = SHAPES[shape]
    try:
        half, whole = prepare(make(count // 2)), prepare(make(count))
    except (ImportError, AttributeError):
        return None
    before, after = _best(half), _best(whole)
    exponent = 0.0 if before == 0 else math.log2(after / before)
    return Point(who, shape, count, after, exponent)


def _best(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
