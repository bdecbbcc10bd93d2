"""Figures of one repair, measured from the outside."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.oracles.accidents import ACCIDENTS, GROUPED, Accident, calls_in, objects, results_in
from tests.oracles.scripts import valid
from tests.oracles.verdicts import doubts, refusals

Value = Any

Repair = Callable[..., Any]

_MARKER = re.compile(r"k\d+z")
_THOUGHTS = ("thinking", "reasoning_content", "reasoningText", "summary")


@dataclass
class Score:
    """Figures of one broken history."""

    messages: list[Any]
    how: list[str]
    refused: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    verbatim: tuple[int, int] = (0, 0)
    prefix: bool = True
    thinking: tuple[int, int] = (0, 0)
    output: Value = None


def broken(
    form: str, chance: Random, *, accidents: tuple[Accident, ...] = ACCIDENTS, breaks: int = 3
) -> tuple[list[Any], list[Any], list[str]]:
    """Return a valid history, its broken form, and the accidents."""
    whole = valid(form, chance)
    messages = copy.deepcopy(whole)
    how = [chance.choice(accidents) for _ in range(chance.choice((1, 1, 2, breaks)))]
    for accident in how:
        try:
            accident(form, messages, chance)
        except (AttributeError, TypeError, KeyError, ValueError, StopIteration):
            continue  # The remains of an earlier accident cannot be broken this way.
    return whole, messages, [accident.__name__ for accident in how]


def score(
    form: str, messages: list[Any], repair: Repair, *, whole: list[Any] | None = None, **asked: Value
) -> Score:
    """Repair a broken history and measure the result."""
    made = Score(messages, [])
    before = copy.deepcopy(messages)
    try:
        result = repair(messages, format=form, **asked)
        again = repair(result.messages, format=form, **{**asked, "system": result.system})
        twin = repair(copy.deepcopy(before), format=form, **asked)
    except Exception as error:  # noqa: BLE001 - any crash is a finding
        made.faults.append(f"raised {type(error).__name__}: {error}")
        made.refused.append("raised")
        return made
    made.output = result.messages
    made.refused = refusals(form, result.messages, asked.get("profile") or "")
    made.lost = lost_words(before, [result.messages, result.system])
    made.verbatim = count_unchanged(before, result.messages)
    start = first_defect(whole, before) if whole is not None else 0
    start -= _lacks_results(form, before[:start])
    made.prefix = result.messages[:start] == before[:start]
    made.thinking = thoughts_kept(form, whole or [], before, result.messages)
    if messages != before:
        made.faults.append("mutated its input")
    if again.messages is not result.messages:
        made.faults.append(f"not idempotent: {[edit.code for edit in again.edits]}")
    if twin.messages != result.messages or twin.edits != result.edits:
        made.faults.append("not deterministic")
    is_fine = not refusals(form, before, asked.get("profile") or "") and not doubts(form, before)
    if is_fine and result.messages is not messages:
        made.faults.append(f"touched a valid history: {[edit.code for edit in result.edits]}")
    if (result.messages is not messages) != bool(result.edits):
        made.faults.append("edits and change do not agree")
    return made


def words_of(value: Value) -> Counter[str]:
    """Count the marker words in a value, without those of thoughts."""
    return Counter(_MARKER.findall(json.dumps(_without_thoughts(value), ensure_ascii=False)))


def _without_thoughts(value: Value) -> Value:
    if isinstance(value, list):
        return [_without_thoughts(item) for item in value if not _is_thought(item)]
    if isinstance(value, dict):
        return {key: _without_thoughts(item) for key, item in value.items() if key not in _THOUGHTS}
    return value


def _is_thought(item: Value) -> bool:
    if not isinstance(item, dict):
        return False
    return (
        item.get("part_kind") == "thinking" or item.get("thought") is True or item.get("type") == "thinking"
    )


def lost_words(before: list[Any], after: Value) -> list[str]:
    """Return the lost marker words. A repeated word may remain once, where it is an exact copy.

    A part that had not the shape of a thought and is one now, signature and all, is not lost.
    """
    there = Counter(_MARKER.findall(json.dumps(after, ensure_ascii=False)))
    return sorted(word for word in words_of(before) if not there[word])


def count_unchanged(before: list[Any], after: list[Any]) -> tuple[int, int]:
    """Count the unchanged messages."""
    there = Counter(json.dumps(message, sort_keys=True) for message in after)
    count = 0
    for message in before:
        text = json.dumps(message, sort_keys=True)
        if there[text]:
            there[text] -= 1
            count += 1
    return count, len(before)


def first_defect(whole: list[Any], messages: list[Any]) -> int:
    """Return the number of messages before the first accident."""
    count = 0
    for mine, its in zip(whole, messages, strict=False):
        if mine != its:
            break
        count += 1
    while count and isinstance(messages[count - 1], dict) and messages[count - 1].get("type") == "reasoning":
        count -= 1  # It belongs to the item after it.
    return count


def _lacks_results(form: str, start: list[Any]) -> bool:
    """Return whether the last message has results, but not of all calls: the others belong into it."""
    if form not in GROUPED or not all(isinstance(message, dict) for message in start):
        return False
    place = len(start) - 1
    while place > 0 and results_in(form, start[place : place + 1]):
        place -= 1
    asked, answered = (len(found(form, start[place:])) for found in (calls_in, results_in))
    return 0 < answered < asked


def thoughts_kept(form: str, whole: list[Any], before: list[Any], after: list[Any]) -> tuple[int, int]:
    """Count the signed thoughts that survived the accidents, and those that survived the repair."""
    del form
    asked = _signed(whole) & _signed(before)
    return len(asked & _signed(after)), len(asked)


def _signed(messages: list[Any]) -> set[str]:
    return {
        json.dumps(found, sort_keys=True)
        for found in objects(messages)
        if isinstance(found.get("signature"), str) and found["signature"].startswith("R")
    }
