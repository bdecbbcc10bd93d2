"""A question outlives the server that asked it: after a kill and some days, the answer of another client counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstream.client import Event, connect
from midstream.errors import QuestionClosedError
from midstream.session.records import CallEnded, TurnEnded, TurnStatus
from tests.forked import AsyncForked
from tests.spec import spec

WAIT_S = 60.0


@asynccontextmanager
async def _serving(folder: Path, *, port: int = 0, days: float = 0) -> AsyncIterator[tuple[AsyncForked, str]]:
    process = await AsyncForked.started("tests.server.paying_server_process", folder, port, days)
    try:
        url = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        yield process, url.decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["pay", "delegate"])
@spec("TURN-35", "TURN-33", "TURN-50")
async def test_the_answer_of_another_client_days_after_a_sigkill_runs_the_tool_once(
    tmp_path: Path, port: int, words: str
) -> None:
    seen: list[Event] = []
    is_asked, is_over = asyncio.Event(), asyncio.Event()

    async def run_turn(url: str) -> None:
        async with connect(url, state=tmp_path / "speaker.db") as speaker:
            async for event in speaker.send("s1", words):
                seen.append(event)
                if event.question is not None:
                    is_asked.set()
        is_over.set()

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        async with _serving(tmp_path, port=port) as (first, url):
            group.create_task(run_turn(url))
            await is_asked.wait()
            first.kill()
        assert not (tmp_path / "ledger").exists()
        async with _serving(tmp_path, port=port, days=3) as (_, again), connect(again) as boss:
            (question,) = await boss.questions()
            assert (question.name, question.arguments) == ("pay", '{"sum":3}')
            await boss.answer(question.session, question, "allow")
            with pytest.raises(QuestionClosedError):
                await boss.answer(question.session, question, "deny")
            await is_over.wait()
            assert await boss.questions() == ()
    assert (tmp_path / "ledger").read_text() == "3\n"
    end = seen[-1].record
    assert isinstance(end, TurnEnded)
    assert end.status is TurnStatus.COMPLETED
    (result,) = [each.record.result for each in seen if isinstance(each.record, CallEnded)]
    assert result.content == ("paid 3" if words == "pay" else "It is paid.")
