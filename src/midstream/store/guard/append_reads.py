"""Checked reads of a journal from any position: they are extended to whole appends, which links cover."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from midstream.errors import StoreDamagedError
from midstream.store.contract import StoredRecord, StoreReader
from midstream.store.guard.chain import (
    COVER_MAX,
    COVERED,
    ChainKeys,
    Head,
    LinkCheck,
    first_of_append,
    is_open,
    link_behind,
    whole_appends,
)

REST_RECORDS = 16
"""Records that are read first to find the end of an append; the number doubles each time."""


class CheckedPage(Struct, frozen=True):
    """Records whose links were checked.

    Args:
        records: The requested records, or the whole appends at their beginning.
        rest: The further records of the last one's append.
        head: The last record of that append.
    """

    records: Sequence[StoredRecord]
    rest: Sequence[StoredRecord]
    head: Head


async def read_checked(
    reader: StoreReader, keys: ChainKeys, session: str, *, after: int, limit: int
) -> CheckedPage | None:
    """Read up to `limit` records after a position, and check them; None at the end of the journal.

    Raises:
        EventsLostError: Records were removed.
        StoreDamagedError: Another program changed, moved or inserted a record.
    """
    page = await reader.read(session, after=after, limit=limit)
    try:
        return await _check(reader, keys, session, after, page)
    except StoreDamagedError:  # or the journal was pruned, or deleted and begun again, between two reads
        page = await reader.read(session, after=after, limit=limit)
        return await _check(reader, keys, session, after, page)


def check_behind(
    keys: ChainKeys, session: str, head: Head, page: Sequence[StoredRecord]
) -> CheckedPage | None:
    """Check the whole appends at the beginning of a page after a known record; None if there is none.

    Raises:
        EventsLostError, StoreDamagedError: As `read_checked`.
    """
    records = page[: whole_appends(page)]
    if not records:
        return None
    return CheckedPage(records, (), _check_all(keys, session, head.link, head.position, records))


async def link_at(reader: StoreReader, session: str, position: int) -> bytes | None:
    """Return the link after the record at a position, which ends an append; None if there is no such record."""
    found = await reader.read(session, after=position - 1, limit=1)
    return link_behind(found[0]) if found and found[0].position == position else None


async def fold_link(
    reader: StoreReader, keys: ChainKeys, session: str, *, position: int, epoch: int, body: bytes
) -> bytes | None:
    """Return the link of a fold that replaces a record; None if there is no such record.

    The rest of that record's append is checked first: the fold's link covers it from then on.

    Raises:
        StoreDamagedError: Another program changed the append.
    """
    found = await reader.read(session, after=position - 1, limit=1)
    if not found or found[0].position != position:
        return None
    kept = link_behind(found[0])
    rest: tuple[bytes, ...] = ()
    if is_open(found[0].link):
        page = await read_checked(reader, keys, session, after=position - 1, limit=1)
        if page is None or page.records[0] != found[0]:
            return None
        if found[0].link == COVERED:
            kept = page.rest[-1].link
        if page.rest and page.rest[-1].link == kept:
            rest = tuple(each.body for each in page.rest)
    return keys.newest.fold_link(kept, session.encode(), position, epoch, body, rest)


async def _check(
    reader: StoreReader, keys: ChainKeys, session: str, after: int, page: Sequence[StoredRecord]
) -> CheckedPage | None:
    if not page:
        return None
    records = page[: whole_appends(page)] or page
    rest = await _rest_of_append(reader, session, records[-1])
    whole = [*records, *rest]
    linked = next((each for each in whole if each.link != COVERED), whole[0])
    start = min(first_of_append(linked), after + 1)
    before: bytes | None = None
    if after > 0:
        behind = max(0, start - 2)
        lead = [
            each
            for each in await reader.read(session, after=behind, limit=after - behind)
            if each.position <= after
        ]
        if lead and lead[0].position == start - 1:
            before = link_behind(lead.pop(0))
        whole = [*lead, *whole]
    return CheckedPage(records, rest, _check_all(keys, session, before, start - 1, whole))


async def _rest_of_append(reader: StoreReader, session: str, last: StoredRecord) -> Sequence[StoredRecord]:
    """Read the further records of a record's append, as far as they exist."""
    rest: list[StoredRecord] = []
    limit = REST_RECORDS
    while is_open(last.link) and len(rest) < COVER_MAX:
        page = await reader.read(session, after=last.position, limit=limit)
        if not page:
            break
        end = next((number for number, each in enumerate(page, start=1) if not is_open(each.link)), len(page))
        rest += page[:end]
        last, limit = rest[-1], 2 * limit
    return rest


def _check_all(
    keys: ChainKeys, session: str, before: bytes | None, position: int, records: Sequence[StoredRecord]
) -> Head:
    check = LinkCheck(keys, session, before, position)
    for stored in records:
        check.take(stored)
    check.finish()
    return check.head
