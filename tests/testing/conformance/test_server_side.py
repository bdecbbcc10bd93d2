"""The scripts against the core, against our server, and against servers that break a rule."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from midstream.client.connection_headers import ConnectionHeaders
from midstream.client.transport_selection import RememberedTransports, TransportKind, TransportSelection
from midstream.environment import World
from midstream.errors import AccessError, ConnectionLostError, DrainingError, LimitReachedError
from midstream.protocol.stream_settings import StreamSettings
from midstream.testing.conformance.scripts import Script, scripts
from midstream.testing.conformance.server_side import (
    BUSY_S,
    Connect,
    ProbedConnection,
    ScriptOutcome,
    ServerTrial,
)
from midstream.testing.scripted_model import text
from tests.server.escrowing import escrowed_app
from tests.server.serving import make_app, served
from tests.spec import spec
from tests.testing.conformance.core_server import CoreServer, CoreWire

SERVER = scripts("server")
WAIT_S = 30.0
AT_ONCE_S = 0.01
"""Seconds of silence: a server in memory sends everything before the first wait."""


@pytest.mark.parametrize(
    "script", [each for each in SERVER if each.fits(TransportKind.WEBSOCKET)], ids=lambda script: script.name
)
async def test_the_core_passes_every_script(script: Script) -> None:
    trial = ServerTrial(CoreServer().connect, world=World(), wait_s=WAIT_S)
    assert await trial.run(script) == ScriptOutcome(script.name, script.clauses, transport="websocket")


@pytest.mark.slow
@spec("STREAM-49")
@pytest.mark.parametrize("transport", [*TransportKind])
async def test_our_server_passes_every_script_over_every_transport(transport: TransportKind) -> None:
    async with served(make_app([text("ready")] * (3 * len(SERVER)))) as server:
        server.app.settings = StreamSettings(heartbeat_s=0.1)
        selection = TransportSelection(
            server.url,
            transport=transport,
            headers=ConnectionHeaders(server.url, {}),
            remembered=RememberedTransports(None),
        )
        trial = ServerTrial(selection.connect, transport=transport, world=World(), wait_s=2 * WAIT_S)
        outcomes = [await trial.run(script) for script in SERVER if script.fits(transport)]
        await selection.close()
    assert [outcome for outcome in outcomes if not outcome.has_passed] == []
    assert len(outcomes) > 30


class _Altered(CoreWire):
    """A server that breaks one rule."""

    alter: Callable[[dict[str, Any]], dict[str, Any] | None]

    async def receive(self) -> bytes:
        while True:
            frame = self.alter(json.loads(await super().receive()))
            if frame is not None:
                return json.dumps(frame).encode()


def _without(kind: str) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    return lambda frame: None if frame["type"] == kind else frame


def _with(kind: str, **members: object) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    return lambda frame: {**frame, **members} if frame["type"] == kind else frame


def _with_a_hole(frame: dict[str, Any]) -> dict[str, Any]:
    return {**frame, "events": frame["events"][1:]} if frame["type"] == "events" else frame


@pytest.mark.parametrize(
    ("alter", "problem"),
    [
        (_without("welcome"), "the first frame is"),
        (_without("ack"), "nothing came within"),
        (_without("heartbeat"), "nothing came within"),
        (_with("welcome", acked=1), "welcome: acked is 1, not 0"),
        (_with("welcome", resume_from="x"), "resume_from is 'x' and no event id"),
        (_with("welcome", turn_status="running"), "welcome: turn_status is 'running', not ''"),
        (_with("ack", seqno=7), "ack: seqno is 7, not 0"),
        (_with("error", code="other"), "error: code is 'other'"),
        (_with("welcome", is_degraded=True), "the welcome is degraded without a reason"),
        (_with("welcome", heartbeat_s="10"), "'10' is not a number of seconds"),
        (_with("welcome", oldest=0), "welcome: oldest is 0, not at least 1"),
        (_with("welcome", status="busy"), "welcome: status is 'busy', none of"),
        (_with_a_hole, "does not follow"),
        (_with("heartbeat", type="beat"), "was not expected"),
    ],
)
async def test_a_server_that_breaks_a_rule_is_found(
    alter: Callable[[dict[str, Any]], dict[str, Any] | None], problem: str
) -> None:
    server = CoreServer()

    async def connect(session: str) -> ProbedConnection:
        wire = _Altered(server, session)
        wire.alter = alter
        server.wires.setdefault(session, []).append(wire)
        return wire

    trial = ServerTrial(connect, world=World(), wait_s=AT_ONCE_S)
    problems = [(await trial.run(script)).problem for script in SERVER]
    assert [each for each in problems if problem in each] != []


class _Frugal(CoreWire):
    """A server that sends only the last of several acks, and repeats it twice."""

    saved = 0
    acks: tuple[bytes, ...] = ()

    async def receive(self) -> bytes:
        body = await super().receive()
        if not _is_ack(body):
            return body
        if any(map(_is_ack, self.frames)):
            _Frugal.saved += 1
            return await self.receive()
        if body not in self.acks:
            self.frames[:0] = [body, body]
        self.acks = (*self.acks, body)
        return body


def _is_ack(body: bytes) -> bool:
    return body.startswith(b'{"type":"ack"')


@spec("STREAM-13")
async def test_a_server_may_acknowledge_many_commands_at_once_and_again() -> None:
    server = CoreServer()

    async def connect(session: str) -> ProbedConnection:
        wire = _Frugal(server, session)
        server.wires.setdefault(session, []).append(wire)
        return wire

    trial = ServerTrial(connect, world=World(), wait_s=AT_ONCE_S)
    outcomes = [await trial.run(script) for script in SERVER if script.fits(TransportKind.WEBSOCKET)]
    assert [each for each in outcomes if not each.has_passed] == []
    assert _Frugal.saved > 0


@pytest.mark.parametrize("sent", ["both, and the ack is of one", "one"])
async def test_an_ack_of_one_command_or_of_an_unsent_one_acknowledges_no_other(sent: str) -> None:
    server = CoreServer()

    async def connect(session: str) -> ProbedConnection:
        wire = _Altered(server, session)
        wire.alter = _with("ack", seqno=1, is_single=sent != "one")
        server.wires.setdefault(session, []).append(wire)
        return wire

    pipelined = next(each for each in SERVER if "STREAM-15" in each.clauses and "websocket" in each.needs)
    second = [step for step in pipelined.steps if "send" in step][1]
    steps = tuple(each for each in pipelined.steps if sent != "one" or each is not second)
    outcome = await ServerTrial(connect, world=World(), wait_s=AT_ONCE_S).run(Script("a script", (), steps))
    assert outcome.problem == "ack: seqno is 1, not 0"


class _Talkative(CoreWire):
    """A server that sends one unrequested frame at the end."""

    async def send(self, frames: Sequence[bytes]) -> None:
        await super().send(frames)
        if b'{"type":"ping"}' in frames:
            self.frames.insert(0, b'{"type":"ack","seqno":0}')


async def test_an_unexpected_frame_after_the_last_step_is_reported_for_each_open_connection() -> None:
    server = CoreServer()

    async def connect(session: str) -> ProbedConnection:
        wire = _Talkative(server, session)
        server.wires.setdefault(session, []).append(wire)
        return wire

    steps: tuple[dict[str, Any], ...] = ({"on": "b", "open": {}}, {"on": "b", "expect": {"type": "welcome"}})
    outcome = await ServerTrial(connect, world=World(), wait_s=AT_ONCE_S).run(Script("a script", (), steps))
    ack = '{"type":"ack","seqno":0}'
    assert (outcome.problem, outcome.step) == (
        f"after the last step, on 'b': {ack} was not expected",
        len(steps) + 1,
    )


async def test_an_http_refusal_counts_as_its_error() -> None:
    class Refusing(CoreWire):
        async def receive(self) -> bytes:
            raise AccessError("no")

    async def connect(session: str) -> ProbedConnection:
        server = CoreServer()
        server.wires[session] = []
        return Refusing(server, session)

    steps: tuple[dict[str, Any], ...] = (
        {"open": {}},
        {"refused": "access"},
        {"open": {}},
        {"refused": "unauthorized"},
    )
    outcome = await ServerTrial(connect, world=World(), wait_s=AT_ONCE_S).run(Script("a script", (), steps))
    assert (outcome.problem, outcome.step) == ("error: code is 'access', not 'unauthorized'", 4)


async def test_a_server_that_is_silent_is_found() -> None:
    silent = next(each for each in SERVER if {"heartbeat": True} in each.steps)
    server = CoreServer()

    async def connect(session: str) -> ProbedConnection:
        wire = _Altered(server, session)
        wire.alter = _without("heartbeat")
        server.wires.setdefault(session, []).append(wire)
        return wire

    outcome = await ServerTrial(connect, world=World(), wait_s=AT_ONCE_S).run(silent)
    assert (outcome.problem, outcome.clauses) == ("nothing came within 0.03 s", ("STREAM-31",))


class _InNoTime(World):
    """A world where sleeps end at once."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def _busy(times: int, retry_after_s: float | None, code: str = "limit_reached") -> Connect:
    """Return a server that refuses as busy so many times."""
    server, left = CoreServer(), itertools.count(times, -1)

    async def connect(session: str) -> ProbedConnection:
        wire = await server.connect(session)
        if next(left) > 0:
            error = LimitReachedError if code == "limit_reached" else DrainingError
            wire.stream.fail(error("not now", retry_after_s=retry_after_s), now=0.0)
        return wire

    return connect


async def test_a_server_that_sends_only_heartbeats_is_reported() -> None:
    server = CoreServer()

    class Lively(_Altered):
        async def receive(self) -> bytes:
            try:
                async with asyncio.timeout(0.01):
                    return await super().receive()
            except TimeoutError:
                return b'{"type":"heartbeat","event_id":"1-1","waiting_on":"model"}'

    async def connect(session: str) -> ProbedConnection:
        wire = Lively(server, session)
        wire.alter = lambda frame: None if frame["type"] in {"ack", "events"} else frame
        server.wires.setdefault(session, []).append(wire)
        return wire

    trial = ServerTrial(connect, world=World(), wait_s=0.1)
    for last in ({"expect": {"type": "ack", "seqno": 0}}, {"read_until": "turn_ended"}):
        first = next(each for each in SERVER if "STREAM-25" in each.clauses)
        steps = (*first.steps[:3], last)
        outcome = await trial.run(Script("a script", (), steps))
        assert (outcome.problem, outcome.step) == ("nothing came within 0.1 s", 4)


@spec("STREAM-74")
async def test_a_script_runs_again_after_a_refusal_because_of_a_limit() -> None:
    world = _InNoTime()
    trial = ServerTrial(_busy(2, 5.0), world=world, wait_s=AT_ONCE_S)
    assert (await trial.run(SERVER[0])).has_passed
    assert world.slept == [5.0, 5.0]
    assert len(trial.sessions) == 3


async def test_a_server_that_always_refuses_because_of_a_limit_is_reported() -> None:
    world = _InNoTime()
    outcome = await ServerTrial(_busy(1000, None), world=world, wait_s=AT_ONCE_S).run(SERVER[0])
    assert outcome.problem == "limit_reached: not now, for 120 s"
    assert sum(world.slept) == BUSY_S
    assert not (
        await ServerTrial(_busy(1, 1.0, "draining"), world=world, wait_s=AT_ONCE_S).run(SERVER[0])
    ).has_passed


@pytest.mark.slow
@spec("STREAM-84")
async def test_a_server_whose_sessions_are_encrypted_is_no_worse(tmp_path: Path) -> None:
    async with served(escrowed_app(tmp_path, [text("ready")] * len(SERVER))) as server:
        server.app.settings = StreamSettings(heartbeat_s=0.1)
        selection = TransportSelection(
            server.url,
            transport=TransportKind.WEBSOCKET,
            headers=ConnectionHeaders(server.url, {}),
            remembered=RememberedTransports(None),
        )
        trial = ServerTrial(selection.connect, world=World(), wait_s=2 * WAIT_S)
        outcomes = [await trial.run(script) for script in SERVER if script.fits(TransportKind.WEBSOCKET)]
        await selection.close()
    assert [outcome for outcome in outcomes if not outcome.has_passed] == []


async def test_a_server_that_hangs_up_is_found() -> None:
    async def connect(session: str) -> ProbedConnection:
        wire = await CoreServer().connect(session)
        wire.stream.fail(DrainingError("bye"), now=0.0)
        return wire

    outcome = await ServerTrial(connect, world=World(), wait_s=AT_ONCE_S).run(SERVER[0])
    assert (outcome.problem, outcome.step) == ("error: type is 'error', not 'welcome'", 2)
    assert "draining" in outcome.last_frames[0]


async def test_a_server_that_cannot_be_reached_breaks_every_script() -> None:
    async def connect(session: str) -> ProbedConnection:
        raise ConnectionLostError("nobody is there")

    outcome = await ServerTrial(connect, world=World(), wait_s=AT_ONCE_S).run(SERVER[0])
    assert (outcome.problem, outcome.step) == ("connection_lost: nobody is there", 1)
