"""An upstream agent that waits for people: its session after deaths, cancels and long waits."""

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


class PermissionModel:
    """A model whose agent requests permission for each of these, in order or at once, and records its actions."""

    name = "coder"

    def __init__(self, *permissions: Permission, terms: Ask = Ask("Sure?"), is_hasty: bool = False) -> None:  # noqa: B008
        self.done: list[str] = []
        """The permitted actions that it ran."""
        self.received: list[Decision] = []
        self.at_decision: Callable[[], None] = lambda: None
        self._permissions = permissions or (MAKE,)
        self._terms = terms
        self._is_hasty = is_hasty

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        yield TextDelta("Let me see. ")
        if self._is_hasty:
            await asyncio.gather(*(self._do(request, each) for each in self._permissions))
        else:
            for each in self._permissions:
                await self._do(request, each)
        yield Working()
        yield TextDelta("Done.")
        yield Finished()

    async def _do(self, request: ModelRequest, wanted: Permission) -> None:
        assert request.person is not None
        decision = await request.person(wanted, self._terms)
        self.at_decision()
        self.received.append(decision)
        if isinstance(decision, Allowed):
            self.done.append(decision.arguments or wanted.arguments)


async def _host(coder: PermissionModel, memory: Memory | None = None, world: World | None = None) -> Host:
    store = MemoryStore(memory) if world is None else MemoryStore(memory, world=world)
    host = Host(Agent(coder), store, world=world)
    await host.start()
    await host.wait_for_recovery()
    return host


async def _wait_for_questions(runner: Runner, *, count: int = 1) -> None:
    """Wait until this many questions are open."""
    async with asyncio.timeout(60):
        while len(questions_of("s", runner.state)) < count:
            await runner.wait(runner.newest.position)


async def _start(host: Host, *, count: int = 1) -> Runner:
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("build it")))
    await _wait_for_questions(runner, count=count)
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
async def test_question_answer_and_use_are_recorded_before_the_agent_continues() -> None:
    memory, coder = Memory(), PermissionModel()
    seen: list[list[str]] = []
    coder.at_decision = lambda: seen.append(_kinds(_journal(memory)))
    host = await _host(coder, memory)
    runner = await _start(host)
    (question,) = questions_of("s", runner.state)
    assert (question.name, question.arguments, question.text) == ("Bash", '{"command":"make"}', "Sure?")
    assert waiting_on(runner.state) == "person"
    assert coder.received == []
    await runner.submit(_answer(runner))
    records = await records_until_end(runner, after=0)
    assert coder.done == ['{"command":"make"}']
    assert seen == [["QuestionAsked", "QuestionAnswered", "AnswerUsed"]]
    assert isinstance(records[-1], TurnEnded)
    assert records[-1].status is TurnStatus.COMPLETED
    await host.stop()


@spec("TURN-77")
async def test_a_denial_reaches_the_agent_with_its_reason() -> None:
    coder = PermissionModel()
    host = await _host(coder)
    runner = await _start(host)
    await runner.submit(_answer(runner, Choice.DENY, text="not today"))
    await records_until_end(runner, after=0)
    assert coder.done == []
    assert coder.received == ["A person declined this call. It was not started. They said: not today"]
    await host.stop()


@spec("TURN-81")
async def test_edited_arguments_reach_an_agent_that_accepts_them_and_are_refused_for_others() -> None:
    coder = PermissionModel(MAKE, PUSH)
    host = await _host(coder)
    runner = await _start(host)
    edited = _answer(runner)
    await runner.submit(
        Answer(
            CallRef(1, 1, edited.ref.call_id), edited.digest, Choice.ALLOW, arguments='{"command":"make -n"}'
        )
    )
    await _wait_for_questions(runner)
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
    coder = PermissionModel(MAKE, PUSH, is_hasty=True)
    host = await _host(coder)
    runner = await _start(host, count=2)
    await runner.submit(_answer(runner, at=1))
    await runner.submit(_answer(runner, Choice.DENY))
    await records_until_end(runner, after=0)
    assert coder.done == ['{"command":"git push"}']
    await host.stop()


@spec("TURN-80")
async def test_a_cancel_ends_the_wait_and_closes_the_question() -> None:
    coder = PermissionModel()
    host = await _host(coder)
    runner = await _start(host)
    late = _answer(runner)
    await runner.submit(Cancel())
    records = await records_until_end(runner, after=0)
    assert _kinds(records) == ["QuestionAsked", "QuestionClosed", "TurnEnded"]
    with pytest.raises(QuestionClosedError):
        await runner.submit(late)
    assert coder.received == []
    await host.stop()


@spec("TURN-78", "TURN-80")
async def test_people_may_take_hours_and_after_the_deadline_the_agent_is_informed() -> None:
    world = FakeWorld()
    coder = PermissionModel(terms=Ask(answer_s=3 * 3600.0))
    host = await _host(coder, world=world)

    async def begin() -> Runner:
        return await _start(host)

    runner = await world.live_through(begin())
    await world.advance(2 * 3600.0)
    assert waiting_on(runner.state) == "person"
    assert runner.is_idle is False
    await world.advance(3601.0)
    records = await records_until_end(runner, after=0)
    assert coder.received == [NO_DECISION_CONTENT]
    assert _kinds(records) == ["QuestionAsked", "QuestionClosed", "AnswerUsed", "TurnEnded"]
    assert not any(isinstance(each, StallNoticed) for each in records)
    await host.stop()


@spec("TURN-78")
async def test_after_an_answer_silence_is_measured_again() -> None:
    world = FakeWorld()

    class Silent(PermissionModel):
        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            yield TextDelta("Let me see. ")
            await self._do(request, MAKE)
            await world.sleep(40.0)
            yield TextDelta("Done.")
            yield Finished()

    coder = Silent()
    host = await _host(coder, world=world)

    async def begin() -> Runner:
        return await _start(host)

    runner = await world.live_through(begin())
    await world.advance(5000.0)
    await runner.submit(_answer(runner))
    await world.live_through(_until_end(runner))
    records = await records_until_end(runner, after=0)
    (noticed,) = (each for each in records if isinstance(each, StallNoticed))
    assert noticed.silent_s < 40.0
    await host.stop()


@spec("TURN-77")
async def test_arguments_that_are_too_long_to_read_are_not_asked_about() -> None:
    long = Permission("agent-1", "Write", "edit", '"' + "x" * ARGUMENTS_CHARS_MAX + '"')
    coder = PermissionModel(long)
    host = await _host(coder)
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("build it")))
    records = await records_until_end(runner, after=0)
    assert coder.received == [TOO_LONG]
    assert _kinds(records) == ["TurnEnded"]
    await host.stop()


@spec("TURN-80")
async def test_an_agent_that_stops_waiting_withdraws_its_question() -> None:
    class Impatient(PermissionModel):
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
    runner = await _start(host)
    late = _answer(runner)
    gate.set()
    records = await records_until_end(runner, after=0)
    assert _kinds(records) == ["QuestionAsked", "QuestionClosed", "TurnEnded"]
    with pytest.raises(QuestionClosedError):
        await runner.submit(late)
    await host.stop()


async def test_a_permission_request_after_the_end_of_its_attempt_is_refused() -> None:
    left: list[Callable[[], object]] = []

    class Late(PermissionModel):
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
    assert coder.received == [NOT_ASKED]
    await host.stop()


@spec("TURN-77", "TURN-56")
async def test_an_answer_may_come_at_another_process() -> None:
    memory, coder = Memory(), PermissionModel()
    first, second = await _host(coder, memory), await _host(PermissionModel(), memory)
    await _start(first)
    elsewhere = await second.session("s")
    await elsewhere.submit(_answer(elsewhere))
    await records_until_end(await first.session("s"), after=0)
    assert coder.done == ['{"command":"make"}']
    await first.stop()
    await second.stop()


async def _until_end(runner: Runner) -> None:
    while runner.state.is_live:
        await runner.wait(runner.newest.position)


class QuestionAnswerer:
    """Answers each open question once, again whenever it is reopened."""

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


async def _turn(host: Host, people: QuestionAnswerer) -> None:
    await host.start()
    await host.wait_for_recovery()
    runner = await host.session("s", create=True)
    if not runner.state.turns:
        await runner.submit(SendMessage(UserMessage.of("build it")))
    await people.work(runner)


@spec("TURN-79", "TURN-80")
@pytest.mark.parametrize("point", [Fault.BEFORE_APPEND, Fault.AFTER_APPEND, Fault.AFTER_PUBLISH])
async def test_after_a_death_at_any_point_the_turn_ends_and_no_permission_is_used_twice(point: Fault) -> None:
    for count in range(1, 50):
        memory, coder, people = Memory(), PermissionModel(), QuestionAnswerer()
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
async def test_an_unused_permission_of_a_dead_process_is_not_asked_about_again() -> None:
    """Found by a death at each append: one of them falls between an answer and its use."""
    memory, coder, people = Memory(), PermissionModel(), QuestionAnswerer()
    for count in range(1, 50):
        memory, coder, people = Memory(), PermissionModel(), QuestionAnswerer()
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
    answerer = QuestionAnswerer()
    await world.live_through(_turn(second, answerer))
    assert answerer.given == 0
    assert coder.done == ['{"command":"make"}']
    (_, repeated) = (each for each in _journal(memory) if isinstance(each, QuestionAsked))
    assert repeated.repeats
    await second.stop()


@spec("TURN-79", "TURN-53")
async def test_a_frozen_process_gives_its_agent_no_permission() -> None:
    """A new node requests a used permission again; the frozen process must not use it too."""

    class Taken:
        """A session that another process has taken over."""

        async def show(self, command: PermissionRequested) -> None:
            """Do nothing: it was journaled before."""

        async def append_first(self, command: PermissionWithdrawn | UseAnswer) -> None:
            """Do nothing: it was journaled before."""

        def note(self, command: PermissionWithdrawn) -> None:
            """Do nothing: no reader is connected."""

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
