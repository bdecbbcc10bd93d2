"""Histories of thousands of messages, as agents store them: simple and rich, valid and broken, and the hard shapes."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

from midstream.history.operations import repair_by_name as repair
from tests.history.repair.format_histories import HistoryScript
from tests.oracles.accidents import results_in
from tests.oracles.scripts import WRITERS, ConversationPlan

Json = dict[str, Any]


class _LongPlan(ConversationPlan):
    """A conversation of at least `count` messages."""

    def __init__(self, chance: Random, count: int) -> None:
        super().__init__(chance, turns=1)
        self.turns += [self._turn() for _ in range(count // 2)]


class _LongScript(HistoryScript):
    """A conversation of questions, calls, results and answers only."""

    def __init__(self, form: str, chance: Random, count: int) -> None:
        super().__init__(form, chance, turns=1)
        self.messages.clear()
        while len(self.messages) < count:
            call = self._call()
            self.user(self.word())
            self.response(thought=False, text="I look.", calls=[call])
            self.results([(call, self.word())])
            self.response(thought=False, text=self.word(), calls=[])


def valid(form: str, profile: str | None, *, shape: str, count: int) -> list[Json]:
    """Return a history that is valid for this profile: `simple` or `rich`.

    Rich histories have images, documents, cache markers, citations, signed thinking, hosted tools, several calls in
    a response and results that are lists.
    """
    chance = Random(2)  # noqa: S311 - the same history every time
    if shape == "simple":
        messages = _LongScript(form, chance, count).messages[:count]
    else:
        messages = WRITERS[form](_LongPlan(chance, count)).out[:count]
    return repair(messages, format=form, profile=profile).messages


def quarter_broken(form: str, messages: list[Json]) -> list[Json]:
    """Return a copy without every fourth result."""
    chance = Random(3)  # noqa: S311 - the same history every time
    broken = copy.deepcopy(messages)
    spots = results_in(form, broken)
    lost = {id(result) for _, result in spots if chance.random() < 1 / 4}
    for holder in {id(holder): holder for holder, _ in spots}.values():
        holder[:] = [item for item in holder if id(item) not in lost]
    return [message for message in broken if not any(message.get(key) == [] for key in ("content", "parts"))]


_FUNCTION = {"name": "read", "arguments": "{}"}


def parallel(count: int) -> list[Json]:
    """Return one response with thousands of calls, each with its result."""
    calls = [{"id": f"c{n}", "type": "function", "function": _FUNCTION} for n in range(count)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(count)]
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
    ]


def half_answered(count: int) -> list[Json]:
    """Return one response with thousands of calls, half of them with a result."""
    question, response, *results = parallel(count)
    return [question, response, *results[::2]]


def requests(count: int) -> list[Json]:
    """Return thousands of user messages in a row."""
    return [{"role": "user", "content": f"question {number}"} for number in range(count)]


def orphans(count: int) -> list[Json]:
    """Return thousands of results without calls."""
    return [{"role": "tool", "tool_call_id": f"c{number}", "content": "x"} for number in range(count)]


def one_id(count: int) -> list[Json]:
    """Return thousands of calls with the same id and without results."""
    call = {"id": "same", "type": "function", "function": _FUNCTION}
    made: list[Json] = []
    for number in range(count // 2):
        made += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    return made


HARD = {
    "parallel calls": parallel,
    "parallel calls, half answered": half_answered,
    "requests in a row": requests,
    "orphans": orphans,
    "one id": one_id,
}
"""The shapes for which a repair can take quadratic time, as chat messages."""
