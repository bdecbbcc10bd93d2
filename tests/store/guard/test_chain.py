from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from midstream.errors import EventsLostError, StoreDamagedError
from midstream.session.records import Sync
from midstream.store.contract import Batch, StoredRecord
from midstream.store.guard.chain import (
    LINK_BYTES,
    NO_LINK,
    UNLINKED,
    ChainKey,
    ChainKeys,
    LinkCheck,
    link_behind,
    links_of,
)
from tests.spec import spec

KEY, OTHER = ChainKey(b"k" * 32), ChainKey(b"o" * 32)
STRICT = ChainKeys((KEY,), is_mixed=False, place="the file")
MIXED = ChainKeys((KEY,), is_mixed=True, place="the file")


def journal(
    *bodies: bytes,
    key: ChainKey = KEY,
    session: str = "s",
    before: bytes = NO_LINK,
    after: int = 0,
    epoch: int = 1,
) -> list[StoredRecord]:
    keys = ChainKeys((key,), is_mixed=False, place="")
    batch = Batch(bodies, after, epoch, Sync.FULL)
    links = links_of(keys, before, session, batch)
    return [
        StoredRecord(position, epoch, body, link)
        for position, (body, link) in enumerate(zip(bodies, links, strict=True), start=after + 1)
    ]


def checked(records: list[StoredRecord], keys: ChainKeys = STRICT, before: bytes | None = None) -> LinkCheck:
    check = LinkCheck(keys, "s", before, records[0].position - 1 if before else 0)
    for stored in records:
        check.take(stored)
    return check


@spec("SEC-43")
def test_a_journal_as_it_was_written_is_intact_also_from_its_middle() -> None:
    records = journal(b"1", b"2", b"3")
    assert checked(records).head.link == records[-1].link
    assert checked(records[1:], before=records[0].link).head.position == 3
    later = journal(b"4", before=records[-1].link, after=3, epoch=7)
    assert checked([*records, *later]).begins_at == 1


@spec("SEC-43")
@pytest.mark.parametrize(
    "changed",
    [
        lambda records: [records[0], replace(records[1], body=b"x"), records[2]],
        lambda records: [records[0], replace(records[1], epoch=2), records[2]],
        lambda records: [records[0], replace(records[1], link=b""), records[2]],
        lambda records: [records[0], replace(records[1], link=records[2].link), records[2]],
        lambda records: [records[0], replace(records[2], position=2), replace(records[1], position=3)],
        lambda records: journal(b"1", b"2", b"3", session="t"),
        lambda records: journal(b"1", b"2", b"3", key=OTHER),
        lambda records: [*records[:2], *journal(b"3", before=records[0].link, after=2)],
        lambda records: [*records, *journal(b"1", before=NO_LINK, after=3)],
    ],
)
def test_what_was_changed_moved_or_spliced_is_found(changed: object) -> None:
    assert callable(changed)
    with pytest.raises(StoreDamagedError, match="of session 's'") as caught:
        checked(changed(journal(b"1", b"2", b"3")))
    assert not isinstance(caught.value, EventsLostError)


@spec("SEC-43")
def test_what_was_cut_out_is_missing() -> None:
    records = journal(b"1", b"2", b"3")
    for left in (records[1:], [records[0], records[2]]):
        with pytest.raises(EventsLostError, match="has no record"):
            checked(left)


@spec("SEC-44")
def test_a_fold_keeps_the_link_and_has_one_of_its_own() -> None:
    records = journal(b"1", b"2", b"3")
    fold = replace(records[1], body=b"fold", link=KEY.fold_link(records[1].link, b"s", 2, 1, b"fold"))
    assert link_behind(fold) == records[1].link
    assert checked([fold, records[2]]).head.link == records[2].link
    for wrong in ([replace(fold, body=b"x"), records[2]], [records[0], fold, records[2]]):
        with pytest.raises(StoreDamagedError):
            checked(wrong)


@spec("SEC-45")
def test_records_before_the_chain_are_read_and_none_behind_its_beginning() -> None:
    old = [StoredRecord(1, 1, b"1"), StoredRecord(2, 1, b"2")]
    new = journal(b"3", b"4", before=link_behind(old[-1]), after=2, epoch=2)
    assert checked([*old, *new], MIXED).begins_at == 3
    lost = journal(b"1", b"2", key=OTHER)
    assert checked([*lost, *journal(b"3", before=lost[-1].link, after=2)], MIXED).begins_at == 3
    for wrong in ([*new, StoredRecord(5, 2, b"5")], [*new, *journal(b"5", key=OTHER, after=4)]):
        with pytest.raises(StoreDamagedError):
            checked([*old, *wrong], MIXED)
    for records in (old, lost):
        with pytest.raises(StoreDamagedError):
            checked(records, STRICT)


@spec("SEC-45")
def test_a_fold_of_records_without_links_stands_before_others_of_them_and_before_a_chain() -> None:
    fold = StoredRecord(2, 1, b"fold", KEY.fold_link(NO_LINK, b"s", 2, 1, b"fold"))
    assert fold.link[:LINK_BYTES] == UNLINKED
    assert checked([fold, StoredRecord(3, 1, b"3")][:1], MIXED).head.link == NO_LINK
    assert checked([fold, StoredRecord(3, 1, b"3"), *journal(b"4", after=3)], MIXED).begins_at == 4
    assert checked([fold, *journal(b"3", after=2)], MIXED).begins_at == 3
    with pytest.raises(StoreDamagedError):
        checked([replace(fold, body=b"x")], MIXED)


BODIES = st.lists(st.binary(max_size=3), min_size=1, max_size=6)


@spec("SEC-43")
@given(shared=BODIES, first=BODIES, second=BODIES, data=st.data())
def test_only_a_beginning_of_one_of_two_timelines_is_accepted(
    shared: list[bytes], first: list[bytes], second: list[bytes], data: st.DataObject
) -> None:
    """Whatever a writer without the key composes of the records of two timelines, at whatever positions."""
    common = journal(*shared)
    before, after = common[-1].link, len(common)
    timelines = [
        [*common, *journal(*bodies, before=before, after=after, epoch=epoch)]
        for bodies, epoch in ((first, 1), (second, 1), (second, 2))
    ]
    pool = [record for timeline in timelines for record in timeline]
    positions = st.integers(1, len(pool))
    spliced = data.draw(st.lists(st.tuples(st.sampled_from(pool), st.booleans(), positions), max_size=8))
    composed = [
        replace(record, position=number + 1 if is_placed else position)
        for number, (record, is_placed, position) in enumerate(spliced)
    ]
    is_beginning = any(composed == timeline[: len(composed)] for timeline in timelines)
    check = LinkCheck(STRICT, "s", None, 0)
    try:
        for stored in composed:
            check.take(stored)
    except StoreDamagedError:
        assert not is_beginning
    else:
        assert is_beginning
