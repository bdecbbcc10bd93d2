"""Runs: one answer each in the making, told to whoever asks for it, from its beginning.

A run belongs to nobody's connection. Its events are written once, as the bytes that go over the wire, and readers are
places in them: one that comes late, or comes again, is played what it missed. A run that nobody reads any more goes on
for a grace period, since a client whose connection broke asks again within seconds; then it is stopped, unless it was
asked for in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator
from typing import Protocol, cast

from msgspec.structs import replace

from midstream.core.dialects.asked import Asked, Named, Writer
from midstream.core.dialects.refusals import Refusal, final, refusal_of
from midstream.core.dialects.repeats import KeyReused, Known, Request, repeated
from midstream.core.dialects.responses import ResponsesWriter
from midstream.core.dialects.telling import Telling
from midstream.core.messages import Call, Reply, ReplyPart, Text
from midstream.core.replies import (
    CallRequested,
    Finished,
    ModelEvent,
    TextDelta,
    is_progress,
)
from midstream.core.reuse.resent import ResentRequest
from midstream.errors import MidstreamError, ModelUnavailableError, OverloadedError
from midstream.runtime.models import Model, events_of
from midstream.world import World

GRACE_S = 5.0
"""Seconds that a run goes on without a reader. SDKs wait 0.5 to 8 s before they ask again, mostly below 2 s; a person
who pressed "stop" looks the same, and pays for these seconds."""
KEPT_S = 60.0
"""Seconds that a finished run is kept for those who ask again: longer than any SDK waits between its tries."""
FAILED_S = 30.0
"""Seconds after the failure of an answer that had begun in which an equal request gets that failure: clients that do
not obey `x-should-retry` repeat theirs within this time. Afterwards it counts as a person's wish."""
RUN_BYTES_MAX = 64 * 1024 * 1024
"""Of one answer as it is streamed; 128,000 tokens as chunks of 250 bytes are half of it."""
KEPT_BYTES_MAX = 256 * 1024 * 1024
"""Of all finished runs; the one that ended first is forgotten first."""
RUNS_MAX = 1000
"""Runs under way."""

_CANCELLED = Refusal(499, "cancelled", "this answer was stopped before its end")
_BUG = Refusal(
    500, "internal", "something went wrong in the gateway; its log has the details", is_final=False
)
_log = logging.getLogger(__name__)


class Run:
    """One answer: what was said of it so far, and who is told.

    Args:
        asked: What was asked.
        named: What the answer is called.
        writer: Writes it.
        request: The POST that began it.
        session: Whose conversation it is.
        at: When it was begun (monotonic).
    """

    def __init__(
        self, asked: Asked, named: Named, writer: Writer, request: Request, session: str, at: float
    ) -> None:
        self.asked = asked
        self.named = named
        self.writer = writer
        self.request = request
        self.session = session
        self.at = at
        self.pieces: list[bytes] = []
        """Whole server-sent events, in order."""
        self.refusal: Refusal | None = None
        """Why it came to nothing, once it has."""
        self.is_finished = False
        """It was said to its end."""
        self.ending: list[bytes] = []
        """The last pieces, which are published once the run is settled."""
        self.is_ended = False
        self.is_begun = False
        """Something was said, so that it can no longer be refused."""
        self.has_emitted = False
        """The upstream has sent something, so it may have run tools. Nothing repeats the request by itself then."""
        self.ended_at = math.inf
        """When it ended (monotonic)."""
        self.is_cancelled = False
        self.stopped_by: MidstreamError | None = None
        """Why it is stopped, where nobody has asked for that."""
        self.readers = 0
        self.is_delivered = False
        """Somebody was told its end."""
        self.bytes = 0
        self.task: asyncio.Task[None] | None = None
        self.grace: asyncio.Task[None] | None = None
        self._keeps_pieces = asked.is_stream or asked.is_stored
        self._waiting: set[asyncio.Future[None]] = set()
        self._texts: list[str] = []
        self._calls: list[Call] = []

    def known(self, now: float) -> Known:
        """Return what decides whether another POST repeats this one's."""
        is_left = not (self.readers or self.is_delivered or self.asked.is_background)
        is_failed = self.refusal is not None
        is_stopped = self.is_cancelled or self.stopped_by is not None
        return Known(
            self.request,
            is_left=is_left,
            has_readers=self.readers > 0,
            at=self.at,
            is_failed=is_failed,
            is_failed_lately=is_failed and not is_stopped and now - self.ended_at < FAILED_S,
        )

    @property
    def stopped(self) -> Refusal:
        """Refusal for a run that was stopped before its end."""
        return _CANCELLED if self.stopped_by is None else refusal_of(self.stopped_by)

    @property
    def reply(self) -> Reply | None:
        """Reply so far, as a host will send it back; None where there is nothing to send."""
        words = "".join(self._texts)
        parts: tuple[ReplyPart, ...] = (*((Text(words),) if words else ()), *self._calls)
        return Reply(parts) if parts else None

    def begin(self) -> None:
        """Open the stream, if it is not open."""
        if not self.is_begun:
            self.is_begun = True
            self.publish(self.writer.begin())

    def written(self, event: ModelEvent) -> list[bytes]:
        """Take an event of the model; return what is to be published of it."""
        if isinstance(event, TextDelta):
            self._texts.append(event.text)
        elif isinstance(event, CallRequested):
            self._calls.append(Call(event.id, event.name, event.arguments))
        return self.writer.write(event)

    def publish(self, pieces: list[bytes]) -> None:
        """Add to what readers are told.

        Raises:
            ModelUnavailableError: The answer outgrows `RUN_BYTES_MAX`.
        """
        if not pieces:
            return
        if self._keeps_pieces:
            self.pieces += pieces
            self.bytes += sum(map(len, pieces))
            if self.bytes > RUN_BYTES_MAX:
                raise ModelUnavailableError(f"the answer is longer than {RUN_BYTES_MAX} bytes")
        self.wake()

    def end(self) -> None:
        """Say that nothing follows."""
        self.is_ended = True
        self.wake()

    def fail(self, refusal: Refusal) -> None:
        """End it before its end; one of which nothing was said is refused."""
        self.refusal = final(refusal) if self.has_emitted else refusal
        if not self.is_begun:
            return
        is_cancel = self.is_cancelled and isinstance(self.writer, ResponsesWriter)
        ending = cast("ResponsesWriter", self.writer).cancel() if is_cancel else self.writer.fail(refusal)
        if self._keeps_pieces:
            self.pieces += ending

    def wake(self) -> None:
        """Let every reader look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def news(self) -> None:
        """Wait until there is more, or its end, or somebody calls `wake`."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)


class Care(Protocol):
    """Work for a run besides sending it."""

    async def prepare(self, run: Run) -> None:
        """Do what must be done before the model is asked. What it raises is what the run comes to."""

    async def settle(self, run: Run) -> None:
        """Do what must be done before anybody is told the end; `run.refusal` says whether it failed."""


class Runs:
    """All runs under way, and those that have just ended.

    Args:
        model: What answers.
        world: Clock and tasks.
        grace_s: Seconds that a run goes on without a reader.
        shows_upstream_calls: Tools that the upstream runs itself are told as thinking.
    """

    def __init__(
        self, model: Model, world: World, *, grace_s: float = GRACE_S, shows_upstream_calls: bool = True
    ) -> None:
        self._model = model
        self._world = world
        self._grace_s = grace_s
        self._shows_upstream_calls = shows_upstream_calls
        self._by_digest: dict[bytes, list[Run]] = {}
        self._by_key: dict[str, Run] = {}
        self._by_id: dict[str, Run] = {}
        self._open: dict[str, Run] = {}
        self._ended: dict[str, float] = {}
        """When each finished run ended, by its id, in this order."""
        self._kept_bytes = 0

    def __len__(self) -> int:
        """Return how many are under way."""
        return len(self._open)

    def find(self, request: Request) -> Run | KeyReused | None:
        """Return the run that a POST joins, or None where it begins one of its own.

        A run that failed before its upstream sent anything is not joined.
        """
        self._forget_old()
        runs = list(self._by_digest.get(request.digest, ()))
        if request.key and (keyed := self._by_key.get(request.key)) is not None and keyed not in runs:
            runs.append(keyed)
        now = self._world.monotonic()
        pairs = [(run.known(now), run) for run in runs if run.refusal is None or run.has_emitted]
        found = repeated(request, [said for said, _ in pairs])
        if found is None or isinstance(found, KeyReused):
            return found
        return next(run for said, run in pairs if said is found)

    def named(self, run_id: str) -> Run | None:
        """Return the run whose answer has this id."""
        return self._by_id.get(run_id)

    def all(self) -> list[Run]:
        """Return those under way and those that are still kept, in the order in which they were begun."""
        return list(self._by_id.values())

    def start(self, run: Run, request: ResentRequest, care: Care) -> None:
        """Begin a run. What others of the same conversation are at that nobody reads is stopped.

        Raises:
            OverloadedError: There are `RUNS_MAX` already. Nothing was started.
        """
        if len(self) >= RUNS_MAX:
            raise OverloadedError(f"this gateway is at {RUNS_MAX} answers: come back", retry_after_s=1.0)
        if run.session and not request.is_ephemeral:
            self._supersede(run.session)
        self._by_id[run.named.id] = self._open[run.named.id] = run
        self._by_digest.setdefault(run.request.digest, []).append(run)
        if run.request.key:
            self._by_key[run.request.key] = run
        run.task = self._world.spawn(self._perform(run, request, care), name=f"run {run.named.id}")
        run.task.add_done_callback(
            lambda _: self._end(run)
        )  # also where it was cancelled before its first step

    def join(self, run: Run) -> None:
        """Count one more reader."""
        run.readers += 1
        if run.grace is not None:
            run.grace.cancel()
            run.grace = None

    def leave(self, run: Run) -> None:
        """Count one reader less; the last one starts the grace period."""
        run.readers -= 1
        if not (run.readers or run.is_ended or run.asked.is_background):
            run.grace = self._world.spawn(self._stop_later(run), name=f"grace of {run.named.id}")

    def cancel(self, run: Run) -> None:
        """Stop a run; one that has ended stays as it is."""
        if not run.is_ended and run.task is not None:
            run.is_cancelled = True
            run.task.cancel()

    async def stop(self, error: MidstreamError) -> None:
        """Stop every run with `error`, which whoever reads it is told, and wait until all have ended."""
        for run in self._open.values():
            run.stopped_by = error
        tasks = [run.task for run in self._open.values() if run.task is not None]
        graces = [run.grace for run in self._by_id.values() if run.grace is not None]
        for task in (*tasks, *graces):
            task.cancel()
        await asyncio.gather(*tasks, *graces, return_exceptions=True)

    async def _perform(self, run: Run, request: ResentRequest, care: Care) -> None:
        try:
            await self._listen(run, request, care)
            self._end(run)  # now, so that the last words and the end of the stream go out in one piece
        except asyncio.CancelledError:
            run.fail(run.stopped)
            await self._settled(run, care)
            raise
        except MidstreamError as error:
            _log.info("an answer failed: %s", error.code, extra={"run": run.named.id, "session": run.session})
            run.fail(refusal_of(error))
            await self._settled(run, care)
        except Exception:  # noqa: BLE001 - an upstream is somebody else's code: its host is told, the log has it
            _log.exception("an answer failed", extra={"run": run.named.id, "session": run.session})
            run.fail(_BUG)
            await self._settled(run, care)

    async def _listen(self, run: Run, request: ResentRequest, care: Care) -> None:
        await care.prepare(run)
        if run.asked.is_background:
            run.begin()
        telling = Telling(has_tools=bool(run.asked.tools), shows_upstream_calls=self._shows_upstream_calls)
        # The contract of a model says that it is a generator; its type says less.
        events = cast("AsyncGenerator[ModelEvent, None]", events_of(self._model, request))
        async with contextlib.aclosing(events):
            async for event in events:
                run.has_emitted = run.has_emitted or is_progress(event)
                told = telling.told(event)
                if told is None:
                    continue
                if not run.is_begun and is_progress(told):
                    run.begin()
                pieces = run.written(told)
                if isinstance(told, Finished):
                    run.ending = pieces
                    await care.settle(run)
                    run.is_finished = True
                    run.publish(pieces)
                    return
                run.publish(pieces)
        raise ModelUnavailableError("the upstream's answer broke off")

    async def _settled(self, run: Run, care: Care) -> None:
        """Settle a run that failed; whoever waits is told of the failure, not of what storing it meets."""
        try:
            await care.settle(run)
        except MidstreamError as error:
            _log.warning("a failed answer is not stored: %s", error.code, extra={"run": run.named.id})

    def _end(self, run: Run) -> None:
        if run.is_ended:
            return
        if not run.is_finished and run.refusal is None:
            run.fail(run.stopped)
        run.ended_at = self._world.monotonic()
        run.end()
        # A transcript weighs more than an answer, and nobody asks a finished run what it was asked.
        run.asked = replace(run.asked, messages=[])
        run.task = None
        del self._open[run.named.id]
        self._ended[run.named.id] = run.ended_at
        self._kept_bytes += run.bytes

    async def _stop_later(self, run: Run) -> None:
        await self._world.sleep(self._grace_s)
        run.grace = None
        if not run.readers:
            self.cancel(run)

    def _supersede(self, session: str) -> None:
        """Stop what nobody reads of a conversation that goes on: its person has said something else."""
        same = [run for run in self._open.values() if run.session == session]
        for run in same:
            if not (run.readers or run.asked.is_background):
                self.cancel(run)

    def forget(self, run: Run) -> None:
        """Let nobody find a finished run any more."""
        if self._ended.pop(run.named.id, None) is None:
            return
        del self._by_id[run.named.id]
        self._kept_bytes -= run.bytes
        same = self._by_digest[run.request.digest]
        same.remove(run)
        if not same:
            del self._by_digest[run.request.digest]
        if self._by_key.get(run.request.key) is run:
            del self._by_key[run.request.key]

    def _forget_old(self) -> None:
        until = self._world.monotonic() - KEPT_S
        gone: list[Run] = []
        too_much = self._kept_bytes - KEPT_BYTES_MAX
        for run_id, ended_at in self._ended.items():
            if ended_at > until and too_much <= 0:
                break
            run = self._by_id[run_id]
            if not run.readers:
                gone.append(run)
                too_much -= run.bytes
        for run in gone:
            self.forget(run)
