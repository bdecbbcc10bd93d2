"""Attempts of one write, by the responses of the servers: their end, and their waits."""

from __future__ import annotations

from typing import cast

import pytest

from midstream.errors import StoreBusyError
from midstream.store.jetstream.jetstream_errors import SubjectMovedError, UnknownOutcomeError
from midstream.store.jetstream.jetstream_link import JetStreamLink, SubjectWrite
from midstream.store.jetstream.write_tries import TRIES_MAX, WriteTries
from tests.models.chat_server import Hasty

Answer = int | Exception


class _Link:
    """A link with a scripted response to each write."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = [*answers]

    async def commit(self, stream: str, writes: list[SubjectWrite]) -> int:
        del stream, writes
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _tries(*answers: Answer) -> WriteTries:
    return WriteTries(cast("JetStreamLink", _Link(*answers)), Hasty(), "entry 'k'")


async def test_a_write_that_others_overtake_each_time_is_refused() -> None:
    tries = _tries(*[SubjectMovedError("moved")] * TRIES_MAX)
    for number in range(TRIES_MAX):
        await tries.begin(number)
        assert await tries.commit("s", []) is None
    with pytest.raises(StoreBusyError, match="entry 'k' is written by others"):
        await tries.begin(TRIES_MAX)


async def test_a_write_with_a_lost_acknowledgement_is_retried_until_its_outcome_is_certain() -> None:
    waits = [StoreBusyError("no majority"), SubjectMovedError("under way")] * TRIES_MAX
    tries = _tries(UnknownOutcomeError("lost"), *waits, 7)
    for _ in range(2 * TRIES_MAX + 1):
        await tries.begin(3)
        assert await tries.commit("s", []) is None
    assert tries.is_unknown
    await tries.begin(3)
    assert await tries.commit("s", []) == 7


async def test_a_refusal_before_any_acknowledgement_was_lost_is_passed_on() -> None:
    tries = _tries(StoreBusyError("no majority"))
    await tries.begin(None)
    with pytest.raises(StoreBusyError, match="no majority"):
        await tries.commit("s", [])
