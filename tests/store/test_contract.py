from __future__ import annotations

import inspect

import pytest

from midstream.store.contract import Shelf, Store, Transactional
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore

METHODS = {name for name in vars(Store) if not name.startswith("_")}
SHELF = {name for name in vars(Shelf) if not name.startswith("_")}
"""What `Shelf` adds."""
WITHIN = {"append_within"}
"""What `Transactional` adds."""


@pytest.mark.parametrize("store", [MemoryStore, SQLiteStore])
def test_a_store_takes_and_gives_exactly_what_the_contract_says(store: type) -> None:
    for contract, methods in ((Store, METHODS), (Shelf, SHELF)):
        assert {
            name: inspect.signature(getattr(store, name)) for name in methods if hasattr(store, name)
        } == {name: inspect.signature(getattr(contract, name)) for name in methods}


@pytest.mark.parametrize("store", [MemoryStore, SQLiteStore])
def test_a_store_has_no_public_method_of_its_own(store: type) -> None:
    beside = WITHIN if issubclass(store, Transactional) else set()
    assert {name for name in vars(store) if not name.startswith("_")} == METHODS | SHELF | beside


def test_sqlite_alone_lets_tools_write_in_its_transactions() -> None:
    assert issubclass(SQLiteStore, Transactional)
    assert not issubclass(MemoryStore, Transactional)
    assert inspect.signature(SQLiteStore.append_within) == inspect.signature(Transactional.append_within)
