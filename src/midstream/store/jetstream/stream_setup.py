"""Streams of a store: created at the first use, and checked at each use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import urllib.request

import msgspec
from msgspec import Struct

from midstream.errors import NotFoundError, UsageError
from midstream.store.jetstream.jetstream_address import JetStreamAddress
from midstream.store.jetstream.jetstream_errors import NoStreamError, SubjectMovedError
from midstream.store.jetstream.jetstream_link import JetStreamLink, SubjectWrite
from midstream.store.jetstream.journal_messages import FORMAT, decode, encode
from midstream.store.jetstream.stream_subjects import StreamSubjects

VERSION_LEAST = (2, 12)
"""The first server version with atomic batches."""
REPLICAS_IN_CLUSTER = 3
MONITOR_WITHIN_S = 3.0
TRIES_MAX = 10

_log = logging.getLogger(__name__)


class StoreMeta(Struct, frozen=True, array_like=True):
    """Description of a store, fixed when it was created."""

    format: int
    streams: int
    replicas: int


class Durability(Struct, frozen=True):
    """Servers and disks that an acknowledged append has reached.

    Args:
        replicas: Servers with a copy: more than half of them at once, the others soon.
        is_synced: Whether each of them has synced it to its disk; None if unknown.
    """

    replicas: int
    is_synced: bool | None

    def __str__(self) -> str:
        servers = "1 server" if self.replicas == 1 else f"{self.replicas // 2 + 1} of {self.replicas} servers"
        if self.is_synced:
            return f"disk of {servers}"
        return f"memory of {servers}" + ("" if self.is_synced is False else ", perhaps their disks")


async def prepare_streams(
    link: JetStreamLink, address: JetStreamAddress
) -> tuple[StreamSubjects, Durability]:
    """Create missing streams, and return the subjects of the store and the durability of its appends.

    Raises:
        UsageError: The servers lack an ability, or do not sync although that is required.
        StoreBusyError: They cannot be reached.
    """
    _require_server(link)
    replicas = address.replicas or (REPLICAS_IN_CLUSTER if "cluster" in link.info else 1)
    requested = StreamSubjects(address.name, address.streams)
    await _make_stream(link, requested.kv_stream, requested.patterns()[requested.kv_stream], replicas)
    meta = await _write_meta(link, requested, StoreMeta(FORMAT, address.streams, replicas))
    if meta.format != FORMAT:
        raise UsageError(f"{link.where} has format {meta.format}, this version writes {FORMAT}")
    subjects = StreamSubjects(address.name, meta.streams)
    patterns = subjects.patterns()
    await asyncio.gather(
        *(_make_stream(link, stream, patterns[stream], meta.replicas) for stream in subjects.shards)
    )
    durability = Durability(meta.replicas, await _find_sync(address, meta.replicas))
    _judge(link, address, durability)
    return subjects, durability


async def find_streams(link: JetStreamLink, address: JetStreamAddress) -> StreamSubjects:
    """Return the subjects of an existing store; create nothing.

    Raises:
        NotFoundError: There is no such store.
        StoreBusyError: The servers cannot be reached.
    """
    _require_server(link)
    requested = StreamSubjects(address.name, address.streams)
    missing = NotFoundError(f"there is no store {link.where!r}")
    try:
        await link.api(f"STREAM.INFO.{requested.kv_stream}")
    except NoStreamError:
        raise missing from None
    found = await link.last(requested.kv_stream, requested.meta)
    if found is None:
        raise missing
    return StreamSubjects(address.name, decode(found.data, StoreMeta).streams)


def _require_server(link: JetStreamLink) -> None:
    words = re.match(r"(\d+)\.(\d+)", str(link.info.get("version", "")))
    version = (int(words[1]), int(words[2])) if words else (0, 0)
    if not link.info.get("jetstream"):
        raise UsageError(f"{link.where} has no JetStream: set `jetstream` in the server's configuration")
    if version < VERSION_LEAST:
        raise UsageError(
            f"{link.where} is NATS {link.info.get('version')}; a store needs 2.12 or newer, which has atomic batches"
        )


async def _make_stream(link: JetStreamLink, stream: str, pattern: str, replicas: int) -> None:
    try:
        found = (await link.api(f"STREAM.INFO.{stream}"))["config"]
    except NoStreamError:
        config = {
            "name": stream,
            "subjects": [pattern],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "num_replicas": replicas,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_consumers": -1,
            "max_msg_size": -1,
            "max_age": 0,
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "allow_atomic": True,
        }
        found = (await link.api(f"STREAM.CREATE.{stream}", config))["config"]
    lacking = [name for name in ("allow_direct", "allow_rollup_hdrs", "allow_atomic") if not found.get(name)]
    if lacking or found.get("storage") != "file":
        raise UsageError(
            f"stream {stream!r} of {link.where} was made by another program, or changed: "
            f"it needs file storage, allow_direct, allow_rollup_hdrs and allow_atomic"
        )


async def _write_meta(link: JetStreamLink, subjects: StreamSubjects, meta: StoreMeta) -> StoreMeta:
    write = SubjectWrite(subjects.meta, encode(meta), 0)
    for _ in range(TRIES_MAX):
        found = await link.last(subjects.kv_stream, subjects.meta)
        if found is not None:
            return decode(found.data, StoreMeta)
        with contextlib.suppress(
            SubjectMovedError
        ):  # another process wrote it, or this one in an earlier try
            await link.retry(lambda: link.commit(subjects.kv_stream, [write]))
    raise UsageError(f"{link.where}: the description of the store cannot be written")


async def _find_sync(address: JetStreamAddress, replicas: int) -> bool | None:
    """Return whether the servers sync each message; None if unknown."""
    try:
        shown = await asyncio.gather(*map(_sync_of, address.monitors))
    except (OSError, ValueError, KeyError) as error:
        _log.warning("a monitoring port does not answer: %s", error)
        return None
    if False in shown:
        return False
    return True if len(shown) >= replicas else None


async def _sync_of(monitor: str) -> bool:
    def read() -> bytes:
        with urllib.request.urlopen(f"{monitor.rstrip('/')}/jsz", timeout=MONITOR_WITHIN_S) as answer:  # noqa: S310
            return bytes(answer.read())

    answer = msgspec.json.decode(await asyncio.to_thread(read))
    return bool(answer["config"].get("sync_always", False))


def _judge(link: JetStreamLink, address: JetStreamAddress, durability: Durability) -> None:
    if durability.is_synced:
        _log.info("an acknowledged append to %s is on the %s", link.where, durability)
        return
    how = (
        "the servers do not sync each message"
        if durability.is_synced is False
        else "no `monitor` of each server in the URL shows whether they sync each message"
    )
    message = (
        f"an acknowledged append to {link.where} is in the {durability}: {how}. "
        "Set `sync_interval: always` in the `jetstream` part of their configuration"
    )
    if address.is_sync_required:
        raise UsageError(message)
    _log.warning("%s", message)
