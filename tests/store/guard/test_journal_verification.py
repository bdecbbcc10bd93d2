from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import UsageError
from midstream.session.records import Sync
from midstream.store.contract import Batch, StoredRecord
from midstream.store.guard.chain import ChainKeys
from midstream.store.guard.guarded_store import GuardedStore
from midstream.store.guard.journal_verification import (
    SessionVerdict,
    Verdict,
    checkpoint_lines,
    read_checkpoint,
    verify_session,
    verify_store,
)
from midstream.store.guard.store_key import FileKeySource, read_chain_keys
from midstream.store.memory import Memory, MemoryStore
from tests.spec import spec


class GuardedPlace:
    """A guarded store in memory with sessions `s` and `t` of three records each."""

    def __init__(self, folder: Path) -> None:
        self.memory = Memory()
        self.raw = MemoryStore(self.memory)
        self._key = folder / "key"
        source = FileKeySource(self._key, World())
        self.store = GuardedStore(self.raw, source, is_plain=True, world=World())

    @property
    def keys(self) -> ChainKeys:
        return read_chain_keys(self._key)

    async def append(self, session: str, *bodies: bytes, expected: int = 0) -> int:
        epoch = await self.store.claim(session, at=1.0)
        await self.store.append(session, Batch(bodies, expected, epoch, Sync.FULL))
        return epoch

    async def verify(self, checkpoint: bytes = b"") -> dict[str, tuple[Verdict, str]]:
        against = read_checkpoint(checkpoint.splitlines()) if checkpoint else None
        found = [each async for each in verify_store(self.raw, self.keys, against)]
        return {each.session: (each.verdict, each.problem) for each in found}

    async def checkpoint(self) -> bytes:
        found = [each async for each in verify_store(self.raw, self.keys)]
        return b"".join(checkpoint_lines(found, at=1.0))


@pytest.fixture
async def place(tmp_path: Path) -> GuardedPlace:
    place = GuardedPlace(tmp_path)
    await place.store.open()
    for session in ("s", "t"):
        await place.append(session, b"1", b"2", b"3")
    return place


@spec("SEC-46")
async def test_a_pruned_journal_is_intact_too(place: GuardedPlace) -> None:
    assert await place.verify() == {"s": (Verdict.INTACT, ""), "t": (Verdict.INTACT, "")}
    assert await place.store.prune("s", b"fold", position=2, epoch=1)
    found = await verify_session(place.raw, "s", place.keys)
    assert (found.verdict, found.end, found.pruned_to, found.chain_begins) == (Verdict.INTACT, 3, 2, 2)
    unknown = ChainKeys((), is_mixed=True, place="")
    assert (await verify_session(place.raw, "s", unknown)).verdict is Verdict.UNCHAINED
    assert await verify_session(place.raw, "none", place.keys) == SessionVerdict("none", Verdict.UNCHAINED)


@spec("SEC-46")
async def test_the_first_bad_append_is_named_and_the_other_sessions_are_verified(place: GuardedPlace) -> None:
    records = place.memory.sessions["s"].records
    records[1] = replace(records[1], body=b"x")
    found = await place.verify()
    assert found["t"] == (Verdict.INTACT, "")
    assert found["s"][0] is Verdict.DAMAGED
    assert "the append of records 1 to 3 of session 's'" in found["s"][1]
    records[:] = [records[0], records[2]]
    assert "has no record 2" in (await place.verify())["s"][1]


@spec("SEC-46")
async def test_records_before_the_chain_are_counted(tmp_path: Path) -> None:
    place = GuardedPlace(tmp_path)
    await place.raw.open()
    epoch = await place.raw.claim("s", at=1.0)
    await place.raw.append("s", Batch([b"1", b"2"], 0, epoch, Sync.FULL))
    await place.store.open()
    assert await place.verify() == {"s": (Verdict.UNCHAINED, "")}
    await place.append("s", b"3", expected=2)
    found = await verify_session(place.raw, "s", place.keys)
    assert (found.verdict, found.chain_begins, found.end) == (Verdict.PARTLY, 3, 3)


@spec("SEC-47")
async def test_a_rolled_back_journal_differs_from_the_checkpoint(place: GuardedPlace) -> None:
    before = [*place.memory.sessions["s"].records]
    await place.append("s", b"4", b"5", expected=3)
    checkpoint = await place.checkpoint()
    await place.append("t", b"4", expected=3)
    assert await place.verify(checkpoint) == {"s": (Verdict.INTACT, ""), "t": (Verdict.INTACT, "")}
    place.memory.sessions["s"].records[:] = before
    assert (await place.verify())["s"] == (Verdict.INTACT, "")
    verdict, problem = (await place.verify(checkpoint))["s"]
    assert (verdict, problem) == (Verdict.SET_BACK, "it ends with record 3; the checkpoint has record 5")
    await place.append("s", b"another 4", b"another 5", expected=3)
    verdict, problem = (await place.verify(checkpoint))["s"]
    assert (verdict, problem) == (Verdict.SET_BACK, "record 5 is another one than in the checkpoint")
    await place.store.delete("s")
    assert (await place.verify(checkpoint))["s"][0] is Verdict.MISSING


@spec("SEC-47")
async def test_a_journal_pruned_before_the_checkpoint_is_compared_and_beyond_it_not(
    place: GuardedPlace,
) -> None:
    checkpoint = await place.checkpoint()
    assert await place.store.prune("s", b"fold", position=3, epoch=1)
    assert (await place.verify(checkpoint))["s"] == (Verdict.INTACT, "")
    epoch = await place.append("s", b"4", b"5", expected=3)
    assert await place.store.prune("s", b"fold", position=4, epoch=epoch)
    assert (await place.verify(checkpoint))["s"][0] is Verdict.PRUNED


@spec("SEC-47")
async def test_a_checkpoint_omits_damaged_journals_and_is_parsed_strictly(place: GuardedPlace) -> None:
    place.memory.sessions["s"].records[1] = StoredRecord(2, 1, b"x")
    lines = (await place.checkpoint()).splitlines()
    assert list(read_checkpoint(lines)) == ["t"]
    for wrong in ([b"{}"], [*lines, lines[1][:-2]], [lines[1]], [lines[0], b"[" * 100_000]):
        with pytest.raises(UsageError, match="line"):
            read_checkpoint(wrong)
