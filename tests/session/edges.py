"""Find every edge of the machine by exhaustive search of a small world; no edge is written down by hand.

The search starts with an empty session and gives each command, fitting or misplaced, to every reached state.
States that differ only in irrelevant parts (times, texts, positions) count as one, which keeps the search
finite: batches of one or two calls, two responses of a turn, one message in the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from midstream.history.messages import Outcome, ToolResult
from midstream.session import session as sessions
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import CallPlan, CallState, Choice, OnDoubt
from midstream.session.records import EpochStarted, Record, ReuseDecision, TurnEnded
from midstream.session.rerun_policy import RERUNS_MAX
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
    ModelResumable,
    ModelReuseDecided,
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
from midstream.session.turn.states import (
    LOOK_BACK_S,
    MODEL_CALLS_MAX,
    AgentQuestion,
    AwaitingModel,
    Cancelling,
    Idle,
    RunningCalls,
)
from midstream.timing import StalledOn
from tests.session.turn_stories import (
    AT,
    answers,
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
    requests_permission,
    sends,
    streams,
    writes,
)

LATER_S = LOOK_BACK_S + 3600.0
STATES_MAX = 20_000
"""Number of states above which the search counts as too wide."""

REUSE = ReuseDecision("new", "no record", "fresh")


class MachineEdge(NamedTuple):
    """One transition of a state by a command.

    Args:
        state: The state of the turn.
        command: The command.
        records: The kinds of records that were appended, each once in a row; a refusal's code in brackets.
        after: The state of the turn after it.
    """

    state: str
    command: str
    records: tuple[str, ...]
    after: str


class RecordEffect(NamedTuple):
    """The effect of one record on a turn."""

    state: str
    record: str
    after: str


class ExploredMachine(Struct):
    """The result of the search."""

    edges: dict[MachineEdge, int] = field(default_factory=dict)
    """Each with the number of times it was taken."""
    steps: set[RecordEffect] = field(default_factory=set)
    states: list[Session] = field(default_factory=list)
    """One session for each state that decisions distinguish."""

    def pairs(self) -> set[tuple[str, str]]:
        """Return the kinds of states with the kinds of commands given to them."""
        return {(edge.state, edge.command) for edge in self.edges}


def edge_of(
    before: Session, command: Command, records: tuple[Record, ...] | Refused, after: Session
) -> MachineEdge:
    """Return the edge of a command."""
    if isinstance(records, Refused):
        content: tuple[str, ...] = (f"[{records.error.code}]",)
    else:
        kinds = [_kind(record) for record in records]
        content = tuple(kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind)
    return MachineEdge(_kind(before.turn), _kind(command), content, _kind(after.turn))


def steps_of(session: Session, records: tuple[Record, ...], *, epoch: int) -> Iterator[RecordEffect]:
    """Yield the effect of each of these records on the turn."""
    for record in records:
        after = sessions.evolve(session, record, epoch=epoch)
        yield RecordEffect(_kind(session.turn), _kind(record), _kind(after.turn))
        session = after


@cache
def explored() -> ExploredMachine:
    """Search the whole machine in a small world."""
    found = ExploredMachine()
    begin = sessions.fold([(1, EpochStarted(1, "node", AT))])
    waiting = deque([begin, _after_many_responses(begin)])
    known = {_key(each) for each in waiting}
    while waiting:
        session = waiting.popleft()
        found.states.append(session)
        assert len(found.states) < STATES_MAX, "the search does not end"
        for command, epoch, at in _commands(session):
            before = session
            if epoch > session.epoch:
                begun: tuple[Record, ...] = (EpochStarted(epoch, "next node", at),)
                found.steps.update(steps_of(session, begun, epoch=epoch))
                before = sessions.fold([(epoch, each) for each in begun], session)
            after = _take(found, before, command, epoch=epoch, at=at)
            if after is not session and _is_small(after) and (key := _key(after)) not in known:
                known.add(key)
                waiting.append(after)
    return found


def _take(found: ExploredMachine, before: Session, command: Command, *, epoch: int, at: float) -> Session:
    after = before
    records: tuple[Record, ...] | Refused
    try:
        records = sessions.decide(before, command, epoch=epoch, at=at)
    except Refused as refused:
        records = refused
    else:
        for record in records:
            following = sessions.evolve(after, record, epoch=epoch)
            found.steps.add(RecordEffect(_kind(after.turn), _kind(record), _kind(following.turn)))
            after = following
    edge = edge_of(before, command, records, after)
    found.edges[edge] = found.edges.get(edge, 0) + 1
    return after


# --- the commands
# ---------------------------------------------------------------------------------------------------

_SINGLE = (
    reads("a"),
    writes("a"),
    writes("a", OnDoubt.HOLD),
    writes("a", OnDoubt.PROBE),
    writes("a", OnDoubt.IN_TRANSACTION),
    at_client("a"),
    at_person("a", 60.0),
    at_child("a"),
    impossible("a"),
    needs_approval("a", answer_s=60.0),
    needs_approval("a", OnDoubt.RERUN),
    needs_approval("a", OnDoubt.PROBE),
)
_PAIRS = (
    (reads("a"), reads("b")),
    (writes("a"), writes("b", OnDoubt.RERUN_WITH_KEY)),
    (at_child("a"), at_person("b")),
    (impossible("a"), at_client("b")),
    (needs_approval("a", OnDoubt.HOLD), reads("b")),
)
_BATCHES: tuple[tuple[CallPlan, ...], ...] = (*((plan,) for plan in _SINGLE), *_PAIRS)
_FEW = _BATCHES[:2] + _BATCHES[7:8]
"""Batches for states where the calls themselves are irrelevant."""


def _commands(session: Session) -> Iterator[tuple[Command, int, float]]:
    """Yield every command to try, with its epoch and time."""
    epoch, state = session.epoch, session.turn
    for command in (*_from_people(session), *_from_model(session), *strays(session)):
        yield command, epoch, AT
    for call in state.calls if isinstance(state, RunningCalls | Cancelling) else ():
        for command in _about(state, call):  # type: ignore[arg-type]
            yield command, epoch, AT
        if call.is_asking:
            yield QuestionExpired(CallRef(state.turn, state.response_no, call.call.id)), epoch, AT + LATER_S  # type: ignore[union-attr]
    if isinstance(state, AwaitingModel):
        for question in state.questions:
            yield from ((command, epoch, AT) for command in _about_question(state, question))
            yield QuestionExpired(CallRef(state.turn, state.response_no, question.id)), epoch, AT + LATER_S
    yield Recover(), epoch, AT
    yield Recover(), epoch + 1, AT
    yield Recover(), epoch + 1, AT + LATER_S


def _from_people(session: Session) -> Iterator[Command]:
    turn = session.turns
    yield sends()
    yield SendMessage(sends().message, when_busy=WhenBusy.QUEUE)
    yield SendMessage(sends().message, timeout_s=30.0)
    yield SendMessage(sends().message, timeout_s=30.0, responses_max=1)
    yield SendMessage(sends().message, keep=0, before=(sends().message,), turns=turn)
    yield SendMessage(sends().message, keep=0, turns=turn + 1)
    yield from (Withdraw(), Withdraw(session.queued), Withdraw(session.queued + 1))
    yield from (Cancel(), Cancel(turn), CancelExpired(turn), TurnExpired(turn))
    yield from (Resume(), Resume(turn))


def _from_model(session: Session) -> Iterator[Command]:
    state = session.turn
    if not isinstance(state, AwaitingModel):
        return
    is_plain = not (session.queue or state.terms.timeout_s or state.failures or state.response_no > 1)
    place = {"turn": state.turn, "response": state.response_no, "attempt": state.attempt}
    yield streams("some", **place)
    yield ModelResumable(state.ref, "token")
    yield ModelReuseDecided(state.ref, REUSE)
    yield from (
        kind(state.turn, state.response_no, StalledOn.FIRST_TOKEN, 30.0) for kind in (Stalled, StallFinished)
    )
    yield answers(turn=state.turn, response=state.response_no, attempt=state.attempt)
    yield from (asks(*batch, **place) for batch in (_BATCHES if is_plain else _FEW))
    yield from (fails(retriable=True, **place), fails(retriable=False, **place))
    yield from (overflows(1, **place), overflows(None, **place))
    yield breaks(**place)
    if is_plain and not state.deltas:  # Questions are examined where there is little else.
        asked = requests_permission(
            f"leave-{state.attempt}", turn=state.turn, response=state.response_no, attempt=state.attempt
        )
        yield from (asked, replace(asked, answer_s=60.0, is_fixed=True), replace(asked, is_vague=True))


def _about_question(state: AwaitingModel, question: AgentQuestion) -> Iterator[Command]:
    """Yield every command about a permission that an upstream agent requests."""
    ref = CallRef(state.turn, state.response_no, question.id)
    for choice in Choice:
        yield Answer(ref, question.digest, choice, "said")
    yield Answer(ref, question.digest, Choice.ALLOW, arguments='{"edited": true}')
    yield Answer(ref, question.digest, Choice.ALLOW, arguments="no object")
    yield Answer(ref, "of other arguments", Choice.ALLOW)
    yield QuestionExpired(ref)
    for attempt in {question.attempt, state.attempt}:
        of_attempt = AttemptRef(state.turn, state.response_no, attempt)
        yield PermissionWithdrawn(of_attempt, question.id)
        yield UseAnswer(of_attempt, question.id)


def _about(state: RunningCalls | Cancelling, call: CallState) -> Iterator[Command]:
    """Yield every command about a call."""
    place = (state.turn, state.response_no)
    call_id = call.call.id
    ref = CallRef(*place, call_id)
    yield from (
        CallFinished(*place, ToolResult(call_id, "said", each)) for each in (Outcome.OK, Outcome.UNKNOWN)
    )
    yield CallExpired(ref)
    yield CallProgress(ref, call.runs, "half")
    yield from (kind(*place, StalledOn.TOOL, 30.0, call_id) for kind in (Stalled, StallFinished))
    yield ChildStreamed(ref, "s::1.1.0", ((call.child_position + 1, b"{}"),))
    yield ChildStreamed(ref, "s::1.1.0", ((call.child_position, b"{}"),))
    yield CallProbed(ref, ToolResult(call_id, "it did"))
    yield from (CallProbed(ref, may_run=may_run) for may_run in (True, False))
    for choice in Choice:
        yield Answer(ref, call.plan.digest, choice, "said")
    yield Answer(ref, call.plan.digest, Choice.ALLOW, arguments='{"edited": true}')
    yield Answer(ref, "of other arguments", Choice.ALLOW)
    yield QuestionExpired(ref)


def strays(session: Session) -> Iterator[Command]:
    """Yield one command of each kind about something else."""
    turn = session.turns + 7
    place = {"turn": turn, "response": 1, "attempt": 1}
    yield from (streams("stray", **place), answers(turn=turn), fails(turn=turn))
    yield from (Cancel(turn), CancelExpired(turn), TurnExpired(turn), Resume(turn))
    yield CallFinished(turn, 1, ToolResult("a", "stray"))
    yield CallExpired(CallRef(turn, 1, "a"))
    yield CallProgress(CallRef(turn, 1, "a"), 1, "stray")
    yield ModelResumable(AttemptRef(turn, 1, 1), "token")
    yield ModelReuseDecided(AttemptRef(turn, 1, 1), REUSE)
    yield from (kind(turn, 1, StalledOn.TOOL, 30.0, "a") for kind in (Stalled, StallFinished))
    yield ChildStreamed(CallRef(turn, 1, "a"), "s::1.1.0", ((1, b"{}"),))
    yield CallProbed(CallRef(turn, 1, "a"), may_run=True)
    yield Answer(CallRef(turn, 1, "a"), "digest", Choice.ALLOW)
    yield QuestionExpired(CallRef(turn, 1, "a"))
    yield requests_permission("a", turn=turn)
    yield PermissionWithdrawn(AttemptRef(turn, 1, 1), "a")
    yield UseAnswer(AttemptRef(turn, 1, 1), "a")
    for late in session.unsettled[-1:]:
        yield CallFinished(late.turn, late.response, ToolResult(late.call_id, "late"))


# --- equality of states
# ---------------------------------------------------------------------------------------------


def _after_many_responses(begin: Session) -> Session:
    """Return a session with all model calls of its turn made but the last permitted one."""
    opened = sessions.decide(begin, sends(), epoch=1, at=AT)
    session = sessions.fold([(1, each) for each in opened], begin)
    assert isinstance(session.turn, AwaitingModel)
    return replace(session, turn=replace(session.turn, response_no=MODEL_CALLS_MAX))


def _is_small(session: Session) -> bool:
    response_no = getattr(session.turn, "response_no", 1)
    questions = getattr(session.turn, "questions", ())
    return (
        len(questions) <= 1
        and len(session.queue) <= 1
        and (response_no <= 2 or response_no >= MODEL_CALLS_MAX)
    )


def _key(session: Session) -> tuple[object, ...]:
    """Return the parts that decisions depend on."""
    state = session.turn
    is_unsettled = isinstance(state, Idle) and bool(session.unsettled)
    about: tuple[object, ...] = (_kind(state), bool(session.queue), is_unsettled)
    match state:
        case Idle():
            left = state.left
            return (*about, left and (left.terms.timeout_s, left.terms.responses_max))
        case AwaitingModel():
            count = min(state.response_no, 2) if state.response_no < MODEL_CALLS_MAX else MODEL_CALLS_MAX
            flags = (state.is_compacted, state.is_last, bool(state.deltas), state.epoch == session.epoch)
            kept = (bool(state.token), state.is_mute)
            limits = (state.terms.timeout_s, state.terms.responses_max)
            asked = tuple(_question_key(each, state) for each in state.questions)
            return (*about, count, state.failures, *flags, *kept, *limits, asked)
        case RunningCalls() | Cancelling():
            count = min(state.response_no, 2) if state.response_no < MODEL_CALLS_MAX else MODEL_CALLS_MAX
            calls = tuple(_call_key(call, session.epoch) for call in state.calls)
            return (
                *about,
                count,
                state.terms.timeout_s,
                state.terms.responses_max,
                getattr(state, "status", ""),
                calls,
            )


def _question_key(question: AgentQuestion, state: AwaitingModel) -> tuple[object, ...]:
    is_waited_for = question.attempt == state.attempt
    about = (question.is_fixed, bool(question.expires_at), question.edited)
    return (question.is_open, question.is_expired, question.choice, is_waited_for, about)


def _call_key(call: CallState, epoch: int) -> tuple[object, ...]:
    outcome = call.result.outcome is Outcome.UNKNOWN if call.result else None
    return (
        call.plan.site,
        call.plan.on_doubt,
        call.plan.needs_approval,
        call.plan.answer_s,
        min(call.runs, RERUNS_MAX + 1),
        call.epoch == epoch,
        call.asked,
        call.is_in_doubt,
        call.is_allowed,
        call.is_edited,
        min(call.child_position, 1),
        outcome,
    )


def _kind(value: object) -> str:
    if isinstance(value, TurnEnded):
        return f"TurnEnded({value.status.value})"
    return type(value).__name__


# --- for people -----------------------------------------------------------------------------------------------------


def diagram(found: ExploredMachine) -> str:
    """Return the machine as a Mermaid diagram: the commands that lead from state to state."""
    ways: dict[tuple[str, str], set[str]] = {}
    for edge in found.edges:
        if edge.records and edge.state != edge.after:
            ways.setdefault((edge.state, edge.after), set()).add(edge.command)
    lines = [f"    {a} --> {b}: {', '.join(sorted(names))}" for (a, b), names in sorted(ways.items())]
    return "```mermaid\nstateDiagram-v2\n    [*] --> Idle\n" + "\n".join(lines) + "\n```\n"


def table(found: ExploredMachine) -> str:
    """Return all edges that append a record or refuse, as lines for a terminal."""
    return "\n".join(
        f"{count:7}  {edge.state:14} {edge.command:16} {' '.join(edge.records) or '-'} -> {edge.after}"
        for edge, count in sorted(found.edges.items())
    )


if __name__ == "__main__":
    print(table(explored()))  # noqa: T201 - a command prints the table
