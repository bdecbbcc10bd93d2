"""From the bytes of a POST to what it asks: behind messages that are known, only the others are read.

`read` says the same of a body however much of it is known. Where anything is in doubt (a body that does not begin with
known bytes, messages that need repair, a response that is stored with its items) the whole is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from midstream.core.dialects.asked import FORMS, Asked
from midstream.core.dialects.beginnings import Beginning, Gist, joined
from midstream.core.dialects.chat import read_chat
from midstream.core.dialects.conversations import named_session, scope_of
from midstream.core.dialects.fields import Fields, fields_of, no_object, said
from midstream.core.dialects.messages import read_messages
from midstream.core.dialects.refusals import Dialect
from midstream.core.dialects.responses import read_responses
from midstream.core.dialects.transcripts import Piece, pieces_of
from midstream.core.formats.parts import Value
from midstream.core.messages import Entry, History
from midstream.core.reuse.raw import Parsed, parsed, unknown

REWRITTEN_MAX = 4
"""Messages at the end that hosts send with other bytes a turn later, such as marks for a provider's cache on the last
two of the user's; what stands before them is known beside the whole."""

_READERS: Mapping[Dialect, Callable[[Fields, int], Asked]] = {
    Dialect.CHAT: read_chat,
    Dialect.RESPONSES: read_responses,
    Dialect.MESSAGES: read_messages,
}
_MESSAGES = {Dialect.CHAT: "messages", Dialect.RESPONSES: "input", Dialect.MESSAGES: "messages"}
"""In which field each API has the conversation."""


class Read(Struct, frozen=True):
    """A request, read.

    Args:
        asked: What is asked; its messages are those behind the known ones.
        digest: Of the body: equal for equal bodies only.
        session: What the host calls the conversation, or "".
        gist: What matters of all its messages.
        tail: The entries behind the known messages; all where none is known.
        beginnings: What the next request may begin with.
        known: How many messages were not read.
        body: The body, for `whole`.
    """

    asked: Asked
    digest: bytes
    session: str
    gist: Gist
    tail: History
    beginnings: tuple[Beginning, ...]
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
        return msgspec.structs.replace(self, gist=gist, tail=transcript.history, beginnings=())

    def whole(self) -> History:
        """Return the whole history; where messages are known, all of them are read for it."""
        if not self.known:
            return self.tail
        dialect = self.asked.dialect
        return _READERS[dialect](fields_of(self.body), 0).transcript().history


def read(
    dialect: Dialect,
    headers: Mapping[str, str],
    body: bytes,
    beginnings: Sequence[Beginning] = (),
    *,
    bytes_min: int = 0,
) -> Read:
    """Read a request.

    Args:
        headers: Its headers, which may name the conversation.
        beginnings: What it may begin with.
        bytes_min: Of a body that is shorter nothing is worth knowing, nor begins it with what is known.

    Raises:
        MalformedFrameError: It is no JSON object.
        BadFieldError: A field that matters has another form.
    """
    try:
        if len(body) < bytes_min:
            found = unknown(body)
        else:
            found = parsed(body, _MESSAGES[dialect], [beginning.known for beginning in beginnings])
    except msgspec.DecodeError as error:
        raise no_object() from error
    known = found.known
    asked = _READERS[dialect](said(found.fields), known.count if known else 0)
    session = named_session(headers, asked)
    scope = "" if session else scope_of(asked)
    if known is None:
        return _read_whole(found, asked, session, Gist.of_nothing(scope), body)
    gist = next(beginning.gist for beginning in beginnings if beginning.known == known)
    pieces = _pieces(asked, found)
    is_doubtful = (asked.messages and not pieces) or not gist.takes(pieces) or gist.scope != scope
    if is_doubtful or asked.is_stored or asked.previous:
        return read(dialect, headers, body)
    return _read_pieces(found, asked, session, gist, pieces, body)


def _read_whole(found: Parsed, asked: Asked, session: str, nothing: Gist, body: bytes) -> Read:
    """Read a request of which nothing is known."""
    is_resent = not (asked.is_stored or asked.previous)
    if is_resent and (pieces := _pieces(asked, found)):
        return _read_pieces(found, asked, session, nothing, pieces, body)
    transcript = msgspec.structs.replace(asked, instructions="").transcript()
    gist = nothing.then(transcript)
    return Read(asked, found.digest, session, gist, transcript.history, (), 0, body)


def _pieces(asked: Asked, found: Parsed) -> tuple[Piece, ...]:
    """Return the messages behind what is known, in two pieces where the second may be written anew."""
    known = found.known.count if found.known else 0
    counts = [each.count - known for each in reversed(found.now)]
    cuts = [count for count in counts if len(asked.messages) - count >= REWRITTEN_MAX]
    return pieces_of(asked.messages, FORMS[asked.dialect], cuts=cuts)


def _read_pieces(
    found: Parsed, asked: Asked, session: str, gist: Gist, pieces: tuple[Piece, ...], body: bytes
) -> Read:
    known = found.known.count if found.known else 0
    ends = {each.count: each for each in found.now}
    entries: list[Entry] = []
    # The one that was used counts as used.
    beginnings = [] if found.known is None else [Beginning(found.known, gist)]
    count = known
    for piece in pieces:
        count += piece.count
        gist = gist.then(piece.transcript, piece.ids)
        entries += piece.transcript.history.entries
        if piece.is_closed and count in ends:
            beginnings.append(Beginning(ends[count], gist))
    return Read(asked, found.digest, session, gist, History(tuple(entries)), tuple(beginnings), known, body)
