"""The scripts for a client, over real connections, played to our own half behind our own transports."""

from __future__ import annotations

import pytest

from midstream.client.transport_selection import TransportKind
from midstream.environment import World
from midstream.testing.conformance import client_wire
from midstream.testing.conformance.client_wire import ClientState, WireTrial
from midstream.testing.conformance.scripted_server import ScriptedServer
from midstream.testing.conformance.scripts import Json, Script, scripts
from tests.testing.conformance.core_client import CoreSubject

SEND: Json = {"submit": {"type": "send", "parts": [{"type": "text", "text": "hi"}]}}
WELCOME: Json = {"receive": {"type": "welcome", "stream": "$stream", "event_id": "1-1", "resume_from": "1-1"}}


@pytest.mark.parametrize("transport", TransportKind)
async def test_our_client_passes_the_scripts_over_each_transport(transport: TransportKind) -> None:
    # A browser runs all of them over each.
    chosen = scripts("client")[:: 1 if transport is TransportKind.WEBSOCKET else 4]
    async with ScriptedServer().listening() as server:
        trial = WireTrial(server, CoreSubject(server.url, World()))
        outcomes = [await trial.run(script, transport) for script in chosen]
    assert [outcome for outcome in outcomes if not outcome.has_passed] == []


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (
            (SEND, {"connected": True}, WELCOME, {"sent": []}),
            "2 frames were sent, not 0: ['open', 'command']",
        ),
        (
            (SEND, {"connected": True}, WELCOME, {"sent": [{"type": "close"}, {"type": "command"}]}),
            "frame 0: type is 'open', not 'close'",
        ),
        (
            (SEND, {"connected": True}, WELCOME, {"delivered": ["1-1"]}),
            "the application received []; expected ['1-1']",
        ),
        ((SEND, {"detach": True}, {"connected": True}), "no connection is expected"),
        ((SEND, {"detach": True}, {"ended": "protocol"}), "it ended with None, not 'protocol'"),
        ((SEND, {"has_checkpoint": False}), "has_checkpoint is True"),
        ((SEND, {"sing": True}), "the script has an unknown step: ['sing']"),
        ((SEND, {"connected": True}, WELCOME, {"dropped": True}), "the client did not react within 0.2 s"),
    ],
)
async def test_a_difference_is_reported(steps: tuple[Json, ...], problem: str) -> None:
    wait_s = 0.2 if "within" in problem else client_wire.WAIT_S
    async with ScriptedServer().listening() as server:
        trial = WireTrial(server, CoreSubject(server.url, World()), wait_s=wait_s)
        outcome = await trial.run(Script("a script", (), steps), TransportKind.WEBSOCKET)
    assert (outcome.problem, outcome.step) == (problem, len(steps))


class _Silent(CoreSubject):
    """A client that cannot report its sent and received frames."""

    async def read_state(self) -> ClientState:
        state = await super().read_state()
        return ClientState(
            state.phase,
            state.code,
            state.delivered,
            state.is_acknowledged,
            state.is_reconnecting,
            state.is_degraded,
            state.has_checkpoint,
        )


async def test_a_client_that_does_not_count_its_frames_gets_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_wire, "GRACE_S", 0.05)
    async with ScriptedServer().listening() as server:
        trial = WireTrial(server, _Silent(server.url, World()))
        outcome = await trial.run(scripts("client")[0], TransportKind.WEBSOCKET)
    assert outcome.has_passed, outcome
