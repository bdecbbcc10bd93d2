"""Which POST repeats which: a client that lost its connection asks again, and must not be answered by a second run.

Three clients look alike. One repeats blindly, since it never saw the end of its answer; one asks for another answer to
the same words (a person pressed "regenerate", an evaluation takes five samples); one sends the same words twice at
once. Only the first joins the run there is. They are distinguished by, in this order:

1. `Idempotency-Key`: the same key is the same run. With another body it is refused.
2. `x-stainless-retry-count` above 0 (the SDKs of OpenAI and Anthropic count so): a repetition, first of a run that was
   not read to its end.
3. Without either, the same request in the same conversation: it joins a run whose reader left before its end. A run
   that was read to its end was answered: the request means another answer. Where the client application names the
   conversation, which cannot have two turns at once, it also joins a run that has a reader, and one that was completed
   a few seconds ago: Codex and Claude Code mark no repetition.

An answer that had begun and then failed is joined too: its upstream may have run tools, and many clients repeat a
request whatever the status is. A retry (1, 2) joins it in any case, an equal request for a short time after it.
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
        digest: Of all that was asked: method, path, who asks, the session header and the body.
        key: The idempotency key with who shows it, or "".
        is_retry: The client marks it as a repetition.
        is_named: The client application names the conversation.
    """

    digest: bytes
    key: str
    is_retry: bool
    is_named: bool


class KnownRun(Struct, frozen=True):
    """Facts of a run that decide whether a POST repeats the one that began it.

    Args:
        request: The POST that began it.
        is_left: Its reader went away before its end, and it has none now.
        has_readers: It has a reader.
        at: When it was begun.
        is_failed: It had begun and then ended before its end: it failed, or was stopped.
        is_failed_lately: It failed so lately that an equal request is more likely a retry than a person's wish.
        is_completed_lately: It was completed so lately that an equal request of a conversation with a name is.
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
        body: The body, or what is equal for equal bodies only.
        principal: See `ApiCaller`: no request repeats that of another one.
    """
    whole = blake2b((f"{principal}\0{path}" if principal else path).encode(), digest_size=16)
    # Lengths first: no two requests run together into the same bytes.
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
    """Return the run that a POST joins, or None where it begins one of its own.

    Args:
        request: The POST.
        known: Runs under way or just finished that have its digest or its key, in any order.
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
