"""Examination of one history: its kind, its findings, and a repaired copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from midstream.doctor import journals, tinyagent
from midstream.doctor.databases import DatabaseRemedy, examine_opencode, is_opencode
from midstream.doctor.file_reading import (
    FileLine,
    Stamp,
    document_in,
    head_of,
    lines_of,
    of_os_error,
    require_file,
    stamp_of,
    value_in,
)
from midstream.doctor.file_writing import Settle, Written, write_beside, write_in_place
from midstream.doctor.findings import HistoryReport, LocatedFinding, Status, finding, finding_of, status_of
from midstream.doctor.jsonl_formats import SAMPLE, Ledger, ledger_for
from midstream.doctor.line_files import LineFile, cut_note
from midstream.doctor.opencode_folders import FolderRemedy, examine_storage
from midstream.doctor.rewriting import Patch, encode
from midstream.doctor.shapes import Json, Shape, at, confirm, shape_of, with_value
from midstream.errors import InvalidHistoryError, UnreadableHistoryError
from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import repair_by_name as repair
from midstream.history.profiles import profile_for
from midstream.history.repair.report import Repaired
from midstream.store.key_location import KeyLocation
from midstream.store.store_registry import show_store

LINE_SUFFIXES = {".jsonl", ".ndjson"}


class Remedy:
    """A repaired copy of one file that is not written yet."""

    def __init__(
        self,
        path: Path,
        stamp: Stamp,
        pieces: Callable[[], Iterator[bytes]],
        settle: Settle = lambda _: None,
    ) -> None:
        self._path = path
        self._stamp = stamp
        self._pieces = pieces
        self._settle = settle

    def beside(self) -> Written:
        """Write `NAME.repaired.EXT`; see `writing.write_beside`."""
        return write_beside(self._path, self._pieces(), self._settle)

    def in_place(self) -> Written:
        """Replace the file and keep a backup; see `writing.write_in_place`."""
        return write_in_place(self._path, self._pieces(), self._stamp, self._settle)


class Examined(Struct, frozen=True):
    """A report, and the remedy if there is something to repair."""

    report: HistoryReport
    remedy: Remedy | FolderRemedy | DatabaseRemedy | journals.JournalRemedy | None = None


OUTSIDE = "a link out of the folder is not repaired; name its target"


def without_remedy(examined: Examined) -> Examined:
    """Return a report without a remedy, for a file outside of the given folder."""
    if examined.remedy is None:
        return examined
    return Examined(replace(examined.report, notes=(*examined.report.notes, OUTSIDE)))


def examine(
    path: Path,
    *,
    named: str | None = None,
    profile: str | None = None,
    key_file: KeyLocation | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> Examined:
    """Examine one history. Nothing is written.

    Args:
        path: A file, or opencode's storage folder.
        named: The format or kind of file, if the user gave one.
        profile: The rules; None for those of the format.
        key_file: The operator's keys of an encrypted store of midstream.
        tick: Called with the number of bytes read so far.

    Raises:
        UsageError: There is no profile with this name.
    """
    try:
        return _examine(path, named, profile, tick, key_file)
    except UnreadableHistoryError as error:
        return _unreadable(path, error)
    except OSError as error:  # it was removed meanwhile, or the disk fails
        return _unreadable(path, of_os_error(error, path))
    except MemoryError:
        return _unreadable(path, UnreadableHistoryError("it does not fit in memory", reason="too-large"))
    except InvalidHistoryError as error:
        report = HistoryReport(str(path), Status.UNREADABLE, reason="too-deep", problem=error.message)
        return Examined(report)
    except RecursionError:
        problem = "nested too deeply for this Python"
        return Examined(HistoryReport(str(path), Status.UNREADABLE, reason="too-deep", problem=problem))


def examine_url(url: str, *, profile: str | None = None, key_file: KeyLocation | None = None) -> Examined:
    """Examine the store of a URL, such as `postgresql://host/db`. Nothing is written, and there is no remedy.

    Raises:
        UsageError: There is no profile with this name.
    """
    try:
        return Examined(journals.examine_store(url, profile, key_file)[0])
    except UnreadableHistoryError as error:
        return _unreadable(show_store(url), error)


def _unreadable(path: str | Path, error: UnreadableHistoryError) -> Examined:
    status = Status.MISSING if error.reason == "not-found" else Status.UNREADABLE
    return Examined(HistoryReport(str(path), status, reason=error.reason, problem=error.message))


def _examine(
    path: Path,
    named: str | None,
    profile: str | None,
    tick: Callable[[int], None],
    key_file: KeyLocation | None,
) -> Examined:
    if os.path.isdir(path):  # noqa: PTH112 - false without permission to look
        return Examined(*examine_storage(path, profile, tick))
    require_file(path)
    head = head_of(path)
    if journals.is_database(head) and is_opencode(path):
        confirm(Shape("opencode", "opencode", ()), named)
        return Examined(*examine_opencode(path, profile, tick))
    if journals.is_database(head):
        confirm(Shape("midstream", "midstream", ()), named)
        return Examined(*journals.examine_database(path, profile, key_file))
    if not head.strip():
        raise UnreadableHistoryError("it is empty", reason="no-history")
    sample = _sample(path)
    if sample and journals.is_export(sample[0]):
        confirm(Shape("midstream", "midstream", ()), named)
        return _export(path, profile)
    if sample and (ledger := ledger_for(sample, named)) is not None:
        return _lines(path, ledger, profile, tick)
    if sample and any(shape_of(line, named) for line in sample):
        return _requests(path, named, profile, tick)
    return _document(path, named, profile)


def _export(path: Path, profile: str | None) -> Examined:
    stamp = stamp_of(path)
    report, sound = journals.examine_export(path, _objects(path), profile)

    def pieces() -> Iterator[bytes]:
        return (line.body for line in lines_of(path) if line.number <= sound)

    return Examined(report, Remedy(path, stamp, pieces) if sound else None)


def _sample(path: Path) -> list[Json]:
    """Return the first objects of a file of JSON lines; none if it is one document."""
    sample: list[Json] = []
    seen = 0
    for line in lines_of(path):
        seen += 1
        value = _value(line)
        if isinstance(value, dict):
            sample.append(value)
        elif path.suffix not in LINE_SUFFIXES:
            break  # one document on several lines
        if seen >= SAMPLE:
            break
    is_one_document = (
        seen == 1 and path.suffix not in LINE_SUFFIXES and not (sample and _is_lone_line(sample[0]))
    )
    return [] if is_one_document else sample


def _is_lone_line(line: Json) -> bool:
    """Whether the only line of a file is a line of a session, and not a document."""
    return "sessionId" in line or "payload" in line or journals.is_export(line)


def _value(line: FileLine) -> Any:  # noqa: ANN401 - any value
    try:
        return value_in(line.body).value if line.body else None
    except UnreadableHistoryError:
        return None


def _objects(path: Path) -> Iterator[tuple[int, Json]]:
    for line in lines_of(path):
        value = _value(line)
        yield line.number, value if isinstance(value, dict) else {}


def _lines(path: Path, ledger: Ledger, profile: str | None, tick: Callable[[int], None]) -> Examined:
    stamp = stamp_of(path)
    file = LineFile(path, ledger, profile, tick)
    file.examine()
    rules = profile_for(find_format(ledger.format), profile)
    report = HistoryReport(
        str(path),
        status_of(file.findings),
        format=ledger.kind,
        profile=rules.name,
        messages=file.messages,
        conversations=file.conversations,
        findings=tuple(sorted(file.findings, key=lambda each: each.line)),
        notes=tuple(file.notes()),
    )

    def settle(draft: Path) -> Iterator[bytes] | None:
        again = LineFile(draft, ledger, profile, tick)
        again.examine()
        return None if again.patch.is_empty else again.pieces()

    return Examined(report, None if file.patch.is_empty else Remedy(path, stamp, file.pieces, settle))


def _requests(path: Path, named: str | None, profile: str | None, tick: Callable[[int], None]) -> Examined:
    """Examine lines that are complete conversations: request logs, training data."""
    stamp = stamp_of(path)
    findings: list[LocatedFinding] = []
    patch = Patch()
    count = conversations = 0
    form = rules = ""
    notes: tuple[str, ...] = ()
    for line in lines_of(path):
        tick(line.offset)
        value = _value(line)
        shape = shape_of(value, named)
        if value is None and line.body and not line.is_whole:
            notes = (cut_note(line.number),)
            patch.cut = line.number
            continue
        if shape is None:
            code = "long-line" if not line.body else "broken-line"
            findings.append(finding(code, "left out of the copy", line=line.number, lost="a line"))
            patch.replaced[line.number] = None
            continue
        conversations += 1
        form, rules = shape.kind, _rules(shape, profile)
        count += len(at(value, shape.path))
        done, repaired = _repair(value, shape, profile)
        findings += [finding_of(edit, line=line.number, message=edit.at) for edit in done.edits]
        if done.is_changed:
            patch.replaced[line.number] = encode(repaired)
    report = HistoryReport(
        str(path), status_of(findings), form, rules, count, conversations, tuple(findings), notes
    )
    remedy = Remedy(path, stamp, lambda: patch.apply(lines_of(path)))
    return Examined(report, None if patch.is_empty else remedy)


def _document(path: Path, named: str | None, profile: str | None) -> Examined:
    stamp = stamp_of(path)
    value, constants = document_in(path)
    shape = shape_of(value, named)
    if shape is None:
        raise UnreadableHistoryError("JSON without messages", reason="no-history")
    rules = _rules(shape, profile)
    findings = [finding("not-a-number", "replaced by null", lost=each) for each in constants]
    messages = at(value, shape.path)
    if not messages:
        findings.append(finding("empty-list", "none: send a message first"))
    done, repaired = _repair(value, shape, profile)
    findings += [finding_of(edit, message=edit.at) for edit in done.edits]
    report = HistoryReport(
        str(path),
        status_of(findings),
        shape.kind,
        rules,
        len(messages),
        1,
        tuple(findings),
        _advice(done),
    )
    if not done.is_changed and not constants:
        return Examined(report)
    indent = _indent(head_of(path))
    return Examined(report, Remedy(path, stamp, lambda: iter([encode(repaired, indent=indent) + b"\n"])))


def _rules(shape: Shape, profile: str | None) -> str:
    """Return the name of the profile for a document."""
    if shape.format == tinyagent.NAME:
        return profile_for(find_format(tinyagent.CHAT), profile or tinyagent.RULES).name
    return profile_for(find_format(shape.format), profile).name


def _repair(value: object, shape: Shape, profile: str | None) -> tuple[Repaired, object]:
    system = at(value, shape.system) if shape.system else None
    if shape.format == tinyagent.NAME:
        done = tinyagent.repair_messages(at(value, shape.path), profile)
    else:
        done = repair(at(value, shape.path), format=shape.format, profile=profile, system=system)
    if not done.is_changed:
        return done, value
    repaired = with_value(value, shape.path, done.messages)
    if done.system is not system:
        usual = next(iter(find_format(shape.format).spec.system_keys), "system")
        repaired = with_value(repaired, shape.system or (*shape.path[:-1], usual), done.system)
    return done, repaired


def _advice(done: Repaired) -> tuple[str, ...]:
    notes = []
    if done.advice.thinking is False:
        notes.append("send the next request with thinking off")
    if done.advice.tools:
        notes.append("the request must declare its tools")
    return tuple(notes)


def _indent(head: bytes) -> int | None:
    """Return the indentation of the second line, so that the copy looks like the original."""
    _, newline, rest = head.strip().partition(b"\n")
    return len(rest) - len(rest.lstrip(b" ")) or None if newline else None
