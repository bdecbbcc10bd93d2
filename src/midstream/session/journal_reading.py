"""Reading of one journal, in order, so that a damaged outcome of a call costs only itself."""

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
    """Return which call's outcome a body was that `decode` refuses, or None where that is not certain."""
    found = _OUTCOME.match(body)
    if found is None:
        return None
    try:
        call_id = msgspec.json.decode(found[3], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return OutcomeDamaged(int(found[1]), int(found[2]), call_id)


class JournalReader:
    """Reads the records of one journal, in order, so that a damaged outcome costs only itself."""

    def __init__(self) -> None:
        self._version = VERSION
        """Of the writer of the records that were read last."""

    def read(self, body: bytes) -> Record:
        """Return the next record; `OutcomeDamaged` in the place of an outcome that cannot be read any more.

        Raises:
            RecordUndecodableError: A record of a newer version, or damage. Of a newer version nothing is taken for
                damaged: what cannot be read there is not understood.
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
