"""The fold of a session: invariants of every history, and the numbering of its streams."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, field

from midstream.errors import (
    MalformedFrameError,
    MidstreamError,
    SeqnoGapError,
    SeqnoReusedError,
    SessionBusyError,
    StreamReusedError,
    WrongSecretError,
)
from midstream.history.compaction import cut_history
from midstream.history.messages import History, Response, Step, Text, ToolResult, UserMessage
from midstream.session import session as sessions
from midstream.session.blobs import split_large_results
from midstream.session.call_references import CallRef
from midstream.session.calls import CHOICES, Choice, OnDoubt, Site
from midstream.session.records import (
    CallEnded,
    CallStarted,
    CommandAccepted,
    EpochStarted,
    JournalPruned,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    QuestionAnswered,
    Record,
    ResponseCompleted,
    ResultArrivedLate,
    StepCommitted,
    StreamOpened,
    ToolsChanged,
    TurnEnded,
    TurnResumed,
    TurnStatus,
    decode,
    encode,
)
from midstream.session.session import (
    COMMANDS_MAX,
    CONTINUE,
    STREAMS_KEPT_MAX,
    Received,
    Session,
    ToolsFound,
    decide,
    evolve,
    fold,
    is_prunable,
    pending_work,
    prune_session,
    restore_session,
    with_turn_limit,
)
from midstream.session.turn.commands import (
    Answer,
    CallExpired,
    CallFinished,
    CallProbed,
    CallProgress,
    Cancel,
    CancelExpired,
    ChildStreamed,
    Command,
    ModelFailed,
    ModelResponded,
    ModelResumable,
    ModelReuseDecided,
    ModelStreamed,
    PermissionRequested,
    PermissionWithdrawn,
    QuestionExpired,
    Recover,
    Refused,
    Resume,
    SendMessage,
    SendTranscript,
    Stalled,
    StallFinished,
    TurnExpired,
    UseAnswer,
    WhenBusy,
    Withdraw,
)
from midstream.session.turn.pending import AwaitCancelled, CallModel, PendingWork, ProbeCall, RunCall
from midstream.session.turn.states import AwaitingModel, Cancelling, Idle, RunningCalls
from midstream.store.contract import StoredRecord
from midstream.testing.history_checker import Evidence, Execution, Rule, check
from tests.session.session_lives import SessionLife, batches, lives
from tests.session.turn_stories import (
    AT,
    answers,
    asks,
    at_client,
    ended,
    fails,
    overflows,
    reads,
    sends,
    streams,
    writes,
)
from tests.spec import spec

# --- invariants
# -------------------------------------------------------------------------------------------------


@given(lives())
@spec("TURN-22")
def test_the_stored_journal_folds_to_the_same_session(life: SessionLife) -> None:
    stored = [(epoch, decode(encode(record))) for epoch, record in life.journal]
    assert fold(stored) == life.session
    assert life.session.position == len(life.journal)


@given(lives())
@spec("TURN-22", "TURN-6", "TURN-12")
def test_history_holds_whole_steps_with_the_one_outcome_of_each_call(life: SessionLife) -> None:
    history = life.session.history
    assert msgspec.json.decode(msgspec.json.encode(history), type=History) == history

    outcomes = {
        (record.turn, record.response, record.result.call_id): record.result
        for _, record in life.journal
        if isinstance(record, CallEnded)
    }
    assert len(outcomes) == sum(isinstance(record, CallEnded) for _, record in life.journal)
    responses: dict[tuple[int, int], ResponseCompleted] = {}
    entries: list[UserMessage | Step] = []
    for _, record in life.journal:
        if isinstance(record, MessageAccepted):
            entries.append(record.message)
        elif isinstance(record, ResponseCompleted):
            responses[record.turn, record.response] = record
        elif isinstance(record, StepCommitted):
            place = (record.turn, record.response)
            calls = responses[place].body.calls
            results = tuple(outcomes[*place, call.id] for call in calls)
            entries.append(Step(responses[place].body, results))
        elif isinstance(record, TurnResumed):
            last = entries[-1]
            if isinstance(last, Step) and not last.results:
                entries.append(UserMessage.of(CONTINUE))
    assert history.entries == tuple(entries)


@given(lives())
@spec("TURN-21")
def test_a_live_session_has_pending_work_after_every_append(life: SessionLife) -> None:
    for step in life.steps:
        waits = pending_work(step.after) != () or step.after.rests_on_people
        assert waits == step.after.is_live, step.command


@given(lives())
@spec("TURN-1", "TURN-28")
def test_a_message_is_accepted_refused_or_queued_as_the_session_is_busy(life: SessionLife) -> None:
    for step in life.steps:
        if not isinstance(step.command, SendMessage):
            continue
        if not step.before.is_live:
            assert step.records is not None
            assert isinstance(step.records[0], MessageAccepted)
        elif step.command.when_busy is WhenBusy.REFUSE:
            assert step.records is None
        else:
            assert step.records is not None
            assert [type(record) for record in step.records] == [MessageQueued]


@given(lives())
@spec("TURN-28", "TURN-29")
def test_queued_messages_are_taken_once_and_in_order(life: SessionLife) -> None:
    taken = [
        record.queued for _, record in life.journal if isinstance(record, MessageAccepted) and record.queued
    ]
    back = {record.number for _, record in life.journal if isinstance(record, MessageWithdrawn)}
    content = [record.number for _, record in life.journal if isinstance(record, MessageQueued)]
    waiting = [each.number for each in life.session.queue]
    assert content == list(range(1, len(content) + 1))
    assert taken + waiting == [number for number in content if number not in back]
    assert life.session.is_live or not waiting


@given(lives())
@spec("TURN-9", "TURN-3")
def test_a_command_about_another_call_or_turn_changes_nothing(life: SessionLife) -> None:
    for step in life.steps:
        if not _is_about(step.before, step.command):
            assert not step.records, step.command
            assert step.after == step.before


def _is_about(session: Session, command: Command) -> bool:
    """Return, from the pending work alone, whether a command concerns the session now."""
    match command:
        case (
            ModelStreamed()
            | ModelResumable()
            | ModelReuseDecided()
            | ModelResponded()
            | ModelFailed()
            | PermissionRequested()
        ):
            ids = (command.ref.turn, command.ref.response_no, command.ref.attempt)
            asked = (each for each in pending_work(session) if isinstance(each, CallModel))
            return any((each.ref.turn, each.ref.response_no, each.ref.attempt) == ids for each in asked)
        case CallFinished():
            place = (command.turn, command.response_no, command.result.call_id)
            is_late = any((each.turn, each.response, each.call_id) == place for each in session.unsettled)
            return is_late or _is_call_open(session, *place)
        case CallExpired():
            return _is_call_open(session, command.ref.turn, command.ref.response_no, command.ref.call_id)
        case CallProgress() | ChildStreamed():
            return _is_call_open(session, command.ref.turn, command.ref.response_no, command.ref.call_id)
        case CallProbed():
            probes = (each for each in pending_work(session) if isinstance(each, ProbeCall))
            place = (command.ref.turn, command.ref.response_no, command.ref.call_id)
            return any((each.ref.turn, each.ref.response_no, each.ref.call_id) == place for each in probes)
        case Answer() | QuestionExpired():
            return _is_question_open(session, command)
        case PermissionWithdrawn() | UseAnswer():
            waiting = getattr(session.turn, "questions", ())
            is_known = any(
                (each.attempt, each.id) == (command.ref.attempt, command.question_id) for each in waiting
            )
            at_response = (session.turns, getattr(session.turn, "response_no", 0))
            return is_known and (command.ref.turn, command.ref.response_no) == at_response
        case TurnExpired():
            return (
                not isinstance(session.turn, Cancelling) and session.is_live and command.turn == session.turns
            )
        case Resume():
            left = getattr(session.turn, "left", None)
            return left is not None and command.turn in (None, left.turn)
        case Withdraw():
            return any(command.number in (None, each.number) for each in session.queue)
        case CancelExpired():
            return any(
                isinstance(each, AwaitCancelled) and each.turn == command.turn
                for each in pending_work(session)
            )
        case Cancel():
            return session.is_live and command.turn in (None, session.turns)
        case Stalled() | StallFinished():
            place = (command.turn, command.response_no, command.call_id)
            is_asked = any(isinstance(each, CallModel) for each in pending_work(session))
            at_model = (session.turns, getattr(session.turn, "response_no", 0), "")
            return (is_asked and place == at_model) or _is_call_open(session, *place)
        case SendMessage() | SendTranscript() | Recover():
            return True


def _is_call_open(session: Session, turn: int, response: int, call_id: str) -> bool:
    """Return whether a call of the running batch was started and has no result."""
    calls = getattr(session.turn, "calls", ())
    numbers = (getattr(session.turn, "turn", 0), getattr(session.turn, "response_no", 0))
    return numbers == (turn, response) and any(each.call.id == call_id and each.is_running for each in calls)


def _is_question_open(session: Session, command: Answer | QuestionExpired) -> bool:
    if not isinstance(session.turn, AwaitingModel | RunningCalls):
        return False
    numbers = (session.turn.turn, session.turn.response_no)
    if isinstance(session.turn, AwaitingModel):
        ids = {each.id for each in session.turn.questions if each.is_open}
    else:
        ids = {call.call.id for call in session.turn.calls if call.is_asking}
    return (command.ref.turn, command.ref.response_no) == numbers and command.ref.call_id in ids


@given(lives())
@spec("TURN-8")
def test_a_cancel_always_leads_to_rest_and_no_record_of_the_turn_follows(life: SessionLife) -> None:
    life.take(Withdraw(), epoch=life.session.epoch)
    turn = life.session.turns
    life.take(Cancel(), epoch=life.session.epoch)
    life.take(CancelExpired(turn), epoch=life.session.epoch)
    assert isinstance(life.session.turn, Idle)

    ended_turns: set[int] = set()
    for _, record in life.journal:
        if isinstance(record, TurnResumed):
            ended_turns.remove(record.turn)
        is_late = isinstance(record, ResultArrivedLate)
        assert is_late or getattr(record, "turn", None) not in ended_turns, record
        if isinstance(record, TurnEnded):
            ended_turns.add(record.turn)
    assert ended_turns == set(range(1, turn + 1))


@given(lives(), st.sampled_from([0.0, 3 * 60 * 60.0]))
@spec("TURN-17")
def test_taking_over_twice_is_taking_over_once(life: SessionLife, later: float) -> None:
    life.at += later
    epoch = life.session.epoch + 1
    life.append((EpochStarted(epoch, "next", life.at),), epoch=epoch)
    life.take(Recover(), epoch=epoch)
    assert decide(life.session, Recover(), epoch=epoch, at=life.at) == ()


@given(lives())
@spec("TURN-10", "TURN-13")
def test_every_run_is_announced_and_only_permitted_calls_run_again(life: SessionLife) -> None:
    runs: Counter[tuple[int, int, str]] = Counter()
    granted: Counter[tuple[int, int, str]] = Counter()
    plans = {
        (record.turn, record.response, plan.call_id): plan
        for _, record in life.journal
        if isinstance(record, ResponseCompleted)
        for plan in record.plans
    }
    for _, record in life.journal:
        if isinstance(record, CallStarted):
            call = (record.turn, record.response, record.call_id)
            runs[call] += 1
            assert record.run == runs[call]
            assert record.has_effects == plans[call].has_effects
            assert record.run == 1 or plans[call].on_doubt is not OnDoubt.UNKNOWN
            if plans[call].needs_approval or plans[call].on_doubt is OnDoubt.HOLD:
                # Never without a person: one decision for each start that needs one.
                needed = record.run - (0 if plans[call].needs_approval else 1)
                assert granted[call] >= needed, call
        elif isinstance(record, QuestionAnswered) and record.choice in (Choice.ALLOW, Choice.RERUN):
            granted[record.turn, record.response, record.call_id] += 1
    by_people = {call for call, count in granted.items() if count}
    assert all(count <= 3 for call, count in runs.items() if call not in by_people)


# --- two nodes
# -------------------------------------------------------------------------------------------------


class StaleNode(Struct, eq=False):
    """A process that considers itself the node of the session."""

    epoch: int
    session: Session
    running: list[RunCall] = field(default_factory=list)


class JournalAndEffects(Struct):
    """A journal that keeps the contract of stores, its nodes, and the real effects of tools."""

    journal: list[tuple[int, Record]] = field(default_factory=list)
    epoch: int = 0
    nodes: list[StaleNode] = field(default_factory=list)
    executions: list[RunCall] = field(default_factory=list)
    at: float = AT

    def take_over(self) -> None:
        """Claim the session for a new node; the old ones have not noticed yet."""
        self.epoch += 1
        node = StaleNode(self.epoch, fold(self.journal))
        self.nodes.append(node)
        begun: tuple[Record, ...] = (EpochStarted(self.epoch, f"node-{self.epoch}", self.at),)
        state = fold([(self.epoch, begun[0])], node.session)
        self.append(node, (*begun, *decide(state, Recover(), epoch=self.epoch, at=self.at)))

    def decide_at(self, node: StaleNode, command: Command) -> None:
        """Let a node decide a command on its own state, as its runner would."""
        try:
            records = decide(node.session, command, epoch=node.epoch, at=self.at)
        except Refused:
            return
        if records:
            self.append(node, records)

    def append(self, node: StaleNode, records: tuple[Record, ...]) -> None:
        if node.epoch != self.epoch or node.session.position != len(self.journal):
            self.nodes.remove(node)  # Lease lost, or the journal moved: it stops at once.
            return
        self.journal += [(node.epoch, record) for record in records]
        node.session = fold([(node.epoch, record) for record in records], node.session)
        due: list[PendingWork] = [each for each in pending_work(node.session) if isinstance(each, RunCall)]
        for call in due:
            if isinstance(call, RunCall) and call not in node.running:
                node.running.append(call)
                self.executions.append(call)


@given(st.data())
@spec("TURN-23", "TURN-13", "TURN-10", "TURN-35", "TURN-36", "TURN-37", "TURN-46")
def test_two_nodes_never_run_a_call_twice_unless_policy_and_people_permit_it(data: st.DataObject) -> None:
    outside = JournalAndEffects()
    outside.take_over()
    for _ in range(data.draw(st.integers(1, 40))):
        if not outside.nodes or data.draw(st.integers(0, 3)) == 0:
            outside.take_over()
            continue
        node = data.draw(st.sampled_from(outside.nodes))
        outside.decide_at(node, _deed(data, node))

    assert max(Counter(outside.executions).values(), default=1) == 1
    ledger = [
        Execution("s", each.ref.turn, each.ref.response_no, each.ref.call_id, each.run, "work")
        for each in outside.executions
    ]
    stored = [
        StoredRecord(at, epoch, encode(record)) for at, (epoch, record) in enumerate(outside.journal, start=1)
    ]
    of_runs = {Rule.RAN_TWICE, Rule.RAN_AGAIN, Rule.RAN_UNASKED, Rule.RAN_UNANNOUNCED, Rule.OUTCOME_TWICE}
    found = check(Evidence({"s": stored}, ledger=ledger))
    assert [each for each in found if each.rule in of_runs] == []
    assert [epoch for epoch, _ in outside.journal] == sorted(epoch for epoch, _ in outside.journal)


def _deed(data: st.DataObject, node: StaleNode) -> Command:
    """Draw the next act of a node, which may have been overtaken."""
    state = node.session.turn
    asked = [each for each in pending_work(node.session) if isinstance(each, CallModel)]
    if asked:
        ref = asked[0].ref
        return asks(*data.draw(batches()), turn=ref.turn, response=ref.response_no, attempt=ref.attempt)
    if not isinstance(state, RunningCalls):
        return Cancel() if node.session.is_live else sends()
    possible: list[Command] = []
    for call in state.calls:
        call_ref = CallRef(state.turn, state.response_no, call.call.id)
        if call.is_asking and call.asked:
            choices = CHOICES[call.asked]
            possible += (Answer(call_ref, call.plan.digest, choice, "said") for choice in choices)
        elif call.is_open and call.is_in_doubt:
            possible.append(CallProbed(call_ref, may_run=True))
            possible.append(CallProbed(call_ref, ToolResult(call.call.id, "it did")))
        elif call.is_running and call.plan.site is not Site.SERVER:
            result = ToolResult(call.call.id, "out")
            possible.append(CallFinished(state.turn, state.response_no, result))
    running = [each.ref for each in node.running]
    possible += (ended(ref.call_id, turn=ref.turn, response=ref.response_no) for ref in running)
    return data.draw(st.sampled_from(possible)) if possible else Cancel()


# --- streams ----------------------------------------------------------------------------------------------------


def _command(seqno: int, command: Command | None, *, stream: str = "s", secret: str = "k") -> Received:
    return Received(stream, secret, seqno, f"digest of {command!r}", command)


def _after_commands(session: Session, *commands: Received) -> Session:
    for received in commands:
        session = fold([(1, record) for record in decide(session, received, epoch=1, at=AT)], session)
    return session


OPENED = fold([(1, EpochStarted(1, "node", AT))])


def test_the_first_command_opens_its_stream_in_its_own_append() -> None:
    records = decide(OPENED, _command(0, sends("hi")), epoch=1, at=AT)
    assert [type(record).__name__ for record in records] == [
        "StreamOpened",
        "CommandAccepted",
        "MessageAccepted",
        "AttemptStarted",
    ]
    session = fold([(1, record) for record in records], OPENED)
    stream = session.streams["s"]
    assert (stream.since, stream.epoch, stream.turn, stream.accepted) == (1, 1, 1, 1)
    assert isinstance(records[2], MessageAccepted)
    assert records[2].stream == "s"


def test_a_repeated_command_is_not_processed_again() -> None:
    session = _after_commands(OPENED, _command(0, sends()))
    assert decide(session, _command(0, sends()), epoch=1, at=AT) == ()
    assert decide(_after_commands(session, _command(1, Cancel())), _command(0, sends()), epoch=1, at=AT) == ()


@spec("STREAM-12", "STREAM-52")
def test_a_repeated_number_with_another_payload_is_a_conflict() -> None:
    session = _after_commands(OPENED, _command(0, sends()), _command(1, Cancel()))
    with pytest.raises(Refused) as refused:
        decide(session, _command(1, Cancel(7)), epoch=1, at=AT)
    assert type(refused.value.error) is SeqnoReusedError


@spec("STREAM-52")
@pytest.mark.parametrize(
    ("received", "error"),
    [
        (_command(0, sends("other words")), StreamReusedError),
        (_command(2, Cancel()), SeqnoGapError),
        (_command(1, Cancel(), secret="another"), WrongSecretError),
        (_command(0, sends(), secret="another"), WrongSecretError),
        (_command(1, sends("again")), MalformedFrameError),
        (_command(0, sends(), stream="another"), SessionBusyError),
    ],
    ids=["reused", "gap", "secret", "secret of a repetition", "second message", "busy"],
)
def test_a_command_that_breaks_a_rule_is_refused(received: Received, error: type[MidstreamError]) -> None:
    session = _after_commands(OPENED, _command(0, sends()))
    with pytest.raises(Refused) as refused:
        decide(session, received, epoch=1, at=AT)
    assert type(refused.value.error) is error


def test_a_gap_names_the_expected_command() -> None:
    with pytest.raises(Refused) as refused:
        decide(OPENED, _command(3, Cancel()), epoch=1, at=AT)
    assert isinstance(refused.value.error, SeqnoGapError)
    assert refused.value.error.expected == 0


def test_a_stream_ends_at_its_limit() -> None:
    session = OPENED
    stream = sessions.StreamState("k", since=1, digests=("d",) * COMMANDS_MAX)
    session = msgspec.structs.replace(session, streams={"s": stream})
    with pytest.raises(Refused):
        decide(session, _command(COMMANDS_MAX, Cancel()), epoch=1, at=AT)


def test_the_oldest_streams_are_dropped() -> None:
    session = OPENED
    for number in range(STREAMS_KEPT_MAX + 2):
        session = evolve(session, StreamOpened(f"s{number}", "k"), epoch=1)
    assert len(session.streams) == STREAMS_KEPT_MAX
    assert "s1" not in session.streams
    assert f"s{STREAMS_KEPT_MAX + 1}" in session.streams


def test_a_command_without_content_is_accepted() -> None:
    session = _after_commands(OPENED, _command(0, sends()), _command(1, None))
    assert session.streams["s"].accepted == 2


@spec("TURN-9")
def test_a_late_result_of_a_client_is_accepted_and_changes_nothing() -> None:
    session = _after_commands(OPENED, _command(0, sends()))
    records = decide(session, _command(1, ended("a")), epoch=1, at=AT)
    assert records == (CommandAccepted("s", 1, f"digest of {ended('a')!r}"),)


@spec("TURN-15")
def test_an_outcome_of_a_call_that_was_not_started_is_refused_and_a_second_one_changes_nothing() -> None:
    allowed_first = msgspec.structs.replace(at_client("b"), needs_approval=True)
    session = _after_command(
        _after_commands(OPENED, _command(0, sends())), asks(at_client("c"), allowed_first)
    )
    early, unknown, later = (ended(each, turn=turn) for each, turn in (("b", 1), ("x", 1), ("c", 2)))
    for command, code, retry in (
        (early, "call_not_started", "later"),
        (unknown, "not_found", "never"),
        (later, "not_found", "never"),
    ):
        with pytest.raises(Refused) as refused:
            decide(session, _command(1, command), epoch=1, at=AT)
        assert (refused.value.error.code, refused.value.error.retry) == (code, retry)
    session = _after_command(session, ended("c"))
    second = decide(session, _command(1, ended("c", "something else")), epoch=1, at=AT)
    assert [type(each) for each in second] == [CommandAccepted]


@spec("TURN-15")
def test_a_client_cannot_send_the_outcome_of_a_server_tool() -> None:
    session = _after_commands(OPENED, _command(0, sends()))
    session = _after_command(session, asks(writes("a")))
    records = decide(session, _command(1, ended("a", "forged")), epoch=1, at=AT)
    assert [type(record) for record in records] == [CommandAccepted]

    session = _after_command(_after_command(session, ended("a")), asks(at_client("b"), response=2))
    records = decide(session, _command(1, ended("b", response=2)), epoch=1, at=AT)
    assert isinstance(records[1], CallEnded)


@spec("SEC-84")
def test_a_result_counts_only_on_the_stream_of_its_turn() -> None:
    session = _after_command(_after_commands(OPENED, _command(0, sends())), asks(at_client("a")))
    forged = decide(session, _command(0, ended("a", "forged"), stream="t", secret="u"), epoch=1, at=AT)
    assert [type(record) for record in forged] == [StreamOpened, CommandAccepted]
    real = decide(session, _command(1, ended("a", "real")), epoch=1, at=AT)
    assert isinstance(real[1], CallEnded)
    queued = _command(
        0, msgspec.structs.replace(sends("next"), when_busy=WhenBusy.QUEUE), stream="t", secret="u"
    )
    other = _after_commands(OPENED, _command(0, sends()), queued)
    other = _after_command(other, asks(at_client("a")))
    waiting = decide(other, _command(1, ended("a", "forged"), stream="t", secret="u"), epoch=1, at=AT)
    assert [type(record) for record in waiting] == [CommandAccepted]


def _after_command(session: Session, command: Command) -> Session:
    return fold([(1, record) for record in decide(session, command, epoch=1, at=AT)], session)


# --- the rest of the fold ---------------------------------------------------------------------------------------


@spec("TURN-2")
def test_turns_are_counted() -> None:
    session = _after_command(_after_command(OPENED, sends("one")), answers())
    assert (session.turns, session.is_live) == (1, False)
    records = decide(session, sends("two"), epoch=1, at=AT)
    assert isinstance(records[0], MessageAccepted)
    assert records[0].turn == 2


def test_the_session_records_the_end_of_its_last_turn_and_its_own_beginning() -> None:
    session = _after_command(_after_command(OPENED, sends()), answers())
    assert session.last_turn == TurnEnded(1, TurnStatus.COMPLETED, AT)
    assert session.started_at == AT
    later = evolve(session, EpochStarted(2, "next", AT + 5), epoch=2)
    assert (later.started_at, later.epoch) == (AT, 2)


def test_a_fold_can_continue_from_an_earlier_fold() -> None:
    journal = [(1, record) for record in decide(OPENED, sends(), epoch=1, at=AT)]
    assert fold(journal[1:], fold(journal[:1], OPENED)) == fold(journal, OPENED)


def test_a_partial_response_is_not_in_the_history() -> None:
    session = _after_command(_after_command(OPENED, sends("hi")), streams("half"))
    assert session.history.entries == (UserMessage.of("hi"),)
    session = _after_command(session, asks(reads("a")))
    assert session.history.entries == (UserMessage.of("hi"),)


@spec("TURN-27")
def test_entries_left_out_for_the_model_stay_in_the_history_and_in_every_later_fold() -> None:
    life = SessionLife()
    life.append((EpochStarted(1, "o", AT),), epoch=1)
    for turn in (1, 2):
        life.take(sends(f"question {turn}"), epoch=1)
        life.take(answers("x" * 50, turn=turn), epoch=1)
    life.take(sends("and now?"), epoch=1)
    whole = life.session.history
    life.take(overflows(3, turn=3), epoch=1)
    assert life.session.history == whole
    assert life.session.model_history == cut_history(whole, 3) != whole
    assert fold((epoch, decode(encode(record))) for epoch, record in life.journal) == life.session
    life.append((EpochStarted(2, "p", AT),), epoch=2)
    life.take(Recover(), epoch=2)
    life.take(answers("yes", turn=3, attempt=3), epoch=2)
    assert life.session.model_history.entries[:2] == cut_history(whole, 3).entries[:2]
    assert len(life.session.history.entries) == 6


@spec("TURN-26", "TURN-27")
@given(lives())
def test_a_cut_only_grows_and_leaves_the_newest_entry(life: SessionLife) -> None:
    for step in life.steps:
        assert step.before.cut <= step.after.cut
        entries = step.after.history.entries
        assert step.after.cut < len(entries) or not entries
        if entries and step.after.cut < len(entries) - 1:
            assert step.after.model_history.entries[-1] == entries[-1]


def _queued(words: str) -> SendMessage:
    return SendMessage(UserMessage.of(words), when_busy=WhenBusy.QUEUE)


def _with_result(content: str) -> Session:
    session = _live(sends(), asks(reads("a")))
    records, _ = split_large_results(decide(session, ended("a", content), epoch=1, at=AT))
    return fold([(1, record) for record in records], session)


@spec("TURN-30")
def test_a_turn_cut_within_a_response_continues_with_an_instruction_to_the_model() -> None:
    session = _live(sends(), streams("half a sen"), fails(retriable=False), Resume())
    assert session.history.entries[-1] == UserMessage.of(CONTINUE)
    session = _live(sends(), asks(reads("a")), ended("a"), fails(retriable=False, response=2), Resume())
    assert isinstance(session.history.entries[-1], Step)


def _live(*commands: Command | Received) -> Session:
    session = fold([(1, EpochStarted(1, "node-1", AT))])
    for command in commands:
        session = _fold(session, command)
    return session


def _fold(session: Session, command: Command | Received) -> Session:
    return fold([(1, record) for record in decide(session, command, epoch=1, at=AT)], session)


# --- changing tools
# ---------------------------------------------------------------------------------------------


def _tools_found(
    *names: str, turn: int = 1, attempt: int = 1, unreachable: tuple[str, ...] = ()
) -> ToolsFound:
    return ToolsFound(turn, 1, attempt, frozenset(names), frozenset(unreachable))


@spec("TURN-42")
def test_a_change_of_the_tools_is_recorded_once_against_the_last_recorded_state() -> None:
    session = fold((1, record) for record in decide(Session(), sends(), epoch=1, at=AT))
    assert decide(session, _tools_found(), epoch=1, at=AT) == ()
    for found, changed in (
        (_tools_found("b", "a"), ToolsChanged(1, AT, added=("a", "b"))),
        (_tools_found("b", "c", unreachable=("x",)), ToolsChanged(1, AT, ("c",), ("a",), ("x",))),
        (_tools_found("b", "c"), ToolsChanged(1, AT)),
        (_tools_found(), ToolsChanged(1, AT, removed=("b", "c"))),
    ):
        assert decide(session, found, epoch=1, at=AT) == (changed,)
        session = fold([(1, changed)], session)
        assert decide(session, found, epoch=1, at=AT) == ()


@spec("TURN-9", "TURN-42")
def test_tools_found_for_another_model_call_are_not_recorded() -> None:
    assert decide(Session(), _tools_found("a"), epoch=1, at=AT) == ()
    session = fold((1, record) for record in decide(Session(), sends(), epoch=1, at=AT))
    assert decide(session, _tools_found("a", attempt=2), epoch=1, at=AT) == ()
    assert decide(session, _tools_found("a", turn=2), epoch=1, at=AT) == ()


@spec("STREAM-60", "STREAM-61")
@given(lives())
def test_a_journal_folds_to_the_same_session_wherever_it_was_pruned(life: SessionLife) -> None:
    state = Session()
    for number, (epoch, record) in enumerate(life.journal, start=1):
        state = evolve(state, record, epoch=epoch)
        if not is_prunable(state):
            assert not isinstance(state.turn, Idle)
            continue
        begins = decode(encode(prune_session(state, at=AT)))
        assert isinstance(begins, JournalPruned)
        assert restore_session(begins) == state
        assert fold([(epoch, begins), *life.journal[number:]]) == life.session


@spec("STREAM-60")
def test_a_pruned_journal_of_an_older_version_can_still_be_folded() -> None:
    kept = b"""{"type":"journal_pruned","state":{"position":9,"epoch":3,"turn":{"type":"idle","left":null},"turns":1,
    "history":{"entries":[{"type":"user","parts":[{"type":"text","text":"hi"}]},{"type":"step","response":{"parts":[
    {"type":"text","text":"hello"}]}}]},"has_blobs":false,"cut":0,"streams":{"k":{"secret_digest":"d","since":1,"epoch":3,
    "turn":1,"queued":0,"digests":["e"]}},"queue":[],"queued":0,"unsettled":[],"parent":null,"driver":"","last_turn":{
    "type":"turn_ended","turn":1,"status":"completed","at":5.0},"found":["a"],"unreachable":[],"started_at":1.0},
    "at":7.0,"version":1}"""
    state = fold([(3, decode(kept))])
    assert (state.position, state.epoch, state.turns, state.turn) == (9, 3, 1, Idle())
    assert state.history.entries == (UserMessage.of("hi"), Step(Response((Text("hello"),))))
    assert state.streams["k"].digests == ("e",)
    assert state.last_turn == TurnEnded(1, TurnStatus.COMPLETED, 5.0)


def test_a_pruned_journal_stores_a_pending_model_call_with_the_names_of_the_format() -> None:
    stored = msgspec.json.decode(prune_session(Session(turn=AwaitingModel(1, 1)), at=AT).state)
    assert stored["turn"] == {
        "type": "awaiting_model",
        "turn": 1,
        "response_no": 1,
        "terms": {"tools": [], "timeout_s": 0.0, "responses_max": 0, "request": None},
        "attempt": 0,
        "epoch": 0,
        "failures": 0,
        "is_compacted": False,
        "not_before": 0.0,
        "touched_at": 0.0,
        "deadline_at": 0.0,
        "is_last": False,
        "said": [],
        "token": "",
        "continued": 0,
        "is_mute": False,
        "questions": [],
        "waits_since": 0.0,
        "is_upstream": False,
    }


@spec("STREAM-61")
def test_a_journal_cannot_be_pruned_within_a_turn_of_a_foreign_loop() -> None:
    opened = MessageAccepted(1, UserMessage.of("hi"), AT, driver="pydantic-ai")
    state = fold([(1, EpochStarted(1, "host", AT)), (1, opened)])
    assert not is_prunable(state)
    assert is_prunable(evolve(state, TurnEnded(1, TurnStatus.COMPLETED, AT), epoch=1))


def test_a_message_without_a_time_limit_gets_that_of_the_agent() -> None:
    message = SendMessage(UserMessage.of("hi"))
    short = SendMessage(UserMessage.of("hi"), timeout_s=5.0)
    received = Received("stream", "secret", 0, "digest", message)
    timed = SendMessage(UserMessage.of("hi"), timeout_s=60.0)
    assert with_turn_limit(message, 0.0) is message
    assert with_turn_limit(message, 60.0) == timed
    assert with_turn_limit(short, 60.0) is short
    assert with_turn_limit(received, 60.0) == Received("stream", "secret", 0, "digest", timed)
    assert with_turn_limit(Cancel(), 60.0) == Cancel()
