"""From the bytes of a POST to what it asks: behind messages that are known, only the others are read.

`read` returns the same for a body however much of it is known. Where that is in doubt (messages whose repair depends on
others, a response that is stored with its items) the whole is read.
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
from midstream.dialects.fields import Fields, fields_of
from midstream.dialects.reading_cache import Gist, Memo, digests, join_instructions
from midstream.history.codecs.codec_spec import Value
from midstream.history.messages import Entry
from midstream.json_depth import require_shallow
from midstream.session.applications import Beginning

REWRITTEN_MAX = 4
"""Messages at the end that client applications send with other bytes a turn later, such as marks for a
provider's cache on the last two of the user's; what stands before them is known beside the whole."""
CUTS_MAX = 12
"""Messages at the end among which the place before these is looked for."""

DELIVERY_FIELDS = frozenset({"stream", "stream_options", "client_metadata"})
"""Fields that do not change what is asked."""

_NOTHING = msgspec.Raw(b"[]")
_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
_values = msgspec.json.Decoder(list[Any]).decode
_value = msgspec.json.Decoder().decode
_sorted = msgspec.json.Encoder(order="sorted").encode


class Read(Struct, frozen=True):
    """A request, read.

    Args:
        asked: What is asked; its messages are those behind the known ones.
        session: What the client application calls the conversation, or "".
        gist: What matters of all its messages.
        before: The entries of the known messages.
        tail: The entries behind these; all where none is known.
        known: How many messages were not read.
        fields: Those of the body, for `digest` and `whole`.
    """

    asked: Asked
    session: str
    gist: Gist
    before: Beginning
    tail: tuple[Entry, ...]
    known: int
    fields: Fields

    @property
    def digest(self) -> bytes:
        """Digest of what is asked, equal for requests that ask the same: see `digest_of_fields`."""
        return digest_of_fields(self.fields, self.asked.dialect.messages)

    @property
    def instructions(self) -> str:
        """The system prompt, wherever it stands."""
        return join_instructions(self.asked.instructions, self.gist.instructions)

    def whole(self) -> tuple[Entry, ...]:
        """Return all entries; where messages are known, all of them are read for it."""
        if not self.known:
            return self.tail
        return self.asked.dialect.read(self.fields, 0).transcript().history.entries


def read(
    dialect: Dialect,
    headers: Mapping[str, str],
    body: bytes,
    memo: Memo | None = None,
    owner: bytes = b"",
    *,
    principal: str = "",
) -> Read:
    """Read a request.

    Args:
        headers: Its headers, which may name the conversation.
        memo: What is known of earlier requests; what is read now is kept there.
        owner: Whose request it is, by the key that was shown.
        principal: See `ApiCaller`: conversations of several are kept apart.

    Raises:
        MalformedFrameError: It is no JSON object.
        BadFieldError: A field that matters has another form.
    """
    fields = fields_of(body)
    if memo is not None and len(body) >= memo.bytes_min:
        found = _read_behind(dialect, headers, fields, memo, owner, principal)
        if found is not None:
            return found
    asked = dialect.read(fields, 0)
    session = read_session_name(headers, asked, principal)
    transcript = msgspec.structs.replace(asked, instructions="").transcript()
    gist = Gist.of_nothing("" if session else scope_of(asked, principal)).then(transcript)
    return Read(asked, session, gist, Beginning(), transcript.history.entries, 0, fields)


def digest_of_fields(fields: Fields, messages: str) -> bytes:
    """Return a digest that is equal for requests which ask the same.

    Neither the order of keys counts nor how the answer is delivered: Codex sends `client_metadata` in another order in
    each of its tries, and Claude Code repeats without `stream` where a stream failed. The messages count byte for byte:
    sorting the keys of a long transcript would cost more than reading it.

    Args:
        messages: The field that holds them.
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
    """Return the messages as their bytes; none where the field is something else."""
    try:
        return _raws(fields[name]) if name in fields else []
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []


def _read_behind(
    dialect: Dialect,
    headers: Mapping[str, str],
    fields: Fields,
    memo: Memo,
    owner: bytes,
    principal: str,
) -> Read | None:
    """Read a request behind the messages that are known, and keep what was read; None where the whole is to be read."""
    messages = _raws_of(fields, dialect.messages)
    if not messages:
        return None
    asked = dialect.read({**fields, dialect.messages: _NOTHING}, len(messages))
    if asked.is_stored or asked.previous or any(kind == SEARCH for kind, _, _ in asked.other_tools.values()):
        return None  # tools that a search has loaded stand in the messages
    session = read_session_name(headers, asked, principal)
    scope = "" if session else scope_of(asked, principal)
    whose = sha256(msgspec.json.encode([dialect.name, owner.hex(), scope])).digest()
    form = dialect.format
    last = range(max(0, len(messages) - CUTS_MAX), len(messages) + 1)
    ends = digests(messages, memo.counts(whose).union(last))
    for known, gist in [*memo.find(whose, ends), (0, Gist.of_nothing(scope))]:
        new = _values_of(messages[known:])
        if known and new and answers(new[0], form):
            continue  # the response before is not whole: what is known ends too late
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
        asked = msgspec.structs.replace(asked, messages=new)
        return Read(asked, session, gist, before, tuple(entries), known, fields)
    return None


def _values_of(messages: list[msgspec.Raw]) -> list[Value] | None:
    try:
        values = _values(b"[" + b",".join(messages) + b"]")
        require_shallow(values)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return values


def _pieces(messages: list[Value], form: str, ids: frozenset[str]) -> list[Piece] | None:
    """Read messages as two pieces, where the second may be written anew; None where they depend on others."""
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
