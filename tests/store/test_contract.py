from __future__ import annotations

import inspect

import pytest

from midstream.store.contract import Immediate, KeyValue, KeyValueReader, Store, StoreReader, Transactional
from midstream.store.jetstream import JetStreamStore
from midstream.store.memory import MemoryStore
from midstream.store.postgres import PostgresStore
from midstream.store.sqlite import SQLiteStore

METHODS = {
    name: contract
    for contract in (KeyValueReader, KeyValue, StoreReader, Store)
    for name in vars(contract)
    if not name.startswith("_")
}
ABILITIES = {
    "transactional": (Transactional, {"append_within"}),
    "immediate": (Immediate, {"append_now", "is_ready"}),
}


@pytest.mark.parametrize("store", [MemoryStore, SQLiteStore, PostgresStore, JetStreamStore])
def test_a_store_has_exactly_the_parameters_and_results_of_the_contract(store: type) -> None:
    methods = {name: contract for name, contract in METHODS.items() if callable(getattr(contract, name))}
    assert {name: inspect.signature(getattr(store, name)) for name in methods} == {
        name: inspect.signature(getattr(contract, name)) for name, contract in methods.items()
    }


def test_a_store_has_only_the_public_methods_of_the_contract_and_of_its_declared_abilities() -> None:
    for store, declared in (
        (MemoryStore(), {"immediate"}),
        (SQLiteStore("x.db"), {"immediate", "transactional"}),
        (PostgresStore("postgresql://h/db"), {"transactional"}),
        (JetStreamStore("nats://h"), set()),
    ):
        assert {name for name in ABILITIES if getattr(store, name) is store} == declared
        public = {name for name in vars(type(store)) if not name.startswith("_")}
        assert public - {*METHODS} == set[str]().union(*(ABILITIES[name][1] for name in declared))
        for contract, members in (ABILITIES[name] for name in declared):
            for method in (each for each in members if callable(getattr(contract, each))):
                of_store = inspect.signature(getattr(type(store), method))
                assert of_store == inspect.signature(getattr(contract, method))
