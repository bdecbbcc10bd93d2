"""Random lives of a session: commands in any order, fitting or misplaced, over several nodes."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec import Struct, field

from midstream.history.compaction import next_cut
from midstream.history.messages import Finish, Outcome, Response, Text, Thinking, ToolResult
from midstream.session import session as sessions
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import (
    CHOICES,
    CallPlan,
    CallState,
    Choice,
    OnDoubt,
    QuestionKind,
    Site,
    digest_of,
)
from midstream.session.records import EpochStarted, Record, ReuseDecision
from midstream.session.session import Session
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
    ModelResponded,
    ModelResumable,
    ModelReuseDecided,
    PermissionRequested,
    PermissionWithdrawn,
    QuestionExpired,
    Recover,
    Refused,
    Resume,
    SendMessage,
    Stalled,
    StallFinished,
    TurnExpired,
    UseAnswer,
    WhenBusy,
    Withdraw,
)
from midstream.session.turn.states import LOOK_BACK_S, AwaitingModel, Cancelling, Idle, RunningCalls
from midstream.timing import StalledOn
from tests.session.turn_stories import (
    AT,
    asks,
    at_child,
    at_client,
    at_person,
    breaks,
    fails,
    impossible,
    needs_approval,
    overflows,
    reads,
    sends,
    streams,
    writes,
)

CALL_IDS = ("a", "b", "c", "d")

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
small = st.integers(0, 3)
outcomes = st.sampled_from(Outcome)


class LifeStep(Struct):
    """A command, the records it was decided to (None: refused), and the session before and after."""

    before: Session
    command: Command
    records: tuple[Record, ...] | None
    after: Session
    epoch: int


class SessionLife(Struct):
    """The history of one session."""

    steps: list[LifeStep] = field(default_factory=list)
    journal: list[tuple[int, Record]] = field(default_factory=list)
    session: Session = field(default_factory=Session)
    at: float = AT

    def take(self, command: Command, *, epoch: int) -> None:
        """Decide one command, and fold its records."""
        before = self.session
        try:
            records = sessions.decide(before, command, epoch=epoch, at=self.at)
        except Refused:
            self.steps.append(LifeStep(before, command, None, before, epoch))
            return
        self.append(records, epoch=epoch)
        self.steps.append(LifeStep(before, command, records, self.session, epoch))

    def append(self, records: tuple[Record, ...], *, epoch: int) -> None:
        """Append records to the journal and fold them."""
        self.journal += [(epoch, record) for record in records]
        self.session = sessions.fold([(epoch, record) for record in records], self.session)


def _held(call_id: str) -> CallPlan:
    return writes(call_id, OnDoubt.HOLD)


def _probed(call_id: str) -> CallPlan:
    return writes(call_id, OnDoubt.PROBE)


def _keyed(call_id: str) -> CallPlan:
    return needs_approval(call_id, OnDoubt.RERUN_WITH_KEY, answer_s=90.0)


def _approved_probe(call_id: str) -> CallPlan:
    return needs_approval(call_id, OnDoubt.PROBE)


_makers = st.lists(
    st.sampled_from(
        [
            reads,
            writes,
            at_client,
            impossible,
            at_person,
            at_child,
            needs_approval,
            _held,
            _probed,
            _keyed,
            _approved_probe,
        ]
    ),
    min_size=1,
    max_size=len(CALL_IDS),
)


def batches() -> st.SearchStrategy[tuple[CallPlan, ...]]:
    """Plans of one response's calls: reading, writing, at a client, impossible."""
    return _batches


_batches = _makers.map(
    lambda makers: tuple(make(call_id) for make, call_id in zip(makers, CALL_IDS, strict=False))
)
_places = st.tuples(small, small, small)
_ids = st.sampled_from([*CALL_IDS, "", "nobody"])
_waits = st.sampled_from([0.0, 1.0, 60.0, 3 * 60 * 60.0])
_limits = st.sampled_from([0.0, 0.0, 30.0])
_digests = st.sampled_from([digest_of("work", "{}"), "another"])
_dice = st.integers(0, 11)


def _stray(draw: st.DrawFn) -> Command:
    """Draw a command about any call, turn or question."""
    turn, response, attempt = draw(_places)
    ids = {"turn": turn, "response": response, "attempt": attempt}
    call_id = draw(_ids)
    commands: list[Command] = [
        streams("stray", **ids),
        asks(writes("a"), reads("b"), **ids),
        fails(retriable=True, turn=turn, response=response, attempt=attempt),
        CallFinished(turn, response, ToolResult(call_id, "stray")),
        CallExpired(CallRef(turn, response, call_id)),
        Cancel(turn),
        CancelExpired(turn),
        CallProbed(CallRef(turn, response, call_id), may_run=draw(st.booleans())),
        CallProgress(CallRef(turn, response, call_id), 1, "stray"),
        ModelResumable(AttemptRef(turn, response, attempt), "stray"),
        ModelReuseDecided(
            AttemptRef(turn, response, attempt), ReuseDecision("new", "nothing is known of it", "fresh")
        ),
        Stalled(turn, response, StalledOn.FIRST_TOKEN, 1.0, draw(_ids)),
        StallFinished(turn, response, StalledOn.TOOL, 1.0, draw(_ids)),
        ChildStreamed(CallRef(turn, response, call_id), "s::1.1.0", ((draw(small), b"{}"),)),
        Answer(CallRef(turn, response, call_id), draw(_digests), draw(st.sampled_from(Choice))),
        QuestionExpired(CallRef(turn, response, call_id)),
        PermissionRequested(AttemptRef(turn, response, attempt), call_id, "work", "{}"),
        PermissionWithdrawn(AttemptRef(turn, response, attempt), call_id),
        UseAnswer(AttemptRef(turn, response, attempt), call_id),
        TurnExpired(turn),
        Resume(draw(st.sampled_from([None, turn]))),
        Withdraw(draw(st.sampled_from([None, turn]))),
        Recover(LOOK_BACK_S),
        sends("stray"),
        _queued(draw),
    ]
    return draw(st.sampled_from(commands))


def _queued(draw: st.DrawFn) -> SendMessage:
    newest = sends(draw(words))
    responses_max = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return SendMessage(
        newest.message, when_busy=WhenBusy.QUEUE, timeout_s=draw(_limits), responses_max=responses_max
    )


def _apt(draw: st.DrawFn, session: Session) -> Command:
    """Draw a command that fits this state."""
    state = session.turn
    match state:
        case Idle():
            if state.left is not None and draw(st.booleans()):
                return Resume()
            return _queued(draw)
        case AwaitingModel():
            return _apt_model(draw, state, session)
        case RunningCalls() | Cancelling():
            running = [call for call in state.calls if call.is_running]
            commands: list[Command] = [Cancel(), CancelExpired(state.turn), TurnExpired(state.turn)]
            waiting = [call for call in state.calls if call.is_asking or (call.is_open and call.is_in_doubt)]
            if waiting and draw(_dice) > 1:
                return _apt_answer(draw, state, draw(st.sampled_from(waiting)))
            if running and draw(_dice) > 1:
                call = draw(st.sampled_from(running))
                if call.plan.site is Site.CLIENT and draw(st.booleans()):
                    return CallExpired(CallRef(state.turn, state.response_no, call.call.id))
                result = ToolResult(call.call.id, draw(words), draw(outcomes))
                return CallFinished(state.turn, state.response_no, result)
            return draw(st.sampled_from(commands))


def _apt_answer(draw: st.DrawFn, state: RunningCalls | Cancelling, call: CallState) -> Command:
    place = CallRef(state.turn, state.response_no, call.call.id)
    if call.asked is None:
        result = ToolResult(call.call.id, draw(words)) if draw(st.booleans()) else None
        return CallProbed(place, result, may_run=draw(st.booleans()))
    if draw(_dice) == 0:
        return QuestionExpired(place)
    choice = draw(st.sampled_from(CHOICES[call.asked]))
    is_edited = call.asked is QuestionKind.APPROVAL and draw(st.booleans())
    arguments = '{"edited": true}' if is_edited else None
    return Answer(place, call.plan.digest, choice, draw(words), arguments)


def _apt_model(draw: st.DrawFn, state: AwaitingModel, session: Session) -> Command:
    turn, response, attempt = state.turn, state.response_no, state.attempt
    if state.questions and draw(_dice) > 4:
        return _apt_permission(draw, state)
    match draw(_dice):
        case 7:
            cut = next_cut(session.history, session.cut)
            return overflows(cut, turn=turn, response=response, attempt=attempt)
        case 0:
            return Cancel(turn)
        case 1 | 2:
            if draw(st.booleans()):
                return breaks(turn=turn, response=response, attempt=attempt)
            return fails(retriable=draw(st.booleans()), turn=turn, response=response, attempt=attempt)
        case 9:
            return PermissionRequested(
                AttemptRef(turn, response, attempt),
                f"leave-{session.position}",
                "work",
                "{}",
                answer_s=draw(_limits),
                is_fixed=draw(st.booleans()),
                is_vague=draw(st.booleans()),
            )
        case 8:
            return ModelResumable(AttemptRef(turn, response, attempt), draw(words))
        case 3 | 4:
            parts = (Thinking(draw(words), "sig"), Text(draw(words)))
            return ModelResponded(AttemptRef(turn, response, attempt), Response(parts, Finish.STOP))
        case 5 | 6:
            return streams(draw(words), draw(words), turn=turn, response=response, attempt=attempt)
        case _:
            return asks(*draw(_batches), turn=turn, response=response, attempt=attempt)


def _apt_permission(draw: st.DrawFn, state: AwaitingModel) -> Command:
    question = draw(st.sampled_from(state.questions))
    if not question.is_open:
        kind = UseAnswer if draw(_dice) else PermissionWithdrawn
        return kind(state.ref, question.id)
    if draw(_dice) == 0:
        return PermissionWithdrawn(state.ref, question.id)
    if draw(_dice) == 0:
        return QuestionExpired(CallRef(state.turn, state.response_no, question.id))
    choice = draw(st.sampled_from(CHOICES[QuestionKind.APPROVAL]))
    arguments = '{"edited": true}' if draw(st.booleans()) else None
    ref = CallRef(state.turn, state.response_no, question.id)
    return Answer(ref, question.digest, choice, draw(words), arguments)


@st.composite
def lives(draw: st.DrawFn, steps_max: int = 20) -> SessionLife:
    """Draw a life."""
    life = SessionLife()
    epoch = 0
    for _ in range(draw(st.integers(1, steps_max))):
        kind = draw(st.integers(0, 9))
        if epoch == 0 or kind == 0:
            epoch += 1
            life.append((EpochStarted(epoch, f"node-{epoch}", life.at),), epoch=epoch)
            life.take(Recover(), epoch=epoch)
        elif kind <= 2:
            life.take(_stray(draw), epoch=epoch)
        else:
            life.take(_apt(draw, life.session), epoch=epoch)
        life.at += draw(_waits)
    return life
