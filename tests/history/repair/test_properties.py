"""The laws of all histories, for every format and profile (HISTORY-1 to HISTORY-8), searched by Hypothesis.

`make check` searches every format with its own profile. The slow part searches it with the profiles that
occur with it, and, with fewer examples, with every profile.
"""

# ruff: noqa: ANN401 - a history may hold anything
from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from midstream.history.repair.placeholders import ANSWERS, SENTINEL
from midstream.history.repair.report import Repaired
from tests.history.repair.content_items import content_items, lost_content, out_of_order
from tests.history.repair.strategies import (
    EVERY_PAIR,
    PAIRS,
    Broken,
    Pair,
    accidents_to,
    broken,
    fine,
    following,
    histories_with_junk,
    late,
    rename_ids,
    repair_pair,
    seeds,
    turn,
    without_systems,
)
from tests.oracles.accidents import GROUPED
from tests.oracles.foreign import PACKAGES, SPEAKS_FOR, missing, objections
from tests.oracles.measures import first_defect
from tests.oracles.scripts import valid
from tests.oracles.verdicts import PROMPTS, refusals
from tests.search import PROFILE, tried, with_slow
from tests.spec import spec

NOISY = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
quick = settings(max_examples=tried(5), suppress_health_check=NOISY)
longer = settings(max_examples=tried(25), suppress_health_check=NOISY)

Law = Callable[[Pair, Broken, Repaired], Any]
"""Function that compares a history before and after; returns the violation, or something empty."""


def accepted(pair: Pair, case: Broken, done: Repaired) -> Any:
    form, profile = pair
    if pair not in PAIRS:
        return []  # The validators do not have the server's rules.
    known = "" if pair == ("gemini", "portable") else profile or ""
    return refusals(form, done.messages, known)


def idempotent(pair: Pair, case: Broken, done: Repaired) -> Any:
    again = repair_pair(pair, done.messages, system=done.system)
    return again.edits or again.messages is not done.messages


def deterministic(pair: Pair, case: Broken, done: Repaired) -> Any:
    return repair_pair(pair, copy.deepcopy(case.messages)) != done


def reported_exactly_if_changed(pair: Pair, case: Broken, done: Repaired) -> Any:
    return bool(done.edits) != (done.messages is not case.messages)


_COPIES = {"repeated-call", "repeated-result", "repeated-system", "late-result"}


def monotone(pair: Pair, case: Broken, done: Repaired) -> Any:
    """Every text, result and call has its place in the output; of exact copies, which edits name, one has."""
    after = [*content_items(done.system), *content_items(done.messages)]
    lost = lost_content(content_items(case.messages), after)
    copied = {edit.at for edit in done.edits if edit.code in _COPIES}
    copies = Counter(counted.text for at in copied for counted in content_items(case.messages[at]))
    return {
        text: count
        for text, count in lost.items()
        if count > copies[text] or not any(text in counted.text for counted in after)
    }


def in_order(pair: Pair, case: Broken, done: Repaired) -> Any:
    return out_of_order(
        content_items(case.messages), [*content_items(done.system), *content_items(done.messages)]
    )


def the_start_is_untouched(pair: Pair, case: Broken, done: Repaired) -> Any:
    """The messages before the first accident are unchanged; results right before it may differ if some of
    them are missing.
    """
    start = first_defect(case.whole, case.messages)
    if pair[0] in GROUPED and start:
        start -= any(items.kind == "result" for items in content_items(case.messages[start - 1]))
    pairs = zip(case.messages[:start], done.messages[:start], strict=False)
    changed = [(mine, its) for mine, its in pairs if mine is not its]
    # An accident that removes a turn's end makes it one in progress, which needs signatures.
    if pair[1] == "gemini-3":
        changed = [(mine, its) for mine, its in changed if mine != _unsigned(its)]
    return len(done.messages) < start or bool(changed)


def _unsigned(message: Any) -> Any:
    """Return the message without the placeholder signatures that calls of a turn in progress got."""
    parts = [
        {key: value for key, value in part.items() if value != SENTINEL} if isinstance(part, dict) else part
        for part in message["parts"]
    ]
    return {**message, "parts": parts}


LAWS: tuple[Law, ...] = (
    accepted,
    idempotent,
    deterministic,
    reported_exactly_if_changed,
    monotone,
    in_order,
    the_start_is_untouched,
)


FORMAL = (idempotent, deterministic, reported_exactly_if_changed)
"""The laws that also hold for junk."""


def faults(pair: Pair, case: Broken, laws: tuple[Law, ...] = LAWS) -> dict[str, Any]:
    """Return the laws that the repair of one history breaks, and how."""
    before = copy.deepcopy(case.messages)
    done = repair_pair(pair, case.messages)
    found = {law.__name__: wrong for law in laws if (wrong := law(pair, case, done))}
    return found | ({"changed its input": True} if case.messages != before else {})


@spec("HISTORY-1", "HISTORY-3", "HISTORY-4", "HISTORY-5", "HISTORY-6", "HISTORY-7")
def laws_hold_after_accidents(pair: Pair, data: st.DataObject) -> None:
    assert faults(pair, data.draw(broken(pair))) == {}


@spec("HISTORY-3", "HISTORY-4", "HISTORY-81")
def junk_is_no_reason_to_raise(pair: Pair, data: st.DataObject) -> None:
    assert faults(pair, data.draw(histories_with_junk(pair)), FORMAL) == {}


@spec("HISTORY-2")
def a_valid_message_is_the_same_object(pair: Pair, data: st.DataObject) -> None:
    form, profile = pair
    seed = data.draw(seeds)
    messages = valid(form, Random(seed), turns=3) if profile is None else fine(pair, seed)
    system = "Be brief."
    done = repair_pair(pair, messages, system=system)
    assert (done.messages is messages, done.system is system, done.edits) == (True, True, ())


@spec("HISTORY-8")
def repairing_commutes_with_continuing(pair: Pair, data: st.DataObject) -> None:
    messages, more = data.draw(broken(pair)).messages, data.draw(following(pair))
    assume(is_past(pair, messages) and is_past(pair, repair_pair(pair, messages).messages))
    commutes(pair, messages, more)


@spec("HISTORY-8", "HISTORY-27")
def repairing_commutes_with_late_results(pair: Pair, data: st.DataObject) -> None:
    messages, results = data.draw(late(pair))
    commutes(pair, messages, [PROMPTS[pair[0]], *results])
    if is_past(pair, messages) and is_past(pair, repair_pair(pair, messages).messages):
        commutes(pair, messages, [*results, PROMPTS[pair[0]]])


def commutes(pair: Pair, messages: list[Any], more: list[Any]) -> None:
    stored = repair_pair(pair, messages)
    later = repair_pair(pair, [*stored.messages, *more], system=stored.system)
    at_once = repair_pair(pair, [*messages, *more])
    assert (later.messages, later.system) == (at_once.messages, at_once.system)


def is_past(pair: Pair, messages: list[Any]) -> bool:
    """Return whether the end would be read the same if the list continued (the exceptions of HISTORY-8)."""
    content = len(messages)
    while pair[0] == "openai-responses" and content and _is_mute(messages[content - 1]):
        content -= 1  # An empty message is no item that reasoning led to.
    last = messages[content - 1] if content else None
    if not isinstance(last, dict):
        return True
    if pair[1] == "gemini-3":
        return last.get("role") == "model" and not any(
            content.kind == "call" for content in content_items(last)
        )
    return last.get("type") != "reasoning"


def _is_mute(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "message" and not content_items(item)


@spec("HISTORY-7")
def a_repaired_beginning_begins_the_repaired_whole(pair: Pair, data: st.DataObject) -> None:
    messages = data.draw(broken(pair)).messages
    start = repair_pair(pair, messages).messages
    assume(is_past(pair, messages) and is_past(pair, start))
    whole = repair_pair(pair, [*messages, *data.draw(following(pair))]).messages
    assert whole[: len(start) - 1] == start[:-1] or start == []
    assert whole[: len(start)] == start or _is_joined(start[-1], whole[len(start) - 1])


def _is_joined(stand_in: Any, whole: Any) -> bool:
    """Return whether text of the next turn was put after results that are only placeholders."""
    items, more = content_items(stand_in), content_items(whole)
    return more[: len(items)] == items and all(each.text in ANSWERS for each in items)


@spec("HISTORY-7")
def a_repair_of_a_turn_stays_near_it(pair: Pair, data: st.DataObject) -> None:
    """Two turns before and two turns after a changed turn, messages are the same objects in the same places."""
    form, seed = pair[0], data.draw(seeds)
    turns = [
        repair_pair(pair, rename_ids(turn(form, Random(seed + number)), f"t{number}")).messages
        for number in range(5)
    ]
    assume(repair_pair(pair, [message for each in turns for message in each]).edits == ())
    hit = data.draw(accidents_to(form, turns[2]))
    repaired = repair_pair(pair, [*turns[0], *turns[1], *hit, *turns[3], *turns[4]])
    assume("repeated-system" not in [edit.code for edit in repaired.edits])  # The accident repeated it first.
    done = repaired.messages
    first, last = turns[0], turns[4]
    assert [id(message) for message in done[: len(first)]] == [id(message) for message in first]
    assert [id(message) for message in done[len(done) - len(last) :]] == [id(message) for message in last]


SEARCHES = (
    laws_hold_after_accidents,
    junk_is_no_reason_to_raise,
    a_valid_message_is_the_same_object,
    repairing_commutes_with_continuing,
    repairing_commutes_with_late_results,
    a_repaired_beginning_begins_the_repaired_whole,
    a_repair_of_a_turn_stays_near_it,
)
NAMED = attrgetter("__name__")
Search = Callable[[Pair, st.DataObject], None]


def test_calls_get_signatures_where_an_accident_removed_the_end_of_their_turn() -> None:
    """Found by a random search: for Gemini 3 the beginning is unchanged, except for these."""
    part = {"functionCall": {"id": "c00100001", "name": "read_file", "args": {}}}
    answer = {"functionResponse": {"id": "c00100001", "name": "read_file", "response": {"result": "k1z"}}}
    whole = [
        {"role": "user", "parts": [{"text": "k2z"}]},
        {"role": "model", "parts": [part]},
        {"role": "user", "parts": [answer]},
        {"role": "model", "parts": [{"text": "k3z"}]},
    ]
    assert repair_pair(("gemini", "gemini-3"), whole).edits == ()
    assert faults(("gemini", "gemini-3"), Broken(whole, whole[:3])) == {}


@pytest.mark.parametrize("search", SEARCHES, ids=NAMED)
@pytest.mark.parametrize("pair", with_slow(PAIRS, [pair for pair in PAIRS if pair[1] is not None]), ids=str)
@longer
@given(data=st.data())
def test_the_laws_hold_for_every_format(search: Search, pair: Pair, data: st.DataObject) -> None:
    search(pair, data)


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES[: 2 if PROFILE == "search" else 1], ids=NAMED)
@pytest.mark.parametrize("pair", [pair for pair in EVERY_PAIR if pair not in PAIRS], ids=str)
@quick
@given(data=st.data())
@spec("HISTORY-83")
def test_the_laws_hold_for_every_format_at_every_profile(
    search: Search, pair: Pair, data: st.DataObject
) -> None:
    search(pair, data)


@pytest.mark.slow
@pytest.mark.parametrize("form", [pair[0] for pair in PAIRS if pair[1] is None])
@longer
@given(data=st.data())
@spec("HISTORY-1")
def test_every_installed_validator_accepts_the_repaired_history(form: str, data: st.DataObject) -> None:
    messages = data.draw(broken((form, None))).messages
    asked = [name for name in PACKAGES if not missing(name)]
    kept = {
        name: without_systems(repair_pair((form, SPEAKS_FOR.get(name)), messages).messages) for name in asked
    }
    problems = {name: objections(name, form, kept[name]) for name in asked if kept[name]}
    assert {name: words for name, words in problems.items() if words} == {}


_DIGEST = """
import hashlib, json
from operator import attrgetter
from random import Random
from midstream.history.operations import repair
from tests.oracles.measures import broken
from tests.oracles.scripts import WRITERS
made = [repair(broken(f, Random(n))[1], format=f).messages for f in WRITERS for n in range(40)]
print(hashlib.sha256(json.dumps(made).encode()).hexdigest())
"""


@pytest.mark.slow
@spec("HISTORY-4")
def test_another_process_with_other_hashes_writes_the_same_bytes() -> None:
    """Sets and dicts of texts are iterated in another order by every process without a fixed hash seed."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
