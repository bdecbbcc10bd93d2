"""Reading of a journal in order, with a replacement for each damaged outcome of a call."""

from __future__ import annotations

import re

import msgspec

from midstream.errors import RecordUndecodableError
from midstream.session.records import VERSION, EpochStarted, JournalPruned, OutcomeDamaged, Record, decode

_OUTCOME = re.compile(
    rb'\{"type":"(?:call_ended|result_arrived_late)","turn":(\d{1,18}),"response":(\d{1,18}),'
    rb'"result":\{"call_id":("(?:[^"\\]|\\.)*")'
)


def salvage(body: bytes) -> OutcomeDamaged | None:
    """Return the replacement for an undecodable outcome of a call, or None if the body is not certainly one."""
    found = _OUTCOME.match(body)
    if found is None:
        return None
    try:
        call_id = msgspec.json.decode(found[3], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return OutcomeDamaged(int(found[1]), int(found[2]), call_id)


class JournalReader:
    """Reads the records of one journal, in order, with a replacement for each damaged outcome."""

    def __init__(self) -> None:
        self._version = VERSION
        """Version of the writer of the last records."""

    def read(self, body: bytes) -> Record:
        """Return the next record, or `OutcomeDamaged` for a damaged outcome.

        Raises:
            RecordUndecodableError: The record is damaged, or of a newer version. An unreadable record of a newer
                version never counts as damaged.
        """
        try:
            record = decode(body)
        except RecordUndecodableError:
            found = salvage(body) if self._version <= VERSION else None
            if found is None:
                raise
            return found
        if isinstance(record, EpochStarted | JournalPruned):
            self._version = record.version
        return record
