"""Two hosts on one store: each reads, forwards to and takes over sessions of the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

from midstream.engine import host as host_module
from midstream.engine.agent import Agent, sub_agent
from midstream.engine.forwarding import Accepted, encode_answer
from midstream.engine.host import RELEASE_WITHIN_S, Host
from midstream.engine.runner import Runner, StopMode
from midstream.errors import (
    DrainingError,
    JournalMovedError,
    LeaseLostError,
    SeqnoReusedError,
    SessionBusyError,
    StoreBusyError,
)
from midstream.history.messages import Outcome, ToolResult, UserMessage
from midstream.models.responses import Finished, TextDelta
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CancelRequested,
    ChildDelta,
    EpochStarted,
    MessageAccepted,
    Parent,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.session import Received
from midstream.session.turn.commands import Cancel, SendMessage, WhenBusy, Withdraw
from midstream.store.memory import MemoryStore
from midstream.testing import FailingStore, ScriptedModel, Stall, calls, records_until_end, run_turn, text
from midstream.testing.scripted_model import Gate, ScriptedStep
from midstream.testing.store_fakes import StoreInFront
from tests.engine.several_hosts import WAIT_S, Places, ScriptedStore, run_turn_of, send_message
from tests.spec import spec


async def _until(is_true: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if is_true():
            return
        await asyncio.sleep(0)
    raise TimeoutError


def _is_free(places: Places, session: str) -> bool:
    return places.memory.sessions[session].node is None


def _command(words: str, *, seqno: int = 0, digest: str = "d") -> Received:
    return Received("k", "secret", seqno, digest, SendMessage(UserMessage.of(words)))


@spec("TURN-55")
async def test_a_reader_on_another_node_receives_the_turn_as_it_grows(places: Places) -> None:
    go = asyncio.Event()
    here = await places.host([[TextDelta("half"), Gate(go), TextDelta("whole"), Finished()]])
    there = await places.host()
    ours = await send_message(here, "hi")
    theirs = await there.session("s")
    theirs.attach()
    assert theirs.is_following
    await ours.wait(3)
    await theirs.wait(3)
    assert theirs.state == ours.state
    go.set()
    assert await records_until_end(theirs, after=0) == await records_until_end(ours, after=0)
    assert not theirs.state.is_live
    theirs.detach()


@spec("TURN-56")
async def test_the_owning_node_decides_commands_of_other_nodes(places: Places) -> None:
    here = await places.host([[Stall()]])
    there = await places.host()
    await run_turn_of(here, "first")
    theirs = await there.session("s")
    end = await theirs.submit(_command("second"))
    assert end == len(places.records()) == theirs.newest.position
    assert theirs.state.is_live, "who asked reads at once what came of it"
    assert await theirs.submit(_command("second")) == end, "again is the same"
    with pytest.raises(SeqnoReusedError):
        await theirs.submit(_command("other", digest="e"))
    with pytest.raises(SessionBusyError):
        await theirs.submit(SendMessage(UserMessage.of("third")))
    await theirs.submit(Cancel())
    await theirs.submit(Cancel())
    assert [each.turn for each in places.records() if isinstance(each, CancelRequested)] == [1, 2]
    assert len([each for each in places.records() if isinstance(each, MessageAccepted)]) == 2
    assert [each.epoch for each in places.records() if isinstance(each, EpochStarted)] == [1]


@spec("TURN-39", "TURN-56")
async def test_the_agents_turn_limit_applies_wherever_the_message_arrived(places: Places) -> None:
    here = await places.host([text("hello"), text("hello")], turn_s=90.0)
    there = await places.host(turn_s=90.0)
    await run_turn_of(here, "first")
    await (await there.session("s")).submit(_command("second"))
    messages = [each for each in places.records() if isinstance(each, MessageAccepted)]
    assert [each.timeout_s for each in messages] == [90.0, 90.0]


@spec("TURN-74")
@pytest.mark.parametrize("is_running", [True, False])
async def test_a_command_decided_twice_takes_effect_once(places: Places, *, is_running: bool) -> None:
    here = await places.host([text("hello"), [Stall()] if is_running else text("hello"), text("hello")])
    there = await places.host()
    await run_turn_of(here, "first")
    theirs = await there.session("s")
    await here._caretaker.stop()  # the test wakes it
    asking = asyncio.ensure_future(theirs.submit(SendMessage(UserMessage.of("second"))))
    await _until(lambda: bool(places.memory.forwarded_commands))
    ((number, handed),) = places.memory.forwarded_commands.items()
    ours = await here.session("s")
    ends = [await here._caretaker._decide_forwarded(handed.forwarded)]
    await _until(lambda: ours.state.is_live == is_running)
    ends.append(await here._caretaker._decide_forwarded(handed.forwarded))
    assert len([each for each in places.records() if isinstance(each, MessageAccepted)]) == 2
    assert ends[0].position <= ends[1].position == ours.newest.position
    assert [each.is_replayed for each in ends] == [False, True]
    await here.store.answer(number, encode_answer(ends[0]))
    assert await asking == ends[0].position


@spec("TURN-74")
async def test_a_withdraw_or_resume_decided_twice_takes_effect_once(places: Places) -> None:
    """A command without a name (all waiting ones, the last turn) must not change its meaning the second time."""
    here = await places.host([[Stall()]])
    there = await places.host()
    ours = await send_message(here, "first")
    theirs = await there.session("s")
    await here._caretaker.stop()
    later = SendMessage(UserMessage.of("later"), when_busy=WhenBusy.QUEUE)
    await ours.submit(later)
    asking = asyncio.ensure_future(theirs.submit(Withdraw()))
    await _until(lambda: bool(places.memory.forwarded_commands))
    ((number, handed),) = places.memory.forwarded_commands.items()
    await here._caretaker._decide_forwarded(handed.forwarded)
    assert not ours.state.queue
    await ours.submit(later)
    await here._caretaker._decide_forwarded(handed.forwarded)
    assert [each.number for each in ours.state.queue] == [2]
    await here.store.answer(number, encode_answer(Accepted()))
    await asking


@spec("TURN-56")
async def test_an_undecided_command_of_a_dead_node_goes_to_the_next(places: Places) -> None:
    here = await places.host()
    there = await places.host([text("from there")])
    await run_turn(here, "s", "first")
    theirs = await there.session("s")
    await here._caretaker.stop()  # it receives nothing any more
    asking = asyncio.ensure_future(theirs.submit(_command("second")))
    await _until(lambda: bool(places.memory.forwarded_commands))
    await places.kill(here)
    await asking
    theirs = await there.session("s")
    async with asyncio.timeout(WAIT_S):
        while theirs.state.is_live:
            await theirs.wait(theirs.newest.position)
    assert [each.epoch for each in places.records() if isinstance(each, EpochStarted)] == [1, 2]
    assert len([each for each in places.records() if isinstance(each, MessageAccepted)]) == 2


@spec("TURN-51")
async def test_a_surviving_node_continues_unprompted_and_its_readers_stay(places: Places) -> None:
    here = await places.host([[TextDelta("half"), Stall()]])
    others = [await places.host([text("the whole")]) for _ in range(3)]
    await send_message(here, "hi")
    reader = await others[0].session("s")
    reader.attach()
    await places.kill(here)
    records = await records_until_end(reader, after=0)
    assert [each.attempt for each in records if isinstance(each, AttemptStarted)] == [1, 2]
    assert [each.epoch for each in records if isinstance(each, EpochStarted)] == [1, 2], "one of them took it"
    assert reader.newest.position == len(places.records())
    reader.detach()


@spec("TURN-54")
async def test_a_stopping_host_gives_up_at_a_boundary_while_others_live(places: Places) -> None:
    go = asyncio.Event()
    here = await places.host([[TextDelta("half "), Gate(go), TextDelta("whole"), Finished()]])
    there = await places.host([text("no")])
    await send_message(here, "hi")
    await _until(lambda: here._caretaker.peers == 1)
    stopping = asyncio.ensure_future(here.stop(grace_s=5))
    for _ in range(5):
        await asyncio.sleep(0)
    go.set()
    await stopping
    runner = await there.session("s")
    assert not runner.state.is_live
    responses = [each.body.text for each in places.records() if isinstance(each, ResponseCompleted)]
    assert responses == ["half whole"]


@spec("TURN-54")
async def test_nodes_that_hand_a_turn_over_do_not_count_as_dead(places: Places) -> None:
    host = await places.host([[Stall()]])
    await send_message(host, "hi")
    for _ in range(4):
        await host.stop(grace_s=0.01)
        host = await places.host([[Stall()]])
    runner = await host.session("s")
    assert runner.state.is_live
    started = [each for each in places.records() if isinstance(each, EpochStarted)]
    assert [each.is_handover for each in started] == [False, *[True] * 4]
    await runner.submit(Cancel())
    assert runner.state.last_turn is not None
    assert runner.state.last_turn.status is TurnStatus.CANCELLED


async def test_a_busy_store_at_the_death_of_a_node_is_tried_again(places: Places) -> None:
    here = await places.host([[Stall()]])
    store = FailingStore(MemoryStore(places.memory))
    there = await places.host([text("done")], store=store)
    await send_message(here, "hi")
    store.outage = StoreBusyError("locked")
    await places.kill(here)
    await _until(lambda: bool(there._caretaker._taking_up))
    store.outage = None
    await records_until_end(await there.session("s"), after=0)


async def test_recovery_does_not_keep_sessions_of_other_nodes_awake(places: Places) -> None:
    here = await places.host([[Stall()]])
    await send_message(here, "hi")
    there = await places.host()
    assert (there.recovery.total, there.recovery.elsewhere, there.recovery.failed) == (1, 1, 0)
    assert there.awake.get("s") is None


async def test_a_followed_session_sleeps_only_without_a_reader_and_its_error_advises_to_reconnect(
    places: Places,
) -> None:
    here = await places.host([[Stall()]])
    await send_message(here, "hi")
    there = await places.host()
    followed = await there.session("s")
    followed.attach()
    assert not await there.put_to_sleep("s")
    assert there.awake.get("s") is followed
    followed.detach()
    assert await there.put_to_sleep("s")
    with pytest.raises(DrainingError, match="went to sleep; reconnect"):
        await followed.wait(followed.newest.position)
    assert (await there.session("s")).newest == followed.newest


async def test_the_deletion_of_a_followed_session_ends_its_readers(places: Places) -> None:
    here = await places.host([text("a")])
    there = await places.host()
    await run_turn(here, "s", "hi")
    reader = await there.session("s")
    reader.attach()
    waiting = asyncio.ensure_future(reader.wait(reader.newest.position))
    await here.delete("s")
    with pytest.raises(JournalMovedError, match="deleted"):
        await waiting
    reader.detach()


@spec("TURN-56")
async def test_any_node_can_delete_a_session_but_not_during_a_turn(places: Places) -> None:
    here = await places.host([[Stall()]])
    there = await places.host()
    runner = await send_message(here, "hi")
    with pytest.raises(SessionBusyError):
        await there.delete("s")
    await runner.submit(Cancel())
    await there.delete("s")
    assert await there.store.find("s") is None
    assert here.awake.get("s") is None


@spec("STREAM-68")
async def test_readers_of_a_releasing_node_are_informed_once_another_process_has_deleted(
    places: Places,
) -> None:
    here = await places.host([text("a"), text("b")])
    store = ScriptedStore(places.memory)
    there = await places.host(store=store)
    await run_turn(here, "s", "hi")
    reader = await here.session("s")
    reader.attach()
    reading = asyncio.ensure_future(reader.wait(reader.newest.position))
    asking = store.hold("forward")
    deleting = asyncio.ensure_future(there.delete("s"))
    await asking.was_called.wait()
    store.refused = "delete"
    asking.may_continue.set()
    with pytest.raises(StoreBusyError):
        await deleting
    assert _is_free(places, "s"), "the node has let go of it"
    assert not reading.done(), "nothing was deleted, and no reader received an event"
    reading.cancel()
    await run_turn(here, "s", "and on")
    assert (await here.session("s")) is reader
    reading = asyncio.ensure_future(reader.wait(reader.newest.position))
    store.refused = ""
    await there.delete("s")
    with pytest.raises(JournalMovedError, match="deleted"):
        await reading
    reader.detach()


@spec("TURN-54")
async def test_a_session_given_up_while_another_node_claims_it_counts_as_handed_over(
    places: Places,
) -> None:
    claiming = ScriptedStore(places.memory)
    here = await places.host([[Stall()]])
    there = await places.host([[Stall()]], store=claiming)
    await send_message(here, "hi")
    theirs = await there.session("s")
    claim = claiming.hold("claim")
    second = SendMessage(UserMessage.of("second"), when_busy=WhenBusy.QUEUE)
    asking = asyncio.ensure_future(theirs.submit(second))
    await claim.was_called.wait()  # the session was found held
    await here.stop(grace_s=0.01)
    claim.may_continue.set()
    await asking
    assert places.handovers() == [False, True]


@spec("TURN-54")
@pytest.mark.parametrize("moment", ["claim", "claimed"])
async def test_a_stopping_host_gives_up_a_session_that_it_was_just_claiming(
    places: Places, moment: str
) -> None:
    claiming = ScriptedStore(places.memory)
    first = await places.host([[Stall()]])
    await send_message(first, "hi")
    await first.stop(grace_s=0.01)
    hold = claiming.hold(moment)
    second = Host(Agent(ScriptedModel([[Stall()]])), claiming)
    await second.start()
    await hold.was_called.wait()
    stopping = asyncio.ensure_future(second.stop(grace_s=0.01))
    await _until(lambda: all(task.cancelling() for task in second._opening.values()))
    hold.may_continue.set()
    await stopping
    third = await places.host([[Stall()]])
    assert (await third.session("s")).state.is_live
    assert places.handovers() == [False, True]


@spec("TURN-54")
async def test_a_session_that_a_busy_store_gives_up_late_counts_as_handed_over(places: Places) -> None:
    busy = ScriptedStore(places.memory)
    go = asyncio.Event()
    here = await places.host([[Gate(go), TextDelta("a"), Finished()]], store=busy)
    there = await places.host([text("b")])
    await _until(lambda: here.has_peers)
    await send_message(here, "hi")
    releasing = busy.hold("release")
    stopping = asyncio.ensure_future(here.stop(grace_s=WAIT_S))
    go.set()
    await releasing.was_called.wait()
    done, _ = await asyncio.wait({stopping}, timeout=RELEASE_WITHIN_S + 0.1)
    assert not done, "the rest of the grace is left"
    releasing.may_continue.set()
    await stopping
    await run_turn(there, "s", "and?")
    assert places.handovers() == [False, True]


@pytest.mark.parametrize("is_first", [True, False], ids=["command", "deletion"])
@spec("TURN-76")
async def test_a_command_during_the_release_of_its_session_is_accepted_or_leaves_nothing(
    places: Places,
    is_first: bool,  # noqa: FBT001 - a case
) -> None:
    owning, deleting = ScriptedStore(places.memory), ScriptedStore(places.memory)
    responses: Iterator[list[ScriptedStep]] = iter([text("a"), [Stall()]])
    here = await places.host(lambda _request: next(responses), store=owning)
    there = await places.host(store=deleting)
    await run_turn(here, "s", "hi")
    reader = await here.session("s")
    reader.attach()
    releasing = owning.hold("release")
    deletion = asyncio.ensure_future(there.delete("s"))
    await releasing.was_called.wait()
    second = deleting.hold("delete") if is_first else owning.hold("find")
    asking = asyncio.ensure_future(reader.submit(_command("wait, one more")))
    releasing.may_continue.set()
    if is_first:
        await asking
        second.may_continue.set()
        with pytest.raises(SessionBusyError):
            await deletion
        assert reader.state.is_live
        begun = [each.is_handover for each in places.records() if isinstance(each, EpochStarted)]
        assert begun == [False, True], "it was let go, and claimed anew"
    else:
        await deletion
        second.may_continue.set()
        with pytest.raises(JournalMovedError, match="deleted"):
            await asking
        assert places.memory.sessions == {}, "no other one is begun for it"
    reader.detach()


async def test_a_session_whose_runner_failed_at_its_node_can_be_deleted_by_another(places: Places) -> None:
    store = FailingStore(MemoryStore(places.memory))
    here = await places.host([text("a")], store=store)
    there = await places.host()
    await run_turn(here, "s", "hi")
    store.outage = LeaseLostError("somebody took it, and was killed")
    with pytest.raises(LeaseLostError):
        await send_message(here, "and?")
    store.outage = None
    assert not _is_free(places, "s"), "a runner that failed gives nothing up"
    await there.delete("s")
    assert places.memory.sessions == {}


async def test_a_command_for_a_silent_node_ends_with_the_host_that_forwards_it(places: Places) -> None:
    here = await places.host()
    there = await places.host()
    await run_turn(here, "s", "first")
    theirs = await there.session("s")
    await here._caretaker.stop()  # it receives nothing any more
    asking = asyncio.ensure_future(theirs.submit(_command("second")))
    await _until(lambda: bool(places.memory.forwarded_commands))
    await there.stop(grace_s=0)
    assert asking.done()
    with pytest.raises(DrainingError):
        await asking


async def test_a_command_that_waits_for_a_refresh_ends_with_its_session(places: Places) -> None:
    here = await places.host()
    there = await places.host()
    await run_turn(here, "s", "first")
    theirs = await there.session("s")
    async with theirs._unclaimed:  # another task folds the records of other nodes
        asking = asyncio.ensure_future(theirs.submit(_command("second")))
        for _ in range(5):
            await asyncio.sleep(0)
        await theirs.stop(StopMode.CLOSE, DrainingError("bye"))
        with pytest.raises(DrainingError):
            await asking


@spec("TURN-55")
async def test_a_parent_receives_the_child_that_another_process_runs(places: Places) -> None:
    go = asyncio.Event()
    here, there = await places.host(), await places.host()
    here.agent = _boss([])
    there.agent = _boss([TextDelta("half "), Gate(go), TextDelta("whole"), Finished()])
    child = await there.child("s::1.1.0", ("research",))
    place = Parent("s", 1, 1, "call_1", ("research",))
    await child.submit(SendMessage(UserMessage.of("find it"), parent=place))
    parent = await send_message(here, "where is it?")
    async with asyncio.timeout(WAIT_S):
        while not any(isinstance(each, ChildDelta) for each in places.records()):
            await parent.wait(parent.newest.position)
    await _until(lambda: "s::1.1.0" in here.awake.followed_ends())
    go.set()
    records = await records_until_end(parent, after=0)
    ended = next(each for each in records if isinstance(each, CallEnded))
    assert ended.result.content == "half whole"


@spec("TURN-48")
async def test_a_parent_cancels_the_child_that_another_process_runs(places: Places) -> None:
    here, there = await places.host(), await places.host()
    here.agent = _boss([])
    there.agent = _boss([TextDelta("half "), Stall()])
    child = await there.child("s::1.1.0", ("research",))
    place = Parent("s", 1, 1, "call_1", ("research",))
    await child.submit(SendMessage(UserMessage.of("find it"), parent=place))
    parent = await send_message(here, "where is it?")
    async with asyncio.timeout(WAIT_S):
        while not any(isinstance(each, ChildDelta) for each in places.records()):
            await parent.wait(parent.newest.position)
    await parent.submit(Cancel())
    records = await records_until_end(parent, after=0)
    ended = next(each for each in records if isinstance(each, CallEnded))
    assert ended.result == ToolResult(
        "c1", "The sub-agent was stopped. Its text so far: half ", Outcome.CANCELLED
    )
    assert child.state.last_turn is not None
    assert child.state.last_turn.status is TurnStatus.CANCELLED
    assert [each.epoch for each in places.records("s::1.1.0") if isinstance(each, EpochStarted)] == [1]


@spec("TURN-76")
async def test_a_session_is_deleted_with_its_sub_agents_wherever_they_are_awake(places: Places) -> None:
    here, there = await places.host(), await places.host()
    here.agent = there.agent = _boss(text("found"))
    child = await there.child("s::1.1.0", ("research",))
    place = Parent("s", 1, 1, "c1", ("research",))
    await child.submit(SendMessage(UserMessage.of("find it"), parent=place))
    await records_until_end(child, after=0)
    records = await run_turn(here, "s", "where is it?")
    assert isinstance(records[-1], TurnEnded)
    assert not child.may_grow_elsewhere, "it is that process's still"
    child.attach()
    reading = asyncio.ensure_future(child.wait(child.newest.position))
    await asyncio.sleep(0)
    await here.delete("s")
    assert places.memory.sessions == {}
    with pytest.raises(JournalMovedError, match="deleted"):
        await reading
    child.detach()


@spec("TURN-76")
async def test_a_session_is_not_deleted_while_a_sub_agent_runs(places: Places) -> None:
    here, there = await places.host(), await places.host()
    here.agent = there.agent = _boss([Stall()])
    place = Parent("s", 1, 1, "c1", ("research",))
    await run_turn_of(here, "nobody asks for help")
    child = await there.child("s::1.1.0", ("research",))
    await child.submit(SendMessage(UserMessage.of("find it"), parent=place))
    with pytest.raises(SessionBusyError, match=r"s::1\.1\.0"):
        await here.delete("s")
    assert sorted(places.memory.sessions) == ["s", "s::1.1.0"]


@spec("TURN-48")
async def test_a_child_taken_from_a_frozen_process_is_not_given_up_by_its_parent(
    places: Places,
) -> None:
    here, there = await places.host(), await places.host()
    go = asyncio.Event()
    here.agent = _boss([TextDelta("half "), Gate(go), Finished()])
    there.agent = _boss(text("whole"))
    parent = await send_message(here, "where is it?")
    await _until(lambda: "s::1.1.0" in places.memory.sessions and bool(places.records("s::1.1.0")))
    assert isinstance(here.store, MemoryStore)
    places.memory.living.discard(here.store.node)  # its heartbeat was missed for a moment
    await there.session("s::1.1.0")
    places.memory.living.add(here.store.node)
    go.set()
    records = await records_until_end(parent, after=0)
    assert [each.epoch for each in records if isinstance(each, EpochStarted)] == [1], "it keeps the parent"
    ended = next(each for each in records if isinstance(each, CallEnded))
    assert ended.result.content == "whole"


def _boss(response: list[ScriptedStep]) -> Agent:
    finder = Agent(ScriptedModel([response]), name="finder")
    helper = sub_agent(finder, name="research", description="Finds things.")
    return Agent(ScriptedModel([calls(("research", '{"task": "find it"}')), text("thanks")]), tools=[helper])


# --- turns without a report ---------------------------------------------------------------------------------------


async def _follow_dead_node(places: Places, store: ScriptedStore) -> tuple[Host, Runner]:
    """Return a host that followed a turn whose node died, and has not been informed of that."""
    here = await places.host([[Stall()]])
    there = await places.host([text("done"), text("done")], store=store)
    await send_message(here, "hi")
    theirs = await there.session("s")
    await _until(lambda: there._caretaker.peers == 1)
    watching = store.hold("watch")
    there._caretaker.refresh_followed()
    await watching.was_called.wait()
    await places.kill(here)
    return there, theirs


@spec("TURN-51")
async def test_a_turn_continues_after_a_claim_for_a_command_that_could_not_be_written(
    places: Places,
) -> None:
    store = ScriptedStore(places.memory)
    _, theirs = await _follow_dead_node(places, store)
    store.refused = "append"
    with pytest.raises(StoreBusyError):
        await theirs.submit(SendMessage(UserMessage.of("second"), when_busy=WhenBusy.QUEUE))
    store.refused = ""
    assert any(isinstance(each, TurnEnded) for each in await records_until_end(theirs, after=0))


class _EndObserver:
    """Observes the end of a turn."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    def on_append(self, session: str, records: Sequence[Record]) -> None:
        if any(isinstance(each, TurnEnded) for each in records):
            self.reached.set()


@spec("TURN-51")
async def test_an_unread_turn_continues_after_a_failed_claim_of_its_session(
    places: Places,
) -> None:
    here = await places.host([[Stall()]])
    store = ScriptedStore(places.memory)
    there = await places.host([text("done")], store=store)
    await run_turn_of(here, "first")
    theirs = await there.session("s")
    await _until(lambda: there._caretaker.peers == 1)
    watching = store.hold("watch")
    there._caretaker.refresh_followed()
    await watching.was_called.wait()
    await send_message(here, "second")
    await places.kill(here)
    store.refused = "read"
    with pytest.raises(StoreBusyError):
        await theirs._mailbox.post(None)  # like a deadline, which no client sends again
    store.refused = ""
    ends = _EndObserver()
    there.observers.add(ends)
    await ends.reached.wait()


@spec("TURN-51")
async def test_a_turn_continues_whose_node_returned_and_died_between_two_checks(
    places: Places,
) -> None:
    store = ScriptedStore(places.memory)
    here = await places.host([[Stall()]])
    there = await places.host([text("done")], store=store)
    await send_message(here, "hi")
    theirs = await there.session("s")
    claim = store.hold("claim")
    assert isinstance(here.store, MemoryStore)
    places.memory.living.discard(here.store.node)  # its lock was lost for a moment
    places.memory.wake_watchers()
    await claim.was_called.wait()
    places.memory.living.add(here.store.node)
    claim.may_continue.set()
    await _until(
        lambda: not there.awake.runners["s"]._mailbox.is_idle or "s" not in there._caretaker._taking_up
    )
    await places.kill(here)
    assert any(isinstance(each, TurnEnded) for each in await records_until_end(theirs, after=0))


async def test_a_session_is_readable_while_an_outage_delays_its_claim(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ScriptedStore(places.memory)
    here, there = await places.host([text("two")], store=store), await places.host([text("one")])
    await run_turn_of(there, "one")
    known = (await here.session("s")).newest
    await places.kill(there)
    claim = store.hold("claim")
    sending = asyncio.ensure_future(send_message(here, "two"))
    await claim.was_called.wait()
    monkeypatch.setattr(host_module, "CLAIM_S", 0.01)
    assert (await here.session("s")).newest == known
    claim.may_continue.set()
    await sending


async def test_a_defect_does_not_end_the_monitoring_of_other_nodes(caplog: pytest.LogCaptureFixture) -> None:
    again = asyncio.Event()

    class Defective(StoreInFront):
        watches = 0

        async def before_operation(self, operation: str, session: str) -> None:
            if operation == "watch":
                self.watches += 1
                if self.watches == 1:
                    raise KeyError("a defect")
                again.set()

    async with Host(Agent(ScriptedModel([])), Defective(MemoryStore())):
        async with asyncio.timeout(60):
            await again.wait()
    assert "it begins again" in caplog.text
