"""`midstream verify`: check the chains of journals, and compare them with a checkpoint."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from midstream.cli import Invocation
from midstream.cli.exits import VERIFICATION
from midstream.cli.input_file import InputFile
from midstream.cli.key_option import key_file_option
from midstream.cli.output import Output, json_option, one_line
from midstream.environment import World
from midstream.errors import SessionNotFoundError, UsageError
from midstream.file_safety import create_own_once, follow_own_links, open_own
from midstream.store.contract import StoreReader
from midstream.store.guard.chain import ChainKeys
from midstream.store.guard.journal_verification import (
    BAD,
    LINE_BYTES_MAX,
    CheckpointLine,
    SessionVerdict,
    Verdict,
    checkpoint_lines,
    read_checkpoint,
    verify_session,
    verify_store,
)
from midstream.store.guard.store_key import read_chain_keys
from midstream.store.guard.store_marker import read_marker
from midstream.store.key_location import KeyLocation, open_keys
from midstream.store.store_registry import open_store, read_stored

CALLED = "the checkpoint"


@click.command()
@click.argument("store", metavar="[STORE]", required=False)
@click.argument("session", metavar="[SESSION]", required=False)
@click.option(
    "--against",
    metavar="FILE",
    type=InputFile(),
    help="Compare the journals with this checkpoint of an earlier run.",
)
@click.option(
    "--checkpoint",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the ends of all intact journals into this new file; store it on another machine.",
)
@key_file_option
@json_option("Print JSON, one line for each session.")
@click.pass_obj
def verify(
    invocation: Invocation,
    store: str | None,
    session: str | None,
    against: Path | None,
    checkpoint: Path | None,
    key_file: KeyLocation | None,
    output: Output,
) -> int:
    """Check that no other program changed the journals of a store.

    STORE is a file or URL (default: that of `midstream serve`); a server may use it. Each record is checked with the
    key of the store. Only --against detects a store, or a session, that was set back to an older state. The exit code
    is 6 if a journal is damaged, set back or missing.
    """
    if checkpoint is not None and os.path.lexists(checkpoint):
        raise UsageError(f"{str(checkpoint)!r} exists; choose another name, so that no checkpoint is lost")
    named = store or invocation.places.store
    before = None if against is None else _read_checkpoint(against)
    found = asyncio.run(_verify(named, session, before, key_file))
    for each in found:
        if output.is_json or each.verdict is not Verdict.INTACT:
            output.print_one(each, _line_of(each), err=False)
    if checkpoint is not None:
        create_own_once(checkpoint, b"".join(checkpoint_lines(found, at=World().now())))
    counts = Counter(each.verdict.value for each in found)
    summary = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(counts.items()))
    click.echo(summary or "There are no sessions.", err=True)
    return VERIFICATION if any(each.verdict in BAD for each in found) else 0


async def _verify(
    named: str | Path,
    session: str | None,
    before: dict[str, CheckpointLine] | None,
    key_file: KeyLocation | None,
) -> list[SessionVerdict]:
    async with read_stored(named) as reader:
        keys = await _keys_of(reader, named, key_file)
        if session is None:
            return [each async for each in verify_store(reader, keys, before)]
        known = (before or {}).get(session)
        if await reader.find(session) is not None:
            return [await verify_session(reader, session, keys, known)]
        if known is None:
            raise SessionNotFoundError(f"no session {session!r}")
        judged = verify_store(reader, keys, {session: known})
        return [each async for each in judged if each.session == session]


async def _keys_of(reader: StoreReader, named: str | Path, key_file: KeyLocation | None) -> ChainKeys:
    if key_file is not None:
        keys = open_keys(key_file)
        from midstream.store.encryption.store_secret import WrappedKeySource  # noqa: PLC0415 - an extra that few need

        source = WrappedKeySource(keys, is_mixed=False, world=World())
        return await source.find(reader)
    if await read_marker(reader) is not None:
        click.echo(
            "The store is encrypted: --key-file FILE also checks the authenticity of the records.", err=True
        )
        return _no_keys()
    place = open_store(named).key_file
    try:
        return _no_keys() if place is None else read_chain_keys(place)
    except FileNotFoundError:
        click.echo(f"The key file {str(place)!r} is missing: the links cannot be checked.", err=True)
        return _no_keys()
    except OSError as error:
        raise UsageError(f"the key file {str(place)!r} cannot be read: {error.strerror}") from error


def _no_keys() -> ChainKeys:
    return ChainKeys((), is_mixed=True, place="no key file")


def _read_checkpoint(path: Path) -> dict[str, CheckpointLine]:
    try:
        return read_checkpoint(_lines(path))
    except OSError as error:
        raise UsageError(f"{CALLED} {str(path)!r} cannot be read: {error.strerror}") from error


def _lines(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_own(follow_own_links(path, CALLED), CALLED), "rb") as file:
        while line := file.readline(LINE_BYTES_MAX):
            yield line


def _line_of(found: SessionVerdict) -> str:
    words = found.problem or (
        f"no chain before record {found.chain_begins}"
        if found.verdict is Verdict.PARTLY
        else f"no chain before record {found.end + 1}"
    )
    return f"{one_line(found.session)}: {found.verdict.value}: {one_line(words)}"
