"""Lives of a session: random commands in any order, some apt, some out of place, over several owners."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec import Struct, field

from midstream.core import session as sessions
from midstream.core.calls import CallPlan, Site
from midstream.core.compaction import next_cut
from midstream.core.messages import Finish, Outcome, Reply, Result, Text, Thinking
from midstream.core.records import EpochStarted, Record
from midstream.core.session import Session
from midstream.core.turn import (
    LOOK_BACK_S,
    AwaitingModel,
    CallExpired,
    CallFinished,
    Cancel,
    CancelExpired,
    Cancelling,
    Command,
    Idle,
    ModelReplied,
    Recover,
    Refused,
    RunningCalls,
)
from tests.core.stories import AT, asks, at_client, fails, heard, impossible, overflows, reads, say, writes

CALL_IDS = ("a", "b", "c", "d")

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
small = st.integers(0, 3)
outcomes = st.sampled_from(Outcome)


class Step(Struct):
    """A command, what it was decided to (None: refused), and the session before and after."""

    before: Session
    command: Command
    records: tuple[Record, ...] | None
    after: Session
    epoch: int


class Life(Struct):
    """What happened to one session."""

    steps: list[Step] = field(default_factory=list)
    journal: list[tuple[int, Record]] = field(default_factory=list)
    session: Session = field(default_factory=Session)
    at: float = AT

    def take(self, command: Command, *, epoch: int) -> None:
        """Let one command be decided, and fold what comes of it."""
        before = self.session
        try:
            records = sessions.decide(before, command, epoch=epoch, at=self.at)
        except Refused:
            self.steps.append(Step(before, command, None, before, epoch))
            return
        self.append(records, epoch=epoch)
        self.steps.append(Step(before, command, records, self.session, epoch))

    def append(self, records: tuple[Record, ...], *, epoch: int) -> None:
        """Put records into the journal and fold them."""
        self.journal += [(epoch, record) for record in records]
        self.session = sessions.fold([(epoch, record) for record in records], self.session)


_makers = st.lists(
    st.sampled_from([reads, writes, at_client, impossible]), min_size=1, max_size=len(CALL_IDS)
)


def batches() -> st.SearchStrategy[tuple[CallPlan, ...]]:
    """Plans of one reply's calls: reading, writing, at a client, impossible."""
    return _batches


_batches = _makers.map(
    lambda makers: tuple(make(call_id) for make, call_id in zip(makers, CALL_IDS, strict=False))
)
_places = st.tuples(small, small, small)
_ids = st.sampled_from([*CALL_IDS, "", "nobody"])
_waits = st.sampled_from([0.0, 1.0, 60.0, 3 * 60 * 60.0])
_dice = st.integers(0, 11)


def _stray(draw: st.DrawFn) -> Command:
    """Draw a command about anything at all."""
    turn, reply, attempt = draw(_places)
    ids = {"turn": turn, "reply": reply, "attempt": attempt}
    call_id = draw(_ids)
    commands: list[Command] = [
        heard("stray", **ids),
        asks(writes("a"), reads("b"), **ids),
        fails(retriable=True, turn=turn, reply=reply, attempt=attempt),
        CallFinished(turn, reply, Result(call_id, "stray")),
        CallExpired(turn, reply, call_id),
        Cancel(turn),
        CancelExpired(turn),
        Recover(LOOK_BACK_S),
        say("stray"),
    ]
    return draw(st.sampled_from(commands))


def _apt(draw: st.DrawFn, session: Session) -> Command:
    """Draw a command that somebody would send in this state."""
    state = session.turn
    match state:
        case Idle():
            return say(draw(words))
        case AwaitingModel():
            return _apt_model(draw, state, session)
        case RunningCalls() | Cancelling():
            running = [call for call in state.calls if call.is_running]
            commands: list[Command] = [Cancel(), CancelExpired(state.turn)]
            if running and draw(_dice) > 1:
                call = draw(st.sampled_from(running))
                if call.plan.site is Site.CLIENT and draw(st.booleans()):
                    return CallExpired(state.turn, state.reply_no, call.call.id)
                result = Result(call.call.id, draw(words), draw(outcomes))
                return CallFinished(state.turn, state.reply_no, result)
            return draw(st.sampled_from(commands))


def _apt_model(draw: st.DrawFn, state: AwaitingModel, session: Session) -> Command:
    turn, reply, attempt = state.turn, state.reply_no, state.attempt
    match draw(_dice):
        case 7:
            cut = next_cut(session.history, session.cut)
            return overflows(cut, turn=turn, reply=reply, attempt=attempt)
        case 0:
            return Cancel(turn)
        case 1 | 2:
            return fails(retriable=draw(st.booleans()), turn=turn, reply=reply, attempt=attempt)
        case 3 | 4:
            parts = (Thinking(draw(words), "sig"), Text(draw(words)))
            return ModelReplied(turn, reply, attempt, Reply(parts, Finish.STOP))
        case 5 | 6:
            return heard(draw(words), draw(words), turn=turn, reply=reply, attempt=attempt)
        case _:
            return asks(*draw(_batches), turn=turn, reply=reply, attempt=attempt)


@st.composite
def lives(draw: st.DrawFn, steps_max: int = 20) -> Life:
    """Draw a life."""
    life = Life()
    epoch = 0
    for _ in range(draw(st.integers(1, steps_max))):
        kind = draw(st.integers(0, 9))
        if epoch == 0 or kind == 0:
            epoch += 1
            life.append((EpochStarted(epoch, f"owner-{epoch}", life.at),), epoch=epoch)
            life.take(Recover(), epoch=epoch)
        elif kind <= 2:
            life.take(_stray(draw), epoch=epoch)
        else:
            life.take(_apt(draw, life.session), epoch=epoch)
        life.at += draw(_waits)
    return life
