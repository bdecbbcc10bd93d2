"""Comparison with other libraries on the shapes for which a repair can take quadratic time, in the same run.

The libraries need an environment of their own (`make bench-peers`). A library that is not installed is skipped with a
message. The input objects of each library are made outside the measured time. Each repair gets its own lists.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.histories import best_ms
from bench.long_histories import HARD
from midstream.history.operations import convert, repair

Json = dict[str, Any]
MESSAGES = 8_000
AHEAD_MIN = 20.0
"""Bar for the ratio of a peer's time to midstream's, if the peer's time is quadratic."""
QUADRATIC_MIN = 1.6
"""Exponent of growth from which a time counts as quadratic."""
SLOW_MIN_MS = 100.0
"""Times below this are too short to measure an exponent, and do not matter."""
ROUNDS = 3


class Point(msgspec.Struct):
    """One peer with one shape, the best of several rounds."""

    who: str
    shape: str
    messages: int
    cpu_ms: float
    exponent: float
    """Exponent of growth from half the size: 1 is linear, 2 is quadratic."""
    midstream_ms: float
    """CPU time of `repair` for the same history, with the default profile."""
    ahead: float
    is_quadratic: bool
    """Whether the bar applies to this peer."""


def _litellm_factory() -> Any:  # noqa: ANN401 - a module of LiteLLM
    setattr(importlib.import_module("litellm"), "modify_params", True)  # noqa: B010 - untyped; it enables their repair
    return importlib.import_module("litellm.litellm_core_utils.prompt_templates.factory")


def _litellm(messages: list[Json]) -> Callable[[], object]:
    factory = _litellm_factory()
    return lambda: factory.sanitize_messages_for_tool_calling(list(messages))


def _litellm_anthropic(messages: list[Json]) -> Callable[[], object]:
    factory = _litellm_factory()
    return lambda: factory.anthropic_messages_pt(list(messages), "claude-sonnet-4-5", "anthropic")


def _litellm_bedrock(messages: list[Json]) -> Callable[[], object]:
    factory = _litellm_factory()
    model = "anthropic.claude-sonnet-4-5-20250929-v1:0"
    return lambda: factory._bedrock_converse_messages_pt(list(messages), model, "bedrock_converse")  # noqa: SLF001 - it has no other name


def _openai_agents(messages: list[Json]) -> Callable[[], object]:
    items = importlib.import_module("agents.run_internal.items")
    read = convert(messages, source="openai-chat", target="openai-responses").messages
    return lambda: items.drop_orphan_function_calls(
        items.deduplicate_input_items_preferring_latest(items.normalize_input_items_for_api(list(read)))
    )


def _pydantic_ai(messages: list[Json]) -> Callable[[], object]:
    clean = importlib.import_module("pydantic_ai._agent_graph")._clean_message_history  # noqa: SLF001 - it has no other name
    adapter = importlib.import_module("pydantic_ai.messages").ModelMessagesTypeAdapter
    read = adapter.validate_python(convert(messages, source="openai-chat", target="pydantic-ai").messages)
    return lambda: clean(list(read))


def _langchain_merge(messages: list[Json]) -> Callable[[], object]:
    core = importlib.import_module("langchain_core.messages")
    read = core.convert_to_messages(messages)
    return lambda: core.merge_message_runs(read)


def _langchain_trim(messages: list[Json]) -> Callable[[], object]:
    core = importlib.import_module("langchain_core.messages")
    read = core.convert_to_messages(messages)
    return lambda: core.trim_messages(
        read, strategy="last", token_counter=len, max_tokens=len(read) // 2, start_on="human"
    )


def _langchain_filter(messages: list[Json]) -> Callable[[], object]:
    """Return a filter that drops calls without results, and results without calls."""
    core = importlib.import_module("langchain_core.messages")
    read = core.convert_to_messages(messages)
    asked = {call["id"] for message in read for call in getattr(message, "tool_calls", ())}
    answered = {message.tool_call_id for message in read if message.type == "tool"}
    lone = sorted(asked ^ answered)
    return lambda: core.filter_messages(read, exclude_tool_calls=lone)


PEERS: dict[str, Callable[[list[Json]], Callable[[], object]]] = {
    "LiteLLM sanitize": _litellm,
    "LiteLLM to Anthropic": _litellm_anthropic,
    "LiteLLM to Bedrock": _litellm_bedrock,
    "openai-agents dedupe, drop orphans": _openai_agents,
    "pydantic-ai clean": _pydantic_ai,
    "langchain merge_message_runs": _langchain_merge,
    "langchain trim_messages": _langchain_trim,
    "langchain filter_messages": _langchain_filter,
}


def run(folder: Path) -> list[Point]:
    """Measure each installed library with every hard shape, print, return."""
    del folder
    logging.disable(logging.WARNING)  # a peer logs each of thousands of edits
    points: list[Point] = []
    for shape, make in HARD.items():
        half, whole = make(MESSAGES // 2), make(MESSAGES)
        own_ms, _ = best_ms(lambda each=whole: repair(each, format="openai-chat"))  # type: ignore[misc]  # a default binds it
        for who, prepare in PEERS.items():
            try:
                before_ms, _ = best_ms(prepare(half), ROUNDS)
                after_ms, _ = best_ms(prepare(whole), ROUNDS)
            except Exception as error:  # noqa: BLE001 - a peer may refuse a history with any error; it is printed
                print(f"skipped: {who}, {shape}: {type(error).__name__}: {str(error)[:100]}")
                continue
            exponent = math.log2(after_ms / before_ms)
            is_quadratic = exponent >= QUADRATIC_MIN and after_ms >= SLOW_MIN_MS
            ahead = after_ms / own_ms
            points.append(Point(who, shape, len(whole), after_ms, exponent, own_ms, ahead, is_quadratic))
    print(table(points))
    return points


def table(points: list[Point]) -> str:
    """Return the points as text for a terminal."""
    rows = [f"{'shape':<31}{'who':<36}{'messages':>9}{'CPU ms':>10}{'n^':>6}{'midstream':>11}{'ahead':>8}"]
    for point in points:
        verdict = ""
        if point.is_quadratic:
            verdict = f"  {'ok' if point.ahead >= AHEAD_MIN else 'BELOW'} ({AHEAD_MIN:.0f} x)"
        rows.append(
            f"{point.shape:<31}{point.who:<36}{point.messages:>9}{point.cpu_ms:>10.1f}{point.exponent:>6.2f}"
            f"{point.midstream_ms:>11.1f}{point.ahead:>7.1f}x{verdict}"
        )
    return "\n".join(rows)
