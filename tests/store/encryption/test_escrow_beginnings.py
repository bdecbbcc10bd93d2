"""Sessions whose first record is not written yet, or was written by another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import UnavailableError, WrongSecretError
from midstream.store.memory import Memory
from tests.store.encryption.test_escrow import SECRET, _begin, _bodies, _opened_store


async def test_a_viewer_token_before_the_first_record_is_refused_as_for_a_missing_session(
    folder: Path,
) -> None:
    store = await _opened_store(Memory(), folder)
    await store.escrow.open("s", SECRET, begins=True)
    with pytest.raises(WrongSecretError):
        await store.escrow.share("s", for_s=100.0)
    await _begin(store)
    assert await store.escrow.share("s", for_s=100.0)


async def test_a_session_that_another_process_began_first_is_not_locked_for_its_client(folder: Path) -> None:
    memory = Memory()
    slow, fast = await _opened_store(memory, folder), await _opened_store(memory, folder)
    for store in (slow, fast):
        await store.escrow.open("s", SECRET, begins=True)
    await _begin(fast)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await _bodies(slow)
    await slow.escrow.open("s", SECRET)
    assert await _bodies(slow) == await _bodies(fast)
