from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midstream.core.formats.named import format_named
from midstream.core.profiles import PROFILES, profile_for
from midstream.core.repair.engine import repaired, walked
from midstream.core.repair.quick import Marks
from midstream.core.repair.quick_rules import DOUBT
from midstream.core.repair.reading import sendable
from midstream.core.repair.report import Repaired
from midstream.core.repair.signatures import odd_signatures
from midstream.core.repair.task import Task
from midstream.history import repair
from tests.core.repair.histories import FORMATS, broken, valid
from tests.core.repair.rules import refusals
from tests.oracles import accidents, scripts
from tests.search import tried


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_marked_fine_is_fine(form: str) -> None:
    profile = profile_for(format_named(form), None)
    for seed in range(tried(150)):
        messages = broken(form, Random(seed))
        if Marks(messages, form, profile).are_all_fine():
            # Half characters are looked for before.
            assert set(refusals(form, messages)) <= {"X-UTF8"}


@pytest.mark.parametrize("form", FORMATS)
def test_ordinary_messages_are_not_doubted(form: str) -> None:
    marks = Marks(valid(form, Random(3), turns=30), form, profile_for(format_named(form), None))
    assert marks.are_all_fine()
    assert DOUBT not in marks.marks


@pytest.mark.parametrize("form", FORMATS)
def test_images_citations_thinking_and_lists_are_not_doubted_either(form: str) -> None:
    profile = profile_for(format_named(form), None)
    for seed in range(tried(60)):
        assert Marks(scripts.valid(form, Random(seed)), form, profile).are_all_fine()


@pytest.mark.parametrize("form", FORMATS)
def test_the_walk_finds_the_same_with_the_quick_look_and_without(form: str) -> None:
    for seed in range(tried(120)):
        chance = Random(seed)
        messages = copy.deepcopy(scripts.valid(form, chance))
        for _ in range(chance.randint(0, 3)):
            if messages and all(isinstance(message, dict) for message in messages):
                chance.choice(accidents.ODD)(form, messages, chance)
        _assert_the_same(form, messages, chance)


@given(seed=st.integers(0, 2**40), form=st.sampled_from(FORMATS))
@example(seed=1370, form="openai-responses")  # a result bears the item id of a call that was stepped over
@settings(max_examples=tried(300))
def test_the_same_whatever_stands_in_the_place_of_anything(seed: int, form: str) -> None:
    chance = Random(seed)
    messages = copy.deepcopy(scripts.valid(form, chance))
    for _ in range(chance.randint(1, 2)):
        _spoil(messages, chance)
    _assert_the_same(form, messages, chance)


def _assert_the_same(form: str, messages: list[Any], chance: Random) -> None:
    for name in (None, *chance.sample(sorted(PROFILES), 2)):
        asked: dict[str, Any] = {
            "thinking": chance.choice((None, True, False)),
            "system": chance.choice((None, "Be brief, k0z.")),
        }
        profile = profile_for(format_named(form), name)
        quick = repaired(messages, format_named(form), profile, **asked)
        assert quick == _walked(form, messages, name, asked), (name, asked)


def _walked(form: str, messages: list[Any], name: str | None, asked: dict[str, Any]) -> Repaired:
    """Repair with every message in doubt."""
    made = format_named(form)
    profile = profile_for(made, name)
    task = Task(form=made, profile=profile)
    clean = sendable(messages, task)
    if profile.signs == "anthropic" and task.is_grouped:
        task.odd_signatures = odd_signatures(clean)
    marks = Marks([], form, profile)
    marks.marks = marks.sound = bytearray(len(clean))
    return walked(messages, clean, task, marks, **asked)


_ODD_VALUES: tuple[Any, ...] = (
    *(None, "", " ", 7, 0, True, False, [], {}, [None], ["x"], [[]], {"x": 1}, "x"),
    *("text", "thinking", "tool_use", "call_1", "gAAAAx", "user", "assistant", "tool", "[]", "{}"),
    *({"type": "text"}, {"type": "text", "text": ""}, [{"type": "text", "text": "y"}]),
)
_ODD_KEYS = (
    *("tool_calls", "function_call", "name", "id", "role", "type", "model", "signature", "thought"),
    *("reasoning_content", "is_error", "status", "text", "content", "cache_control"),
)


def _spoil(messages: list[Any], chance: Random) -> None:
    """Change, drop, copy or add one value anywhere."""
    spots = list(_spots(messages))
    if not spots:
        return
    holder, key = chance.choice(spots)
    match chance.randrange(5):
        case 0:
            del holder[key]
        case 1:
            other, its_key = chance.choice(spots)
            holder[key] = copy.deepcopy(other[its_key])
        case 2 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case 3 if isinstance(holder, dict):
            holder[chance.choice(_ODD_KEYS)] = copy.deepcopy(chance.choice(_ODD_VALUES))
        case _:
            holder[key] = copy.deepcopy(chance.choice(_ODD_VALUES))


def _spots(value: Any) -> Any:  # noqa: ANN401 - a history may hold anything
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _spots(value[key])


def test_a_system_prompt_that_says_the_parameter_again_is_found() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    done = repair(messages, format="openai-chat", profile="strict-template", system="Be brief.")
    assert [edit.code for edit in done.edits] == ["repeated-system"]


def test_a_message_with_an_id_that_is_no_text_is_looked_at_closely() -> None:
    messages = [{"role": "user", "content": "Hi.", "id": []}]
    assert repair(messages, format="openai-responses").messages is messages


def test_arguments_nested_too_deep_are_kept_as_text() -> None:
    deep = '{"a": ' + "[" * 100_000
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": deep}}
    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]
    assert [edit.code for edit in repair(messages, format="openai-chat").edits] == ["broken-arguments"]


def test_results_of_one_reply_may_come_in_several_user_messages() -> None:
    calls: list[Any] = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in ("a", "b")]
    results = [{"type": "tool_result", "tool_use_id": name, "content": "x"} for name in ("b", "a")]
    words = {"type": "text", "text": "And?"}
    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results[:1]},
        {"role": "user", "content": [*results[1:], words]},
    ]
    profile = profile_for(format_named("anthropic"), None)
    assert Marks(messages, "anthropic", profile).are_all_fine()
    messages[2:] = [
        {"role": "user", "content": [results[0], words]},
        {"role": "user", "content": results[1:]},
    ]
    assert list(Marks(messages, "anthropic", profile).marks) == [1, 0, 0, 0]


def test_results_of_a_reply_that_lacks_one_are_in_doubt_together_and_sound_by_themselves() -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": "read", "arguments": "{}"}} for name in "ab"
    ]
    messages: list[Any] = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    marks = Marks(messages, "openai-chat", profile_for(format_named("openai-chat"), None))
    assert (list(marks.marks), list(marks.sound)) == ([1, 0, 0], [1, 3, 4])
