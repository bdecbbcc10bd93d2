"""Addresses of databases, and their displayable part."""

from __future__ import annotations

import pytest

from midstream.errors import UsageError
from midstream.store.postgres.postgres_address import PostgresAddress
from midstream.store.store_registry import show_store


def test_the_schema_option_is_ours_and_all_others_are_passed_to_the_driver() -> None:
    given = PostgresAddress.parse("//a:p%23w@h1,h2:5433/db?sslmode=require&schema=x_1&passfile=/a/b")
    assert given.dsn == "postgresql://a:p%23w@h1,h2:5433/db?sslmode=require&passfile=/a/b"
    assert given.schema == "x_1"
    assert given.shown == "postgresql://a@h1,h2:5433/db?sslmode=require&schema=x_1&passfile=/a/b"
    assert PostgresAddress.parse("//h/db").schema == "midstream"
    assert PostgresAddress.parse("//h/db?store_key=/etc/key").store_key == "/etc/key"
    assert PostgresAddress.parse("///db?host=/run/pg").dsn == "postgresql:///db?host=/run/pg"


@pytest.mark.parametrize(
    "url", ["//u:secret@h/db", "//u@h/db?password=secret", "//h/db?a=1&sslpassword=secret&b=2"]
)
def test_a_password_is_never_shown(url: str) -> None:
    address = PostgresAddress.parse(url)
    assert "secret" in address.dsn
    for shown in (address.shown, repr(address), str(address), show_store(f"postgresql:{url}")):
        assert "secret" not in shown
        assert "h/db" in shown


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("db", "is named 'postgresql://user@host"),
        ("//h/db?schema=A", "lower-case"),
        ('//h/db?schema=a"b', "lower-case"),
        ("//h/db?x", "list of parameters"),
        ("//u:a#b@h/db", "%23"),
    ],
)
def test_an_invalid_address_is_refused(address: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        PostgresAddress.parse(address)
