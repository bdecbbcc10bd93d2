from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from midstream.dialects import dialect_registry
from midstream.dialects.conversation_index import place_of, scope_of
from midstream.dialects.dialect import Dialect
from midstream.dialects.reading_cache import ReadingCache
from midstream.dialects.request_fields import BadFieldError
from midstream.dialects.request_reading import Read, read
from midstream.errors import MalformedFrameError
from midstream.history.messages import History
from midstream.session.applications import Beginning
from tests.dialects.rewriting_applications import RewritingApplication
from tests.lines import lines_run
from tests.search import tried, with_long
from tests.spec import spec

OWNER = b"me"
SEEDS = tried(8)
TURNS = 40


def new_cache() -> ReadingCache:
    """Return a cache for bodies of any length."""
    return ReadingCache(bytes_min=0)


def chat_body(*words: str, **more: Any) -> bytes:  # noqa: ANN401 - any JSON of a body
    """Return a body of chat completions with alternating user messages and responses."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(words)]
    return msgspec.json.encode({"model": "m", "messages": messages, **more})


def read_as_gateway(
    memo: ReadingCache,
    body: bytes,
    dialect: Dialect = dialect_registry.CHAT,
    headers: dict[str, str] | None = None,
) -> Read:
    """Read a body as a gateway does."""
    return read(dialect, headers or {}, body, memo, OWNER)


def is_same(fast: Read, whole: Read) -> None:
    """Compare a reading after known messages with a whole reading."""
    gist = msgspec.structs.replace(fast.gist, ids=frozenset())  # only the cache needs them
    assert (gist, fast.digest, fast.session, fast.instructions) == (
        whole.gist,
        whole.digest,
        whole.session,
        whole.instructions,
    )
    new = len(whole.params.messages) - fast.known
    assert fast.params == msgspec.structs.replace(
        whole.params, messages=whole.params.messages[len(whole.params.messages) - new :]
    )
    assert fast.whole() == whole.tail
    transcript = whole.params.transcript()
    assert (History(whole.tail), whole.instructions) == (transcript.history, transcript.instructions)
    entries = whole.tail
    assert fast.tail == entries[len(entries) - len(fast.tail) :]
    assert fast.before == Beginning().then(entries[: len(entries) - len(fast.tail)])
    assert fast.gist.beginning == Beginning().then(entries)
    if not fast.session:
        assert fast.gist.place == place_of(scope_of(whole.params), History(whole.tail))


def test_a_body_below_the_size_limit_is_not_cached() -> None:
    body = chat_body("a", "b", "c")
    for bytes_min, known in ((len(body) + 1, 0), (len(body), 3)):
        memo = ReadingCache(bytes_min=bytes_min)
        read_as_gateway(memo, body)
        again = read_as_gateway(memo, body)
        assert again.known == known
        is_same(again, read(dialect_registry.CHAT, {}, body))


@pytest.mark.slow
@spec("REUSE-27")
@pytest.mark.parametrize("dialect", dialect_registry.DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    ("is_sound", "has_shapes"), with_long([(False, False), (True, False), (True, True)], 1)
)
def test_a_reading_after_known_messages_equals_a_whole_reading(
    dialect: Dialect,
    is_sound: bool,  # noqa: FBT001 - a parameter of the test
    has_shapes: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    fast_reads = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        host, memo = (
            RewritingApplication(chance, dialect, is_sound=is_sound, has_shapes=has_shapes),
            new_cache(),
        )
        headers: dict[str, str] = {}
        for turn in range(TURNS):
            body = host.body()
            if chance.random() < 0.03:
                headers = {} if headers else {"x-midstream-session": "s"}
            try:
                whole = read(dialect, headers, body)
            except MalformedFrameError as error:
                with pytest.raises(type(error)):
                    read_as_gateway(memo, body, dialect, headers)
                continue
            try:
                fast = read_as_gateway(memo, body, dialect, headers)
                is_same(fast, whole)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, turn {turn}: {body!r}") from error
            fast_reads += fast.known > 0
            host.take_answer(f"answer {turn}")
    assert fast_reads > SEEDS * TURNS * (0.4 if is_sound else 0.05)


@spec("REUSE-28")
def test_the_work_depends_only_on_the_new_messages() -> None:
    """However many are known: the work in C on their bytes is one hash, and `bench/reuse.py` times it."""
    work = []
    for known in (501, 2001):
        words = [f"{number}" for number in range(known)]
        memo = new_cache()
        read_as_gateway(memo, chat_body(*words))
        body = chat_body(*words, "answer", "more")
        with lines_run() as lines:
            found = read_as_gateway(memo, body)
        assert (found.known, len(found.params.messages)) == (known, 2)
        work.append(lines.count)
    assert work[0] == work[1] < 1300


@spec("REUSE-27")
def test_a_conversation_with_cache_marks_on_its_last_messages_is_recognized_by_earlier_ones() -> None:
    def body(turns: int) -> bytes:
        messages: list[dict[str, Any]] = []
        for turn in range(turns):
            parts: list[dict[str, Any]] = [{"type": "text", "text": f"said {turn}"}]
            if turn >= turns - 2:
                parts[0]["cache_control"] = {"type": "ephemeral"}
            messages += [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": f"answer {turn}"},
            ]
        return msgspec.json.encode({"messages": messages[:-1]})

    memo = new_cache()
    known = [read_as_gateway(memo, body(turns), dialect_registry.MESSAGES).known for turns in range(3, 12)]
    assert known == [0, *range(1, 17, 2)]


@spec("REUSE-28")
def test_a_conversation_that_needs_repair_is_read_whole_until_it_is_repaired() -> None:
    memo = new_cache()
    words = [str(number) for number in range(9)]
    read_as_gateway(memo, chat_body(*words))
    body = json.loads(chat_body(*words, "answer", "more"))
    body["messages"].insert(9, {"role": "tool", "tool_call_id": "nobody's", "content": "lost"})
    found = read_as_gateway(memo, json.dumps(body, separators=(",", ":")).encode())
    assert found.known == 0
    assert read_as_gateway(memo, json.dumps(body, separators=(",", ":")).encode()).known == 0
    assert read_as_gateway(memo, chat_body(*words, "answer", "more")).known == 9


@spec("REUSE-28")
@pytest.mark.parametrize("more", [{"store": True}, {}, {"store": False, "previous_response_id": "resp_1"}])
def test_a_stored_or_continued_response_is_read_whole(more: dict[str, Any]) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(9)]
    memo = new_cache()
    read_as_gateway(
        memo, msgspec.json.encode({"input": items[:8], "store": False}), dialect_registry.RESPONSES
    )
    found = read_as_gateway(memo, msgspec.json.encode({"input": items, **more}), dialect_registry.RESPONSES)
    assert (found.known, len(found.params.messages)) == (0, 9)


@spec("REUSE-73")
def test_another_model_user_or_cache_key_is_another_place() -> None:
    memo = new_cache()
    read_as_gateway(memo, chat_body("a", "b", "c"))
    for more in ({"model": "other"}, {"user": "u"}, {"prompt_cache_key": "k"}):
        body = chat_body("a", "b", "c", "d", "e", **more)
        is_same(read_as_gateway(memo, body), read(dialect_registry.CHAT, {}, body))


def test_an_array_with_only_known_messages_is_a_repeated_request() -> None:
    memo = new_cache()
    body = chat_body("a", "b", "c")
    read_as_gateway(memo, body)
    again = read_as_gateway(memo, body)
    assert (again.known, again.params.messages, again.tail) == (3, [], ())
    is_same(again, read(dialect_registry.CHAT, {}, body))


@pytest.mark.parametrize("body", [b"", b"[]", b'{"messages":[{"a":1}]', b"\xff"])
def test_a_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        read(dialect_registry.CHAT, {}, body)


def test_a_malformed_message_after_known_ones_is_refused() -> None:
    memo = new_cache()
    first = chat_body("a", "b", "c")
    read_as_gateway(memo, first)
    at = first.index(b"]}")
    broken = first[:at] + b',{"role":"user","content":"\xff"}' + first[at:]
    for some in (ReadingCache(), memo):
        with pytest.raises(BadFieldError):
            read_as_gateway(some, broken)
