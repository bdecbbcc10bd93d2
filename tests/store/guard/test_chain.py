from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from midstream.errors import EventsLostError, StoreDamagedError
from midstream.session.records import Sync
from midstream.store.contract import Batch, StoredRecord
from midstream.store.guard.chain import (
    COVER_MAX,
    COVERED,
    LINK_BYTES,
    NO_LINK,
    UNLINKED,
    ChainKey,
    ChainKeys,
    Head,
    LinkCheck,
    link_behind,
    links_of,
    may_end_journal,
)
from tests.spec import spec

KEY, OTHER = ChainKey(b"k" * 32), ChainKey(b"o" * 32)
STRICT = ChainKeys((KEY,), is_mixed=False, place="the file")
MIXED = ChainKeys((KEY,), is_mixed=True, place="the file")


def append(
    *bodies: bytes,
    key: ChainKey = KEY,
    session: str = "s",
    before: bytes = NO_LINK,
    after: int = 0,
    epoch: int = 1,
) -> list[StoredRecord]:
    links = links_of(key, before, session, Batch(bodies, after, epoch, Sync.FULL))
    return [
        StoredRecord(position, epoch, body, link)
        for position, (body, link) in enumerate(zip(bodies, links, strict=True), start=after + 1)
    ]


def journal(*appends: Sequence[bytes], key: ChainKey = KEY, session: str = "s") -> list[StoredRecord]:
    records: list[StoredRecord] = []
    before = NO_LINK
    for bodies in appends:
        records += append(*bodies, key=key, session=session, before=before, after=len(records))
        before = records[-1].link
    return records


def checked(records: list[StoredRecord], keys: ChainKeys = STRICT, before: bytes | None = None) -> LinkCheck:
    check = LinkCheck(keys, "s", before, records[0].position - 1 if before else 0)
    for stored in records:
        check.take(stored)
    check.finish()
    return check


def folded(records: list[StoredRecord], position: int) -> list[StoredRecord]:
    """Return the journal, pruned up to a record."""
    going, left = records[:position], records[position:]
    kept, rest = link_behind(going[-1]), 0
    if not may_end_journal(going[-1].link):
        rest = next(number for number, each in enumerate(left, start=1) if may_end_journal(each.link))
        kept = left[rest - 1].link
    bodies = [each.body for each in left[:rest]]
    link = KEY.fold_link(kept, b"s", position, going[-1].epoch, b"fold", bodies)
    return [replace(going[-1], body=b"fold", link=link), *left]


@spec("SEC-43")
def test_an_unchanged_journal_is_intact_also_when_read_from_the_end_of_an_append() -> None:
    records = journal((b"1", b"2"), (b"3",), (b"4", b"5", b"6"))
    assert [len(each.link) for each in records] == [1, LINK_BYTES, LINK_BYTES, 1, 1, LINK_BYTES]
    assert checked(records).head == Head(6, 1, records[-1].link)
    assert checked(records[2:], before=records[1].link).head.position == 6
    later = append(b"7", before=records[-1].link, after=6, epoch=7)
    assert checked([*records, *later]).begins_at == 1


@spec("SEC-43")
def test_a_long_append_has_a_link_for_each_thousand_records() -> None:
    records = append(*[b"%d" % number for number in range(2 * COVER_MAX + 1)])
    assert sum(len(each.link) == LINK_BYTES for each in records) == 3
    assert checked(records).head.position == len(records)
    for wrong in (records[:COVER_MAX], records[: 2 * COVER_MAX]):
        assert checked(wrong).head.position == len(wrong)  # As with any truncated end, see SEC-47.
    with pytest.raises(StoreDamagedError, match="has no link"):
        checked([replace(each, link=COVERED) for each in records])


@spec("SEC-43")
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize(
    "change",
    [
        lambda found: replace(found, body=b"x"),
        lambda found: replace(found, epoch=2),
        lambda found: replace(found, link=b""),
        lambda found: replace(found, link=b"?"),
        lambda found: replace(found, link=bytes(LINK_BYTES)),
        lambda found: replace(found, link=COVERED if found.link != COVERED else b"++"),
    ],
)
def test_a_change_of_any_record_is_detected(
    number: int, change: Callable[[StoredRecord], StoredRecord]
) -> None:
    records = journal((b"1", b"2"), (b"3",), (b"4", b"5"))
    records[number] = change(records[number])
    with pytest.raises(StoreDamagedError, match="of session 's'") as caught:
        checked(records)
    assert not isinstance(caught.value, EventsLostError)


@spec("SEC-43")
@pytest.mark.parametrize(
    "changed",
    [
        lambda records: [records[1], records[0], *records[2:]],
        lambda records: [*records[:2], *records[3:], records[2]],
        lambda records: [*records[:3], records[4], records[3]],
        lambda records: [records[0], replace(records[2], body=b"new", link=COVERED), *records[1:]],
        lambda records: [records[0], *records],
        lambda records: [*records[:3], *records[1:]],
        lambda records: [replace(records[0], link=records[1].link), *records[1:]],
        lambda records: journal((b"1", b"2"), (b"3",), (b"4", b"5"), session="t"),
        lambda records: journal((b"1", b"2"), (b"3",), (b"4", b"5"), key=OTHER),
        lambda records: [*records[:3], *append(b"4", b"5", before=records[1].link, after=3)],
        lambda records: [*records, *append(b"1", b"2", before=NO_LINK, after=5)],
    ],
)
def test_moved_inserted_or_spliced_records_are_detected_also_with_new_positions(
    changed: Callable[[list[StoredRecord]], list[StoredRecord]],
) -> None:
    spliced = changed(journal((b"1", b"2"), (b"3",), (b"4", b"5")))
    placed = [replace(each, position=position) for position, each in enumerate(spliced, start=1)]
    with pytest.raises(StoreDamagedError, match="of session 's'"):
        checked(placed)


@spec("SEC-43")
def test_records_of_one_append_cannot_be_split_or_joined_differently() -> None:
    whole, parted = journal((b"12", b"3")), journal((b"1", b"23"))
    assert whole[1].link != parted[1].link
    first, second = journal((b"1",), (b"2",))
    for wrong in (
        [replace(first, link=COVERED), second],
        [replace(first, body=b"1", link=second.link), second],
    ):
        with pytest.raises(StoreDamagedError):
            checked(wrong)


@spec("SEC-43")
def test_removed_records_are_missing_and_a_cut_append_is_damaged() -> None:
    records = journal((b"1", b"2"), (b"3",), (b"4", b"5"))
    for left in (records[1:], [records[0], *records[2:]], [*records[:2], *records[3:]]):
        with pytest.raises(EventsLostError, match="has no record"):
            checked(left)
    for cut in (records[:1], records[:4]):
        with pytest.raises(StoreDamagedError, match="an append was cut"):
            checked(cut)


@spec("SEC-44")
@pytest.mark.parametrize("position", range(1, 7))
def test_a_fold_at_any_position_leaves_the_rest_verifiable(position: int) -> None:
    records = journal((b"1", b"2", b"3"), (b"4",), (b"5", b"6"))
    pruned = folded(records, position)
    assert [each.link for each in pruned[1:]] == [each.link for each in records[position:]]
    assert checked(pruned).head.link == records[-1].link
    assert link_behind(pruned[0])[:LINK_BYTES] in {each.link for each in records}
    for number, found in enumerate(pruned):
        with pytest.raises(StoreDamagedError):
            checked([*pruned[:number], replace(found, body=b"x"), *pruned[number + 1 :]])
    if position > 1:
        with pytest.raises(StoreDamagedError, match="is a fold"):
            checked([*records[: position - 1], *pruned])


@spec("SEC-44")
def test_a_fold_of_a_fold_keeps_the_link_of_the_append_that_both_cut() -> None:
    records = journal((b"1", b"2", b"3", b"4"), (b"5",))
    once = folded(records, 2)
    rest = [each.body for each in records[3:4]]
    link = KEY.fold_link(link_behind(once[0]), b"s", 3, 1, b"fold", rest)
    twice = [replace(records[2], body=b"fold", link=link), *records[3:]]
    assert checked(twice).head.position == 5
    assert checked(once[:1]).head.link == records[3].link, "a repaired copy may end with the fold"
    with pytest.raises(StoreDamagedError):
        checked([once[0], replace(records[4], position=3)])


@spec("SEC-45")
def test_records_before_the_chain_are_read_and_none_after_its_beginning() -> None:
    old = [StoredRecord(1, 1, b"1"), StoredRecord(2, 1, b"2")]
    new = append(b"3", b"4", before=link_behind(old[-1]), after=2, epoch=2)
    assert checked([*old, *new], MIXED).begins_at == 3
    lost = append(b"1", b"2", key=OTHER)
    assert checked([*lost, *append(b"3", before=lost[-1].link, after=2)], MIXED).begins_at == 3
    for wrong in (
        [*new, StoredRecord(5, 2, b"5")],
        [*new, StoredRecord(5, 2, b"5", COVERED)],
        [*new, *append(b"5", key=OTHER, after=4)],
    ):
        with pytest.raises(StoreDamagedError):
            checked([*old, *wrong], MIXED)
    for records in (old, lost):
        with pytest.raises(StoreDamagedError):
            checked(records, STRICT)


@spec("SEC-45")
def test_a_fold_of_unchained_records_is_valid_before_others_of_them_and_before_a_chain() -> None:
    fold = StoredRecord(2, 1, b"fold", KEY.fold_link(NO_LINK, b"s", 2, 1, b"fold"))
    assert fold.link[:LINK_BYTES] == UNLINKED
    assert checked([fold, StoredRecord(3, 1, b"3")][:1], MIXED).head.link == NO_LINK
    assert checked([fold, StoredRecord(3, 1, b"3"), *append(b"4", after=3)], MIXED).begins_at == 4
    assert checked([fold, *append(b"3", after=2)], MIXED).begins_at == 3
    with pytest.raises(StoreDamagedError):
        checked([replace(fold, body=b"x")], MIXED)


APPENDS = st.lists(st.lists(st.binary(max_size=3), min_size=1, max_size=3), min_size=1, max_size=3)


@spec("SEC-43")
@given(shared=APPENDS, first=APPENDS, second=APPENDS, data=st.data())
def test_of_two_spliced_timelines_only_a_beginning_of_one_is_accepted(
    shared: list[list[bytes]], first: list[list[bytes]], second: list[list[bytes]], data: st.DataObject
) -> None:
    """Splice the records of two timelines at any positions, as a writer without the key can."""
    common = journal(*shared)
    timelines = []
    for appends, epoch in ((first, 1), (second, 1), (second, 2)):
        timeline = [*common]
        for bodies in appends:
            before, after = timeline[-1].link, len(timeline)
            timeline += append(*bodies, before=before, after=after, epoch=epoch)
        timelines.append(timeline)
    pool = [record for timeline in timelines for record in timeline]
    positions = st.integers(1, len(pool))
    links = st.sampled_from([None, None, None, COVERED, b""])
    choices = st.tuples(st.sampled_from(pool), st.booleans(), positions, links)
    spliced = data.draw(st.lists(choices, max_size=8))
    composed = [
        replace(
            record,
            position=number + 1 if is_placed else position,
            link=record.link if link is None else link,
        )
        for number, (record, is_placed, position, link) in enumerate(spliced)
    ]
    is_whole = not composed or may_end_journal(composed[-1].link)
    is_beginning = is_whole and any(composed == timeline[: len(composed)] for timeline in timelines)
    check = LinkCheck(STRICT, "s", None, 0)
    try:
        for stored in composed:
            check.take(stored)
        check.finish()
    except StoreDamagedError:
        assert not is_beginning
    else:
        assert is_beginning
