"""Messages of journals: split, joined, and refused where they are damaged."""

from __future__ import annotations

import pytest

from midstream.errors import StoreDamagedError
from midstream.store.contract import SessionListing, StoredRecord
from midstream.store.jetstream.journal_messages import (
    PART,
    JournalHead,
    decode,
    encode,
    join_head,
    split_head,
)

MARK = SessionListing(is_live=True, at=1.0, title="Hello")
HEAD = JournalHead("s", "1.1", 1, 3, 9, "node", 1.0, MARK, bodies=(b"a", b"b"), links=(b"x", b""))


def test_a_message_has_its_records_and_the_state_of_its_session() -> None:
    [message] = split_head(HEAD)
    assert decode(message, JournalHead) == HEAD
    assert HEAD.records(after=0) == [StoredRecord(8, 3, b"a", b"x"), StoredRecord(9, 3, b"b")]
    assert HEAD.records(after=8) == [StoredRecord(9, 3, b"b")]
    assert not message.startswith(PART)


def test_a_large_append_is_split_and_joined() -> None:
    large = JournalHead("s", "1.1", 1, 3, 9, "node", 1.0, MARK, bodies=(b"a" * 600_000, b"b"))
    *parts, last = split_head(large)
    assert len(parts) == 3
    assert all(part.startswith(PART) for part in parts)
    head = decode(last, JournalHead)
    assert (head.end, head.mark, head.parts) == (9, MARK, 3)
    assert join_head(head, parts) == large
    with pytest.raises(StoreDamagedError, match="lacks a part"):
        join_head(head, parts[1:])


def test_a_message_of_another_kind_is_damage() -> None:
    with pytest.raises(StoreDamagedError, match="no JournalHead of this version"):
        decode(encode(MARK), JournalHead)
