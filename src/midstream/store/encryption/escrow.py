"""Sessions that only their clients can open: each has a root key, stored only wrapped under secrets of clients.

    client's secret ─┐
    server's share ──┼─ HKDF ─▶ wraps the root key ─▶ wraps the data keys of epochs (`encrypt_store`) ─▶ records, blobs
    session ─────────┘

The secret is never stored. The server's share is drawn for each wrap and stored under the operator's keys. So neither
the store nor a leaked secret opens a session alone. A key-value entry, the *row*, has the wraps of one session: the
client's own, and those of viewers. A change of the secret replaces one wrap; deletion of the session deletes the row.

A root key is in memory from `open` to `lock`. A refusal has the same text and takes the same work, whether the session
exists or not.

Needs the extra `midstream[crypto]`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from midstream.environment import World
from midstream.errors import (
    EntryMovedError,
    JournalMovedError,
    LeaseHeldError,
    LeaseLostError,
    LimitReachedError,
    SessionLockedError,
    StoreDamagedError,
    UnavailableError,
    UsageError,
    WrongSecretError,
)
from midstream.number_checks import require_seconds
from midstream.retries import REPLACE_ATTEMPTS_MAX
from midstream.session.child_names import root_of
from midstream.store.contract import ESCROW, Escrow, OpenedSession, Store
from midstream.store.encryption import ciphers
from midstream.store.encryption.ciphers import OneKey, OperatorKeys
from midstream.store.encryption.encrypted_store import EncryptedStore, SessionKeys

SECRET_CHARS_MIN = 43
"""Characters of a client's secret: 32 random bytes, base64url without padding."""
VIEWER = "viewer"
"""Prefix of viewers' secrets: `viewer-` and 128 random bits."""
VIEWERS_MAX = 100
"""Valid viewers' secrets of one session."""
BEGINNING_S = 3600.0
"""Seconds after which a row without a session is not of a session that is just beginning."""
NO_SESSION = ""
"""Name of a row without a session. Secrets for unknown sessions are tried on it, so that they take as long. It also
shows whether the operator's keys are those of this store."""


class _Wrap(Struct, frozen=True):
    """The root key wrapped under one secret: the server's share, the commitment, the wrapped key."""

    share: bytes
    check: bytes
    root: bytes


class _Viewer(Struct, frozen=True):
    """A wrap for a viewer; `id` is a digest of its secret."""

    id: bytes
    expires_at: float
    wrap: _Wrap


class _Row(Struct, frozen=True):
    """All wraps of one session."""

    client: _Wrap
    viewers: tuple[_Viewer, ...] = ()


class _FoundRow(Struct, frozen=True):
    """A row as it was read; version 0 if there is none."""

    version: int
    row: _Row | None


class _Holder(Struct, frozen=True):
    """Holder of the secret of a wrap: the client, or a viewer until some time."""

    session: str
    viewer: bytes = b""
    expires_at: float = 0.0

    @property
    def place(self) -> bytes:
        """Associated data of the wrap."""
        kind = f"{VIEWER} {self.expires_at!r}" if self.viewer else "client"
        return f"midstream 1 root {kind} {self.session}".encode()

    @property
    def place_of_share(self) -> bytes:
        """Associated data of the server's share."""
        return f"midstream 1 share {self.session}".encode()


class _Root:
    """The root key of a session that is open in this process."""

    def __init__(self, key: bytes, world: World, unwritten: _Row | None) -> None:
        self.key = key
        self.keys = OneKey(key, world)
        self.unwritten = unwritten
        """The row, if it must be written before the session's first record."""
        self.is_client = False
        """Whether the client's own secret was used since the session was opened."""

    @property
    def stream_digest(self) -> str:
        return ciphers.digest_from(self.key, b"midstream 1 streams")


class ClientKeys(SessionKeys, Escrow):
    """The keys of an escrowed store: see `contract.Escrow` and `encrypted_store.SessionKeys`."""

    def __init__(self, store: Store, house: OperatorKeys, *, world: World, is_mixed: bool) -> None:
        self.house = house
        self.on_locked: Callable[[str], None] = lambda _session: None
        """Called with a session whose root key was deleted from memory."""
        self._store = store
        self._world = world
        self._is_mixed = is_mixed
        self._roots: dict[str, _Root] = {}
        self._no_session: _Row | None = None

    # --- opening

    @override
    async def open(
        self, session: str, secret: str, old_secret: str = "", *, begins: bool = False
    ) -> OpenedSession | None:
        place = root_of(session)
        begins = begins and not _is_viewer_token(secret)  # it opens an existing session, or nothing
        for tries in range(REPLACE_ATTEMPTS_MAX):
            found = await self._store.find(place)
            has_records = found is not None and found.end > 0
            kept = await self._read_row(place)  # after the records: their row was written before them
            if has_records and kept.row is None and self._is_mixed:
                return None
            if begins or old_secret:
                _require_form(secret)
            root = self._roots.get(place)
            if root is not None and root.unwritten is None and kept.row is None:
                if not tries:
                    continue  # the row was written at this moment
                self.lock(place)  # the session was deleted by another process
            row = self._row_here(place, kept, has_records=has_records)
            opened = await self._try_secret(place, row, secret, has_records=has_records)
            if old_secret:
                before = await self._try_secret(place, row, old_secret, has_records=has_records)
                if opened is None and before is not None and before.is_client:
                    if not await self._rewrap(place, kept, secret):
                        continue  # another writer changed the row at this moment
                    opened = before
            if opened is None and begins and not has_records and place not in self._roots:
                opened = await self._begin_session(place, secret)
                if opened is None:
                    continue  # another connection began the session at this moment, perhaps of the same client
            if opened is None:
                raise _refusal()
            return opened
        raise _moving(session)

    @override
    async def holds(self, session: str) -> bool:
        return not self._is_mixed or (await self._read_row(root_of(session))).row is not None

    @override
    async def share(self, session: str, *, for_s: float) -> str:
        require_seconds("for_s", for_s, is_positive=True)
        place = root_of(session)
        root = self._roots.get(place)
        word = self._world.new_id(VIEWER)
        for _ in range(REPLACE_ATTEMPTS_MAX):
            now = self._world.now()
            kept = await self._read_row(place)
            if root is not None and root.unwritten is not None:
                raise _refusal()  # it has no record yet
            if root is None or not root.is_client or kept.row is None:
                raise _locked_error(session)
            good = tuple(each for each in kept.row.viewers if each.expires_at > now)
            if len(good) >= VIEWERS_MAX:
                raise LimitReachedError(f"{VIEWERS_MAX} viewers are permitted for a session at a time")
            holder = _Holder(place, _id_of(word), now + for_s)
            wrap = await self._wrap_key(root.key, word, holder)
            viewers = (*good, _Viewer(holder.viewer, holder.expires_at, wrap))
            if await self._keep(place, replace(kept.row, viewers=viewers), kept.version):
                return word
        raise _moving(session)

    @override
    async def revoke_viewer_tokens(self, session: str) -> None:
        place = root_of(session)
        for _ in range(REPLACE_ATTEMPTS_MAX):
            kept = await self._read_row(place)
            if kept.row is None or not kept.row.viewers:
                return
            if await self._keep(place, replace(kept.row, viewers=()), kept.version):
                return
        raise _moving(session)

    @override
    async def drop_deleted_keys(self) -> None:
        there = {info.session async for info in self._store.list()}
        before = self._world.now() - BEGINNING_S
        for kept in await self._store.kv_list(ESCROW):
            if kept.key in there or kept.key in self._roots or kept.key == NO_SESSION or kept.at > before:
                continue
            if await self._store.find(kept.key) is None:
                await self._store.kv_delete(ESCROW, kept.key, expected=kept.version)

    @override
    async def is_good(self, opened: OpenedSession) -> bool:
        row = None if opened.is_client else (await self._read_row(opened.session)).row
        viewers = row.viewers if row is not None else ()
        now = self._world.now()
        return opened.is_client or any(each.id == opened.viewer and now < each.expires_at for each in viewers)

    @override
    def lock(self, session: str) -> None:
        place = root_of(session)
        self._roots.pop(place, None)
        self.on_locked(place)

    def _row_here(self, place: str, kept: _FoundRow, *, has_records: bool) -> _Row | None:
        """Return the current row: before the first record, the one that will be written with it."""
        root = self._roots.get(place)
        if root is None or root.unwritten is None or has_records:  # perhaps another process was faster
            return kept.row
        return root.unwritten

    async def _try_secret(
        self, place: str, row: _Row | None, secret: str, *, has_records: bool
    ) -> OpenedSession | None:
        """Try a secret, with the same work for any secret."""
        wrap, holder = self._wrap_for(place, row, secret)
        share = await self.house.unwrap(wrap.share, context=holder.place_of_share)
        wrapping, check = ciphers.derive_key(secret, share, holder.place)
        if not hmac.compare_digest(check, wrap.check):
            return None
        key = await OneKey(wrapping, self._world).unwrap(wrap.root, context=holder.place)
        root = self._roots.get(place)
        if (
            root is None or root.key != key
        ):  # another key: the session was deleted, and begun again by another process
            self.lock(place)
            root = self._roots[place] = _Root(key, self._world, None if has_records else row)
        elif has_records:
            root.unwritten = None  # another process wrote this row
        root.is_client = root.is_client or not holder.viewer
        return OpenedSession(place, not holder.viewer, root.stream_digest, holder.viewer, holder.expires_at)

    def _wrap_for(self, place: str, row: _Row | None, secret: str) -> tuple[_Wrap, _Holder]:
        """Return the wrap for a secret; if there is none, one that no secret opens."""
        assert self._no_session is not None, "the store is opened first"
        found = self._no_session.client, _Holder(NO_SESSION)
        if row is not None and not secret.startswith(f"{VIEWER}-"):
            found = row.client, _Holder(place)
        elif row is not None:
            shown, now = _id_of(secret), self._world.now()
            for each in row.viewers:
                if hmac.compare_digest(each.id, shown) and now < each.expires_at:
                    found = each.wrap, _Holder(place, each.id, each.expires_at)
        return found

    async def _begin_session(self, place: str, secret: str) -> OpenedSession | None:
        """Begin an unused session with this secret; None if another caller was faster."""
        key = ciphers.fresh_key(self._world)
        row = _Row(await self._wrap_key(key, secret, _Holder(place)))
        if place in self._roots:
            return None
        root = self._roots[place] = _Root(key, self._world, row)
        root.is_client = True
        return OpenedSession(place, is_client=True, stream_digest=root.stream_digest)

    async def _rewrap(self, place: str, kept: _FoundRow, secret: str) -> bool:
        """Replace the old secret by a new one; return False if the row was changed meanwhile."""
        root = self._roots.get(place)
        if root is None:
            return False
        wrap = await self._wrap_key(root.key, secret, _Holder(place))
        if root.unwritten is not None:
            root.unwritten = replace(root.unwritten, client=wrap)
            return True
        assert kept.row is not None, "it was opened by its row"
        return await self._keep(place, replace(kept.row, client=wrap), kept.version)

    async def _wrap_key(self, key: bytes, secret: str, holder: _Holder) -> _Wrap:
        share = ciphers.fresh_key(self._world)
        wrapping, check = ciphers.derive_key(secret, share, holder.place)
        root = await OneKey(wrapping, self._world).wrap(key, context=holder.place)
        return _Wrap(await self.house.wrap(share, context=holder.place_of_share), check, root)

    # --- the rows

    async def _read_row(self, place: str) -> _FoundRow:
        found = await self._store.kv_get(ESCROW, place)
        return (
            _FoundRow(0, None) if found is None else _FoundRow(found.version, _decode_row(found.body, place))
        )

    async def _keep(self, place: str, row: _Row, version: int) -> bool:
        """Write a row; return False if its version has changed."""
        try:
            await self._store.kv_put(
                ESCROW, place, msgspec.json.encode(row), expected=version, at=self._world.now()
            )
        except EntryMovedError:
            return False
        return True

    # --- keys of sessions

    @override
    async def prepare(self, store: Store) -> None:
        self._store = store  # the guarded store, from here on
        kept = await self._read_row(NO_SESSION)
        if kept.row is None:
            key, secret = ciphers.fresh_key(self._world), self._world.new_secret()
            await self._keep(NO_SESSION, _Row(await self._wrap_key(key, secret, _Holder(NO_SESSION))), 0)
            kept = await self._read_row(NO_SESSION)
        assert kept.row is not None, "it was just written, here or by another process"
        await self.house.unwrap(kept.row.client.share, context=_Holder(NO_SESSION).place_of_share)
        self._no_session = kept.row

    @override
    def close(self) -> None:
        self._roots.clear()

    @override
    def require_node(self, session: str) -> None:
        root = self._roots.get(root_of(session))
        if root is not None and not root.is_client:
            raise LeaseHeldError(f"session {session!r} waits for its client", session=session)

    @override
    async def reading(self, session: str) -> OperatorKeys:
        root = self._roots.get(root_of(session))
        if root is None:
            return await self._house_for(session)
        if root.unwritten is not None:  # there are records, and not under this key: `open` replaces it
            raise _moving(session)
        return root.keys

    async def writing(self, session: str, epoch: int) -> OperatorKeys:
        """See `SessionKeys.writing`. The node of a session writes its row before the first record."""
        place = root_of(session)
        root = self._roots.get(place)
        if root is None:
            return await self._house_for(session)
        if root.unwritten is not None:
            kept = await self._read_row(place)
            found = await self._store.find(place)  # after the row: its writer was the node then
            if found is None or found.epoch != epoch:
                raise LeaseLostError(f"session {session!r} has another epoch than {epoch}")
            if found.end > 0:
                raise JournalMovedError(f"session {session!r} was created by another client")
            is_written = await self._keep(place, root.unwritten, kept.version)
            if not is_written and root.unwritten is not None:  # nor by another append of this process
                raise LeaseLostError(f"session {session!r} was taken over")
            root.unwritten = None
        return root.keys

    @override
    async def has_title(self, session: str) -> bool:
        return root_of(session) not in self._roots

    def drop(self, session: str) -> None:
        """See `SessionKeys.drop`. The row was deleted with the session (`OF_SESSIONS`)."""
        if session == root_of(session):
            self.lock(session)

    async def _house_for(self, session: str) -> OperatorKeys:
        """Return the operator's keys, for a session that is older than the escrow."""
        if self._is_mixed and (await self._read_row(root_of(session))).row is None:
            return self.house
        raise _locked_error(session)


class EscrowedStore(EncryptedStore):
    """An encrypted store in which clients hold the keys of their sessions: see `escrow_store`."""

    keys: ClientKeys

    def __init__(self, store: Store, keys: ClientKeys, *, world: World, is_mixed: bool = False) -> None:
        super().__init__(store, keys, world=world, is_mixed=is_mixed)
        keys.on_locked = self.lock

    @property
    @override
    def escrow(self) -> ClientKeys:
        return self.keys


def escrow_store(
    store: Store, house: OperatorKeys, *, is_mixed: bool = False, world: World = World()
) -> EscrowedStore:
    """Return a store in which a session can be read only while its client or a viewer has opened it.

    Args:
        store: The inner store of the encrypted data.
        house: The operator's keys, needed with each secret. They alone encrypt data without a session (pool records).
        is_mixed: Also serve older sessions: unencrypted, or under these keys. Otherwise they are refused, because an
            attacker might have written them.
        world: Source of keys.
    """
    keys = ClientKeys(store, house, world=world, is_mixed=is_mixed)
    return EscrowedStore(store, keys, world=world, is_mixed=is_mixed)


def _id_of(word: str) -> bytes:
    return hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _decode_row(body: bytes, place: str) -> _Row:
    try:
        return msgspec.json.decode(body, type=_Row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreDamagedError(f"the wrapped keys of session {place!r} cannot be read") from error


def _is_viewer_token(secret: str) -> bool:
    return secret.startswith(f"{VIEWER}-")


def _require_form(secret: str) -> None:
    if len(secret) < SECRET_CHARS_MIN or _is_viewer_token(secret):
        raise UsageError("the secret of an encrypted session is 32 random bytes, base64url without padding")


def _refusal() -> WrongSecretError:
    return WrongSecretError("this secret opens no such session")


def _locked_error(session: str) -> SessionLockedError:
    return SessionLockedError(
        f"session {session!r} is encrypted under its client's secret, and no client with that secret is connected"
    )


def _moving(session: str) -> UnavailableError:
    return UnavailableError(
        f"session {session!r} is being created or shared by another process; try again", retry_after_s=0.1
    )
