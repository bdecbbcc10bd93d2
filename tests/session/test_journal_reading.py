"""A damaged outcome damages nothing else."""

from __future__ import annotations

import pytest

from midstream.errors import RecordUndecodableError
from midstream.history.messages import Outcome, ToolResult
from midstream.session.journal_reading import salvage
from midstream.session.records import (
    CallEnded,
    CallStarted,
    OutcomeDamaged,
    TurnEnded,
    TurnStatus,
    decode,
    encode,
)
from tests.spec import spec

OUTCOME = encode(CallEnded(3, 2, ToolResult('a"é\\', "it says", Outcome.ERROR), 1000.5))


@spec("TURN-72")
@pytest.mark.parametrize(
    "damaged",
    [
        OUTCOME[:-9],
        OUTCOME.replace(b"it says", b"it \xff\xfe"),
        OUTCOME.replace(b'"it says"', b"17"),
        OUTCOME.replace(b'"error"', b'"errox"'),
        OUTCOME.replace(b'"at":', b"xxxxx"),
        OUTCOME.replace(b"call_ended", b"result_arrived_late")[:-1],
    ],
)
def test_a_damaged_outcome_still_names_its_call(damaged: bytes) -> None:
    with pytest.raises(RecordUndecodableError):
        decode(damaged)
    assert salvage(damaged) == OutcomeDamaged(3, 2, 'a"é\\')


@spec("TURN-72")
@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x00" * 100,
        OUTCOME[:40],
        OUTCOME.replace(b'"turn":3', b'"turn":x'),
        OUTCOME.replace(b"call_ended", b"call_endeX"),
        encode(CallStarted(1, 1, "a", 1, 1000.5))[:-1],
        encode(TurnEnded(1, TurnStatus.COMPLETED, 1000.5))[:-1],
    ],
)
def test_a_record_that_is_not_certainly_an_outcome_is_not_taken_for_one(damaged: bytes) -> None:
    assert salvage(damaged) is None
