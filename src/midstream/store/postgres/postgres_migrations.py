"""Tables of a store in PostgreSQL: their creation and migration, version by version."""

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
"""The files that lead from each version to the next, starting with an empty schema."""
SCHEMA_NOW = len(MIGRATIONS)
LOCK_KEY = 0x6D_73_74_72
"""Advisory lock that is held during migrations: "mstr"."""
_ROLE = re.compile(r"[A-Za-z_][A-Za-z0-9_$-]{0,62}", re.ASCII)

# Whether the schema exists, and whether it has midstream's ledger.
FIND_SCHEMA = """
select to_regnamespace($1) is not null, to_regclass($1 || '.ledger') is not null,
    exists (select from pg_class where relnamespace = to_regnamespace($1))
"""
# The version of the tables.
FIND_VERSION = "select schema_version from ledger"
# Allow only one process at a time to migrate.
LOCK = "select pg_advisory_xact_lock($1)"
# Set the version of the tables.
SET_VERSION = "update ledger set schema_version = $1"


async def require_prepared(postgres: Postgres, connection: asyncpg.Connection) -> None:
    """Create missing tables if this role may, or check the existing ones.

    Raises:
        UsageError: The tables are missing or old, and this role may not create them; or they have a newer version.
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
    """Check that the tables exist; create nothing.

    Raises:
        NotFoundError: Nothing was ever stored here.
        UsageError: The tables have another version.
    """
    version = await version_of(postgres, connection)
    if version == 0:
        raise NotFoundError(f"nothing was stored in {postgres.address.shown} yet")
    if version < SCHEMA_NOW:
        raise UsageError(f"{postgres.where} has schema {version}: run `midstream store migrate` first")


async def version_of(postgres: Postgres, connection: asyncpg.Connection) -> int:
    """Return the version of the tables, 0 if there are none.

    Raises:
        UsageError: A newer midstream created them, or the schema belongs to another program.
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
    """Create or migrate the tables, in one transaction.

    Args:
        grant: A role that gets the rights with which a server runs.

    Raises:
        UsageError: See `version_of`; or `grant` is not a valid name of a role. Nothing was changed.
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
    """Return the statements that give a role exactly the rights to run a server."""
    return (
        f'grant usage on schema {schema} to "{role}"; '
        f'grant select, insert, update, delete on all tables in schema {schema} to "{role}"'
    )
