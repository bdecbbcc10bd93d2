"""Large results: kept once beside the journal, under the digest of their content, and named by the records.

The record of a large result holds its beginning and its digest, so that the fold of a session, its readers and its
snapshot stay small. The model is shown the whole, up to what a model can read; people fetch it by its digest.
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
"""Bytes of a result in UTF-8 from which it is kept apart: less costs a reader nothing worth another request."""
EXCERPT_CHARS = 2000
"""Characters of its beginning that stay in the record: what people are shown before they ask for more."""

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Blob(Struct, frozen=True):
    """The whole of a large result, in UTF-8."""

    digest: str
    body: bytes


def blob_of(content: str) -> Blob:
    """Return a text as it is kept; the same text has the same digest."""
    body = content.encode()
    return Blob(digest_of(body), body)


def digest_of(body: bytes) -> str:
    """Return the digest of a large result."""
    return hashlib.blake2b(body, digest_size=32, person=b"midstream-blob").hexdigest()


def is_digest(text: str) -> bool:
    """Whether a text has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


def split_large_results(records: Iterable[Record]) -> tuple[tuple[Record, ...], tuple[Blob, ...]]:
    """Return records without their large results, and these beside them. Others are returned as they are."""
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
    """Whether a result is to be kept apart, and is not yet."""
    # Four bytes are the most a character takes: most results need not be encoded for this check.
    is_short = len(result.content) * 4 < BLOB_BYTES_MIN or result.blob
    return not is_short and len(result.content.encode()) >= BLOB_BYTES_MIN


def digests_in(history: History) -> frozenset[str]:
    """Return the digests that the results of a history name."""
    return frozenset(
        result.blob
        for entry in history.entries
        if isinstance(entry, Step)
        for result in entry.results
        if result.blob
    )


def whole(history: History, bodies: Mapping[str, bytes]) -> History:
    """Return a history with its large results as a model is shown them; the same object where it has none.

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
