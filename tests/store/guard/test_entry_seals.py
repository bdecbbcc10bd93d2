from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import StoreDamagedError
from midstream.store.contract import KeyValueEntry
from midstream.store.guard.chain import ChainKey, ChainKeys
from midstream.store.guard.entry_seals import EntrySeals
from tests.spec import spec


def seals(key: bytes = b"k", *, is_mixed: bool = False) -> EntrySeals:
    return EntrySeals(ChainKeys((ChainKey(key * 32),), is_mixed=is_mixed, place=""), World())


def entry(body: bytes, key: str = "a") -> KeyValueEntry:
    return KeyValueEntry(key, 1, body, 1.0)


@spec("SEC-50")
def test_an_entry_is_read_back_unchanged_and_each_write_is_unique() -> None:
    ours = seals()
    one, other = ours.seal("n", "a", b"body"), ours.seal("n", "a", b"body")
    assert one != other
    assert ours.open("n", entry(one), since=0) == entry(b"body")
    assert seals().open("n", entry(ours.seal("n", "a", b"")), since=0) == entry(b"")


@spec("SEC-50")
def test_an_entry_written_moved_or_changed_by_another_program_is_refused() -> None:
    ours = seals()
    sealed = ours.seal("n", "a", b"body")
    for namespace, found in (
        ("m", entry(sealed)),
        ("n", entry(sealed, "b")),
        ("n", entry(sealed[:-1] + b"!")),
        ("n", entry(sealed[:20])),
        ("n", entry(b"body")),
        ("n", entry(b"")),
        ("n", entry(seals(b"o").seal("n", "a", b"body"))),
    ):
        with pytest.raises(StoreDamagedError):
            ours.open(namespace, found, since=0)
    ours.check_nothing("n", "a")


@spec("SEC-45")
def test_an_entry_of_an_older_version_or_a_lost_key_is_read_in_a_mixed_store() -> None:
    mixed = seals(is_mixed=True)
    assert mixed.open("n", entry(b"{}"), since=0) == entry(b"{}")
    assert mixed.open("n", entry(seals(b"o").seal("n", "a", b"{}")), since=0) == entry(b"{}")
    sealed = mixed.seal("n", "a", b"{}")
    with pytest.raises(StoreDamagedError):
        mixed.open("n", replace(entry(sealed), body=sealed[:-1] + b"!"), since=0)
