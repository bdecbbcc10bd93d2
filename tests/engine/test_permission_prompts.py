"""An upstream's agent that waits for people: what its session does, whatever dies, is stopped or takes its time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.permission_prompts import ARGUMENTS_CHARS_MAX, NOT_ASKED, TOO_LONG, AgentQuestions
from midstream.engine.runner import Runner
from midstream.engine.watchdog import Watch
from midstream.environment import Fault, World
from midstream.errors import AnswerMismatchError, MidstreamError, QuestionClosedError
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta, Working
from midstream.protocol.server_stream import waiting_on
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import NO_DECISION_CONTENT, Choice
from midstream.session.permissions import Allowed, Ask, Decision, Permission
from midstream.session.questions import questions_of
from midstream.session.records import (
    AnswerUsed,
    QuestionAnswered,
    QuestionAsked,
    QuestionClosed,
    Record,
    StallNoticed,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.session.session import Session
from midstream.session.turn.commands import (
    Answer,
    Cancel,
    PermissionRequested,
    PermissionWithdrawn,
    SendMessage,
    UseAnswer,
)
from midstream.session.turn.pending import AnswerAgent, CallModel
from midstream.session.turn.states import AgentQuestion, AwaitingModel
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import records_until_end
from midstream.testing.fake_worlds import Crashed, FakeWorld
from midstream.timing import StallBudgets
from tests.spec import spec

MAKE = Permission("agent-1", "Bash", "execute", '{"command":"make"}')
PUSH = Permission("agent-1", "Bash", "execute", '{"command":"git push"}', is_fixed=True)


class Coder:
    """A model whose agent asks leave for each of these, in order or at once, and writes down what it did."""

    name = "coder"

    def __init__(self, *wants: Permission, terms: Ask = Ask("Sure?"), is_hasty: bool = False) -> None:  # noqa: B008
        self.done: list[str] = []
        """What it was allowed and did."""
        self.heard: list[Decision] = []
        self.at_decision: Callable[[], None] = lambda: None
        self._wants = wants or (MAKE,)
        self._terms = terms
        self._is_hasty = is_hasty

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        yield TextDelta("Let me see. ")
        if self._is_hasty:
            await asyncio.gather(*(self._do(request, each) for each in self._wants))
        else:
            for each in self._wants:
                await self._do(request, each)
        yield Working()
        yield TextDelta("Done.")
        yield Finished()

    async def _do(self, request: ModelRequest, wanted: Permission) -> None:
        assert request.person is not None
        decision = await request.person(wanted, self._terms)
        self.at_decision()
        self.heard.append(decision)
        if isinstance(decision, Allowed):
            self.done.append(decision.arguments or wanted.arguments)


async def _host(coder: Coder, memory: Memory | None = None, world: World | None = None) -> Host:
    store = MemoryStore(memory) if world is None else MemoryStore(memory, world=world)
    host = Host(Agent(coder), store, world=world)
    await host.start()
    await host.wait_for_recovery()
    return host


async def _asked(runner: Runner, *, count: int = 1) -> None:
    """Wait until so many questions are open."""
    async with asyncio.timeout(60):
        while len(questions_of("s", runner.state)) < count:
            await runner.wait(runner.newest.position)


async def _begun(host: Host, *, count: int = 1) -> Runner:
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("build it")))
    await _asked(runner, count=count)
    return runner


def _answer(runner: Runner, choice: Choice = Choice.ALLOW, *, at: int = 0, text: str = "") -> Answer:
    asked = questions_of("s", runner.state)[at]
    return Answer(CallRef(asked.turn, asked.response, asked.call_id), asked.digest, choice, text)


def _kinds(records: tuple[Record, ...]) -> list[str]:
    kinds = (QuestionAsked, QuestionAnswered, QuestionClosed, AnswerUsed, TurnEnded)
    return [type(each).__name__ for each in records if isinstance(each, kinds)]


def _journal(memory: Memory) -> tuple[Record, ...]:
    return tuple(decode(each.body) for each in memory.sessions["s"].records)


@spec("TURN-77", "TURN-79")
async def test_the_question_its_answer_and_its_use_are_on_record_before_the_agent_goes_on() -> None:
    memory, coder = Memory(), Coder()
    seen: list[list[str]] = []
    coder.at_decision = lambda: seen.append(_kinds(_journal(memory)))
    host = await _host(coder, memory)
    runner = await _begun(host)
    (question,) = questions_of("s", runner.state)
    assert (question.name, question.arguments, question.text) == ("Bash", '{"command":"make"}', "Sure?")
    assert waiting_on(runner.state) == "person"
    assert coder.heard == []
    await runner.submit(_answer(runner))
    records = await records_until_end(runner, after=0)
    assert coder.done == ['{"command":"make"}']
    assert seen == [["QuestionAsked", "QuestionAnswered", "AnswerUsed"]]
    assert isinstance(records[-1], TurnEnded)
    assert records[-1].status is TurnStatus.COMPLETED
    await host.stop()


@spec("TURN-77")
async def test_a_denial_reaches_the_agent_with_its_reason() -> None:
    coder = Coder()
    host = await _host(coder)
    runner = await _begun(host)
    await runner.submit(_answer(runner, Choice.DENY, text="not today"))
    await records_until_end(runner, after=0)
    assert coder.done == []
    assert coder.heard == ["A person declined this call. It was not started. They said: not today"]
    await host.stop()


@spec("TURN-81")
async def test_other_arguments_reach_an_agent_that_takes_them_and_are_refused_for_one_that_does_not() -> None:
    coder = Coder(MAKE, PUSH)
    host = await _host(coder)
    runner = await _begun(host)
    edited = _answer(runner)
    await runner.submit(
        Answer(
            CallRef(1, 1, edited.ref.call_id), edited.digest, Choice.ALLOW, arguments='{"command":"make -n"}'
        )
    )
    await _asked(runner)
    fixed = _answer(runner)
    with pytest.raises(AnswerMismatchError, match="allow it as it is, or deny it"):
        await runner.submit(
            Answer(
                CallRef(1, 1, fixed.ref.call_id),
                fixed.digest,
                Choice.ALLOW,
                arguments='{"command":"git pull"}',
            )
        )
    await runner.submit(_answer(runner))
    await records_until_end(runner, after=0)
    assert coder.done == ['{"command":"make -n"}', '{"command":"git push"}']
    await host.stop()


@spec("TURN-77")
async def test_several_questions_of_one_agent_are_answered_in_any_order() -> None:
    coder = Coder(MAKE, PUSH, is_hasty=True)
    host = await _host(coder)
    runner = await _begun(host, count=2)
    await runner.submit(_answer(runner, at=1))
    await runner.submit(_answer(runner, Choice.DENY))
    await records_until_end(runner, after=0)
    assert coder.done == ['{"command":"git push"}']
    await host.stop()


@spec("TURN-80")
async def test_a_stop_ends_the_wait_and_closes_the_question() -> None:
    coder = Coder()
    host = await _host(coder)
    runner = await _begun(host)
    late = _answer(runner)
    await runner.submit(Cancel())
    records = await records_until_end(runner, after=0)
    assert _kinds(records) == ["QuestionAsked", "QuestionClosed", "TurnEnded"]
    with pytest.raises(QuestionClosedError):
        await runner.submit(late)
    assert coder.heard == []
    await host.stop()


@spec("TURN-78", "TURN-80")
async def test_people_may_take_hours_and_where_their_time_is_over_the_agent_is_told() -> None:
    world = FakeWorld()
    coder = Coder(terms=Ask(answer_s=3 * 3600.0))
    host = await _host(coder, world=world)

    async def begin() -> Runner:
        return await _begun(host)

    runner = await world.live_through(begin())
    await world.advance(2 * 3600.0)
    assert waiting_on(runner.state) == "person"
    assert runner.is_idle is False
    await world.advance(3601.0)
    records = await records_until_end(runner, after=0)
    assert coder.heard == [NO_DECISION_CONTENT]
    assert _kinds(records) == ["QuestionAsked", "QuestionClosed", "AnswerUsed", "TurnEnded"]
    assert not any(isinstance(each, StallNoticed) for each in records)
    await host.stop()


@spec("TURN-78")
async def test_once_people_have_answered_silence_counts_again() -> None:
    world = FakeWorld()

    class Silent(Coder):
        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            yield TextDelta("Let me see. ")
            await self._do(request, MAKE)
            await world.sleep(40.0)
            yield TextDelta("Done.")
            yield Finished()

    coder = Silent()
    host = await _host(coder, world=world)

    async def begin() -> Runner:
        return await _begun(host)

    runner = await world.live_through(begin())
    await world.advance(5000.0)
    await runner.submit(_answer(runner))
    await world.live_through(_until_end(runner))
    records = await records_until_end(runner, after=0)
    (noticed,) = (each for each in records if isinstance(each, StallNoticed))
    assert noticed.silent_s < 40.0
    await host.stop()


@spec("TURN-77")
async def test_what_nobody_could_read_is_not_asked() -> None:
    long = Permission("agent-1", "Write", "edit", '"' + "x" * ARGUMENTS_CHARS_MAX + '"')
    coder = Coder(long)
    host = await _host(coder)
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("build it")))
    records = await records_until_end(runner, after=0)
    assert coder.heard == [TOO_LONG]
    assert _kinds(records) == ["TurnEnded"]
    await host.stop()


@spec("TURN-80")
async def test_an_agent_that_waits_no_more_takes_its_question_back() -> None:
    class Impatient(Coder):
        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            asking = asyncio.ensure_future(self._do(request, MAKE))
            await asyncio.sleep(0)
            await gate.wait()
            asking.cancel()
            await asyncio.wait({asking})
            yield TextDelta("Done without.")
            yield Finished()

    gate = asyncio.Event()
    host = await _host(Impatient())
    runner = await _begun(host)
    late = _answer(runner)
    gate.set()
    records = await records_until_end(runner, after=0)
    assert _kinds(records) == ["QuestionAsked", "QuestionClosed", "TurnEnded"]
    with pytest.raises(QuestionClosedError):
        await runner.submit(late)
    await host.stop()


async def test_who_asks_after_its_attempt_has_ended_is_told_so() -> None:
    left: list[Callable[[], object]] = []

    class Late(Coder):
        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            left.append(lambda: self._do(request, MAKE))
            yield TextDelta("Done.")
            yield Finished()

    coder = Late()
    host = await _host(coder)
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("build it")))
    await records_until_end(runner, after=0)
    await left[0]()  # type: ignore[misc]
    assert coder.heard == [NOT_ASKED]
    await host.stop()


@spec("TURN-77", "TURN-56")
async def test_an_answer_may_come_at_another_process() -> None:
    memory, coder = Memory(), Coder()
    first, second = await _host(coder, memory), await _host(Coder(), memory)
    await _begun(first)
    elsewhere = await second.session("s")
    await elsewhere.submit(_answer(elsewhere))
    await records_until_end(await first.session("s"), after=0)
    assert coder.done == ['{"command":"make"}']
    await first.stop()
    await second.stop()


async def _until_end(runner: Runner) -> None:
    while runner.state.is_live:
        await runner.wait(runner.newest.position)


class People:
    """Answer whatever is asked, once each, as often as it is asked anew."""

    def __init__(self) -> None:
        self.given = 0

    async def work(self, runner: Runner) -> None:
        while runner.state.is_live:
            for question in questions_of("s", runner.state):
                answer = Answer(
                    CallRef(question.turn, question.response, question.call_id), question.digest, Choice.ALLOW
                )
                await runner.submit(answer)
                self.given += 1
            if runner.state.is_live:
                await runner.wait(runner.newest.position)


async def _turn(host: Host, people: People) -> None:
    await host.start()
    await host.wait_for_recovery()
    runner = await host.session("s", create=True)
    if not runner.state.turns:
        await runner.submit(SendMessage(UserMessage.of("build it")))
    await people.work(runner)


@spec("TURN-79", "TURN-80")
@pytest.mark.parametrize("point", [Fault.BEFORE_APPEND, Fault.AFTER_APPEND, Fault.AFTER_PUBLISH])
async def test_whenever_the_process_dies_the_turn_ends_and_no_leave_is_used_twice(point: Fault) -> None:
    for count in range(1, 50):
        memory, coder, people = Memory(), Coder(), People()
        world = FakeWorld()
        world.crash_at(point, count=count)
        host = Host(Agent(coder), MemoryStore(memory, world=world), world=world)
        try:
            await world.live_through(_turn(host, people))
        except (Crashed, MidstreamError):
            assert world.is_dead
        memory.living.clear()
        if world.is_dead:
            again = FakeWorld(1, at=1_000_060.0)
            second = Host(Agent(coder), MemoryStore(memory, world=again), world=again)
            await again.live_through(_turn(second, people))
            await second.stop()
        await host.stop(grace_s=0.0)
        records = _journal(memory)
        assert isinstance(records[-1], TurnEnded), f"{point} {count}"
        answered = [each.call_id for each in records if isinstance(each, QuestionAnswered)]
        used = [each.call_id for each in records if isinstance(each, AnswerUsed)]
        assert len(used) == len(set(used)), f"{point} {count}"
        assert set(used) <= set(answered), f"{point} {count}"
        assert 1 <= len(coder.done) <= len(used), f"{point} {count}"
        if not world.is_dead:
            assert count > 1
            return
    pytest.fail(f"{point} is reached without end")


@spec("TURN-79")
async def test_what_was_allowed_and_not_used_when_the_process_died_is_not_asked_about_again() -> None:
    """Found by trying each append: one of the deaths falls between an answer and its use."""
    memory, coder, people = Memory(), Coder(), People()
    for count in range(1, 50):
        memory, coder, people = Memory(), Coder(), People()
        world = FakeWorld()
        world.crash_at(Fault.BEFORE_APPEND, count=count)
        host = Host(Agent(coder), MemoryStore(memory, world=world), world=world)
        with contextlib.suppress(Crashed, MidstreamError):
            await world.live_through(_turn(host, people))
        await host.stop(grace_s=0.0)
        if _kinds(_journal(memory)) == ["QuestionAsked", "QuestionAnswered"]:
            break
    assert coder.done == []
    memory.living.clear()
    world = FakeWorld(1, at=1_000_060.0)
    second = Host(Agent(coder), MemoryStore(memory, world=world), world=world)
    nobody = People()
    await world.live_through(_turn(second, nobody))
    assert nobody.given == 0
    assert coder.done == ['{"command":"make"}']
    (_, repeated) = (each for each in _journal(memory) if isinstance(each, QuestionAsked))
    assert repeated.repeats
    await second.stop()


@spec("TURN-79", "TURN-53")
async def test_a_process_that_was_frozen_tells_its_agent_nothing() -> None:
    """What a new node of the session found used up is asked about again there; here it must not happen too."""

    class Taken:
        """A session that another process has taken over since."""

        async def show(self, command: PermissionRequested) -> None:
            """It was journaled before."""

        async def append_first(self, command: PermissionWithdrawn | UseAnswer) -> None:
            """It was journaled before."""

        def note(self, command: PermissionWithdrawn) -> None:
            """Nobody hears it."""

        async def confirm(self) -> None:
            raise asyncio.CancelledError

    world = FakeWorld()
    questions = AgentQuestions(world, Taken())
    asking = CallModel(AttemptRef(1, 1, 1))
    watch = Watch(world, StallBudgets(), ("s", 1, 1, ""), lambda _: None)
    waiting = asyncio.ensure_future(questions.person(asking, watch)(MAKE, Ask()))
    await asyncio.sleep(0)
    ((_, question_id),) = questions._waiting
    asked = AgentQuestion(question_id, 1, "Bash", "{}", "d", 1.0, choice=Choice.ALLOW)
    session = Session(turn=AwaitingModel(1, 1, attempt=1, questions=(asked,)), turns=1)
    with pytest.raises(asyncio.CancelledError):
        await questions.deliver_decision(AnswerAgent(AttemptRef(1, 1, 1), question_id), session)
    assert not waiting.done()
    questions.end(asking)
    assert await waiting == NOT_ASKED
