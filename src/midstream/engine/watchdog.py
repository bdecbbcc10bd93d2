"""The stall watchdog: detects, reports and finally cuts silences of models and tools.

There are two levels. Past the advisory budget the silence is reported: by a record for readers, a log line with the
last activity, and the agent's callback. It is reported once; before the first token, again each time the silence has
doubled. Past the limit the model call is cut: it fails with `ModelStalledError` and is retried. A tool has its own
timeout instead. Pings are no progress: they prove a connection, not a model.

Time comes from the `World`. Each watch has one timer, so that a token costs only one reading of the clock. An error in
the watchdog is logged, and does not affect the watched work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import TracebackType
from typing import Self

from msgspec import Struct

from midstream.environment import Cancellable, World
from midstream.session.turn.commands import Stalled, StallFinished
from midstream.timing import StallBudgets, StalledOn

RECENT_MAX = 20
"""Kinds of recent activity that a log line names; repetitions of one kind count once."""
STEP_S = 0.001
"""The shortest time between two checks, so that rounding causes no busy loop."""

_log = logging.getLogger(__name__)


class Level(StrEnum):
    """The outcome of a silence."""

    ADVISORY = "advisory"
    """The silence is longer than usual; nothing was done."""
    FAIL = "fail"
    """The silence was cut."""
    OVER = "over"
    """The silence ended by itself after it was reported."""


class StallSeen(Struct, frozen=True):
    """Argument of an agent's `on_stall`. `call_id` is empty if a model is silent."""

    level: Level
    session: str
    turn: int
    response: int
    waiting_for: StalledOn
    silent_s: float
    call_id: str = ""


OnStall = Callable[[StallSeen], None]


class _Activity:
    """Successive activity of one kind."""

    __slots__ = ("at", "count", "kind")

    def __init__(self, kind: str, at: float) -> None:
        self.kind = kind
        self.at = at
        self.count = 1


class Watch:
    """Watches one model call, or one run of a tool.

    Args:
        place: The session, the numbers of turn and response, and for a tool the id of the call.
        send_record: Receives the records for readers.
        on_stall: The agent's callback.
    """

    def __init__(
        self,
        world: World,
        budgets: StallBudgets,
        place: tuple[str, int, int, str],
        send_record: Callable[[Stalled | StallFinished], None],
        on_stall: OnStall | None = None,
    ) -> None:
        self._world = world
        self._budgets = budgets
        self._session, self._turn, self._response, self._call_id = place
        self._send_record = send_record
        self._on_stall = on_stall
        self._waiting_for = StalledOn.TOOL if self._call_id else StalledOn.FIRST_TOKEN
        self._since = world.monotonic()
        self._pinged_at: float | None = None
        self._shortest_s = budgets.tool_s if self._call_id else min(budgets.between_tokens_s, budgets.tool_s)
        """The least budget of a silence that may begin during this one."""
        self._warnings = 0
        """How often this silence was reported."""
        self._is_held = False
        self._pauses = 0
        """Current waits for a person."""
        self._recent: deque[_Activity] = deque(maxlen=RECENT_MAX)
        self._cut: asyncio.Timeout | None = None
        self._timer: Cancellable | None = None
        self.silent_s = 0.0
        """Duration of the silence when it was cut; 0 if it was not."""

    async def __aenter__(self) -> Self:
        """Watch the `async with` block; it raises `TimeoutError` if its work was cut for silence (`silent_s` > 0)."""
        if not self._call_id:  # tools have their own timeout
            self._cut = asyncio.timeout(None)
            await self._cut.__aenter__()
        self._check_again()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._call_id and self._warnings:  # the end of a tool is its only further sign
            self._end_episode(self._world.monotonic() - self._since)
        self._send_record = _ignore  # a request that is kept must not keep a session in memory
        if self._cut is not None:
            await self._cut.__aexit__(kind, error, trace)

    def note_progress(self, kind: str, waiting_for: StalledOn | None = None) -> None:
        """Record progress and restart the clock.

        Args:
            waiting_for: The next awaited event, if of another kind: a model call may wait for its upstream's tool.
        """
        now = self._world.monotonic()
        self._is_held = False
        if self._warnings:
            self._end_episode(now - self._since)
        self._since = now
        self._waiting_for = waiting_for or (StalledOn.TOOL if self._call_id else StalledOn.BETWEEN_TOKENS)
        last = self._recent[-1] if self._recent else None
        if last is not None and last.kind == kind:
            last.count += 1
            last.at = now
        else:
            self._recent.append(_Activity(kind, now))

    def note_ping(self) -> None:
        """Record that the connection is alive. This is no progress."""
        self._pinged_at = self._world.monotonic()

    def hold(self) -> None:
        """Stop the clock until the next progress, while the journal is awaited."""
        self._is_held = True

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock in the block, which waits for a person. It runs again after the last such block."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._since = self._world.monotonic()

    # --- the watching -----------------------------------------------------------------------------------------

    def _check_again(self) -> None:
        try:
            wait_s = self._check()
            self._timer = (
                None if wait_s is None else self._world.later(max(wait_s, STEP_S), self._check_again)
            )
        except Exception:  # noqa: BLE001 - a fault in here must not become the turn's
            _log.exception("the stall watchdog failed; this call is no longer watched", extra=self._ids())

    def _check(self) -> float | None:
        """Report or cut if due, and return the seconds until the next check, or None if there will be none."""
        advisory_s, limit_s = self._budgets.of(self._waiting_for)
        if self._cut is not None and self._waiting_for is StalledOn.TOOL:
            limit_s = self._budgets.upstream_tool_max_s
        silent_s = 0.0 if self._is_held or self._pauses else self._world.monotonic() - self._since
        if limit_s is not None and silent_s >= limit_s:
            self._end(silent_s)
            return None
        if silent_s >= self._warning_s(advisory_s):
            while silent_s >= self._warning_s(advisory_s):  # a late check warns once
                self._warnings += 1
            self._report(Level.ADVISORY, silent_s)
        # Progress during the sleep begins a silence with another budget: never sleep past its end.
        until_notice_s = min(self._shortest_s, self._warning_s(advisory_s) - silent_s)
        wait_s = until_notice_s if limit_s is None else min(until_notice_s, limit_s - silent_s)
        return wait_s if wait_s < math.inf else None

    def _warning_s(self, advisory_s: float) -> float:
        """Return the seconds of silence until the next warning, or infinity."""
        if self._warnings and self._waiting_for is not StalledOn.FIRST_TOKEN:
            return math.inf
        return advisory_s * 2.0**self._warnings

    def _end(self, silent_s: float) -> None:
        self.silent_s = silent_s
        self._report(Level.FAIL, silent_s)
        if self._cut is not None:
            self._cut.reschedule(asyncio.get_running_loop().time())

    def _end_episode(self, silent_s: float) -> None:
        self._warnings = 0
        self._report(Level.OVER, silent_s)

    def _report(self, level: Level, silent_s: float) -> None:
        """Report to readers, the log and the agent's callback. Their errors do not affect the turn."""
        place = (self._turn, self._response, self._waiting_for, round(silent_s, 3), self._call_id)
        try:
            _log.log(*_WORDS[level], self._waiting_for, silent_s, extra=self._ids() | self._what(silent_s))
            if level is not Level.FAIL:  # the failed attempt is in the journal itself
                self._send_record(Stalled(*place) if level is Level.ADVISORY else StallFinished(*place))
            if self._on_stall is not None:
                seen = StallSeen(
                    level,
                    self._session,
                    self._turn,
                    self._response,
                    self._waiting_for,
                    silent_s,
                    self._call_id,
                )
                self._on_stall(seen)
        except Exception:  # noqa: BLE001 - a fault in here must not become the turn's
            _log.exception("a stall could not be reported", extra=self._ids())

    def _ids(self) -> dict[str, object]:
        ids = {"session": self._session, "turn": self._turn, "response": self._response}
        return {**ids, "call": self._call_id} if self._call_id else {**ids}

    def _what(self, silent_s: float) -> dict[str, object]:
        """Return the facts about a silence for the log: kinds and times, never content."""
        now = self._world.monotonic()
        recent = [f"{each.kind} x{each.count}, {now - each.at:.1f} s ago" for each in self._recent]
        ping_s = None if self._pinged_at is None else round(now - self._pinged_at, 3)
        return {
            "waiting_for": self._waiting_for.value,
            "silent_s": round(silent_s, 3),
            "heartbeat_s_ago": ping_s,
            "recent": recent,
        }


def _ignore(_seen: Stalled | StallFinished) -> None:
    pass


_WORDS = {
    Level.ADVISORY: (logging.WARNING, "no data while waiting for %s, for %.1f s so far"),
    Level.FAIL: (logging.WARNING, "stopped waiting for %s after %.1f s of silence"),
    Level.OVER: (logging.INFO, "resumed, waiting for %s, after %.1f s of silence"),
}
