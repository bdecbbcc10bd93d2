"""Responses that their provider keeps: continued after a cut, or requested again; and reports of silence."""

from __future__ import annotations

import pytest

from midstream.retries import MODEL_ATTEMPTS_MAX
from midstream.session.call_references import AttemptRef
from midstream.session.records import (
    AttemptContinued,
    AttemptFailed,
    AttemptResumable,
    AttemptStarted,
    EpochStarted,
    StallEnded,
    StallNoticed,
    TurnEnded,
)
from midstream.session.turn.commands import Cancel, Recover, Stalled, StallFinished
from midstream.session.turn.deciding import decide, partial_response, text_so_far
from midstream.session.turn.pending import CallModel, pending_work
from midstream.session.turn.states import AwaitingModel, TurnState
from midstream.timing import StalledOn
from tests.session.turn_stories import (
    AT,
    after,
    answers,
    apply_command,
    asks,
    breaks,
    fails,
    reads,
    response_lost,
    resumable,
    sends,
    state_after,
    streams,
)
from tests.spec import spec

FAILED = AttemptFailed(1, 1, 1, "model_cut", "it broke", AT)


def _recovered(state: TurnState, *, epoch: int = 2) -> tuple[tuple[object, ...], TurnState]:
    return apply_command(after(state, EpochStarted(epoch, "next", AT), epoch=epoch), Recover(), epoch=epoch)


@spec("TURN-61")
def test_the_token_of_a_kept_response_is_recorded_once() -> None:
    records, state = apply_command(state_after(sends()), resumable())
    assert records == (AttemptResumable(1, 1, 1, "resp_1"),)
    assert decide(state, resumable(), epoch=1, at=AT) == ()
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 1)),)


@spec("TURN-61")
def test_a_cut_response_that_is_kept_continues_as_the_same_attempt() -> None:
    records, state = apply_command(state_after(sends(), resumable(), streams("Half a ")), breaks())
    assert records == (FAILED, AttemptContinued(1, 1, 1, 1, AT, not_before=AT + 1.0))
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 1), not_before=AT + 1.0, continued=1),)
    assert isinstance(state, AwaitingModel)
    assert text_so_far(state) == {0: ("text", "Half a ")}

    state = state_after(sends(), resumable(), streams("Half a "), breaks(), streams("word"))
    assert isinstance(state, AwaitingModel)
    assert text_so_far(state) == {0: ("text", "Half a word")}


@spec("TURN-61")
def test_a_new_node_continues_a_kept_response() -> None:
    records, state = _recovered(state_after(sends(), resumable(), streams("Half a ")))
    assert records == (AttemptContinued(1, 1, 1, 1, AT),)
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 1), continued=1),)

    records, state = _recovered(state, epoch=3)
    assert records == (AttemptContinued(1, 1, 1, 2, AT),)
    assert isinstance(state, AwaitingModel)
    assert partial_response(state) is not None


@spec("TURN-62")
@pytest.mark.parametrize(
    "state",
    [
        state_after(sends(), resumable(), breaks()),
        state_after(sends(), resumable(), streams("Half a "), breaks()),
        _recovered(state_after(sends(), resumable(), streams("Half a ")))[1],
    ],
    ids=["mute", "in the middle", "another node"],
)
def test_a_response_that_the_provider_lost_is_requested_again_at_once(state: TurnState) -> None:
    records, state = apply_command(state, response_lost(), epoch=2)
    assert records == (AttemptStarted(1, 1, 2, AT),)
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 2)),)
    assert isinstance(state, AwaitingModel)
    assert (state.deltas, state.token, state.continued) == ((), "", 0)


@spec("TURN-62")
def test_a_continuation_without_new_content_is_not_tried_twice() -> None:
    state = state_after(sends(), resumable(), streams("Half a "), breaks())
    records, state = apply_command(state, breaks())
    assert records == (FAILED, AttemptStarted(1, 1, 2, AT, not_before=AT + 2.0))

    state = state_after(sends(), resumable(), streams("Half a "), breaks(), streams("word "))
    records, state = apply_command(state, breaks())
    assert records == (FAILED, AttemptContinued(1, 1, 1, 2, AT, not_before=AT + 2.0))


@spec("TURN-62", "TURN-4")
def test_cuts_and_lost_responses_are_bounded_like_other_failures() -> None:
    state: TurnState = state_after(sends())
    for number in range(MODEL_ATTEMPTS_MAX):
        attempt = number + 1
        _, state = apply_command(state, resumable(f"resp_{attempt}", attempt=attempt))
        records, state = apply_command(state, response_lost(attempt=attempt))
    assert isinstance(records[-1], TurnEnded)


@spec("TURN-62")
def test_a_response_that_the_provider_ended_is_requested_again() -> None:
    records, _ = apply_command(state_after(sends(), resumable(), streams("Half")), fails())
    assert records[-1] == AttemptStarted(1, 1, 2, AT, not_before=AT + 1.0)


@spec("TURN-61")
def test_without_a_token_a_cut_attempt_is_repeated() -> None:
    records, _ = apply_command(state_after(sends(), streams("Half")), breaks())
    assert records[-1] == AttemptStarted(1, 1, 2, AT, not_before=AT + 1.0)


# --- silence --------------------------------------------------------------------------------------------------


@spec("TURN-65")
def test_silence_of_a_model_is_recorded_and_changes_nothing() -> None:
    before = state_after(sends(), streams("Half"))
    records, state = apply_command(before, Stalled(1, 1, StalledOn.BETWEEN_TOKENS, 15.0))
    assert records == (StallNoticed(1, 1, StalledOn.BETWEEN_TOKENS, 15.0, AT),)
    assert state == before
    records, state = apply_command(state, StallFinished(1, 1, StalledOn.BETWEEN_TOKENS, 20.0))
    assert records == (StallEnded(1, 1, StalledOn.BETWEEN_TOKENS, 20.0, AT),)
    assert state == before


@spec("TURN-65")
def test_silence_of_a_tool_is_recorded_and_changes_nothing() -> None:
    before = state_after(sends(), asks(reads("a")))
    records, state = apply_command(before, Stalled(1, 1, StalledOn.TOOL, 60.0, "a"))
    assert records == (StallNoticed(1, 1, StalledOn.TOOL, 60.0, AT, "a"),)
    assert state == before


@spec("TURN-65", "TURN-9")
@pytest.mark.parametrize(
    "state",
    [
        state_after(sends(), answers()),
        state_after(sends(), asks(reads("b"))),
        state_after(sends(), asks(reads("a")), Cancel()),
        state_after(sends()),
    ],
    ids=["idle", "another call", "cancelling", "model"],
)
def test_silence_of_finished_work_is_not_recorded(state: TurnState) -> None:
    assert decide(state, Stalled(1, 1, StalledOn.TOOL, 60.0, "a"), epoch=1, at=AT) == ()
    assert decide(state, Stalled(1, 2, StalledOn.FIRST_TOKEN, 60.0), epoch=1, at=AT) == ()
