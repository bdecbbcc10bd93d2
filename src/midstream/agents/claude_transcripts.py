"""Transcripts that Claude Code keeps on disk: a check for completeness, and their removal.

The CLI appends to the file of a conversation. If the file is deleted while the process lives, the next entry creates a
new file. A later process then resumes only this rest of the conversation. Each entry names the previous one: a
transcript whose first entry names a missing one has lost its beginning. The CLI also writes the entry at which it must
be resumed. A version without this leaves its messages in a branch that a newer version does not find.
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
    """Whether a process that resumes a conversation will have all of it. True for a missing file: the CLI reports it.

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
    # The CLI resumes at the entry that it wrote last, or after it. Another version may not have written it.
    leaves = [entry.leaf_uuid for entry in read if entry.leaf_uuid in entries]
    if not leaves or leaves[-1] in before_newest:
        return True
    return newest in (_ancestors(entries, leaves[-1]) or ())


def _ancestors(entries: Mapping[str, _Entry], at: str) -> set[str] | None:
    """Return the ids of an entry and all before it; None if one of them is missing."""
    found: set[str] = set()
    while at and at not in found:
        entry = entries.get(at)
        if entry is None:
            return None
        found.add(at)
        at = entry.parent_uuid or ""
    return found


def delete_transcript(home: Path, agent: str) -> None:
    """Delete the transcript of a conversation, and the folder of its sub-agents' transcripts.

    The SDK's own function finds only transcripts in the home of this process.
    """
    for transcript in home.glob(f"projects/*/{agent}.jsonl"):
        transcript.unlink(missing_ok=True)
        shutil.rmtree(transcript.with_suffix(""), ignore_errors=True)


def _read(transcript: Path) -> Iterator[_Entry]:
    try:
        lines = transcript.read_bytes().split(b"\n")
    except OSError:  # it is just being deleted
        return
    for line in lines:
        try:
            yield _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # another format: no entry
            continue
