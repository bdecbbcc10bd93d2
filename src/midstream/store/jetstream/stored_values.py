"""Values that are replaced as a whole: a head, and parts if the body is large."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import StoreBusyError
from midstream.store.jetstream.jetstream_link import JetStreamLink, SubjectWrite
from midstream.store.jetstream.journal_messages import (
    PART_BYTES,
    BlobHead,
    Entry,
    Fold,
    ValuePart,
    decode,
    encode,
    split_body,
)

TRIES_MAX = 20
"""Times that a value is read again because it was replaced meanwhile."""


H = TypeVar("H", Fold, Entry, BlobHead)


def write_value(subject: str, head: H, body: bytes, *, expected: int | None) -> list[SubjectWrite]:
    """Return the messages of a value, the head last."""
    if len(body) <= PART_BYTES:
        whole = replace(head, body=body)
        return [SubjectWrite(subject, encode(whole), expected, is_only=True)]
    parts = split_body(body)
    writes: list[SubjectWrite] = [
        SubjectWrite(f"{subject}.p.{number}", encode(ValuePart(head.op, part)), is_only=True)
        for number, part in enumerate(parts)
    ]
    split = replace(head, parts=len(parts))
    return [*writes, SubjectWrite(subject, encode(split), expected, is_only=True)]


async def read_value(
    link: JetStreamLink, stream: str, subject: str, kind: type[H], world: World = World()
) -> tuple[int, H, bytes] | None:
    """Return the sequence number, the head and the body of a value, or None if there is none.

    Raises:
        StoreBusyError: It is replaced continuously.
    """
    for _ in range(TRIES_MAX):
        found = await link.last(stream, subject)
        if found is None:
            return None
        head = decode(found.data, kind)
        body = await read_body(link, stream, subject, head)
        if body is not None:
            return found.seq, head, body
        await world.sleep(0)
    raise StoreBusyError("a value of the store is replaced continuously", retry_after_s=1.0)


async def read_body(
    link: JetStreamLink, stream: str, subject: str, head: Fold | Entry | BlobHead
) -> bytes | None:
    """Return the body of a value, or None if it was replaced meanwhile."""
    if not head.parts:
        return head.body
    parts: list[bytes] = []
    for number in range(head.parts):
        found = await link.last(stream, f"{subject}.p.{number}")
        part = None if found is None else decode(found.data, ValuePart)
        if part is None or part.op != head.op:
            return None
        parts.append(part.data)
    return b"".join(parts)
