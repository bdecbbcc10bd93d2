"""Questions about the sessions in memory: families, open turns, counts."""

from __future__ import annotations

import asyncio

from midstream import Agent, Host
from midstream.history.messages import UserMessage
from midstream.protocol.frames import EventId
from midstream.session.turn.commands import SendMessage
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import ScriptedModel, records_until_end, run_turn, text
from midstream.testing.scripted_model import Gate


def _names(host: Host, session: str) -> list[str]:
    return [runner.session_id for runner in host.awake.family_of(session)]


async def test_a_family_is_a_session_with_its_sub_agents_and_no_other() -> None:
    async with Host(Agent(ScriptedModel([text("a")])), MemoryStore()) as host:
        for session in ("s", "s2", "other"):
            await run_turn(host, session, "one")
        assert (_names(host, "s"), _names(host, "absent")) == (["s"], [])
        await host.awaken("s::1.1.0")
        assert _names(host, "s") == ["s", "s::1.1.0"]
        assert len(host.awake) == 4
        assert host.awake.get("absent") is None


async def test_open_turns_and_leases_are_counted() -> None:
    may_end = asyncio.Event()
    async with Host(Agent(ScriptedModel([[Gate(may_end), *text("a")]])), MemoryStore()) as host:
        runner = await host.session("s", create=True)
        await host.session("new", create=True)
        assert (host.awake.turns_running, host.awake.leases, host.awake.followed) == (0, 0, 0)
        await runner.submit(SendMessage(UserMessage.of("one")))
        assert (host.awake.turns_running, host.awake.leases) == (1, 1)
        assert (host.awake.is_live("s"), host.awake.is_live("new"), host.awake.is_live("absent")) == (
            True,
            False,
            False,
        )
        assert host.awake.waits_for(runner) == "model"
        may_end.set()
        await records_until_end(runner, after=0)
        assert host.awake.turns_running == 0


async def test_readers_of_an_awake_session_are_notified_of_its_new_beginning_and_never_of_an_older_one() -> (
    None
):
    async with Host(Agent(ScriptedModel([text("a")])), MemoryStore(Memory())) as host:
        await run_turn(host, "s", "one")
        for position in (4, 3):
            host.awake.note_pruned("s", EventId(1, position))
            host.awake.note_pruned("absent", EventId(1, position))
        runner = host.awake.get("s")
        assert runner is not None
        assert runner.events.pruned_to == EventId(1, 4)
