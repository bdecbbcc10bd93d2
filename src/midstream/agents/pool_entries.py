"""The records of a pool in its key-value store: read, claimed by one run at a time, given back.

A run claims an entry by writing its own name into it before it sends anything to an agent, and releases it at its
end. No other run resumes an agent that a run has, dead or alive: a run that needs the conversation meanwhile takes
the entry over with a fresh agent, and the first run finds out at its next write. So no clock decides who may speak
to an agent, and two processes never speak to the same one.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from midstream.agents.learned_retention import LearnedRetention, decode_retention, encode_retention
from midstream.agents.pool_records import (
    RECORD_AGE_MAX_S,
    RECORDS_MAX,
    PoolRecord,
    decode,
    encode,
    find_expired,
    with_side_call,
)
from midstream.agents.unresent_calls import AnswerCalls, decode_calls, encode_calls, with_answer
from midstream.environment import World
from midstream.errors import EntryMovedError, StoreDamagedError, UnavailableError
from midstream.models.fingerprint import Outline
from midstream.store.contract import KeyValue

T = TypeVar("T")

POOL_NAMESPACE = "pool"
"""Where the records are, one for each session and upstream."""
CALLS_NAMESPACE = "pool-calls"
"""Where the calls are that agents ran themselves, one entry for each session and upstream."""
RETENTION_NAMESPACE = "pool-retention"
"""What was learned of each upstream's memory, by its name."""
WRITES_MAX = 5
"""Tries to write an entry that side calls write at the same time."""

OUT_OF_ORDER = (UnavailableError, StoreDamagedError)
"""What a store raises that cannot be used now. A pool goes on without its memory then."""

_log = logging.getLogger(__name__)


class Eviction(StrEnum):
    """Which limit removed a record."""

    AGE = "age"
    COUNT = "count"


class Found(Struct, frozen=True):
    """Entry of a session, as read. `version` 0: there is no entry. An entry that cannot be read has no record.

    `age_s`: Seconds since the last use of an entry that is too old to be used; 0 for any other.
    """

    version: int
    record: PoolRecord | None
    age_s: float = 0.0


def key_of(upstream: str, session: str) -> str:
    """Return under what name a session's record is kept: pools of different upstreams may share a store."""
    return f"{upstream}/{session}"


def session_of(key: str, record: PoolRecord) -> str:
    """Return whose record it is."""
    return key.removeprefix(key_of(record.upstream, ""))


class PoolEntries:
    """The entries of one upstream.

    Args:
        age_max_s: Seconds that a record is kept after its last use.
        records_max: Records that are kept, of all upstreams that share the store.
        evictions: Counts the removed records; a new counter by default.
    """

    def __init__(
        self,
        kv: KeyValue,
        upstream: str,
        world: World,
        *,
        age_max_s: float = RECORD_AGE_MAX_S,
        records_max: int = RECORDS_MAX,
        evictions: Counter[Eviction] | None = None,
    ) -> None:
        self._kv = kv
        self._upstream = upstream
        self._world = world
        self._age_max_s = age_max_s
        self._records_max = records_max
        self.evictions: Counter[Eviction] = Counter() if evictions is None else evictions
        """Records that were removed because of a limit, by the limit."""

    async def find(self, session: str) -> Found:
        """Return what is known of a session; one that is too old is not known."""
        key = key_of(self._upstream, session)
        kept = await self._kv.kv_get(POOL_NAMESPACE, key)
        if kept is None:
            return Found(0, None)
        record = decode(kept.body)
        if record is not None and self._find_expired([(key, record.used_at)]):
            return Found(kept.version, None, age_s=self._world.now() - kept.at)
        return Found(kept.version, record)

    async def claim(self, session: str, found: Found, record: PoolRecord) -> Claim:
        """Write `record` for a run of its own in place of what was found.

        Raises:
            EntryMovedError: Another writer was first: read again. Nothing was written.
        """
        claim = Claim(
            self._kv, key_of(self._upstream, session), self._world, self._world.new_id("run"), found
        )
        await claim.begin(record)
        if found.age_s:
            self._note_eviction(key_of(self._upstream, session), None, age_s=found.age_s)
        return claim

    async def note_aside(self, session: str, found: Found, outline: Outline) -> None:
        """Keep beside a record what was taken for a side call.

        Raises:
            EntryMovedError: Another run wrote the record first: read it again. Nothing was written.
        """
        if found.record is None:
            return
        key, body = key_of(self._upstream, session), encode(with_side_call(found.record, outline))
        await self._kv.kv_put(POOL_NAMESPACE, key, body, expected=found.version, at=found.record.used_at)

    async def drop_where(self, is_unwanted: Callable[[PoolRecord], bool]) -> None:
        """Remove this upstream's records for which `is_unwanted`, also those of a run."""
        for kept in await self._kv.kv_list(POOL_NAMESPACE):
            record = decode(kept.body)
            if record is not None and record.upstream == self._upstream and is_unwanted(record):
                await self._kv.kv_delete(POOL_NAMESPACE, kept.key, expected=kept.version)

    async def prune(self) -> tuple[str, ...]:
        """Remove what is too old or too much, of any upstream; return which of our agents have no record now."""
        entries = {kept.key: kept for kept in await self._kv.kv_list(POOL_NAMESPACE)}
        gone: list[str] = []
        await self._drop_calls()
        now = self._world.now()
        for key in self._find_expired([(key, kept.at) for key, kept in entries.items()]):
            record = decode(entries[key].body)
            is_gone = await self._kv.kv_delete(POOL_NAMESPACE, key, expected=entries[key].version)
            if is_gone:
                self._note_eviction(key, record, age_s=now - entries[key].at)
            if is_gone and record is not None and record.upstream == self._upstream and not record.run:
                gone.append(record.agent)
        return tuple(agent for agent in gone if agent)

    async def calls(self, session: str) -> tuple[AnswerCalls, ...]:
        """Return the calls that agents ran themselves in a session, as far as they are kept."""
        kept = await self._kv.kv_get(CALLS_NAMESPACE, key_of(self._upstream, session))
        return () if kept is None else decode_calls(kept.body)

    async def keep_calls(self, session: str, answer: AnswerCalls) -> None:
        """Keep the calls of an answer beside those of the session's other answers."""
        key = key_of(self._upstream, session)
        for _ in range(WRITES_MAX):
            kept = await self._kv.kv_get(CALLS_NAMESPACE, key)
            body = encode_calls(with_answer(decode_calls(kept.body) if kept else (), answer))
            with contextlib.suppress(EntryMovedError):
                version = kept.version if kept else 0
                await self._kv.kv_put(CALLS_NAMESPACE, key, body, expected=version, at=self._world.now())
                return

    async def _drop_calls(self) -> None:
        """Remove the calls of what was not used for as long as a record is kept, or is beyond their number."""
        entries = {kept.key: kept for kept in await self._kv.kv_list(CALLS_NAMESPACE)}
        for key in self._find_expired([(key, kept.at) for key, kept in entries.items()]):
            await self._kv.kv_delete(CALLS_NAMESPACE, key, expected=entries[key].version)

    def _find_expired(self, used: Iterable[tuple[str, float]]) -> tuple[str, ...]:
        return find_expired(
            used, now=self._world.now(), age_max_s=self._age_max_s, records_max=self._records_max
        )

    def _note_eviction(self, key: str, record: PoolRecord | None, *, age_s: float) -> None:
        """Log and count a record that a limit has removed: the next turn of its session costs a full replay."""
        why = Eviction.AGE if age_s > self._age_max_s else Eviction.COUNT
        self.evictions[why] += 1
        limit = f"{self._age_max_s:.0f} s" if why is Eviction.AGE else f"{self._records_max} records"
        _log.warning(
            "a record of the pool was removed, last used %.0f s ago: the limit is %s",
            age_s,
            limit,
            extra={"entry": key, "agent": record.agent if record else "", "limit": why.value},
        )

    async def retention(self) -> LearnedRetention:
        """Return what was learned of this upstream's memory."""
        kept = await self._kv.kv_get(RETENTION_NAMESPACE, self._upstream)
        return LearnedRetention() if kept is None else decode_retention(kept.body)

    async def note_resume(self, *, age_s: float, is_alive: bool) -> None:
        """Keep what became of an agent that was resumed. Where another writer is first, it is not stored."""
        now = self._world.now()
        await self._update_retention(
            lambda known: known.with_outcome("alive" if is_alive else "dead", age_s, now=now)
        )

    async def note_echo(self, *, has_echo: bool) -> None:
        """Keep whether the upstream sent the id of what it resumed. Where another writer is first, it is not stored."""
        now = self._world.now()
        known, learned = await self._update_retention(
            lambda known: known.with_echo(now=now) if has_echo else known.without_echo(now=now)
        )
        if learned.never_echoes(now=now) and not known.never_echoes(now=now):
            _log.warning(
                "this upstream does not send the id of a resumed conversation: its agents are used while they "
                "are open, and after that a fresh one gets the transcript",
                extra={"upstream": self._upstream},
            )

    async def _update_retention(
        self, learned_by: Callable[[LearnedRetention], LearnedRetention]
    ) -> tuple[LearnedRetention, LearnedRetention]:
        """Keep what is learned, if it is new, and return what was known before and what is now."""
        kept = await self._kv.kv_get(RETENTION_NAMESPACE, self._upstream)
        known = LearnedRetention() if kept is None else decode_retention(kept.body)
        learned = learned_by(known)
        if learned is not known:
            body, version = encode_retention(learned), kept.version if kept else 0
            with contextlib.suppress(EntryMovedError):
                await self._kv.kv_put(
                    RETENTION_NAMESPACE, self._upstream, body, expected=version, at=self._world.now()
                )
        return known, learned


class Claim:
    """One run's hold on an entry. Made by `PoolEntries.claim`.

    Each write after the first may find the entry taken over (`is_lost`), or the store out of order; then nothing is
    written and nothing raised: the entry names the run that has it, so no other run resumes its agent.
    """

    def __init__(self, kv: KeyValue, key: str, world: World, run: str, found: Found) -> None:
        self.is_lost = False
        """Whether another process has the entry by now, or has removed it."""
        self.found = found
        self._kv = kv
        self._key = key
        self._world = world
        self._run = run
        self._version = found.version
        self.record: PoolRecord | None = None
        """What was written last."""

    async def begin(self, record: PoolRecord) -> None:
        """Write the first word; see `PoolEntries.claim`."""
        self._version = await self._keep(replace(record, run=self._run))

    async def hold(self, record: PoolRecord) -> None:
        """Write what is certain by now; no other run may resume it yet."""
        await self._write(replace(record, run=self._run))

    async def release(self, record: PoolRecord) -> None:
        """Write what others may go by."""
        await self._write(replace(record, run=""))

    async def drop(self) -> None:
        """Remove the entry: it is of no use any more."""
        if self.is_lost:
            return
        try:
            if not await self._kv.kv_delete(POOL_NAMESPACE, self._key, expected=self._version):
                await self._read_again()
                if not self.is_lost:
                    await self._kv.kv_delete(POOL_NAMESPACE, self._key, expected=self._version)
        except OUT_OF_ORDER as error:
            _log.warning("a record could not be removed: %s", error.code, extra={"entry": self._key})

    async def _write(self, record: PoolRecord) -> None:
        for _ in range(WRITES_MAX):
            if self.is_lost:
                return
            try:
                self._version = await self._keep(record)
            except EntryMovedError:
                theirs = await self._read_again()
                record = replace(record, asides=theirs.asides if theirs else ())
            except OUT_OF_ORDER as error:
                _log.warning("a record could not be written: %s", error.code, extra={"entry": self._key})
                return
            else:
                return

    async def _keep(self, record: PoolRecord) -> int:
        version = await self._kv.kv_put(
            POOL_NAMESPACE, self._key, encode(record), expected=self._version, at=record.used_at
        )
        self.record = record
        return version

    async def _read_again(self) -> PoolRecord | None:
        """Find out whether the entry is still this run's: a side call may have written something beside it."""
        try:
            kept = await self._kv.kv_get(POOL_NAMESPACE, self._key)
        except OUT_OF_ORDER:
            return None
        record = decode(kept.body) if kept else None
        if kept is None or record is None or record.run != self._run:
            self.is_lost = True
            return None
        self._version = kept.version
        return record
