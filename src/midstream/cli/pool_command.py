"""`midstream pool`: list the upstream agents of a pool, and remove them."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence

import click
from msgspec import Struct

from midstream.agents.pool_entries import CALLS_NAMESPACE, POOL_NAMESPACE, session_of
from midstream.agents.pool_records import PoolRecord, decode
from midstream.cli import Invocation
from midstream.cli.key_option import key_file_option
from midstream.cli.output import Output, json_option
from midstream.cli.terminal import Ink, clean, columns, pad, shorten
from midstream.cli.times import time_of
from midstream.cli.visible_text import reveal_line
from midstream.errors import NotFoundError, UsageError
from midstream.store.blocking_reads import ENTRY_MARK
from midstream.store.contract import KeyValueEntry
from midstream.store.key_location import KeyLocation
from midstream.store.store_registry import open_store, read_store, show_store

SESSION_COLUMNS = 24
STATE_COLUMNS = 9
NAMED_MAX = 3
"""Sessions that the message about an ambiguous name lists."""
HOSTS_NAME = re.compile("^[hm]:")
"""Prefix that the gateway adds to names from a header or from metadata."""
LOOK_BYTES = 4
"""Bytes of a digest that are shown: enough for comparison."""


class PoolLine(Struct, frozen=True):
    """One record in the output.

    Args:
        state: `ready` (the next turn may resume the agent), `running` (a turn uses it, or died with it), `pending`
            (whether a message arrived is unknown), `damaged` (the next turn begins with a fresh agent), `encrypted`
            (needs `--key-file`).
        users: Number of user messages that the agent has.
        system, tools, servers, identity: Beginnings of their digests.
        store: The store of the record.
    """

    key: str
    session: str
    upstream: str
    agent: str
    state: str
    users: int
    marks: int
    open_calls: tuple[str, ...]
    created_at: float
    used_at: float
    bytes: int
    store: str
    system: str = ""
    tools: str = ""
    servers: str = ""
    identity: str = ""


@click.group()
def pool() -> None:
    """List or remove the upstream agents that are kept for reuse.

    After its record is removed, a session's next turn begins with a fresh agent. The conversation is not lost.
    """


_store_option = click.option(
    "--store",
    metavar="FILE|URL",
    help="Read this store (default: those of `midstream gateway` and `midstream serve`).",
)


@pool.command("ls")
@_store_option
@key_file_option
@json_option()
@click.pass_obj
def list_records(
    invocation: Invocation,
    store: str | None,
    key_file: KeyLocation | None,
    output: Output,
) -> None:
    """List the records, most recently used first: a table, or tab-separated lines if stdout is not a terminal."""
    found = _find(_stores(invocation, store, key_file), key_file)
    output.print_list(
        found, _cells, table=lambda: _table(found, output.ink, columns()), none="There are no agents."
    )


def _cells(line: PoolLine) -> tuple[str, ...]:
    return (line.session, line.upstream, line.state, str(line.users), time_of(line.used_at), line.agent)


@pool.command()
@click.argument("session")
@_store_option
@key_file_option
@json_option()
@click.pass_obj
def show(
    invocation: Invocation,
    session: str,
    store: str | None,
    key_file: KeyLocation | None,
    output: Output,
) -> None:
    """Show the record of a session's agent. SESSION is the id or its beginning."""
    for line in _of_session(_find(_stores(invocation, store, key_file), key_file), session):
        if output.is_json:
            output.print_json(line)
            continue
        for name in line.__struct_fields__:
            value = getattr(line, name)
            words = time_of(value) if name.endswith("_at") else str(value)
            if value not in ("", ()):
                row = f"{pad(name, 12)}{clean(words, is_one_line=True)}"
                click.echo(shorten(row, columns()) if invocation.out.is_terminal else row)


@pool.command()
@click.argument("sessions", metavar="[SESSION]...", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="All records.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_store_option
@key_file_option
@json_option()
@click.pass_obj
def clear(
    invocation: Invocation,
    sessions: tuple[str, ...],
    is_all: bool,  # noqa: FBT001 - click passes options so
    yes: bool,  # noqa: FBT001 - see above
    store: str | None,
    key_file: KeyLocation | None,
    output: Output,
) -> None:
    """Remove records, so that the next turn begins with a fresh agent. Nothing is deleted upstream."""
    if bool(sessions) == is_all:
        raise UsageError("no sessions given; name them, or give --all")
    stores = _stores(invocation, store, key_file)
    found = _find(stores, key_file)
    wanted = found if is_all else [line for name in sessions for line in _of_session(found, name)]
    if wanted and not yes:
        if not sys.stdin.isatty():
            raise UsageError("stdin is not a terminal; give --yes to confirm")
        what = f"the record of {wanted[0].session!r}" if len(wanted) == 1 else _format_count(len(wanted))
        click.confirm(f"Remove {reveal_line(what)}?", abort=True, err=True)
    removed: list[str] = []
    for named in stores:
        keys = [line.key for line in wanted if line.store == show_store(named)]
        if keys:
            removed += asyncio.run(_remove(named, keys))
    for key in removed:
        output.print_json({"key": key, "is_removed": True})
    click.echo(f"{_format_count(len(removed))} removed.", err=True)


async def _remove(named: str, keys: Sequence[str]) -> list[str]:
    """Remove entries in their current version, and return those that existed."""
    store = open_store(named)
    await store.open()
    try:
        removed = []
        for key in keys:
            calls = await store.kv_get(CALLS_NAMESPACE, key)
            if calls is not None:
                await store.kv_delete(CALLS_NAMESPACE, key, expected=calls.version)
            kept = await store.kv_get(POOL_NAMESPACE, key)
            if kept is not None and await store.kv_delete(POOL_NAMESPACE, key, expected=kept.version):
                removed.append(key)
        return removed
    finally:
        await store.close()


def _stores(invocation: Invocation, named: str | None, key_file: KeyLocation | None) -> list[str]:
    """Return the stores to read: the given one, else those of the gateway and of `serve`, if any.

    Raises:
        UsageError: There are two stores, but a key file is for one.
    """
    if named is not None:
        return [named]
    places = invocation.places
    stores = [str(path) for path in (places.gateway_store, places.store) if path.exists()]
    if key_file is not None and len(stores) > 1:
        raise UsageError("--key-file is for one database, but two were found; choose one with --store")
    return stores


def _find(stores: Sequence[str], key_file: KeyLocation | None) -> list[PoolLine]:
    found = []
    for named in stores:
        with read_store(named, key_file=key_file) as store:
            found += [_line_of(kept, show_store(named)) for kept in store.kv_list(POOL_NAMESPACE)]
    return sorted(found, key=lambda line: line.used_at, reverse=True)


def _of_session(found: Sequence[PoolLine], name: str) -> list[PoolLine]:
    """Return the lines of one session, of any upstream; the gateway's prefix of a name may be omitted.

    Raises:
        NotFoundError: There is none.
        UsageError: The name is ambiguous.
    """
    exact = [line for line in found if name in (line.session, HOSTS_NAME.sub("", line.session))]
    fitting = exact or [
        line
        for line in found
        if line.session.startswith(name) or HOSTS_NAME.sub("", line.session).startswith(name)
    ]
    if not fitting:
        raise NotFoundError(
            f"no agent is recorded for session {name!r}: `midstream pool ls` lists the records"
        )
    sessions = sorted({line.session for line in fitting})
    if len(sessions) > 1:
        some = ", ".join(map(repr, sessions[:NAMED_MAX])) + (", …" if len(sessions) > NAMED_MAX else "")
        raise UsageError(f"several sessions begin with {name!r}: give one of {some}")
    return fitting


def _line_of(kept: KeyValueEntry, store: str) -> PoolLine:
    record, size = decode(kept.body), len(kept.body)
    if record is None:
        state = "encrypted" if kept.body.startswith(ENTRY_MARK) else "damaged"
        return PoolLine(kept.key, kept.key, "", "", state, 0, 0, (), kept.at, kept.at, size, store)
    fingerprint = record.fingerprint
    digests = (fingerprint.system, fingerprint.tools, fingerprint.servers, fingerprint.identity)
    return PoolLine(
        kept.key,
        session_of(kept.key, record),
        record.upstream,
        record.agent,
        _state_of(record),
        fingerprint.count,
        len(record.marks),
        record.open_calls,
        record.created_at,
        record.used_at,
        size,
        store,
        *(digest[:LOOK_BYTES].hex() for digest in digests),
    )


def _state_of(record: PoolRecord) -> str:
    if record.run:
        return "running" if record.phase == "confirmed" else "pending"
    return "ready" if record.is_resumable else "pending"


def _table(found: Sequence[PoolLine], ink: Ink, width: int) -> list[str]:
    if not found:
        return []
    names = [clean(line.session, is_one_line=True) for line in found]
    first = min(SESSION_COLUMNS, max(len("SESSION"), *map(len, names)))
    head = f"{pad('SESSION', first)}  USERS  {pad('STATE', STATE_COLUMNS)}  USED                 AGENT"
    rows = [ink.bold(head)]
    rest = max(10, width - len(head) + len("AGENT"))
    for line, name in zip(found, names, strict=True):
        agent = clean(f"{line.upstream} {line.agent}", is_one_line=True)
        cells = (
            pad(shorten(name, first), first),
            f"{line.users:>5}",
            pad(line.state, STATE_COLUMNS),
            time_of(line.used_at),
            shorten(agent, rest),
        )
        rows.append("  ".join(cells))
    return rows


def _format_count(count: int) -> str:
    return f"{count} record{'s' if count != 1 else ''}"
