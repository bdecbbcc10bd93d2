"""A wrapper of any store that encrypts all content of users, models and tools.

`SessionKeys` selects the wrapping keys of a session: the operator's, or those of its client (`escrow`). Data without a
session are always under the operator's keys.

These stay readable: names of sessions, tools' own tables, the number, size and time of records, the status of turns,
and digests of large results. See `ciphers` for the properties of the encryption.

The link of a record binds it to the record before it (`store.guard.chain`), so that records of another timeline are
detected. Removed records are detected, too. Within a journal, a position is missing. At the end, the *seal* is compared
with the last position. An append that must survive a power cut writes its last position, encrypted, as the seal, in the
same transaction. Records after the seal may be lost in a power cut, so their loss is no sign of tampering. A store that
was set back as a whole is detected only by its clients' checkpoints (STREAM-100, STREAM-105), and by `midstream verify
--against`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from midstream.environment import World
from midstream.errors import (
    EntryDamagedError,
    EventsLostError,
    KeyMissingError,
    KeysUnavailableError,
    MidstreamError,
    SessionLockedError,
    StoreDamagedError,
    UsageError,
)
from midstream.retries import FORWARDED_BACKOFF, FORWARDED_WITHIN_S
from midstream.session.blobs import Blob
from midstream.session.child_names import PART_MARK
from midstream.session.records import Sync, is_pruned
from midstream.store.contract import (
    Attempt,
    Batch,
    ForwardedCommand,
    Immediate,
    KeyValueEntry,
    ListPlace,
    News,
    SessionInfo,
    Store,
    StoredRecord,
    StoreReader,
    Transactional,
)
from midstream.store.encryption import ciphers
from midstream.store.encryption.ciphers import ALONE, ID_BYTES, SHARED, DataKey, OperatorKeys
from midstream.store.encryption.store_secret import WrappedKeySource
from midstream.store.guard.guarded_store import GuardedStore

KEYS_KNOWN_MAX = 4096
"""Data keys kept in memory for reading; beyond it, the longest unused one is dropped."""
KEY_MARK = "key-"
"""Prefix of the names of blobs with wrapped keys; no digest begins with it."""
TITLE_MARK = "encrypted:"
TITLES_AT_ONCE = 64
"""Lines of a list whose titles are decrypted in one step."""
ENTRIES_AT_ONCE = 64
"""Entries of a namespace whose keys are read in one request."""

_log = logging.getLogger(__name__)


class SessionKeys(Protocol):
    """Selects the keys that wrap the data of a session."""

    house: OperatorKeys
    """The operator's keys, for data without a session."""

    async def prepare(self, store: Store) -> None:
        """Prepare the keys after the store was opened.

        Args:
            store: The store behind the encrypted one, guarded.

        Raises:
            KeyMissingError: These are not the operator's keys of this store.
        """

    def close(self) -> None:
        """Delete all keys except the operator's."""

    def require_node(self, session: str) -> None:
        """Check that a session may be claimed.

        Raises:
            LeaseHeldError: Its keys permit only reading.
        """

    async def reading(self, session: str) -> OperatorKeys:
        """Return the keys that decrypt a session.

        Raises:
            SessionLockedError: They need the client's secret.
        """

    async def writing(self, session: str, epoch: int) -> OperatorKeys:
        """Return the keys for the first append under an epoch.

        Raises:
            MidstreamError: As `reading`; or another node has the lease.
        """

    async def has_title(self, session: str) -> bool:
        """Whether its title may appear in listings."""

    def drop(self, session: str) -> None:
        """Drop the keys of a session that was deleted."""


class OneForAll(SessionKeys):
    """The operator's keys, for every session."""

    def __init__(self, keys: OperatorKeys) -> None:
        self.house = keys

    async def prepare(self, store: Store) -> None:
        """See `SessionKeys.prepare`."""

    def close(self) -> None:
        """See `SessionKeys.close`."""

    def require_node(self, session: str) -> None:
        """See `SessionKeys.require_node`."""

    @override
    async def reading(self, session: str) -> OperatorKeys:
        return self.house

    @override
    async def writing(self, session: str, epoch: int) -> OperatorKeys:
        return self.house

    @override
    async def has_title(self, session: str) -> bool:
        return True

    def drop(self, session: str) -> None:
        """Drop the wraps of a session that was deleted."""


class _Writing(Struct):
    """The key with which a session is written under its current epoch."""

    epoch: int
    key: DataKey
    kept: Blob
    has_title: bool
    is_kept: bool = False
    """Whether the wrapped key is certainly in the store."""


class EncryptedReader(StoreReader):
    """The reading half of an encrypted store.

    Args:
        keys: Selects the wrapping keys.
        is_mixed: Also read data that are older than the encryption.
    """

    def __init__(self, store: StoreReader, keys: SessionKeys, *, is_mixed: bool = False) -> None:
        self.keys = keys
        self._reader = store
        self._is_mixed = is_mixed
        self._known: dict[tuple[str, bytes], DataKey] = {}
        self._of_entries: dict[bytes, DataKey] = {}
        """Keys of entries by their wraps, if each unwrap is a request."""

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        """See `Store.read`.

        Raises:
            KeyMissingError: An operator's key is missing.
            SessionLockedError: The client's secret is missing.
            EventsLostError: Records were removed.
            StoreDamagedError: A record was changed or moved.
        """
        page = await self._reader.read(session, after=after, limit=limit)
        if not page:
            await self._require_whole(session)
            return page
        keys = await self.keys.reading(session)
        found: list[StoredRecord] = []
        for stored in page:
            place = _place_of_record(session, stored.position, stored.epoch)
            try:
                body = await self._plain(session, stored.body, place, keys)
            except StoreDamagedError as error:
                where = f"record {stored.position} of session {session!r}"
                raise type(error)(f"{where}: {error.message}") from error
            missing = found[-1].position + 1 if found else after + 1
            if stored.position != missing and (found or not _begins(stored.body, body)):
                raise _cut_error(session, f"has no record {missing}: it was removed")
            found.append(StoredRecord(stored.position, stored.epoch, body))
        return found

    async def _require_whole(self, session: str) -> None:
        """Check that a journal does not end before its last seal."""
        found = await self._reader.find(session)
        if found is None or not (found.end or found.seal) or (self._is_mixed and not found.seal):
            return
        if found.seal[:1] != b"%c" % SHARED:
            raise _cut_error(session, "has no seal (`is_mixed` reads what was written before)")
        try:
            keys = await self.keys.reading(session)
        except SessionLockedError:  # nothing can be read or written without its client
            return
        sealed = int(await self._plain(session, found.seal, _place_of_end(session), keys))
        if found.end < sealed:
            what = f"ends with record {found.end}, and was sealed with {sealed}: records were removed"
            raise _cut_error(session, what)

    async def blob(self, session: str, digest: str) -> bytes | None:
        """See `Store.blob`; raises as `read` does."""
        found = None if digest.startswith(KEY_MARK) else await self._reader.blob(session, digest)
        if found is None:
            return None
        keys = await self.keys.reading(session)
        return await self._plain(session, found, _place_of_blob(session, digest), keys)

    @override
    async def blob_digests(self, session: str) -> Sequence[str]:
        found = await self._reader.blob_digests(session)
        return [digest for digest in found if not digest.startswith(KEY_MARK)]

    @override
    async def find(self, session: str) -> SessionInfo | None:
        found = await self._reader.find(session)
        return None if found is None else replace(await self._with_title(found), seal=b"")

    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        """See `Store.list`. A title that cannot be read is empty.

        Raises:
            UnavailableError: The operator's keys are unavailable.
        """
        page: list[SessionInfo] = []
        async for info in self._reader.list(live=live, of=of, after=after, limit=limit):
            page.append(info)
            if len(page) == TITLES_AT_ONCE:
                for each in await self._with_titles(page):
                    yield each
                page.clear()
        for each in await self._with_titles(page):
            yield each

    @override
    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        found = await self._reader.kv_get(namespace, key)
        try:
            return None if found is None else await self._decrypt_entry(namespace, found)
        except StoreDamagedError as error:
            if found is None or isinstance(error, KeyMissingError):
                raise
            raise EntryDamagedError(error.message, version=found.version) from error

    @override
    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        """See `KeyValueReader.kv_list`. An entry that cannot be read is omitted, and logged.

        Raises:
            KeyMissingError: An operator's key is missing, and no entry can be read without it.
        """
        entries: list[KeyValueEntry] = []
        missing: KeyMissingError | None = None
        stored = await self._reader.kv_list(namespace)
        for number, found in enumerate(stored):
            if number % ENTRIES_AT_ONCE == 0:
                await self._read_entry_keys(namespace, stored[number : number + ENTRIES_AT_ONCE])
            try:
                entries.append(await self._decrypt_entry(namespace, found))
            except StoreDamagedError as error:
                missing = error if isinstance(error, KeyMissingError) else missing
                _log.error(
                    "an entry of %s is omitted: %s", namespace, error.message, extra={"key": found.key}
                )
        if missing is not None and not entries:
            raise missing
        return entries

    @override
    async def kv_namespaces(self) -> Sequence[str]:
        return await self._reader.kv_namespaces()

    async def _decrypt_entry(self, namespace: str, found: KeyValueEntry) -> KeyValueEntry:
        if self._is_mixed and found.body[:1] != b"%c" % ALONE:
            return found
        place, house = _place_of_entry(namespace, found.key), self.keys.house
        kept = ciphers.wrapped_of(found.body)
        key = self._of_entries.get(kept) or await ciphers.unwrap_key(kept, house, context=place)
        if isinstance(house, ciphers.UnwrapsMany):
            self._cache_entry_key(kept, key)
        return replace(found, body=key.decrypt_alone(found.body, place))

    async def _read_entry_keys(self, namespace: str, stored: Sequence[KeyValueEntry]) -> None:
        """Read the keys of entries in one request. An entry requests a refused key again, and gets the error."""
        house = self.keys.house
        if not isinstance(house, ciphers.UnwrapsMany):
            return
        wanted: list[tuple[bytes, bytes]] = []
        for found in stored:
            with contextlib.suppress(StoreDamagedError):  # its entry raises the error
                kept = ciphers.wrapped_of(found.body)
                if kept not in self._of_entries:
                    wanted.append((kept, _place_of_entry(namespace, found.key)))
        if wanted:
            for (kept, _), key in zip(wanted, await ciphers.unwrap_keys(wanted, house), strict=True):
                if key is not None:
                    self._cache_entry_key(kept, key)

    def _cache_entry_key(self, kept: bytes, key: DataKey) -> None:
        self._of_entries[kept] = key
        if len(self._of_entries) > KEYS_KNOWN_MAX:
            del self._of_entries[next(iter(self._of_entries))]

    async def _plain(self, session: str, body: bytes, place: bytes, keys: OperatorKeys) -> bytes:
        kind = body[0] if body else 0
        if kind == SHARED:
            key_id = body[1 : 1 + ID_BYTES]
            key = self._known.get((session, key_id)) or await self._read_key(session, key_id, keys)
            return key.decrypt(body, place)
        if kind == ALONE:
            return await ciphers.decrypt_alone(body, place, keys)
        if self._is_mixed and keys is self.keys.house:
            return body
        raise StoreDamagedError("it is not encrypted (`is_mixed` reads what was written before)")

    async def _read_key(self, session: str, key_id: bytes, keys: OperatorKeys) -> DataKey:
        kept = await self._reader.blob(session, f"{KEY_MARK}{key_id.hex()}")
        if kept is None:
            raise StoreDamagedError("its key is no longer in the store")
        key = await ciphers.unwrap_key(kept, keys, context=_place_of_key(session))
        self._cache_key(session, key)
        return key

    def _cache_key(self, session: str, key: DataKey) -> None:
        self._known[session, key.id] = key
        if len(self._known) > KEYS_KNOWN_MAX:
            del self._known[next(iter(self._known))]

    async def _with_titles(self, page: Sequence[SessionInfo]) -> Sequence[SessionInfo]:
        if isinstance(self.keys.house, ciphers.UnwrapsMany):
            await self._read_keys(page, self.keys.house)
        return [await self._with_title(each) for each in page]

    async def _read_keys(self, page: Sequence[SessionInfo], keys: ciphers.UnwrapsMany) -> None:
        """Read the data keys of the titles of a page in one request."""
        wanted: list[tuple[str, bytes]] = []
        for info in page:
            encrypted = _encrypted_title(info)
            key_id = encrypted[1 : 1 + ID_BYTES]
            if encrypted[:1] != b"%c" % SHARED or (info.session, key_id) in self._known:
                continue
            kept = await self._reader.blob(info.session, f"{KEY_MARK}{key_id.hex()}")
            if kept is not None:
                wanted.append((info.session, kept))
        if wanted:
            pairs = [(kept, _place_of_key(session)) for session, kept in wanted]
            found = await ciphers.unwrap_keys(pairs, keys)
            for (session, _), key in zip(wanted, found, strict=True):
                if key is not None:
                    self._cache_key(session, key)

    async def _with_title(self, info: SessionInfo) -> SessionInfo:
        title = info.mark.title
        if not title.startswith(TITLE_MARK):
            return info
        place = _place_of_title(info.session)
        try:
            encrypted = _encrypted_title(info)
            plain = (await self._plain(info.session, encrypted, place, self.keys.house)).decode()
        except (StoreDamagedError, SessionLockedError, ValueError):
            plain = ""
        return replace(info, mark=replace(info.mark, title=plain))


class EncryptedStore(EncryptedReader, Store):
    """A store in front of another one, which encrypts all content and has the same abilities: see `encrypt_store`."""

    def __init__(self, store: Store, keys: SessionKeys, *, world: World, is_mixed: bool = False) -> None:
        source = WrappedKeySource(keys.house, is_mixed=is_mixed, world=world)
        guarded = GuardedStore(store, source, is_plain=False, world=world)
        super().__init__(guarded, keys, is_mixed=is_mixed)
        self._store = guarded
        self._world = world
        self._writing: dict[str, _Writing] = {}
        self._news = News()
        """Changes that `watch` received and has not returned: unreadable commands; all, if it was cancelled."""
        self._unread_since: dict[int, float] = {}
        """Time of receipt of each of those commands, on the monotonic clock."""
        self._unread_failures = 0

    @override
    async def open(self) -> None:
        await self._store.open()
        try:
            await self.keys.prepare(self._store)
        except BaseException:  # also a cancellation
            await self._store.close()
            raise

    async def close(self) -> None:
        """See `Store.close`. The keys are deleted."""
        await self._store.close()
        self.keys.close()
        self._writing.clear()
        self._known.clear()
        self._of_entries.clear()

    @property
    def refuses_encrypted(self) -> bool:
        """See `Store.refuses_encrypted`."""
        return True

    @property
    def node(self) -> str:  # type: ignore[override]  # that of the store behind it
        """See `Store.node`."""
        return self._store.node

    @override
    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        self.keys.require_node(session)
        return await self._store.claim(session, at=at, is_free=is_free)

    @override
    async def release(self, session: str, *, epoch: int) -> None:
        self._writing.pop(session, None)
        await self._store.release(session, epoch=epoch)

    async def append(self, session: str, batch: Batch) -> int:
        """See `Store.append`. The seal is this store's own.

        Raises:
            UsageError: The batch has a seal of a store in front of this one. Nothing was written.
        """
        if batch.seal:
            raise UsageError("a journal has one seal: encrypt it once")
        writing = await self._key_for(session, batch.epoch)
        end = await self._store.append(session, _encrypt_batch(batch, writing, session))
        writing.is_kept = writing.is_kept or bool(batch.bodies)
        return end

    @property
    def immediate(self) -> Immediate | None:
        """See `Store.immediate`: an ability of the inner store."""
        return None if self._store.immediate is None else self

    @property
    def is_ready(self) -> bool:
        """See `Immediate.is_ready`: an ability of the inner store."""
        behind = self._store.immediate
        return behind is not None and behind.is_ready

    def append_now(self, session: str, batch: Batch) -> int | None:
        """See `Immediate.append_now`."""
        behind, writing = self._store.immediate, self._writing.get(session)
        if behind is None or writing is None or writing.epoch != batch.epoch or not writing.is_kept:
            return None
        if batch.seal:
            return None
        return behind.append_now(session, _encrypt_batch(batch, writing, session))

    @property
    @override
    def appends_waiting(self) -> int:
        return self._store.appends_waiting

    @property
    @override
    def death_noticed_s(self) -> float:
        return self._store.death_noticed_s

    @property
    @override
    def joined_at(self) -> float:
        return self._store.joined_at

    @property
    def transactional(self) -> Transactional | None:
        """See `Store.transactional`: an ability of the inner store."""
        return None if self._store.transactional is None else self

    async def append_within(
        self, session: str, work: Callable[[Attempt], Batch], *, expected: int, epoch: int
    ) -> Batch:
        """See `Transactional.append_within`."""
        behind = self._store.transactional
        assert behind is not None, "only if the inner store can"
        writing = await self._key_for(session, epoch)
        plain: list[Batch] = []

        def encrypting(attempt: Attempt) -> Batch:
            plain[:] = [work(attempt)]
            return _encrypt_batch(plain[0], writing, session)

        await behind.append_within(session, encrypting, expected=expected, epoch=epoch)
        writing.is_kept = writing.is_kept or bool(plain[0].bodies)
        return plain[0]

    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        """See `Store.prune`. The inner store makes the link."""
        if link is not None:
            raise UsageError("a journal has one chain: guard it once")
        place = _place_of_record(session, position, epoch)
        keys = await self.keys.reading(session)
        encrypted = await ciphers.encrypt_alone(body, place, keys, self._world)
        return await self._store.prune(session, encrypted, position=position, epoch=epoch)

    async def delete(self, session: str) -> bool:
        """See `Store.delete`. The wrapped keys are deleted, too, so that no copy of a record can be read."""
        self.lock(session)
        is_deleted = await self._store.delete(session)
        self.keys.drop(session)
        return is_deleted

    def lock(self, session: str) -> None:
        """Delete the data keys of a session and its parts from memory: the next access needs the wrapping keys."""
        parts = f"{session}{PART_MARK}"
        for name in [each for each in self._writing if each == session or each.startswith(parts)]:
            del self._writing[name]
        for place in [each for each in self._known if each[0] == session or each[0].startswith(parts)]:
            del self._known[place]

    async def watch(self, followed: Mapping[str, int]) -> News:
        """See `Store.watch`. A forwarded command that cannot be decrypted is omitted.

        If the operator's keys are unavailable, it is retried for as long as its sender waits.
        """
        await self._receive_news(followed)
        forwarded_commands: list[ForwardedCommand] = []
        unread: dict[int, ForwardedCommand] = {}
        for forwarded in self._news.forwarded_commands:
            if any(each.session == forwarded.session for each in unread.values()):
                unread[forwarded.number] = forwarded  # commands of one session keep their order
                continue
            try:
                keys = await self.keys.reading(forwarded.session)
                body = await ciphers.decrypt_alone(
                    forwarded.body, _place_of_forwarded(forwarded.session), keys
                )
            except SessionLockedError:
                # Its sender has the key, and is notified again once it has the session.
                _log.debug("a command waits for its client", extra={"session": forwarded.session})
            except KeysUnavailableError:
                unread[forwarded.number] = forwarded
            except MidstreamError as error:
                _log.error("a command cannot be read: %s", error.code, extra={"session": forwarded.session})
            else:
                forwarded_commands.append(replace(forwarded, body=body))
        news, now = self._news, self._world.monotonic()
        self._unread_since = {number: self._unread_since.get(number, now) for number in unread}
        for number in [
            number for number, since in self._unread_since.items() if since <= now - FORWARDED_WITHIN_S
        ]:
            del self._unread_since[number]
            session = unread.pop(number).session
            _log.error("a command cannot be read: its sender no longer waits", extra={"session": session})
        self._news = News(forwarded_commands=tuple(unread.values()), peers=news.peers)
        return replace(news, forwarded_commands=tuple(forwarded_commands))

    async def _receive_news(self, followed: Mapping[str, int]) -> None:
        """Add new changes to those that were not returned yet. A cancelled call loses none."""
        news, limit = self._news, None
        if self._unread_since:
            self._unread_failures += 1
            limit = FORWARDED_BACKOFF.wait_s(self._unread_failures, chance=self._world.chance())
        else:
            self._unread_failures = 0
            if news.moved or news.forwarded_commands or news.orphans:
                limit = 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                came = await self._store.watch(followed)
                self._news = News(
                    news.moved | came.moved,
                    (*news.forwarded_commands, *came.forwarded_commands),
                    tuple(dict.fromkeys((*news.orphans, *came.orphans))),
                    came.peers,
                )

    @override
    async def is_held_elsewhere(self, session: str) -> bool:
        return await self._store.is_held_elsewhere(session)

    @override
    async def forward(self, session: str, body: bytes) -> bytes:
        keys = await self.keys.reading(session)
        encrypted = await ciphers.encrypt_alone(body, _place_of_forwarded(session), keys, self._world)
        answer = await self._store.forward(session, encrypted)
        return await ciphers.decrypt_alone(answer, PLACE_OF_ANSWER, self.keys.house)

    @override
    async def answer(self, forwarded: int, body: bytes) -> None:
        encrypted = await ciphers.encrypt_alone(body, PLACE_OF_ANSWER, self.keys.house, self._world)
        await self._store.answer(forwarded, encrypted)

    # --- keys

    async def _key_for(self, session: str, epoch: int) -> _Writing:
        """Return the key for an epoch, which no other process and no other epoch has."""
        found = self._writing.get(session)
        if found is None or found.epoch != epoch:
            keys, key = await self.keys.writing(session, epoch), ciphers.fresh_key(self._world)
            data_key = DataKey(key)
            kept = await ciphers.wrap_key(key, keys, context=_place_of_key(session))
            has_title = await self.keys.has_title(session)
            found = _Writing(epoch, data_key, Blob(f"{KEY_MARK}{data_key.id.hex()}", kept), has_title)
            self._writing[session] = found
            self._cache_key(session, data_key)
        return found

    @override
    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        place = _place_of_entry(namespace, key)
        encrypted = await ciphers.encrypt_alone(body, place, self.keys.house, self._world)
        return await self._store.kv_put(namespace, key, encrypted, expected=expected, at=at)

    @override
    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        return await self._store.kv_delete(namespace, key, expected=expected)


def encrypt_store(
    store: Store, keys: OperatorKeys, *, is_mixed: bool = False, world: World = World()
) -> EncryptedStore:
    """Return a store that keeps all data in `store`, encrypted, and has the same abilities.

    Args:
        keys: The operator's keys: `ciphers.FileKeys`, or your own class for a key management service.
        is_mixed: Also read unencrypted data. Otherwise they are refused, because an attacker might have written them.
        world: Source of data keys.
    """
    return EncryptedStore(store, OneForAll(keys), world=world, is_mixed=is_mixed)


def _cut_error(session: str, what: str) -> EventsLostError:
    error = EventsLostError(f"session {session!r} {what}")
    _log.error(error.message, extra={"session": session})
    return error


def _encrypted_title(info: SessionInfo) -> bytes:
    """Return the encrypted title of a line; b"" if there is none."""
    title = info.mark.title
    try:
        return urlsafe_b64decode(title.removeprefix(TITLE_MARK)) if title.startswith(TITLE_MARK) else b""
    except (Base64Error, ValueError):
        return b""


def _begins(encrypted: bytes, body: bytes) -> bool:
    """Whether a journal may begin with this record: a fold, which has a key of its own or is unencrypted."""
    return encrypted[:1] == b"%c" % ALONE or (encrypted is body and is_pruned(body))


def _encrypt_batch(batch: Batch, writing: _Writing, session: str) -> Batch:
    encrypt = writing.key.encrypt
    bodies = [
        encrypt(body, _place_of_record(session, position, writing.epoch))
        for position, body in enumerate(batch.bodies, start=batch.expected + 1)
    ]
    blobs = [
        Blob(blob.digest, encrypt(blob.body, _place_of_blob(session, blob.digest))) for blob in batch.blobs
    ]
    if not writing.is_kept:
        blobs.insert(0, writing.kept)
    mark = batch.mark
    if mark is not None and mark.title and not writing.has_title:
        mark = replace(mark, title="")
    elif mark is not None and mark.title:
        title = encrypt(mark.title.encode("utf-8", "replace"), _place_of_title(session))
        mark = replace(mark, title=TITLE_MARK + urlsafe_b64encode(title).decode())
    seal = b""
    if bodies and (batch.sync is Sync.FULL or not writing.is_kept):
        seal = encrypt(b"%d" % batch.end, _place_of_end(session))
    return replace(batch, bodies=bodies, mark=mark, blobs=blobs, seal=seal)


# --- the associated data: the kind first, then numbers, then one name, so that no two are the same

PLACE_OF_ANSWER = b"midstream 1 answer"


def _place_of_record(session: str, position: int, epoch: int) -> bytes:
    return f"midstream 1 record {position} {epoch} {session}".encode()


def _place_of_end(session: str) -> bytes:
    return f"midstream 1 end {session}".encode()


def _place_of_blob(session: str, digest: str) -> bytes:
    return f"midstream 1 blob {len(digest)} {digest} {session}".encode()


def _place_of_key(session: str) -> bytes:
    return f"midstream 1 key {session}".encode()


def _place_of_title(session: str) -> bytes:
    return f"midstream 1 title {session}".encode()


def _place_of_forwarded(session: str) -> bytes:
    return f"midstream 1 letter {session}".encode()


def _place_of_entry(namespace: str, key: str) -> bytes:
    return f"midstream 1 entry {len(namespace)} {namespace} {key}".encode()
