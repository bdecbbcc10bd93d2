from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.core.reuse.raw import ENDS_MAX, Known, Parsed, parsed
from tests.search import tried
from tests.spec import spec

Json = dict[str, Any]


def message(text: str) -> Json:
    return {"role": "user", "content": text}


def body_of(*texts: str, **more: Any) -> bytes:  # noqa: ANN401 - whatever JSON can say
    return msgspec.json.encode(
        {"model": "m", "messages": [message(text) for text in texts], "stream": True, **more}
    )


def known_of(raw: bytes, field: str = "messages") -> Known:
    return parsed(raw, field).now[-1]


def said(result: Parsed) -> Json:
    """What the fields of a body say."""
    return {name: msgspec.json.decode(value) for name, value in result.fields.items()}


def whole(result: Parsed, beginning: list[Any], field: str = "messages") -> Json:
    """What the body would be with the known messages put back."""
    known = [] if result.known is None else beginning[: result.known.count]
    body = said(result)
    if field in body and isinstance(body[field], list):
        body[field] = [*known, *body[field]]
    return body


@spec("REUSE-27")
def test_only_what_follows_the_known_messages_is_parsed() -> None:
    known = known_of(body_of("a", "b"))
    result = parsed(body_of("a", "b", "c", "d"), known=[known])
    assert said(result) == {"model": "m", "messages": [message("c"), message("d")], "stream": True}
    assert result.known == known
    whole_body = parsed(body_of("a", "b", "c", "d"))
    assert (result.now, result.digest) == (whole_body.now[-2:], whole_body.digest)


@spec("REUSE-27")
def test_the_longest_of_several_known_beginnings_is_taken() -> None:
    short, long = known_of(body_of("a")), known_of(body_of("a", "b"))
    other, longer = known_of(body_of("x", "y", "z")), known_of(body_of("a", "b", "c", "d", "e"))
    result = parsed(body_of("a", "b", "c"), known=[longer, short, other, long])
    assert (result.known, said(result)["messages"]) == (long, [message("c")])


@spec("REUSE-27")
def test_the_same_body_again_has_nothing_new() -> None:
    raw = body_of("a", "b")
    result = parsed(raw, known=[known_of(raw)])
    assert (said(result)["messages"], result.now) == ([], (known_of(raw),))


@spec("REUSE-27")
def test_everything_but_the_messages_may_change() -> None:
    known = known_of(body_of("a"))
    raw = (
        b' { "tools" : [{"messages":[{"x":"]}"}]}], "model":"m2" ,"messages"\n:\t['
        b'{"role":"user","content":"a"}'
    )
    result = parsed(raw + b' , {"n": 1} ] , "model": "m3" }\n', known=[known])
    assert result.known == known
    assert said(result) == {"tools": [{"messages": [{"x": "]}"}]}], "model": "m3", "messages": [{"n": 1}]}


@spec("REUSE-27")
@pytest.mark.parametrize(
    "raw",
    [
        body_of("A", "b", "c"),
        body_of("b", "a"),
        body_of(),
        b'{"messages":[{"role":"user","content":"a"}],"messages":[{"n":1}]}',
        b'{"messages":[{"role":"user","content":"a"}],"\\u006dessages":[{"n":1}]}',
        b'{"messages":[{"role":"user","content":"a"}],"messages":[1000000007,{"n":1}]}',
        b'{"messages":[{"role":"user","content":"a"}],"messages":7}',
        b'{"messages":[{"role":"user","content" :"a"}]}',
        b'{"messages":"[{}]"}',
        b'{"messages":{"messages":[{"role":"user","content":"a"}]}}',
        b'{"x":"\\"messages\\":[","y":[{"messages":[{"role":"user","content":"a"}]}]}',
        b'{"x\\"messages":[{"role":"user","content":"a"}]}',
        b'{"messages":[],"x\\"messages":[{"role":"user","content":"a"}]}',
        b'{"x\\"messages":1,"messages":[],"x\\"messages":[{"role":"user","content":"a"},{"n":1}]}',
        b'{"model":"no messages"}',
        b"{}",
    ],
)
def test_any_doubt_means_parsing_the_whole(raw: bytes) -> None:
    result = parsed(raw, known=[known_of(body_of("a"))])
    assert (said(result), result.known) == (msgspec.json.decode(raw), None)


@spec("REUSE-27")
@pytest.mark.parametrize(
    "end",
    [
        b"",
        b"]",
        b"]}}",
        b"]} x",
        b",]}",
        b",}",
        b"8]}",
        b"}]}",
        b'],"a":1,}',
        b"e0]}",
        b" 8]}",
    ],
)
def test_what_is_no_json_is_refused_however_it_begins(end: bytes) -> None:
    beginning = b'{"messages":[{"role":"user","content":"a"}'
    for known in ([], [known_of(body_of("a"))]):
        with pytest.raises(msgspec.DecodeError):
            parsed(beginning + end, known=known)


@spec("REUSE-27")
@pytest.mark.parametrize("raw", [b"", b"[]", b"7", b'[{"messages":[{}]}]', b"\xff", b'{"a":' * 100_000])
def test_only_an_object_is_a_body(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        parsed(raw)


@spec("REUSE-27")
def test_a_beginning_that_does_not_end_with_an_object_is_not_kept() -> None:
    for raw in (
        b'{"input":[1]}',
        b'{"input":["a"]}',
        b'{"input":[]}',
        b'{"input":"[{}]"}',
        b'{"input":[[{}]]}',
    ):
        assert parsed(raw, "input").now == ()
    known = known_of(b'{"input":[{"a":1}]}', "input")
    result = parsed(b'{"input":[{"a":1},2]}', "input", [known])
    assert (said(result), result.known, result.now) == ({"input": [{"a": 1}, 2]}, None, ())


@spec("REUSE-28")
def test_the_known_messages_are_not_parsed() -> None:
    """What stands in them is not looked at again: here it is no JSON, and only the hash says so."""
    broken = b'[{"role": user, "content": oops}'
    hashed = msgspec.structs.replace(known_of(body_of("a")), digest=_sha256(broken), length=len(broken))
    result = parsed(b'{"messages":' + broken + b',{"n":1}]}', known=[hashed])
    assert (result.known, said(result)) == (hashed, {"messages": [{"n": 1}]})


def _sha256(body: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(body).digest()


_names = st.sampled_from(["messages", "model", "tools", "x\\", 'q"messages":[', "ü"])
_texts = st.sampled_from(["a", "}", "]}", '"', "\\", '{"messages":[', "1000000007", "ü\u2028", "\\u006d"])
_values = st.recursive(
    st.none() | st.integers(-5, 5) | st.just(1_000_000_007) | st.booleans() | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=6,
)
_messages = st.lists(st.dictionaries(_names, _values, max_size=3) | _values, max_size=5)


class _Pairs(dict[str, Any]):
    """An object that is written with these members, repeated keys and all."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__({"": None})
        self._pairs = pairs

    def items(self) -> Any:  # noqa: ANN401 - a dict's own type says less
        return self._pairs


_bodies = st.lists(st.tuples(_names, _values | _messages), max_size=4)
_styles = st.fixed_dictionaries(
    {
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]),
        "ensure_ascii": st.booleans(),
    }
)


@spec("REUSE-27")
@given(st.lists(st.dictionaries(_names, _values, max_size=3), min_size=1, max_size=2 * ENDS_MAX), _styles)
def test_the_ends_of_the_last_messages_are_those_of_bodies_that_end_there(
    messages: list[Json],
    style: Any,  # noqa: ANN401 - keywords of a writer
) -> None:
    found = parsed(json.dumps({"messages": messages}, **style).encode()).now
    assert [known.count for known in found] == list(range(1, len(messages) + 1))[-ENDS_MAX:]
    for known in found:
        assert known == known_of(json.dumps({"messages": messages[: known.count]}, **style).encode())


@spec("REUSE-27")
@settings(max_examples=tried(300))
@given(_messages, _messages, _bodies, _bodies, _bodies, _styles)
def test_the_raw_way_says_what_parsing_the_whole_says(
    beginning: list[Any],
    more: list[Any],
    before: list[tuple[str, Any]],
    behind: list[tuple[str, Any]],
    earlier: list[tuple[str, Any]],
    style: Any,  # noqa: ANN401 - keywords of a writer
) -> None:
    first = json.dumps(_Pairs([*earlier, ("messages", beginning)]), **style).encode()
    second = json.dumps(_Pairs([*before, ("messages", [*beginning, *more]), *behind]), **style).encode()
    known = parsed(first).now[-1:]
    result, all_of_it = parsed(second, known=known), parsed(second)
    assert whole(result, beginning) == msgspec.json.decode(second)
    assert result.digest == all_of_it.digest
    assert result.now[-1:] == all_of_it.now[-1:]
    if known and not before and not behind and (not more or isinstance(more[-1], dict)):
        assert result.known == known[0]


@spec("REUSE-27")
@settings(max_examples=tried(200))
@given(_messages, _messages, _bodies, _styles, st.integers(0, 2**32))
def test_a_changed_byte_changes_nothing_but_the_answer_of_the_whole(
    beginning: list[Any],
    more: list[Any],
    behind: list[tuple[str, Any]],
    style: Any,  # noqa: ANN401 - keywords of a writer
    seed: int,
) -> None:
    chance = random.Random(seed)
    first = json.dumps({"messages": beginning}, **style).encode()
    second = bytearray(json.dumps(_Pairs([("messages", [*beginning, *more]), *behind]), **style).encode())
    known = parsed(first).now[-1:]
    for _ in range(20):
        second[chance.randrange(len(second))] = chance.choice(b'"\\{}[],: \n1e.m\xff')
        raw = bytes(second)
        assert _outcome(raw, known, beginning) == _outcome(raw, (), beginning) == _whole(raw)


def _outcome(raw: bytes, known: Sequence[Known], beginning: list[Any]) -> Json | None:
    try:
        return whole(parsed(raw, known=known), beginning)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _whole(raw: bytes) -> Json | None:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(value) for name, value in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
