from __future__ import annotations

import inspect

import pytest

from midstream.store.contract import Immediate, Shelf, Store, Transactional
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore

METHODS = {name for name in vars(Store) if not name.startswith("_")}
SHELF = {name for name in vars(Shelf) if not name.startswith("_")}
"""What `Shelf` adds."""
SPECIAL: dict[type, str] = {Transactional: "append_within", Immediate: "append_at_once"}
"""What a store may be able to do besides."""


@pytest.mark.parametrize("store", [MemoryStore, SQLiteStore])
def test_a_store_takes_and_gives_exactly_what_the_contract_says(store: type) -> None:
    for contract, methods in ((Store, METHODS), (Shelf, SHELF)):
        assert {name: inspect.signature(getattr(store, name)) for name in methods} == {
            name: inspect.signature(getattr(contract, name)) for name in methods
        }


@pytest.mark.parametrize("store", [MemoryStore, SQLiteStore])
def test_a_store_has_no_public_method_of_its_own(store: type) -> None:
    beside = {name for contract, name in SPECIAL.items() if issubclass(store, contract)}
    assert {name for name in vars(store) if not name.startswith("_")} == METHODS | SHELF | beside


def test_sqlite_alone_lets_tools_write_in_its_transactions() -> None:
    assert issubclass(SQLiteStore, Transactional)
    assert not issubclass(MemoryStore, Transactional)


@pytest.mark.parametrize("store", [MemoryStore, SQLiteStore])
def test_what_a_store_can_do_besides_has_the_shape_of_the_contract(store: type) -> None:
    for contract, name in SPECIAL.items():
        if issubclass(store, contract):
            assert inspect.signature(getattr(store, name)) == inspect.signature(getattr(contract, name))
