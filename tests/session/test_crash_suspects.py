"""Sessions suspected of a server's death, by the journals."""

from __future__ import annotations

import pytest

from midstream.history.messages import Outcome, UpstreamCall
from midstream.session.call_references import AttemptRef
from midstream.session.crash_suspects import deaths_of, is_at_risk, is_at_work, is_untried
from midstream.session.records import Delta, EpochStarted
from midstream.session.session import Session, decide, evolve
from midstream.session.turn.commands import Command, ModelStreamed, Recover
from midstream.session.turn.states import SUSPECTED_MAX
from tests.session.turn_stories import (
    AT,
    answers,
    asks,
    at_client,
    ended,
    needs_approval,
    reads,
    sends,
    streams,
    writes,
)
from tests.spec import spec


def _start_epoch(session: Session, *, node: str = "a", epoch: int = 1, suspected: int = 0) -> Session:
    return evolve(session, EpochStarted(epoch, node, AT, suspected=suspected), epoch=epoch)


def _state_after(session: Session, *commands: Command) -> Session:
    for command in commands:
        for record in decide(session, command, epoch=session.epoch, at=AT):
            session = evolve(session, record, epoch=session.epoch)
    return session


def _upstream(outcome: Outcome | None) -> ModelStreamed:
    call = UpstreamCall("u", "shell", outcome=outcome)
    return ModelStreamed(AttemptRef(1, 1, 1), (Delta(1, 1, 1, 0, "thinking", "", call),))


IN_TOOL = _state_after(_start_epoch(Session()), sends(), asks(writes("w")))


@spec("TURN-84")
@pytest.mark.parametrize(
    ("commands", "is_suspect"),
    [
        ((), False),
        ((sends(),), False),
        ((sends(), streams("words")), False),
        ((sends(), asks(reads("r"))), True),
        ((sends(), asks(reads("r")), ended("r")), False),
        ((sends(), asks(at_client("c"))), False),
        ((sends(), asks(needs_approval("p"))), False),
        ((sends(), answers()), False),
        ((sends(), _upstream(None)), True),
        ((sends(), _upstream(Outcome.OK)), False),
    ],
)
def test_only_a_session_with_code_running_in_the_server_is_a_suspect(
    commands: tuple[Command, ...], *, is_suspect: bool
) -> None:
    session = _state_after(_start_epoch(Session()), *commands)
    assert is_at_risk(session) is is_suspect
    assert deaths_of(session, []) == int(is_suspect)


@spec("TURN-84")
def test_a_further_death_counts_where_no_other_suspect_was_at_risk() -> None:
    suspect = _state_after(
        _start_epoch(IN_TOOL, node="b", epoch=2, suspected=1), Recover(), asks(writes("w"), response=2)
    )
    assert deaths_of(suspect, []) == 2
    assert deaths_of(suspect, [IN_TOOL]) == 2, "the other one was none before"
    assert deaths_of(suspect, [suspect]) == 1
    resting = _state_after(_start_epoch(IN_TOOL, node="b", epoch=2, suspected=1), Recover())
    assert deaths_of(resting, []) == 0
    assert deaths_of(suspect, [resting]) == 2


@spec("TURN-84")
def test_a_suspect_that_was_held_back_stays_one_and_cannot_have_caused_the_death() -> None:
    held = _start_epoch(IN_TOOL, node="b", epoch=2, suspected=1)
    assert is_untried(held)
    assert not is_at_risk(held)
    assert deaths_of(held, []) == 1


@spec("TURN-84")
def test_the_next_message_ends_all_suspicion() -> None:
    suspect = _start_epoch(IN_TOOL, node="b", epoch=2, suspected=SUSPECTED_MAX)
    after = _state_after(suspect, Recover(), answers(response=2))
    assert after.suspected == SUSPECTED_MAX
    assert _state_after(after, sends()).suspected == 0


@spec("TURN-84")
def test_a_trial_ends_when_the_turn_ended_or_waits_for_clients_and_people() -> None:
    assert is_at_work(IN_TOOL)
    assert is_at_work(_state_after(_start_epoch(Session()), sends()))
    assert not is_at_work(_state_after(_start_epoch(Session()), sends(), answers()))
    assert not is_at_work(_state_after(_start_epoch(Session()), sends(), asks(at_client("c"))))
    assert not is_at_work(_state_after(_start_epoch(Session()), sends(), asks(needs_approval("p"))))
