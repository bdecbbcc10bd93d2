"""Independent check of a demo: compares the screen with the journal's file, and the ledger with the calls. It does not
use midstream's server and client. The journal is read from the SQLite file, the tools wrote the ledger, and the printed
text was stored when it was printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from midstream.demo.folder import LedgerEntry
from midstream.errors import MidstreamError
from midstream.history.messages import Step
from midstream.session import session as sessions
from midstream.session.records import (
    CallEnded,
    Delta,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.store.store_registry import read_store

PAGE = 1000


@dataclass(frozen=True)
class PrintedText:
    """Printed text, and its event."""

    event_id: str
    text: str


@dataclass(frozen=True)
class Journaled:
    """One record in the file."""

    event_id: str
    epoch: int
    record: Record


@dataclass(frozen=True)
class TextComparison:
    """Comparison of the text on the screen with that in the journal."""

    shown_pieces: int
    shown_characters: int
    journal_pieces: int
    journal_characters: int
    lost: int
    """Pieces of the journal that were never shown."""
    twice: int
    """Pieces that were shown more than once."""
    wrong: int
    """Pieces that were shown and differ from the journal, or have another order."""


@dataclass(frozen=True)
class CheckedCall:
    """One call of the journal, and its entries in the ledger."""

    tool: str
    turn: int
    started: int
    finished: int
    outcome: str


@dataclass(frozen=True)
class DemoVerdict:
    """All results of the check."""

    words: TextComparison
    executions: tuple[CheckedCall, ...]
    unasked: int
    """Executions in the ledger without a call in the journal."""
    entries: int
    """Entries of the history in the journal; 0 if it does not fold."""
    unanswered: int
    """Calls without a result."""
    statuses: tuple[TurnStatus, ...]
    """The status of each turn."""

    @property
    def problems(self) -> list[str]:
        """The faults; empty if no text was lost or repeated, and no call was run twice."""
        again = sum(each.started > 1 for each in self.executions)
        found = {
            "pieces lost": self.words.lost,
            "pieces shown twice": self.words.twice,
            "pieces not as in the journal": self.words.wrong,
            "calls executed twice": again,
            "executions without a call": self.unasked,
            "calls without a result": self.unanswered,
            "journals that do not fold": int(self.entries == 0),
            "turns that did not complete": sum(each is not TurnStatus.COMPLETED for each in self.statuses),
        }
        return [f"{number} {what}" for what, number in found.items() if number]


def journal_of(store: Path, session: str) -> list[Journaled]:
    """Read a session's journal from the database file.

    Raises:
        MidstreamError: The file or a record cannot be read.
    """
    found: list[Journaled] = []
    with read_store(store) as reader:
        while page := reader.read(session, after=len(found), limit=PAGE):
            for stored in page:
                event_id = f"{stored.epoch}-{stored.position}"
                found.append(Journaled(event_id, stored.epoch, decode(stored.body)))
    return found


def judge(
    journal: Sequence[Journaled], shown: Sequence[PrintedText], ledger: Sequence[LedgerEntry], session: str
) -> DemoVerdict:
    """Compare the observations with the files."""
    records = [each.record for each in journal]
    executions, keys = _executions(records, ledger, session)
    try:
        history = sessions.fold((each.epoch, each.record) for each in journal).history
    except MidstreamError:
        entries, unanswered = 0, 0
    else:
        entries = len(history.entries)
        steps = [entry for entry in history.entries if isinstance(entry, Step)]
        unanswered = sum(len(each.response.calls) - len(each.results) for each in steps)
    return DemoVerdict(
        words=_words(journal, shown),
        executions=tuple(executions),
        unasked=len({entry.key for entry in ledger} - keys),
        entries=entries,
        unanswered=unanswered + sum(not each.outcome for each in executions),
        statuses=tuple(record.status for record in records if isinstance(record, TurnEnded)),
    )


def _words(journal: Iterable[Journaled], shown: Sequence[PrintedText]) -> TextComparison:
    written = {each.event_id: each.record.text for each in journal if isinstance(each.record, Delta)}
    times = Counter(each.event_id for each in shown)
    in_order = [event_id for event_id in written if event_id in times]
    misplaced = list(dict.fromkeys(each.event_id for each in shown if each.event_id in written)) != in_order
    return TextComparison(
        shown_pieces=len(shown),
        shown_characters=sum(len(each.text) for each in shown),
        journal_pieces=len(written),
        journal_characters=sum(map(len, written.values())),
        lost=sum(event_id not in times for event_id in written),
        twice=sum(number - 1 for number in times.values()),
        wrong=sum(written.get(each.event_id) != each.text for each in shown) + misplaced,
    )


def _executions(
    records: Sequence[Record], ledger: Sequence[LedgerEntry], session: str
) -> tuple[list[CheckedCall], set[str]]:
    outcomes = {
        (record.turn, record.response, record.result.call_id): record.result.outcome.value
        for record in records
        if isinstance(record, CallEnded)
    }
    counts = Counter((entry.key, entry.what) for entry in ledger)
    executions, keys = [], set()
    for record in records:
        if isinstance(record, ResponseCompleted):
            for call in record.body.calls:
                key = f"{session}/{record.turn}/{record.response}/{call.id}"
                keys.add(key)
                outcome = outcomes.get((record.turn, record.response, call.id), "")
                started, finished = counts[key, "started"], counts[key, "finished"]
                executions.append(CheckedCall(call.name, record.turn, started, finished, outcome))
    return executions, keys


@dataclass(frozen=True)
class Timings:
    """Durations of the recoveries, in seconds; None if not observed."""

    cut_to_words: float | None
    restart_to_listening: float
    restart_to_record: float | None
    restart_to_words: float | None
