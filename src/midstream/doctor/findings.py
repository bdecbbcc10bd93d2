"""Reports of an examination: one a history, with every finding and its place."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from midstream.history.repair.report import Edit
from midstream.history.repair.rules import REFUSALS

RULES = {
    "broken-chain": "Every line follows one that is in the file.",
    "broken-file": "Every file of a history is JSON.",
    "broken-line": "Every line is JSON.",
    "broken-row": "Every document of a database is JSON.",
    "damaged-file": "Every page of a database is where it belongs.",
    "empty-list": "A history has at least one message.",
    "journal-gap": "A journal has no gaps.",
    "journal-unfolded": "The records of a journal do not contradict one another.",
    "long-line": "A line is short enough to be read.",
    "not-a-number": "NaN and Infinity are not JSON.",
    "orphan-part": "Every part belongs to a message.",
    "unreadable-record": "Every record can be read.",
}
"""The rules of files. Those of messages are the repair's (`midstream.history.repair.rules`)."""


class Status(StrEnum):
    """How an examination ended."""

    CLEAN = "clean"
    FINDINGS = "findings"
    """Something would be refused; the repair loses nothing."""
    LOSSY = "lossy"
    """Something would be refused, and the repaired copy holds less than the original."""
    UNREADABLE = "unreadable"
    MISSING = "missing"
    """There is no such file, or no history in it."""


class LocatedFinding(Struct, frozen=True):
    """One thing that is wrong: where, which rule it breaks, and what the repair makes of it.

    `line` counts from 1 (0: the file has no lines that matter), `message` from 0 (-1: no message), `part` counts
    the parts of the message. `lost` is what the repaired copy no longer holds.
    """

    code: str
    rule: str
    repair: str
    line: int = 0
    message: int = -1
    part: int = -1
    call_id: str | None = None
    lost: str = ""
    file: str = ""
    """Where a history is made of several files: the one meant."""


class HistoryReport(Struct, frozen=True):
    """Results found in one history. `format` is the file's, `profile` the rules it was judged by."""

    path: str
    status: Status
    format: str = ""
    profile: str = ""
    messages: int = 0
    conversations: int = 1
    findings: tuple[LocatedFinding, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    """Of an unreadable or missing file: a code, such as `not-json`."""
    problem: str = ""
    """The same in words, with the place."""
    written: str = ""
    """The repaired copy."""
    backup: str = ""


def rule_of(code: str) -> str:
    """Return the rule that a finding of this code breaks."""
    refusal = REFUSALS.get(code)
    return RULES.get(code) or (refusal.rule if refusal else code.replace("-", " "))


def finding_of(edit: Edit, *, line: int = 0, message: int = -1, file: str = "") -> LocatedFinding:
    """Return an edit of the repair as a finding at its place in a file."""
    return LocatedFinding(
        edit.code,
        rule_of(edit.code),
        edit.did,
        line=line,
        message=message,
        part=edit.part,
        call_id=edit.call_id,
        lost=edit.lost,
        file=file,
    )


def finding(
    code: str, repair: str, *, line: int = 0, lost: str = "", file: str = "", message: int = -1
) -> LocatedFinding:
    """Make a finding that no repair of messages made."""
    return LocatedFinding(code, rule_of(code), repair, line=line, lost=lost, file=file, message=message)


def status_of(findings: Iterable[LocatedFinding]) -> Status:
    """Return the status that findings amount to. White space is no loss."""
    status = Status.CLEAN
    for each in findings:
        if each.lost.strip():
            return Status.LOSSY
        status = Status.FINDINGS
    return status
