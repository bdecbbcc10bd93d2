"""A checker for tests of all levels: logs of clients, journals and executions of tools must agree.

During the faults, collect each client's log (`ClientLog`), the stored journals, and a ledger of executions that the
tools write outside of midstream. `check` compares them at any time; `check_ended` also lists, after the faults, turns
that should have ended. Both return violations as data; an empty list is the proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct, field

from midstream.errors import MidstreamError
from midstream.history.messages import Outcome, Step
from midstream.protocol.frames import EventId
from midstream.session import session as sessions
from midstream.session.calls import CallPlan, Choice, OnDoubt, Site
from midstream.session.records import (
    AttemptContinued,
    AttemptFailed,
    AttemptResumable,
    AttemptStarted,
    CallEnded,
    CallStarted,
    CancelRequested,
    ChildDelta,
    CommandAccepted,
    Delta,
    EpochStarted,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    QuestionAnswered,
    Record,
    ResponseCompleted,
    ResultArrivedLate,
    StepCommitted,
    StreamOpened,
    StreamTaken,
    TurnEnded,
    TurnResumed,
    TurnStatus,
    decode,
)
from midstream.session.rerun_policy import RERUNS_MAX
from midstream.store.contract import StoredRecord


class Rule(StrEnum):
    """Rule that can be broken."""

    ACKED_NOT_STORED = "acked_not_stored"
    """A command was acknowledged, and is not in the journal."""
    STORED_OTHERWISE = "stored_otherwise"
    """A stored command is not the one that its client sent under that number, or is stored twice."""
    SEEN_GAP = "seen_gap"
    """A reader did not get the record after its last one, or began at another place."""
    SEEN_TWICE = "seen_twice"
    """A reader got two different events for one position."""
    SEEN_NOT_STORED = "seen_not_stored"
    """A reader got an event that is not in the journal."""
    READERS_DISAGREE = "readers_disagree"
    """Two readers got different records under one event id."""
    AFTER_CANCEL = "after_cancel"
    """A cancelled turn continued: more than its closing records followed."""
    AFTER_END = "after_end"
    """A record of a turn follows its end."""
    OUTCOME_TWICE = "outcome_twice"
    """A call has two outcomes."""
    OUTCOME_INVENTED = "outcome_invented"
    """A call is recorded as succeeded and never ran to its end."""
    RAN_UNANNOUNCED = "ran_unannounced"
    """A tool ran without the intent in the journal."""
    RAN_TWICE = "ran_twice"
    """One run of a call was executed twice."""
    RAN_AGAIN = "ran_again"
    """A call ran more often than its policy and the people permit."""
    RAN_UNASKED = "ran_unasked"
    """A call that a person must allow ran more often than it was allowed."""
    CHILD_SHOWN = "child_shown"
    """The journal does not have exactly the records of a call's child, in order."""
    CHILD_OUTCOME = "child_outcome"
    """The outcome of a call is not its child's last response, or its child has not ended."""
    QUEUE_BROKEN = "queue_broken"
    """A queued message opened two turns, or one after its withdrawal, or not in its order."""
    QUEUE_LOST = "queue_lost"
    """A queued message neither opened a turn nor was withdrawn."""
    POSITION_GAP = "position_gap"
    """A journal's positions are not 1, 2, 3, ..."""
    EPOCH_BACK = "epoch_back"
    """An epoch is lower than the previous one, or began without its record."""
    HISTORY_INVALID = "history_invalid"
    """The journal does not fold, or a committed step is incomplete."""
    TURN_OPEN = "turn_open"
    """A turn did not end."""
    END_UNSEEN = "end_unseen"
    """The turn of a client's stream ended, and the client did not get its end."""


class Violation(Struct, frozen=True, order=True):
    """One broken promise, with a text."""

    rule: Rule
    session: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule.value} in session {self.session!r}: {self.text}"


class ShownEvent(Struct, frozen=True):
    """An event that a client received. A repetition is no fault: readers apply by event id."""

    event_id: str
    body: bytes


class ClientLog(Struct):
    """Log of one client, over all its connections and restarts.

    Args:
        client: A name for messages.
        session: Its session.
        stream: Its stream; empty for a reader.
        start: Position after which it reads; None for the begin of its stream (without a stream: of its first event).
        sent: Digest (`frames.digest_of`) of each numbered command.
        acked: The acknowledged commands.
        seen: The received events, in that order.
    """

    client: str
    session: str
    stream: str = ""
    start: int | None = None
    sent: dict[int, str] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    seen: list[ShownEvent] = field(default_factory=list)


class Execution(Struct, frozen=True):
    """Entry of a tool in its ledger about one run: its begin, and whether it reached its end."""

    session: str
    turn: int
    response: int
    call_id: str
    run: int
    tool: str
    has_ended: bool = True


class Evidence(Struct):
    """All data of a check: each session's journal, the clients' logs, the tools' ledger."""

    journals: Mapping[str, Sequence[StoredRecord]]
    clients: Sequence[ClientLog] = ()
    ledger: Sequence[Execution] = ()


def check(evidence: Evidence) -> list[Violation]:
    """Return the violations, at any time."""
    found: list[Violation] = []
    for session, stored in evidence.journals.items():
        found += _check_line(session, stored)
        records = _readable(stored)
        if len(records) < len(stored):
            text = f"the record at position {len(records) + 1} cannot be read"
            found.append(Violation(Rule.HISTORY_INVALID, session, text))
        found += _check_fold(session, stored, records)
        found += _check_turns(session, records)
        found += _check_queue(session, records)
        found += _check_children(session, records, evidence.journals)
        found += _check_runs(session, records, [each for each in evidence.ledger if each.session == session])
        for client in evidence.clients:
            if client.session == session:
                found += _check_commands(client, records)
                found += _check_seen(client, stored, records)
    found += _check_agreement(evidence.clients)
    return found


def check_ended(evidence: Evidence) -> list[Violation]:
    """Return the violations of `check`, and turns that should have ended, or whose ends clients should have."""
    found = check(evidence)
    for session, stored in evidence.journals.items():
        records = _readable(stored)
        ends = {each.turn: at for at, each in enumerate(records, start=1) if isinstance(each, TurnEnded)}
        opened = [each for each in records if isinstance(each, MessageAccepted)]
        for message in opened:
            if message.turn not in ends or _is_resumed(records[ends[message.turn] :], message.turn):
                found.append(Violation(Rule.TURN_OPEN, session, f"turn {message.turn} did not end"))
        for number in _waiting(records):
            text = f"queued message {number} neither opened a turn nor was taken back"
            found.append(Violation(Rule.QUEUE_LOST, session, text))
        for client in evidence.clients:
            for message in opened:
                is_theirs = client.session == session and client.stream and message.stream == client.stream
                if is_theirs and ends.get(message.turn, 0) > max(map(_position, client.seen), default=0):
                    text = f"{client.client} was not shown the end of turn {message.turn}"
                    found.append(Violation(Rule.END_UNSEEN, session, text))
    return found


def _readable(stored: Sequence[StoredRecord]) -> list[Record]:
    """Return the records before the first unreadable one."""
    records: list[Record] = []
    for each in stored:
        try:
            records.append(decode(each.body))
        except MidstreamError:
            break
    return records


# --- the journal alone ------------------------------------------------------------------------------------------


def _check_line(session: str, stored: Sequence[StoredRecord]) -> Iterator[Violation]:
    epoch = 0
    for position, each in enumerate(stored, start=1):
        if each.position != position:
            text = f"position {each.position} stands where {position} should"
            yield Violation(Rule.POSITION_GAP, session, text)
        if each.epoch < epoch:
            text = f"epoch {each.epoch} at position {each.position} follows epoch {epoch}"
            yield Violation(Rule.EPOCH_BACK, session, text)
        elif each.epoch > epoch and not _begins_epoch(each):
            text = f"epoch {each.epoch} begins at position {each.position} without its record"
            yield Violation(Rule.EPOCH_BACK, session, text)
        epoch = each.epoch


def _begins_epoch(stored: StoredRecord) -> bool:
    (record,) = _readable([stored]) or (None,)
    return isinstance(record, EpochStarted) and record.epoch == stored.epoch


def _check_fold(
    session: str, stored: Sequence[StoredRecord], records: Sequence[Record]
) -> Iterator[Violation]:
    try:
        folded = sessions.fold((each.epoch, record) for each, record in zip(stored, records, strict=False))
    except (MidstreamError, LookupError) as error:  # lookups fail if a record refers to something missing
        yield Violation(Rule.HISTORY_INVALID, session, f"the journal does not fold: {error!r}")
        return
    committed = sum(isinstance(record, StepCommitted) for record in records)
    kept = sum(isinstance(entry, Step) for entry in folded.history.entries)
    if committed != kept:
        text = f"{committed} steps were committed, {kept} are in history"
        yield Violation(Rule.HISTORY_INVALID, session, text)


_GOES_ON = (AttemptStarted, AttemptContinued, AttemptResumable, Delta, AttemptFailed, CallStarted)


def _check_turns(session: str, records: Sequence[Record]) -> Iterator[Violation]:
    cancelled: set[int] = set()
    stopped: set[int] = set()
    """Turns that a client cancelled, not a limit."""
    ended: set[int] = set()
    for position, record in enumerate(records, start=1):
        turn = getattr(record, "turn", 0)
        what = f"{type(record).__name__} of turn {turn} at position {position}"
        is_handing_in = isinstance(record, AttemptStarted) and record.is_last  # its time is over (TURN-49)
        if isinstance(record, TurnResumed) or (is_handing_in and turn in cancelled - stopped):
            ended.discard(turn)
            cancelled.discard(turn)
        elif isinstance(record, ResultArrivedLate):
            continue  # kept for people at any time (TURN-31)
        if turn in ended:
            yield Violation(Rule.AFTER_END, session, f"{what} follows the turn's end")
        elif turn in cancelled and isinstance(record, _GOES_ON):
            yield Violation(Rule.AFTER_CANCEL, session, f"{what} follows the cancel")
        if isinstance(record, CancelRequested):
            cancelled.add(turn)
            if record.status is TurnStatus.CANCELLED:
                stopped.add(turn)
        elif isinstance(record, TurnEnded):
            ended.add(turn)


# --- the tools' ledger ------------------------------------------------------------------------------------------

_Call = tuple[int, int, str]


class _Calls:
    """Calls of a journal.

    Args:
        records: The journal.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.plans: dict[_Call, CallPlan] = {}
        self.names: dict[_Call, str] = {}
        self.outcomes: dict[_Call, list[Outcome]] = {}
        self.started: set[tuple[_Call, int]] = set()
        self.answers: dict[_Call, Counter[Choice]] = {}
        for record in records:
            match record:
                case ResponseCompleted():
                    place = (record.turn, record.response)
                    self.plans |= {(*place, plan.call_id): plan for plan in record.plans}
                    self.names |= {(*place, call.id): call.name for call in record.body.calls}
                case CallStarted():
                    self.started.add(((record.turn, record.response, record.call_id), record.run))
                case QuestionAnswered():
                    call = (record.turn, record.response, record.call_id)
                    self.answers.setdefault(call, Counter())[record.choice] += 1
                case CallEnded():
                    call = (record.turn, record.response, record.result.call_id)
                    self.outcomes.setdefault(call, []).append(record.result.outcome)

    def is_announced(self, call: _Call, run: int) -> bool:
        """Whether a run's intent was recorded. A client records its reruns itself, which get their numbers there."""
        plan = self.plans.get(call)
        first = 1 if plan is not None and plan.site is Site.CLIENT else run
        return (call, first) in self.started

    def count_decisions(self, call: _Call, choice: Choice) -> int:
        """Return how many times a person decided this about a call."""
        return self.answers.get(call, Counter())[choice]

    def runs_max(self, call: _Call) -> int:
        """Return the greatest permitted number of runs of a call."""
        plan = self.plans[call]
        reruns = self.count_decisions(call, Choice.RERUN)
        if plan.on_doubt is OnDoubt.UNKNOWN:
            return 1
        if plan.on_doubt is OnDoubt.HOLD:
            return 1 + reruns
        return 1 + RERUNS_MAX + reruns


def _check_runs(session: str, records: Sequence[Record], ledger: Sequence[Execution]) -> Iterator[Violation]:
    calls = _Calls(records)
    executed: Counter[_Call] = Counter()
    for (call, run), times in Counter((_call_of(each), each.run) for each in ledger).items():
        executed[call] += 1
        if not calls.is_announced(call, run):
            yield Violation(Rule.RAN_UNANNOUNCED, session, f"run {run} of call {call} is not in the journal")
        if times > 1:
            yield Violation(Rule.RAN_TWICE, session, f"run {run} of call {call} was executed {times} times")
    for call, runs in executed.items():
        if call not in calls.plans:
            continue
        if runs > calls.runs_max(call):
            yield Violation(Rule.RAN_AGAIN, session, f"call {call} was executed {runs} times by its policy")
        allowed = calls.count_decisions(call, Choice.ALLOW) + calls.count_decisions(call, Choice.RERUN)
        if calls.plans[call].needs_approval and runs > allowed:
            text = f"call {call} was executed {runs} times and allowed {allowed} times"
            yield Violation(Rule.RAN_UNASKED, session, text)
    finished = {_call_of(each) for each in ledger if each.has_ended}
    kept_by_tools = {each.tool for each in ledger}
    for call, ends in calls.outcomes.items():
        if len(ends) > 1:
            yield Violation(Rule.OUTCOME_TWICE, session, f"call {call} has {len(ends)} outcomes")
        is_known = call in finished or calls.count_decisions(call, Choice.HAPPENED)
        if Outcome.OK in ends and calls.names.get(call) in kept_by_tools and not is_known:
            yield Violation(Rule.OUTCOME_INVENTED, session, f"call {call} succeeded and never ran to its end")


def _call_of(execution: Execution) -> _Call:
    return (execution.turn, execution.response, execution.call_id)


# --- queue and children ---------------------------------------------------------------------------------------


def _waiting(records: Sequence[Record]) -> list[int]:
    """Return the queued messages that still wait."""
    waiting: list[int] = []
    for record in records:
        match record:
            case MessageQueued():
                waiting.append(record.number)
            case MessageAccepted(queued=number) | MessageWithdrawn(number=number) if number in waiting:
                waiting.remove(number)
    return waiting


def _check_queue(session: str, records: Sequence[Record]) -> Iterator[Violation]:
    waiting: list[int] = []
    for position, record in enumerate(records, start=1):
        match record:
            case MessageQueued():
                waiting.append(record.number)
            case MessageAccepted(queued=number) if number and waiting[:1] != [number]:
                text = f"queued message {number} opened a turn at position {position}, and {waiting} waited"
                yield Violation(Rule.QUEUE_BROKEN, session, text)
            case MessageWithdrawn(number=number) if number not in waiting:
                text = f"message {number}, taken back at position {position}, did not wait"
                yield Violation(Rule.QUEUE_BROKEN, session, text)
            case MessageAccepted(queued=number) | MessageWithdrawn(number=number) if number:
                waiting.remove(number)


_OF_NODES = (EpochStarted, StreamOpened, StreamTaken, CommandAccepted)
"""Records of a child that are not shown to the readers of its parent."""


def _check_children(
    session: str, records: Sequence[Record], journals: Mapping[str, Sequence[StoredRecord]]
) -> Iterator[Violation]:
    """Compare the copied records of children with the children's journals."""
    shown: dict[_Call, int] = {}
    children: dict[_Call, str] = {}
    for position, record in enumerate(records, start=1):
        if isinstance(record, ChildDelta) and record.child in journals:
            call = (record.turn, record.response, record.call_id)
            children[call] = record.child
            expected = _next_visible(journals[record.child], shown.get(call, 0))
            shown[call] = record.position
            if expected is None or (expected.position, expected.body) != (
                record.position,
                bytes(record.record),
            ):
                text = f"record {record.position} of {record.child!r} at position {position} is not the next of it"
                yield Violation(Rule.CHILD_SHOWN, session, text)
        elif isinstance(record, CallEnded) and record.result.outcome is Outcome.OK:
            call = (record.turn, record.response, record.result.call_id)
            if call in children and not _is_last_word(record, journals[children[call]], shown[call]):
                text = f"the outcome of call {call} at position {position} is not what {children[call]!r} ended with"
                yield Violation(Rule.CHILD_OUTCOME, session, text)


def _next_visible(stored: Sequence[StoredRecord], after: int) -> StoredRecord | None:
    """Return the next record of a child that is copied to its parent."""
    for each in stored[after:]:
        if not isinstance(next(iter(_readable([each])), None), _OF_NODES):
            return each
    return None


def _is_last_word(ended: CallEnded, stored: Sequence[StoredRecord], shown: int) -> bool:
    """Whether all of a child was copied and its turn completed with this text."""
    whole = [(each.epoch, record) for each, record in zip(stored, _readable(stored), strict=False)]
    child = sessions.fold(whole[:shown])
    last = child.history.entries[-1] if child.history.entries else None
    is_end = isinstance(whole[shown - 1][1], TurnEnded) if shown <= len(whole) else False
    return is_end and isinstance(last, Step) and last.response.text == ended.result.content


def _is_resumed(records: Sequence[Record], turn: int) -> bool:
    return any(isinstance(record, TurnResumed) and record.turn == turn for record in records)


# --- clients ----------------------------------------------------------------------------------------------------


def _check_commands(client: ClientLog, records: Sequence[Record]) -> Iterator[Violation]:
    if not client.stream:
        return
    stored = [each for each in records if isinstance(each, CommandAccepted) and each.stream == client.stream]
    numbers = {each.seqno for each in stored}
    for seqno in sorted(client.acked - numbers):
        text = f"command {seqno} of {client.client} was acknowledged and is not in the journal"
        yield Violation(Rule.ACKED_NOT_STORED, client.session, text)
    for command in stored:
        if client.sent.get(command.seqno) != command.digest:
            text = f"command {command.seqno} of {client.client} is not what was sent"
            yield Violation(Rule.STORED_OTHERWISE, client.session, text)
    if len(numbers) != len(stored):
        text = f"a command of {client.client} stands in the journal twice"
        yield Violation(Rule.STORED_OTHERWISE, client.session, text)


def _check_seen(
    client: ClientLog, stored: Sequence[StoredRecord], records: Sequence[Record]
) -> Iterator[Violation]:
    last = _start_of(client, records)
    had: dict[int, ShownEvent] = {}
    for seen in client.seen:
        position = _position(seen)
        where = f"{client.client} at event {seen.event_id}"
        if position in had:  # received again, as after a reconnect
            if had[position] != seen:
                text = f"{where}: another event than {had[position].event_id} was shown for the same position"
                yield Violation(Rule.SEEN_TWICE, client.session, text)
            continue
        had[position] = seen
        if position != last + 1:
            yield Violation(Rule.SEEN_GAP, client.session, f"{where}: the last one had position {last}")
        last = position
        at = stored[position - 1] if 0 < position <= len(stored) else None
        if at is None or (str(EventId(at.epoch, at.position)), at.body) != (seen.event_id, seen.body):
            yield Violation(
                Rule.SEEN_NOT_STORED, client.session, f"{where}: the journal holds something else"
            )


def _start_of(client: ClientLog, records: Sequence[Record]) -> int:
    """Return the position after which the client reads."""
    if client.start is not None:
        return client.start
    if not client.stream:
        return _position(client.seen[0]) - 1 if client.seen else 0
    for position, record in enumerate(records, start=1):
        if getattr(record, "stream", "") == client.stream:
            return position - 1
    return 0


def _check_agreement(clients: Iterable[ClientLog]) -> Iterator[Violation]:
    shown: dict[tuple[str, str], tuple[str, bytes]] = {}
    for client in clients:
        for seen in client.seen:
            first, body = shown.setdefault((client.session, seen.event_id), (client.client, seen.body))
            if body != seen.body:
                text = f"{first} and {client.client} were shown different records as {seen.event_id}"
                yield Violation(Rule.READERS_DISAGREE, client.session, text)


def _position(seen: ShownEvent) -> int:
    return EventId.parse(seen.event_id).position
