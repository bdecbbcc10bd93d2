"""One answer of an upstream's agent, as it comes: read by a task of its own, with silence noticed.

The task that reads is the one that closes: the software of some upstreams requires that the task that entered it
leaves it. Each run has its own queue of events, so the events of an abandoned run reach no reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Self, cast

from msgspec import Struct

from midstream.agents.upstreams import Marked, MessageTaken, UpstreamEvent
from midstream.environment import World
from midstream.errors import ModelError, ModelStalledError, UpstreamFailedError, UsageError
from midstream.models.responses import Finished, KeepAlive, UpstreamCallEnded, UpstreamCallStarted, Working
from midstream.session.permissions import Ask, Decision, Permission, Person

EVENTS_MAX = 64
"""Events read ahead of a slow reader; the agent waits then."""
SILENCE_MAX_S = 24 * 3600.0
"""The longest silence that can be allowed: a turn must not wait for ever."""
STEP_S = 0.001
"""The shortest sleep between two looks, so that rounding makes no busy loop."""

_log = logging.getLogger(__name__)


class SilenceLimits(Struct, frozen=True):
    """How long an agent may be silent, in seconds. Any event ends a silence, also one that shows nothing.

    Args:
        idle_s: While it thinks. Before the first word or call of an answer, `StallBudgets.first_token_max_s` of the
            agent that sends the request holds where it is longer.
        tool_s: While a tool of its own is open: builds and test suites are long.
        sign_s: How often readers get a sign that a tool still works, so that it does not count as a stall outside.
        close_s: How long a run may take to stop, and an agent to close.

    Raises:
        UsageError: One is not positive, or beyond `SILENCE_MAX_S`.
    """

    idle_s: float = 120.0
    tool_s: float = 600.0
    sign_s: float = 20.0
    close_s: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= SILENCE_MAX_S):
                raise UsageError(f"{name} is a number of seconds up to {SILENCE_MAX_S:.0f}, not {value!r}")


class PermissionRequests:
    """How an agent asks people for leave in the middle of one answer. The time they take is no silence of the agent.

    Args:
        person: Whom it can ask; None where there is none.
    """

    def __init__(self, person: Person | None) -> None:
        self._person = person
        self._open = 0

    @property
    def is_asked(self) -> bool:
        """Whether a person's answer is awaited."""
        return self._open > 0

    @property
    def person(self) -> Person | None:
        """Return what the agent is given to ask with."""
        return None if self._person is None else self._request_decision

    async def _request_decision(self, permission: Permission, terms: Ask) -> Decision:
        assert self._person is not None
        self._open += 1
        try:
            return await self._person(permission, terms)
        finally:
            self._open -= 1


class _Ended(Struct):
    """The agent has no more output, or failed."""

    error: Exception | None


class AgentRun:
    """Answer of an agent to one message, while it is made.

    Args:
        events: What `UpstreamAgent.send` returned; it is closed here.
        name: Whose silence it is, for people.
        leave: How it asks people while it answers.
        first_token_s: The silence allowed before the first word or call, where it is longer than `limits.idle_s`.
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
        self.is_left = False
        """Whether it did not stop in time; its agent must not be spoken to again in this process."""
        self._events = cast("AsyncGenerator[UpstreamEvent, None]", events)
        self._limits = limits
        self._world = world
        self._name = name
        self._leave = leave or PermissionRequests(None)
        self._idle_s = max(limits.idle_s, first_token_s)
        """The silence allowed while no tool is open."""
        self._line: asyncio.Queue[UpstreamEvent | _Ended] = asyncio.Queue(EVENTS_MAX)
        self._heard_at = world.monotonic()
        self._open: dict[str, str] = {}
        """Tools of the upstream that are running, by the ids of their calls."""
        self._is_over = False
        """Whether it has no reader any more."""
        self._reading = world.spawn(self._read(), name="agent run")
        self._watching = world.spawn(self._watch(), name="agent run watchdog")

    async def __aenter__(self) -> Self:
        """Stop the run when this is left, whole or not."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._watching.cancel()
        if kind is None:  # it has finished: what is left are its last words to itself
            await asyncio.wait({self._reading}, timeout=self._limits.close_s)
        if not self._reading.done():
            self._reading.cancel()
            await asyncio.wait({self._reading}, timeout=self._limits.close_s)
        self.is_left = not self._reading.done()
        if self.is_left:
            _log.warning("%s did not stop within %.0f s; it is abandoned", self._name, self._limits.close_s)

    async def next(self) -> UpstreamEvent:
        """Return the next event; `Working` of ours while a tool takes long. Nothing may be asked after `Finished`.

        Raises:
            ModelError: What the agent failed with.
            UpstreamFailedError: It stopped in the middle of its answer, or failed with an error of no known kind.
            ModelStalledError: It was silent for too long; the message names the tools that were still open.
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
            # Not by us: the agent's software was shut down, or cancels itself.
        except Exception as raised:  # noqa: BLE001 - foreign code; the waiting task raises it
            error = raised
        if not self._is_over:
            await self._line.put(_Ended(error))

    def _note(self, event: UpstreamEvent) -> None:
        self._heard_at = self._world.monotonic()
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
        signed_at = self._heard_at
        while True:
            if not self._line.empty() or self._leave.is_asked:  # a slow reader is no silence of the agent
                self._heard_at = self._world.monotonic()
            now = self._world.monotonic()
            silent_s = now - self._heard_at
            limit_s = self._limits.tool_s if self._open else self._idle_s
            if silent_s >= limit_s:
                self._is_over = True
                self._line.put_nowait(_Ended(self._create_stall_error(silent_s)))
                return
            is_working = self._open and not self._leave.is_asked
            if is_working and now - signed_at >= self._limits.sign_s and self._line.empty():
                signed_at = now
                self._line.put_nowait(Working(", ".join(sorted(set(self._open.values())))))
            until_s = min(limit_s - silent_s, self._limits.sign_s)
            await self._world.sleep(max(until_s, STEP_S))

    def _create_stall_error(self, silent_s: float) -> ModelStalledError:
        names = ", ".join(sorted(set(self._open.values())))
        open_words = f" while its tools were open: {names}" if names else ""
        return ModelStalledError(f"{self._name} sent nothing for {silent_s:.0f} s{open_words}")
