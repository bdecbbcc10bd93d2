"""One answer of an upstream's agent, read by a task of its own, with limits for silence.

The task that reads also closes, because some upstreams' packages require the same task for both. Each run has its own
queue of events, so the events of an abandoned run reach no reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Self, cast

from msgspec import Struct

from midstream.agents.upstreams import Marked, MessageTaken, UpstreamEvent
from midstream.environment import World
from midstream.errors import ModelError, ModelStalledError, UpstreamFailedError
from midstream.models.responses import Finished, KeepAlive, UpstreamCallEnded, UpstreamCallStarted, Working
from midstream.number_checks import require_seconds
from midstream.session.permissions import Ask, Decision, Permission, Person

EVENTS_MAX = 64
"""Events read ahead of a slow reader; then the agent waits."""
SILENCE_MAX_S = 24 * 3600.0
"""The longest permitted limit of a silence."""
STEP_S = 0.001
"""The shortest sleep between two checks, so that rounding causes no busy loop."""

_log = logging.getLogger(__name__)


class SilenceLimits(Struct, frozen=True):
    """Limits for an agent's silence, in seconds. Any event ends a silence.

    Args:
        idle_s: While it thinks. Before the first text or call of an answer, the requesting agent's
            `StallBudgets.first_token_max_s` applies if it is longer.
        tool_s: While it runs a tool: builds and test suites are long.
        sign_s: Seconds between signs to readers that a tool still works, so that it does not count as a stall.
        close_s: How long a run may take to stop, and an agent to close.

    Raises:
        UsageError: A limit is not positive, or exceeds `SILENCE_MAX_S`.
    """

    idle_s: float = 120.0
    tool_s: float = 600.0
    sign_s: float = 20.0
    close_s: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            require_seconds(name, getattr(self, name), most=SILENCE_MAX_S, is_positive=True)


class PermissionRequests:
    """Permission requests of an agent during one answer. The time that people take is no silence of the agent.

    Args:
        person: The receiver of requests; None if there is none.
    """

    def __init__(self, person: Person | None) -> None:
        self._person = person
        self._open = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for a person's answer."""
        return self._open > 0

    @property
    def person(self) -> Person | None:
        """Return the callback for the agent's requests, or None."""
        return None if self._person is None else self._request_decision

    async def _request_decision(self, permission: Permission, terms: Ask) -> Decision:
        assert self._person is not None
        self._open += 1
        try:
            return await self._person(permission, terms)
        finally:
            self._open -= 1


class _Ended(Struct):
    """The agent's output has ended, or failed."""

    error: Exception | None


class AgentRun:
    """A running answer of an agent to one message.

    Args:
        events: The result of `UpstreamAgent.send`; it is closed here.
        name: The upstream's name, for messages.
        leave: The permission requests of this answer.
        first_token_s: The limit before the first text or call, if it is longer than `limits.idle_s`.
    """

    def __init__(
        self,
        events: AsyncIterator[UpstreamEvent],
        limits: SilenceLimits,
        world: World,
        *,
        name: str,
        leave: PermissionRequests | None = None,
        first_token_s: float = 0.0,
    ) -> None:
        self.is_abandoned = False
        """Whether the run did not stop in time; its agent must not be used again in this process."""
        self._events = cast("AsyncGenerator[UpstreamEvent, None]", events)
        self._limits = limits
        self._world = world
        self._name = name
        self._leave = leave or PermissionRequests(None)
        self._idle_s = max(limits.idle_s, first_token_s)
        """The limit of a silence while no tool is open."""
        self._line: asyncio.Queue[UpstreamEvent | _Ended] = asyncio.Queue(EVENTS_MAX)
        self._last_event_at = world.monotonic()
        self._open: dict[str, str] = {}
        """Running tools of the upstream, by the ids of their calls."""
        self._is_over = False
        """Whether it has no reader any more."""
        self._reading = world.spawn(self._read(), name="agent run")
        self._watching = world.spawn(self._watch(), name="agent run watchdog")

    async def __aenter__(self) -> Self:
        """Return the run; at the end of the block it is stopped if it is incomplete."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._watching.cancel()
        self.is_abandoned = True  # if a cancellation ends these waits
        if kind is None:  # it has finished: its remaining events are not needed
            try:
                await asyncio.wait({self._reading}, timeout=self._limits.close_s)
            except asyncio.CancelledError:
                self._reading.cancel()
                raise
        if not self._reading.done():
            self._reading.cancel()
            await asyncio.wait({self._reading}, timeout=self._limits.close_s)
        self.is_abandoned = not self._reading.done()
        if self.is_abandoned:
            _log.warning("%s did not stop within %.0f s; it is abandoned", self._name, self._limits.close_s)

    async def next(self) -> UpstreamEvent:
        """Return the next event, or `Working` while a tool takes long. Do not call this after `Finished`.

        Raises:
            ModelError: The agent's error.
            UpstreamFailedError: The answer ended early, or the error is unknown.
            ModelStalledError: The silence exceeded its limit; the message names the open tools.
        """
        event = await self._line.get()
        if not isinstance(event, _Ended):
            return event
        if event.error is None:
            raise UpstreamFailedError(f"{self._name} stopped in the middle of its answer")
        if isinstance(event.error, ModelError):
            raise event.error
        raise UpstreamFailedError(f"{self._name} failed with {type(event.error).__name__}") from event.error

    async def _read(self) -> None:
        error: Exception | None = None
        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    self._note(event)
                    if not self._is_over:
                        await self._line.put(event)
        except asyncio.CancelledError:
            if self._is_over:
                raise
            # Cancelled by the upstream's package, because it was shut down or cancels itself.
        except Exception as raised:  # noqa: BLE001 - foreign code; the waiting task raises it
            error = raised
        if not self._is_over:
            await self._line.put(_Ended(error))

    def _note(self, event: UpstreamEvent) -> None:
        self._last_event_at = self._world.monotonic()
        if not isinstance(event, MessageTaken | Marked | KeepAlive):
            self._idle_s = self._limits.idle_s
        match event:
            case UpstreamCallStarted():
                self._open[event.id] = event.name
            case UpstreamCallEnded():
                self._open.pop(event.id, None)
            case Finished():
                self._open.clear()

    async def _watch(self) -> None:
        signed_at = self._last_event_at
        while True:
            if not self._line.empty() or self._leave.is_waiting:  # a slow reader is no silence of the agent
                self._last_event_at = self._world.monotonic()
            now = self._world.monotonic()
            silent_s = now - self._last_event_at
            limit_s = self._limits.tool_s if self._open else self._idle_s
            if silent_s >= limit_s:
                self._is_over = True
                self._line.put_nowait(_Ended(self._create_stall_error(silent_s)))
                return
            is_working = self._open and not self._leave.is_waiting
            if is_working and now - signed_at >= self._limits.sign_s and self._line.empty():
                signed_at = now
                self._line.put_nowait(Working(", ".join(sorted(set(self._open.values())))))
            until_s = min(limit_s - silent_s, self._limits.sign_s)
            await self._world.sleep(max(until_s, STEP_S))

    def _create_stall_error(self, silent_s: float) -> ModelStalledError:
        names = ", ".join(sorted(set(self._open.values())))
        open_words = f" while its tools were open: {names}" if names else ""
        return ModelStalledError(f"{self._name} sent nothing for {silent_s:.0f} s{open_words}")
