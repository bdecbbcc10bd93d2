"""The work of a pool's turn depends only on what is new, counted in lines of code, never timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from midstream.agents.pool import Pooled
from midstream.history.messages import Entry, History, Response, Step, Text, UserMessage
from midstream.models.responses import ModelRequest
from midstream.testing.scripted_upstream import words_of
from tests.agents.pooling import PoolBench
from tests.lines import lines_run
from tests.spec import spec

Entries = list[Entry]


def responded(text: str) -> Step:
    return Step(Response((Text(text),)))


def history_of(count: int) -> Entries:
    """Return this many questions, all but the last answered."""
    entries: Entries = []
    for number in range(count):
        entries += [UserMessage.of(f"question {number}"), responded(f"answer {number}")]
    return entries[:-1]


async def ask(pool: Pooled, entries: Entries) -> None:
    """Get an answer to a history, and append it."""
    async for _ in pool.stream(ModelRequest("", History(tuple(entries)), session="s")):
        pass
    entries.append(responded("well"))


async def nothing(pool: Pooled) -> None:
    """Do nothing: the conversation continues at once."""


async def marked_aside(pool: Pooled) -> None:
    """Make a side call under the same name."""
    history = History((UserMessage.of("a title, please"),))
    async for _ in pool.stream(ModelRequest("", history, session="s", is_ephemeral=True)):
        pass


async def unmarked_aside(pool: Pooled) -> None:
    """Make a side call without a mark, detected by its system prompt."""
    history = History((UserMessage.of("a title, please"),))
    async for _ in pool.stream(ModelRequest("Make titles.", history, session="s")):
        pass


@spec("REUSE-6")
@pytest.mark.parametrize("between", [nothing, marked_aside, unmarked_aside])
async def test_the_work_of_an_append_depends_only_on_the_new_records(
    between: Callable[[Pooled], object],
) -> None:
    work = []
    for count in (100, 1000):
        bench = PoolBench()
        pool, entries = await bench.pool(), history_of(count)
        await bench.world.live_through(ask(pool, entries))
        await bench.world.live_through(between(pool))  # type: ignore[arg-type]
        entries.append(UserMessage.of("new"))
        with lines_run() as lines:
            await bench.world.live_through(ask(pool, entries))
        assert words_of(bench.upstream.sends[-1].message) == "new"
        work.append(lines.count)
    assert work[1] < 1.1 * work[0]
