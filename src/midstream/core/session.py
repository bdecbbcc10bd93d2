"""The fold of a whole session: history, turn, streams.

`decide` here judges what concerns the session as a whole (streams, numbering, turns) and hands the rest to the
turn. `evolve` folds one record at its position.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from midstream.core import turn as turns
from midstream.core.compaction import shown
from midstream.core.messages import History
from midstream.core.records import (
    ChunkAccepted,
    EpochStarted,
    ExchangeCommitted,
    HistoryCompacted,
    MessageAccepted,
    Record,
    StreamOpened,
    TurnEnded,
)
from midstream.core.turn import (
    CallFinished,
    Cancel,
    CancelExpired,
    Cancelling,
    Command,
    Idle,
    Obligation,
    Recover,
    Refused,
    SendMessage,
    TurnState,
)
from midstream.errors import (
    MalformedFrameError,
    SeqnoGapError,
    SeqnoReusedError,
    SessionNotFoundError,
    WrongSecretError,
)

STREAMS_KEPT_MAX = 1024
"""Streams a session remembers; the oldest goes first. One stream is one turn of one client."""
CHUNKS_MAX = 10_000
"""Chunks of one stream, all of whose digests are kept to tell a repetition from a conflict."""


class StreamState(Struct, frozen=True):
    """One client's stream, as the journal knows it."""

    secret_digest: str
    since: int
    """Position before its first record: where a reader of this stream begins."""
    epoch: int = 0
    """Epoch of the record at `since`, which with it makes an event id."""
    turn: int = 0
    """The turn it opened; 0 before."""
    digests: tuple[str, ...] = ()
    """Digest of each accepted chunk; the next seqno is their number."""


class Received(Struct, frozen=True):
    """A client's chunk with its place in its stream, and the command it carries.

    `command` is None where the chunk says nothing to the turn (a result nobody waits for any more).
    """

    stream: str
    secret_digest: str
    seqno: int
    digest: str
    command: Command | None


class Session(Struct, frozen=True):
    """Everything there is to know of a session; equal journals give equal sessions."""

    position: int = 0
    """Position of the last folded record; the first record stands at 1."""
    epoch: int = 0
    turn: TurnState = field(default_factory=Idle)
    turns: int = 0
    """Number of turns opened so far."""
    history: History = field(default_factory=History)
    cut: int = 0
    """How many of its entries, from the beginning, the model is no longer shown."""
    streams: dict[str, StreamState] = field(default_factory=dict)
    driver: str = ""
    """Whose loop runs the open turn, where it is not our own."""
    last_turn: TurnEnded | None = None
    started_at: float = 0.0
    """When its first epoch began, in seconds since 1970."""

    @property
    def shown(self) -> History:
        """What the model is shown of the history: all of it, unless it was too long."""
        return shown(self.history, self.cut)

    @property
    def is_live(self) -> bool:
        """Whether a turn is open, so that somebody owes this session something."""
        return not isinstance(self.turn, Idle)

    @property
    def is_ours(self) -> bool:
        """Whether a turn is open that our own loop must go on with."""
        return self.is_live and not self.driver


def decide(session: Session, command: Command | Received, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Return what must be appended because of `command`; nothing, where it changes nothing.

    Raises:
        Refused: It cannot be taken; its `error` is what the sender is told.
    """
    if isinstance(command, Received):
        return _decide_received(session, command, epoch=epoch, at=at)
    if isinstance(command, SendMessage) and isinstance(session.turn, Idle):
        return turns.opening(session.turns + 1, command, at=at)
    decided = turns.decide(session.turn, command, epoch=epoch, at=at)
    return _without_driver(session, command, decided, epoch=epoch, at=at) if session.driver else decided


def _without_driver(
    session: Session, command: Command, decided: tuple[Record, ...], *, epoch: int, at: float
) -> tuple[Record, ...]:
    """Return what of `decided` holds for a turn that another loop drives: only the driver recovers it (DRIVEN-2).

    Whoever can append here holds the session, so the driver is gone: a cancel waits for none of its tools.
    """
    if isinstance(command, Recover):
        return ()
    if isinstance(command, Cancel):
        state = session.turn
        for record in decided:
            state = turns.evolve(state, record, epoch=epoch)
        if isinstance(state, Cancelling):
            return (*decided, *turns.decide(state, CancelExpired(state.turn), epoch=epoch, at=at))
    return decided


def _decide_received(session: Session, chunk: Received, *, epoch: int, at: float) -> tuple[Record, ...]:
    known = session.streams.get(chunk.stream)
    digests = known.digests if known else ()
    if known and not hmac.compare_digest(known.secret_digest, chunk.secret_digest):
        raise Refused(WrongSecretError("this stream was opened with another secret"))
    if chunk.seqno < len(digests):
        if digests[chunk.seqno] != chunk.digest:
            message = f"chunk {chunk.seqno} was already accepted with another payload"
            raise Refused(SeqnoReusedError(message))
        return ()  # STREAM: a repeated chunk is acknowledged again and changes nothing
    if chunk.seqno > len(digests) or len(digests) >= CHUNKS_MAX:
        expected = len(digests)
        message = f"chunk {chunk.seqno} came before chunk {expected} (a stream takes {CHUNKS_MAX} at most)"
        raise Refused(SeqnoGapError(message, expected=expected))
    command = chunk.command
    if not session.turns and not isinstance(command, SendMessage):
        # STREAM-15: only a message makes a session; an abort of nothing leaves nothing behind
        raise Refused(
            SessionNotFoundError("nothing was said in this session yet, so there is nothing to answer")
        )
    if isinstance(command, SendMessage):
        if known and known.turn:
            raise Refused(
                MalformedFrameError("a stream carries one message: open a new stream for the next turn")
            )
        command = replace(command, stream=chunk.stream)
    if isinstance(command, Cancel) and command.turn is None and known and known.turn:
        command = Cancel(known.turn)  # STREAM-15: a stream stops its own turn, not one that came after it
    if isinstance(command, CallFinished) and not turns.is_owed_by_client(session.turn, command):
        command = None  # TURN-15: nobody but the server speaks for a tool of the server
    opened = () if known else (StreamOpened(chunk.stream, chunk.secret_digest),)
    accepted = ChunkAccepted(chunk.stream, chunk.seqno, chunk.digest)
    did = () if command is None else decide(session, command, epoch=epoch, at=at)
    return (*opened, accepted, *did)


def evolve(session: Session, record: Record, *, epoch: int) -> Session:
    """Fold the next record; `epoch` is the one it was appended under."""
    position = session.position + 1
    turn = turns.evolve(session.turn, record, epoch=epoch)
    match record:
        case ExchangeCommitted():
            exchange = turns.exchange_of(session.turn)
            history = session.history.then(exchange) if exchange else session.history
            return replace(session, position=position, turn=turn, history=history)
        case MessageAccepted():
            history = session.history.then(record.message)
            streams = session.streams
            if record.stream in streams:
                streams = {**streams, record.stream: replace(streams[record.stream], turn=record.turn)}
            return replace(
                session,
                position=position,
                turn=turn,
                turns=record.turn,
                history=history,
                streams=streams,
                driver=record.driver,
            )
        case HistoryCompacted():
            return replace(session, position=position, turn=turn, cut=record.cut)
        case StreamOpened():
            stream = StreamState(record.secret_digest, since=session.position, epoch=session.epoch)
            kept = list(session.streams.items())[-(STREAMS_KEPT_MAX - 1) :]
            return replace(session, position=position, streams=dict([*kept, (record.stream, stream)]))
        case ChunkAccepted():
            known = session.streams[record.stream]
            stream = replace(known, digests=(*known.digests, record.digest))
            return replace(session, position=position, streams={**session.streams, record.stream: stream})
        case EpochStarted():
            started_at = session.started_at or record.at
            return replace(session, position=position, turn=turn, epoch=record.epoch, started_at=started_at)
        case TurnEnded():
            return replace(session, position=position, turn=turn, last_turn=record, driver="")
        case _:
            return replace(session, position=position, turn=turn)


def fold(records: Iterable[tuple[int, Record]], session: Session | None = None) -> Session:
    """Fold `(epoch, record)` pairs onto a session (an empty one by default)."""
    state = session or Session()
    for epoch, record in records:
        state = evolve(state, record, epoch=epoch)
    return state


def owed(session: Session) -> frozenset[Obligation]:
    """Return what the world owes this session; a turn that another loop drives is owed by that loop alone."""
    return frozenset() if session.driver else turns.owed(session.turn)
