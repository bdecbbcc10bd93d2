"""One connection to the servers: JetStream's API, conditional writes, consistent reads, and signals.

A write of several messages is one atomic batch: all of them are stored, or none (servers from 2.12).

The last message of a subject is read from the stream's leader. Pages of messages may come from any replica; the caller
passes the leader's last sequence number, and a lagging replica is read again. Stored messages never change, so the read
is consistent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.errors import MidstreamError, StoreBusyError, StoreDamagedError, UsageError
from midstream.extras import extra
from midstream.store.jetstream.jetstream_address import JetStreamAddress
from midstream.store.jetstream.jetstream_errors import (
    FAILURES,
    BatchRefusedError,
    NoMessageError,
    NoStreamError,
    UnknownOutcomeError,
    error_of,
    refusal_of,
)

with extra("nats"):
    import nats.errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

T = TypeVar("T")

ANSWER_WITHIN_S = 2.0
"""Seconds for a server's answer; after that, the outcome of a write is unknown."""
READ_WITHIN_S = 10.0
"""Seconds for which a read is retried: longer than the election of a leader (4 to 6 s)."""
CONNECT_WITHIN_S = 5.0
RECONNECT_PAUSE_S = 0.1
PING_S = 2
"""Seconds between pings. After two unanswered pings, the connection moves to another server."""
PAGE_MESSAGES = 256
PAGE_BYTES = 4 * 2**20
LAG_PAUSE_S = 0.005
"""Seconds before a lagging replica is read again."""
BATCHES_MAX = 8
"""Concurrent batches of this process in one stream: a server accepts 50 of all its clients together."""
BATCH_TRIES_MAX = 100
BATCH_PAUSE_S = 0.02
"""Seconds before a refused batch is sent again."""
PING_WITHIN_S = 1.0
EXPECTED = "Nats-Expected-Last-Subject-Sequence"

_log = logging.getLogger(__name__)


class SubjectWrite(Struct, frozen=True):
    """A message to store.

    Args:
        expected: Sequence number of the last message of this subject; 0: there is none; None: any.
        is_only: Remove all older messages of the subject.
    """

    subject: str
    body: bytes
    expected: int | None = None
    is_only: bool = False

    def headers(self) -> dict[str, str]:
        """Return the headers with its conditions."""
        headers = {} if self.expected is None else {EXPECTED: str(self.expected)}
        if self.is_only:
            headers["Nats-Rollup"] = "sub"
        return headers


class StreamMessage(Struct, frozen=True, gc=False):
    """A message in a stream."""

    seq: int
    subject: str
    data: bytes = b""


class _ServerError(Struct, frozen=True):
    err_code: int = 0
    description: str = ""


class _Stored(Struct, frozen=True):
    seq: int = 0
    error: _ServerError | None = None


class _Found(Struct, frozen=True):
    message: StreamMessage | None = None
    error: _ServerError | None = None


class JetStreamLink:
    """The connection of one process.

    Args:
        on_connected: Called after each reconnection, because signals were missed.
    """

    def __init__(
        self, address: JetStreamAddress, world: World, *, on_connected: Callable[[], None] = lambda: None
    ) -> None:
        self.where = address.shown
        self.connected_at = 0.0
        """Time of the last connection, by the monotonic clock."""
        self.connections = 0
        """Number of connections so far: more than one after a loss."""
        self.info: dict[str, Any] = {}
        self._address = address
        self._world = world
        self._on_connected = on_connected
        self._client: Client | None = None
        self._inbox = ""
        self._tokens = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Msg] | asyncio.Queue[Msg | None]] = {}
        self._batches: dict[str, asyncio.Semaphore] = {}

    async def connect(self) -> None:
        """Connect to one of the servers.

        Raises:
            UsageError: The credentials are refused, or a file of the address cannot be read.
            StoreBusyError: No server can be reached.
        """
        client = Client()
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                await client.connect(
                    [*self._address.servers],
                    name="midstream",
                    allow_reconnect=True,
                    max_reconnect_attempts=2,  # until the first connection; then without limit
                    reconnect_time_wait=RECONNECT_PAUSE_S,  # type: ignore[arg-type]
                    connect_timeout=int(ANSWER_WITHIN_S),
                    ping_interval=PING_S,
                    disconnected_cb=self._lose,
                    reconnected_cb=self._return,
                    error_cb=_log_failure,
                    **self._credentials(),
                )
        except FAILURES as error:
            await client.close()
            raise refusal_of(error, self.where) from error
        client.options["max_reconnect_attempts"] = -1
        self._client = client
        self.info = dict(client._server_info)  # noqa: SLF001 - there is no other way to read it
        self.connected_at = self._world.monotonic()
        self.connections = 1
        self._inbox = client.new_inbox()
        await client.subscribe(f"{self._inbox}.*", cb=self._receive)

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        self._drop_waiting()
        if client is not None:
            await client.close()

    @property
    def is_open(self) -> bool:
        """Whether the link was connected and not closed."""
        return self._client is not None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._client is not None and bool(self._client.is_connected)

    # --- writes

    async def commit(self, stream: str, writes: Sequence[SubjectWrite]) -> int:
        """Store messages, all or none, and return the sequence number of the last one.

        Raises:
            SubjectMovedError: A condition does not hold.
            UnknownOutcomeError: There was no answer, so the outcome is unknown.
            MidstreamError: The server refused, or nothing was sent.
        """
        if not self.is_connected:
            raise StoreBusyError(f"{self.where} cannot be reached", retry_after_s=1.0)
        if len(writes) == 1:
            return await self._publish(writes[0], writes[0].headers())
        async with self._batches.setdefault(stream, asyncio.Semaphore(BATCHES_MAX)):
            for _ in range(BATCH_TRIES_MAX):
                with contextlib.suppress(BatchRefusedError):
                    return await self._publish_batch(writes)
                await self._world.sleep(BATCH_PAUSE_S * (1 + self._world.chance()))
        raise StoreBusyError(f"{self.where} takes no batch", retry_after_s=1.0)

    async def _publish_batch(self, writes: Sequence[SubjectWrite]) -> int:
        batch = self._world.new_id("batch")
        for number, write in enumerate(writes, start=1):
            headers = write.headers()
            headers["Nats-Batch-Id"] = batch
            headers["Nats-Batch-Sequence"] = str(number)
            if number == len(writes):
                headers["Nats-Batch-Commit"] = "1"
                return await self._publish(write, headers)
            try:
                await self._require_client().publish(write.subject, write.body, headers=headers)
            except FAILURES as error:  # a batch without its last message is dropped
                raise refusal_of(error, self.where) from error
        raise UsageError("a batch has at least one message")

    async def _publish(self, write: SubjectWrite, headers: dict[str, str]) -> int:
        answer = await self._request(write.subject, write.body, headers or None, within_s=ANSWER_WITHIN_S)
        stored = msgspec.json.decode(answer.data, type=_Stored)
        if stored.error is not None:
            raise error_of(stored.error.err_code, stored.error.description, self.where)
        return stored.seq

    async def tidy(self, stream: str, subject: str, *, below: int) -> None:
        """Do the same as `purge`, after a write that is valid without it; log a failure."""
        try:
            await self.purge(stream, subject, below=below)
        except MidstreamError as error:
            _log.warning("unneeded messages are left in %s: %s", stream, error.message)

    async def purge(self, stream: str, subject: str, *, below: int) -> None:
        """Remove the messages of a subject before this sequence number.

        Raises:
            MidstreamError: The server refused, or did not answer.
        """
        with self._requiring(stream):
            await self.api(f"STREAM.PURGE.{stream}", {"filter": subject, "seq": below})

    # --- reads

    async def api(self, operation: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of JetStream's API.

        Raises:
            NoMessageError: There is no such message.
            MidstreamError: The server refused, or did not answer for `READ_WITHIN_S`.
        """
        return await self.retry(lambda: self._call(operation, body, dict[str, Any]))

    async def retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Send a request that may be repeated, and retry while there is no leader, such as that of a new stream.

        Raises:
            MidstreamError: The server refused, or did not answer for `READ_WITHIN_S`.
        """
        deadline = self._world.monotonic() + READ_WITHIN_S
        while True:
            try:
                return await ask()
            except (UnknownOutcomeError, StoreBusyError) as error:
                if self._client is None or self._world.monotonic() > deadline:
                    raise StoreBusyError(f"{self.where}: {error}", retry_after_s=1.0) from error
                await self._world.sleep(RECONNECT_PAUSE_S)

    async def settle(self, read: Callable[[], Awaitable[T]]) -> T:
        """Run a read that shows whether a write has happened; retry as long as the servers cannot be reached.

        Raises:
            MidstreamError: The store was closed, or is damaged.
        """
        while True:
            try:
                return await read()
            except StoreBusyError as error:
                _log.debug("the outcome of a write is still unknown: %s", error.message)
                await self._world.sleep(RECONNECT_PAUSE_S)

    async def last(self, stream: str, subject: str) -> StreamMessage | None:
        """Return the last message of a subject, which may have wildcards, from the leader; None if there is none.

        Raises:
            MidstreamError: The server refused, or did not answer for `READ_WITHIN_S`.
        """
        return await self._message(stream, {"last_by_subj": subject})

    async def next(self, stream: str, subject: str, *, start: int) -> StreamMessage | None:
        """Return the first message of a subject at or after a sequence number, from the leader; None if there is none.

        Raises:
            MidstreamError: As `last`.
        """
        return await self._message(stream, {"seq": max(start, 1), "next_by_subj": subject})

    async def _message(self, stream: str, what: Mapping[str, Any]) -> StreamMessage | None:
        try:
            with self._requiring(stream):
                found = await self.retry(lambda: self._call(f"STREAM.MSG.GET.{stream}", what, _Found))
        except NoMessageError:
            return None
        return found.message

    async def page(self, stream: str, subject: str, *, start: int, until: int) -> list[StreamMessage]:
        """Return some messages of a subject from a sequence number on, in order; none at the end.

        Args:
            subject: It may have wildcards.
            start: The first sequence number.
            until: The leader's last sequence number; later messages may be returned, too.

        Raises:
            MidstreamError: The server refused, or did not answer for `READ_WITHIN_S`.
        """
        deadline = self._world.monotonic() + READ_WITHIN_S
        while start <= until:
            if found := await self.retry(lambda: self._page(stream, subject, start)):
                return found
            newest = await self.last(
                stream, subject
            )  # the message at `until` was removed, or this replica lags
            if newest is None or newest.seq < start:
                return []
            if self._world.monotonic() > deadline:
                raise StoreBusyError(f"a replica of {self.where} lags", retry_after_s=1.0)
            until = newest.seq
            await self._world.sleep(LAG_PAUSE_S)
        return []

    async def scan(self, stream: str, subject: str, *, start: int = 1) -> list[StreamMessage]:
        """Return all messages of a subject from a sequence number on, in order.

        Raises:
            MidstreamError: As `page`.
        """
        newest = await self.last(stream, subject)
        found: list[StreamMessage] = []
        while newest is not None and start <= newest.seq:
            page = await self.page(stream, subject, start=start, until=newest.seq)
            if not page:
                break
            found += page
            start = page[-1].seq + 1
        return found

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """Return the subjects that have messages, from the leader.

        Raises:
            MidstreamError: As `api`.
        """
        found: list[str] = []
        while True:
            info = await self.api(f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": len(found)})
            page = info["state"].get("subjects") or {}
            found += page
            if not page or len(found) >= info.get("total", 0):
                return found

    async def _page(self, stream: str, subject: str, start: int) -> list[StreamMessage]:
        body = {"seq": start, "next_by_subj": subject, "batch": PAGE_MESSAGES, "max_bytes": PAGE_BYTES}
        token, queue = str(next(self._tokens)), asyncio.Queue[Msg | None]()
        self._waiting[token] = queue
        found: list[StreamMessage] = []
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._require_client().publish(
                    f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(body), reply=f"{self._inbox}.{token}"
                )
                while True:
                    message = await queue.get()
                    if message is None:
                        break  # the connection was lost
                    headers = message.headers or {}
                    if "Nats-Subject" in headers:
                        found.append(
                            StreamMessage(
                                int(headers["Nats-Sequence"]), headers["Nats-Subject"], message.data
                            )
                        )
                    elif headers.get("Status") in {"204", "404"}:
                        return found
                    else:
                        break
        except TimeoutError:
            pass
        except nats.errors.Error as error:
            raise UnknownOutcomeError(str(error)) from error
        finally:
            del self._waiting[token]
        if not found:
            raise UnknownOutcomeError(f"no page of stream {stream}")
        return found

    async def _call(self, operation: str, body: Mapping[str, Any] | None, kind: type[T]) -> T:
        payload = b"" if body is None else msgspec.json.encode(body)
        answer = await self._request(f"$JS.API.{operation}", payload, None, within_s=ANSWER_WITHIN_S)
        found = msgspec.json.decode(answer.data, type=kind)
        error = found.get("error") if isinstance(found, dict) else getattr(found, "error", None)
        if error is not None:
            failed = msgspec.convert(error, _ServerError) if isinstance(error, dict) else error
            raise error_of(failed.err_code, failed.description, self.where)
        return found

    @contextlib.contextmanager
    def _requiring(self, stream: str) -> Iterator[None]:
        """Raise `StoreDamagedError` if a stream of the store was deleted: it must not count as empty."""
        try:
            yield
        except NoStreamError as error:
            raise StoreDamagedError(f"{self.where} lacks stream {stream!r}: restore it") from error

    # --- signals

    async def signal(self, subject: str, body: bytes = b"") -> None:
        """Send a message that is not stored to the current listeners. It may be lost."""
        if self.is_connected:
            try:
                await self._require_client().publish(subject, body)
            except FAILURES as error:
                _log.debug("a signal was not sent: %s", error)

    async def listen(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Receive the messages of a subject from now on.

        Raises:
            MidstreamError: The server cannot be reached.
        """
        try:
            return await self._require_client().subscribe(subject, cb=receive)
        except FAILURES as error:
            raise refusal_of(error, self.where) from error

    async def flush(self) -> None:
        """Wait until the server has received everything, such as a new subscription.

        Raises:
            MidstreamError: The server cannot be reached.
        """
        try:
            await self._require_client().flush(int(ANSWER_WITHIN_S))
        except FAILURES as error:
            raise refusal_of(error, self.where) from error

    async def ask(self, subject: str, body: bytes = b"", *, within_s: float = PING_WITHIN_S) -> bytes | None:
        """Return the answer of the process that listens on a subject; None if none does.

        Raises:
            UnknownOutcomeError: There was no answer.
        """
        try:
            answer = await self._request(subject, body, None, within_s=within_s)
        except StoreBusyError:
            return None
        return bytes(answer.data)

    # --- requests

    async def _request(
        self, subject: str, body: bytes, headers: dict[str, str] | None, *, within_s: float
    ) -> Msg:
        """Send a message, and return the answer.

        Raises:
            UnknownOutcomeError: There was no answer, so the outcome is unknown.
            MidstreamError: No server received the message.
        """
        client = self._require_client()
        if not client.is_connected:
            raise (
                UnknownOutcomeError("the connection is lost")
                if headers is None
                else StoreBusyError(f"{self.where} cannot be reached", retry_after_s=1.0)
            )
        token = str(next(self._tokens))
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer
        timer = self._world.later(within_s, lambda: _time_out(answer))
        try:
            await client.publish(subject, body, reply=f"{self._inbox}.{token}", headers=headers)
            message = await answer
        except (nats.errors.MaxPayloadError, nats.errors.OutboundBufferLimitError) as error:
            raise refusal_of(error, self.where) from error
        except FAILURES as error:
            raise UnknownOutcomeError(str(error) or "no answer") from error
        finally:
            timer.cancel()
            del self._waiting[token]
        if not message.data and (message.headers or {}).get("Status") == "503":
            raise StoreBusyError(f"{self.where} has no leader for {subject}", retry_after_s=1.0)
        return message

    async def _receive(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if isinstance(waiting, asyncio.Queue):
            waiting.put_nowait(message)
        elif waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def _lose(self) -> None:
        self._drop_waiting()

    async def _return(self) -> None:
        self.connected_at = self._world.monotonic()
        self.connections += 1
        self._on_connected()

    def _drop_waiting(self) -> None:
        for waiting in [*self._waiting.values()]:
            if isinstance(waiting, asyncio.Queue):
                waiting.put_nowait(None)
            elif not waiting.done():
                waiting.set_exception(nats.errors.ConnectionClosedError())

    def _require_client(self) -> Client:
        if self._client is None:
            raise UsageError("the store is not open: call `await store.open()` first")
        return self._client

    def _credentials(self) -> dict[str, Any]:
        address = self._address
        given: dict[str, Any] = {}
        for path in (address.credentials, address.ca):
            if path and not Path(path).is_file():
                raise UsageError(f"{path!r} in the URL of the store is not a file")
        if address.user:
            given |= {"user": address.user, "password": address.password}
        if address.credentials:
            given["user_credentials"] = address.credentials
        if address.is_tls:
            given["tls"] = ssl.create_default_context(cafile=address.ca or None)
        return given


def _time_out(answer: asyncio.Future[Msg]) -> None:
    if not answer.done():
        answer.set_exception(nats.errors.TimeoutError())


async def _log_failure(error: Exception) -> None:
    _log.debug("NATS: %s", str(error) or type(error).__name__)
