"""Transcripts that Claude Code keeps on disk: whether one is whole, and its removal.

The CLI appends to the file of a conversation. Where the file is deleted under a living process, the next entry makes
a new one, and a later process resumes that rest of the conversation without a sign. Each entry names the one before
it: a transcript whose first entry names a missing one has lost its beginning. The CLI also notes at which entry it is
to be resumed. A version that does not note that leaves its messages in a branch that a newer version does not find.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct


class _Entry(Struct, rename="camel"):
    type: str = ""
    uuid: str = ""
    parent_uuid: str | None = None
    is_sidechain: bool = False
    leaf_uuid: str = ""


_DECODER = msgspec.json.Decoder(_Entry)
_MESSAGES = {"user", "assistant"}


def is_whole(home: Path, agent: str, last: str = "") -> bool:
    """Return whether a process that resumes a conversation will have all of it. A missing file is left to the CLI.

    Args:
        home: The folder of the CLI's conversations.
        agent: The id of the conversation.
        last: The id of an entry that it must have; "" for none.
    """
    return all(_is_whole([*_read(each)], last) for each in home.glob(f"projects/*/{agent}.jsonl"))


def _is_whole(read: Sequence[_Entry], last: str) -> bool:
    entries = {entry.uuid: entry for entry in read if entry.uuid and not entry.is_sidechain}
    messages = [entry.uuid for entry in entries.values() if entry.type in _MESSAGES]
    newest = messages[-1] if messages else ""
    before_last, before_newest = _ancestors(entries, last or newest), _ancestors(entries, newest)
    if before_last is None or before_newest is None:
        return False
    # The CLI resumes at the entry that it noted last, or behind it. Another version of it may not have noted its own.
    leaves = [entry.leaf_uuid for entry in read if entry.leaf_uuid in entries]
    if not leaves or leaves[-1] in before_newest:
        return True
    return newest in (_ancestors(entries, leaves[-1]) or ())


def _ancestors(entries: Mapping[str, _Entry], at: str) -> set[str] | None:
    """Return an entry and all before it, by their ids; None where one of them is missing."""
    found: set[str] = set()
    while at and at not in found:
        entry = entries.get(at)
        if entry is None:
            return None
        found.add(at)
        at = entry.parent_uuid or ""
    return found


def delete_transcript(home: Path, agent: str) -> None:
    """Delete the transcript of a conversation, and those of its sub-agents in the folder beside it.

    The SDK's own function finds only transcripts in the home of this process.
    """
    for transcript in home.glob(f"projects/*/{agent}.jsonl"):
        transcript.unlink(missing_ok=True)
        shutil.rmtree(transcript.with_suffix(""), ignore_errors=True)


def _read(transcript: Path) -> Iterator[_Entry]:
    try:
        lines = transcript.read_bytes().split(b"\n")
    except OSError:  # it is deleted at this moment
        return
    for line in lines:
        try:
            yield _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # of another form: no entry
            continue
