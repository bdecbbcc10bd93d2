"""What is owed, in which order, and who may speak for a call."""

from __future__ import annotations

from midstream.core.turn import Cancel, RunCall, is_owed_by_client, owed
from tests.core.stories import asks, at_client, ended, reads, say, told, writes
from tests.spec import spec


@spec("TURN-15")
def test_a_client_speaks_for_its_own_call_that_runs() -> None:
    running = told(say(), asks(at_client("a"), at_client("b")))
    assert is_owed_by_client(running, ended("a"))
    assert not is_owed_by_client(running, ended("b"))  # it has not started
    assert not is_owed_by_client(running, ended("a", reply=2))


@spec("TURN-15")
def test_a_client_never_speaks_for_a_tool_of_the_server() -> None:
    assert not is_owed_by_client(told(say(), asks(writes("a"))), ended("a"))
    assert not is_owed_by_client(told(say(), asks(writes("a")), Cancel()), ended("a"))
    assert not is_owed_by_client(told(say()), ended("a"))


@spec("TURN-10")
def test_calls_are_owed_in_their_order_whatever_they_are_called() -> None:
    names = ("z", "b", "a", "y")
    state = told(say(), asks(*(reads(name) for name in names)))
    assert owed(state) == tuple(RunCall(1, 1, name, 1) for name in names)
