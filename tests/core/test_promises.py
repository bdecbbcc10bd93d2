"""A client tells words that a power cut took from events that no crash may take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import midstream
from midstream.core import records
from midstream.core.frames import EventId
from midstream.core.promises import promised_after, require_promised
from midstream.core.records import CallStarted, Delta, EpochStarted, Record
from midstream.errors import EventsLostError
from tests.spec import spec

KEPT = EventId(2, 7)
STARTED = EpochStarted(3, "x", 1.0)
WORD = Delta(1, 1, 1, 0, "text", "x")


@spec("STREAM-100")
@pytest.mark.parametrize(
    ("record", "is_durable"),
    [
        (STARTED, True),
        (WORD, False),
        (CallStarted(1, 1, "c", 1, 1.0), True),
        (CallStarted(1, 1, "c", 1, 1.0, has_effects=False), False),
    ],
)
def test_what_is_promised_moves_with_what_is_on_the_disk(record: Record, *, is_durable: bool) -> None:
    after = EventId(2, 8)
    for known in (None, KEPT):
        assert promised_after(known, after, record, is_owned=True) == (after if is_durable else known)


@spec("STREAM-100")
@pytest.mark.parametrize(
    ("newest", "of_a_stream", "of_a_reader"),
    [
        ("2-7", False, False),
        ("2-9", False, False),
        ("3-7", False, False),
        ("2-6", True, True),
        ("1-9", True, True),
        ("3-6", True, False),  # a reader's session may have been deleted, and begun anew
    ],
)
def test_a_journal_that_ends_before_it_was_cut(newest: str, *, of_a_stream: bool, of_a_reader: bool) -> None:
    for is_owned, is_lost in ((True, of_a_stream), (False, of_a_reader)):
        require_promised(None, EventId.parse(newest), is_owned=is_owned)
        if is_lost:
            with pytest.raises(EventsLostError, match=f"had 2-7 on its disk, and ends with {newest}"):
                require_promised(KEPT, EventId.parse(newest), is_owned=is_owned)
        else:
            require_promised(KEPT, EventId.parse(newest), is_owned=is_owned)


@spec("STREAM-100")
@pytest.mark.parametrize(
    ("event_id", "is_lost"),
    [
        ("2-7", False),
        ("1-3", False),
        ("2-3", False),
        ("3-3", True),
        ("3-7", True),
        ("1-7", True),
        ("3-8", False),
    ],
)
def test_what_stands_in_its_place_shows_it_too(event_id: str, *, is_lost: bool) -> None:
    assert promised_after(KEPT, EventId.parse(event_id), WORD, is_owned=False) == KEPT
    if is_lost:
        with pytest.raises(EventsLostError, match=r"has .* in its place"):
            promised_after(KEPT, EventId.parse(event_id), STARTED, is_owned=True)
    else:
        assert promised_after(KEPT, EventId.parse(event_id), WORD, is_owned=True) == KEPT


def test_the_client_in_browsers_knows_the_same_kinds() -> None:
    static = Path(midstream.__file__).parent / "server" / "static" / "client" / "promises.js"
    listed = static.read_text(encoding="utf-8").partition("new Set([")[2].partition("])")[0]
    kinds = {kind.__struct_config__.tag for kind in records.ON_DISK_FIRST}
    assert {*re.findall(r'"(\w+)"', listed)} == kinds
