"""A wrapper of any store that detects writes of other programs into journals and the inbox.

It stores a link with each append (`chain`), checks the links of records that it reads, and seals forwarded commands
(`inbox_seals`) and key-value entries (`entry_seals`). An append is checked once in a process, when it is first read;
readers of the same session do not check it again. Titles and times of listings are not protected.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from midstream.environment import World
from midstream.errors import EntryDamagedError, StoreDamagedError, UsageError
from midstream.session.blobs import digest_of, is_digest
from midstream.store.contract import (
    OF_SESSIONS,
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
from midstream.store.guard.append_reads import CheckedPage, check_behind, fold_link, link_at, read_checked
from midstream.store.guard.chain import NO_LINK, ChainKeys, Head, links_of
from midstream.store.guard.entry_seals import EntrySeals
from midstream.store.guard.inbox_seals import InboxSeals
from midstream.store.guard.store_key import FileKeySource
from midstream.store.guard.store_marker import refuse_encrypted, refuse_marked

HEADS_MAX = 10_000
"""Sessions whose checked records are noted in memory; beyond it, the oldest is dropped."""

_log = logging.getLogger(__name__)


class CheckedRange(Struct, frozen=True, gc=False):
    """The records of a journal after a position, up to its head, that one process checked or wrote."""

    after: int
    head: Head


class KeySource(Protocol):
    """Finds the keys of a store."""

    async def load(self, store: Store) -> ChainKeys:
        """Return the keys of an open store; create them if it has none.

        Raises:
            MidstreamError: They are unavailable, or are not for this store.
        """


class ReaderKeySource(Protocol):
    """Finds the keys of a store that is only read."""

    async def find(self, reader: StoreReader) -> ChainKeys:
        """Return the keys, or `ChainKeys` without a key if the store has none."""


class GuardedReader(StoreReader):
    """The reading half of a guarded store.

    Args:
        source: The source of the keys, which are loaded at the first read.
    """

    def __init__(
        self, reader: StoreReader, source: ReaderKeySource | None, *, world: World = World()
    ) -> None:
        self._reader = reader
        self._source = source
        self._world = world
        self._keys: ChainKeys | None = None
        self._entries: EntrySeals | None = None
        self._checked: dict[str, CheckedRange] = {}
        """The records of each journal that were checked or written here."""

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        """See `StoreReader.read`.

        Raises:
            EventsLostError: Records were removed.
            StoreDamagedError: Another program changed, moved or inserted a record.
        """
        page: Sequence[StoredRecord] = await self._reader.read(session, after=after, limit=limit)
        if page and not self._is_known(session, after, page[-1]):
            page = await self._check(session, after, limit, page)
        return [StoredRecord(stored.position, stored.epoch, stored.body) for stored in page]

    def _is_known(self, session: str, after: int, last: StoredRecord) -> bool:
        known = self._checked.get(session)
        return (
            known is not None
            and known.after <= after
            and last.position <= known.head.position
            and last.epoch <= known.head.epoch
        )

    async def _check(
        self, session: str, after: int, limit: int, page: Sequence[StoredRecord]
    ) -> Sequence[StoredRecord]:
        """Check a page, and return it, or the whole appends at its beginning."""
        keys, head = await self._load_keys(), self._head_of(session)
        checked: CheckedPage | None = None
        if head is not None and head.position == after:
            try:
                checked = check_behind(keys, session, head, page)
            except StoreDamagedError:
                self._checked.pop(session, None)  # the session may have been deleted, and begun again
        if checked is None:
            try:
                checked = await read_checked(self._reader, keys, session, after=after, limit=limit)
            except StoreDamagedError as error:
                _log.error("a journal is refused: %s", error.message, extra={"session": session})
                raise
        if checked is None:
            return ()
        self._note_checked(session, after, checked.head)
        return checked.records

    async def _load_keys(self) -> ChainKeys:
        if self._keys is None:
            if self._source is None:
                raise UsageError("the store is not open: call `await store.open()` first")
            self._keys = await self._source.find(self._reader)
        return self._keys

    async def _load_seals(self) -> EntrySeals:
        if self._entries is None:
            self._entries = EntrySeals(await self._load_keys(), self._world)
        return self._entries

    def _head_of(self, session: str) -> Head | None:
        known = self._checked.get(session)
        return None if known is None else known.head

    def _note_checked(self, session: str, after: int, head: Head) -> None:
        """Note that the records after a position, up to a head, were checked or written.

        Of two ranges with a gap between them, the later one is kept: the next append follows it.
        """
        known = self._checked.get(session)
        if known is not None:
            if head.position < known.after:
                return
            is_later = head.position >= known.head.position or head.epoch > known.head.epoch
            if after <= known.head.position:
                after = min(after, known.after)
            head = head if is_later else known.head
        self._checked[session] = CheckedRange(after, head)
        if len(self._checked) > HEADS_MAX:
            del self._checked[next(iter(self._checked))]

    async def blob(self, session: str, digest: str) -> bytes | None:
        """See `StoreReader.blob`."""
        return await self._reader.blob(session, digest)

    @override
    async def blob_digests(self, session: str) -> Sequence[str]:
        return await self._reader.blob_digests(session)

    @override
    async def kv_namespaces(self) -> Sequence[str]:
        return await self._reader.kv_namespaces()

    @override
    async def find(self, session: str) -> SessionInfo | None:
        return await self._reader.find(session)

    @override
    def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        return self._reader.list(live=live, of=of, after=after, limit=limit)

    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        """See `KeyValueReader.kv_get`.

        Raises:
            EntryDamagedError: Another program wrote, changed or restored it.
        """
        seals = await self._load_seals()
        since = seals.spent.count
        found = await self._reader.kv_get(namespace, key)
        if found is None:
            seals.check_nothing(namespace, key)
            return None
        try:
            return seals.open(namespace, found, since=since)
        except StoreDamagedError as error:
            raise EntryDamagedError(error.message, version=found.version) from error

    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        """See `KeyValueReader.kv_list`. An entry of another program is omitted, and logged."""
        seals = await self._load_seals()
        since = seals.spent.count
        entries: list[KeyValueEntry] = []
        for found in await self._reader.kv_list(namespace):
            try:
                entries.append(seals.open(namespace, found, since=since))
            except StoreDamagedError as error:
                _log.error("an entry is omitted: %s", error.message)
        return entries


class GuardedStore(GuardedReader, Store):
    """A store in front of another one, with the same abilities: see the module's docstring.

    Args:
        is_plain: Whether the content is stored as it is. The digests of large results are then checked, and no session
            is claimed after another process has marked the store as encrypted.
    """

    def __init__(self, store: Store, keys: KeySource, *, is_plain: bool, world: World) -> None:
        super().__init__(store, None, world=world)
        self._store = store
        self._key_source = keys
        self._is_plain = is_plain
        self._inbox: InboxSeals | None = None

    @property
    def node(self) -> str:  # type: ignore[override]  # that of the store behind it
        """See `Store.node`."""
        return self._store.node

    @property
    def refuses_encrypted(self) -> bool:
        """See `Store.refuses_encrypted`."""
        return True

    @property
    def chain_keys(self) -> ChainKeys:
        """The keys of the open store."""
        if self._keys is None:
            raise UsageError("the store is not open: call `await store.open()` first")
        return self._keys

    @override
    async def open(self) -> None:
        await self._store.open()
        if self._keys is not None:
            return
        try:
            keys = await self._key_source.load(self._store)
        except BaseException:  # also a cancellation
            await self._store.close()
            raise
        self._keys = keys
        self._inbox = InboxSeals(keys, self._world)

    @override
    async def close(self) -> None:
        self._keys = self._inbox = self._entries = None
        self._checked.clear()
        await self._store.close()

    @override
    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        self._checked.pop(session, None)  # other nodes may have appended
        if self._is_plain:
            await refuse_marked(self._store)
        return await self._store.claim(session, at=at, is_free=is_free)

    @override
    async def release(self, session: str, *, epoch: int) -> None:
        await self._store.release(session, epoch=epoch)

    async def append(self, session: str, batch: Batch) -> int:
        """See `Store.append`.

        Raises:
            UsageError: The batch has links of a store in front of this one. Nothing was written.
        """
        before = self._known_link(session, batch.expected)
        if before is None:
            before = await self._read_link(session, batch.expected)
        linked, head = self._link(session, batch, before)
        self._note_checked(
            session, batch.expected, head
        )  # now: the next append may be called before this one returns
        try:
            return await self._store.append(session, linked)
        except BaseException:  # a cancelled append may have happened or not
            self._checked.pop(session, None)
            raise

    @property
    @override
    def immediate(self) -> Immediate | None:
        return None if self._store.immediate is None else self

    @property
    def is_ready(self) -> bool:
        """See `Immediate.is_ready`: an ability of the inner store."""
        behind = self._store.immediate
        return behind is not None and behind.is_ready

    def append_now(self, session: str, batch: Batch) -> int | None:
        """See `Immediate.append_now`."""
        behind, head = self._store.immediate, self._head_of(session)
        if behind is None or head is None or head.position != batch.expected:
            return None
        linked, new_head = self._link(session, batch, head.link)
        end = behind.append_now(session, linked)
        if end is not None:
            self._note_checked(session, batch.expected, new_head)
        return end

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
    @override
    def transactional(self) -> Transactional | None:
        return None if self._store.transactional is None else self

    async def append_within(
        self, session: str, work: Callable[[Attempt], Batch], *, expected: int, epoch: int
    ) -> Batch:
        """See `Transactional.append_within`."""
        behind = self._store.transactional
        assert behind is not None, "only if the inner store can"
        before = self._known_link(session, expected)
        if before is None:
            before = await self._read_link(session, expected)
        done: list[tuple[Batch, Head]] = []

        def linking(attempt: Attempt) -> Batch:
            batch = work(attempt)
            linked, head = self._link(session, batch, before)
            done[:] = [(batch, head)]
            return linked

        known = self._checked.pop(session, None)
        await behind.append_within(session, linking, expected=expected, epoch=epoch)
        [(batch, head)] = done
        if known is not None:
            self._checked[session] = known
        self._note_checked(session, expected, head)
        return batch

    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        """See `Store.prune`. This store makes the link."""
        if link is not None:
            raise UsageError("a journal has one chain: guard it once")
        folded = await fold_link(
            self._reader, self.chain_keys, session, position=position, epoch=epoch, body=body
        )
        if folded is None:
            return False
        return await self._store.prune(session, body, position=position, epoch=epoch, link=folded)

    @override
    async def delete(self, session: str) -> bool:
        self._checked.pop(session, None)
        is_deleted = await self._store.delete(session)
        (await self._load_seals()).spent.spend_session(OF_SESSIONS, session)
        return is_deleted

    async def blob(self, session: str, digest: str) -> bytes | None:
        """See `StoreReader.blob`.

        Raises:
            StoreDamagedError: Another program changed it.
        """
        found = await self._store.blob(session, digest)
        is_checked = self._is_plain and found is not None and is_digest(digest)
        if is_checked and found is not None and not hmac.compare_digest(digest_of(found), digest):
            raise StoreDamagedError(f"the large result {digest[:12]} of session {session!r} was changed")
        return found

    async def watch(self, followed: Mapping[str, int]) -> News:
        """See `Store.watch`. A command that no node of this store sealed is removed, and omitted."""
        news = await self._store.watch(followed)
        kept: list[ForwardedCommand] = []
        for forwarded in news.forwarded_commands:
            try:
                body = self._seals.open_command(forwarded)
            except StoreDamagedError as error:
                _log.error(
                    "a forwarded command was refused: %s", error.message, extra={"session": forwarded.session}
                )
                await self._store.answer(forwarded.number, b"")
            else:
                kept.append(replace(forwarded, body=body))
        return replace(news, forwarded_commands=tuple(kept))

    @override
    async def is_held_elsewhere(self, session: str) -> bool:
        return await self._store.is_held_elsewhere(session)

    @override
    async def forward(self, session: str, body: bytes) -> bytes:
        sealed, nonce = self._seals.seal_command(session, self._store.node, body)
        return self._seals.open_answer(nonce, await self._store.forward(session, sealed))

    @override
    async def answer(self, forwarded: int, body: bytes) -> None:
        await self._store.answer(forwarded, self._seals.seal_answer(forwarded, body))

    @override
    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        seals = await self._load_seals()
        sealed = seals.seal(namespace, key, body)
        version = await self._store.kv_put(namespace, key, sealed, expected=expected, at=at)
        seals.spent.replace(namespace, key, expected=expected, version=version, body=sealed)
        return version

    @override
    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        is_removed = await self._store.kv_delete(namespace, key, expected=expected)
        if is_removed:
            (await self._load_seals()).spent.spend(namespace, key, version=expected)
        return is_removed

    @property
    def _seals(self) -> InboxSeals:
        if self._inbox is None:
            raise UsageError("the store is not open: call `await store.open()` first")
        return self._inbox

    def _known_link(self, session: str, expected: int) -> bytes | None:
        """Return the link after a position if it is in memory; else None."""
        if expected == 0:
            return NO_LINK
        head = self._head_of(session)
        return head.link if head is not None and head.position == expected else None

    async def _read_link(self, session: str, expected: int) -> bytes:
        return await link_at(self._reader, session, expected) or NO_LINK

    def _link(self, session: str, batch: Batch, before: bytes) -> tuple[Batch, Head]:
        if batch.links:
            raise UsageError("a journal has one chain: guard it once")
        links = links_of(self.chain_keys.newest, before, session, batch)
        return replace(batch, links=links), Head(batch.end, batch.epoch, links[-1] if links else before)


class _PlainKeySource:
    """The key file of a store that must not be encrypted."""

    def __init__(self, keys: FileKeySource) -> None:
        self._keys = keys

    async def load(self, store: Store) -> ChainKeys:
        await refuse_encrypted(store)
        return await self._keys.load(store)


def guard_store(store: Store, *, world: World = World()) -> Store:
    """Return a store that detects writes of other programs into it.

    An already wrapped store, and one that only this process can write to, is returned as it is.
    """
    key_file = store.key_file
    if key_file is None:
        return store
    source = _PlainKeySource(FileKeySource(key_file, world))
    return GuardedStore(store, source, is_plain=True, world=world)


async def open_guarded(store: Store) -> None:
    """Open a store that `guard_store` returned. Also one without a guard is refused if it is encrypted.

    Raises:
        KeyMissingError: The store is encrypted, and was given without its keys. Nothing was written.
    """
    await store.open()
    if store.refuses_encrypted:
        return
    try:
        await refuse_encrypted(store)
    except BaseException:  # also a cancellation
        await store.close()
        raise


async def claim_guarded(store: Store, session: str, *, at: float, is_free: bool | None = None) -> int:
    """Claim a session of a store that `open_guarded` opened; see `Store.claim`.

    Another process may have marked the store as encrypted since.

    Raises:
        KeyMissingError: It has, and the store was given without its keys. Nothing was written.
    """
    if not store.refuses_encrypted:
        await refuse_marked(store)
    return await store.claim(session, at=at, is_free=is_free)
