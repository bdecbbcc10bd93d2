from __future__ import annotations

import msgspec

from midstream.dialects.client_histories import Transcript
from midstream.dialects.reading_cache import Gist, ReadingCache, digests, join_instructions
from midstream.history.messages import History, Response, Step, Text, UserMessage

RAWS = [msgspec.Raw(b'{"n":%d}' % number) for number in range(5)]
ENDS = digests(RAWS, range(1, 6))


def gist(number: int, *, newest: str = "") -> Gist:
    begun = Gist.empty("")
    return Gist(begun.place, begun.scope, begun.beginning, f"system {number}", newest)


def user_gist(*words: str, instructions: str = "") -> Transcript:
    entries = tuple(
        Step(Response((Text(each),))) if at % 2 else UserMessage.of(each) for at, each in enumerate(words)
    )
    return Transcript(instructions, History(entries))


def lookup(memo: ReadingCache, whose: bytes, raws: list[msgspec.Raw] = RAWS) -> list[tuple[int, Gist]]:
    return memo.find(whose, digests(raws, memo.counts(whose)))


def test_messages_are_identified_by_their_bytes_and_their_owner() -> None:
    memo = ReadingCache()
    memo.keep(b"me", ENDS, [(2, gist(2)), (4, gist(4))])
    assert lookup(memo, b"me") == [(4, gist(4)), (2, gist(2))]
    assert lookup(memo, b"me", RAWS[:3]) == [(2, gist(2))]
    assert lookup(memo, b"me", [*RAWS[:3], msgspec.Raw(b"{}"), RAWS[4]]) == [(2, gist(2))]
    assert lookup(memo, b"me", RAWS[1:]) == []
    assert lookup(memo, b"you") == []


def test_messages_split_differently_have_another_digest() -> None:
    raws = [*map(msgspec.Raw, (b"1", b"23", b"12", b"3", b"123"))]
    cuts = [digests(raws[:2], [2]), digests(raws[2:4], [2]), digests(raws[4:], [1])]
    assert len({digest for each in cuts for digest in each.values()}) == len(cuts)
    assert digests(RAWS, [3, 1, 9]) == {**digests(RAWS, [1]), **digests(RAWS, [3])}


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    memo = ReadingCache(limit=2)
    for count in (1, 2, 1, 3):
        memo.keep(b"", ENDS, [(count, gist(count))])
    assert [count for count, _ in lookup(memo, b"")] == [3, 1]


def test_all_entries_together_stay_within_the_limit() -> None:
    heavy = [(number, gist(number, newest="x" * 250)) for number in range(1, 6)]
    memo = ReadingCache(bytes_max=3 * heavy[0][1].weight)
    for _ in range(2):
        memo.keep(b"", ENDS, heavy)
    assert lookup(memo, b"") == heavy[:1:-1]
    assert gist(1).weight < heavy[0][1].weight


def test_a_gist_of_pieces_is_that_of_the_whole() -> None:
    begun = Gist.empty("m")
    pieces = [
        user_gist("a", "b", instructions="one"),
        user_gist("c"),
        user_gist(instructions="two"),
        user_gist(),
    ]
    whole = user_gist("a", "b", "c", instructions="one\n\ntwo")
    found = begun
    for piece in pieces:
        found = found.then(piece)
    assert found == begun.then(whole)
    assert (found.newest, found.instructions) == ("c", "one\n\ntwo")


def test_a_named_conversation_needs_no_place() -> None:
    named = Gist.empty("")
    assert named.then(user_gist("a", "b")).place == named.place


def test_system_prompts_are_joined_without_blank_ones() -> None:
    assert [join_instructions("a", " ", "b"), join_instructions("", "b"), join_instructions()] == [
        "a\n\nb",
        "b",
        "",
    ]
