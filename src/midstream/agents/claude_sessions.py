"""Transcripts of Claude Code in a store of midstream, for the SDK's `SessionStore`: any machine can resume them.

A transcript is a namespace with an entry for each batch of the SDK, numbered from 1. So the cost of a turn does not
grow with the conversation. Concurrent writers take successive numbers. Another namespace lists the transcripts of a
folder. An entry is listed before its first batch is written, so that every transcript can be deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from midstream.environment import World
from midstream.errors import EntryMovedError
from midstream.extras import extra
from midstream.number_checks import require_number
from midstream.store.contract import KeyValue, KeyValueEntry

with extra("claude"):
    from claude_agent_sdk import SessionKey, SessionStore, fold_session_summary
    from claude_agent_sdk.types import (
        SessionListSubkeysKey,
        SessionStoreEntry,
        SessionStoreListEntry,
        SessionSummaryEntry,
    )

KEPT_DAYS = 30.0
"""Days after its last batch for which a session is kept: the CLI's own default for its files (`cleanupPeriodDays`)."""
SWEEP_S = 3600.0
"""Seconds between two sweeps of a folder."""
_DAY_S = 24 * 3600.0
TRIES_MAX = 1000
"""Numbers that other writers may take before an append is given up."""
KNOWN_MAX = 200
"""Transcripts whose known content is in memory; beyond it, the longest unused one is dropped."""

_decode = msgspec.json.Decoder(list[dict[str, Any]]).decode
_encode = msgspec.json.Encoder().encode


class _Known:
    """Known content of a transcript, so that an append need not read it: other writers can only add to it."""

    def __init__(self) -> None:
        self.batches = 0
        self.ids: set[str] = set()

    def add(self, number: int, entries: Iterable[Any]) -> None:
        self.batches = max(self.batches, number)
        self.ids.update(entry["uuid"] for entry in entries if isinstance(entry.get("uuid"), str))


class KeyValueSessions(SessionStore):
    """A `SessionStore` of the Claude Agent SDK, kept in an open `KeyValue` such as `SQLiteStore`.

    A repeated entry (the SDK repeats a failed batch) is stored once, by its uuid.

    Args:
        kv: The store of the transcripts.
        kept_days: Days after its last batch until a session is deleted, with its sub-agents' transcripts; None: never.
    """

    def __init__(self, kv: KeyValue, *, kept_days: float | None = KEPT_DAYS, world: World = World()) -> None:
        if kept_days is not None:
            require_number("kept_days", kept_days, "days")
        self._kv = kv
        self._kept_days = kept_days
        self._world = world
        self._swept_at: dict[str, float] = {}
        """The time of the last sweep, by folder."""
        self._known: dict[str, _Known] = {}

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Append a batch.

        Raises:
            EntryMovedError: Other writers were faster `TRIES_MAX` times. Nothing was written.
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was written.
        """
        if not entries:
            return
        name = _name(key)
        known = await self._knowledge_of(name)
        await self._list(key, entries)
        await self._delete_old(key["project_key"])
        for _ in range(TRIES_MAX):
            batch = [*_new(entries, known.ids)]
            if not batch:
                return
            number = known.batches + 1
            try:
                await self._kv.kv_put(name, str(number), _encode(batch), expected=0, at=self._world.now())
            except EntryMovedError:
                other = await self._kv.kv_get(name, str(number))
                known.add(number, _decode(other.body) if other is not None else ())
            else:
                known.add(number, batch)
                return
        raise _slow()

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Return a transcript, or None if there is none."""
        batches = await self._batches(_name(key))
        if not batches:
            return None
        ids: set[str] = set()
        entries: list[Any] = []
        for _, body in batches:
            new = [*_new(_decode(body), ids)]
            ids.update(entry["uuid"] for entry in new if isinstance(entry.get("uuid"), str))
            entries += new
        return entries

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """Return the sessions of a folder, last written first."""
        return [
            SessionStoreListEntry(session_id=session, mtime=_ms(line))
            for session, subpath, line in await self._list_entries(project_key)
            if not subpath
        ]

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        """Return the SDK's summaries of the sessions of a folder, last written first."""
        return [
            _summary(session, line)
            for session, subpath, line in await self._list_entries(project_key)
            if not subpath
        ]

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """Return the subpaths of a session: its sub-agents' transcripts."""
        return [
            subpath
            for session, subpath, _ in await self._list_entries(key["project_key"])
            if session == key["session_id"] and subpath
        ]

    async def delete(self, key: SessionKey) -> None:
        """Delete a transcript, with its sub-agents' transcripts if it is a session's. A missing one is no error."""
        project, session, subpath = key["project_key"], key["session_id"], key.get("subpath", "")
        for found, below, _ in await self._list_entries(project):
            if found == session and subpath in {"", below}:
                await self._delete(project, session, below)

    async def _delete_old(self, project: str) -> None:
        """Delete the old sessions of a folder, once an hour."""
        now = self._world.now()
        if self._kept_days is None or now - self._swept_at.get(project, -SWEEP_S) < SWEEP_S:
            return
        self._swept_at[project] = now
        last: dict[str, float] = {}
        for session, _, line in await self._list_entries(project):
            last[session] = max(last.get(session, 0.0), line.at)
        for session, at in last.items():
            if at < now - self._kept_days * _DAY_S:
                await self.delete(SessionKey(project_key=project, session_id=session))

    async def _knowledge_of(self, name: str) -> _Known:
        known = self._known.pop(name, None)
        if known is None:
            known = _Known()
            for number, body in await self._batches(name):
                known.add(number, _decode(body))
        self._known[name] = known
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        return known

    async def _delete(self, project: str, session: str, subpath: str) -> None:
        name = _transcript(project, session, subpath)
        self._known.pop(name, None)
        for entry in await self._kv.kv_list(name):
            await self._kv.kv_delete(name, entry.key, expected=entry.version)
        line = await self._kv.kv_get(_index(project), _line(session, subpath))
        if line is not None:
            await self._kv.kv_delete(_index(project), line.key, expected=line.version)

    async def _list(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """List a transcript, with the time of its last batch and the SDK's summary."""
        index, line = _index(key["project_key"]), _line(key["session_id"], key.get("subpath", ""))
        for _ in range(TRIES_MAX):
            found = await self._kv.kv_get(index, line)
            at, body = self._world.now(), b""
            if not key.get("subpath"):
                before = _summary(key["session_id"], found) if found is not None else None
                body = _encode(fold_session_summary(before, key, entries)["data"])
            with contextlib.suppress(EntryMovedError):
                await self._kv.kv_put(index, line, body, expected=found.version if found else 0, at=at)
                return
        raise _slow()

    async def _list_entries(self, project: str) -> list[tuple[str, str, KeyValueEntry]]:
        lines = await self._kv.kv_list(_index(project))
        return [(*_line_of(line.key), line) for line in lines]

    async def _batches(self, name: str) -> list[tuple[int, bytes]]:
        return sorted((int(entry.key), entry.body) for entry in await self._kv.kv_list(name))


def _index(project: str) -> str:
    return f"claude-sessions:{project}"


def _line(session: str, subpath: str) -> str:
    return _encode([session, subpath]).decode()


def _line_of(key: str) -> tuple[str, str]:
    return msgspec.json.decode(key, type=tuple[str, str])


def _summary(session: str, line: KeyValueEntry) -> SessionSummaryEntry:
    return SessionSummaryEntry(session_id=session, mtime=_ms(line), data=msgspec.json.decode(line.body))


def _ms(line: KeyValueEntry) -> int:
    return int(line.at * 1000)


def _slow() -> EntryMovedError:
    return EntryMovedError(f"a transcript was changed by another process {TRIES_MAX} times in a row")


def _name(key: SessionKey) -> str:
    return _transcript(key["project_key"], key["session_id"], key.get("subpath", ""))


def _transcript(project: str, session: str, subpath: str) -> str:
    return "claude-transcript:" + _encode([project, session, subpath]).decode()


def _new(entries: Iterable[Any], known: Collection[str]) -> Iterator[Any]:
    """Yield the entries whose uuid is not known, each once. One without a uuid is always new."""
    seen: set[str] = set()
    for entry in entries:
        name = entry.get("uuid")
        if isinstance(name, str):
            if name in known or name in seen:
                continue
            seen.add(name)
        yield entry
