"""Addresses of PostgreSQL databases: what the driver connects by, what belongs to the store, what people may see."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import parse_qsl, quote, urlencode

from msgspec import Struct

from midstream.errors import UsageError
from midstream.store.store_registry import hide_password

SCHEMA = "midstream"
"""Schema of the tables where the address names none."""
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}", re.ASCII)


class PostgresAddress(Struct, frozen=True):
    """A database, and the schema of the store in it.

    Args:
        dsn: What the driver connects by. It may contain a password: never log it.
        schema: The schema of the tables.
        shown: The address without passwords, for messages and logs.
    """

    dsn: str
    schema: str
    shown: str

    def __repr__(self) -> str:
        return f"PostgresAddress({self.shown!r})"

    @classmethod
    def parse(cls, address: str) -> Self:
        """Return the address of a URL, given as what follows `postgresql:`.

        Host, port, user, password, `passfile`, `sslmode` and all other parameters are those of PostgreSQL's own tools,
        and so are the environment variables for what the URL leaves out. `schema` is the store's.

        Raises:
            UsageError: It is no such address.
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
        others = [(name, value) for name, value in parameters if name != "schema"]
        given = f"?{urlencode(others, quote_via=quote, safe='/,')}" if others else ""
        return cls(f"postgresql://{place}{given}", schema, f"postgresql:{hide_password(address)}")
