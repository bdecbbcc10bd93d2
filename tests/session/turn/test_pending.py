"""Pending work, its order, and the senders of a call's outcome."""

from __future__ import annotations

import pytest

from midstream.session.call_references import CallRef
from midstream.session.calls import Choice
from midstream.session.records import Delta
from midstream.session.turn.commands import Cancel, Command
from midstream.session.turn.folding import evolve
from midstream.session.turn.pending import RunCall, is_pending_for_client, pending_work
from midstream.session.turn.states import AwaitingModel
from tests.session.turn_stories import (
    asks,
    at_client,
    ended,
    fails,
    reads,
    requests_permission,
    responses,
    resumable,
    sends,
    state_after,
    streams,
    writes,
)
from tests.spec import spec


@spec("TURN-15")
def test_a_client_may_send_the_outcome_of_its_own_running_call() -> None:
    running = state_after(sends(), asks(at_client("a"), at_client("b")))
    assert is_pending_for_client(running, ended("a"))
    assert not is_pending_for_client(running, ended("b"))  # It has not started.
    assert not is_pending_for_client(running, ended("a", response=2))


@spec("TURN-15")
def test_a_client_may_never_send_the_outcome_of_a_server_tool() -> None:
    assert not is_pending_for_client(state_after(sends(), asks(writes("a"))), ended("a"))
    assert not is_pending_for_client(state_after(sends(), asks(writes("a")), Cancel()), ended("a"))
    assert not is_pending_for_client(state_after(sends()), ended("a"))


@spec("TURN-10")
def test_calls_are_pending_in_their_order_whatever_their_names() -> None:
    names = ("z", "b", "a", "y")
    state = state_after(sends(), asks(*(reads(name) for name in names)))
    assert pending_work(state) == tuple(RunCall(CallRef(1, 1, name), 1) for name in names)


@pytest.mark.parametrize(
    "commands",
    [
        (),
        (streams("a"),),
        (resumable(),),
        (requests_permission("q"),),
        (requests_permission("q"), responses("q", Choice.ALLOW)),
        (fails(),),
    ],
)
def test_streamed_text_changes_no_pending_work(commands: tuple[Command, ...]) -> None:
    """So a runner need not check after each token."""
    state = state_after(sends(), *commands)
    assert isinstance(state, AwaitingModel)
    words = Delta(1, 1, state.attempt, 0, "text", "b")
    spoken = evolve(state, words, epoch=1)
    assert spoken != state
    assert pending_work(spoken) == pending_work(state) != ()
