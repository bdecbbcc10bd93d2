"""A client killed with a signal at every relevant point; the next one continues."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from keyring.core import load_keyring

from midstream.client import Event, connect
from midstream.client.secret_store import SecretFileSummary, survey
from midstream.environment import Fault
from midstream.history.messages import Outcome
from midstream.paths import Paths
from midstream.session.records import CallEnded, TurnEnded, TurnStatus
from midstream.testing import calls, text
from tests.client.dying_client import note, push_tool
from tests.client.keyrings import FileKeyring, use_keyring
from tests.fault.extent import IS_FULL
from tests.house.source import ROOT
from tests.server.serving import make_app, served
from tests.spec import spec

WAIT_S = 60.0
NO_KEYRING = "keyring.backends.fail.Keyring"
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
DEATHS = [*SHORT, *EVERY] if IS_FULL else SHORT


async def _live(url: str, state: Path, ledger: Path, point: Fault, count: int, **more: str) -> int | None:
    """Run a client in its own process until it dies, and return its exit."""
    arguments = [url, str(state), str(ledger), point.value, str(count)]
    dying = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.client.dying_client", *arguments, cwd=ROOT, env={**os.environ, **more}
    )
    return await asyncio.wait_for(dying.wait(), WAIT_S)


@pytest.mark.fault
@spec("STREAM-76")
@pytest.mark.parametrize("is_in_keyring", [False, True], ids=["in a file", "in a keyring"])
@pytest.mark.parametrize("point", [Fault.BEFORE_CHECKPOINT, Fault.AFTER_CHECKPOINT])
async def test_a_killed_client_leaves_no_secret_without_a_stream(
    tmp_path: Path, point: Fault, *, is_in_keyring: bool
) -> None:
    """One point lies between the secret and its checkpoint, the other after both."""
    ring, home = FileKeyring(), tmp_path / "home"
    ring.path = str(tmp_path / "keyring.json")
    more = {
        "PYTHON_KEYRING_BACKEND": f"{FileKeyring.__module__}.FileKeyring",
        "KEYRING_PROPERTY_PATH": ring.path,
    }
    more = {"MIDSTREAM_HOME": str(home), **(more if is_in_keyring else {})}
    state, ledger, secrets = tmp_path / "client" / "state.db", tmp_path / "ledger", Paths.find(home).secrets
    ledger.touch()
    script = [calls(("c1", "push", '{"button":"red"}')), text("one two")]
    with use_keyring(ring if is_in_keyring else load_keyring(NO_KEYRING)):
        async with served(make_app(script)) as server:
            assert await _live(server.url, state, ledger, point, 1, **more) == -signal.SIGKILL
            left = survey(secrets)  # the stream's, and the session's, which the server may need
            assert left == (
                SecretFileSummary(in_keyring=2) if is_in_keyring else SecretFileSummary(in_file=2)
            )
            assert len(ring.stored()) == left.in_keyring
            client = connect(
                server.url, state=state, secrets=secrets, keyring=is_in_keyring, tools=[push_tool(ledger)]
            )
            async with client:
                turns = await client.resume_interrupted()
                assert len(turns) == (point is Fault.AFTER_CHECKPOINT)
                following = turns[0] if turns else client.send("s1", "again")
                async with asyncio.timeout(WAIT_S):
                    assert [event async for event in following][-1].is_end
    assert (survey(secrets), ring.stored()) == (SecretFileSummary(), [])


@pytest.mark.fault
@spec("STREAM-11", "STREAM-18", "STREAM-24")
@pytest.mark.parametrize(("point", "count"), DEATHS)
async def test_a_killed_client_is_continued_by_the_next(tmp_path: Path, point: Fault, count: int) -> None:
    state, ledger = tmp_path / "state.db", tmp_path / "ledger"
    ledger.touch()
    async with served(make_app([calls(("c1", "push", '{"button":"red"}')), text("one two")])) as server:
        code = await _live(server.url, state, ledger, point, count)
        lines = ledger.read_text().splitlines()
        assert (code, "lived" in lines) in ((-signal.SIGKILL, False), (0, True))
        async with connect(server.url, state=state, tools=[push_tool(ledger)]) as client:
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
