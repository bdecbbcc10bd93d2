"""The cause of the end of the common prefix of two requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.agents.prefix_difference import Difference, PrefixCause, first_difference
from midstream.errors import UsageError
from midstream.history.codecs.codec_spec import Value
from tests.search import tried
from tests.spec import spec

READ = {
    "name": "read",
    "description": "Read a file.",
    "input_schema": {"type": "object", "required": ["path"]},
}
LIST = {"name": "list", "description": "List a folder.", "input_schema": {"type": "object"}}
REMINDER = {"type": "text", "text": "<reminder>Keep to the style of the house, always.</reminder>"}


def user(content: Value) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


def request(**fields: Value) -> dict[str, Any]:
    body = {
        "model": "m-1",
        "max_tokens": 100,
        "tools": [READ, LIST],
        "system": "You are careful. Today is 2026-11-21.",
        "messages": [user("hi"), assistant("hello"), user("read a")],
    }
    return {key: value for key, value in (body | fields).items() if value is not None}


def prefix_difference(before: dict[str, Any], after: dict[str, Any]) -> Difference | None:
    return first_difference(msgspec.json.encode(before), msgspec.json.encode(after))


def reason_of(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, PrefixCause, str, str]:
    difference = prefix_difference(before, after)
    assert difference is not None
    return difference.field, difference.cause, difference.before, difference.after


@spec("REUSE-62")
def test_a_continued_conversation_has_no_difference() -> None:
    longer = request(messages=[*request()["messages"], assistant("a says"), user("thanks")])

    assert prefix_difference(request(), request()) is None
    assert prefix_difference(request(), longer) is None


@spec("REUSE-62")
def test_fields_outside_the_prompt_are_no_difference() -> None:
    marked = request(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    plain = request(system=[{"type": "text", "text": "Be brief."}], max_tokens=5, stream=True)
    spaced = msgspec.json.format(msgspec.json.encode(request()), indent=4)

    assert prefix_difference(marked, plain) is None
    assert first_difference(spaced, msgspec.json.encode(dict(reversed(request().items())))) is None


@spec("REUSE-63")
@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (request(model="m-2"), ("model", PrefixCause.MODEL, "text", "text")),
        (request(tools=[LIST, READ]), ("tools[0].name", PrefixCause.TOOLS_ORDER, "text", "text")),
        (request(tools=[READ]), ("tools[1]", PrefixCause.TOOLS, "object", "nothing")),
        (request(tools=None), ("tools", PrefixCause.TOOLS, "list", "nothing")),
        (
            request(tools=[READ, LIST | {"description": "List it."}]),
            ("tools[1].description", PrefixCause.TOOLS, "text", "text"),
        ),
        (
            request(tools=[dict(reversed(READ.items())), LIST]),
            ("tools[0]", PrefixCause.KEY_ORDER, "object", "object"),
        ),
        (
            request(system="You are careful. Today is 2026-11-22."),
            ("system", PrefixCause.CLOCK, "date", "date"),
        ),
        (request(system="You are careful."), ("system", PrefixCause.WORDS, "text", "text")),
        (request(system=None), ("system", PrefixCause.WORDS, "text", "nothing")),
        (
            request(system=[{"type": "text", "text": "You are careful. Today is 2026-11-21."}]),
            ("system", PrefixCause.ENCODING, "text", "list"),
        ),
        (
            request(messages=[user([{"type": "text", "text": "hi"}]), assistant("hello"), user("read a")]),
            ("messages[0].content", PrefixCause.ENCODING, "text", "list"),
        ),
        (request(messages=[user("hi")]), ("messages[1]", PrefixCause.SHORTENED, "object", "nothing")),
        (
            request(messages=[user("hi"), assistant("hey"), user("read a")]),
            ("messages[1].content", PrefixCause.WORDS, "text", "text"),
        ),
    ],
)
def test_the_cause_of_the_invalidated_prefix_is_named(
    after: dict[str, Any], expected: tuple[str, PrefixCause, str, str]
) -> None:
    assert reason_of(request(), after) == expected


@spec("REUSE-63")
@pytest.mark.parametrize(
    ("before", "after", "cause", "kind"),
    [
        ("It is Saturday, November 21, 2026.", "It is Sunday, November 22, 2026.", PrefixCause.CLOCK, "date"),
        ("now 10:59:59, go", "now 11:00:00, go", PrefixCause.CLOCK, "date"),
        ("at 2026-11-21T10:59:59Z", "at 2026-11-22T00:00:01Z", PrefixCause.CLOCK, "date"),
        ("epoch 1763722799", "epoch 1763722800", PrefixCause.CLOCK, "date"),
        (
            "run 6f1c1a52-9f0e-4c1c-8a51-0c7a5ce1b001",
            "run 0b9e7f5c-1f2e-4b7d-b2f4-7a5d4cf1e002",
            PrefixCause.ID,
            "uuid",
        ),
        ("key sess_01HZX3QK9V8T7R6P5N4M", "key sess_01HZX3QK9V8T7R6P5N4Z", PrefixCause.ID, "uuid"),
        ("in /srv/ann/work/a", "in /srv/ann/work/b", PrefixCause.PATH, "path"),
        ("you have 12 files", "you have 13 files", PrefixCause.WORDS, "number"),
    ],
)
def test_volatile_content_is_reported_by_its_kind(
    before: str, after: str, cause: PrefixCause, kind: str
) -> None:
    assert reason_of(request(system=before), request(system=after)) == ("system", cause, kind, kind)


@spec("REUSE-63")
def test_a_reminder_that_follows_the_newest_message_has_moved() -> None:
    before = request(messages=[user([{"type": "text", "text": "hi"}, REMINDER])])
    after = request(
        messages=[
            user([{"type": "text", "text": "hi"}]),
            assistant("hello"),
            user([{"type": "text", "text": "on"}, REMINDER]),
        ]
    )

    assert reason_of(before, after)[:2] == ("messages[0].content[1]", PrefixCause.MOVED)


@spec("REUSE-63")
def test_a_new_system_prompt_is_reported_before_the_messages() -> None:
    assert reason_of(request(system=None), request()) == ("system", PrefixCause.WORDS, "nothing", "text")


@spec("REUSE-64")
@pytest.mark.parametrize(
    "after", [request(system="the Password is tulip"), request(messages=[user("Password tulip")])]
)
def test_no_text_of_the_conversation_is_in_the_answer(after: dict[str, Any]) -> None:
    difference = prefix_difference(request(system="the Password is rose"), after)
    assert difference is not None
    text = msgspec.json.encode(difference).decode() + difference.words
    assert [word for word in ("Password", "tulip", "rose") if word in text] == []


def test_the_position_is_counted_in_bytes_of_the_providers_input() -> None:
    before = {"model": "m", "messages": [user("abc"), assistant("déf"), user("ghi")]}
    after = {"model": "m", "messages": [user("abc"), assistant("dég"), user("ghi")]}
    encoded = msgspec.json.encode
    head = len(encoded("m")) + len(encoded(user("abc")))

    difference = prefix_difference(before, after)
    assert difference is not None
    assert difference.byte == head + encoded(assistant("déf")).index(b"f")
    assert difference.total == head + len(encoded(assistant("déf"))) + len(encoded(user("ghi")))
    assert difference.words == (
        f"the text changed at messages[1].content (text), after byte {difference.byte} of {difference.total}"
    )


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_an_invalid_request_is_refused(body: bytes) -> None:
    with pytest.raises(UsageError):
        first_difference(body, b"{}")


_texts = st.text("ab1 :-/", max_size=60)
_messages = st.lists(
    st.builds(lambda who, words: {"role": who, "content": words}, st.sampled_from(["user", "a"]), _texts),
    min_size=1,
)
_requests = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "n"]), "messages": _messages},
    optional={"system": _texts, "tools": st.lists(_texts)},
)


@spec("REUSE-62")
@settings(max_examples=tried(300))
@given(_requests, _requests)
def test_there_is_a_difference_if_and_only_if_the_earlier_request_is_not_a_prefix(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    heads = ("model", "tools", "system")
    is_kept = all((before.get(name) or None) == (after.get(name) or None) for name in heads)
    is_kept = is_kept and after["messages"][: len(before["messages"])] == before["messages"]

    difference = prefix_difference(before, after)
    assert (difference is None) is is_kept
    if difference is not None:
        assert 0 <= difference.byte <= difference.total
