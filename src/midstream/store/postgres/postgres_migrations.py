"""Tables of a store in PostgreSQL: made and brought up to date, one version after the other."""

from __future__ import annotations

import re
from importlib.resources import files

from midstream.errors import NotFoundError, UsageError
from midstream.extras import extra
from midstream.store.postgres.postgres_connections import Postgres
from midstream.store.store_registry import Prepared

with extra("postgres"):
    import asyncpg

MIGRATIONS = ("postgres_schema_1.sql",)
"""The files that lead from each version to the next, from an empty schema on."""
SCHEMA_NOW = len(MIGRATIONS)
LOCK_KEY = 0x6D_73_74_72
"""Advisory lock that is held while tables are made: "mstr"."""
_ROLE = re.compile(r"[A-Za-z_][A-Za-z0-9_$-]{0,62}", re.ASCII)

# Whether the schema exists, and whether it has our ledger.
FIND_SCHEMA = """
select to_regnamespace($1) is not null, to_regclass($1 || '.ledger') is not null,
    exists (select from pg_class where relnamespace = to_regnamespace($1))
"""
# The version of the tables.
FIND_VERSION = "select schema_version from ledger"
# Let one process at a time make tables.
LOCK = "select pg_advisory_xact_lock($1)"
# Note the version that the tables have now.
SET_VERSION = "update ledger set schema_version = $1"


async def require_prepared(postgres: Postgres, connection: asyncpg.Connection) -> None:
    """Make the tables where they are missing and this role may, or require them as they are.

    Raises:
        UsageError: They are missing or old, and this role may not make them; or a newer version made them.
    """
    if await version_of(postgres, connection) == SCHEMA_NOW:
        return
    try:
        await migrate(postgres, connection)
    except asyncpg.InsufficientPrivilegeError as error:
        raise UsageError(
            f"{postgres.where} is not prepared, and this role may not create tables: run "
            "`midstream store migrate URL --grant ROLE` once, as the owner of the database"
        ) from error


async def require_present(postgres: Postgres, connection: asyncpg.Connection) -> None:
    """Require the tables, and make nothing.

    Raises:
        NotFoundError: Nothing was ever stored here.
        UsageError: Another version made the tables.
    """
    version = await version_of(postgres, connection)
    if version == 0:
        raise NotFoundError(f"nothing was stored in {postgres.address.shown} yet")
    if version < SCHEMA_NOW:
        raise UsageError(f"{postgres.where} has schema {version}: run `midstream store migrate` first")


async def version_of(postgres: Postgres, connection: asyncpg.Connection) -> int:
    """Return the version of the tables, 0 where there are none.

    Raises:
        UsageError: A newer midstream made them, or the schema belongs to another program.
    """
    schema = postgres.address.schema
    is_there, is_ours, has_tables = await connection.fetchrow(FIND_SCHEMA, schema)
    if not is_ours:
        if is_there and has_tables:
            raise UsageError(
                f"{postgres.where}: schema {schema!r} belongs to another program; name another one with '?schema='"
            )
        return 0
    version: int = await connection.fetchval(FIND_VERSION)
    if version > SCHEMA_NOW:
        raise UsageError(
            f"{postgres.where} has schema {version}, this midstream supports {SCHEMA_NOW}; install the newer midstream"
        )
    return version


async def migrate(postgres: Postgres, connection: asyncpg.Connection, *, grant: str = "") -> Prepared:
    """Make the tables, or bring them up to date, in one transaction.

    Args:
        grant: A role that gets the rights with which a server runs.

    Raises:
        UsageError: See `version_of`; or `grant` is no name of a role. Nothing was changed.
    """
    if grant and not _ROLE.fullmatch(grant):
        raise UsageError(f"{grant!r} is not the name of a role")
    schema = postgres.address.schema
    async with connection.transaction():
        await connection.execute(LOCK, LOCK_KEY)
        is_there, _, _ = await connection.fetchrow(FIND_SCHEMA, schema)
        before = await version_of(postgres, connection)
        if not is_there:
            await connection.execute(f"create schema {schema}")
        for name in MIGRATIONS[before:]:
            await connection.execute(files("midstream.store.postgres").joinpath(name).read_text())
        await connection.execute(SET_VERSION, SCHEMA_NOW)
        if grant:
            await connection.execute(_grants(schema, grant))
    return Prepared(before, SCHEMA_NOW)


def _grants(schema: str, role: str) -> str:
    """Return the statements that let a role run a server, and nothing more."""
    return (
        f'grant usage on schema {schema} to "{role}"; '
        f'grant select, insert, update, delete on all tables in schema {schema} to "{role}"'
    )
