from __future__ import annotations

import asyncio
import enum
import subprocess
import sys
import threading
from typing import Any, Literal

import pytest
from msgspec import Struct

from midstream.errors import ToolDefinitionError, UsageError
from midstream.history.messages import Outcome, ToolCall, ToolResult, ToolSpec
from midstream.session.calls import OnDoubt
from midstream.tools import function_tools
from midstream.tools.function_tools import (
    THREADS_MAX,
    TRANSACTION_S,
    CallContext,
    StatedOutcome,
    Tool,
    call_within,
    current_call,
    plan_call,
    question,
    run_call,
    tool,
    transaction,
)
from tests.spec import spec


@spec("SEC-76")
async def test_a_call_with_arguments_nested_too_deeply_does_not_run() -> None:
    seen: list[object] = []

    @tool
    def take(value: list[Any]) -> str:
        """Take."""
        seen.append(value)
        return "taken"

    deep = ToolCall("c1", "take", '{"value":' + "[" * 200 + "]" * 200 + "}")
    planned = plan_call(deep, {"take": take})
    assert "nested more than 64 levels deep" in (planned.problem or "")
    ran = await run_call(take, deep, CONTEXT)
    assert (ran.outcome, seen) == (Outcome.ERROR, [])


@spec("SEC-78")
@pytest.mark.parametrize("seconds", [-1.0, 1e300, float("inf"), float("nan")])
def test_a_time_limit_out_of_bounds_is_refused(seconds: float) -> None:
    def pay() -> str:
        """Pay."""
        return "paid"

    for limits in ({"answer_s": seconds}, {"timeout_s": seconds}):
        with pytest.raises(ToolDefinitionError, match="expected 0 to"):
            tool(**limits)(pay)  # type: ignore[call-overload]
    with pytest.raises(ToolDefinitionError, match="expected 0 to"):
        question(answer_s=seconds)


CONTEXT = CallContext("s", 1, 2, "c1")


class Place(Struct):
    """Somewhere."""

    city: str
    country: str = "NO"


class Unit(enum.Enum):
    C = "c"
    F = "f"


@tool(has_effects=False, timeout_s=5)
def weather(place: Place, unit: Unit = Unit.C, days: int | None = None, mode: Literal["a", "b"] = "a") -> str:
    """Tell the weather.

    In two lines.

    Args:
        place: Where,
            as exactly as known.
        unit (Unit): Degrees.

    Returns:
        Words.
    """
    return f"{place.city} {unit.value} {days} {mode}"


async def _run(found: Tool, arguments: str = "{}") -> ToolResult:
    return await run_call(found, ToolCall("c1", found.name, arguments), CONTEXT)


def test_a_tool_is_described_by_its_hints_and_docstring() -> None:
    assert weather.spec.description == "Tell the weather.\n\nIn two lines."
    parameters = weather.spec.parameters
    assert parameters["required"] == ["place"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["unit"]["description"] == "Degrees."
    assert "Where, as exactly as known." in str(parameters["properties"]["place"])
    assert parameters["$defs"]["Place"]["required"] == ["city"]
    assert weather.on_doubt is OnDoubt.RERUN


async def test_arguments_are_converted_to_the_hinted_types() -> None:
    assert await _run(weather, '{"place":{"city":"Oslo"},"unit":"f","days":3}') == ToolResult(
        "c1", "Oslo f 3 a"
    )


@pytest.mark.parametrize(
    "arguments", ['{"place":', '{"place":{}}', "[]", "{}", '{"place":{"city":"a"},"days":"x"}']
)
def test_arguments_that_do_not_fit_the_schema_are_reported_to_the_model(arguments: str) -> None:
    plan = plan_call(ToolCall("c", "weather", arguments), {"weather": weather})
    assert plan.problem is not None
    assert "'weather' do not fit its schema" in plan.problem


def test_a_call_of_an_unknown_tool_returns_the_known_names() -> None:
    plan = plan_call(ToolCall("c", "whether", "{}"), {"weather": weather})
    assert plan.problem == "There is no tool named 'whether'. Known tools: weather."


async def test_a_tool_that_raises_gives_an_error_result() -> None:
    @tool
    def broken() -> str:
        raise FileNotFoundError("no such file: x")

    assert await _run(broken) == ToolResult("c1", "FileNotFoundError: no such file: x", Outcome.ERROR)


@pytest.mark.parametrize(("has_effects", "outcome"), [(True, Outcome.UNKNOWN), (False, Outcome.ERROR)])
async def test_a_tool_that_hangs_is_abandoned_after_its_timeout(has_effects: bool, outcome: Outcome) -> None:  # noqa: FBT001 - a parameter of the test
    @tool(has_effects=has_effects, timeout_s=0.01)
    async def hang() -> str:
        await asyncio.Event().wait()
        return ""

    result = await _run(hang)
    assert result.outcome is outcome
    assert "no answer within 0.01 s" in result.content


async def test_a_synchronous_function_that_hangs_does_not_block_the_event_loop() -> None:
    release = threading.Event()

    @tool(timeout_s=0.01)
    def hang() -> str:
        release.wait(60)
        return ""

    result = await _run(hang)
    release.set()
    assert result.outcome is Outcome.UNKNOWN


HUNG_PROGRAM = """
import asyncio, threading
from midstream.session.calls import ToolCall
from midstream.tools.function_tools import CallContext, run_call, tool

@tool(timeout_s=0.005)
def hang() -> str:
    threading.Event().wait()
    return ""

async def main() -> None:
    for _ in range(40):  # more than any pool has threads
        print((await run_call(hang, ToolCall("c", "hang"), CallContext("s", 1, 1, "c"))).outcome)

asyncio.run(main())
"""


@pytest.mark.slow
def test_hung_functions_block_neither_other_tools_nor_the_exit_of_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HUNG_PROGRAM], capture_output=True, check=True, text=True, timeout=30
    )
    assert done.stdout == "unknown\n" * 40


@pytest.mark.parametrize(
    "raised", [SystemExit(3), StopIteration(3), TimeoutError(3), asyncio.CancelledError()], ids=repr
)
async def test_any_exception_of_a_tool_becomes_its_result(raised: BaseException) -> None:
    @tool
    def plainly() -> str:
        raise raised

    @tool
    async def slowly() -> str:
        raise raised

    for each in (plainly, slowly):
        result = await _run(each)
        assert result.outcome is Outcome.ERROR
        assert "no answer" not in result.content


@pytest.mark.parametrize("value", [object(), {"a": {1j}}, lambda: 1])
async def test_a_return_value_without_json_form_is_an_error_result(value: object) -> None:
    @tool
    def odd() -> Any:  # noqa: ANN401 - the point of the test
        return value

    result = await _run(odd)
    assert result.outcome is Outcome.ERROR
    assert "finished, but its answer has no JSON form" in result.content


async def test_return_values_are_encoded_as_json_unless_they_are_text() -> None:
    @tool
    def numbers() -> dict[str, list[int]]:
        return {"a": [1, 2]}

    assert (await _run(numbers)).content == '{"a":[1,2]}'


async def test_lone_surrogates_and_oversized_results_are_made_storable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(function_tools, "RESULT_CHARS_MAX", 10)

    @tool
    def odd() -> str:
        return "\ud800" + "x" * 20

    result = await _run(odd)
    assert result.content == "\ufffdxxxxxxxxx\n[+11 characters]"
    assert result.content.encode()


async def test_a_running_tool_can_read_its_call_and_its_effect_key() -> None:
    @tool
    def plain() -> str:
        return current_call().effect_key

    @tool
    async def waiting() -> str:
        return current_call().effect_key

    assert (await _run(plain)).content == "s/1/2/c1"
    assert (await _run(waiting)).content == "s/1/2/c1"
    with pytest.raises(LookupError):
        current_call()


async def test_a_tool_that_cancels_itself_cancels_no_other_task() -> None:
    @tool
    async def give_up() -> str:
        raise asyncio.CancelledError

    result = await _run(give_up)
    assert (result.outcome, "cancelled itself" in result.content) == (Outcome.ERROR, True)


async def test_a_call_beyond_the_limit_of_hanging_functions_is_refused_and_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(function_tools, "_free_threads", threading.Semaphore(1))
    release, ran = threading.Event(), threading.Event()

    @tool(timeout_s=0.01)
    def hang() -> str:
        release.wait(60)
        return ""

    @tool
    def answer() -> str:
        ran.set()
        return "here"

    try:
        assert (await _run(hang)).outcome is Outcome.UNKNOWN
        refused = await _run(answer)
        assert (refused.outcome, "not started" in refused.content) == (Outcome.ERROR, True)
        assert not ran.is_set()
    finally:
        release.set()


async def test_cancelling_a_call_cancels_the_tool_and_propagates_to_the_caller() -> None:
    stopped: list[bool] = []
    started = asyncio.Event()

    @tool
    async def hang() -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)
        return ""

    running = asyncio.ensure_future(_run(hang))
    async with asyncio.timeout(60):
        await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stopped == [True]


def _no_hint(path) -> str:  # type: ignore[no-untyped-def]  # noqa: ANN001 - the point
    return str(path)


def _star(*paths: str) -> str:
    return str(paths)


def _no_json(value: complex) -> str:
    return str(value)


def _unknown_name(value: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821, UP037 - the point
    return str(value)


@pytest.mark.parametrize("function", [_no_hint, _star, _no_json, _unknown_name])
def test_a_function_that_cannot_be_described_is_refused_by_name(function: Any) -> None:  # noqa: ANN401
    with pytest.raises(ToolDefinitionError, match=function.__name__):
        tool(function)


async def _echo(**arguments: object) -> object:
    return arguments


FOREIGN = Tool(ToolSpec("echo", "", {"type": "object"}), _echo, None)


async def test_a_tool_with_a_foreign_schema_receives_any_object_unchanged() -> None:
    assert await _run(FOREIGN, '{"self": 1, "odd name": [2, {}]}') == ToolResult(
        "c1", '{"self":1,"odd name":[2,{}]}'
    )
    assert await _run(FOREIGN, "") == ToolResult("c1", "{}")
    assert plan_call(ToolCall("c1", "echo", '{"a": 1}'), {"echo": FOREIGN}).problem is None
    for arguments in ("[1]", "{", "3"):
        problem = plan_call(ToolCall("c1", "echo", arguments), {"echo": FOREIGN}).problem
        assert problem is not None
        assert problem.startswith("The arguments of 'echo' do not fit its schema")


async def test_a_tool_can_state_the_outcome_of_its_call() -> None:
    @tool
    def send() -> StatedOutcome:
        """Send."""
        return StatedOutcome("the line went dead", Outcome.UNKNOWN)

    assert await _run(send) == ToolResult("c1", "the line went dead", Outcome.UNKNOWN)


# --- tools in a transaction
# --------------------------------------------------------------------------------------


@spec("TURN-67")
def test_a_tool_in_a_transaction_is_a_plain_function_with_a_short_timeout() -> None:
    def note(what: str) -> str:
        return what

    async def note_later(what: str) -> str:
        return what

    made = tool(on_doubt="in_transaction")(note)
    assert (made.on_doubt, made.timeout_s) == (OnDoubt.IN_TRANSACTION, TRANSACTION_S)
    assert tool(on_doubt="in_transaction", timeout_s=0.1)(note).timeout_s == 0.1
    with pytest.raises(ToolDefinitionError, match="plain function"):
        tool(on_doubt="in_transaction")(note_later)


async def test_a_tool_without_a_transaction_gets_an_error_that_names_the_option() -> None:
    def note() -> str:
        return str(transaction())

    with pytest.raises(LookupError):
        transaction()
    result = await run_call(tool(note), ToolCall("c1", "note"), CallContext("s", 1, 1, "c1"))
    assert result.outcome is Outcome.ERROR
    assert "on_doubt='in_transaction'" in result.content


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit("no"), StopIteration("no")])
def test_any_exception_of_a_tool_in_a_transaction_becomes_its_result(error: BaseException) -> None:
    @tool(on_doubt="in_transaction")
    def note() -> str:
        raise error

    context = CallContext("s", 1, 1, "c1")
    result = call_within(note, ToolCall("c1", "note"), context, lambda effect: effect(None))  # type: ignore[arg-type]
    assert result.outcome is Outcome.ERROR
    assert result.content.startswith(f"{type(error).__name__}: no")
    assert result.content.endswith("were undone.")


def test_arguments_that_do_not_fit_open_no_transaction() -> None:
    @tool(on_doubt="in_transaction")
    def note(what: str) -> str:
        return what

    def attempt(effect: object) -> object:
        raise AssertionError(effect)

    result = call_within(note, ToolCall("c1", "note", '{"what":3.5}'), CallContext("s", 1, 1, "c1"), attempt)
    assert "do not fit its schema" in result.content


def test_an_unknown_policy_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(
        ToolDefinitionError, match="`on_doubt` is 'retry'; expected one of 'unknown', 'rerun'"
    ):
        tool(on_doubt="retry")  # type: ignore[call-overload]


async def test_a_decorated_function_can_still_be_called_directly() -> None:
    @tool
    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    @tool(name="later", needs_approval=True)
    async def add_later(a: int, b: int) -> int:
        """Add, in a coroutine."""
        return a + b

    assert (add(1), add(1, b=2), await add_later(1, 2)) == (2, 3, 3)
    with pytest.raises(UsageError, match="a person answers it"):
        question()("Which one?")


async def test_a_thread_that_cannot_be_started_does_not_count_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @tool
    def look() -> str:
        return "seen"

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for _ in range(THREADS_MAX):
            refused = await run_call(look, ToolCall("c1", "look", "{}"), CONTEXT)
            assert refused.outcome is Outcome.ERROR
    assert (await run_call(look, ToolCall("c1", "look", "{}"), CONTEXT)).content == "seen"
