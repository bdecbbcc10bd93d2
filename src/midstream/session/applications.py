"""Sessions of client applications that resend their whole conversation with each request.

The last transcript is the valid history: a request with the results of the open calls continues the turn, and any other
one closes it. No turn waits for an application. Only the new part of a transcript is journaled; `compare` finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import JournalMovedError
from midstream.history.messages import (
    Entry,
    Finish,
    History,
    Step,
    ToolResult,
    ToolSpec,
    Usage,
    UserMessage,
)
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    Record,
    ResponseCompleted,
    StepCommitted,
    TranscriptAccepted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.turn import deciding, folding
from midstream.session.turn.commands import Cancel, CancelExpired, Refused, SendTranscript
from midstream.session.turn.states import AwaitingModel, Cancelling, Idle, RunningCalls, TurnState

RESPONSES_KEPT_MAX = 256
"""Responses of one session that can be found by number or request."""
LINK_BYTES = 16
"""Bytes of a digest in the chain of a history's entries."""


class ApplicationResponse(Struct, frozen=True, gc=False, omit_defaults=True):
    """One response to a client application.

    Args:
        number: Its number in the session, from 1.
        id, digest, key: See `ApplicationRequest`.
        turn, model_response: The numbers of its first model response.
        position: Position of its `TranscriptAccepted`.
        entries: Number of the history's entries that it answers.
        at: Time of the request, in seconds since 1970.
        ended_at: Time of its end; 0 while it is open.
        status: How it ended.
        has_begun: Whether the model or agent had sent any output before its end.
        is_background, usage_entry: See `ApplicationRequest`.
        usage: Its tokens so far, as the model counted them.
    """

    number: int
    id: str
    digest: str
    turn: int
    response: int
    position: int
    entries: int
    at: float
    key: str = ""
    ended_at: float = 0.0
    status: TurnStatus | None = None
    has_begun: bool = False
    is_background: bool = False
    usage_entry: str = ""
    usage: Usage | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is still running."""
        return not self.ended_at


class Application(Struct, frozen=True, gc=False, omit_defaults=True):
    """State of a session whose conversation a client application resends."""

    count: int = 0
    """Transcripts accepted so far."""
    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()
    responses: tuple[ApplicationResponse, ...] = ()
    """The newest responses, `RESPONSES_KEPT_MAX` at most, in order."""

    @property
    def newest(self) -> ApplicationResponse | None:
        """The last requested response."""
        return self.responses[-1] if self.responses else None

    def response(self, number: int) -> ApplicationResponse | None:
        """Return a response by its number, or None if it is not stored."""
        at = number - self.count - 1
        return self.responses[at] if self.responses and -len(self.responses) <= at < 0 else None


NO_APPLICATION = Application()


def decide_transcript(
    application: Application,
    state: TurnState,
    sent: SendTranscript,
    *,
    turns_opened: int,
    epoch: int,
    at: float,
) -> tuple[Record, ...]:
    """Return the records that close the open calls and request the next response.

    Raises:
        Refused: Another transcript was accepted meanwhile.
    """
    if sent.count != application.count:
        raise Refused(JournalMovedError("another request of this conversation was first; compare again"))
    turn, model_response = turns_opened + 1, 1
    closing: tuple[Record, ...] = ()
    if isinstance(state, RunningCalls) and sent.results and is_answered_by(state, sent.results):
        turn, model_response = state.turn, state.response_no + 1
        ended = (CallEnded(state.turn, state.response_no, result, at) for result in sent.results)
        closing = (*ended, StepCommitted(state.turn, state.response_no))
    elif not isinstance(state, Idle):
        closing = _cancel(state, epoch=epoch, at=at)
    accepted = TranscriptAccepted(
        turn,
        model_response,
        at,
        sent.request,
        sent.keep,
        sent.tail,
        None if sent.instructions == application.instructions else sent.instructions,
        None if sent.tools == application.tools else sent.tools,
    )
    return (*closing, accepted, AttemptStarted(turn, model_response, attempt=1, at=at))


def _cancel(state: TurnState, *, epoch: int, at: float) -> tuple[Record, ...]:
    decided = deciding.decide(state, Cancel(), epoch=epoch, at=at)
    for record in decided:
        state = folding.evolve(state, record, epoch=epoch)
    if isinstance(state, Cancelling):
        return (*decided, *deciding.decide(state, CancelExpired(state.turn), epoch=epoch, at=at))
    return decided


def is_answered_by(state: RunningCalls, results: Sequence[ToolResult]) -> bool:
    """Whether these are the results of all open calls, in order."""
    return [call.call.id for call in state.calls] == [result.call_id for result in results]


def accept(
    application: Application, history: History, record: TranscriptAccepted, position: int
) -> tuple[Application, History]:
    """Fold a transcript: return the application's state and the history after it."""
    after = History((*history.entries[: record.keep], *record.tail))
    request = record.request
    response = ApplicationResponse(
        application.count + 1,
        request.id,
        request.digest,
        record.turn,
        record.response,
        position,
        len(after.entries),
        record.at,
        request.key,
        is_background=request.is_background,
        usage_entry=request.usage_entry,
    )
    changed = Application(
        response.number,
        application.instructions if record.instructions is None else record.instructions,
        application.tools if record.tools is None else record.tools,
        (*application.responses, response)[-RESPONSES_KEPT_MAX:],
    )
    return changed, after


def note(application: Application, state: TurnState, record: ResponseCompleted | TurnEnded) -> Application:
    """Fold a possible end of the newest response: a response whose calls go to the application, or its turn's end."""
    newest = application.newest
    if newest is None or not newest.is_open:
        return application
    if isinstance(record, TurnEnded):
        has_begun = newest.has_begun or (isinstance(state, AwaitingModel) and bool(state.deltas))
        newest = replace(newest, ended_at=record.at, status=record.status, has_begun=has_begun)
    else:
        usage = record.body.usage
        if usage is not None and newest.usage is not None:
            usage = newest.usage + usage
        newest = replace(newest, has_begun=True, usage=usage or newest.usage)
        if record.body.calls and record.body.finish is not Finish.INTERRUPTED:
            newest = replace(newest, ended_at=record.at, status=TurnStatus.COMPLETED)
    return replace(application, responses=(*application.responses[:-1], newest))


class Beginning(Struct, frozen=True):
    """The first entries of a conversation: their number, and a digest of them.

    The digest covers what an application resends: the text of a response without its white space, its calls and their
    results. It does not cover thinking and tools that an agent ran itself.
    """

    count: int = 0
    link: bytes = b""

    def then(self, entries: Sequence[Entry]) -> Beginning:
        """Return the beginning extended by these entries."""
        links = link_digests(self.link, entries)
        return Beginning(self.count + len(links), links[-1]) if links else self


class EntryChain(Struct, frozen=True):
    """A session's history, with the digests of all its beginnings."""

    entries: tuple[Entry, ...] = ()
    links: tuple[bytes, ...] = ()

    def then(self, history: History) -> EntryChain:
        """Return the chain of a history; known entries at its beginning are not digested again."""
        entries, count = history.entries, len(self.entries)
        if entries[:count] != self.entries:  # comparing tuples compares identities first
            return EntryChain(entries, link_digests(b"", entries))
        last = self.links[-1] if self.links else b""
        return EntryChain(entries, self.links + link_digests(last, entries[count:]))

    def begins_with(self, beginning: Beginning) -> bool:
        """Whether these are the history's first entries."""
        count = beginning.count
        return count <= len(self.links) and (not count or self.links[count - 1] == beginning.link)


class Comparison(Struct, frozen=True):
    """Difference of a transcript from a session.

    Args:
        keep: Number of the history's entries at its beginning, including the one that `results` complete.
        tail: The entries after them.
        results: The results of all open calls, if it has them.
        links: The digests of the transcript's beginnings, see `EntryChain`.
    """

    keep: int
    tail: tuple[Entry, ...]
    results: tuple[ToolResult, ...] = ()
    links: tuple[bytes, ...] = ()


def compare(chain: EntryChain, state: TurnState, before: Beginning, tail: Sequence[Entry]) -> Comparison:
    """Compare a transcript with a session whose history is that of `chain`.

    Args:
        before: The beginning of the transcript, with which the history also begins.
        tail: The entries that follow.
    """
    links = link_digests(before.link, tail)
    keep = _count_equal(chain, before.count, links)
    results: tuple[ToolResult, ...] = ()
    if keep == len(chain.entries) and isinstance(state, RunningCalls):
        results = _results_of(state, tail[keep - before.count :])
        if results:
            chain = chain.then(History((*chain.entries, Step(state.response, results))))
            keep = _count_equal(chain, before.count, links)
    whole = chain.links[: before.count] + links
    return Comparison(keep, tuple(tail[keep - before.count :]), results, whole)


def _count_equal(chain: EntryChain, count: int, links: Sequence[bytes]) -> int:
    """Return the number of equal entries, if the first `count` are equal."""
    for ours, theirs in zip(chain.links[count:], links, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def _results_of(state: RunningCalls, entries: Sequence[Entry]) -> tuple[ToolResult, ...]:
    """Return the results for the open calls in the next entry of a transcript; () if it answers other calls."""
    first = entries[0] if entries else None
    return first.results if isinstance(first, Step) and is_answered_by(state, first.results) else ()


def link_digests(before: bytes, entries: Sequence[Entry]) -> tuple[bytes, ...]:
    """Return the digests of a conversation up to each of these entries, which follow `before`."""
    found: list[bytes] = []
    for entry in entries:
        before = blake2b(before + _content(entry), digest_size=LINK_BYTES).digest()
        found.append(before)
    return tuple(found)


def _content(entry: Entry) -> bytes:
    if isinstance(entry, UserMessage):
        return b"u" + msgspec.json.encode(entry.parts)
    calls = [(call.id, call.name, call.arguments) for call in entry.response.calls]
    results = [(result.call_id, result.content, result.outcome) for result in entry.results]
    words = "".join(entry.response.text.split())
    return b"e" + msgspec.json.encode((words, calls, results) if calls else words)
