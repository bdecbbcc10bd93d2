"""Addresses of JetStream stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import (
    UsageError,
)
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.jetstream_address import JetStreamAddress
from midstream.store.store_registry import show_store

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "jetstream.md").read_text(encoding="utf-8")


def test_an_address_names_servers_credentials_and_streams() -> None:
    address = JetStreamAddress.parse(
        "//u:p%40ss@one,two:4333/?name=app&streams=4&replicas=3&sync=required&tls=yes"
    )
    assert (address.servers, address.user, address.password) == (
        ("nats://one:4222", "nats://two:4333"),
        "u",
        "p@ss",
    )
    assert (address.name, address.streams, address.replicas) == ("app", 4, 3)
    assert (address.is_sync_required, address.is_tls) == (True, True)
    assert "p@ss" not in repr(address)
    assert "secret" not in show_store("nats://u:secret@one/?name=app")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nats://", "names its servers"),
        ("nats://host/path", "no path"),
        ("nats://host/?streams=0", "a number from 1 to 256"),
        ("nats://host/?name=A", "lower-case"),
        ("nats://host/?sync=maybe", "warn, required"),
        ("nats://host/?x", "not a list of parameters"),
    ],
)
def test_an_invalid_address_is_refused(url: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        JetStreamStore(url)
