"""Recognition of repeated POSTs: a client that lost its connection must not cause a second run.

Three kinds of equal requests exist: a retry without the end of the answer, a request for another answer (a person
pressed "regenerate", an evaluation takes five samples), and two intended requests at the same time. Only a retry joins
the existing run. The rules, in order:

1. `Idempotency-Key`: the same key is the same run. Another body with this key is refused.
2. `x-stainless-retry-count` above 0 (from the SDKs of OpenAI and Anthropic): a retry. It joins a run that was not read
   to its end, if there is one.
3. Otherwise, an equal request in the same conversation joins a run whose reader left before its end. After a complete
   read, it requests another answer. In a conversation with a name, which has one turn at a time, it also joins a run
   with a reader, and a run that was completed a few seconds ago: Codex and Claude Code do not mark retries.

A run that failed after its beginning is joined too: its upstream may have run tools, and many clients retry after any
status. A retry (1, 2) always joins it, another equal request only for a short time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b

from msgspec import Struct

from midstream.dialects.conversation_index import AGENT_HEADERS, SESSION_HEADERS, name_within

IDEMPOTENCY_HEADERS = ("idempotency-key", "x-idempotency-key")
RETRY_HEADER = "x-stainless-retry-count"


class Request(Struct, frozen=True):
    """Facts of a POST that decide whether it repeats another one.

    Args:
        digest: Digest of method, path, credential, session header and body.
        key: The idempotency key with the credential, or "".
        is_retry: Whether the client marks it as a retry.
        is_named: Whether the conversation has a name of the client application.
    """

    digest: bytes
    key: str
    is_retry: bool
    is_named: bool


class KnownRun(Struct, frozen=True):
    """Facts of a run that decide whether a POST repeats the one that began it.

    Args:
        request: The POST that began it.
        is_left: Whether its reader left before its end, and it has none now.
        has_readers: Whether it has a reader.
        at: Time of its beginning.
        is_failed: Whether it failed or was stopped after its beginning.
        is_failed_lately: Whether it failed so recently that an equal request is probably a retry.
        is_completed_lately: The same for a completed run of a conversation with a name.
    """

    request: Request
    is_left: bool
    has_readers: bool
    at: float
    is_failed: bool = False
    is_failed_lately: bool = False
    is_completed_lately: bool = False


class KeyReused(Struct, frozen=True):
    """The idempotency key belongs to another request."""


def request_of(
    path: str, headers: Mapping[str, str], body: bytes, *, is_named: bool, principal: str = ""
) -> Request:
    """Return the facts that decide whether a POST repeats another one.

    Args:
        body: The body, or a digest of it.
        principal: See `ApiCaller`; a request never repeats that of another principal.
    """
    whole = blake2b((f"{principal}\0{path}" if principal else path).encode(), digest_size=16)
    # Length prefixes make the concatenation unambiguous.
    names = (
        headers.get(header, "").encode("utf-8", "replace") for header in (*SESSION_HEADERS, *AGENT_HEADERS)
    )
    for piece in (*names, body):
        whole.update(b"%d:" % len(piece))
        whole.update(piece)
    key = next((headers[name] for name in IDEMPOTENCY_HEADERS if headers.get(name)), "")
    count = headers.get(RETRY_HEADER, "0")
    is_retry = count.isascii() and count.isdigit() and int(count[:4]) > 0
    key = f"{path} {name_within(principal, key)}" if key else ""
    return Request(whole.digest(), key, is_retry=is_retry, is_named=is_named)


def find_repeated(request: Request, known: Iterable[KnownRun]) -> KnownRun | KeyReused | None:
    """Return the run that a POST joins, or None for a new run.

    Args:
        request: The POST.
        known: Runs with its digest or key that are in progress or recently ended, in any order.
    """
    runs = sorted(known, key=lambda run: run.at, reverse=True)
    if request.key:
        keyed = next((run for run in runs if run.request.key == request.key), None)
        if keyed is not None:
            return keyed if keyed.request.digest == request.digest else KeyReused()
        return None
    same = [run for run in runs if run.request.digest == request.digest and not run.request.key]
    left = next((run for run in same if run.is_left and not run.is_failed), None)
    if left is not None:
        return left
    if same and same[0].is_failed_lately:
        return same[0]
    read = next((run for run in same if run.has_readers), None)
    if request.is_retry:
        return read or next(iter(same), None)
    if not request.is_named:
        return None
    return read or (same[0] if same and same[0].is_completed_lately else None)
