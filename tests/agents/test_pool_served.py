"""Agents with a pool in a real `midstream serve`: an agent's actions in an interrupted attempt happen once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from midstream.agents.prior_transcript import DONE
from tests.cli.processes import WAIT_S, Serving, run
from tests.forked import Forked
from tests.spec import spec

pytestmark = pytest.mark.slow

APP = """
import asyncio
import json
import os
from pathlib import Path

from midstream import Agent, Pooled
from midstream.models.responses import Finished, TextDelta, UpstreamCallEnded, UpstreamCallStarted, Working
from midstream.errors import UpstreamFailedError
from midstream.testing.scripted_upstream import ScriptedUpstream, words_of
from midstream.environment import World
from tests.forked import Forked


class Slow(World):
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, 0.01))


def answer(talk):
    told = words_of(talk.messages[-1].message)
    with Path("told").open("a") as file:
        file.write(json.dumps(told) + "\\n")
    yield TextDelta("I pay. ")
    if "of shell" not in told:  # an agent that was told of its call does not make it again
        yield UpstreamCallStarted("call-1", "shell", '{"command": "pay 3"}')
        with Path("ledger").open("a") as ledger:
            ledger.write("paid 3\\n")
        if "slowly" in told:
            Path("paying").touch()
            for _ in range(6000):
                yield Working("shell")
        yield UpstreamCallEnded("call-1", "receipt 77")
        raise UpstreamFailedError("the stream broke")
    yield TextDelta("It is paid.")
    yield Finished()


agent = Agent(Pooled(ScriptedUpstream(answer=answer, world=Slow())), name="payer")
"""
CALL = "the assistant's own call 1, of shell"


def _received_texts(folder: Path) -> list[str]:
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


@spec("REUSE-79", "TURN-83")
def test_a_stream_that_fails_after_a_call_of_the_agent_does_not_repeat_the_call(tmp_path: Path) -> None:
    environment = {"MIDSTREAM_HOME": str(tmp_path / "client")}
    with Serving(tmp_path, options=("--no-auth",), app=APP) as server:
        done = run(*("chat", server.url, "--session", "s", "--message", "pay"), environment=environment)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "ledger").read_text() == "paid 3\n"
    first, second = _received_texts(tmp_path)
    assert first == "pay"
    assert f"{CALL}, result (ok)" in second
    assert "receipt 77" in second
    assert DONE in second
    assert done.stdout.count("It is paid.") == 1


@spec("REUSE-79", "TURN-83")
def test_a_server_killed_during_a_tool_of_the_agent_informs_the_next_agent(tmp_path: Path) -> None:
    environment = {"MIDSTREAM_HOME": str(tmp_path / "client")}
    options = ("--no-auth",)
    with Serving(tmp_path, options=options, app=APP) as server:
        asked = ("midstream", "chat", server.url, "--session", "s", "--message", "pay slowly")
        chat = Forked(*asked, env=environment, text=True)
        try:
            _await_call(server, tmp_path / "paying")
            server.kill()
            with Serving(tmp_path, options=options, app=APP, port=server.port):
                shown, _ = chat.communicate(timeout=WAIT_S)
        finally:
            chat.kill()
            chat.communicate()
    assert (tmp_path / "ledger").read_text() == "paid 3\n"
    first, second = _received_texts(tmp_path)
    assert first == "pay slowly"
    assert f"{CALL}, result (unknown: it started, and nobody knows whether it took effect)" in second
    assert DONE in second
    assert shown.count("It is paid.") == 1


def _await_call(server: Serving, made: Path) -> None:
    """Wait until the start of the call is in the journal, and its effect has happened."""
    until = time.monotonic() + WAIT_S
    while not made.exists() or "call-1" not in run("sessions", "export", "s", "--store", server.store).stdout:
        assert time.monotonic() < until, "the call was never made"
        os.sched_yield()
