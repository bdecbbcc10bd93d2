"""Large results: stored once beside the journal, under the digest of their content.

The record of a large result has its beginning and its digest, so that the session's state and its events stay small.
The model gets the whole, up to a limit; clients fetch it by its digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from midstream.history.compaction import SHOWN_CHARS_MAX
from midstream.history.messages import History, Step, ToolResult
from midstream.session.records import CallEnded, Record, ResultArrivedLate

BLOB_BYTES_MIN = 64 * 1024
"""UTF-8 bytes of a result from which it is stored as a blob: a smaller one is not worth another request."""
EXCERPT_CHARS = 2000
"""Characters of its beginning that stay in the record and are shown first."""

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Blob(Struct, frozen=True):
    """A complete large result, in UTF-8."""

    digest: str
    body: bytes


def blob_of(content: str) -> Blob:
    """Return a text as a blob; equal texts have equal digests."""
    body = content.encode()
    return Blob(digest_of(body), body)


def digest_of(body: bytes) -> str:
    """Return the digest of a large result."""
    return hashlib.blake2b(body, digest_size=32, person=b"midstream-blob").hexdigest()


def is_digest(text: str) -> bool:
    """Whether a text has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


def split_large_results(records: Iterable[Record]) -> tuple[tuple[Record, ...], tuple[Blob, ...]]:
    """Return the records with excerpts instead of large results, and the blobs of those."""
    kept = [*records]
    blobs: list[Blob] = []
    for number, record in enumerate(kept):
        if isinstance(record, _WITH_RESULT) and is_large(record.result):
            blob = blob_of(record.result.content)
            blobs.append(blob)
            kept[number] = replace(record, result=_excerpt(record.result, blob))
    return tuple(kept), tuple(blobs)


_WITH_RESULT = (CallEnded, ResultArrivedLate)


def is_large(result: ToolResult) -> bool:
    """Whether a result must be stored as a blob, and is not yet."""
    # A character takes at most four bytes: most results need not be encoded for this check.
    is_short = len(result.content) * 4 < BLOB_BYTES_MIN or result.blob
    return not is_short and len(result.content.encode()) >= BLOB_BYTES_MIN


def digests_in(history: History) -> frozenset[str]:
    """Return the digests in the results of a history."""
    return frozenset(
        result.blob
        for entry in history.entries
        if isinstance(entry, Step)
        for result in entry.results
        if result.blob
    )


def whole(history: History, bodies: Mapping[str, bytes]) -> History:
    """Return a history with its large results in the form for a model; the same object if it has none.

    A result whose body is missing keeps its beginning.
    """
    if not bodies:
        return history
    return History(
        tuple(
            replace(entry, results=tuple(_with_body(result, bodies) for result in entry.results))
            if isinstance(entry, Step)
            else entry
            for entry in history.entries
        )
    )


def _excerpt(result: ToolResult, blob: Blob) -> ToolResult:
    head = result.content[:EXCERPT_CHARS]
    content = f"{head}\n[+{len(result.content) - len(head)} characters]"
    return replace(result, content=content, blob=blob.digest, size=len(blob.body))


def _with_body(result: ToolResult, bodies: Mapping[str, bytes]) -> ToolResult:
    body = bodies.get(result.blob) if result.blob else None
    if body is None:
        return result
    text = body.decode()
    if len(text) > SHOWN_CHARS_MAX:
        text = f"{text[:SHOWN_CHARS_MAX]}\n[+{len(text) - SHOWN_CHARS_MAX} characters]"
    return ToolResult(result.call_id, text, result.outcome)
