"""The records of a pool in its key-value store: read, claimed by one run at a time, released.

A run claims an entry by writing its own name into it before it sends anything to an agent, and releases it at its end.
No other run resumes the agent of a claimed entry, even if the claiming run is dead. A run that needs the conversation
meanwhile takes the entry over with a fresh agent, and the first run notices this at its next write. So two processes
never use the same agent, and no clock is needed.
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

from midstream.agents.own_tool_calls import AnswerCalls, decode_calls, encode_calls, with_answer
from midstream.agents.pool_records import (
    RECORD_AGE_MAX_S,
    RECORDS_MAX,
    PoolRecord,
    decode,
    encode,
    find_expired,
    with_side_call,
)
from midstream.agents.retention_estimate import LearnedRetention, decode_retention, encode_retention
from midstream.environment import World
from midstream.errors import EntryMovedError
from midstream.models.fingerprint import Outline
from midstream.store.contract import STORE_FAILURES, KeyValue

T = TypeVar("T")

POOL_NAMESPACE = "pool"
"""Namespace of the records, one for each session and upstream."""
CALLS_NAMESPACE = "pool-calls"
"""Namespace of the agents' own calls, one entry for each session and upstream."""
RETENTION_NAMESPACE = "pool-retention"
"""Namespace of the learned retention, by the upstream's name."""
WRITES_MAX = 5
"""Tries to write an entry with concurrent side calls."""

_log = logging.getLogger(__name__)


class Eviction(StrEnum):
    """The limit that removed a record."""

    AGE = "age"
    COUNT = "count"


class Found(Struct, frozen=True):
    """A session's entry, as it was read. `version` 0: there is no entry. An entry that cannot be read has no record.

    `age_s`: Seconds since the last use of an expired entry; 0 for any other.
    `expired_agent`: The agent of an expired entry, if no run has it; "" for any other.
    """

    version: int
    record: PoolRecord | None
    age_s: float = 0.0
    expired_agent: str = ""


def key_of(upstream: str, session: str) -> str:
    """Return the key of a session's record: pools of different upstreams may share a store."""
    return f"{upstream}/{session}"


def session_of(key: str, record: PoolRecord) -> str:
    """Return the session of a record."""
    return key.removeprefix(key_of(record.upstream, ""))


class PoolEntries:
    """The entries of one upstream.

    Args:
        age_max_s: Seconds that a record is kept after its last use.
        records_max: Greatest number of records, of all upstreams that share the store.
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
        """Return the entry of a session; without a record if it has expired."""
        key = key_of(self._upstream, session)
        kept = await self._kv.kv_get(POOL_NAMESPACE, key)
        if kept is None:
            return Found(0, None)
        record = decode(kept.body)
        if record is not None and self._find_expired([(key, record.used_at)]):
            agent = "" if record.run else record.agent
            return Found(kept.version, None, age_s=self._world.now() - kept.at, expired_agent=agent)
        return Found(kept.version, record)

    async def claim(self, session: str, found: Found, record: PoolRecord) -> Claim:
        """Write `record` for a new run, in place of the found entry.

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
        """Store a side call beside a record.

        Raises:
            EntryMovedError: Another run wrote the record first: read it again. Nothing was written.
        """
        if found.record is None:
            return
        key, body = key_of(self._upstream, session), encode(with_side_call(found.record, outline))
        await self._kv.kv_put(POOL_NAMESPACE, key, body, expected=found.version, at=found.record.used_at)

    async def drop_where(self, is_unwanted: Callable[[PoolRecord], bool]) -> None:
        """Remove this upstream's records for which `is_unwanted` is true, also those of a run."""
        for kept in await self._kv.kv_list(POOL_NAMESPACE):
            record = decode(kept.body)
            if record is not None and record.upstream == self._upstream and is_unwanted(record):
                await self._kv.kv_delete(POOL_NAMESPACE, kept.key, expected=kept.version)

    async def prune(self) -> tuple[str, ...]:
        """Remove expired and surplus records of any upstream; return this upstream's agents that have no record now."""
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
        """Return the agents' own calls in a session, as far as they are stored."""
        kept = await self._kv.kv_get(CALLS_NAMESPACE, key_of(self._upstream, session))
        return () if kept is None else decode_calls(kept.body)

    async def keep_calls(self, session: str, answer: AnswerCalls) -> None:
        """Store the calls of an answer beside those of the session's other answers."""
        key = key_of(self._upstream, session)
        for _ in range(WRITES_MAX):
            kept = await self._kv.kv_get(CALLS_NAMESPACE, key)
            body = encode_calls(with_answer(decode_calls(kept.body) if kept else (), answer))
            with contextlib.suppress(EntryMovedError):
                version = kept.version if kept else 0
                await self._kv.kv_put(CALLS_NAMESPACE, key, body, expected=version, at=self._world.now())
                return

    async def _drop_calls(self) -> None:
        """Remove the calls of expired and surplus entries."""
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
        """Return the learned retention of this upstream."""
        kept = await self._kv.kv_get(RETENTION_NAMESPACE, self._upstream)
        return LearnedRetention() if kept is None else decode_retention(kept.body)

    async def note_resume(self, *, age_s: float, is_alive: bool) -> None:
        """Store the outcome of a resumption. If another writer is first, it is dropped."""
        now = self._world.now()
        await self._update_retention(
            lambda known: known.with_outcome("alive" if is_alive else "dead", age_s, now=now)
        )

    async def note_echo(self, *, has_echo: bool) -> None:
        """Store whether the upstream sent the resumed conversation's id. If another writer is first, it is dropped."""
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
        """Store an observation if it is new, and return the state before and after."""
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
    """One run's claim of an entry, created by `PoolEntries.claim`.

    A later write may find that the entry was taken over (`is_lost`), or that the store is unavailable. Then nothing is
    written and nothing is raised: the entry names its run, so no other run resumes the agent.
    """

    def __init__(self, kv: KeyValue, key: str, world: World, run: str, found: Found) -> None:
        self.is_lost = False
        """Whether another process has taken the entry over, or removed it."""
        self.found = found
        self._kv = kv
        self._key = key
        self._world = world
        self._run = run
        self._version = found.version
        self.record: PoolRecord | None = None
        """The last written record."""

    async def begin(self, record: PoolRecord) -> None:
        """Write the first version; see `PoolEntries.claim`."""
        self._version = await self._keep(replace(record, run=self._run))

    async def hold(self, record: PoolRecord) -> None:
        """Write the certain facts; no other run may resume the agent yet."""
        await self._write(replace(record, run=self._run))

    async def release(self, record: PoolRecord) -> None:
        """Write the final version, which other runs may use."""
        await self._write(replace(record, run=""))

    async def drop(self) -> None:
        """Remove the entry."""
        if self.is_lost:
            return
        try:
            if not await self._kv.kv_delete(POOL_NAMESPACE, self._key, expected=self._version):
                await self._read_again()
                if not self.is_lost:
                    await self._kv.kv_delete(POOL_NAMESPACE, self._key, expected=self._version)
        except STORE_FAILURES as error:
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
            except STORE_FAILURES as error:
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
        """Check whether the entry is still this run's: a side call may have changed it."""
        try:
            kept = await self._kv.kv_get(POOL_NAMESPACE, self._key)
        except STORE_FAILURES:
            return None
        record = decode(kept.body) if kept else None
        if kept is None or record is None or record.run != self._run:
            self.is_lost = True
            return None
        self._version = kept.version
        return record
