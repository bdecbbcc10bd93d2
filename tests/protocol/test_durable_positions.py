"""A client distinguishes text lost in a power cut from events that no crash may lose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import midstream
from midstream.errors import EventsLostError
from midstream.protocol.durable_positions import (
    KnownEpoch,
    durable_position_after,
    newest_epoch_after,
    require_durable_position,
)
from midstream.protocol.frames import EventId
from midstream.session import records
from midstream.session.records import CallStarted, Delta, EpochStarted, Record
from midstream.session.session import EPOCHS_KEPT_MAX, Session, fold, prune_session, restore_session
from tests.spec import spec

PROMISED = EventId(2, 7)
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
def test_the_promised_position_moves_with_synced_records(record: Record, *, is_durable: bool) -> None:
    after = EventId(2, 8)
    for known in (None, PROMISED):
        assert durable_position_after(known, after, record, is_owned=True) == (after if is_durable else known)


@spec("STREAM-100")
@pytest.mark.parametrize(
    ("newest", "of_a_stream", "of_a_reader"),
    [
        ("2-7", False, False),
        ("2-9", False, False),
        ("3-7", False, False),
        ("2-6", True, True),
        ("1-9", True, True),
        ("3-6", True, False),  # A reader's session may have been deleted, and begun again.
    ],
)
def test_a_journal_that_ends_before_the_promised_position_has_lost_events(
    newest: str, *, of_a_stream: bool, of_a_reader: bool
) -> None:
    for is_owned, is_lost in ((True, of_a_stream), (False, of_a_reader)):
        require_durable_position(None, EventId.parse(newest), is_owned=is_owned)
        if is_lost:
            with pytest.raises(EventsLostError, match=f"had 2-7 on its disk, and ends with {newest}"):
                require_durable_position(PROMISED, EventId.parse(newest), is_owned=is_owned)
        else:
            require_durable_position(PROMISED, EventId.parse(newest), is_owned=is_owned)


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
def test_another_record_at_the_promised_position_shows_the_loss_too(event_id: str, *, is_lost: bool) -> None:
    assert durable_position_after(PROMISED, EventId.parse(event_id), WORD, is_owned=False) == PROMISED
    if is_lost:
        with pytest.raises(EventsLostError, match=r"has .* in its place"):
            durable_position_after(PROMISED, EventId.parse(event_id), STARTED, is_owned=True)
    else:
        assert durable_position_after(PROMISED, EventId.parse(event_id), WORD, is_owned=True) == PROMISED


OLDER, KNOWN, OTHER, NEWER = (
    KnownEpoch(1, 10.0),
    KnownEpoch(2, 20.0),
    KnownEpoch(2, 21.0),
    KnownEpoch(3, 30.0),
)


@spec("STREAM-104")
@pytest.mark.parametrize(
    ("known", "expected", "after"),
    [
        (None, KNOWN, KNOWN),
        (KNOWN, KNOWN, KNOWN),
        (KNOWN, NEWER, NEWER),
        (KNOWN, OLDER, KNOWN),  # A client that died processes its unhandled events once more.
    ],
)
def test_the_newest_epoch_is_identified_by_its_start_time(
    known: KnownEpoch | None, expected: KnownEpoch, after: KnownEpoch
) -> None:
    assert newest_epoch_after(known, PROMISED, expected.epoch, expected.began_at) == after


@spec("STREAM-104")
def test_an_epoch_with_another_start_time_reveals_a_rolled_back_server() -> None:
    with pytest.raises(EventsLostError, match="had 2-7 on its disk, and began epoch 2 again since"):
        newest_epoch_after(KNOWN, PROMISED, OTHER.epoch, OTHER.began_at)


@spec("STREAM-104")
def test_without_a_start_time_or_a_promise_no_loss_is_assumed() -> None:
    assert newest_epoch_after(KNOWN, PROMISED, 2, None) == KNOWN
    assert newest_epoch_after(None, PROMISED, 2, None) is None
    assert newest_epoch_after(KNOWN, None, OTHER.epoch, OTHER.began_at) == OTHER
    assert newest_epoch_after(KNOWN, None, OLDER.epoch, OLDER.began_at) == OLDER


@spec("STREAM-104")
def test_a_session_keeps_the_start_times_of_its_last_epochs_also_when_pruned() -> None:
    newest = EPOCHS_KEPT_MAX + 1
    session = fold([(n, EpochStarted(n, "host", 10.0 * n)) for n in range(1, newest + 1)])
    for each in (session, restore_session(prune_session(session, at=0.0))):
        assert [each.began_at(n) for n in (0, 1, 2, newest)] == [None, None, 10.0 * 2, 10.0 * newest]
        assert len(each.epochs) == EPOCHS_KEPT_MAX
    assert Session().began_at(0) is None


def test_the_browser_client_has_the_same_synced_kinds() -> None:
    static = Path(midstream.__file__).parent / "server" / "static" / "client" / "durable_positions.js"
    listed = static.read_text(encoding="utf-8").partition("new Set([")[2].partition("])")[0]
    kinds = {kind.__struct_config__.tag for kind in records.ON_DISK_FIRST}
    assert {*re.findall(r'"(\w+)"', listed)} == kinds
