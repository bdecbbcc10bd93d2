"""midstream's own journals: a store's database, or a file of `midstream sessions export`.

An interrupted turn is no defect: the next node continues it. The file itself may be damaged. Then a copy can be written
in which each damaged session ends before its first damaged record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.doctor import sqlite_files
from midstream.doctor.file_writing import Written, copy_of, make_whole
from midstream.doctor.findings import JOURNAL, HistoryReport, LocatedFinding, finding, finding_of, status_of
from midstream.doctor.shapes import Json
from midstream.errors import (
    ConflictError,
    EventsLostError,
    InvalidHistoryError,
    KeyMissingError,
    MidstreamError,
    NotFoundError,
    RecordUndecodableError,
    StoreDamagedError,
    UnavailableError,
    UnreadableHistoryError,
    UsageError,
)
from midstream.history.operations import repair_by_name as repair
from midstream.history.profiles import find_profile
from midstream.history.rendering import render
from midstream.session.records import decode, is_pruned
from midstream.session.session import Session, evolve
from midstream.store.blocking_reads import ENCRYPTED_MARKS, ClosedStore
from midstream.store.contract import is_session
from midstream.store.guard.chain import may_end_journal
from midstream.store.key_location import KeyLocation
from midstream.store.sqlite.truncation import cut_journals
from midstream.store.store_registry import read_store, show_store

PAGE = 500
"""Records read in one step."""
CUT = "the copy ends before it"
NO_REPAIR = "none: restore a copy"
FINDINGS_MAX = 100
"""Findings of one session; with more, the journal counts as lost."""

LOST = {
    "journal-gap": "records",
    "unreadable-record": "a record and what follows it",
    "journal-unfolded": "a record and what follows it",
}
"""Content that a copy lacks, by the code of a fault at a record."""

_KEYS = "give its key file with --key-file"

_EVENT_ID = re.compile(r"(\d+)-(\d+)")


class ReadRecord(NamedTuple):
    """A record to examine."""

    position: int
    epoch: int
    body: bytes
    may_end: bool = True
    """Whether a journal may end with it: it is not in the middle of an append."""


class JournalDiagnosis(Struct):
    """One session's findings, and its state at the end of the last undamaged append."""

    findings: list[LocatedFinding]
    session: Session


class JournalRemedy:
    """A copy of a store with truncated sessions, not written yet."""

    def __init__(self, path: Path, cuts: dict[str, Session]) -> None:
        self._path = path
        self._cuts = cuts

    def beside(self) -> Written:
        """Write `NAME.repaired.EXT`; an earlier copy is replaced.

        Raises:
            UnavailableError: The disk, the folder or a lock refuses. No copy was written.
        """
        target = copy_of(self._path)
        with sqlite_files.translate_write_errors(target):
            change = partial(cut_journals, sessions=self._cuts)
            make_whole(target, partial(sqlite_files.copy, self._path, change=change), like=self._path)
        return Written(target)

    def in_place(self) -> Written:
        """Refuse: a server may have the sessions in memory.

        Raises:
            ConflictError: Always. Nothing was changed.
        """
        raise ConflictError(
            "a store cannot be changed in place; write a copy beside it, stop the server, and put the copy there"
        )


def is_database(head: bytes) -> bool:
    """Whether a file with this beginning is a SQLite database."""
    return head.startswith(b"SQLite format 3\0")


def is_export(line: Json) -> bool:
    """Whether a line is a record of an exported session."""
    name, record = line.get("id"), line.get("record")
    return isinstance(name, str) and isinstance(record, dict) and _EVENT_ID.fullmatch(name) is not None


def examine_database(
    path: Path, profile: str | None = None, key_file: KeyLocation | None = None
) -> tuple[HistoryReport, JournalRemedy | None]:
    """Examine every session of a SQLite file. There is no copy of an encrypted one, because its end is sealed.

    Args:
        profile: Also check the messages of each session by these rules.
        key_file: The operator's keys, if it is encrypted under them.

    Raises:
        UnreadableHistoryError: It is another program's database, or damaged.
        UsageError: There is no profile with this name.
    """
    report, cuts = examine_store(path, profile, key_file)
    if not sqlite_files.is_whole(path):
        damaged = finding("damaged-file", NO_REPAIR, lost="what the damaged pages held")
        report = replace(
            report, findings=(*report.findings, damaged), status=status_of([*report.findings, damaged])
        )
    return report, JournalRemedy(path, cuts) if cuts else None


def examine_store(
    named: str | Path, profile: str | None = None, key_file: KeyLocation | None = None
) -> tuple[HistoryReport, dict[str, Session]]:
    """Examine every session of a store of any kind; also return the last undamaged state of each damaged session.

    Args:
        named: The URL of the store, or the path of a SQLite file.
        profile, key_file: See `examine_database`.

    Raises:
        UnreadableHistoryError, UsageError: See `examine_database`.
    """
    findings: list[LocatedFinding] = []
    cuts: dict[str, Session] = {}
    sessions = live = records = locked = 0
    try:
        with read_store(named, key_file=key_file) as store:
            for line in store.list():
                if not is_session(line.session):
                    continue
                sessions += 1
                live += line.mark.is_live
                records += line.end
                if store.is_under_client_key(line.session):
                    locked += 1
                    continue
                if key_file is None:
                    done = judge(_records(store, line.session), file=line.session)
                else:
                    found = _decrypt(store, line.session)
                    done = judge(found, file=line.session, repair=NO_REPAIR)
                findings += done.findings
                if done.findings and key_file is None:
                    cuts[line.session] = done.session
                findings += check_rendering(done.session, profile, file=line.session) if profile else []
    except NotFoundError:
        pass  # an empty database is a store without sessions
    except UsageError as error:
        raise UnreadableHistoryError(error.message, reason="no-history") from error
    except KeyMissingError as error:
        raise UnreadableHistoryError(f"{error.message}: {_KEYS}", reason="encrypted") from error
    except UnavailableError:  # the keys are unavailable, which is no damage
        raise
    except MidstreamError as error:
        raise UnreadableHistoryError(f"{error.message}: restore a copy", reason="damaged") from error
    notes: tuple[str, ...] = (f"{_count(live)} open; the next node continues it",) if live else ()
    if locked:
        notes += (f"not examined, because only their clients can open them: {locked} of {sessions} sessions",)
    return _report(show_store(named), findings, records, sessions, notes, profile), cuts


def _count(turns: int) -> str:
    return "a turn is" if turns == 1 else f"{turns} turns are"


def examine_export(
    path: Path, lines: Iterable[tuple[int, Json]], profile: str | None = None
) -> tuple[HistoryReport, int]:
    """Examine the lines of an exported session, given with their numbers.

    Returns:
        The report, and the last undamaged line if others follow it, else 0.

    Raises:
        UsageError: There is no profile with this name.
    """
    numbers: dict[int, int] = {}
    count = last = 0

    def read_stored() -> Iterator[ReadRecord]:
        nonlocal count, last
        for number, line in lines:
            found = _EVENT_ID.fullmatch(line["id"]) if is_export(line) else None
            count += 1
            last = number
            position = int(found[2]) if found else count
            numbers.setdefault(position, number)
            yield (
                ReadRecord(position, int(found[1]), msgspec.json.encode(line["record"]))
                if found
                else ReadRecord(count, 0, b"null")
            )

    done = judge(read_stored())
    findings = [replace(each, line=numbers.get(each.message, 0)) for each in done.findings]
    findings += check_rendering(done.session, profile) if profile else []
    sound = numbers.get(done.session.position, 0) if done.findings else 0
    return _report(path, findings, count, 1, (), profile), sound


def _report(
    path: str | Path,
    findings: list[LocatedFinding],
    records: int,
    sessions: int,
    notes: tuple[str, ...],
    profile: str | None,
) -> HistoryReport:
    return HistoryReport(
        str(path),
        status_of(findings),
        format=JOURNAL,
        profile=profile or "any",
        messages=records,
        conversations=sessions,
        findings=tuple(findings),
        notes=notes,
    )


def judge(stored: Iterable[ReadRecord], *, file: str = "", repair: str = CUT) -> JournalDiagnosis:
    """Return the faults of one session's records: gaps, unreadable ones, and those that do not fold."""
    done = JournalDiagnosis([], Session())
    state, expected, may_end = Session(), 1, True
    for position, epoch, body, may_end in stored:
        if len(done.findings) >= FINDINGS_MAX:
            break
        is_beginning = expected == 1 and is_pruned(body)
        code = "" if position == expected or is_beginning else "journal-gap"
        expected = position + 1
        try:
            record = decode(body)
        except RecordUndecodableError:
            code = code or "unreadable-record"
        else:
            if not (code or done.findings):
                try:
                    state = evolve(state, record, epoch=epoch)
                except (InvalidHistoryError, KeyError, AttributeError, AssertionError, TypeError):
                    code = "journal-unfolded"
                else:
                    done.session = state if may_end else done.session
        if code:
            done.findings.append(finding(code, repair, message=position, lost=LOST[code], file=file))
    if not (may_end or done.findings):  # the rest of its last append is missing
        lost = LOST["journal-gap"]
        done.findings.append(finding("journal-gap", repair, message=expected, lost=lost, file=file))
    return done


def check_rendering(session: Session, profile: str, *, file: str = "") -> list[LocatedFinding]:
    """Return the faults of a session's rendered messages; none, unless `render` has a defect.

    Raises:
        UsageError: There is no profile with this name.
    """
    form = find_profile(profile).format
    sent = render(session.model_history, "", profile)
    done = repair(sent.messages, format=form, profile=profile)
    return [finding_of(edit, message=edit.at, file=file) for edit in done.edits]


def _records(store: ClosedStore, session: str) -> Iterator[ReadRecord]:
    after = 0
    while page := store.read_stored(session, after=after, limit=PAGE):
        after = page[-1].position
        for each in page:
            if each.body.startswith(ENCRYPTED_MARKS):
                raise KeyMissingError(
                    f"session {session!r} is encrypted under a key of its server's operator"
                )
            yield ReadRecord(each.position, each.epoch, each.body, may_end_journal(each.link))


def _decrypt(store: ClosedStore, session: str) -> Iterator[ReadRecord]:
    """Yield the records of an encrypted session; without bodies if their append was changed or moved."""
    after = 0
    while page := store.read_stored(session, after=after, limit=PAGE):
        for each in page:
            try:
                for found in store.read(session, after=each.position - 1, limit=1):
                    yield ReadRecord(found.position, found.epoch, found.body)
            except KeyMissingError:
                raise
            except StoreDamagedError:
                yield ReadRecord(each.position, each.epoch, b"")
        after = page[-1].position
    try:
        store.read(session, after=after, limit=1)
    except EventsLostError:
        yield ReadRecord(after + 2, 0, b"")  # its seal has a later end: a gap
