"""Transcripts that Claude Code keeps on disk: whether one is whole, and its removal.

The CLI appends to the file of a conversation. Where the file is deleted under a living process, the next entry makes
a new one, and a later process resumes that rest of the conversation without a sign. Each entry names the one before
it: a transcript whose first entry names a missing one has lost its beginning.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct


class _Entry(Struct, rename="camel"):
    uuid: str = ""
    parent_uuid: str | None = None
    is_sidechain: bool = False


_DECODER = msgspec.json.Decoder(_Entry)


def is_whole(home: Path, agent: str, last: str = "") -> bool:
    """Return whether the transcript of a conversation has all that it should have. A missing one is left to the CLI.

    Args:
        home: The folder of the CLI's conversations.
        agent: The id of the conversation.
        last: The id of an entry that it must have; "" for none.
    """
    for transcript in home.glob(f"projects/*/{agent}.jsonl"):
        entries = {entry.uuid: entry for entry in _read(transcript) if entry.uuid and not entry.is_sidechain}
        if last and last not in entries:
            return False
        at = last or next(reversed(entries), "")
        while at:
            entry = entries.pop(at, None)
            if entry is None:
                return False
            at = entry.parent_uuid or ""
    return True


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
        except (msgspec.DecodeError, UnicodeDecodeError):  # of another form: no entry of the conversation
            continue
