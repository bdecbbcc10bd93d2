"""The synchronous client for scripts, with the same names as `midstream.client`.

from midstream.client.sync import connect

with connect("http://127.0.0.1:8000", state="agent.db", tools=[read_file]) as client:
    for turn in client.resume_interrupted():
        print(turn.answer())
    print(client.ask("session-1", "What is in README.md?"))

A separate thread runs the event loop with connections, local tools and callbacks. Ctrl-C interrupts a waiting call, and
leaving the block detaches: turns continue at the server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from msgspec import Struct
from typing_extensions import override

from midstream.client import client as asynchronous
from midstream.client.client_settings import ClientSettings
from midstream.environment import World
from midstream.errors import UsageError
from midstream.protocol.events import Event

CLOSED = "the client was closed by another thread"
STOP_S = 5.0
"""Seconds for an interrupted call, and for a closing client, to end; then they are abandoned."""

P = ParamSpec("P")
T = TypeVar("T")


class Portal:
    """Runs coroutines on an event loop in a separate thread."""

    def __init__(self, world: World = World()) -> None:
        self._world = world
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="midstream client", daemon=True)
        self._is_open = False
        self._lock = threading.Lock()
        self._is_accepting = True
        """Whether the loop still runs callbacks; guarded by the lock."""
        self._outcomes: set[Future[Any]] = set()
        """Outcomes for which other threads wait; guarded by the lock."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_open(self) -> bool:
        """Whether `call` is possible."""
        return self._is_open

    def open(self) -> None:
        """Start the thread.

        Raises:
            UsageError: The portal was opened before.
        """
        if self._thread.ident is not None:
            raise UsageError("a client can be used in one block only; create another one with `connect`")
        self._is_open = True
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and return its result.

        An interruption of the wait (Ctrl-C) also cancels the coroutine, which has `STOP_S` to end.

        Raises:
            UsageError: The portal is not open, this is its own thread, or another thread has closed it.
        """
        if not self._is_open or threading.current_thread() is self._thread:
            work.close()
            raise UsageError("use the client inside `with connect(...)`, and not from its callbacks")
        outcome: Future[T] = Future()
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._world.spawn(work, name="midstream call")
            task.add_done_callback(partial(_pass_on, outcome))
            begun.append(task)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def stop() -> None:
            if not begun:  # interrupted before the start was scheduled
                begin()
            begun[0].cancel()

        try:
            self._schedule(begin, outcome)
            return outcome.result()
        finally:
            if not outcome.done():
                self._schedule(stop, outcome)
                wait((outcome,), timeout=STOP_S)
            if not begun:
                work.close()
            with self._lock:
                self._outcomes.discard(outcome)

    def _schedule(self, what: Callable[[], None], outcome: Future[Any]) -> None:
        """Schedule a callback on the loop; if the loop has ended, set an error as the outcome."""
        with self._lock:
            if self._is_accepting:
                self._outcomes.add(outcome)
                self._loop.call_soon_threadsafe(what)
                return
        _refuse(outcome)

    def close(self) -> None:
        """Stop the loop and its thread. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            with self._lock:
                self._is_accepting = False
                for outcome in self._outcomes:
                    _refuse(outcome)
            self._loop.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=STOP_S)
        await self._loop.shutdown_default_executor()


def _refuse(outcome: Future[Any]) -> None:
    with suppress(InvalidStateError):  # another thread has set it
        outcome.set_exception(UsageError(CLOSED))


def _pass_on(outcome: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        _refuse(outcome)
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


class SyncInterruptedTurn(Struct, frozen=True):
    """Synchronous variant of `midstream.client.InterruptedTurn`."""

    session: str
    at: float
    resume: Callable[[], Iterator[Event]]
    answer: Callable[[], str]
    """Follow the turn to its end, and return the whole answer; see `midstream.client.InterruptedTurn.answer`."""

    def __iter__(self) -> Iterator[Event]:
        return self.resume()


def _called(
    method: Callable[Concatenate[asynchronous.Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    """Wrap a coroutine method of the client as a blocking method."""

    @wraps(method)
    def call(client: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._portal.call(method(client._client, *args, **kwargs))  # noqa: SLF001 - its method

    return call


def _read(
    method: Callable[Concatenate[asynchronous.Client, P], T],
) -> Callable[Concatenate[SyncClient, P], T]:
    """Wrap an ordinary method of the client as one that is called on the event loop."""

    async def on_loop(client: asynchronous.Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(client, *args, **kwargs)

    return _called(wraps(method)(on_loop))


def _iterated(
    method: Callable[Concatenate[asynchronous.Client, P], AsyncGenerator[Event, None]],
) -> Callable[Concatenate[SyncClient, P], Generator[Event, None, None]]:
    """Wrap a generator method of the client as a synchronous generator."""

    @wraps(method)
    def iterate(client: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Generator[Event, None, None]:
        return client._events_of(method(client._client, *args, **kwargs))  # noqa: SLF001 - its method

    return iterate


class SyncClient:
    """Synchronous client of one server, created by `connect`. Its methods are those of `midstream.Client`."""

    send = _iterated(asynchronous.Client.send)
    ask = _called(asynchronous.Client.ask)
    resume = _iterated(asynchronous.Client.resume)
    follow = _iterated(asynchronous.Client.follow)
    questions = _called(asynchronous.Client.questions)
    answer = _called(asynchronous.Client.answer)
    withdraw = _called(asynchronous.Client.withdraw)
    cancel = _called(asynchronous.Client.cancel)
    secret = _called(asynchronous.Client.secret)
    keep_secret = _called(asynchronous.Client.keep_secret)
    change_secret = _called(asynchronous.Client.change_secret)
    discard_secret = _called(asynchronous.Client.discard_secret)
    create_viewer_token = _called(asynchronous.Client.create_viewer_token)
    revoke_viewer_tokens = _called(asynchronous.Client.revoke_viewer_tokens)
    is_reconnecting = _read(asynchronous.Client.is_reconnecting)
    is_stalled = _read(asynchronous.Client.is_stalled)
    trouble = _read(asynchronous.Client.trouble)
    waiting_on = _read(asynchronous.Client.waiting_on)

    def __init__(self, client: asynchronous.Client, portal: Portal) -> None:
        self._client = client
        self._portal = portal
        self._iterated: set[AsyncGenerator[Event, None]] = set()
        """Open iterators of the application, also abandoned ones."""
        self._awaited: set[AsyncGenerator[Event, None]] = set()
        """Iterators for whose next event a thread waits."""

    def __enter__(self) -> Self:
        self._portal.open()
        try:
            self._portal.call(self._client.__aenter__())
        except BaseException:
            self._portal.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """See `midstream.Client.close`."""
        if self._portal.is_open:
            try:
                self._portal.call(self._close())
            finally:
                self._portal.close()

    async def _close(self) -> None:
        try:
            for events in [*self._iterated]:
                if (
                    events not in self._awaited
                ):  # else another thread waits in it, and it ends with the client
                    await events.aclose()
        finally:
            await self._client.close()

    @property
    @override
    def settings(self) -> ClientSettings:
        return self._client.settings

    @settings.setter
    def settings(self, settings: ClientSettings) -> None:
        self._client.settings = settings

    def resume_interrupted(self, look_back_s: float | None = None) -> list[SyncInterruptedTurn]:
        """See `midstream.Client.resume_interrupted`."""
        left = self._portal.call(self._client.resume_interrupted(look_back_s))
        return [
            SyncInterruptedTurn(
                turn.session, turn.at, partial(self._resume_turn, turn), partial(self._answer_of, turn)
            )
            for turn in left
        ]

    def _resume_turn(self, turn: asynchronous.InterruptedTurn) -> Iterator[Event]:
        return self._events_of(turn.resume())

    def _answer_of(self, turn: asynchronous.InterruptedTurn) -> str:
        return self._portal.call(turn.answer())

    async def _next(self, events: AsyncGenerator[Event, None]) -> Event | None:
        self._awaited.add(events)
        try:
            return await anext(events, None)
        finally:
            self._awaited.discard(events)

    def _events_of(self, events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
        self._iterated.add(events)
        try:
            while (event := self._portal.call(self._next(events))) is not None:
                yield event
        finally:
            self._iterated.discard(events)
            if self._portal.is_open:
                with suppress(UsageError):  # another thread has closed the client
                    self._portal.call(events.aclose())


def _in_a_thread(make: Callable[P, asynchronous.Client]) -> Callable[P, SyncClient]:
    def connect(*args: P.args, **kwargs: P.kwargs) -> SyncClient:
        """Create a synchronous client for the server at `url`; use it as a context manager.

        The arguments are those of `midstream.connect`. Callbacks (`on_reconnecting`, `on_stalled`, `on_interrupted`)
        are called in another thread.

        Raises:
            UsageError, ToolDefinitionError: As in `midstream.connect`.
        """
        return SyncClient(make(*args, **kwargs), Portal())

    return connect


connect = _in_a_thread(asynchronous.connect)
