from __future__ import annotations

from midstream.core.dialects.beginnings import BEGINNING_BYTES_MIN, Beginning, Beginnings, Gist, joined
from midstream.core.dialects.refusals import Dialect
from midstream.core.dialects.transcripts import Piece, Transcript
from midstream.core.messages import Exchange, History, Reply, Text, UserMessage
from midstream.core.reuse.fingerprint import Heard
from midstream.core.reuse.raw import Known

LONG = BEGINNING_BYTES_MIN


def beginning(number: int, *, length: int = LONG, heard: Heard = Heard()) -> Beginning:  # noqa: B008 - frozen
    gist = Gist.of_nothing("")
    return Beginning(
        Known(bytes([number]), length, 1), Gist(gist.place, gist.scope, heard, f"system {number}")
    )


def said(*words: str, instructions: str = "") -> Transcript:
    entries = tuple(
        Exchange(Reply((Text(each),))) if at % 2 else UserMessage.of(each) for at, each in enumerate(words)
    )
    return Transcript(instructions, History(entries))


def test_beginnings_are_kept_by_api_and_key() -> None:
    beginnings = Beginnings()
    ours = beginning(1)
    beginnings.keep(Dialect.CHAT, b"me", [ours])
    assert list(beginnings.of(Dialect.CHAT, b"me")) == [ours]
    assert list(beginnings.of(Dialect.CHAT, b"you")) == []
    assert list(beginnings.of(Dialect.MESSAGES, b"me")) == []


def test_a_short_beginning_is_not_worth_keeping() -> None:
    beginnings = Beginnings()
    beginnings.keep(Dialect.CHAT, b"", [beginning(1, length=LONG - 1)])
    assert len(beginnings) == 0


def test_the_one_that_was_not_used_for_longest_goes_first() -> None:
    beginnings = Beginnings(limit=2)
    one, two, three = (beginning(number) for number in (1, 2, 3))
    for each in (one, two, one, three):
        beginnings.keep(Dialect.CHAT, b"", [each])
    assert list(beginnings.of(Dialect.CHAT, b"")) == [one, three]


def test_all_of_them_weigh_no_more_than_the_limit() -> None:
    heavy = [beginning(number, heard=Heard(bytes(1000))) for number in range(5)]
    beginnings = Beginnings(bytes_max=3 * heavy[0].weight)
    for _ in range(2):
        beginnings.keep(Dialect.CHAT, b"", heavy)
    assert list(beginnings.of(Dialect.CHAT, b"")) == heavy[2:]
    assert beginning(1).weight < heavy[0].weight


def test_a_gist_of_pieces_is_that_of_the_whole() -> None:
    begun = Gist.of_nothing("m")
    pieces = [said("a", "b", instructions="one"), said("c"), said(instructions="two"), said()]
    whole = said("a", "b", "c", instructions="one\n\ntwo")
    found = begun
    for piece in pieces:
        found = found.then(piece)
    assert found == begun.then(whole)
    assert (found.newest, found.instructions) == ("c", "one\n\ntwo")


def test_a_conversation_that_has_a_name_needs_no_place() -> None:
    named = Gist.of_nothing("")
    assert named.then(said("a", "b")).place == named.place


def test_a_piece_with_a_known_items_id_does_not_fit() -> None:
    gist = Gist.of_nothing("").then(said("a"), frozenset({"rs_1"}))
    assert gist.takes([Piece(said("b"), 1, is_closed=True, ids=frozenset({"rs_2"}))])
    assert not gist.takes([Piece(said("b"), 1, is_closed=True, ids=frozenset({"rs_1"}))])


def test_system_prompts_are_joined_without_blank_ones() -> None:
    assert [joined("a", " ", "b"), joined("", "b"), joined()] == ["a\n\nb", "b", ""]
