"""Answers that the agent begins again itself, after it lost the connection to its provider.

The text before the loss is no part of the answer. A session's readers drop it: `Pooled` fails the first attempt, and
the next attempt continues the same run with the agent's second try.

An application behind the gateway cannot drop text, and neither can a turn in which the agent has used tools. Then the
second try is joined to the first one: repeated text is omitted, and a difference begins a new paragraph.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from msgspec import Struct

from midstream.agents.upstreams import ResponseRestarted
from midstream.environment import Cancellable, World
from midstream.errors import MidstreamError
from midstream.models.fingerprint import Outline
from midstream.models.responses import ModelEvent, TextDelta, UpstreamCallStarted

HELD_S = 120.0
"""Seconds that a run waits for the next attempt of its turn; the engine's own pause is shorter."""

Events = AsyncGenerator[ModelEvent | ResponseRestarted, None]


class JoinedAnswer:
    """Passes the events of an answer on, and joins a second try to the first one.

    Args:
        can_drop: Whether readers can drop received text.
    """

    def __init__(self, *, can_drop: bool) -> None:
        self._can_drop = can_drop
        self._pieces: list[str] = []
        """Text that may be begun again: since the last tool."""
        self._first = ""
        """Text of the first try, once there is a second one."""
        self._repeated: str | None = None
        """Text of the second try, as long as it repeats the first one."""

    @property
    def is_droppable(self) -> bool:
        """Whether all text so far can be dropped, because there is some and no tool depends on it."""
        return self._can_drop and bool(self._pieces)

    def take(self, event: ModelEvent | ResponseRestarted) -> Sequence[ModelEvent]:
        """Return the events to pass on for one event."""
        match event:
            case ResponseRestarted():
                self._first = "".join(self._pieces)
                self._repeated = "" if self._first else None
                return ()
            case UpstreamCallStarted():
                self._can_drop, self._pieces, self._repeated = False, [], None
            case TextDelta() if self._repeated is not None:
                return self._join(event.text)
            case TextDelta():
                self._pieces.append(event.text)
            case _:
                pass
        return (event,)

    def _join(self, text: str) -> Sequence[ModelEvent]:
        assert self._repeated is not None
        tried = self._repeated + text
        if self._first.startswith(tried):
            self._repeated = tried
            return ()
        rest = tried.removeprefix(self._first) if tried.startswith(self._first) else f"\n\n{tried}"
        self._pieces, self._repeated = [tried], None
        return (TextDelta(rest),)


class _HeldRun(Struct):
    outline: Outline
    events: Events
    timer: Cancellable


class HeldRuns:
    """Runs with a restarted answer that wait for the next attempt of their turn; one for each session."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._runs: dict[str, _HeldRun] = {}

    def hold(self, session: str, outline: Outline, events: Events) -> None:
        """Keep a run for the next attempt, for `HELD_S`."""

        def end() -> None:
            self._world.spawn(self.drop(session), name="end of a held run")

        self._runs[session] = _HeldRun(outline, events, self._world.later(HELD_S, end))

    async def take(self, session: str, outline: Outline) -> Events | None:
        """Return the run of the same request; end another run of its session."""
        held = self._runs.get(session)
        if held is None:
            return None
        if held.outline != outline:
            await self.drop(session)
            return None
        del self._runs[session]
        held.timer.cancel()
        return held.events

    async def drop(self, session: str) -> None:
        """End the run of a session, if there is one."""
        held = self._runs.pop(session, None)
        if held is not None:
            held.timer.cancel()
            # The agent or the store is already being closed.
            with contextlib.suppress(RuntimeError, MidstreamError):
                await held.events.aclose()

    async def aclose(self) -> None:
        """End all runs."""
        for session in [*self._runs]:
            await self.drop(session)
