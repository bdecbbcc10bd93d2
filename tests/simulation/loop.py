"""A simulated event loop: time is a number, the order of tasks comes from a seed, processes die.

There are no sockets, no threads and no waiting: when no task is ready, the clock jumps to the next timer.
Every handle belongs to the `SimulatedProcess` of its context, so that killing a process drops all its tasks between
two of their steps, as SIGKILL does, and freezing it sets them aside, as SIGSTOP does.

Tasks and futures hash by their number, not by their address: sets of them have the same order in every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import random
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar, cast

from midstream.environment import World

T = TypeVar("T")

STEP_S = 0.000_02
"""Seconds of its own clock for one step, so that the events of one instant are finite."""
CLOSES_MAX = 20
"""Limit of further waits of a coroutine of a dead process while it is closed."""


class Stuck(Exception):  # noqa: N818 - the end of the run
    """Every task waits and no timer is left, or the run is endless."""


class SimulatedProcess:
    """A group of tasks that dies as one: everything started in its `context` belongs to it.

    Args:
        name: For the trace.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_frozen = False
        self.dies_in: int | None = None
        """Remaining steps before it is killed; None without a planned kill."""
        self.tasks: list[SimulatedTask[Any]] = []
        self.set_aside: list[tuple[asyncio.Handle, SimulatedProcess | None]] = []
        self.on_death: list[Callable[[], None]] = []
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)


async def pass_time(seconds: float) -> None:
    """Advance simulated time; nothing really waits."""
    await World().sleep(seconds)


def current_process() -> SimulatedProcess | None:
    """Return the process of the running code."""
    return _process.get()


_process: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar("process", default=None)


class SimulatedFuture(asyncio.Future[T]):
    """A future with a number."""

    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.number = number
        self.process = _process.get()

    def __hash__(self) -> int:
        return self.number


class SimulatedTask(asyncio.Task[T]):
    """A task with a number."""

    number = 0
    process: SimulatedProcess | None = None
    own_context: contextvars.Context

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop:
    """Run coroutines in an order drawn from `chance`: as much of an event loop as the runtime uses.

    Args:
        chance: Source of the order; None for asyncio's own, first come, first served.
        steps_max: Steps before the run counts as endless.
    """

    def __init__(self, chance: random.Random | None, *, steps_max: int = 400_000) -> None:
        self.steps = 0
        self._loop = cast("asyncio.AbstractEventLoop", self)
        self.complaints: list[str] = []
        """Log entries of living processes: unhandled exceptions."""
        self._chance = chance
        self._steps_max = steps_max
        self._now = 0.0
        self._numbers = itertools.count(1)
        self._ready: deque[tuple[asyncio.Handle, SimulatedProcess | None]] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle, SimulatedProcess | None]] = []
        self._is_running = False

    # --- the run ----------------------------------------------------------------------------------------------

    def run_until_complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run until the coroutine has returned; raises `Stuck` where it never will."""
        main = self.create_task(work)
        old_hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._finish_generator)
        asyncio._set_running_loop(self._loop)
        self._is_running = True
        try:
            while not main.done():
                self._step()
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*old_hooks)
        return main.result()

    def _step(self) -> None:
        if not self._ready:
            self._wait()
        handle, process = self._next()
        if handle.cancelled() or (process is not None and not self._may_run(handle, process)):
            return
        self.steps += 1
        self._now += STEP_S
        if self.steps > self._steps_max:
            raise Stuck(f"not over after {self._steps_max} steps")
        handle._run()

    def _next(self) -> tuple[asyncio.Handle, SimulatedProcess | None]:
        """Take one of the ready tasks; other callbacks keep their order, as asyncio promises."""
        if self._chance is None or len(self._ready) == 1:
            return self._ready.popleft()
        count = 0
        for handle, _ in self._ready:
            if not isinstance(getattr(handle._callback, "__self__", None), asyncio.Task):  # type: ignore[attr-defined]
                break
            count += 1
        if count < 2:
            return self._ready.popleft()
        index = self._chance.randrange(count)
        found = self._ready[index]
        del self._ready[index]
        return found

    def _may_run(self, handle: asyncio.Handle, process: SimulatedProcess) -> bool:
        if process.is_dead:
            return False
        if process.is_frozen:
            process.set_aside.append((handle, process))
            return False
        if process.dies_in is not None:
            process.dies_in -= 1
            if process.dies_in < 0:
                self.kill(process)
                return False
        return True

    def _wait(self) -> None:
        """Advance time to the next timer."""
        while self._timers:
            at = self._timers[0][0]
            self._now = max(self._now, at)
            while self._timers and self._timers[0][0] <= self._now:
                _, _, handle, process = heapq.heappop(self._timers)
                if not handle.cancelled() and not (process and process.is_dead):
                    self._ready.append((handle, process))
            if self._ready:
                return
        raise Stuck("everybody waits, and no timer is set")

    # --- processes --------------------------------------------------------------------------------------------

    def start(self, process: SimulatedProcess, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as part of a process."""
        return process.context.run(self.create_task, work)

    def kill(self, process: SimulatedProcess) -> None:
        """End a process at once: none of its tasks takes another step."""
        if process.is_dead:
            return
        process.is_dead = True
        for callback in process.on_death:
            callback()

    def thaw(self, process: SimulatedProcess) -> None:
        """Resume a frozen process."""
        process.is_frozen = False
        self._ready.extend(process.set_aside)
        process.set_aside.clear()

    def close_remains(self, process: SimulatedProcess) -> None:
        """Close the remains of a dead process, after the run; the loop no longer runs, so nothing follows."""
        for task in process.tasks:
            work = task.get_coro()
            if task.done() or work is None:
                continue
            for _ in range(CLOSES_MAX):
                with contextlib.suppress(
                    Exception
                ):  # Exceptions from a `finally` of a dead process are dropped.
                    task.own_context.run(work.close)
                    break
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # as in asyncio: no warning about a pending task
        process.tasks.clear()

    # --- the interface of asyncio
    # ---------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        handle = asyncio.Handle(callback, args, self._loop, context)
        self._ready.append((handle, context.get(_process)))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        handle = asyncio.TimerHandle(when, callback, args, self._loop, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle, context.get(_process)))
        return handle

    def create_future(self) -> SimulatedFuture[Any]:
        return SimulatedFuture(next(self._numbers), loop=self._loop)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **_: object,
    ) -> SimulatedTask[T]:
        context = context if context is not None else contextvars.copy_context()
        number = next(self._numbers)
        task: SimulatedTask[T] = SimulatedTask(
            coro, loop=self._loop, name=name or f"task {number}", context=context
        )
        task.number = number
        task.own_context = context
        task.process = context.get(_process)
        if task.process is not None:
            task.process.tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        process = getattr(context.get("task") or context.get("future"), "process", None)
        if process is None or not process.is_dead:
            self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Ignore asyncio's notification; the handle is skipped at its time."""

    def _finish_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if self._is_running:
            self.create_task(generator.aclose())
