"""The fold of a whole session: history, turn, streams.

`decide` decides commands about the session as a whole (streams, numbering, turns), and passes the rest to the turn.
`evolve` folds one record at its position.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from midstream.errors import (
    CallNotStartedError,
    JournalMovedError,
    MalformedFrameError,
    MidstreamError,
    NotFoundError,
    RecordUndecodableError,
    SeqnoGapError,
    SeqnoReusedError,
    SessionBusyError,
    SessionNotFoundError,
    StreamFencedError,
    StreamReusedError,
    UsageError,
    WrongSecretError,
)
from midstream.history.compaction import cut_history
from midstream.history.messages import History, Outcome, Step, UserMessage
from midstream.session import applications
from midstream.session.applications import NO_APPLICATION, Application
from midstream.session.calls import SUSPENDED, Site
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    CommandAccepted,
    Delta,
    EpochStarted,
    HistoryCompacted,
    JournalPruned,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    Parent,
    Record,
    ResponseCompleted,
    ResultArrivedLate,
    SessionStatus,
    StepCommitted,
    StreamOpened,
    StreamTaken,
    ToolsChanged,
    TranscriptAccepted,
    TurnEnded,
    TurnResumed,
)
from midstream.session.turn import deciding, folding, pending, states
from midstream.session.turn.commands import (
    CallFinished,
    Cancel,
    CancelExpired,
    Command,
    Recover,
    Refused,
    Resume,
    SendMessage,
    SendTranscript,
    WhenBusy,
    Withdraw,
)
from midstream.session.turn.pending import PendingWork
from midstream.session.turn.states import AwaitingModel, Cancelling, Idle, RunningCalls, TurnState

STREAMS_KEPT_MAX = 1024
"""Streams that a session keeps: one for each turn. Beyond it, the oldest one without an open turn is dropped."""
COMMANDS_MAX = 10_000
"""Commands of one stream, whose digests are all kept to distinguish repetitions from conflicts."""
NEWEST_MAX = 64
"""Digests that are collected before they are moved to the others."""


QUEUE_MAX = 100
"""Messages that may wait in one session; the next one is refused."""
EPOCHS_KEPT_MAX = 64
"""Epochs whose begin a session keeps: returning clients are in one of the last."""
UNSETTLED_MAX = 64
"""Calls closed as `unknown` whose late results are still accepted; beyond it, the oldest is dropped."""
CONTINUE = "[The turn was interrupted here. Go on where you stopped.]"
"""The message for the model if a resumed turn had stopped during a response."""
GO_ON = UserMessage.of(CONTINUE)
"""That message, which no user has sent."""


class Unsettled(Struct, frozen=True, gc=False):
    """A call that was closed as `unknown` and whose result may still arrive."""

    turn: int
    response: int
    call_id: str
    site: Site


class StreamState(Struct, frozen=True, gc=False):
    """One client's stream, as in the journal."""

    secret_digest: str
    since: int
    """Position before its first record: the start for a reader of this stream."""
    epoch: int = 0
    """Epoch of the record at `since`; both are an event id."""
    turn: int = 0
    """The turn it opened; 0 before."""
    queued: int = 0
    """The number of its message in the queue, if it had to wait."""
    digests: tuple[str, ...] = ()
    """Digests of the accepted commands, without those in `newest`."""
    newest: tuple[str, ...] = ()
    """Digests of the last commands, `NEWEST_MAX` at most, so that adding one costs little in a long stream."""
    cancel_after_s: float | None = None
    """Seconds without its client after which its turn is stopped; None if it continues (STREAM-55)."""
    connection: int = 0
    """The highest known number of its connections; 0 if its client does not number them."""

    @property
    def accepted(self) -> int:
        """Number of accepted commands, which is the seqno of the next one."""
        return len(self.digests) + len(self.newest)

    def digest_at(self, seqno: int) -> str:
        """Return the digest of an accepted command."""
        older = len(self.digests)
        return self.digests[seqno] if seqno < older else self.newest[seqno - older]

    def is_beyond(self, connection: int) -> bool:
        """Whether a newer connection has the stream; 0 is never older (STREAM-101)."""
        return 0 < connection < self.connection

    def with_command(self, digest: str) -> StreamState:
        """Return the stream after one more command."""
        newest = (*self.newest, digest)
        if len(newest) < NEWEST_MAX:
            return replace(self, newest=newest)
        return replace(self, digests=self.digests + newest, newest=())


class Received(Struct, frozen=True, gc=False):
    """A client's command with its place in its stream, and the command it carries.

    `command` is None if it has no effect on the turn (a result that is not awaited any more). `cancel_after_s` applies
    if the command opens its stream. `connection` is the number of its connection; 0 if the client does not number them.
    `caller` is charged for the turn; "" for none.
    """

    stream: str
    secret_digest: str
    seqno: int
    digest: str
    command: Command | None
    cancel_after_s: float | None = None
    connection: int = 0
    caller: str = ""


class ToolsFound(Struct, frozen=True, gc=False):
    """Tools of the agent's sources for the next model call.

    `names` has the names of the tools, `unreachable` those of the sources that did not answer.
    """

    turn: int
    response_no: int
    attempt: int
    names: frozenset[str]
    unreachable: frozenset[str] = frozenset()


class Session(Struct, frozen=True, gc=False):
    """The state of a session; equal journals give equal sessions.

    A pruned journal begins with a session. So, as with records, fields may be added with a default, and never removed,
    renamed or given another meaning.
    """

    position: int = 0
    """Position of the last folded record; the first record is at 1."""
    epoch: int = 0
    turn: TurnState = field(default_factory=Idle)
    turns: int = 0
    """Number of turns opened so far."""
    history: History = field(default_factory=History)
    has_blobs: bool = False
    """Whether a result of the history is a blob."""
    cut: int = 0
    """Number of its first entries that the model no longer gets."""
    streams: dict[str, StreamState] = field(default_factory=dict)
    queue: tuple[MessageQueued, ...] = ()
    """Messages that wait for the end of the running turn, in order."""
    queued: int = 0
    """Number of messages that ever waited."""
    unsettled: tuple[Unsettled, ...] = ()
    parent: Parent | None = None
    """The call of a child session."""
    driver: str = ""
    """The driver of the open turn, if it is a driven turn."""
    driven_calls: dict[str, bool] = field(default_factory=dict)
    """Started calls of the driven turn without an outcome, each with whether the loop has suspended it."""
    last_turn: TurnEnded | None = None
    found: frozenset[str] = frozenset()
    """The dynamic tools, as in the last record for readers."""
    unreachable: frozenset[str] = frozenset()
    """The sources of tools that did not answer then."""
    started_at: float = 0.0
    """Begin of its first epoch, in seconds since 1970."""
    agent: str = ""
    """The name of the last agent; "" in journals without it."""
    agent_version: str = ""
    epochs: tuple[tuple[int, float], ...] = ()
    """Number and begin of the last epochs (seconds since 1970), `EPOCHS_KEPT_MAX` at most."""
    node: str = ""
    """The node of the last epoch."""
    suspected: int = 0
    """Deaths of nodes since the last message that the open turn may have caused: see `session.crash_suspects`."""
    application: Application = NO_APPLICATION
    """Requests of a client application that resends the conversation; see `midstream.session.applications`."""

    def has_accepted(self, received: Received) -> bool:
        """Whether a command with this number was accepted before: it is not charged again."""
        known = self.streams.get(received.stream)
        return known is not None and received.seqno < known.accepted

    def began_at(self, epoch: int) -> float | None:
        """Return the begin of an epoch, in seconds since 1970; None if it is not kept."""
        return next((at for number, at in reversed(self.epochs) if number == epoch), None)

    @property
    def model_history(self) -> History:
        """The history for the model: all of it, unless it was too long."""
        return cut_history(self.history, self.cut)

    @property
    def is_live(self) -> bool:
        """Whether a turn is open that has work left; False if its calls are with a client application."""
        return not (isinstance(self.turn, Idle) or self.is_with_application)

    @property
    def is_with_application(self) -> bool:
        """Whether a client application has the calls of the open turn. It sends results, or continues without them."""
        return isinstance(self.turn, RunningCalls) and self.turn.is_waiting_for_application

    @property
    def status(self) -> SessionStatus:
        """Status of the session, or of its last turn. Only the host can determine `LOCKED`."""
        if self.is_live:
            return SessionStatus.WAITING if self.rests_on_people else SessionStatus.RUNNING
        if self.is_with_application:
            return SessionStatus.COMPLETED  # the response is complete
        return SessionStatus(self.last_turn.status.value) if self.last_turn else SessionStatus.NEW

    @property
    def needs_node(self) -> bool:
        """Whether midstream's own loop must run the open turn: it waits not only for people."""
        return self.is_live and not self.driver and not self.rests_on_people

    def is_turn_of_other(self, agent: str, version: str) -> bool:
        """Whether the open turn belongs to another agent. Versions are compared if both are known (TURN-86)."""
        return self.is_live and not self.driver and not self.is_agent(agent, version)

    def is_agent(self, name: str, version: str) -> bool:
        """Whether the session's last epoch was of this agent; an epoch without an agent matches any (TURN-86)."""
        return not self.agent or is_same_agent((self.agent, self.agent_version), (name, version))

    @property
    def rests_on_people(self) -> bool:
        """Whether the open turn waits only for people, without a time limit."""
        if self.driven_calls:
            return all(self.driven_calls.values())
        is_waiting = isinstance(self.turn, RunningCalls) and self.turn.is_waiting_for_person
        return is_waiting and not pending.pending_work(self.turn)


def is_same_agent(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Return whether two agents, as name and version, are the same; an empty version fits any (TURN-86)."""
    return one[0] == other[0] and (not (one[1] and other[1]) or one[1] == other[1])


def decide(
    session: Session, command: Command | Received | ToolsFound, *, epoch: int, at: float
) -> tuple[Record, ...]:
    """Return the records of a command; none if it changes nothing.

    Raises:
        Refused: The command is refused; `error` is for its sender.
    """
    if isinstance(command, Received):
        return _decide_received(session, command, epoch=epoch, at=at)
    if isinstance(command, ToolsFound):
        return _decide_tools(session, command, at=at)
    if isinstance(command, Withdraw):
        return _withdrawn(session, command, at=at)
    if isinstance(command, SendMessage):
        return _decide_message(session, command, at=at)
    if isinstance(command, SendTranscript):
        return applications.decide_transcript(
            session.application, session.turn, command, turns_opened=session.turns, epoch=epoch, at=at
        )
    if isinstance(command, Recover):
        command = replace(command, is_suspect=session.suspected > states.SUSPECTED_MAX)
    did = deciding.decide(session.turn, command, epoch=epoch, at=at)
    if session.driver:
        return _without_driver(session, command, did, epoch=epoch, at=at)
    if not did and isinstance(command, CallFinished):
        return _keep_late_result(session, command, at=at)
    if session.queue and did and isinstance(did[-1], TurnEnded):
        # TURN-28: the next turn begins in the append of this end.
        return (
            *did,
            *_next_in_queue(session, at=at),
        )
    return did


def _decide_message(session: Session, command: SendMessage, *, at: float) -> tuple[Record, ...]:
    if session.parent is not None and command.parent is None:
        message = f"this session runs a call of another session; send to {session.parent.session!r} instead"
        raise Refused(UsageError(message))
    if session.parent is not None:
        return ()  # TURN-50: a repetition by another node is the same task
    if isinstance(session.turn, Idle):
        if command.turns is not None and command.turns != session.turns:
            raise Refused(JournalMovedError("another message of this conversation was first; compare again"))
        return deciding.opening(session.turns + 1, command, at=at)
    if command.when_busy is WhenBusy.REFUSE or session.driver or command.keep is not None:
        running = session.turns
        raise Refused(SessionBusyError(f"turn {running} is still running: wait for its end or cancel it"))
    if len(session.queue) >= QUEUE_MAX:
        raise Refused(SessionBusyError(f"{QUEUE_MAX} messages are already queued in this session"))
    number = session.queued + 1
    return (
        MessageQueued(
            number,
            command.message,
            at,
            command.tools,
            command.stream,
            command.timeout_s,
            command.responses_max,
        ),
    )


def _next_in_queue(session: Session, *, at: float) -> tuple[Record, ...]:
    queued = session.queue[0]
    command = SendMessage(
        queued.message,
        queued.tools,
        queued.stream,
        timeout_s=queued.timeout_s,
        responses_max=queued.responses_max,
    )
    return deciding.opening(session.turns + 1, command, at=at, queued=queued.number)


def _withdrawn(session: Session, command: Withdraw, *, at: float) -> tuple[Record, ...]:
    return tuple(
        MessageWithdrawn(each.number, at, each.stream)
        for each in session.queue
        if command.number in (None, each.number)
    )


def _keep_late_result(session: Session, finished: CallFinished, *, at: float) -> tuple[Record, ...]:
    """Record a late result of a call that had been closed as `unknown` (TURN-31)."""
    place = (finished.turn, finished.response_no, finished.result.call_id)
    is_real = finished.result.outcome in (Outcome.OK, Outcome.ERROR)
    if is_real and any((each.turn, each.response, each.call_id) == place for each in session.unsettled):
        return (ResultArrivedLate(finished.turn, finished.response_no, finished.result, at),)
    return ()  # TURN-9


def _decide_tools(session: Session, command: ToolsFound, *, at: float) -> tuple[Record, ...]:
    """Record a change of the tools for readers, once (TURN-42)."""
    attempt = (command.turn, command.response_no, command.attempt)
    turn = session.turn
    if not isinstance(turn, AwaitingModel) or attempt != (turn.turn, turn.response_no, turn.attempt):
        return ()  # TURN-9
    added = tuple(sorted(command.names - session.found))
    removed = tuple(sorted(session.found - command.names))
    if not (added or removed) and command.unreachable == session.unreachable:
        return ()
    return (ToolsChanged(command.turn, at, added, removed, tuple(sorted(command.unreachable))),)


def _without_driver(
    session: Session, command: Command, decided: tuple[Record, ...], *, epoch: int, at: float
) -> tuple[Record, ...]:
    """Return the part of `decided` that is valid for a driven turn: only the driver recovers it (DRIVEN-2).

    The appending node has the session, so the driver has ended: a cancellation waits for none of its tools.
    """
    if isinstance(command, Recover):
        return ()
    if isinstance(command, Cancel):
        state = session.turn
        for record in decided:
            state = folding.evolve(state, record, epoch=epoch)
        if isinstance(state, Cancelling):
            return (*decided, *deciding.decide(state, CancelExpired(state.turn), epoch=epoch, at=at))
    return decided


def _decide_received(session: Session, received: Received, *, epoch: int, at: float) -> tuple[Record, ...]:
    known = session.streams.get(received.stream)
    accepted = known.accepted if known else 0
    if known and not hmac.compare_digest(known.secret_digest, received.secret_digest):
        raise Refused(WrongSecretError("this stream was opened with another secret"))
    if known and known.is_beyond(received.connection):
        raise Refused(fencing_error())
    if known and received.seqno < accepted:
        if known.digest_at(received.seqno) != received.digest:
            if received.seqno == 0:  # STREAM-52
                raise Refused(StreamReusedError("this stream key was used for another first message"))
            message = f"command {received.seqno} was already accepted with another payload"
            raise Refused(SeqnoReusedError(message))
        # STREAM-12, STREAM-101: it is acknowledged again, and only updates the connection of a running turn's stream.
        return _take_stream(known, received) if session.is_live else ()
    if received.seqno > accepted or accepted >= COMMANDS_MAX:
        message = (
            f"command {received.seqno} came before command {accepted} (a stream takes {COMMANDS_MAX} at most)"
        )
        raise Refused(SeqnoGapError(message, expected=accepted))
    command = received.command
    if not session.turns and not isinstance(command, SendMessage):
        # STREAM-15: only a message creates a session, so a cancellation of nothing leaves no trace.
        raise Refused(SessionNotFoundError("this session has no message yet"))
    if isinstance(command, Resume) and session.is_live:
        # STREAM-36: the stream would have no turn of its own, and never end.
        raise Refused(SessionBusyError(f"turn {session.turns} is already running; follow it"))
    if isinstance(command, SendMessage | Resume):
        if known and (known.turn or known.queued):
            raise Refused(
                MalformedFrameError("a stream carries one message; open a new stream for the next turn")
            )
        command = replace(command, stream=received.stream)
    if isinstance(command, Cancel) and command.turn is None and known and known.turn:
        command = Cancel(known.turn)  # STREAM-15: a stream stops its own turn, not a later one
    elif isinstance(command, Cancel) and command.turn is None and known and known.queued:
        command = Withdraw(known.queued)  # nor an earlier one
    if isinstance(command, CallFinished):
        may_be_lost = known is not None and known.epoch < session.epoch
        if (refusal := _find_refusal(session, command, may_be_lost=may_be_lost)) is not None:
            raise Refused(refusal)
        is_own = known is not None and known.turn == command.turn
        if not (is_own and _is_for_client(session, command)):
            command = None  # TURN-15, SEC-84: not for the server's tools or those of another client
    begun = _take_stream(known, received) if known else (_open_stream(received),)
    taken = CommandAccepted(received.stream, received.seqno, received.digest)
    did = () if command is None else decide(session, command, epoch=epoch, at=at)
    return (*begun, taken, *did)


def _open_stream(received: Received) -> StreamOpened:
    return StreamOpened(received.stream, received.secret_digest, received.cancel_after_s, received.connection)


def _take_stream(known: StreamState, received: Received) -> tuple[StreamTaken, ...]:
    """Return the record that a newer connection has a stream, if the command's connection is newer."""
    return (
        (StreamTaken(received.stream, received.connection),) if received.connection > known.connection else ()
    )


def notice_of(session: Session, stream: str, connection: int) -> Received | None:
    """Return the command that records the connection of a stream; None if this is not necessary (STREAM-102).

    It is a repetition of the last accepted command, which has no other effect.
    """
    known = session.streams.get(stream)
    if known is None or connection <= known.connection or not session.is_live or session.driver:
        return None
    last = known.accepted - 1
    return Received(stream, known.secret_digest, last, known.digest_at(last), None, connection=connection)


def fencing_error() -> StreamFencedError:
    """Return the error for an older connection of a stream (STREAM-8)."""
    return StreamFencedError("a newer connection of this client took the stream over")


def _is_for_client(session: Session, finished: CallFinished) -> bool:
    """Whether a client may send this outcome, now or late."""
    if pending.is_pending_for_client(session.turn, finished):
        return True
    late = Unsettled(finished.turn, finished.response_no, finished.result.call_id, Site.CLIENT)
    return late in session.unsettled


def _find_refusal(session: Session, finished: CallFinished, *, may_be_lost: bool) -> MidstreamError | None:
    """Return the refusal of an outcome of a call that is not running (TURN-15); None if it changes nothing.

    If it were acknowledged and dropped, the client would regard the call as done while the turn waits for it.

    Args:
        may_be_lost: Whether another node had the session since the stream began: a power cut may have taken a response
            whose calls the client has run. The model is called again, and may request the same call.
    """
    turn, call_id = session.turn, finished.result.call_id
    if finished.turn > session.turns:
        return NotFoundError(f"this session has no turn {finished.turn}")
    if not isinstance(turn, AwaitingModel | RunningCalls):
        return None
    if (turn.turn, turn.response_no) != (finished.turn, finished.response_no):
        return None
    place = f"response {finished.response_no} of turn {finished.turn}"
    if isinstance(turn, AwaitingModel):
        return CallNotStartedError(f"{place} is requested again: wait for its calls") if may_be_lost else None
    call = next((each for each in turn.calls if each.call.id == call_id), None)
    if call is None:
        return None if may_be_lost else NotFoundError(f"{place} has no call {call_id!r}")
    if call.plan.site is Site.CLIENT and call.is_open and not call.runs:
        return CallNotStartedError(
            f"call {call_id!r} of {place} was not started: wait for its `call_started`"
        )
    return None


def evolve(session: Session, record: Record, *, epoch: int) -> Session:
    """Fold the next record; `epoch` is the one it was appended under."""
    turn = folding.evolve(session.turn, record, epoch=epoch)
    after = replace(session, position=session.position + 1, turn=turn)
    if session.application.count and isinstance(record, ResponseCompleted | TurnEnded):
        after = replace(after, application=applications.note(session.application, session.turn, record))
    if session.driver and isinstance(record, CallStarted | CallEnded):
        after = replace(after, driven_calls=_driven_calls(session.driven_calls, record))
    match record:
        case AttemptStarted(attempt=1, is_last=False) if record.response > 1 and _is_cut(session):
            return replace(after, history=_continue_history(session.history))  # TURN-83
        case Delta() | AttemptStarted() | ResponseCompleted() | CallStarted():
            return after  # for every step; the other cases follow
        case CommandAccepted():
            stream = session.streams[record.stream].with_command(record.digest)
            return replace(after, streams={**session.streams, record.stream: stream})
        case CallEnded():
            return _with_unsettled_calls(after, _with_unsettled(session, record))
        case StepCommitted():
            return _with_step(after, folding.step_of(session.turn))
        case MessageAccepted():
            return _with_message(after, session, record)
        case TranscriptAccepted():
            return _with_transcript(after, record)
        case MessageQueued():
            return replace(
                after,
                queue=(*session.queue, record),
                queued=record.number,
                streams=_with_stream(session, record.stream, queued=record.number),
            )
        case MessageWithdrawn():
            return replace(after, queue=_without(session.queue, record.number))
        case TurnResumed():
            streams = _with_stream(session, record.stream, turn=record.turn)
            return replace(after, history=_continue_history(session.history), streams=streams, suspected=0)
        case ResultArrivedLate():
            return replace(after, unsettled=_without_settled(session, record))
        case HistoryCompacted():
            return replace(after, cut=record.cut)
        case ToolsChanged():
            found = (session.found - frozenset(record.removed)) | frozenset(record.added)
            return replace(after, found=found, unreachable=frozenset(record.unreachable))
        case StreamOpened():
            return replace(after, streams=_with_new_stream(session, record))
        case StreamTaken():
            return replace(after, streams=_with_stream(session, record.stream, connection=record.connection))
        case JournalPruned():
            return restore_session(record)
        case EpochStarted():
            return _with_epoch(after, record)
        case TurnEnded():
            ended = Idle() if session.driver else turn  # only its driver could continue it
            return replace(after, turn=ended, last_turn=record, driver="", driven_calls={})
        case _:
            return after


def _with_message(after: Session, before: Session, record: MessageAccepted) -> Session:
    history, cut = before.history, before.cut
    if record.keep is not None:
        history = History((*history.entries[: record.keep], *record.before))
        cut = cut if cut <= record.keep else 0
    return replace(
        after,
        turns=record.turn,
        history=history.then(record.message),
        cut=cut,
        streams=_with_stream(before, record.stream, turn=record.turn),
        queue=_without(before.queue, record.queued),
        parent=record.parent or before.parent,
        driver=record.driver,
        driven_calls={},
        suspected=0,
    )


def _driven_calls(calls: dict[str, bool], record: CallStarted | CallEnded) -> dict[str, bool]:
    if isinstance(record, CallStarted):
        return {**calls, record.call_id: False}
    call_id = record.result.call_id
    if record.native == SUSPENDED:
        return {**calls, call_id: True}
    return {name: is_suspended for name, is_suspended in calls.items() if name != call_id}


def _with_transcript(session: Session, record: TranscriptAccepted) -> Session:
    application, history = applications.accept(session.application, session.history, record, session.position)
    cut = session.cut if session.cut <= record.keep else 0
    return replace(session, turns=record.turn, history=history, application=application, cut=cut, suspected=0)


def _with_epoch(session: Session, record: EpochStarted) -> Session:
    """Return the session under a new node; a record of an old journal, without an agent, keeps the agent."""
    named = record if record.agent else None
    return replace(
        session,
        epoch=record.epoch,
        started_at=session.started_at or record.at,
        epochs=(*session.epochs, (record.epoch, record.at))[-EPOCHS_KEPT_MAX:],
        agent=named.agent if named else session.agent,
        agent_version=named.agent_version if named else session.agent_version,
        node=record.node,
        suspected=max(session.suspected, record.suspected),
    )


def _with_new_stream(session: Session, record: StreamOpened) -> dict[str, StreamState]:
    kept = dict(session.streams)
    while len(kept) >= STREAMS_KEPT_MAX:
        unneeded = (key for key, stream in kept.items() if not _is_needed(session, stream))
        del kept[next(unneeded, next(iter(kept)))]
    kept[record.stream] = StreamState(
        record.secret_digest,
        since=session.position,
        epoch=session.epoch,
        cancel_after_s=record.cancel_after_s,
        connection=record.connection,
    )
    return kept


def _is_needed(session: Session, stream: StreamState) -> bool:
    """Whether a stream has the open turn, or a message in the queue: its client may still send commands."""
    has_turn = session.is_live and stream.turn == session.turns
    return has_turn or any(message.number == stream.queued for message in session.queue)


def _with_step(session: Session, step: Step | None) -> Session:
    if step is None:
        return session
    has_blobs = session.has_blobs or any(result.blob for result in step.results)
    return replace(session, history=session.history.then(step), has_blobs=has_blobs)


def _with_stream(
    session: Session, key: str, *, turn: int = 0, queued: int = 0, connection: int = 0
) -> dict[str, StreamState]:
    known = session.streams.get(key)
    if known is None:
        return session.streams
    after = replace(
        known,
        turn=turn or known.turn,
        queued=queued or known.queued,
        connection=connection or known.connection,
    )
    return {**session.streams, key: after}


def _without(queue: tuple[MessageQueued, ...], number: int) -> tuple[MessageQueued, ...]:
    return tuple(each for each in queue if each.number != number) if queue else queue


def _is_cut(session: Session) -> bool:
    """Whether the previous response was cut. About an accepted transcript's last entry, the application decides."""
    newest = session.application.newest
    return newest is None or len(session.history.entries) > newest.entries


def _continue_history(history: History) -> History:
    """Add a message to continue after cut text; after results or a user message, the model continues without it."""
    last = history.entries[-1] if history.entries else None
    is_cut = isinstance(last, Step) and not last.results
    return history.then(GO_ON) if is_cut else history


def _with_unsettled(session: Session, ended: CallEnded) -> tuple[Unsettled, ...]:
    state = session.turn
    if ended.result.outcome is not Outcome.UNKNOWN or not isinstance(state, RunningCalls | Cancelling):
        return session.unsettled
    site = next((call.plan.site for call in state.calls if call.call.id == ended.result.call_id), Site.SERVER)
    late = Unsettled(ended.turn, ended.response, ended.result.call_id, site)
    return (*session.unsettled, late)[-UNSETTLED_MAX:]


def _with_unsettled_calls(session: Session, unsettled: tuple[Unsettled, ...]) -> Session:
    return session if unsettled is session.unsettled else replace(session, unsettled=unsettled)


def _without_settled(session: Session, came: ResultArrivedLate) -> tuple[Unsettled, ...]:
    place = (came.turn, came.response, came.result.call_id)
    return tuple(each for each in session.unsettled if (each.turn, each.response, each.call_id) != place)


def with_turn_limit(command: Command | Received, turn_s: float) -> Command | Received:
    """Return a message with the agent's limit for a turn, if it has none."""
    if not turn_s:
        return command
    if isinstance(command, SendMessage):
        return command if command.timeout_s else replace(command, timeout_s=turn_s)
    if isinstance(command, Received) and isinstance(command.command, SendMessage):
        return replace(command, command=with_turn_limit(command.command, turn_s))
    return command


def fold(records: Iterable[tuple[int, Record]], session: Session | None = None) -> Session:
    """Fold `(epoch, record)` pairs onto a session (an empty one by default)."""
    state = session or Session()
    for epoch, record in records:
        state = evolve(state, record, epoch=epoch)
    return state


_session: msgspec.json.Decoder[Session] = msgspec.json.Decoder(Session)


def is_prunable(session: Session) -> bool:
    """Whether a journal may begin here: no response is running, no call and no question is open.

    Never within a driven turn: its loop continues it from its records.
    """
    turn = session.turn
    return isinstance(turn, Idle) or (isinstance(turn, AwaitingModel) and not (turn.deltas or session.driver))


def prune_session(session: Session, *, at: float) -> JournalPruned:
    """Return the replacement for the records that folded to this session; only if `is_prunable`."""
    return JournalPruned(msgspec.Raw(msgspec.json.encode(session)), at)


def restore_session(record: JournalPruned) -> Session:
    """Return the session in a record of `prune_session`.

    Raises:
        RecordUndecodableError: A newer version wrote it, or it is damaged.
    """
    try:
        return _session.decode(record.state)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordUndecodableError(f"the beginning of a pruned journal cannot be read: {error}") from error


def pending_work(session: Session) -> tuple[PendingWork, ...]:
    """Return the pending work of the session; a driven turn has none."""
    return () if session.driver else pending.pending_work(session.turn)
