"""A new message format is one file and one row of the registry: a toy one is added and used like the others."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest

from midstream.history.codecs.codec_spec import (
    CodecSpec,
    Json,
    MessageTurn,
    Part,
    PartKind,
    ResultPlacement,
    Role,
    Value,
    as_words,
    both_words,
    name_of,
    object_of,
    role_in,
)
from midstream.history.codecs.format_registry import FORMATS
from midstream.history.operations import check_by_name as check
from midstream.history.operations import convert_by_name as convert
from midstream.history.operations import repair_by_name as repair

_ROLES = {"me": Role.USER, "it": Role.ASSISTANT, "rules": Role.SYSTEM}
_NAMES = {Role.USER: "me", Role.ASSISTANT: "it", Role.SYSTEM: "rules"}


class Toy:
    """Messages `{"who", "bits"}`; a bit is `{"send"}`, `{"do", "with", "no"}` or `{"got", "no"}`."""

    name = "toy"
    layout = ResultPlacement.GROUPED
    spec = CodecSpec(
        roles=frozenset(_ROLES),
        role_key="who",
        user_role="me",
        response_role="it",
        system_role="rules",
        content_key="bits",
    )
    profile = "openai-chat"
    wire = ""

    def parse(self, message: Json, at: int) -> MessageTurn:
        bits = message.get("bits")
        parts = [_part(bit) for bit in bits] if isinstance(bits, list) else []
        return MessageTurn(role_in(_ROLES, message.get("who")), parts, message, at)

    def build(self, turn: MessageTurn) -> Json:
        bits = [part.raw for part in turn.parts]
        return {**(turn.source or {}), "who": _NAMES.get(turn.role, "me"), "bits": bits}

    def text(self, words: str, role: Role) -> Part:
        del role
        return Part(PartKind.TEXT, {"send": words}, body=words, is_new=True)

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        raw = {"do": name, "with": arguments, "no": call_id}
        return Part(PartKind.CALL, raw, call_id, name, arguments, is_new=True)

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        raw = {"got": words, "no": call.id}
        return Part(PartKind.RESULT, raw, call.id, call.name, words, failed=is_failed, is_new=True)

    def rename(self, part: Part, new_id: str) -> None:
        part.id, part.raw = new_id, {**part.raw, "no": new_id}

    def reargue(self, part: Part, arguments: Json) -> None:
        part.body, part.raw = arguments, {**part.raw, "with": arguments}

    def retool(self, part: Part, name: str) -> None:
        if part.kind is PartKind.CALL:
            part.name, part.raw = name, {**part.raw, "do": name}

    def refill(self, part: Part, words: str) -> None:
        key = "got" if part.kind is PartKind.RESULT else "send"
        part.body, part.raw = words, {**part.raw, key: words}

    def bad_arguments(self, part: Part) -> Json | None:
        return object_of(part.body)

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        return as_words(part.body), []

    def join(self, first: Part, second: Part) -> None:
        self.refill(first, both_words(as_words(first.body), as_words(second.body)))

    def tidy(self, part: Part) -> str | None:
        if isinstance(part.body, str):
            return None
        self.refill(part, as_words(part.body) or "(no output)")
        return "bad-result"


def _part(bit: Value) -> Part:
    if isinstance(bit, dict) and "do" in bit:
        return Part(PartKind.CALL, bit, bit.get("no"), name_of(bit["do"]), bit.get("with"))
    if isinstance(bit, dict) and "got" in bit:
        return Part(PartKind.RESULT, bit, bit.get("no"), body=bit["got"])
    if isinstance(bit, dict) and isinstance(bit.get("send"), str):
        return Part(PartKind.TEXT, bit, body=bit["send"])
    return Part(PartKind.TEXT, {"send": as_words(bit)}, body=as_words(bit), is_new=True)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Add the row to the registry, which is sufficient."""
    FORMATS["toy"] = Toy
    yield
    del FORMATS["toy"]


def me(words: str) -> Json:
    return {"who": "me", "bits": [{"send": words}]}


VALID: list[Json] = [
    {"who": "rules", "bits": [{"send": "Be brief."}]},
    me("hi"),
    {"who": "it", "bits": [{"send": "Looking."}, {"do": "find", "with": {"q": "x"}, "no": "c1"}]},
    {"who": "me", "bits": [{"got": "found", "no": "c1"}]},
    {"who": "it", "bits": [{"send": "Found."}]},
]


def test_a_valid_history_of_an_added_format_is_unchanged() -> None:
    assert repair(VALID, format="toy").messages is VALID
    assert check(VALID, format="toy") == []


def test_a_call_without_its_result_is_found_and_gets_one() -> None:
    broken = [VALID[1], VALID[2], me("and?")]
    assert [finding.code for finding in check(broken, format="toy")] == ["dangling-call"]
    fixed = repair(broken, format="toy").messages
    assert fixed[:2] == broken[:2]
    assert [bit["no"] for message in fixed for bit in message["bits"] if "got" in bit] == ["c1"]


def test_an_unknown_role_becomes_the_nearest_of_the_formats_table() -> None:
    odd = [{"who": "assistant", "bits": [{"send": "hello"}]}]
    assert repair([me("hi"), *odd], format="toy").messages[1]["who"] == "it"


def test_a_history_can_be_converted_from_and_to_another_format() -> None:
    chat = convert(VALID, source="toy", target="openai").messages
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "tool", "assistant"]
    assert check(chat, format="openai") == []
    assert convert(chat, source="openai", target="toy").messages == VALID


@pytest.mark.slow
def test_repair_of_mutated_histories_is_stable_and_does_not_change_its_input() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        messages = copy.deepcopy(VALID * 3)
        for _ in range(chance.randint(1, 6)):
            _mutate(messages, chance)
        before = copy.deepcopy(messages)
        fixed = repair(messages, format="toy").messages
        assert messages == before, f"seed {seed}"
        assert repair(fixed, format="toy").messages is fixed, f"seed {seed}"
        chat = convert(fixed, source="toy", target="openai").messages
        assert repair(chat, format="openai", profile="openai-chat").messages, f"seed {seed}"


def _mutate(messages: list[Json], chance: random.Random) -> None:
    place = chance.randrange(len(messages))
    match chance.randrange(6):
        case 0 if len(messages) > 1:
            del messages[place]
        case 1:
            messages.insert(place, copy.deepcopy(chance.choice(messages)))
        case 2:
            messages[place]["who"] = chance.choice(["me", "it", "rules", "assistant", None])
        case 3:
            messages[place]["bits"] = chance.choice([None, [], ["words"], [{"got": "x", "no": "c9"}]])
        case 4:
            for bit in messages[place].get("bits") or []:
                if isinstance(bit, dict) and "with" in bit:
                    bit["with"] = chance.choice(["{}", "cut {", None, 3])
        case _:
            chance.shuffle(messages)
