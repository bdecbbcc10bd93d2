"""Detection of a turn's `Runner.run` in the OpenAI Agents SDK, and of its end.

The first run inside the scope of a turn is the turn's run. A nested run (an agent as a tool, a guardrail with an agent)
is part of it, and is not journaled separately. The turn is complete when its run has finished.

Each `Runner.run` of the process uses the SDK's default runner. `install_runner` replaces it by one that observes the
runs of turns, and does not change others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

from msgspec import Struct

from midstream.engine.driven_sessions import DrivenTurn
from midstream.errors import UsageError
from midstream.extras import extra
from midstream.frameworks.context_values import value_within

with extra("openai-agents"):
    from agents.run import get_default_agent_runner, set_default_agent_runner
    from agents.run_state import RunState

ENDING_S = 1.0
"""Seconds for a streamed run to end after its turn's scope was left."""


class _Stage(Enum):
    """State of a turn's run."""

    NONE = "has not begun"
    RUNNING = "is running"
    WAITING = "waits for approvals"
    FINISHED = "has finished"
    FAILED = "has failed"


class TurnScope:
    """The scope of one turn, with one run.

    Args:
        finished: Items of cancelled turns directly before it, which the input of its run may lack.
    """

    def __init__(self, turn: DrivenTurn, finished: Sequence[Any] = ()) -> None:
        self.turn = turn
        self._finished = finished
        self._stage = _Stage.NONE
        self._streamed: Any = None

    @property
    def is_finished(self) -> bool:
        """Whether the run has its final output."""
        return self._stage is _Stage.FINISHED

    @property
    def is_waiting(self) -> bool:
        """Whether the run waits for approvals."""
        return self._stage is _Stage.WAITING

    def begin_run(self, given: object) -> None:
        """Begin the run with its input.

        Raises:
            UsageError: The turn already has its run, or the input is a state of another turn.
        """
        self._note_streamed()
        is_state = isinstance(given, RunState)
        if self._stage is not _Stage.NONE and not (self._stage is _Stage.WAITING and is_state):
            reason = "is over: its run" if self._stage is _Stage.FINISHED else "has one run, which"
            raise UsageError(
                f"turn {self.turn.number} {reason} {self._stage.value}. Enter a new `turn` for the next run: with the "
                "same key and message to continue this turn, with others for the next one"
            )
        if is_state:
            self._go_on_from(given)
        self._stage = _Stage.RUNNING

    def complete_input(self, given: Any) -> Any:  # noqa: ANN401 - the SDK's text, items or state
        """Return the input of the run, with missing items of cancelled turns before its message."""
        if not self._finished or isinstance(given, RunState):
            return given
        items = [{"role": "user", "content": given}] if isinstance(given, str) else [*given]
        if _contains([_key(each) for each in items], [_key(each) for each in self._finished]):
            return given
        return [*items[:-1], *self._finished, *items[-1:]]

    def end_run(self, result: Any) -> None:  # noqa: ANN401 - one of the SDK's results
        """Note the end of a run; None means that it raised."""
        if result is None:
            self._stage = _Stage.FAILED
        else:
            self._stage = _Stage.WAITING if result.interruptions else _Stage.FINISHED

    def watch(self, streamed: Any) -> None:  # noqa: ANN401 - the SDK's `RunResultStreaming`
        """Note a streamed run, which continues in its own task."""
        self._streamed = streamed

    async def leave(self) -> None:
        """Cancel a streamed run that has not ended; its stream then raises."""
        streamed = self._streamed
        task = streamed.run_loop_task if streamed is not None else None
        if task is not None and not task.done():
            is_cancelled = _is_cancelled(streamed)
            streamed.cancel()
            await asyncio.wait([task], timeout=ENDING_S)
            if not is_cancelled:  # a later reader must not take the end of the stream for the end of the run
                streamed._stored_exception = UsageError(  # noqa: SLF001 - it has no other place for it
                    f"the scope of turn {self.turn.number} was left before its streamed run had ended, so the run was "
                    "cancelled and the turn stays open. Read the stream to its end inside the `turn`"
                )
        self._note_streamed()

    def _note_streamed(self) -> None:
        streamed, self._streamed = self._streamed, None
        if streamed is None:
            return
        task = streamed.run_loop_task
        if task is not None and not task.done():
            self._streamed = streamed
        elif task is None or task.cancelled() or task.exception() is not None:
            self._stage = _Stage.FAILED
        elif streamed.interruptions:
            self._stage = _Stage.WAITING
        else:
            is_cut = streamed.final_output is None and _is_cancelled(streamed)
            self._stage = _Stage.FAILED if is_cut else _Stage.FINISHED

    def _go_on_from(self, state: Any) -> None:  # noqa: ANN401 - the SDK's `RunState`
        """Continue after the response with the calls for which the state waits."""
        waiting = {str(item.call_id) for item in state.get_interruptions()}
        number = self.turn.find_response(waiting) if waiting else 0
        if not number:
            raise UsageError(
                f"no response of turn {self.turn.number} requested the calls that this state waits for; continue it "
                "in the turn that it comes from"
            )
        if number != self.turn.response_no:
            self.turn.skip(number)


class _Place(Struct, frozen=True):
    """Place of running code: in the scope of a turn, in its run, or in a nested run."""

    scope: TurnScope
    is_run: bool = False
    is_nested: bool = False


_place: ContextVar[_Place | None] = ContextVar("midstream_openai_agents_place", default=None)
_nested_results: ContextVar[list[Any] | None] = ContextVar("midstream_openai_agents_nested", default=None)


@contextmanager
def enter_scope(scope: TurnScope) -> Generator[None, None, None]:
    """Enter the scope of a turn: the first run inside is the run of the turn."""
    with value_within(_place, _Place(scope)):
        yield


@contextmanager
def inside_tool() -> Generator[list[Any], None, None]:
    """Yield a list that collects the results of nested runs of a tool."""
    results: list[Any] = []
    with value_within(_nested_results, results):
        yield results


def current_turn() -> DrivenTurn | None:
    """Return the turn of the current run; None outside of turns, and in a nested run.

    Raises:
        UsageError: The turn has no run: its model or tool was called directly, or the SDK's default runner was
            replaced.
    """
    place = _place.get()
    if place is None or place.is_nested:
        return None
    if not place.is_run:
        raise UsageError(
            f"turn {place.scope.turn.number} has no run: inside a `turn`, call `Runner.run` or `Runner.run_streamed`, "
            "and do not replace the SDK's default runner"
        )
    return place.scope.turn


def install_runner() -> None:
    """Observe the runs of turns from now on. Idempotent."""
    runner = get_default_agent_runner()
    if not isinstance(runner, _ObservingRunner):
        set_default_agent_runner(_ObservingRunner(runner))


@contextmanager
def _running(given: Any) -> Generator[tuple[TurnScope | None, Any], None, None]:  # noqa: ANN401 - the SDK's
    """Yield the scope whose run begins, and its complete input.

    The scope is None for nested runs and runs outside of turns, whose input does not change.
    """
    place = _place.get()
    if place is None:
        yield None, given
        return
    scope = None if place.is_run or place.is_nested else place.scope
    if scope is not None:
        scope.begin_run(given)
    within = _Place(place.scope, is_run=scope is not None, is_nested=scope is None)
    try:
        with value_within(_place, within):
            yield scope, given if scope is None else scope.complete_input(given)
    except BaseException:
        if scope is not None:
            scope.end_run(None)
        raise


class _ObservingRunner:
    """Wrapper of the SDK's runner that observes the runs of turns."""

    def __init__(self, wrapped: Any) -> None:  # noqa: ANN401 - the SDK's runner, or another program's
        self._wrapped = wrapped

    async def run(self, starting_agent: Any, input: Any, **options: Any) -> Any:  # noqa: A002, ANN401 - the SDK's
        with _running(input) as (scope, given):
            result = await self._wrapped.run(starting_agent, given, **options)
            if scope is not None:
                scope.end_run(result)
        _note_nested(result)
        return result

    def run_sync(self, starting_agent: Any, input: Any, **options: Any) -> Any:  # noqa: A002, ANN401 - the SDK's
        with _running(input) as (scope, given):
            result = self._wrapped.run_sync(starting_agent, given, **options)
            if scope is not None:
                scope.end_run(result)
        _note_nested(result)
        return result

    def run_streamed(self, starting_agent: Any, input: Any, **options: Any) -> Any:  # noqa: A002, ANN401 - the SDK's
        with _running(input) as (scope, given):
            streamed = self._wrapped.run_streamed(starting_agent, given, **options)
            if scope is not None:
                scope.watch(streamed)
        _note_nested(streamed)
        return streamed


def _note_nested(result: Any) -> None:  # noqa: ANN401 - one of the SDK's results
    results = _nested_results.get()
    if results is not None:
        results.append(result)


def _key(item: Any) -> tuple[str, ...]:  # noqa: ANN401 - one of the SDK's items
    """Return the identity of an item, independent of its id: messages get new ids."""
    if not isinstance(item, dict):
        return (repr(item),)
    if call_id := item.get("call_id"):
        return (str(item.get("type")), str(call_id))
    content = item.get("content", "")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return (str(item.get("role")), str(content))


def _contains(items: Sequence[object], wanted: Sequence[object]) -> bool:
    size = len(wanted)
    return any(items[start : start + size] == wanted for start in range(len(items) - size + 1))


def _is_cancelled(streamed: Any) -> bool:  # noqa: ANN401 - the SDK's `RunResultStreaming`
    return getattr(streamed, "_cancel_mode", "none") != "none"
