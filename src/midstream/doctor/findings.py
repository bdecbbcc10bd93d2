"""What an examination says: one report a history, with every finding and its place."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from midstream.core.repair.report import Edit
from midstream.errors import InvalidHistoryError

RULES = {
    "bad-id": "the id of a call is not one this provider takes",
    "bad-item-id": "the id of an item is not one this provider takes",
    "bad-result": "a result holds what no result may",
    "blank-text": "a text without words is refused",
    "broken-arguments": "the arguments of a call must be a JSON object",
    "broken-chain": "a line follows one that is not in the file",
    "broken-file": "this file is no JSON",
    "broken-line": "this line is no JSON",
    "call-without-name": "a call must name its tool",
    "call-without-signature": "a call of the current turn must carry its thought signature",
    "content-shape": "the content is no text and no list of parts",
    "dangling-call": "a call has no result",
    "empty-list": "a history needs at least one message",
    "empty-message": "a message says nothing",
    "empty-part": "a part says nothing",
    "empty-result": "a result has no words",
    "empty-tool-calls": "an empty list of calls is refused",
    "foreign-result-id": "a result stands under an id that no call has",
    "foreign-result-name": "a result names another tool than its call",
    "foreign-thinking": "thinking of another model cannot be sent back",
    "hosted-call-without-result": "a hosted call has no result",
    "hosted-result-without-call": "a hosted result has no call",
    "item-without-reasoning": "an item lost the reasoning that came with it",
    "journal-gap": "positions are missing in the journal",
    "journal-unfolded": "the records contradict one another",
    "late-result": "a result came after a placeholder for it",
    "lone-surrogate": "half a character cannot be sent",
    "long-line": "this line is too long to be read",
    "misplaced-result": "a result does not follow its call",
    "missing-reasoning": "the reasoning of a reply with calls must come along",
    "mixed-turn": "results and words may not share a message",
    "not-a-message": "an entry is no message",
    "not-a-number": "NaN and Infinity are no JSON",
    "null-content": "a content may not be null",
    "orphan-part": "a part belongs to no message",
    "orphan-result": "a result has no call",
    "reasoning-without-follower": "reasoning lost the item that came after it",
    "repeated-call": "a call id is used twice",
    "repeated-id": "two calls have one id",
    "repeated-item": "an item is there twice",
    "repeated-result": "a call has two results",
    "repeated-system": "a system prompt is repeated",
    "repeated-thinking": "thinking is there twice",
    "reply-in-user-turn": "what only a reply may hold stands in a user's message",
    "result-not-first": "results must stand first in their message",
    "same-role-twice": "two messages in a row are of the same speaker",
    "spliced-thinking": "thinking of two replies stands in one",
    "split-reply": "one reply is stored in pieces",
    "starts-with-reply": "a history may not begin with a reply",
    "system-in-list": "a system prompt may not stand in the list",
    "thinking-last": "thinking may not end a reply",
    "unknown-role": "nobody has this role",
    "unreadable-record": "a record cannot be read",
    "unsigned-thinking": "thinking without its signature is refused",
}
"""What a provider (or a reader) has against each kind of finding; a code that is not here explains itself."""


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


class Finding(Struct, frozen=True):
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


class Report(Struct, frozen=True):
    """What was found in one history. `format` is the file's, `profile` the rules it was judged by."""

    path: str
    status: Status
    format: str = ""
    profile: str = ""
    messages: int = 0
    conversations: int = 1
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    """Of an unreadable or missing file: a code, such as `not-json`."""
    problem: str = ""
    """The same in words, with the place."""
    written: str = ""
    """The repaired copy."""
    backup: str = ""


class UnreadableHistoryError(InvalidHistoryError):
    """A file holds no history that can be read. Nothing was changed.

    `reason` is a stable code: `not-json`, `cut-json`, `binary`, `too-deep`, `too-large`, `wrong-format`,
    `mixed-formats`, `no-history`, `no-permission`, `not-a-file`, `not-found`, `damaged`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def finding_of(edit: Edit, *, line: int = 0, message: int = -1, file: str = "") -> Finding:
    """Say an edit of the repair as a finding at its place in a file."""
    return Finding(
        edit.code,
        RULES.get(edit.code, edit.code.replace("-", " ")),
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
) -> Finding:
    """Make a finding that no repair of messages made."""
    return Finding(code, RULES[code], repair, line=line, lost=lost, file=file, message=message)


def status_of(findings: Iterable[Finding]) -> Status:
    """Return the status that findings amount to. White space is no loss."""
    status = Status.CLEAN
    for each in findings:
        if each.lost.strip():
            return Status.LOSSY
        status = Status.FINDINGS
    return status
