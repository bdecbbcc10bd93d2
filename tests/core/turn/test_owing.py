"""Who may speak for a call."""

from __future__ import annotations

from midstream.core.turn import Cancel, is_owed_by_client
from tests.core.stories import asks, at_client, ended, say, told, writes
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
