"""Single requests of a client, outside of its streams."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping
from functools import partial
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from midstream.client.transports import refusal_of, session_path
from midstream.errors import ConnectionLostError, ProtocolError
from midstream.number_checks import require_seconds
from midstream.session.questions import Question
from midstream.session.records import OPEN_STATUSES

T = TypeVar("T")

ANSWER_S = 10.0
"""Time limit of an answer, in seconds."""
ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Greatest size of an answer; a midstream server sends no larger one."""


class _Questions(Struct):
    questions: tuple[Question, ...]


async def questions(url: str, session: str | None, headers: Mapping[str, str]) -> tuple[Question, ...]:
    """Return the open questions at the server `url`, oldest first: of all sessions, or of one.

    Raises:
        ConnectionLostError: No server answers.
        MidstreamError: The server refused.
    """
    path = "/v1/questions" if session is None else f"/v1/questions?session={quote(session, safe='')}"
    body = await asyncio.to_thread(partial(_request, "GET", url, path, headers))
    return _read(url, body, _Questions).questions


class _Now(Struct):
    event_id: str
    status: str


async def snapshot(url: str, session: str, headers: Mapping[str, str]) -> tuple[str, bool, bytes]:
    """Return the event id from which to follow a session, whether it is idle, and its snapshot as JSON.

    Raises:
        SessionNotFoundError: The session does not exist.
        ConnectionLostError: No server answers.
        MidstreamError: The server refused.
    """
    body = await asyncio.to_thread(partial(_request, "GET", url, session_path(session), headers))
    now = _read(url, body, _Now)
    return now.event_id, now.status not in OPEN_STATUSES, body


async def delete(url: str, session: str, headers: Mapping[str, str]) -> None:
    """Delete an idle session at the server `url` permanently.

    Raises:
        SessionBusyError: A turn is running. Nothing was deleted.
        ConnectionLostError: No server answers.
        MidstreamError: The server refused.
    """
    await asyncio.to_thread(partial(_request, "DELETE", url, session_path(session), headers))


class _Issued(Struct):
    token: str


async def create_viewer_token(url: str, session: str, for_s: float, headers: Mapping[str, str]) -> str:
    """Return a viewer token that permits reading a session for `for_s` seconds.

    Raises:
        UsageError: `for_s` is not above 0, or longer than 366 days.
        ConnectionLostError: No server answers.
        MidstreamError: The server refused.
    """
    require_seconds("for_s", for_s, is_positive=True)
    wish = msgspec.json.encode({"for_s": for_s})
    path = f"{session_path(session)}/viewers"
    body = await asyncio.to_thread(partial(_request, "POST", url, path, headers, wish))
    return _read(url, body, _Issued).token


async def revoke_viewer_tokens(url: str, session: str, headers: Mapping[str, str]) -> None:
    """Revoke all viewer tokens of a session.

    Raises:
        ConnectionLostError: No server answers.
        MidstreamError: The server refused.
    """
    await asyncio.to_thread(partial(_request, "DELETE", url, f"{session_path(session)}/viewers", headers))


def _read(url: str, body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{url} is not a midstream server, or is another version") from error


def _request(method: str, url: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    parts = urlsplit(url)
    assert parts.hostname is not None, "`connect` has checked the URL"
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=ANSWER_S)
    try:
        sent = {**headers, "connection": "close", "x-midstream": "client"}
        connection.request(method, parts.path.rstrip("/") + path, body=body or None, headers=sent)
        answer = connection.getresponse()
        answered = answer.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionLostError(f"no answer from {url} ({type(error).__name__})") from error
    finally:
        connection.close()
    if answer.status < http.client.MULTIPLE_CHOICES:
        return answered
    raise refusal_of(answer.status, answered)
