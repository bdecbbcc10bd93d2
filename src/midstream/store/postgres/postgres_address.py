"""Addresses of PostgreSQL databases: the connection, and the settings of the store."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import parse_qsl, quote, urlencode

from msgspec import Struct

from midstream.errors import UsageError
from midstream.store.store_registry import hide_password

SCHEMA = "midstream"
"""Schema of the tables if the address has none."""
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}", re.ASCII)


class PostgresAddress(Struct, frozen=True):
    """A database, and the schema of the store in it.

    Args:
        dsn: The address for the driver. It may contain a password: never log it.
        schema: The schema of the tables.
        store_key: Path of the key that guards the store, the same on each machine; "" if it is not guarded.
        shown: The address without passwords, for messages and logs.
    """

    dsn: str
    schema: str
    store_key: str
    shown: str

    def __repr__(self) -> str:
        return f"PostgresAddress({self.shown!r})"

    @classmethod
    def parse(cls, address: str) -> Self:
        """Parse the part of a URL after `postgresql:`.

        Host, port, user, password, `passfile`, `sslmode` and all other parameters are those of PostgreSQL's own tools,
        as are the environment variables for missing parts. `schema` and `store_key` are parameters of the store.

        Raises:
            UsageError: It is not a valid address.
        """
        if not address.startswith("//"):
            raise UsageError(
                "a PostgreSQL store is named 'postgresql://user@host:port/database?schema=midstream'"
            )
        place, _, rest = address[2:].partition("?")
        place, fragment, _ = place.partition("#")
        if fragment or "#" in rest:
            raise UsageError(
                "the URL of a PostgreSQL store has no fragment; write '#' in a password as '%23'"
            )
        try:
            parameters = parse_qsl(rest, keep_blank_values=True, strict_parsing=True) if rest else []
        except ValueError as error:
            raise UsageError(
                "what follows '?' in the URL of the store is not a list of parameters"
            ) from error
        schema = next((value for name, value in parameters if name == "schema"), SCHEMA)
        if not _SCHEMA.fullmatch(schema):
            raise UsageError(
                f"schema {schema!r}: a name has 1 to 48 of lower-case letters, digits and '_', and begins with no digit"
            )
        store_key = next((value for name, value in parameters if name == "store_key"), "")
        others = [(name, value) for name, value in parameters if name not in {"schema", "store_key"}]
        given = f"?{urlencode(others, quote_via=quote, safe='/,')}" if others else ""
        return cls(f"postgresql://{place}{given}", schema, store_key, f"postgresql:{hide_password(address)}")
