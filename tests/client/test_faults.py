"""A client that is killed, for real, at every point where it matters; the next one goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from midstream.client import Event, connect
from midstream.core.messages import Outcome
from midstream.core.records import CallEnded, TurnEnded, TurnStatus
from midstream.testing import calls, text
from midstream.world import Fault
from tests.client.dying_client import note, pushing
from tests.house.source import ROOT
from tests.server.serving import make_app, served
from tests.spec import spec

WAIT_S = 30.0
SHORT = [
    (Fault.BEFORE_CHECKPOINT, 1),
    (Fault.AFTER_CHECKPOINT, 1),
    (Fault.BEFORE_TOOL, 1),
    (Fault.AFTER_TOOL, 1),
    (Fault.AFTER_CHECKPOINT, 6),
]
EVERY = [
    (point, count) for point in (Fault.BEFORE_CHECKPOINT, Fault.AFTER_CHECKPOINT) for count in range(1, 16)
]
DEATHS = SHORT if os.environ.get("MIDSTREAM_FAULT_FULL") is None else [*SHORT, *EVERY]


@pytest.mark.fault
@spec("STREAM-11", "STREAM-18", "STREAM-24")
@pytest.mark.parametrize(("point", "count"), DEATHS)
async def test_a_killed_client_is_taken_up_by_the_next(tmp_path: Path, point: Fault, count: int) -> None:
    state, ledger = tmp_path / "state.db", tmp_path / "ledger"
    ledger.touch()
    async with served(make_app([calls(("c1", "push", '{"button":"red"}')), text("one two")])) as server:
        arguments = [server.url, str(state), str(ledger), point.value, str(count)]
        dying = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.client.dying_client", *arguments, cwd=ROOT
        )
        code = await asyncio.wait_for(dying.wait(), WAIT_S)
        lines = ledger.read_text().splitlines()
        assert (code, "lived" in lines) in ((-signal.SIGKILL, False), (0, True))
        async with connect(server.url, state=state, tools=[pushing(ledger)]) as client:
            turns = await client.resume_interrupted()
            events: list[Event] = []
            for turn in turns:
                async with asyncio.timeout(WAIT_S):
                    events += [event async for event in turn]
    for event in events:
        note(ledger, f"saw {event.id}")
    lines = ledger.read_text().splitlines()
    assert lines.count("pushed red") <= 1
    seen = sorted({int(line.partition("-")[2]) for line in lines if line.startswith("saw ")})
    assert seen == list(range(2, len(seen) + 2)), "no event was skipped"
    if events:
        assert isinstance(events[-1].record, TurnEnded)
        assert events[-1].record.status is TurnStatus.COMPLETED
    outcomes = {event.record.result.outcome for event in events if isinstance(event.record, CallEnded)}
    assert outcomes <= {Outcome.OK, Outcome.UNKNOWN}
    assert lines.count("pushed red") == 1 or outcomes == {Outcome.UNKNOWN} or seen == []
