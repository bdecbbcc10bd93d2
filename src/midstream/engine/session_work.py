"""The pending work of one session: its tasks, its deadlines, and the reports of both.

`reconcile` compares the pending work of a state with the tasks that run: it starts what is missing and cancels what is
not pending any more. Executors report through the mailbox of the session, so that every outcome is decided in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum

from midstream.engine.defect_limit import missing_outcome_error, stop_error
from midstream.engine.executors import Executor
from midstream.engine.journal import Journal
from midstream.engine.mailbox import Effect, Envelope, Mailbox
from midstream.engine.timers import Waits, Work, split_work_and_waits
from midstream.environment import World
from midstream.errors import MidstreamError, UnavailableError
from midstream.retries import CONFIRM_ATTEMPTS_MAX
from midstream.session import session as sessions
from midstream.session.session import Session, ToolsFound
from midstream.session.turn import commands
from midstream.session.turn.pending import AnswerAgent, CallModel, RunCall
from midstream.store.contract import Attempt

HELD_FOR_S = 5.0
"""Seconds after an append in which no other node can have claimed the session, unless this process lost its connection
to the store: a quarter of a lease."""

_log = logging.getLogger(__name__)


class Drain(Enum):
    """The work that may continue while a session is being released."""

    NOTHING_ENDS = "nothing ends"
    """The session is not being released."""
    FINISH_RESPONSE = "finish response"
    """Start nothing new; a running model call, and a permission request of it, continue."""
    FINISH_TOOLS = "finish tools"
    """Start nothing new; model calls are cut, running tools continue."""


class SessionWork:
    """Runs the pending work of one session.

    Args:
        fail: End the session with an error.
    """

    def __init__(
        self, journal: Journal, mailbox: Mailbox, world: World, fail: Callable[[MidstreamError], None]
    ) -> None:
        self.session_id = journal.session_id
        self.is_held = False
        """Whether nothing is started, because the session may have killed the last process."""
        self._journal = journal
        self._mailbox = mailbox
        self._world = world
        self._fail = fail
        self._drain = Drain.NOTHING_ENDS
        self._executor: Executor | None = None
        self._doing: dict[Work, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._waits = Waits(world, self.note)

    # --- reports of executors, see `executors.Reports` ----------------------------------------------------------

    async def journal_output(
        self,
        command: commands.ModelStreamed | commands.ModelResumable | commands.ModelReuseDecided | ToolsFound,
    ) -> None:
        """Journal a model's output, or its tools, soon. Wait only while the mailbox is full."""
        if self._mailbox.failure is not None:
            return  # output of a model that ignores its cancellation is dropped
        if self._mailbox.put(Envelope(command)):
            await self._world.sleep(0.0)  # the output is sent before more is read
        while self._mailbox.is_full and self._mailbox.failure is None:
            await self._mailbox.room()

    def journal_progress(
        self, progress: commands.CallProgress | commands.Stalled | commands.StallFinished
    ) -> None:
        """Journal a tool's progress, or a silence, soon; drop it while the mailbox is full."""
        if not self._mailbox.is_full:
            self.note(progress)

    def note(self, command: commands.Command) -> None:
        """Journal an internal command soon, such as an expired deadline."""
        if self._mailbox.failure is None:
            self._mailbox.put(Envelope(command))

    async def show(self, command: commands.ChildStreamed | commands.PermissionRequested) -> None:
        """Journal a record of a child session, or a permission request, and wait for the append. The work continues.

        Raises:
            MidstreamError: This session has failed.
        """
        await self._mailbox.post(command)

    async def append_first(self, command: commands.UseAnswer | commands.PermissionWithdrawn) -> None:
        """Journal a command before the act that it announces; its decision may end pending work.

        Raises:
            MidstreamError: The command was refused, or this session has failed. Nothing was written.
        """
        await self._mailbox.post(command, asyncio.current_task())

    def report(self, command: commands.Command) -> None:
        """Journal the outcome of pending work, soon; in a session that has failed, the work stays in doubt."""
        if self._mailbox.failure is None:
            self._mailbox.put(Envelope(command, reporter=asyncio.current_task()))

    async def report_within(
        self, pending_work: RunCall, run: Callable[[Attempt], commands.CallFinished]
    ) -> None:
        """Run a call in the transaction that records its outcome, if it is still pending."""
        try:
            await self._mailbox.post(Effect(pending_work, run), asyncio.current_task())
        except MidstreamError as error:
            _log.debug("an effect did not happen: %s", error.code, extra={"session": self.session_id})

    async def confirm(self) -> None:
        """Check that no other node claimed the session while this process was frozen; otherwise cancel this task.

        A process that was frozen between an append and the act that it announces may have been taken for dead. Then the
        call belongs to the new node, and is in doubt there.
        """
        for _ in range(CONFIRM_ATTEMPTS_MAX):
            if self._world.monotonic() - self._journal.held_at <= HELD_FOR_S:
                return
            try:
                await self._journal.confirm()
            except MidstreamError as error:
                self._fail(error)
                break
        else:
            self._fail(UnavailableError(f"session {self.session_id!r}: its store is too slow to act"))
        raise asyncio.CancelledError

    @property
    def is_transactional(self) -> bool:
        """Whether the session's store has transactions for tools."""
        return self._journal.is_transactional

    async def blob(self, digest: str) -> bytes | None:
        """Return a large result that a record of this session names, or None if it does not exist."""
        return await self._journal.blob(digest)

    @property
    def is_closing(self) -> bool:
        """Whether tasks are stopped because this process releases the session, not because their work ended."""
        return self._drain is not Drain.NOTHING_ENDS

    # --- tasks --------------------------------------------------------------------------------------------------

    def begin(self, executor: Executor) -> None:
        """Set the executor of all further work."""
        self._executor = executor

    @property
    def is_idle(self) -> bool:
        """Whether no task runs or is being stopped."""
        return not (self._doing or self._stopping)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that run or are being stopped."""
        return [*self._doing.values(), *self._stopping]

    def reconcile(self, state: Session, reporters: AbstractSet[asyncio.Task[None]] = frozenset()) -> None:
        """Start pending work that has no task; cancel tasks whose work is not pending any more.

        Args:
            reporters: Tasks that end with their own report, which need no cancellation.
        """
        work, waits = split_work_and_waits(sessions.pending_work(state))
        self._waits.set(() if self.is_closing else waits)
        work = [] if self.is_held else work
        if self._doing.keys() == set(work) and not reporters and not self.is_closing:
            return
        self._cancel_unneeded(work, reporters)
        if not reporters.isdisjoint(self._doing.values()):
            self._fail(missing_outcome_error(self.session_id))
        if self._mailbox.failure is None:
            for each in work:
                # A call that is journaled as started runs even now: otherwise it would be in doubt.
                if each not in self._doing and not self._is_cut(each):
                    name = f"{type(each).__name__} {self.session_id}"
                    self._doing[each] = self._world.spawn(self._do(each, state), name=name)

    def _cancel_unneeded(self, work: Sequence[Work], reporters: AbstractSet[asyncio.Task[None]]) -> None:
        for each in [each for each in self._doing if each not in work or self._is_cut(each)]:
            task = self._doing.pop(each)
            if task.done():
                continue  # the task ends with its report
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)
            if task not in reporters:
                task.cancel()

    def _is_cut(self, work: Work) -> bool:
        if self._drain is Drain.FINISH_RESPONSE:
            goes_on = isinstance(work, AnswerAgent) or (isinstance(work, CallModel) and work in self._doing)
            return not goes_on and Executor.is_repeatable(work)
        return self.is_closing and Executor.is_repeatable(work)

    async def _do(self, work: Work, state: Session) -> None:
        """Run one piece of pending work.

        The session fails if the work ends without a report, as with a model that cancels itself.
        """
        assert self._executor is not None
        try:
            await self._executor.execute(work, state)
        except Exception as error:  # noqa: BLE001 - a defect in there ends the session as a crash would
            _log.error("pending work failed", exc_info=error, extra={"session": self.session_id})
            self._fail(stop_error(error, self.session_id))
        finally:
            task = asyncio.current_task()
            if self._doing.get(work) is task and not self._mailbox.has_report_of(task):
                del self._doing[work]
                self._fail(missing_outcome_error(self.session_id))

    async def finish(self, state: Session, mode: Drain) -> None:
        """Start nothing new, and wait for the work that may continue by `mode`; its outcomes are journaled."""
        self._drain = mode
        self._waits.clear()
        self._cancel_unneeded(split_work_and_waits(sessions.pending_work(state))[0], frozenset())
        try:
            await self._mailbox.wait_until_idle()
            while running := self.tasks:
                await asyncio.wait(running)
                await self._mailbox.wait_until_idle()
        finally:
            self._drain = Drain.FINISH_TOOLS

    def cancel_all(self) -> None:
        """Cancel every task and deadline: the work is in doubt for the next node."""
        self._drain = Drain.FINISH_TOOLS
        self._waits.clear()
        self._doing = {each: task for each, task in self._doing.items() if not task.done()}
        for task in self.tasks:
            task.cancel()

    def close(self) -> None:
        """Drop the references to the session, so that its memory is freed."""
        self._waits.close()
        self._executor = None
        self._fail = _ignore


def _ignore(_error: MidstreamError) -> None:
    pass
