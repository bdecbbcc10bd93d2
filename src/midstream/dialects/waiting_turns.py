"""Waiting turns: open turns that only wait for a person or a client, where a run ends."""

from __future__ import annotations

from collections.abc import Collection

from midstream.session.calls import Site, startable
from midstream.session.turn.states import AwaitingModel, RunningCalls, TurnState


def is_waiting(state: TurnState, *, on_clients: bool, sub_agents: Collection[str] = ()) -> bool:
    """Return whether an open turn only waits for people; with `on_clients`, also for calls at its client.

    `sub_agents` are calls whose sub-agents only wait for people.
    """
    if isinstance(state, AwaitingModel):
        return state.is_waiting_for_person
    if not isinstance(state, RunningCalls):
        return False
    has_waiting_call = False
    for call in state.calls:
        if not call.is_open:
            continue
        if call.needs_person or (call.is_in_doubt and not call.is_asking):
            return False
        is_clients = on_clients and call.is_running and call.plan.site is Site.CLIENT
        if call.is_asking or is_clients or (call.is_running and call.call.id in sub_agents):
            has_waiting_call = True
        elif call.is_running:
            return False
    return has_waiting_call and not startable(state.calls)
