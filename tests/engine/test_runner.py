from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.journal import Journal
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import (
    DrainingError,
    LeaseLostError,
    ModelRejectedError,
    ModelUnavailableError,
    SeqnoGapError,
    SessionBusyError,
    StoreFullError,
    UnavailableError,
)
from midstream.history.messages import Finish, Outcome, Step, ToolResult, ToolSpec, UserMessage
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta
from midstream.retries import APPEND_ATTEMPTS_MAX
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallStarted,
    CancelRequested,
    ClientTool,
    CommandAccepted,
    Delta,
    EpochStarted,
    MessageAccepted,
    MessageQueued,
    Record,
    ResponseCompleted,
    StepCommitted,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.session.session import Received
from midstream.session.turn.commands import CallFinished, Cancel, SendMessage, WhenBusy
from midstream.store.contract import Batch, Immediate
from midstream.store.memory import MemoryStore
from midstream.testing import Gate, ScriptedModel, Stall, calls, records_until_end, run_turn, text
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedStep
from midstream.testing.store_fakes import FailingStore, StoreInFront
from midstream.tools.function_tools import tool


class SwiftWorld(World):
    """A world in which waiting takes no time."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def now(self) -> float:
        self.ticks = getattr(self, "ticks", 1_000_000.0) + 10.0
        return self.ticks


async def _host(model: ScriptedModel, *tools: object, world: World | None = None) -> Host:
    host = Host(Agent(model, tools=tools), MemoryStore(), world=world)  # type: ignore[arg-type]
    await host.start()
    await host.wait_for_recovery()
    return host


def _kinds(records: tuple[Record, ...]) -> list[type]:
    return [type(record) for record in records]


def _turn_end(records: tuple[Record, ...]) -> dict[str, Outcome]:
    return {r.result.call_id: r.result.outcome for r in records if isinstance(r, CallEnded)}


async def test_a_turn_is_recorded_as_message_deltas_response_and_end() -> None:
    host = await _host(ScriptedModel([text("hello there")]))
    records = await run_turn(host, "s", "hi")
    assert _kinds(records) == [
        EpochStarted,
        MessageAccepted,
        AttemptStarted,
        Delta,
        ResponseCompleted,
        StepCommitted,
        TurnEnded,
    ]
    runner = await host.session("s")
    assert [type(entry) for entry in runner.state.history.entries] == [UserMessage, Step]
    assert not runner.state.is_live
    await host.stop()


async def test_the_start_of_a_call_is_recorded_before_its_tool_runs() -> None:
    seen: list[list[str]] = []

    @tool
    async def write(path: str) -> str:
        runner = await host.session("s")
        stored = await runner.read(after=0, limit=100)
        seen.append([type(decode(each.body)).__name__ for each in stored])
        return path

    host = await _host(ScriptedModel([calls(("write", '{"path":"a"}')), text("ok")]), write)
    records = await run_turn(host, "s", "hi")
    assert seen[0][-1] == "CallStarted"
    assert _turn_end(records) == {"c1": Outcome.OK}
    await host.stop()


async def test_reading_tools_run_concurrently_and_writing_tools_in_order() -> None:
    barrier = threading.Barrier(2, timeout=60)
    order: list[str] = []

    @tool(has_effects=False)
    def read(name: str) -> str:
        barrier.wait()  # passes only if both reads run at once
        return name

    @tool
    async def write(name: str) -> str:
        order.append(f"{name} in")
        await asyncio.sleep(0)
        order.append(f"{name} out")
        return name

    batch = calls(
        ("r1", "read", '{"name":"a"}'),
        ("r2", "read", '{"name":"b"}'),
        ("w1", "write", '{"name":"c"}'),
        ("w2", "write", '{"name":"d"}'),
    )
    host = await _host(ScriptedModel([batch, text("ok")]), read, write)
    await run_turn(host, "s", "hi")
    assert order == ["c in", "c out", "d in", "d out"]
    step = (await host.session("s")).state.history.entries[1]
    assert isinstance(step, Step)
    assert [result.content for result in step.results] == ["a", "b", "c", "d"]
    await host.stop()


async def test_unknown_tools_and_invalid_arguments_are_returned_to_the_model_as_errors() -> None:
    @tool
    def write(path: str) -> str:
        return path

    batch = calls(("x", "nope", "{}"), ("y", "write", '{"path":'), ("z", "write", '{"path":3.5}'))
    host = await _host(ScriptedModel([batch, text("sorry")]), write)
    records = await run_turn(host, "s", "hi")
    assert _turn_end(records) == {"x": Outcome.ERROR, "y": Outcome.ERROR, "z": Outcome.ERROR}
    assert CallStarted not in _kinds(records)
    assert records[-1] == TurnEnded(1, TurnStatus.COMPLETED, records[-1].at)  # type: ignore[union-attr]
    await host.stop()


async def test_a_failed_attempt_is_announced_and_repeated_up_to_its_limit() -> None:
    down = ModelUnavailableError("503", retry_after_s=7.0)
    host = await _host(ScriptedModel([[TextDelta("half"), down]]), world=SwiftWorld())
    records = await run_turn(host, "s", "hi")
    attempts = [r for r in records if isinstance(r, AttemptStarted)]
    assert [r.attempt for r in attempts] == [1, 2, 3]
    assert all(r.not_before >= r.at + 7.0 for r in attempts[1:])
    assert len([r for r in records if isinstance(r, AttemptFailed)]) == 3
    end = records[-1]
    assert isinstance(end, TurnEnded)
    assert (end.status, end.code) == (TurnStatus.FAILED, "model_unavailable")
    await host.stop()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ([ModelRejectedError("bad key")], "model_rejected"),
        ([RuntimeError("a bug in somebody's model")], "model"),
    ],
)
async def test_a_permanent_failure_is_not_retried(script: list[Exception], code: str) -> None:
    host = await _host(ScriptedModel(lambda _: _raise(script[0])))
    records = await run_turn(host, "s", "hi")
    end = records[-1]
    assert isinstance(end, TurnEnded)
    assert (end.status, end.code) == (TurnStatus.FAILED, code)
    assert len([r for r in records if isinstance(r, AttemptStarted)]) == 1
    await host.stop()


def _raise(error: Exception) -> list[TextDelta]:
    raise error


async def test_an_empty_response_is_requested_again() -> None:
    host = await _host(ScriptedModel([text("  ")]), world=SwiftWorld())
    records = await run_turn(host, "s", "hi")
    assert [r.code for r in records if isinstance(r, AttemptFailed)] == ["model_empty"] * 3
    await host.stop()


async def test_a_second_message_is_refused_while_a_turn_runs() -> None:
    gate = asyncio.Event()
    host = await _host(ScriptedModel([[Gate(gate), *text("late")]]))
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("one")))
    with pytest.raises(SessionBusyError):
        await runner.submit(SendMessage(UserMessage.of("two")))
    gate.set()
    await records_until_end(runner, after=0)
    assert len([e for e in runner.state.history.entries if isinstance(e, UserMessage)]) == 1
    await host.stop()


async def test_a_cancel_keeps_the_text_that_readers_received() -> None:
    responses: list[Sequence[ScriptedStep]] = [[TextDelta("half a sen"), Stall()], text("and on")]
    host = await _host(ScriptedModel(lambda request: responses[len(request.history.entries) > 1]))
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("one")))
    async with asyncio.timeout(60):
        while not any(isinstance(decode(r.body), Delta) for r in await runner.read(after=0, limit=99)):
            await runner.wait(runner.newest.position)
    await runner.submit(Cancel(1))
    records = await records_until_end(runner, after=0)
    assert _kinds(records)[-4:] == [CancelRequested, ResponseCompleted, StepCommitted, TurnEnded]
    step = runner.state.history.entries[-1]
    assert isinstance(step, Step)
    assert (step.response.text, step.response.finish) == ("half a sen", Finish.INTERRUPTED)
    assert await run_turn(host, "s", "go on")  # the next message is accepted at once
    await host.stop()


async def test_a_cancel_stops_tools_and_distinguishes_unknown_from_not_started() -> None:
    started = asyncio.Event()

    @tool
    async def hang(name: str) -> str:
        started.set()
        await asyncio.Event().wait()
        return name

    batch = calls(("a", "hang", '{"name":"x"}'), ("b", "hang", '{"name":"y"}'))
    host = await _host(ScriptedModel([batch]), hang)
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("one")))
    async with asyncio.timeout(60):
        await started.wait()
    await runner.submit(Cancel())
    await runner.submit(Cancel())  # a second cancel changes nothing
    records = await records_until_end(runner, after=0)
    assert _turn_end(records) == {"a": Outcome.UNKNOWN, "b": Outcome.CANCELLED}
    assert len([r for r in records if isinstance(r, CancelRequested)]) == 1
    await host.stop()


async def test_a_repeated_command_changes_nothing_and_a_gap_is_refused() -> None:
    host = await _host(ScriptedModel([text("yes")]))
    runner = await host.session("s", create=True)
    command = Received("k", "secret", 0, "d0", SendMessage(UserMessage.of("hi")))
    end = await runner.submit(command)
    assert await runner.submit(command) >= end
    with pytest.raises(SeqnoGapError) as refused:
        await runner.submit(Received("k", "secret", 5, "d5", None))
    assert refused.value.expected == 1
    records = await records_until_end(runner, after=0)
    assert len([r for r in records if isinstance(r, MessageAccepted)]) == 1
    await host.stop()


@pytest.mark.parametrize("has_effects", [False, True])
async def test_a_clients_result_does_not_shorten_the_time_of_the_other_calls(*, has_effects: bool) -> None:
    """With effects the second call starts when the first one has ended, otherwise with it: its own time counts."""
    world, times = FakeWorld(), {"first": 8_000.0, "second": 9_000.0}
    model = ScriptedModel([calls(*((name, "{}") for name in times)), text("done")])
    host = await _host(model, world=world)
    runner = await host.session("s", create=True)
    tools = tuple(
        ClientTool(ToolSpec(name), has_effects=has_effects, timeout_s=limit_s)
        for name, limit_s in times.items()
    )
    await runner.submit(Received("k", "secret", 0, "d0", SendMessage(UserMessage.of("go"), tools)))
    await world.settle()
    await world.advance(5.0)
    result = CallFinished(1, 1, ToolResult("c1", "here"))
    await runner.submit(Received("k", "secret", 1, "d1", result))
    after = [CallStarted] if has_effects else []
    assert _kinds(await _records(runner))[-2 - len(after) :] == [CommandAccepted, CallEnded, *after]
    await world.advance(8_999.0 if has_effects else 8_994.0)  # the first one would have expired by now
    assert _turn_end(await _records(runner)) == {"c1": Outcome.OK}
    await world.advance(1.0)
    records = await _records(runner)
    assert _turn_end(records) == {"c1": Outcome.OK, "c2": Outcome.UNKNOWN}
    assert _kinds(records).count(CallEnded) == 2
    assert isinstance(records[-1], TurnEnded)
    await host.stop()


async def _records(runner: Runner) -> tuple[Record, ...]:
    return tuple(decode(stored.body) for stored in await runner.read(after=0, limit=1000))


class AppendFullOnce(MemoryStore):
    """A store whose disk is full for the next `left` appends."""

    left = 0

    async def append(self, session: str, batch: Batch) -> int:
        if self.left:
            self.left -= 1
            raise StoreFullError("no space left: free some and try again")
        return await super().append(session, batch)


async def test_a_full_disk_refuses_the_message_and_nothing_is_half_written() -> None:
    store = AppendFullOnce()
    host = Host(Agent(ScriptedModel([text("fine")])), store)
    await host.start()
    runner = await host.session("s", create=True)
    store.left = 1
    with pytest.raises(StoreFullError):
        await runner.submit(SendMessage(UserMessage.of("hi")))
    assert await store.read("s", after=0, limit=10) == []
    records = await run_turn(host, "s", "hi again")  # there is space again: the session continues
    assert _kinds(records)[0] is EpochStarted
    assert isinstance(records[-1], TurnEnded)
    await host.stop()


async def test_an_outcome_survives_a_disk_that_is_full_for_a_moment() -> None:
    store = AppendFullOnce()
    runs: list[str] = []

    @tool
    async def write(path: str) -> str:
        runs.append(path)
        store.left = 3
        return path

    model = ScriptedModel([calls(("write", '{"path":"a"}')), text("done")])
    host = Host(Agent(model, tools=[write]), store, world=SwiftWorld())
    await host.start()
    records = await run_turn(host, "s", "hi")
    assert _turn_end(records) == {"c1": Outcome.OK}
    assert runs == ["a"]
    await host.stop()


async def test_a_session_whose_store_failed_for_longer_is_reopened_without_a_second_run() -> None:
    store = AppendFullOnce()
    runs: list[str] = []

    @tool
    async def write(path: str) -> str:
        runs.append(path)
        store.left = APPEND_ATTEMPTS_MAX + 3
        return path

    model = ScriptedModel([calls(("write", '{"path":"a"}')), text("done")])
    host = Host(Agent(model, tools=[write]), store, world=SwiftWorld())
    await host.start()
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        while (info := await store.find("s")) is None or info.mark.is_live:  # noqa: ASYNC110 - no event reports a mark
            await asyncio.sleep(0)
    revived = await host.session("s")
    assert revived is not runner
    assert runs == ["a"]  # its outcome was lost with the store: the model received it as unknown
    step = revived.state.history.entries[1]
    assert isinstance(step, Step)
    assert [result.outcome for result in step.results] == [Outcome.UNKNOWN]
    await host.stop()


async def test_while_an_outcome_waits_for_the_disk_clients_are_informed_and_it_is_kept() -> None:
    store = AppendFullOnce()
    full = asyncio.Event()

    @tool
    async def write(path: str) -> str:
        store.left = 5
        full.set()
        return path

    model = ScriptedModel([calls(("write", '{"path":"a"}')), text("done")])
    host = Host(Agent(model, tools=[write]), store, world=SwiftWorld())
    await host.start()
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        await full.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(StoreFullError):
            await runner.submit(Cancel(turn=7))
        records = await records_until_end(runner, after=0)
    assert _turn_end(records) == {"c1": Outcome.OK}
    await host.stop()


async def test_a_command_with_a_waiting_outcome_is_refused_by_a_full_disk_and_the_outcome_is_kept() -> None:
    store = AppendFullOnce()
    asked: list[asyncio.Future[int]] = []

    @tool
    async def write(path: str) -> str:
        store.left = 3
        asked.append(asyncio.ensure_future(runner.submit(Cancel(turn=7))))
        return path

    model = ScriptedModel([calls(("write", '{"path":"a"}')), text("done")])
    host = Host(Agent(model, tools=[write]), store, world=SwiftWorld())
    await host.start()
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        records = await records_until_end(runner, after=0)
        with pytest.raises(StoreFullError):
            await asked[0]
    assert _turn_end(records) == {"c1": Outcome.OK}
    await host.stop()


class CancelsItself(ScriptedModel):
    """A model that ends its first request with a cancellation."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        if request.attempt == 1:
            raise asyncio.CancelledError
        async for event in super().stream(request):
            yield event


async def test_dropped_pending_work_is_resumed() -> None:
    host = await _host(CancelsItself([text("here")]), world=SwiftWorld())
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        while (info := await host.store.find("s")) is None or info.mark.is_live:  # noqa: ASYNC110 - no event reports a mark
            await asyncio.sleep(0)
    step = (await host.session("s")).state.history.entries[-1]
    assert isinstance(step, Step)
    assert step.response.text == "here"
    await host.stop()


async def test_a_call_is_not_started_during_the_shutdown() -> None:
    store = MemoryStore()
    began, finish = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    @tool
    async def write(path: str) -> str:
        ran.append(path)
        began.set()
        await finish.wait()
        return path

    script = [calls(("write", '{"path":"a"}'), ("write", '{"path":"b"}')), text("done")]
    host = Host(Agent(ScriptedModel(script), tools=[write]), store)
    await host.start()
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        await began.wait()
        stopping = asyncio.ensure_future(host.stop(grace_s=5))
        for _ in range(20):
            await asyncio.sleep(0)
        finish.set()
        await stopping
    assert ran == ["a"]

    second = Host(Agent(ScriptedModel(script), tools=[write]), store)
    await second.start()
    records = await records_until_end(await second.session("s"), after=0)
    assert _turn_end(records) == {"c1": Outcome.OK, "c2": Outcome.OK}
    assert ran == ["a", "b"]
    await second.stop()


async def test_a_fast_model_causes_one_record_per_group_of_deltas() -> None:
    words = " ".join(f"word{n}" for n in range(2000))
    host = await _host(ScriptedModel([text(words)]))
    records = await run_turn(host, "s", "hi")
    deltas = [r for r in records if isinstance(r, Delta)]
    assert "".join(r.text for r in deltas) == words
    assert len(deltas) < 200
    await host.stop()


async def test_a_refused_command_writes_nothing_and_claims_nothing() -> None:
    store = MemoryStore()
    first = Host(Agent(ScriptedModel([text("yes")])), store)
    await first.start()
    await run_turn(first, "s", "hi")
    await first.stop()

    second = Host(Agent(ScriptedModel([text("yes")])), store)
    await second.start()
    runner = await second.session("s")
    before = await store.find("s")
    with pytest.raises(SeqnoGapError):
        await runner.submit(Received("k", "secret", 5, "d5", None))
    await runner.submit(Cancel())  # of nothing: it changes nothing
    assert await store.find("s") == before
    unborn = await second.session("t", create=True)
    with pytest.raises(SeqnoGapError):
        await unborn.submit(Received("k", "secret", 5, "d5", None))
    assert await store.find("t") is None
    await second.stop()


# --- single deltas


class AtOnce(StoreInFront):
    """A store that appends at once if allowed, and whose other appends wait if set."""

    def __init__(self, *, may: bool = True, is_ready: bool = True) -> None:
        self._memory = MemoryStore()
        super().__init__(self._memory)
        self.may = may
        self.is_ready = is_ready
        self.tried = 0
        """Appends at once, including those that did not happen."""
        self.bug: Exception | None = None
        """Raised after an append at once."""
        self.passed: list[bytes] = []
        """The records of the appends at once."""
        self.go = asyncio.Event()
        self.go.set()

    async def before_operation(self, operation: str, session: str) -> None:
        if operation == "append":
            await self.go.wait()

    @property
    def immediate(self) -> Immediate:
        return self

    def append_now(self, session: str, batch: Batch) -> int | None:
        self.tried += 1
        end = self._memory.append_now(session, batch) if self.may else None
        if end is not None:
            self.passed += batch.bodies
        if self.bug is not None:
            raise self.bug
        return end


class WordByWordModel:
    """A model that sends each word on the test's command."""

    name = "speaker"

    def __init__(self) -> None:
        self.words: asyncio.Queue[str] = asyncio.Queue()
        self.has_spoken = asyncio.Event()

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        while word := await self.words.get():
            yield TextDelta(word)
            self.has_spoken.set()
        yield Finished()


async def _start_turn_by_word(store: AtOnce) -> tuple[Host, WordByWordModel, Runner]:
    model = WordByWordModel()
    host = Host(Agent(model), store)
    await host.start()
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    return host, model, runner


async def _read_to_end(host: Host, model: WordByWordModel, runner: Runner) -> list[str]:
    """Let the turn end; return its text as the journal has it, in its order."""
    model.words.put_nowait("")
    async with asyncio.timeout(60):
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
    texts = [each.text for each in await _records(runner) if isinstance(each, Delta)]
    await host.stop()
    return texts


@pytest.mark.parametrize("may", [True, False])
async def test_simultaneous_deltas_are_one_record_with_and_without_another_append(
    may: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    store = AtOnce(may=may)
    host, model, runner = await _start_turn_by_word(store)
    start = runner.newest.position
    for word in "ab":
        model.words.put_nowait(word)
    async with asyncio.timeout(60):
        await runner.wait(start)
    assert [decode(body) for body in store.passed] == [Delta(1, 1, 1, 0, "text", "ab")] * may
    assert await _read_to_end(host, model, runner) == ["ab"]


async def test_a_store_that_is_not_ready_receives_deltas_only_with_its_other_appends() -> None:
    store = AtOnce(is_ready=False)
    host, model, runner = await _start_turn_by_word(store)
    model.words.put_nowait("a")
    async with asyncio.timeout(30):
        await runner.wait(runner.newest.position)
    assert store.tried == 0
    assert await _read_to_end(host, model, runner) == ["a"]


async def test_a_delta_does_not_overtake_a_pending_append() -> None:
    store = AtOnce()
    host, model, runner = await _start_turn_by_word(store)
    store.go.clear()
    queued = asyncio.create_task(runner.submit(SendMessage(UserMessage.of("b"), when_busy=WhenBusy.QUEUE)))
    await asyncio.sleep(0)
    model.words.put_nowait("a")
    async with asyncio.timeout(60):
        await model.has_spoken.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.passed == []
    store.go.set()
    async with asyncio.timeout(60):
        end = await queued
        await runner.wait(end)
    assert _kinds(await _records(runner))[-2:] == [MessageQueued, Delta]
    for word in ("", "c"):  # the end of this turn, and the next one
        model.words.put_nowait(word)
    assert await _read_to_end(host, model, runner) == ["a", "c"]


async def test_a_bug_during_an_append_of_deltas_ends_the_session_and_repeats_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = AtOnce()
    host, model, runner = await _start_turn_by_word(store)
    store.bug = RuntimeError("after the append")
    model.words.put_nowait("a")
    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match="RuntimeError"):
            await runner.wait(runner.newest.position)
    assert runner.has_failed
    assert "a session ended on a defect" in caplog.text
    found = [decode(each.body) for each in await store.read("s", after=0, limit=100)]
    assert [each.text for each in found if isinstance(each, Delta)] == ["a"]
    await host.stop()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable the garbage collector: a server may live for hours between two full collections."""
    gc.disable()
    yield
    gc.enable()


@tool
async def add(a: int, b: int) -> int:
    return a + b


@tool
def shout(words: str) -> str:
    return words.upper()


SCRIPTS: dict[str, list[Sequence[ScriptedStep]]] = {
    "words": [text("ok")],
    "tools": [calls(("add", '{"a":1,"b":2}')), calls(("shout", '{"words":"a"}')), text("ok")],
    "a model's failure": [],
}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_sleeping_session_leaves_nothing_in_memory(name: str) -> None:
    script = SCRIPTS[name]
    model = ScriptedModel(script or (lambda _: [ModelRejectedError("no")]))
    host = await _host(model, add, shout)
    await run_turn(host, "s", "hi")
    kept = await _references(host)
    assert await host.put_to_sleep("s")
    await _pass(model)
    assert [each() for each in kept] == [None, None]
    await host.stop()


@pytest.mark.usefixtures("uncollected")
async def test_a_session_that_refused_late_callers_leaves_nothing_in_memory() -> None:
    async def call_too_late() -> None:
        runner = await host.session("s")
        assert await host.put_to_sleep("s")
        for _ in range(2):  # the same refusal, raised again
            with pytest.raises(DrainingError):
                await runner.wait(runner.newest.position)
            with pytest.raises(DrainingError):
                await runner.submit(Cancel())

    host = await _host(model := ScriptedModel([text("ok")]))
    await run_turn(host, "s", "hi")
    kept = await _references(host)
    await call_too_late()
    await _pass(model)
    assert [each() for each in kept] == [None, None]
    await host.stop()


@pytest.mark.usefixtures("uncollected")
async def test_a_session_taken_over_during_its_turn_leaves_nothing_in_memory() -> None:
    async def send_and_fail() -> None:
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        store.outage = LeaseLostError("another process has it")
        may_continue.set()
        for _ in range(100):
            await asyncio.sleep(0)
        assert runner.has_failed

    store, may_continue = FailingStore(MemoryStore()), asyncio.Event()
    host = Host(Agent(model := ScriptedModel([[Gate(may_continue), *text("ok")]])), store)
    await host.start()
    await host.wait_for_recovery()
    kept = await _references(host)
    await send_and_fail()
    store.outage = None
    async with asyncio.timeout(60):
        # It is opened again first: the lease may be free.
        while not await host.put_to_sleep("s"):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
    await _pass(model)
    assert [each() for each in kept] == [None, None]
    await host.stop()


async def _references(host: Host) -> list[weakref.ref[Runner] | weakref.ref[Journal]]:
    runner = await host.session("s", create=True)
    return [weakref.ref(runner), weakref.ref(runner.events)]


async def _pass(model: ScriptedModel) -> None:
    """Run the last callbacks, and clear the requests that the test's model has stored."""
    for _ in range(5):
        await asyncio.sleep(0)
    model.requests.clear()
