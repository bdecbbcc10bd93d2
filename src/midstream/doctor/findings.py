"""Reports of an examination: one for each history, with every finding and its place."""

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
"""The rules for files. Those for messages are the repair's (`midstream.history.repair.rules`)."""


class Status(StrEnum):
    """The result of an examination."""

    CLEAN = "clean"
    FINDINGS = "findings"
    """A provider would refuse something; the repair loses nothing."""
    LOSSY = "lossy"
    """A provider would refuse something, and the repaired copy has less content."""
    UNREADABLE = "unreadable"
    MISSING = "missing"
    """There is no such file, or it has no history."""


class LocatedFinding(Struct, frozen=True):
    """One fault: its place, its rule, and its repair.

    `line` counts from 1 (0: not by lines), `message` from 0 (-1: no message), `part` counts the parts of the message.
    `lost` is the content that the repaired copy lacks.
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
    """The file, if a history has several."""


JOURNAL = "midstream"
"""Format of midstream's own stores and exports."""


class HistoryReport(Struct, frozen=True):
    """Results found in one history. `format` is the file's, `profile` the applied rules.

    Of midstream's own journals, `messages` is the number of records, and `conversations` that of sessions.
    """

    path: str
    status: Status
    format: str = ""
    profile: str = ""
    messages: int = 0
    conversations: int = 1
    findings: tuple[LocatedFinding, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    """A code for an unreadable or missing file, such as `not-json`."""
    problem: str = ""
    """The same as text, with the place."""
    written: str = ""
    """The repaired copy."""
    backup: str = ""


def rule_of(code: str) -> str:
    """Return the rule that a finding of this code breaks."""
    refusal = REFUSALS.get(code)
    return RULES.get(code) or (refusal.rule if refusal else code.replace("-", " "))


def finding_of(edit: Edit, *, line: int = 0, message: int = -1, file: str = "") -> LocatedFinding:
    """Return an edit of the repair as a finding with its place in a file."""
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
    """Create a finding for a fault of the file."""
    return LocatedFinding(code, rule_of(code), repair, line=line, lost=lost, file=file, message=message)


def status_of(findings: Iterable[LocatedFinding]) -> Status:
    """Return the status for these findings. Removed white space is no loss."""
    status = Status.CLEAN
    for each in findings:
        if each.lost.strip():
            return Status.LOSSY
        status = Status.FINDINGS
    return status
