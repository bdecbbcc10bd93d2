"""The client for scripts: the same names as `midstream.client`, without `async`.

from midstream.client.sync import connect

with connect("http://127.0.0.1:8000", state="agent.db", tools=[read_file]) as client:
    for turn in client.resume_interrupted():
        print(turn.answer())
    print(client.ask("session-1", "What is in README.md?"))

A thread has the event loop: connections, local tools and callbacks run there. Ctrl-C interrupts whatever call
waits, and leaving the block detaches: turns go on at the server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from msgspec import Struct
from typing_extensions import override

from midstream.client import client as asynchronous
from midstream.client.client_settings import ClientSettings
from midstream.environment import World
from midstream.errors import MidstreamError, UsageError
from midstream.history.messages import UserMessage
from midstream.protocol.events import Event
from midstream.protocol.frames import SnapshotWhen, SnapshotWhenName
from midstream.session.calls import Choice
from midstream.session.questions import Question
from midstream.session.records import QuestionAsked
from midstream.session.turn.commands import WhenBusy, WhenBusyName

CLOSED = "the client was closed by another thread"
STOP_S = 5.0
"""Seconds that an interrupted call and a closing client have before they are left alone."""

P = ParamSpec("P")
T = TypeVar("T")


class Portal:
    """An event loop in a thread of its own, and the way in."""

    def __init__(self, world: World = World()) -> None:
        self._world = world
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="midstream client", daemon=True)
        self._is_open = False
        self._door = threading.Lock()
        self._is_heard = True
        """Whether the loop will still do what it is asked for; behind the door."""
        self._asked: set[Future[Any]] = set()
        """What is waited for in other threads; behind the door."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_open(self) -> bool:
        """Whether anything can be called."""
        return self._is_open

    def open(self) -> None:
        """Start the thread.

        Raises:
            UsageError: It was opened before.
        """
        if self._thread.ident is not None:
            raise UsageError("a client can be used in one block only; create another one with `connect`")
        self._is_open = True
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and wait for what comes of it.

        Whatever interrupts the wait (Ctrl-C) also stops the coroutine, which is given `STOP_S` to end.

        Raises:
            UsageError: The portal is not open, or this is its own thread, which would wait for itself: nothing was run.
                Or another thread has closed it meanwhile.
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
            if not begun:  # interrupted before it was requested
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
            with self._door:
                self._asked.discard(outcome)

    def _schedule(self, what: Callable[[], None], outcome: Future[Any]) -> None:
        """Run a coroutine on the loop; where that has ended, its waiter gets an error."""
        with self._door:
            if self._is_heard:
                self._asked.add(outcome)
                self._loop.call_soon_threadsafe(what)
                return
        _refuse(outcome)

    def close(self) -> None:
        """Stop the loop and its thread. Calling it twice is harmless."""
        if self._is_open:
            self._is_open = False
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)

    def _live(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            with self._door:
                self._is_heard = False
                for outcome in self._asked:
                    _refuse(outcome)
            self._loop.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=STOP_S)
        await self._loop.shutdown_default_executor()


def _refuse(outcome: Future[Any]) -> None:
    with suppress(InvalidStateError):  # another thread was faster
        outcome.set_exception(UsageError(CLOSED))


def _pass_on(outcome: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        _refuse(outcome)
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


class SyncInterruptedTurn(Struct, frozen=True):
    """See `midstream.client.InterruptedTurn`; the loop over it needs no `async`."""

    session: str
    at: float
    resume: Callable[[], Iterator[Event]]
    answer: Callable[[], str]
    """Go on to the end of the turn and return the whole answer; see `midstream.client.InterruptedTurn.answer`."""

    def __iter__(self) -> Iterator[Event]:
        return self.resume()


class SyncClient:
    """Speaks with one server; made by `connect`. See `midstream.Client`, whose methods it has."""

    def __init__(self, client: asynchronous.Client, portal: Portal) -> None:
        self._client = client
        self._portal = portal
        self._iterated: set[AsyncGenerator[Event, None]] = set()
        """What an application iterates over, or has left lying."""
        self._awaited: set[AsyncGenerator[Event, None]] = set()
        """Those of them whose next event is waited for."""

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
                if events not in self._awaited:  # else another thread waits in it: it ends with the client
                    await events.aclose()
        finally:
            await self._client.close()

    def send(
        self,
        session: str,
        message: str | UserMessage,
        *,
        when_busy: WhenBusy | WhenBusyName = WhenBusy.QUEUE,
        cancel_after_s: float | None = None,
    ) -> Generator[Event, None, None]:
        """See `midstream.Client.send`. Iterating starts it."""
        events = self._client.send(session, message, when_busy=when_busy, cancel_after_s=cancel_after_s)
        return self._events_of(events)

    def ask(
        self,
        session: str,
        message: str | UserMessage,
        *,
        when_busy: WhenBusy | WhenBusyName = WhenBusy.QUEUE,
        cancel_after_s: float | None = None,
    ) -> str:
        """See `midstream.Client.ask`."""
        asking = self._client.ask(session, message, when_busy=when_busy, cancel_after_s=cancel_after_s)
        return self._portal.call(asking)

    def resume(self, session: str, turn: int | None = None) -> Generator[Event, None, None]:
        """See `midstream.Client.resume`. Iterating starts it."""
        return self._events_of(self._client.resume(session, turn))

    def follow(
        self,
        session: str,
        after: str | None = None,
        *,
        snapshots: SnapshotWhen | SnapshotWhenName = SnapshotWhen.GONE,
        word: str = "",
    ) -> Generator[Event, None, None]:
        """See `midstream.Client.follow`. Iterating starts it."""
        return self._events_of(self._client.follow(session, after, snapshots=snapshots, word=word))

    def questions(self, session: str | None = None) -> tuple[Question, ...]:
        """See `midstream.Client.questions`."""
        return self._portal.call(self._client.questions(session))

    def answer(
        self,
        session: str,
        question: QuestionAsked | Question,
        choice: Choice | str,
        *,
        text: str = "",
        arguments: str | None = None,
    ) -> None:
        """See `midstream.Client.answer`."""
        answering = self._client.answer(session, question, choice, text=text, arguments=arguments)
        self._portal.call(answering)

    def withdraw(self, session: str, number: int | None = None) -> None:
        """See `midstream.Client.withdraw`."""
        self._portal.call(self._client.withdraw(session, number))

    def secret(self, session: str) -> str:
        """See `midstream.Client.secret`."""
        return self._portal.call(self._client.secret(session))

    def keep_secret(self, session: str, secret: str) -> None:
        """See `midstream.Client.keep_secret`."""
        self._portal.call(self._client.keep_secret(session, secret))

    def change_secret(self, session: str) -> None:
        """See `midstream.Client.change_secret`."""
        self._portal.call(self._client.change_secret(session))

    def discard_secret(self, session: str) -> None:
        """See `midstream.Client.discard_secret`."""
        self._portal.call(self._client.discard_secret(session))

    def let_look(self, session: str, *, for_s: float = 3600.0) -> str:
        """See `midstream.Client.let_look`."""
        return self._portal.call(self._client.let_look(session, for_s=for_s))

    def withdraw_viewers(self, session: str) -> None:
        """See `midstream.Client.withdraw_viewers`."""
        self._portal.call(self._client.withdraw_viewers(session))

    def cancel(self, session: str, turn: int | None = None) -> None:
        """See `midstream.Client.cancel`."""
        self._portal.call(self._client.cancel(session, turn))

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

    def is_reconnecting(self, session: str) -> bool:
        """See `midstream.Client.is_reconnecting`."""
        return self._portal.call(_run_on_loop(partial(self._client.is_reconnecting, session)))

    def is_stalled(self, session: str) -> bool:
        """See `midstream.Client.is_stalled`."""
        return self._portal.call(_run_on_loop(partial(self._client.is_stalled, session)))

    def trouble(self, session: str) -> MidstreamError | None:
        """See `midstream.Client.trouble`."""
        return self._portal.call(_run_on_loop(partial(self._client.trouble, session)))

    def waiting_on(self, session: str) -> str:
        """See `midstream.Client.waiting_on`."""
        return self._portal.call(_run_on_loop(partial(self._client.waiting_on, session)))

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
                with suppress(UsageError):  # another thread closes it
                    self._portal.call(events.aclose())


async def _run_on_loop(what: Callable[[], T]) -> T:
    return what()


def _in_a_thread(make: Callable[P, asynchronous.Client]) -> Callable[P, SyncClient]:
    def connect(*args: P.args, **kwargs: P.kwargs) -> SyncClient:
        """Make a client of the server at `url`; use it as a context manager.

        It takes what `midstream.connect` takes; what it is to call (`on_reconnecting`, `on_stalled`, `on_interrupted`)
        is called in another thread.

        Raises:
            UsageError, ToolDefinitionError: As `midstream.connect` does.
        """
        return SyncClient(make(*args, **kwargs), Portal())

    return connect


connect = _in_a_thread(asynchronous.connect)
