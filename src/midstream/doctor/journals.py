"""Our own journals: a store's database, or what `midstream sessions export` wrote.

Only read. What is interrupted in them is no defect: the next owner carries it on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from midstream.core.records import decode
from midstream.core.session import Session, evolve
from midstream.doctor.findings import Finding, Report, finding, status_of
from midstream.doctor.shapes import Json
from midstream.errors import (
    InvalidHistoryError,
    MidstreamError,
    NotFoundError,
    RecordUndecodableError,
    UnreadableHistoryError,
    UsageError,
)
from midstream.store.sqlite import Reader, reading

PAGE = 500
"""Records read at once."""
NO_REPAIR = "none: restore a copy"
FINDINGS_MAX = 100
"""Findings of one session; a journal with more is not damaged but lost."""

_EVENT_ID = re.compile(r"(\d+)-(\d+)")

Stored = tuple[int, int, bytes]
"""Position, epoch, body."""


def is_database(head: bytes) -> bool:
    """Whether a file that begins like this is a SQLite database."""
    return head.startswith(b"SQLite format 3\0")


def is_export(line: Json) -> bool:
    """Whether a line is one record of an exported session."""
    name, record = line.get("id"), line.get("record")
    return isinstance(name, str) and isinstance(record, dict) and _EVENT_ID.fullmatch(name) is not None


def examine_database(path: Path) -> Report:
    """Look at every session of a store.

    Raises:
        UnreadableHistoryError: It is another program's database, or damaged.
    """
    findings: list[Finding] = []
    sessions = live = records = 0
    try:
        with reading(path) as reader:
            for number in reader.numbers(None):
                for line in reader.lines([number]):
                    sessions += 1
                    live += line.mark.is_live
                    records += line.end
                    findings += judged(_records(reader, line.session), file=line.session)
    except UsageError as error:
        raise UnreadableHistoryError(error.message, reason="no-history") from error
    except NotFoundError:
        pass  # an empty database is a store in which nothing was said yet
    except MidstreamError as error:
        raise UnreadableHistoryError(error.message, reason="damaged") from error
    notes = (f"{live} turns are open: the next owner carries them on",) if live else ()
    return _report(path, findings, records, sessions, notes)


def examine_export(path: Path, lines: Iterable[tuple[int, Json]]) -> Report:
    """Look at the lines of an exported session, given with their numbers."""
    count = 0

    def stored() -> Iterator[Stored]:
        nonlocal count
        for _, line in lines:
            found = _EVENT_ID.fullmatch(line["id"]) if is_export(line) else None
            count += 1
            body = msgspec.json.encode(line["record"]) if found else b"null"
            yield (int(found[2]), int(found[1]), body) if found else (count, 0, body)

    return _report(path, judged(stored()), count, 1, ())


def _report(
    path: Path, findings: list[Finding], records: int, sessions: int, notes: tuple[str, ...]
) -> Report:
    return Report(
        str(path),
        status_of(findings),
        format="midstream",
        profile="any",
        messages=records,
        conversations=sessions,
        findings=tuple(findings),
        notes=notes,
    )


def judged(stored: Iterable[Stored], *, file: str = "") -> list[Finding]:
    """Say what is wrong with one session's records: gaps, unreadable ones, and what does not fold."""
    findings: list[Finding] = []
    session: Session | None = Session()
    expected = 1
    for position, epoch, body in stored:
        if len(findings) >= FINDINGS_MAX:
            break
        if position != expected:
            findings.append(finding("journal-gap", NO_REPAIR, message=position, lost="records", file=file))
            session = None
        expected = position + 1
        try:
            record = decode(body)
        except RecordUndecodableError:
            findings.append(
                finding("unreadable-record", NO_REPAIR, message=position, lost="a record", file=file)
            )
            session = None
            continue
        if session is not None:
            try:
                session = evolve(session, record, epoch=epoch)
            except (InvalidHistoryError, KeyError, AttributeError, AssertionError, TypeError):
                findings.append(finding("journal-unfolded", NO_REPAIR, message=position, file=file))
                session = None
    return findings


def _records(reader: Reader, session: str) -> Iterator[Stored]:
    after = 0
    while page := reader.records(session, after, PAGE):
        after = page[-1].position
        for each in page:
            yield each.position, each.epoch, bytes(each.body)
