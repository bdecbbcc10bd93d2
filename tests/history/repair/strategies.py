"""Histories to search: valid ones of every format, their damaged variants, and arbitrary junk."""

# ruff: noqa: ANN401 - a history may hold anything
from __future__ import annotations

import copy
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st

from midstream.history.operations import repair_by_name as repair
from midstream.history.profiles import PROFILES
from midstream.history.repair.report import Repaired
from tests.oracles.accidents import (
    ACCIDENTS,
    GROUPED,
    Accident,
    bad_name,
    inner,
    not_a_message,
    parts_of,
    results_in,
)
from tests.oracles.scripts import WRITERS, valid

Json = dict[str, Any]
Pair = tuple[str, str | None]

SPOKEN_BY: dict[str, tuple[str, ...]] = {
    "anthropic": ("bedrock-claude", "vertex", "minimax", "portable"),
    "openai-chat": ("deepseek", "kimi", "minimax", "strict-template", "portable"),
    "openai-responses": ("portable",),
    "mistral": ("mistral-v3",),
    "gemini": ("gemini-3", "portable"),
    "bedrock": ("bedrock-mistral", "portable"),
    "pydantic-ai": ("neutral", "portable"),
    "langchain": ("strict-template",),
}
"""The profiles beside a format's own that occur with it and that the validators support."""
PAIRS: tuple[Pair, ...] = tuple((form, name) for form in WRITERS for name in (None, *SPOKEN_BY[form]))
EVERY_PAIR: tuple[Pair, ...] = tuple((form, name) for form in WRITERS for name in PROFILES)

SOUND = (*ACCIDENTS, not_a_message, bad_name)
"""Accidents after which all content is still readable."""

seeds = st.integers(0, 2**16)


@dataclass
class Broken:
    """A history, and its original before the accidents."""

    whole: list[Any]
    messages: list[Any]


def repair_pair(pair: Pair, messages: list[Any], **more: Any) -> Repaired:
    """Repair for a pair. For DeepSeek, thinking is stated: otherwise it depends on any response of the list."""
    thinking = True if pair[1] == "deepseek" else None
    return repair(messages, format=pair[0], profile=pair[1], thinking=thinking, **more)


def fine(pair: Pair, seed: int, turns: int = 3) -> list[Any]:
    """Return a history this pair accepts: one that is valid for its format, repaired for its profile."""
    return repair_pair(pair, valid(pair[0], Random(seed), turns=turns)).messages


@st.composite
def broken(draw: st.DrawFn, pair: Pair, *, accidents: tuple[Accident, ...] = SOUND, turns: int = 3) -> Broken:
    """Return a history of `fine` after one to three accidents."""
    form = pair[0]
    whole = fine(pair, draw(seeds), draw(st.integers(1, turns)))
    return Broken(whole, draw(accidents_to(form, whole, accidents=accidents)))


@st.composite
def accidents_to(
    draw: st.DrawFn, form: str, messages: list[Any], *, accidents: tuple[Accident, ...] = ACCIDENTS
) -> list[Any]:
    """Return a copy of a history after one to three accidents."""
    messages = copy.deepcopy(messages)
    for accident, seed in draw(
        st.lists(st.tuples(st.sampled_from(accidents), seeds), min_size=1, max_size=3)
    ):
        _happen(accident, form, messages, Random(seed))
    return messages


def _happen(accident: Accident, form: str, messages: list[Any], chance: Random) -> None:
    try:
        accident(form, messages, chance)
    except (AttributeError, TypeError, KeyError, ValueError, StopIteration):
        return  # The remains of an earlier accident cannot be broken this way.


@st.composite
def following(draw: st.DrawFn, pair: Pair) -> list[Any]:
    """Return messages after a turn boundary: a complete turn, and then anything; all ids are new."""
    start = turn(pair[0], Random(draw(seeds)))
    made: list[Any] = rename_ids([*start, *draw(broken(pair, turns=2)).messages], "x")
    return made


def turn(form: str, chance: Random) -> list[Any]:
    """Return one valid turn, without a system prompt."""
    return without_systems(valid(form, chance, turns=1))


def without_systems(messages: list[Any]) -> list[Any]:
    """Return the messages that are no system prompts: not every validator accepts them in mid-list."""
    systems = ("system", "developer")
    return [m for m in messages if not {m.get("role"), m.get("type")} & set(systems)]


@st.composite
def late(draw: st.DrawFn, pair: Pair) -> tuple[list[Any], list[Any]]:
    """Return a history that lacks some results, and those of them that arrive later, in any order."""
    form = pair[0]
    messages = copy.deepcopy(fine(pair, draw(seeds)))
    coming: list[Any] = []
    for holder, result in results_in(form, messages):
        fate = draw(st.sampled_from(("there", "late", "never")))
        if fate != "there":
            holder[:] = [item for item in holder if item is not result]
        if fate == "late":
            coming.append(result)
    order = draw(st.permutations(coming))
    return messages, [results_message(form, [result]) if form in GROUPED else result for result in order]


def results_message(form: str, results: list[Any]) -> Json:
    """Return the user's message with results."""
    if form == "gemini":
        return {"role": "user", "parts": results}
    if form == "pydantic-ai":
        return {"kind": "request", "parts": results}
    return {"role": "user", "content": results}


_NAMES = ("id", "call_id", "tool_use_id", "tool_call_id", "toolUseId", "signature", "name", "tool_name")


def rename_ids(value: Any, tag: str) -> Any:
    """Return the same with other ids, signatures and names of tools."""
    if isinstance(value, list):
        return [rename_ids(item, tag) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: f"{item}{tag}" if key in _NAMES and isinstance(item, str) and item else rename_ids(item, tag)
        for key, item in value.items()
    }


_WORDS = (
    "",
    " ",
    "words",
    "user",
    "assistant",
    "tool",
    "call_1",
    "text",
    "tool_use",
    "tool_result",
    "{",
    "\ud83d",
)
_KEYS = (
    "role", "type", "kind", "content", "parts", "data", "text", "id", "tool_calls", "tool_call_id", "call_id",
    "tool_use_id", "function", "name", "input", "arguments", "args", "output", "thinking", "signature", "summary",
    "toolUse", "toolUseId", "toolResult", "functionCall", "functionResponse", "response", "part_kind", "tool_name",
    "reasoning_content", "reasoningContent", "system",
)  # fmt: skip

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.sampled_from(_WORDS) | st.text(max_size=3),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inside, max_size=5),
    max_leaves=8,
)
"""Any JSON value, mostly with keywords of the formats."""


@st.composite
def histories_with_junk(draw: st.DrawFn, pair: Pair) -> Broken:
    """Return a broken history with junk between its messages, and in the places of their parts and fields."""
    case, form = draw(broken(pair, turns=2)), pair[0]
    messages = case.messages
    for place, thing, how in draw(
        st.lists(
            st.tuples(seeds, junk, st.sampled_from(("message", "part", "field"))), min_size=1, max_size=3
        )
    ):
        message = messages[place % len(messages)] if messages else None
        if how == "message" or not isinstance(message, dict) or not message:
            messages.insert(place % (len(messages) + 1), thing)
        elif how == "part" and (parts := parts_of(form, message)):
            parts[place % len(parts)] = thing
        else:
            fields = inner(message)
            fields[sorted(fields)[place % len(fields)]] = thing
    return case
