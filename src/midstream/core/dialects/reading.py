"""From the bytes of a POST to what it asks: behind messages that are known, only the others are read.

`read` returns the same for a body however much of it is known. Where that is in doubt (messages whose repair depends on
others, a response that is stored with its items) the whole is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from midstream.core.dialects.asked import FORMS, Asked
from midstream.core.dialects.chat import read_chat
from midstream.core.dialects.conversations import named_session, scope_of
from midstream.core.dialects.fields import Fields, fields_of
from midstream.core.dialects.memo import Gist, Memo, digests, joined
from midstream.core.dialects.messages import read_messages
from midstream.core.dialects.refusals import Dialect
from midstream.core.dialects.responses import read_responses
from midstream.core.dialects.transcripts import Piece, answers, closes, piece_of
from midstream.core.formats.parts import Value
from midstream.core.messages import Entry, History

REWRITTEN_MAX = 4
"""Messages at the end that hosts send with other bytes a turn later, such as marks for a provider's cache on the last
two of the user's; what stands before them is known beside the whole."""
CUTS_MAX = 12
"""Messages at the end among which the place before these is looked for."""

_READERS: Mapping[Dialect, Callable[[Fields, int], Asked]] = {
    Dialect.CHAT: read_chat,
    Dialect.RESPONSES: read_responses,
    Dialect.MESSAGES: read_messages,
}
_MESSAGES = {Dialect.CHAT: "messages", Dialect.RESPONSES: "input", Dialect.MESSAGES: "messages"}
"""In which field each API has the conversation."""
_NOTHING = msgspec.Raw(b"[]")
_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
_values = msgspec.json.Decoder(list[Any]).decode


class Read(Struct, frozen=True):
    """A request, read.

    Args:
        asked: What is asked; its messages are those behind the known ones.
        digest: Of the body: equal for equal bodies only.
        session: What the host calls the conversation, or "".
        gist: What matters of all its messages.
        tail: The entries behind the known messages; all where none is known.
        known: How many messages were not read.
        body: The body, for `whole`.
    """

    asked: Asked
    digest: bytes
    session: str
    gist: Gist
    tail: History
    known: int
    body: bytes

    @property
    def instructions(self) -> str:
        """The system prompt, wherever it stands."""
        return joined(self.asked.instructions, self.gist.instructions)

    def behind(self, before: Sequence[Value]) -> Read:
        """Return the same behind the items of an earlier answer."""
        if not before:
            return self
        transcript = msgspec.structs.replace(self.asked, instructions="").transcript(before)
        gist = Gist.of_nothing(self.gist.scope).then(transcript)
        return msgspec.structs.replace(self, gist=gist, tail=transcript.history)

    def whole(self) -> History:
        """Return the whole history; where messages are known, all of them are read for it."""
        if not self.known:
            return self.tail
        dialect = self.asked.dialect
        return _READERS[dialect](fields_of(self.body), 0).transcript().history


def read(
    dialect: Dialect, headers: Mapping[str, str], body: bytes, memo: Memo | None = None, owner: bytes = b""
) -> Read:
    """Read a request.

    Args:
        headers: Its headers, which may name the conversation.
        memo: What is known of earlier requests; what is read now is kept there.
        owner: Whose request it is, by the key that was shown.

    Raises:
        MalformedFrameError: It is no JSON object.
        BadFieldError: A field that matters has another form.
    """
    digest = sha256(body).digest()
    fields = fields_of(body)
    if (
        memo is not None
        and len(body) >= memo.bytes_min
        and (messages := _raws_of(fields, _MESSAGES[dialect]))
    ):
        found = _read_behind(dialect, headers, fields, messages, memo, owner)
        if found is not None:
            return msgspec.structs.replace(found, digest=digest, body=body)
    asked = _READERS[dialect](fields, 0)
    session = named_session(headers, asked)
    transcript = msgspec.structs.replace(asked, instructions="").transcript()
    gist = Gist.of_nothing("" if session else scope_of(asked)).then(transcript)
    return Read(asked, digest, session, gist, transcript.history, 0, body)


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
    messages: list[msgspec.Raw],
    memo: Memo,
    owner: bytes,
) -> Read | None:
    """Read a request behind the messages that are known, and keep what was read; None where the whole is to be read."""
    asked = _READERS[dialect]({**fields, _MESSAGES[dialect]: _NOTHING}, len(messages))
    if asked.is_stored or asked.previous:
        return None
    session = named_session(headers, asked)
    scope = "" if session else scope_of(asked)
    whose = sha256(msgspec.json.encode([dialect, owner.hex(), scope])).digest()
    form = FORMS[dialect]
    last = range(max(0, len(messages) - CUTS_MAX), len(messages) + 1)
    ends = digests(messages, memo.counts(whose).union(last))
    for known, gist in [*memo.find(whose, ends), (0, Gist.of_nothing(scope))]:
        new = _values_of(messages[known:])
        if known and new and answers(new[0], form):
            continue  # the reply before is not whole: what is known ends too late
        pieces = None if new is None else _pieces(new, form, gist.ids)
        if new is None or pieces is None:
            return None
        count, gists, entries = known, [(known, gist)] if known else [], list[Entry]()
        for piece in pieces:
            count += piece.count
            gist = gist.then(piece.transcript, piece.ids)
            entries += piece.transcript.history.entries
            if piece.is_closed:
                gists.append((count, gist))
        memo.keep(whose, ends, gists)
        asked = msgspec.structs.replace(asked, messages=new)
        return Read(asked, b"", session, gist, History(tuple(entries)), known, b"")
    return None


def _values_of(messages: list[msgspec.Raw]) -> list[Value] | None:
    try:
        return _values(b"[" + b",".join(messages) + b"]")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


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
