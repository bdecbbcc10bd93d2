"""Messages to a session of this process, and the events of the turn as a client of a server receives them.

A message is submitted as the first command of a stream of its own, so that a retry after a failure of the store is
accepted only once. Events are read from the journal, so that reading continues when the session is taken up again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import MidstreamError, SessionBusyError, UsageError
from midstream.history.messages import UserMessage
from midstream.protocol.events import Event, EventReader, completed_text
from midstream.protocol.frames import EventId, SendPayload, digest_of, encode_payload, secret_digest_of
from midstream.retries import RECONNECT_BACKOFF, STORE_ATTEMPTS_MAX
from midstream.session.journal_reading import JournalReader
from midstream.session.records import (
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    Record,
    StreamOpened,
    TurnEnded,
)
from midstream.session.session import Received
from midstream.session.turn.commands import SendMessage, WhenBusy
from midstream.store.contract import StoredRecord

PAGE_RECORDS = 500


class ConversationSessions(Protocol):
    """The methods of the host that this module uses."""

    world: World

    @property
    def is_draining(self) -> bool:
        """Whether the host refuses new work."""

    async def session(self, session_id: str, *, create: bool = False) -> Runner:
        """Return a session, awake."""


def payload_of(message: str | UserMessage, when_busy: WhenBusy | str) -> SendPayload:
    """Return the payload of a message.

    Raises:
        UsageError: `when_busy` is not valid.
    """
    user_message = UserMessage.of(message) if isinstance(message, str) else message
    try:
        return SendPayload(user_message.parts, when_busy=WhenBusy(when_busy))
    except ValueError as error:
        raise UsageError(f"{when_busy!r} is none of {', '.join(WhenBusy)}") from error


async def answer_of(session: str, events: AsyncGenerator[Event, None]) -> str:
    """Iterate to the end of a turn and return its answer; raises as `completed` does."""
    last: Event | None = None
    async with aclosing(events):
        async for event in events:
            last = event
    return completed_text(session, last)


async def turn_of(
    sessions: ConversationSessions, session: str, payload: SendPayload
) -> AsyncGenerator[Event, None]:
    """Send a message to a session and yield the events of the turn that it opens, as `Host.send` does."""
    world = sessions.world
    opening = Received(
        world.new_id("stream"),
        secret_digest_of(world.new_secret()),
        0,
        digest_of(encode_payload(payload)),
        SendMessage(UserMessage(payload.parts), when_busy=payload.when_busy),
    )
    turn = _Turn(opening)
    failures = 0
    while not turn.is_over:
        try:
            async with aclosing(_read_on(sessions, session, turn)) as events:
                async for event in events:
                    failures = 0
                    yield event
        except MidstreamError as error:
            failures += 1
            if isinstance(error, SessionBusyError):
                raise
            await pause_after(sessions, error, failures)


async def pause_after(sessions: ConversationSessions, error: MidstreamError, failures: int) -> None:
    """Wait before the next attempt, after a session has moved or its store was busy.

    Args:
        failures: Attempts that failed in a row.

    Raises:
        MidstreamError: `error`, if another attempt cannot succeed.
    """
    if error.retry not in {"now", "later"} or sessions.is_draining or failures > STORE_ATTEMPTS_MAX:
        raise error
    await sessions.world.sleep(RECONNECT_BACKOFF.wait_s(failures, chance=sessions.world.chance()))


class _Turn:
    """The state of a turn while its records are read.

    Args:
        opening: The message that opens the turn.
    """

    def __init__(self, opening: Received) -> None:
        self.opening = opening
        self.after: int | None = None
        """Position of the last record that was read; None before the message is in the journal."""
        self.is_over = False
        self._reader = JournalReader()
        self._reading = EventReader()
        self._is_begun = self._is_queued = False
        self._turn = 0

    def take(self, stored: StoredRecord) -> Event | None:
        """Return the event of a record; None for records before the message, and while the message is queued."""
        self.after = stored.position
        record = self._reader.read(stored.body)
        if not self._is_own(record):
            return None
        match record:
            case MessageAccepted() if record.stream == self.opening.stream:
                self._turn = record.turn
            case TurnEnded():
                self.is_over = record.turn == self._turn
            case MessageWithdrawn():
                self.is_over = record.stream == self.opening.stream
            case _:
                pass
        return self._reading.event(str(EventId(stored.epoch, stored.position)), record)

    def _is_own(self, record: Record) -> bool:
        is_own = getattr(record, "stream", None) == self.opening.stream
        if is_own and isinstance(record, MessageQueued | MessageAccepted):
            self._is_queued = isinstance(record, MessageQueued)
        self._is_begun = self._is_begun or (is_own and isinstance(record, StreamOpened))
        return self._is_begun and (is_own or not self._is_queued)


async def _read_on(sessions: ConversationSessions, session: str, turn: _Turn) -> AsyncGenerator[Event, None]:
    """Read the rest of the turn, as long as the session is awake under the same runner."""
    runner = await sessions.session(session, create=True)
    runner.attach()
    try:
        if turn.after is None:
            turn.after = await _submit(runner, turn.opening)
        async for stored in _records(runner, turn.after):
            event = turn.take(stored)
            if event is not None:
                yield event
            if turn.is_over:
                return
    finally:
        runner.detach()


async def _submit(runner: Runner, opening: Received) -> int:
    """Submit the message durably, and return the position before its first record."""
    end = await runner.submit(opening)
    await runner.wait(end - 1)  # another node has the session
    return runner.state.streams[opening.stream].since


async def _records(runner: Runner, after: int) -> AsyncIterator[StoredRecord]:
    while True:
        await runner.wait(after)
        for stored in await runner.read(after=after, limit=PAGE_RECORDS):
            after = stored.position
            yield stored


async def kept_records(
    runner: Runner, after: int, reader: JournalReader | None = None
) -> AsyncGenerator[tuple[StoredRecord, Record], None]:
    """Iterate over the present records after a position.

    Args:
        reader: The reader of the records before; not needed for a journal that is read from its beginning.
    """
    reader = reader or JournalReader()
    while page := await runner.read(after=after, limit=PAGE_RECORDS):
        for stored in page:
            yield stored, reader.read(stored.body)
        after = page[-1].position


async def follow(sessions: ConversationSessions, session: str, after: int) -> AsyncGenerator[Record, None]:
    """Iterate over the records of a session after a position. Continue when it moves or its store is busy.

    Raises:
        MidstreamError: The process shuts down, or the session cannot be read.
    """
    reader = JournalReader()
    async with aclosing(follow_pages(sessions, session, after)) as pages:
        async for page in pages:
            for stored in page:
                yield reader.read(stored.body)


async def follow_pages(
    sessions: ConversationSessions, session: str, after: int
) -> AsyncGenerator[Sequence[StoredRecord], None]:
    """Iterate as `follow` does, over pages of all present records. Before each wait the page is empty.

    Raises:
        MidstreamError: The process shuts down, or the session cannot be read.
    """
    failures = 0
    while True:
        try:
            runner = await sessions.session(session)
            runner.attach()
            try:
                while True:
                    page = await runner.read(after=after, limit=PAGE_RECORDS)
                    if page:
                        after, failures = page[-1].position, 0
                    yield page
                    if not page:
                        await runner.wait(after)
            finally:
                runner.detach()
        except MidstreamError as error:
            failures += 1
            await pause_after(sessions, error, failures)
