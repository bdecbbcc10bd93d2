"""One thread that runs the work of an event loop, in order.

`loop.run_in_executor` does the same for many threads and costs several times more for each call: two futures, their
locks and two wake-ups. A store has two calls for each step of an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")


class WorkThread:
    """A thread with a queue. It is a daemon: the process can end although a store was not closed."""

    def __init__(self, name: str) -> None:
        self._submitted: SimpleQueue[_Work | None] = SimpleQueue()
        self._submitted_count = 0
        self._done = 0
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def is_at_work(self) -> bool:
        """Whether submitted work is not finished."""
        return self._done != self._submitted_count

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in the thread; the future, of the running loop, has its result or exception.

        Cancelling the future does not cancel the work.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.submit_then(work, partial(_settle, answer))
        return answer

    def submit_then(
        self, work: Callable[[], T], then: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """Run `work` in the thread, then call `then` on the running loop with its result or exception.

        For callers that need no future: it saves one iteration of the loop.
        """
        self._submitted_count += 1
        self._submitted.put((asyncio.get_running_loop(), then, work))

    def shut(self) -> None:
        """End the thread after the submitted work. No more work may be submitted."""
        self._submitted.put(None)

    def _work(self) -> None:
        while (work_item := self._submitted.get()) is not None:
            loop, then, work = work_item
            error, result = None, None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001 - the submitter raises it
                error = raised
            self._done += 1  # only this thread writes it, and only submitters write the other number
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its waiters with it
                loop.call_soon_threadsafe(then, result, error)
            del work_item, loop, then, work, error, result


def pause(seconds: float) -> None:
    """Block the calling thread for so many seconds."""
    _NEVER.wait(seconds)


_NEVER = threading.Event()
"""An event that is never set; waiting for it is a pause."""
_Work = tuple[asyncio.AbstractEventLoop, Callable[[Any, BaseException | None], None], Callable[[], Any]]


def _settle(answer: asyncio.Future[T], result: T | None, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(cast("T", result))
    else:
        answer.set_exception(error)
