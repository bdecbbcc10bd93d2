"""Reading of a POST; after messages in the cache, only new ones are read.

The result of `read` does not depend on the cache. If it could (messages whose repair depends on others, a response that
is stored with its items), all messages are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from midstream.dialects.client_histories import Piece, answers, closes, piece_of
from midstream.dialects.conversation_index import read_session_name, scope_of
from midstream.dialects.declared_tools import SEARCH
from midstream.dialects.dialect import Asked, Dialect
from midstream.dialects.reading_cache import Gist, ReadingCache, digests, join_instructions
from midstream.dialects.request_fields import Fields, fields_of
from midstream.history.codecs.codec_spec import Value
from midstream.history.messages import Entry
from midstream.json_depth import require_shallow
from midstream.session.applications import Beginning

REWRITTEN_MAX = 4
"""Messages at the end that client applications change in the next turn, such as cache marks on the last two user
messages. A reading without them is also cached."""
CUTS_MAX = 12
"""Messages at the end in which the cut before `REWRITTEN_MAX` messages is searched."""

DELIVERY_FIELDS = frozenset({"stream", "stream_options", "client_metadata"})
"""Fields that do not change the answer."""

_NOTHING = msgspec.Raw(b"[]")
_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
_values = msgspec.json.Decoder(list[Any]).decode
_value = msgspec.json.Decoder().decode
_sorted = msgspec.json.Encoder(order="sorted").encode


class Read(Struct, frozen=True):
    """Result of reading a request.

    Args:
        params: The request, with only the messages after known ones.
        session: The client application's name of the conversation, or "".
        gist: Summary of all messages.
        before: Digests of the entries of known messages.
        tail: The entries after them; all entries without known ones.
        known: Number of known messages, which were not read.
        fields: Fields of the body, for `digest` and `whole`.
    """

    params: Asked
    session: str
    gist: Gist
    before: Beginning
    tail: tuple[Entry, ...]
    known: int
    fields: Fields

    @property
    def digest(self) -> bytes:
        """Digest of the request; see `digest_of_fields`."""
        return digest_of_fields(self.fields, self.params.dialect.messages)

    @property
    def instructions(self) -> str:
        """All system prompts of the request."""
        return join_instructions(self.params.instructions, self.gist.instructions)

    def whole(self) -> tuple[Entry, ...]:
        """Return all entries; this also reads known messages."""
        if not self.known:
            return self.tail
        return self.params.dialect.read(self.fields, 0).transcript().history.entries


def read(
    dialect: Dialect,
    headers: Mapping[str, str],
    body: bytes,
    memo: ReadingCache | None = None,
    owner: bytes = b"",
    *,
    principal: str = "",
) -> Read:
    """Read a request.

    Args:
        headers: Headers of the request, which may contain the conversation's name.
        memo: Cache of readings; new readings are added.
        owner: Digest of the key in the request.
        principal: See `ApiCaller`; conversations of different principals are separate.

    Raises:
        MalformedFrameError: The body is not a JSON object.
        BadFieldError: A required field is invalid.
    """
    fields = fields_of(body)
    if memo is not None and len(body) >= memo.bytes_min:
        found = _read_behind(dialect, headers, fields, memo, owner, principal)
        if found is not None:
            return found
    params = dialect.read(fields, 0)
    session = read_session_name(headers, params, principal)
    transcript = msgspec.structs.replace(params, instructions="").transcript()
    gist = Gist.empty("" if session else scope_of(params, principal)).then(transcript)
    return Read(params, session, gist, Beginning(), transcript.history.entries, 0, fields)


def digest_of_fields(fields: Fields, messages: str) -> bytes:
    """Return a digest that is equal for repeated requests.

    It ignores the order of keys and the kind of delivery. Codex changes the order of `client_metadata` in each retry,
    and Claude Code retries a failed stream without `stream`. Messages count byte for byte: sorting their keys would
    cost more than reading them.

    Args:
        messages: Name of the field with the messages.
    """
    whole = sha256()
    for name in sorted(fields.keys() - DELIVERY_FIELDS):
        raw = bytes(fields[name])
        for piece in (name.encode("utf-8", "replace"), raw if name == messages else _with_sorted_keys(raw)):
            whole.update(b"%d:" % len(piece))
            whole.update(piece)
    return whole.digest()


def _with_sorted_keys(raw: bytes) -> bytes:
    try:
        return _sorted(_value(raw))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return raw


def _raws_of(fields: Fields, name: str) -> list[msgspec.Raw]:
    """Return the undecoded messages; empty if the field is not a list."""
    try:
        return _raws(fields[name]) if name in fields else []
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []


def _read_behind(
    dialect: Dialect,
    headers: Mapping[str, str],
    fields: Fields,
    memo: ReadingCache,
    owner: bytes,
    principal: str,
) -> Read | None:
    """Read a request after known messages, and cache the reading; return None if all messages must be read."""
    messages = _raws_of(fields, dialect.messages)
    if not messages:
        return None
    params = dialect.read({**fields, dialect.messages: _NOTHING}, len(messages))
    if (
        params.is_stored
        or params.previous
        or any(kind == SEARCH for kind, _, _ in params.other_tools.values())
    ):
        return None  # loaded tools are declared in the messages
    session = read_session_name(headers, params, principal)
    scope = "" if session else scope_of(params, principal)
    whose = sha256(msgspec.json.encode([dialect.name, owner.hex(), scope])).digest()
    form = dialect.format
    last = range(max(0, len(messages) - CUTS_MAX), len(messages) + 1)
    ends = digests(messages, memo.counts(whose).union(last))
    for known, gist in [*memo.find(whose, ends), (0, Gist.empty(scope))]:
        new = _values_of(messages[known:])
        if known and new and answers(new[0], form):
            continue  # the known part ends within a response
        pieces = None if new is None else _pieces(dialect.in_functions(new), form, gist.ids)
        if new is None or pieces is None:
            return None
        count, gists, entries = known, [(known, gist)] if known else [], list[Entry]()
        before = gist.beginning
        for piece in pieces:
            count += piece.count
            gist = gist.then(piece.transcript, piece.ids)
            entries += piece.transcript.history.entries
            if piece.is_closed:
                gists.append((count, gist))
        memo.keep(whose, ends, gists)
        params = msgspec.structs.replace(params, messages=new)
        return Read(params, session, gist, before, tuple(entries), known, fields)
    return None


def _values_of(messages: list[msgspec.Raw]) -> list[Value] | None:
    try:
        values = _values(b"[" + b",".join(messages) + b"]")
        require_shallow(values)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return values


def _pieces(messages: list[Value], form: str, ids: frozenset[str]) -> list[Piece] | None:
    """Read messages as pieces, the last of which may change in the next turn; return None if they depend on others."""
    cut = _cut(messages, form)
    pieces: list[Piece] = []
    for some in filter(None, (messages[:cut], messages[cut:])):
        piece = piece_of(some, form)
        if piece is None or not ids.isdisjoint(piece.ids):
            return None
        ids |= piece.ids
        pieces.append(piece)
    return pieces


def _cut(messages: list[Value], form: str) -> int:
    for cut in range(len(messages) - REWRITTEN_MAX, max(0, len(messages) - CUTS_MAX), -1):
        if closes(messages[cut - 1], form) and not answers(messages[cut], form):
            return cut
    return 0
