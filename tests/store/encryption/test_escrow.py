"""An escrowed store is a store while its clients are connected, and reveals nothing without them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import (
    KeyMissingError,
    LeaseHeldError,
    LeaseLostError,
    LimitReachedError,
    MidstreamError,
    SessionLockedError,
    StoreDamagedError,
    UnavailableError,
    UsageError,
    WrongSecretError,
)
from midstream.session.blobs import Blob
from midstream.session.child_names import PART_MARK
from midstream.session.records import Sync
from midstream.store.contract import (
    Attempt,
    Batch,
    KeyValueEntry,
    OpenedSession,
    SessionInfo,
    SessionListing,
    Store,
    StoredRecord,
)
from midstream.store.encryption import ciphers as ciphers_module
from midstream.store.encryption import escrow as escrow_module
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.encryption.escrow import EscrowedStore, escrow_store
from midstream.store.memory import Memory, MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec
from tests.store.keys import keys_in

SECRET = "s" * 43
OTHER = "o" * 43
CANARY = "canary-7f3a"


async def _opened_store(
    memory: Memory, folder: Path, *, world: World = World(), is_mixed: bool = False
) -> EscrowedStore:
    store = escrow_store(MemoryStore(memory), keys_in(folder), world=world, is_mixed=is_mixed)
    await store.open()
    return store


async def _begin(
    store: EscrowedStore, session: str = "s", *, secret: str = SECRET, words: str = CANARY
) -> int:
    """Append content to a new session; return the epoch."""
    await store.escrow.open(session, secret, begins=True)
    epoch = await store.claim(session, at=1.0)
    mark = SessionListing(is_live=True, at=1.0, title=words, turns=1, status="running")
    blobs = [Blob("d" * 64, words.encode())]
    await store.append(
        session, Batch([words.encode()] * 3, expected=0, epoch=epoch, sync=Sync.FULL, mark=mark, blobs=blobs)
    )
    return epoch


async def _bodies(store: EscrowedStore, session: str = "s") -> list[bytes]:
    return [each.body for each in await store.read(session, after=0, limit=100)]


def test_an_escrowed_store_has_the_abilities_of_the_store_behind_it(folder: Path) -> None:
    keys = keys_in(folder)
    one, other = escrow_store(SQLiteStore(folder / "x.db"), keys), escrow_store(MemoryStore(), keys)
    assert (one.immediate, one.transactional, one.escrow) == (one, one, one.keys)
    assert (other.immediate, other.transactional, other.escrow) == (other, None, other.keys)


@spec("STREAM-84")
async def test_a_session_is_opened_only_by_its_secret(folder: Path) -> None:
    memory = Memory()
    store = await _opened_store(memory, folder)
    await _begin(store)
    assert await _bodies(store) == [CANARY.encode()] * 3
    store.escrow.lock("s")
    with pytest.raises(SessionLockedError, match="session 's' is encrypted under its client's secret"):
        await _bodies(store)
    with pytest.raises(SessionLockedError):
        await store.blob("s", "d" * 64)
    with pytest.raises(SessionLockedError):
        await store.prune("s", b"x", position=1, epoch=1)
    with pytest.raises(WrongSecretError):
        await store.escrow.open("s", OTHER)
    with pytest.raises(SessionLockedError):
        await _bodies(store)
    opened = await store.escrow.open("s", SECRET)
    assert opened is not None
    assert (opened.session, opened.is_client) == ("s", True)
    assert await _bodies(store) == [CANARY.encode()] * 3
    assert await store.blob("s", "d" * 64) == CANARY.encode()


def _holding(folder: Path, words: Sequence[str]) -> list[str]:
    """Return the files that contain any of these texts."""
    files = [file for file in folder.iterdir() if file.is_file()]
    return [file.name for file in files if any(word.encode() in file.read_bytes() for word in words)]


async def test_the_file_contains_no_content_and_no_secret(folder: Path) -> None:
    path = folder / "x.db"
    store = escrow_store(SQLiteStore(path), keys_in(folder))
    await store.open()
    epoch = await _begin(store)
    word = await store.escrow.share("s", for_s=100.0)

    def work(attempt: Attempt) -> Batch:
        return Batch([CANARY.encode()], 3, epoch, Sync.FULL)

    await store.append_within("s", work, expected=3, epoch=epoch)
    found = await store.find("s")
    assert found is not None
    assert found.mark.title == ""  # Shown to callers that list sessions.
    secrets = (CANARY, SECRET, word)
    assert _holding(folder, secrets) == []
    await store.close()
    assert _holding(folder, secrets) == []


async def test_parts_of_a_session_are_opened_with_it(folder: Path) -> None:
    memory = Memory()
    store = await _opened_store(memory, folder)
    await _begin(store)
    part = f"s{PART_MARK}child"
    epoch = await store.claim(part, at=1.0)
    await store.append(part, Batch([b"part"], expected=0, epoch=epoch, sync=Sync.FULL))
    other = await _opened_store(memory, folder)
    with pytest.raises(SessionLockedError):
        await _bodies(other, part)
    await other.escrow.open(part, SECRET)
    assert await _bodies(other, part) == [b"part"]
    assert await _bodies(other) == [CANARY.encode()] * 3
    other.escrow.lock(part)
    with pytest.raises(SessionLockedError):
        await _bodies(other, part)


@spec("STREAM-85")
async def test_a_refusal_does_not_reveal_whether_the_session_exists(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await _opened_store(Memory(), folder)
    await _begin(store)
    store.escrow.lock("s")
    asked: list[str] = []
    compare, derived = hmac.compare_digest, ciphers_module.derive_key

    def compared(one: bytes, other: bytes) -> bool:
        asked.append("compare")
        return compare(one, other)

    class Counted(FileKeys):
        async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
            asked.append("unwrap")
            return await super().unwrap(wrapped, context=context)

    def counted(secret: str, share: bytes, place: bytes) -> tuple[bytes, bytes]:
        asked.append("derive")
        return derived(secret, share, place)

    monkeypatch.setattr(hmac, "compare_digest", compared)
    monkeypatch.setattr(ciphers_module, "derive_key", counted)
    store.escrow.house = Counted(folder / "keys")
    content: list[tuple[str, str, str, list[str]]] = []
    for session, secret in [("s", OTHER), ("none", OTHER), ("s", ""), ("none", ""), ("none", SECRET)]:
        asked.clear()
        with pytest.raises(WrongSecretError) as refused:
            await store.escrow.open(session, secret)
        error = refused.value
        content.append((error.code, error.message, str(error.retry_after_s), [*asked]))
    assert content == [content[0]] * len(content)
    assert content[0][3] == ["compare", "unwrap", "derive", "compare"]


async def test_an_invalid_viewer_token_is_refused_like_any_secret(folder: Path) -> None:
    store = await _opened_store(Memory(), folder)
    await _begin(store)
    messages = set()
    for session in ("s", "none"):
        for begins in (False, True):
            with pytest.raises(WrongSecretError) as refused:
                await store.escrow.open(session, "viewer-" + 32 * "0", begins=begins)
            messages.add(refused.value.message)
    assert len(messages) == 1


@pytest.mark.parametrize("secret", ["short", ""])
async def test_a_guessable_secret_cannot_begin_a_session(folder: Path, secret: str) -> None:
    store = await _opened_store(Memory(), folder)
    await _begin(store)
    for session in ("new", "s"):  # The refusal is the same, whether the session exists or not.
        with pytest.raises(UsageError, match="32 random bytes"):
            await store.escrow.open(session, secret, begins=True)


async def test_a_viewer_token_cannot_become_the_secret_of_a_session(folder: Path) -> None:
    store = await _opened_store(Memory(), folder)
    await _begin(store)
    with pytest.raises(UsageError, match="32 random bytes"):
        await store.escrow.open("s", "viewer-" + 40 * "0", SECRET)


# --- rows and keys

SEAL_BYTES = 40
"""Bytes before the JSON of a row: see `store.guard.entry_seals`."""


def _row(memory: Memory, session: str) -> Any:  # noqa: ANN401 - JSON of any form, to be spoilt
    return msgspec.json.decode(memory.values["escrow"][session].body[SEAL_BYTES:])


def _put(memory: Memory, session: str, row: object) -> None:
    kept = memory.values["escrow"][session]
    body = kept.body[:SEAL_BYTES] + msgspec.json.encode(row)
    memory.values["escrow"][session] = replace(kept, body=body)


async def _two_sessions(folder: Path) -> tuple[Memory, EscrowedStore]:
    memory = Memory()
    store = await _opened_store(memory, folder)
    await _begin(store, "s")
    await _begin(store, "t")
    for each in ("s", "t"):
        await store.escrow.share(each, for_s=1000.0)
        store.escrow.lock(each)
    return memory, store


def _swapped(memory: Memory) -> None:
    one, other = _row(memory, "s"), _row(memory, "t")
    _put(memory, "s", other)
    _put(memory, "t", one)


def _with_share_of_another(memory: Memory) -> None:
    one, other = _row(memory, "s"), _row(memory, "t")
    _put(memory, "s", {**one, "client": {**one["client"], "share": other["client"]["share"]}})


def _with_root_of_another(memory: Memory) -> None:
    one, other = _row(memory, "s"), _row(memory, "t")
    _put(memory, "s", {**one, "client": {**one["client"], "root": other["client"]["root"]}})


def _without_check(memory: Memory) -> None:
    row = _row(memory, "s")
    _put(memory, "s", {**row, "client": {**row["client"], "check": ""}})


def _viewer_as_client(memory: Memory) -> None:
    row = _row(memory, "s")
    _put(memory, "s", {**row, "client": row["viewers"][0]["wrap"]})


def _cut(memory: Memory) -> None:
    kept = memory.values["escrow"]["s"]
    memory.values["escrow"]["s"] = replace(kept, body=kept.body[:-9])


@spec("STREAM-86")
@pytest.mark.parametrize(
    "change",
    [_swapped, _with_share_of_another, _with_root_of_another, _without_check, _viewer_as_client, _cut],
)
async def test_moved_swapped_cut_or_inserted_wrapped_keys_are_detected(
    folder: Path, change: Callable[[Memory], None]
) -> None:
    memory, store = await _two_sessions(folder)
    change(memory)
    with pytest.raises(MidstreamError) as refused:
        await store.escrow.open("s", SECRET)
    assert isinstance(refused.value, WrongSecretError | StoreDamagedError)
    with pytest.raises(SessionLockedError):
        await _bodies(store)


@spec("STREAM-86")
@pytest.mark.parametrize(
    "what", ["moved", "swapped", "taken out", "shortened", "plain", "from another", "key"]
)
async def test_moved_swapped_cut_or_inserted_records_are_detected(folder: Path, what: str) -> None:
    memory, store = await _two_sessions(folder)
    rows, others = memory.sessions["s"].records, memory.sessions["t"].records
    match what:
        case "moved":
            rows[1] = replace(rows[1], body=rows[0].body)
        case "swapped":
            rows[0], rows[1] = replace(rows[0], body=rows[1].body), replace(rows[1], body=rows[0].body)
        case "taken out":
            del rows[1]
        case "shortened":
            rows[1] = replace(rows[1], body=rows[1].body[:-1])
        case "plain":
            rows[1] = replace(rows[1], body=b'{"type":"delta"}')
        case "from another":  # Of another session of the same client.
            rows[:] = others
        case _:
            one, other = memory.sessions["s"].blobs, memory.sessions["t"].blobs
            [mine] = [name for name in one if name.startswith("key-")]
            [theirs] = [name for name in other if name.startswith("key-")]
            one[mine] = other[theirs]
    await store.escrow.open("s", SECRET)
    with pytest.raises(StoreDamagedError):
        await _bodies(store)


async def test_without_the_operators_keys_no_secret_opens_a_session(folder: Path) -> None:
    memory, _ = await _two_sessions(folder)
    stranger = escrow_store(MemoryStore(memory), keys_in(folder, "others"))
    with pytest.raises(KeyMissingError):
        await stranger.open()  # Reported at once, and not to each client.


async def test_the_operators_keys_alone_open_nothing(folder: Path) -> None:
    memory, _ = await _two_sessions(folder)
    operator = encrypt_store(MemoryStore(memory), keys_in(folder))
    await operator.open()
    with pytest.raises(StoreDamagedError):
        await operator.read("s", after=0, limit=10)


async def test_each_session_has_its_own_keys(folder: Path) -> None:
    memory, store = await _two_sessions(folder)
    one, other = await store.escrow.open("s", SECRET), await store.escrow.open("t", SECRET)
    assert one is not None
    assert other is not None
    assert one.stream_digest != other.stream_digest
    assert _row(memory, "s")["client"] != _row(memory, "t")["client"]


# --- beginning


async def test_a_session_without_records_belongs_to_no_client(folder: Path) -> None:
    memory = Memory()
    store = await _opened_store(memory, folder)
    await store.escrow.open("s", SECRET, begins=True)
    assert set(memory.values["escrow"]) == {""}  # Nothing was written for it.
    with pytest.raises(WrongSecretError):
        await store.escrow.open("s", OTHER, begins=True)  # A client is about to write.
    await store.escrow.open("s", SECRET)
    store.escrow.lock("s")  # And left.
    await _begin(store, secret=OTHER)
    with pytest.raises(WrongSecretError):
        await store.escrow.open("s", SECRET, begins=True)


@spec("STREAM-87")
async def test_one_of_two_servers_begins_a_session(folder: Path) -> None:
    memory = Memory()
    one, other = await _opened_store(memory, folder), await _opened_store(memory, folder)
    await other.escrow.open("s", OTHER, begins=True)
    await _begin(one)
    with pytest.raises(LeaseHeldError):
        await other.claim("s", at=1.0)
    with pytest.raises(UnavailableError):  # It holds a key of another session: it must read again.
        await other.forward("s", b"command")
    with pytest.raises(WrongSecretError):
        await other.escrow.open("s", OTHER, begins=True)
    await other.escrow.open("s", SECRET, begins=True)  # A client that was at the other one before.
    assert await _bodies(other) == [CANARY.encode()] * 3


class YieldingStore(MemoryStore):
    """A store that lets other tasks run before and after each operation."""

    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        await asyncio.sleep(0)
        found = await super().kv_get(namespace, key)
        await asyncio.sleep(0)
        return found

    async def find(self, session: str) -> SessionInfo | None:
        await asyncio.sleep(0)
        found = await super().find(session)
        await asyncio.sleep(0)
        return found

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        await asyncio.sleep(0)
        version = await super().kv_put(namespace, key, body, expected=expected, at=at)
        await asyncio.sleep(0)
        return version


@spec("STREAM-87")
@pytest.mark.parametrize("pause", range(14))
async def test_a_client_that_begins_a_session_is_never_refused_by_a_concurrent_opening(
    folder: Path, pause: int
) -> None:
    memory = Memory()
    one, other = (
        escrow_store(YieldingStore(memory), keys_in(folder)),
        escrow_store(YieldingStore(memory), keys_in(folder)),
    )
    await one.open()
    await other.open()

    async def comes_again(store: EscrowedStore) -> OpenedSession | None:
        for _ in range(pause):
            await asyncio.sleep(0)
        return await store.escrow.open("s", SECRET, begins=True)

    content = await asyncio.gather(_begin(one), comes_again(one), comes_again(one), comes_again(other))
    assert content[1] == content[2]
    assert content[0] == 1
    assert await _bodies(one) == [CANARY.encode()] * 3
    assert await other.escrow.open("s", SECRET) == content[1]
    assert await _bodies(other) == [CANARY.encode()] * 3


async def test_a_session_deleted_at_another_server_can_begin_again(folder: Path) -> None:
    memory = Memory()
    one, other = await _opened_store(memory, folder), await _opened_store(memory, folder)
    epoch = await _begin(one)
    await other.escrow.open("s", SECRET)
    await one.release("s", epoch=epoch)
    await one.delete("s")
    with pytest.raises(WrongSecretError):
        await other.escrow.open("s", SECRET)
    await _begin(other, secret=OTHER, words="anew")
    assert await _bodies(other) == [b"anew"] * 3


async def test_an_overtaken_beginning_writes_nothing(folder: Path) -> None:
    memory = Memory()
    frozen, other = await _opened_store(memory, folder), await _opened_store(memory, folder)
    await frozen.escrow.open("s", OTHER, begins=True)
    epoch = await frozen.claim("s", at=1.0)
    await frozen.release("s", epoch=epoch)  # It was considered dead.
    await _begin(other)
    with pytest.raises(LeaseLostError):
        await frozen.append("s", Batch([b"late"], expected=0, epoch=epoch, sync=Sync.FULL))
    assert await _bodies(other) == [CANARY.encode()] * 3
    other.escrow.lock("s")
    await other.escrow.open("s", SECRET)


async def test_a_row_of_a_session_without_records_is_replaced(folder: Path) -> None:
    memory = Memory()
    store = await _opened_store(memory, folder)
    await store.escrow.open("s", SECRET, begins=True)
    epoch = await store.claim("s", at=1.0)
    await store.keys.writing("s", epoch)  # The process dies right here.
    assert set(memory.values["escrow"]) == {"", "s"}
    again = await _opened_store(memory, folder)
    with pytest.raises(WrongSecretError):
        await again.escrow.open("s", SECRET + "x")
    await store.close()
    await _begin(again, secret=OTHER)
    again.escrow.lock("s")
    await again.escrow.open("s", OTHER)
    with pytest.raises(WrongSecretError):
        await again.escrow.open("s", SECRET)


# --- change


class CrashingEntryStore(MemoryStore):
    """A store that dies before or after its next write of a key-value entry."""

    dies = ""

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        if self.dies == "before":
            raise ConnectionAbortedError
        version = await super().kv_put(namespace, key, body, expected=expected, at=at)
        if self.dies == "after":
            raise ConnectionAbortedError
        return version


@spec("STREAM-88")
@pytest.mark.parametrize("dies", ["before", "after", ""])
async def test_after_an_interrupted_change_one_of_both_secrets_opens(folder: Path, dies: str) -> None:
    memory = Memory()
    inner = CrashingEntryStore(memory)
    store = escrow_store(inner, keys_in(folder))
    await store.open()
    await _begin(store)
    inner.dies = dies
    try:
        await store.escrow.open("s", OTHER, SECRET)
    except ConnectionAbortedError:
        assert dies
    good = []
    for secret in (SECRET, OTHER):
        again = await _opened_store(memory, folder)
        try:
            await again.escrow.open("s", secret)
        except WrongSecretError:
            continue
        assert await _bodies(again) == [CANARY.encode()] * 3
        good.append(secret)
    assert good == [SECRET if dies == "before" else OTHER]
    last = await _opened_store(memory, folder)
    await last.escrow.open("s", OTHER, SECRET)  # A client that presents both is never locked out.
    assert await _bodies(last) == [CANARY.encode()] * 3


@spec("STREAM-88")
async def test_streams_are_the_same_under_the_new_secret(folder: Path) -> None:
    store = await _opened_store(Memory(), folder)
    await _begin(store)
    before = await store.escrow.open("s", SECRET)
    after = await store.escrow.open("s", OTHER, SECRET)
    assert before == after
    with pytest.raises(WrongSecretError):
        await store.escrow.open("s", SECRET)


async def test_a_secret_can_be_changed_before_the_first_record_too(folder: Path) -> None:
    store = await _opened_store(Memory(), folder)
    await store.escrow.open("s", SECRET, begins=True)
    await store.escrow.open("s", OTHER, SECRET)
    await _begin(store, secret=OTHER)
    store.escrow.lock("s")
    with pytest.raises(WrongSecretError):
        await store.escrow.open("s", SECRET)
    await store.escrow.open("s", OTHER)


async def test_two_concurrent_changes_leave_one_valid_secret(folder: Path) -> None:
    memory = Memory()
    one, other = await _opened_store(memory, folder), await _opened_store(memory, folder)
    await _begin(one)
    third = "t" * 43
    content = await asyncio.gather(
        one.escrow.open("s", OTHER, SECRET), other.escrow.open("s", third, SECRET), return_exceptions=True
    )
    [winner] = [
        secret
        for secret, each in zip((OTHER, third), content, strict=True)
        if isinstance(each, OpenedSession)
    ]
    last = await _opened_store(memory, folder)
    await last.escrow.open("s", winner)
    assert [type(each) for each in content if not isinstance(each, OpenedSession)] == [WrongSecretError]


async def test_a_viewer_cannot_change_the_secret(folder: Path) -> None:
    store = await _opened_store(Memory(), folder)
    await _begin(store)
    word = await store.escrow.share("s", for_s=100.0)
    with pytest.raises(WrongSecretError):
        await store.escrow.open("s", OTHER, word)
    await store.escrow.open("s", SECRET)


# --- viewers


@spec("STREAM-89")
async def test_a_viewer_token_opens_until_it_expires_and_for_reading_only(folder: Path) -> None:
    memory, world = Memory(), FakeWorld()
    store = await _opened_store(memory, folder, world=world)
    await _begin(store)
    word = await store.escrow.share("s", for_s=60.0)
    elsewhere = await _opened_store(memory, folder, world=world)
    opened = await elsewhere.escrow.open("s", word)
    assert opened is not None
    assert not opened.is_client
    assert opened.expires_at == world.now() + 60.0
    assert await _bodies(elsewhere) == [CANARY.encode()] * 3
    await store.close()
    with pytest.raises(LeaseHeldError, match="waits for its client"):
        await elsewhere.claim("s", at=1.0)  # A reader does not continue any work of the session.
    with pytest.raises(SessionLockedError):
        await elsewhere.escrow.share("s", for_s=60.0)
    assert await elsewhere.escrow.is_good(opened)
    await world.advance(60.0)
    assert not await elsewhere.escrow.is_good(opened)
    with pytest.raises(WrongSecretError):
        await elsewhere.escrow.open("s", word)
    await elsewhere.escrow.open("s", SECRET)
    assert await elsewhere.claim("s", at=1.0) == 2


@spec("STREAM-89")
async def test_the_expiry_of_a_viewer_token_cannot_be_changed_in_the_store(folder: Path) -> None:
    memory, world = Memory(), FakeWorld()
    store = await _opened_store(memory, folder, world=world)
    await _begin(store)
    word = await store.escrow.share("s", for_s=60.0)
    row = _row(memory, "s")
    _put(memory, "s", {**row, "viewers": [{**row["viewers"][0], "expires_at": 1e12}]})
    await world.advance(61.0)
    with pytest.raises(StoreDamagedError, match="changed by another program"):
        await store.escrow.open("s", word)


@spec("SEC-50")
async def test_a_revoked_viewer_cannot_be_restored(folder: Path) -> None:
    memory = Memory()
    store = await _opened_store(memory, folder)
    await _begin(store)
    word = await store.escrow.share("s", for_s=60.0)
    shared, viewers = memory.values["escrow"]["s"], _row(memory, "s")["viewers"]
    await store.escrow.revoke_viewer_tokens("s")
    withdrawn = memory.values["escrow"]["s"]
    memory.values["escrow"]["s"] = replace(withdrawn, body=shared.body)
    with pytest.raises(StoreDamagedError, match="put back"):
        await store.escrow.open("s", word)
    memory.values["escrow"]["s"] = withdrawn
    _put(memory, "s", {**_row(memory, "s"), "viewers": viewers})
    for each in (store, await _opened_store(memory, folder)):  # And also after a restart.
        with pytest.raises(StoreDamagedError, match="changed by another program"):
            await each.escrow.open("s", word)
    memory.values["escrow"]["s"] = withdrawn
    assert await store.escrow.open("s", SECRET) is not None


@spec("STREAM-89")
async def test_revoked_tokens_open_nothing(folder: Path) -> None:
    memory = Memory()
    store = await _opened_store(memory, folder)
    await _begin(store)
    words = [await store.escrow.share("s", for_s=60.0) for _ in range(2)]
    opened = await store.escrow.open("s", words[0])
    assert opened is not None
    await store.escrow.revoke_viewer_tokens("s")
    assert not await store.escrow.is_good(opened)
    for word in words:
        with pytest.raises(WrongSecretError):
            await store.escrow.open("s", word)
    await store.escrow.revoke_viewer_tokens("s")  # Again, and for a session without any: harmless.
    await store.escrow.revoke_viewer_tokens("none")


async def test_viewers_are_limited_and_expired_ones_are_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escrow_module, "VIEWERS_MAX", 2)
    world = FakeWorld()
    store = await _opened_store(Memory(), folder, world=world)
    await _begin(store)
    for _ in range(2):
        await store.escrow.share("s", for_s=60.0)
    with pytest.raises(LimitReachedError):
        await store.escrow.share("s", for_s=60.0)
    await world.advance(61.0)
    await store.escrow.share("s", for_s=60.0)


async def test_only_an_open_session_can_be_shared(folder: Path) -> None:
    store = await _opened_store(Memory(), folder)
    await _begin(store)
    store.escrow.lock("s")
    for session in ("s", "none"):
        with pytest.raises(SessionLockedError):
            await store.escrow.share(session, for_s=60.0)


# --- deletion


@spec("STREAM-90")
async def test_deleting_a_session_deletes_all_its_wrapped_keys(folder: Path) -> None:
    memory = Memory()
    store = await _opened_store(memory, folder)
    epoch = await _begin(store)
    word = await store.escrow.share("s", for_s=60.0)
    copy = [*memory.sessions["s"].records]
    blobs = dict(memory.sessions["s"].blobs)
    await store.release("s", epoch=epoch)
    assert await store.delete("s")
    assert set(memory.values["escrow"]) == {""}
    for secret in (SECRET, word):
        with pytest.raises(WrongSecretError):
            await store.escrow.open("s", secret)
    # A leftover copy of its records is useless, even with the secret and the operator's keys.
    await _begin(store, words="anew")
    memory.sessions["s"].records[:] = copy
    memory.sessions["s"].blobs.update(blobs)
    with pytest.raises(StoreDamagedError):
        await _bodies(store)


@spec("STREAM-90")
async def test_wrapped_keys_left_by_a_dying_process_are_removed_by_the_next(folder: Path) -> None:
    memory, world = Memory(), FakeWorld()
    inner = MemoryStore(memory, world=world)
    store = escrow_store(inner, keys_in(folder), world=world)
    await store.open()
    for session in ("s", "t"):
        epoch = await _begin(store, session)
        await store.release(session, epoch=epoch)
    del memory.sessions["s"]  # By an earlier version, which died before it deleted the row.
    await store.close()
    again = await _opened_store(memory, folder, world=world)
    await again.escrow.drop_deleted_keys()
    assert set(memory.values["escrow"]) == {"", "s", "t"}  # A client may be about to begin it.
    await world.advance(3601.0)
    await again.escrow.drop_deleted_keys()
    assert set(memory.values["escrow"]) == {"", "t"}
    await again.escrow.open("t", SECRET)


async def test_deleting_a_part_leaves_the_whole_unchanged(folder: Path) -> None:
    store = await _opened_store(Memory(), folder)
    await _begin(store)
    await store.delete(f"s{PART_MARK}child")
    assert await _bodies(store) == [CANARY.encode()] * 3


async def test_a_closed_store_holds_no_keys(folder: Path) -> None:
    store = await _opened_store(Memory(), folder)
    await _begin(store)
    await store.close()
    await store.open()
    with pytest.raises(SessionLockedError):
        await _bodies(store)


# --- sessions from before escrow


@spec("STREAM-91")
@pytest.mark.parametrize("is_plain", [True, False])
async def test_sessions_from_before_escrow_need_a_mixed_store(folder: Path, is_plain: bool) -> None:  # noqa: FBT001
    memory = Memory()
    before: Store = MemoryStore(memory) if is_plain else encrypt_store(MemoryStore(memory), keys_in(folder))
    await before.open()
    epoch = await before.claim("old", at=1.0)
    mark = SessionListing(is_live=False, at=1.0, title="before")
    await before.append("old", Batch([b"{}"], expected=0, epoch=epoch, sync=Sync.FULL, mark=mark))
    await before.release("old", epoch=epoch)
    if is_plain:
        with pytest.raises(UsageError, match="unencrypted"):
            await _opened_store(memory, folder)
    else:
        strict = await _opened_store(memory, folder)
        with pytest.raises(WrongSecretError):
            await strict.escrow.open("old", SECRET)
        with pytest.raises(SessionLockedError):
            await _bodies(strict, "old")
    mixed = await _opened_store(memory, folder, is_mixed=True)
    assert await mixed.escrow.open("old", "") is None
    assert await _bodies(mixed, "old") == [b"{}"]
    found = await mixed.find("old")
    assert found is not None
    assert found.mark.title == "before"
    epoch = await mixed.claim("old", at=2.0)
    await mixed.append("old", Batch([b"[]"], expected=1, epoch=epoch, sync=Sync.FULL))
    assert await _bodies(mixed, "old") == [b"{}", b"[]"]
    await _begin(mixed)
    memory.sessions["s"].records[1] = StoredRecord(2, 1, b'{"put": "there"}')
    with pytest.raises(StoreDamagedError):  # An unencrypted row does not belong to an encrypted session.
        await _bodies(mixed)
    mixed.escrow.lock("s")
    with pytest.raises(SessionLockedError):
        await _bodies(mixed)


async def test_key_value_entries_are_encrypted_under_the_operators_keys(folder: Path) -> None:
    memory = Memory()
    store = await _opened_store(memory, folder)
    await store.kv_put("pool", "k", CANARY.encode(), expected=0, at=1.0)
    assert CANARY.encode() not in memory.values["pool"]["k"].body
    found: KeyValueEntry | None = await store.kv_get("pool", "k")
    assert found is not None
    assert found.body == CANARY.encode()


async def test_a_command_between_servers_is_readable_only_with_the_session_key(folder: Path) -> None:
    memory = Memory()
    node, other = await _opened_store(memory, folder), await _opened_store(memory, folder)
    await _begin(node)
    await other.escrow.open("s", SECRET)
    sending = asyncio.ensure_future(other.forward("s", CANARY.encode()))
    news = await asyncio.wait_for(node.watch({}), 60)
    [forwarded] = news.forwarded_commands
    assert forwarded.body == CANARY.encode()
    assert all(CANARY.encode() not in each.forwarded.body for each in memory.forwarded_commands.values())
    await node.answer(forwarded.number, b"done")
    assert await asyncio.wait_for(sending, 60) == b"done"
