"""A process that dies at any fault point, a store that fails at any append: turns continue, nothing repeats.

Everything here is one process: a crash ends the world of a host (`FakeWorld.crash_at`), its runners stop where
they are, and the next host finds the journal. `tests/fault` does the same to real processes.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import Fault
from midstream.errors import (
    ContextOverflowError,
    LeaseLostError,
    MidstreamError,
    StoreBusyError,
    StoreFullError,
)
from midstream.history.messages import Step, UserMessage
from midstream.models.responses import ModelRequest, ThinkingDelta
from midstream.session.records import (
    HistoryCompacted,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.session.turn.commands import SendMessage
from midstream.store.contract import Store
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.fake_worlds import Crashed, FakeWorld
from midstream.testing.history_checker import Evidence, Execution, check, check_ended
from midstream.testing.scripted_model import Response, Script, ScriptedModel, ScriptedStep, calls, text
from midstream.testing.store_fakes import FailingStore
from midstream.tools.function_tools import Tool, current_call, tool
from tests.search import tried
from tests.spec import spec

ANSWER = "All of it was read, and all of it was written."
SCRIPT: list[list[ScriptedStep]] = [
    [ThinkingDelta("two to read"), *calls(("a", "read", "{}"), ("b", "read", "{}"), text="Let me see.")],
    calls(("a", "write", "{}"), ("b", "write", "{}"), ("c", "read", "{}")),
    [*text(ANSWER, tokens=8)],
]
IN_THIS_PROCESS = [
    Fault.BEFORE_APPEND,
    Fault.AFTER_APPEND,
    Fault.AFTER_PUBLISH,
    Fault.BEFORE_TOOL,
    Fault.AFTER_TOOL,
    Fault.BEFORE_CLAIM,
    Fault.AFTER_CLAIM,
]


class Lab:
    """A memory that survives hosts, and the ledger of their tools' effects."""

    def __init__(self, seed: int = 0, script: Script = SCRIPT) -> None:
        self.memory = Memory()
        self.script = script
        self.ledger: list[Execution] = []
        self.worlds: list[FakeWorld] = []
        self.hosts: list[Host] = []
        self._seed = seed

    def host(self, store: Store | None = None) -> tuple[Host, FakeWorld]:
        """Create a new process, simulated."""
        world = FakeWorld(self._seed + len(self.worlds), at=1_000_000.0 + 60.0 * len(self.worlds))
        agent = Agent(ScriptedModel(self.script, delay_s=0.01, world=world), tools=self._tools(world))
        host = Host(agent, store or MemoryStore(self.memory, world=world), world=world)
        self.worlds.append(world)
        self.hosts.append(host)
        return host, world

    def _tools(self, world: FakeWorld) -> list[Tool]:
        async def work(name: str) -> str:
            call = current_call()
            run = Execution(
                call.session, call.turn, call.response, call.call_id, call.run, name, has_ended=False
            )
            self.ledger.append(run)
            at = len(self.ledger) - 1
            await world.sleep(0.5)
            self.ledger[at] = Execution(
                call.session, call.turn, call.response, call.call_id, call.run, name, has_ended=True
            )
            return f"{name} {call.call_id}"

        async def read() -> str:
            return await work("read")

        async def write() -> str:
            return await work("write")

        return [tool(has_effects=False)(read), tool(write)]

    def kill(self) -> None:
        """Mark all earlier nodes as dead: their sessions are free."""
        self.memory.living.clear()

    async def bury(self) -> None:
        """Release the remains of dead nodes in this process."""
        for host in self.hosts:
            await host.stop(grace_s=0.0)

    def evidence(self) -> Evidence:
        return Evidence(
            {name: found.records for name, found in self.memory.sessions.items()}, ledger=self.ledger
        )

    def end(self) -> TurnEnded:
        record = decode(self.memory.sessions["s"].records[-1].body)
        assert isinstance(record, TurnEnded)
        return record

    def records(self) -> list[Record]:
        return [decode(each.body) for each in self.memory.sessions["s"].records]

    def answer(self) -> str:
        """Return the text of the last whole response."""
        records = [decode(each.body) for each in self.memory.sessions["s"].records]
        return [each.body.text for each in records if isinstance(each, ResponseCompleted)][-1]


async def _await_end(host: Host) -> None:
    """Wait until the session's turn has ended."""
    while True:
        try:
            runner = await host.session("s")
            while runner.state.is_live:
                await runner.wait(runner.newest.position)
        except MidstreamError:
            await host.world.sleep(0.1)
        else:
            return


async def _send_message(host: Host) -> None:
    await host.start()
    await host.wait_for_recovery()
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("go")))


async def _turn(host: Host) -> None:
    await _send_message(host)
    await _await_end(host)


async def _until_crash(host: Host, world: FakeWorld) -> bool:
    """Run a turn that may die on the way; return whether it did."""
    try:
        await world.live_through(_turn(host))
    except (Crashed, MidstreamError):
        assert world.is_dead
    return world.is_dead


async def _recover(lab: Lab) -> None:
    """Let a new process finish the work; a message that never arrived is sent again."""
    lab.kill()
    host, world = lab.host()

    async def finish() -> None:
        await host.start()
        await host.wait_for_recovery()
        if await host.store.find("s") is None or not (await host.session("s", create=True)).state.turns:
            await _send_message(host)
        await _await_end(host)

    await world.live_through(finish())


@pytest.mark.slow
@spec("TURN-13", "TURN-16", "TURN-21")
@pytest.mark.parametrize("point", IN_THIS_PROCESS)
async def test_a_turn_survives_the_death_of_its_process_at_every_point(point: Fault) -> None:
    for count in range(1, 100):
        lab = Lab()
        host, world = lab.host()
        world.crash_at(point, count=count)
        died = await _until_crash(host, world)
        if died:
            await _recover(lab)
        await lab.bury()

        assert check_ended(lab.evidence()) == [], f"{point} {count}"
        assert (lab.end().status, lab.answer()) == (TurnStatus.COMPLETED, ANSWER), f"{point} {count}"
        if not died:
            assert count > 1, f"{point} was never reached"
            return
    pytest.fail(f"{point} is reached without end")


ENTRIES_READ_MAX = 2


def _short_context_response(request: ModelRequest) -> Response:
    """Read three files one after another; refuse input longer than a message and one step."""
    if len(request.history.entries) > ENTRIES_READ_MAX:
        return [ContextOverflowError("too long")]
    *_, last = request.history.entries
    done = int(last.response.calls[0].id) if isinstance(last, Step) else 0
    return calls((str(done + 1), "read", "{}")) if done < 3 else text(ANSWER)


@pytest.mark.slow
@spec("TURN-25", "TURN-27")
@pytest.mark.parametrize("point", IN_THIS_PROCESS)
async def test_a_turn_that_is_too_long_for_its_model_survives_the_same_deaths(point: Fault) -> None:
    for count in range(1, 100, 3):  # the test above covers each
        lab = Lab(script=_short_context_response)
        host, world = lab.host()
        world.crash_at(point, count=count)
        died = await _until_crash(host, world)
        if died:
            await _recover(lab)
        await lab.bury()

        assert check_ended(lab.evidence()) == [], f"{point} {count}"
        assert (lab.end().status, lab.answer()) == (TurnStatus.COMPLETED, ANSWER), f"{point} {count}"
        cuts = [record.cut for record in lab.records() if isinstance(record, HistoryCompacted)]
        assert cuts == [2, 3], f"{point} {count}: each is decided once, whoever dies"
        if not died:
            return
    pytest.fail(f"{point} is reached without end")


@pytest.mark.parametrize("seed", range(tried(40)))
async def test_a_turn_ends_however_often_its_processes_die(seed: int) -> None:
    """Recovery is killed too: the checker finds nothing, and the turn ends in one of the known ways."""
    chance = random.Random(seed)
    lab = Lab(seed)
    for _ in range(chance.randint(1, 6)):
        lab.kill()
        host, world = lab.host()
        world.crash_at(chance.choice(IN_THIS_PROCESS), count=chance.randint(1, 12))
        is_new = not lab.memory.sessions.get("s") or not lab.memory.sessions["s"].records
        try:
            await world.live_through(_turn(host) if is_new else _continue(host))
        except (Crashed, MidstreamError):
            assert world.is_dead
        assert check(lab.evidence()) == []
    await _recover(lab)
    await lab.bury()
    assert check_ended(lab.evidence()) == []
    assert lab.end().status in {TurnStatus.COMPLETED, TurnStatus.INTERRUPTED}


async def _continue(host: Host) -> None:
    await host.start()
    await host.wait_for_recovery()
    await _await_end(host)


@spec("TURN-23")
@pytest.mark.parametrize("records", range(1, 33, 3))
async def test_a_node_wrongly_considered_dead_does_no_harm(records: int) -> None:
    """It was frozen, its lease went to another node, and it resumes in the middle of its work."""
    lab = Lab()
    frozen, world = lab.host()

    async def until_far_enough() -> None:
        await _send_message(frozen)
        while len(lab.memory.sessions["s"].records) < records:
            await world.sleep(0.01)

    await world.live_through(until_far_enough())
    lab.kill()
    second, other = lab.host()

    async def take_over() -> None:
        await second.start()
        await second.wait_for_recovery()

    await other.live_through(take_over())
    await world.advance(60.0)
    await other.live_through(_await_end(second))
    await lab.bury()
    assert check_ended(lab.evidence()) == []
    assert lab.answer() == ANSWER


@pytest.mark.parametrize("error", [StoreFullError("full"), StoreBusyError("locked")], ids=lambda e: e.code)
async def test_a_brief_failure_of_the_store_costs_nothing(error: MidstreamError) -> None:
    for number in range(2, 60):
        lab = Lab()
        store = FailingStore(MemoryStore(lab.memory), {number: error})
        host, world = lab.host(store)
        await world.live_through(_turn(host))
        await lab.bury()
        assert check_ended(lab.evidence()) == []
        assert lab.answer() == ANSWER
        assert max(run.run for run in lab.ledger) == 1, "nothing was in doubt"
        if store.appends < number:
            return
    pytest.fail("the turn has more appends than expected")


async def test_a_message_that_could_not_be_stored_is_refused_and_can_be_sent_again() -> None:
    lab = Lab()
    store = FailingStore(MemoryStore(lab.memory), {1: StoreFullError("full")})
    host, world = lab.host(store)
    with pytest.raises(StoreFullError):
        await world.live_through(_send_message(host))
    assert lab.memory.sessions["s"].records == []
    await world.live_through(_turn(host))
    await lab.bury()
    assert check_ended(lab.evidence()) == []
    assert lab.answer() == ANSWER


async def test_a_lost_lease_ends_the_session_here_and_nothing_is_written() -> None:
    lab = Lab()
    store = FailingStore(MemoryStore(lab.memory), {4: LeaseLostError("a newer node")})
    host, world = lab.host(store)
    await world.live_through(_send_message(host))
    runner = await host.session("s")
    await world.advance(0.05)
    assert runner.has_failed
    assert check(lab.evidence()) == []
    await lab.bury()


def test_a_cancelled_event_loop_does_not_wait_for_an_unstopped_session() -> None:
    """A host mounted in an app that is never stopped: Ctrl-C cancels everything at once."""
    began = asyncio.Event()

    @tool
    async def work() -> str:
        """Work on."""
        began.set()
        await asyncio.Event().wait()
        return "never"

    async def main() -> None:
        host = Host(Agent(ScriptedModel([calls(("work", "{}"))]), tools=[work]), MemoryStore())
        await host.start()
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("go")))
        await asyncio.wait_for(began.wait(), 60)

    asyncio.run(main())  # the test's timeout bounds it


async def test_waiters_of_a_session_that_ended_on_a_bug_are_released() -> None:
    lab = Lab()
    host, world = lab.host()
    world.crash_at(Fault.BEFORE_CLAIM)
    with pytest.raises(MidstreamError, match="stopped on Crashed"):
        await asyncio.wait_for(_send_message(host), 60)
    await lab.bury()
