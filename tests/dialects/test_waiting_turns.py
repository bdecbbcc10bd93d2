"""The states in which a turn rests, and a client's run of it ends."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.dialects.waiting_turns import is_waiting
from midstream.history.messages import Response, ToolCall, ToolResult
from midstream.session.calls import CallPlan, CallState, QuestionKind, Site
from midstream.session.turn.states import AgentQuestion, AwaitingModel, Idle, RunningCalls


def call(site: Site = Site.SERVER, **more: Any) -> CallState:  # noqa: ANN401 - any field
    return CallState(ToolCall("c", "look"), CallPlan("c", site=site, digest="d"), **more)


ASKED = call(asked=QuestionKind.APPROVAL)
RUNS = call(runs=1)
OF_CLIENT = call(Site.CLIENT, runs=1)
ENDED = call(runs=1, result=ToolResult("c", "done"))


@pytest.mark.parametrize(
    ("calls", "for_people", "for_clients"),
    [
        ((ASKED,), True, True),
        ((ASKED, ENDED), True, True),
        ((ASKED, RUNS), False, False),
        ((OF_CLIENT,), False, True),
        ((ENDED,), False, False),
    ],
)
def test_a_batch_of_calls_rests_when_all_wait_for_people_or_clients(
    calls: tuple[CallState, ...], *, for_people: bool, for_clients: bool
) -> None:
    state = RunningCalls(1, 1, Response(()), calls)
    assert is_waiting(state, on_clients=False) is for_people
    assert is_waiting(state, on_clients=True) is for_clients


def test_a_call_rests_with_its_sub_agent() -> None:
    state = RunningCalls(1, 1, Response(()), (call(Site.CHILD, runs=1),))
    assert is_waiting(state, on_clients=False, sub_agents={"c"})
    assert not is_waiting(state, on_clients=False)


def test_an_upstream_agent_that_waits_for_a_permission_rests() -> None:
    asked = AgentQuestion("q", 1, "burn", "{}", "d", 0.0)
    assert is_waiting(AwaitingModel(1, 1, questions=(asked,)), on_clients=False)
    assert not is_waiting(AwaitingModel(1, 1), on_clients=True)
    assert not is_waiting(Idle(), on_clients=True)
