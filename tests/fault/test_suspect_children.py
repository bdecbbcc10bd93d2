"""Sub-agents that kill their server: their parents end with them, instead of starting the next one."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx2
import pytest

from midstream.session.records import TurnEnded
from midstream.session.turn.states import SUSPECTED_CODE
from tests.fault.workers import Worker, ends, lines, problems, records, until
from tests.spec import spec

pytestmark = pytest.mark.fault

STARTS_MAX = 4


class ParentWorker(Worker):
    program = "tests.fault.child_process"


@pytest.mark.timeout(300)
@spec("TURN-87")
async def test_a_parent_whose_sub_agents_kill_the_server_is_started_four_times_at_most(
    tmp_path: Path,
) -> None:
    async with ParentWorker(tmp_path) as first:
        with contextlib.suppress(httpx2.HTTPError):  # it may be dead before it has answered
            await first.send_message("parent", "go")
        await first.ended()

    def is_over() -> bool:
        return len(ends(tmp_path, "parent")) == 1

    starts = 1
    while not is_over() and starts <= STARTS_MAX:
        async with ParentWorker(tmp_path) as worker:
            starts += 1
            died = asyncio.create_task(worker.process.wait())
            answered = asyncio.create_task(until(is_over))
            await asyncio.wait({died, answered}, return_when=asyncio.FIRST_COMPLETED)
            answered.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answered
    assert starts <= STARTS_MAX
    assert len(lines(tmp_path)) == STARTS_MAX - 1
    family = ["parent", "parent::1.1.0", "parent::1.1.0::1.1.0"]
    for session in family:
        [end] = [each for each in records(tmp_path, session) if isinstance(each, TurnEnded)]
        assert (end.status, end.code) == ("interrupted", SUSPECTED_CODE)
    assert problems(tmp_path, family) == []
