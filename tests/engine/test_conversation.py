"""Conversations with a session of the same process: complete answers, also after a SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from midstream import Agent, Host
from midstream.errors import DrainingError, ModelRejectedError, SessionBusyError, TurnFailedError, UsageError
from midstream.session.records import MessageQueued, TurnEnded
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing import Gate, ScriptedModel, calls, text
from midstream.testing.scripted_model import Response
from midstream.tools.function_tools import Tool, tool
from tests.house.source import ROOT

WAIT_S = 60.0


@tool(has_effects=False)
def look(where: str) -> str:
    """Look somewhere."""
    return f"nothing in {where}"


def agent_with(*script: Response, tools: Sequence[Tool] = ()) -> Agent:
    """Return an agent with one response after the other, in whichever turn."""
    responses = iter(script)
    return Agent(ScriptedModel(lambda _: next(responses)), tools=tools)


async def test_ask_returns_the_answer_and_send_yields_the_turn() -> None:
    script = [
        calls(("look", '{"where": "the harbour"}'), text="I look."),
        text("Nothing there."),
        text("Bye."),
    ]
    async with (
        asyncio.timeout(WAIT_S),
        Host(agent_with(*script, tools=[look]), MemoryStore()) as host,
    ):
        assert await host.ask("s1", "look") == "I look.\n\nNothing there."
        shown, events = "", []
        async for event in host.send("s1", "bye"):
            shown = event.transcript if event.replaces else shown + event.text
            assert shown == event.transcript
            events.append(event)
        assert (shown, [event.is_end for event in events].count(True), events[-1].is_end) == ("Bye.", 1, True)


async def test_messages_are_queued_and_each_has_its_own_answer() -> None:
    gate = asyncio.Event()
    script: list[Response] = [[Gate(gate), *text("first")], text("second")]
    async with asyncio.timeout(WAIT_S), Host(agent_with(*script), MemoryStore()) as host:
        first, second = host.send("s1", "a"), host.send("s1", "b")
        await anext(first)
        queued = [await anext(second) for _ in range(3)]
        assert isinstance(queued[-1].record, MessageQueued)
        with pytest.raises(SessionBusyError):
            await host.ask("s1", "c", when_busy="refuse")
        gate.set()
        rest = [event async for event in second]
        assert [event.record.turn for event in rest if isinstance(event.record, TurnEnded)] == [2]
        assert (rest[-1].transcript, [event.transcript async for event in first][-1]) == ("second", "first")


async def test_a_failure_is_an_error_with_its_reason() -> None:
    script: list[Response] = [[ModelRejectedError("no such key")], text("fine")]
    async with asyncio.timeout(WAIT_S), Host(agent_with(*script), MemoryStore()) as host:
        with pytest.raises(TurnFailedError, match="no such key") as failed:
            await host.ask("s1", "hi")
        assert (failed.value.status, failed.value.cause) == ("failed", "model_rejected")
        with pytest.raises(UsageError, match="'never' is none of"):
            host.send("s1", "hi", when_busy="never")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="lone surrogate"):
            await host.ask("s1", "a\ud800b")
        assert await host.ask("s1", "hi") == "fine"


async def test_a_stopping_host_raises_an_error_and_the_next_one_ends_the_turn(tmp_path: Path) -> None:
    gate = asyncio.Event()
    host = Host(agent_with([*text("half a")[:-1], Gate(gate)]), SQLiteStore(tmp_path / "sessions.db"))
    async with asyncio.timeout(WAIT_S):
        async with host:
            events = host.send("s1", "hi")
            async for event in events:
                if event.text:
                    break
            waiting = asyncio.ensure_future(anext(events))
            await host.stop(grace_s=0.1)
            with pytest.raises(DrainingError):
                await waiting
        with pytest.raises(DrainingError):
            await host.ask("s1", "hi")
        async with Host(
            agent_with(text("half a word"), text("two")), SQLiteStore(tmp_path / "sessions.db")
        ) as again:
            assert await again.ask("s1", "and?") == "two"


PROGRAM = """
import asyncio, sys
from midstream import Agent, Host
from midstream.store.sqlite import SQLiteStore
from midstream.testing import Pause, ScriptedModel, text

def response(request):
    said = request.history.entries[-1].parts[0].text
    if said == "long":
        return [step for n in range(50) for step in (Pause(0.02), *text(f"w{n} ")[:-1])] + list(text("end"))
    return text(f"You said: {said}.")

async def main(store, *messages):
    async with Host(Agent(ScriptedModel(response)), SQLiteStore(store)) as host:
        for message in messages:
            async for event in host.send("s1", message):
                print(event.id, event.text, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.fault
async def test_the_next_start_of_a_killed_program_ends_its_turn(tmp_path: Path) -> None:
    async def start(*messages: str) -> asyncio.subprocess.Process:
        arguments = (sys.executable, "-c", PROGRAM, str(tmp_path / "sessions.db"), *messages)
        return await asyncio.create_subprocess_exec(
            *arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT, env=os.environ
        )

    async with asyncio.timeout(2 * WAIT_S):
        dying = await start("long")
        assert dying.stdout is not None
        async for line in dying.stdout:
            if b"w5 " in line:
                break
        dying.send_signal(signal.SIGKILL)
        assert await dying.wait() == -signal.SIGKILL
        out, _ = await (await start("hello")).communicate()
        assert b"You said: hello." in out
    assert b"w5" not in out, "the words of the turn before are no answer to this message"
