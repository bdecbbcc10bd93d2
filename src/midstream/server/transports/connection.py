"""One client connection over any transport, between a `ServerStream` and a session.

Three tasks share the stream. `_listen` receives the client's frames, and `_follow` sends new records of the journal.
`_watch_access` ends the connection when the client loses its access (a viewer of an encrypted session: `_watch_pass`).
A timer calls the stream at its deadlines. `_follow` reads the next records after the transport has taken the previous
ones: a slow reader needs no queue. The end of a connection does not stop its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Iterator, Sequence
from enum import Enum
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakValueDictionary

from starlette.requests import HTTPConnection

from midstream.engine.escrow_locks import SessionHold
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.environment import Cancellable, Fault
from midstream.errors import (
    DrainingError,
    EventGoneError,
    InternalError,
    JournalMovedError,
    MidstreamError,
    OverloadedError,
    ProtocolError,
    SessionNotFoundError,
)
from midstream.protocol.frames import HEARTBEAT_S, START, Close, Open, encode
from midstream.protocol.server_stream import Admit, FrameEncoding, Request, ServerStream, SnapshotDue, Submit
from midstream.protocol.stream_settings import StreamSettings
from midstream.server.api.problems import INTERNAL
from midstream.server.api.session_snapshot import SNAPSHOT_BYTES_MAX, body_within, snapshot_of
from midstream.server.auth.caller import Caller, UnauthenticatedCaller, attribute
from midstream.server.auth.principals import Action
from midstream.server.auth.session_unlocking import secrets_in, stream_digest_of, unlock
from midstream.server.limits import CONNECTIONS_MAX
from midstream.server.transports.client_calls import ConnectedCalls, ConnectedClients
from midstream.server.transports.disconnects import Presence
from midstream.server.transports.encoded_pages import EncodedEvents
from midstream.server.transports.frame_sending import FrameSending
from midstream.server.transports.stream_fencing import Notices
from midstream.session.session import fencing_error, notice_of

LAST_FRAME_S = 1.0
"""Seconds for the last frame, if the server ends the connection."""
NAMES_MAX = 10_000
"""Streams whose newest named connection, with its number, is kept in memory; about 2 MiB."""

_log = logging.getLogger(__name__)


class FrameTransport(Protocol):
    """Transport of the frames of one connection."""

    ends_with_turn: bool
    """Whether the connection ends with the turn of its stream, for a client that reads the body to its end."""
    gap_s: float
    """Seconds between two requests of one connection, if a connection consists of several; else 0."""

    @property
    def is_full(self) -> bool:
        """Whether the transport takes no more frames, like a poll's answer after its first frames."""

    async def receive(self) -> bytes | None:
        """Return the next frame of the client; None at the end. Cancellation loses no frame."""

    def send(self, frames: Sequence[bytes]) -> Awaitable[None]:
        """Send frames in order, and wait until the client can take more.

        Raises:
            OSError: The client has disconnected.
        """


class OpenStream(Protocol):
    """A connection that the server counts and can end."""

    @property
    def place(self) -> tuple[str, str]:
        """The session and its stream key; "" for a reader."""

    def end(self, error: MidstreamError) -> None:
        """End the connection. Idempotent."""


class Connections:
    """The open connections of one process: their number, and the current one of each stream.

    The name and the number of the newest connection of a stream are stored also when it has no open request, so that
    older connections are refused. A connection over plain HTTP consists of several requests with its name.

    Args:
        limit: Number of connections that may be open.
        settings: Settings of streams; may be replaced at any time.
    """

    def __init__(self, *, limit: int = CONNECTIONS_MAX, settings: StreamSettings | None = None) -> None:
        self.settings = settings or StreamSettings()
        self._limit = limit
        self._open: set[OpenStream] = set()
        self._senders: dict[tuple[str, str], list[Connection]] = {}
        """The current connection of each stream, or its open requests, which have one name."""
        self._names: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self._settings_by_name: OrderedDict[tuple[str, str], StreamSettings] = OrderedDict()
        """Settings in the welcome of each named connection, by session and name."""
        self._under_way: dict[tuple[str, str], list[int]] = {}
        """Unanswered commands of each stream that were sent in separate requests."""
        self._ending: MidstreamError | None = None
        self._copies: WeakValueDictionary[tuple[str, FrameEncoding], EncodedEvents] = WeakValueDictionary()
        self._presence: Presence | None = None
        self.connected_clients = ConnectedClients()
        self.notices = Notices()
        """Notices to other processes about connections of this one."""
        self.ahead = 0
        """Number of clients that had a later event than the journal's end (STREAM-100)."""

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: OpenStream) -> None:
        """Count a connection.

        Raises:
            OverloadedError: The limit is reached.
            DrainingError: The server is shutting down.
        """
        if self._ending is not None:
            raise self._ending.again()
        if len(self._open) >= self._limit:
            message = f"this server has {self._limit} open streams, its limit"
            raise OverloadedError(message, retry_after_s=5.0)
        self._open.add(connection)

    def leave(self, connection: OpenStream) -> None:
        """Remove a connection."""
        self._open.discard(connection)
        senders = self._senders.get(connection.place, [])
        if any(each is connection for each in senders):
            senders[:] = [each for each in senders if each is not connection]
            if not senders:
                del self._senders[connection.place]

    def fence(self, connection: Connection) -> None:
        """Make an admitted connection the current one of its stream; end older ones (STREAM-8, STREAM-50).

        A second request of an open connection was duplicated by a network, and ends no connection.

        Raises:
            StreamFencedError: The request belongs to a connection that was fenced between two requests.
        """
        place = connection.place
        senders = [each for each in self._senders.get(place, []) if each is not connection]
        _, newest = self._names.get(place, ("", 0))
        if any(map(connection.is_before, senders)) or 0 < connection.number < newest:
            connection.end(fencing_error())
            return
        if connection.is_continued:
            self.check(place, connection.name, connection.number)
        if connection.name or connection.number > 1 or place in self._names:  # no number is lower than 1
            self._names[place] = connection.name, max(connection.number, newest)
            self._names.move_to_end(place)
            if len(self._names) > NAMES_MAX:
                self._names.popitem(last=False)
        same = [each for each in senders if connection.name and each.name == connection.name]
        self._senders[place] = [*same, connection]
        for older in senders:
            if older not in same:
                older.end(fencing_error())

    def check(self, place: tuple[str, str], name: str, number: int) -> None:
        """Require that no newer connection of the stream is known here: by number, and by name if there is one.

        If the client numbers its connections, a lower number belongs to an older one, although this server has no newer
        one: that was opened at another server (STREAM-101).

        Raises:
            StreamFencedError: A newer connection is known.
        """
        spoke, newest = self._names.get(place, (name, 0))
        if 0 < number < newest or (name and spoke != name and not 0 < newest < number):
            raise fencing_error()

    def settings_of(self, session_id: str, name: str) -> StreamSettings:
        """Return the settings of a connection with several requests: those of its welcome.

        A connection without a name, or of another server, gets the current settings.
        """
        return self._settings_by_name.get((session_id, name), self.settings)

    def choose_settings(self, session_id: str, name: str) -> StreamSettings:
        """Return the settings of a new connection, and store them for its further requests."""
        if name:
            self._settings_by_name[session_id, name] = self.settings
            self._settings_by_name.move_to_end((session_id, name))
            if len(self._settings_by_name) > NAMES_MAX:
                self._settings_by_name.popitem(last=False)
        return self.settings

    @contextlib.contextmanager
    def under_way(self, place: tuple[str, str], seqno: int, *, most: int) -> Iterator[None]:
        """Count a command of a separate request until its answer (STREAM-56).

        Raises:
            ProtocolError: More than `most` commands of its stream wait for their answers.
        """
        waiting = self._under_way.setdefault(place, [])
        waiting.append(seqno)
        try:
            if len({*waiting}) > most:
                raise ProtocolError(f"more than {most} commands wait for their acks")
            yield
        finally:
            waiting.remove(seqno)
            if not waiting:
                self._under_way.pop(place, None)

    def hang_up(self, place: tuple[str, str], name: str, secret: str) -> None:
        """End a connection of this process that its client closed by a separate request."""
        for sender in self._senders.get(place, []):
            if sender.name == name and sender.is_opened_with(secret):
                sender.hang_up()

    def stream(
        self,
        host: Host,
        *,
        wire: FrameEncoding | None = None,
        settings: StreamSettings | None = None,
        headers: Open | None = None,
    ) -> ServerStream:
        """Create the protocol endpoint for a new connection, with the given or the current settings."""
        now = host.world.monotonic()
        return ServerStream.under(
            settings or self.settings,
            stalls=host.agent.stalls,
            retention=host.retention,
            wire=wire,
            headers=headers,
            now=now,
        )

    def encoded_events_of(self, runner: Runner, wire: FrameEncoding) -> EncodedEvents:
        """Return the encoded events that readers of a session share, for one frame encoding."""
        copies = self._copies.get((runner.session_id, wire))
        if copies is None or copies.runner is not runner:
            copies = self._copies[runner.session_id, wire] = EncodedEvents(runner, wire)
        return copies

    def presence(self, host: Host) -> Presence:
        """Return the presence of a host's clients."""
        if self._presence is None:
            self._presence = Presence(host)
        return self._presence

    def drain(self, error: DrainingError) -> None:
        """End all connections, and refuse new ones."""
        self._ending = error
        if self._presence is not None:
            self._presence.stop()
        self.notices.stop()
        for connection in [*self._open]:
            connection.end(error)


class _Stage(Enum):
    """State of a connection."""

    OPENING = "opening"
    ADMITTED = "admitted"
    OVER = "over"


class Connection:
    """Serves one client: enter it with `with`, then `await run()`. `admit()` before it raises refusals.

    Entering raises the errors of `Connections.enter`. Leaving releases the counted place and the session.

    Args:
        name: The client's name of a connection with several requests; "" for a single request.
        is_continued: Whether this is a later request of the named connection.
        request: The HTTP request; its headers may contain a viewer token.
    """

    def __init__(
        self,
        host: Host,
        session_id: str,
        stream: ServerStream,
        transport: FrameTransport,
        among: Connections,
        caller: Caller | None = None,
        *,
        name: str = "",
        is_continued: bool = False,
        request: HTTPConnection | None = None,
    ) -> None:
        self.name = name
        self.is_continued = is_continued
        self._host = host
        self._world = host.world
        self._session_id = session_id
        self._stream = stream
        self._transport = transport
        self._sending = FrameSending(transport, stream.frames_to_send, host.world)
        self._among = among
        self._caller = caller or UnauthenticatedCaller()
        self._request = request or HTTPConnection({"type": "http", "headers": []})
        self._holding: contextlib.ExitStack | None = None
        """Keeps an encrypted session open."""
        self._runner: Runner | None = None
        self._mark: bytes | None = None
        """The mark of presence, if the turn has to stop without its client."""
        self._stage = _Stage.OPENING
        self.has_sent_turn = False
        """Whether the turn of its stream was sent completely (STREAM-27)."""
        self._calls: ConnectedCalls | None = None
        """Calls at the client, if the client was admitted with a stream."""
        self._alarm: Cancellable | None = None
        self._waiter: asyncio.Future[None] | None = None
        """The future that `_follow` waits for, when it has sent everything."""
        self._limit: asyncio.Timeout | None = None
        """Ends `_listen`."""

    def __enter__(self) -> Self:
        self._caller.enter()
        try:
            self._among.enter(self)
        except MidstreamError:
            self._caller.leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._among.leave(self)
        if self._calls is not None:
            self._calls.leave()
        self._caller.leave()
        if self._runner is not None:
            self._runner.detach()
        if self._mark is None:
            self._release()
            return
        after_s = self._stream.cancels_after_s
        after_s = None if after_s is None else max(after_s, self._transport.gap_s)
        left = self._among.presence(self._host).leave(self.place, self._mark, after_s)
        left.add_done_callback(lambda _: self._release())  # stopping the turn needs the session until then

    def _now(self) -> float:
        return self._world.monotonic()

    @property
    def is_gone(self) -> bool:
        """Whether the client has disconnected or stopped reading."""
        return self._sending.is_gone

    def _release(self) -> None:
        if self._holding is not None:
            self._holding.close()

    @property
    def place(self) -> tuple[str, str]:
        """The session and the stream key."""
        return self._session_id, self._stream.stream

    @property
    def number(self) -> int:
        """The client's number of the connection; 0 without one."""
        return self._stream.connection

    def is_opened_with(self, secret: str) -> bool:
        """Whether the client opened the stream with this secret."""
        return self._stream.is_opened_with(secret)

    def is_before(self, other: Connection) -> bool:
        """Whether the client numbered this connection before another one of the stream."""
        return self._stream.is_before(other._stream)

    def end(self, error: MidstreamError) -> None:
        """End the connection with an `error` frame. Idempotent."""
        self._stream.fail(error, now=self._now())
        self._finish()

    def hang_up(self) -> None:
        """Handle a `close` of the client from a separate request. Idempotent."""
        self._stream.receive(encode(Close()), now=self._now())
        self._finish()

    @property
    def is_turn_over(self) -> bool:
        """Whether the turn of its stream has ended and was sent completely."""
        return self._runner is not None and self._stream.is_turn_over(self._runner.state)

    async def admit(self, body: bytes) -> None:
        """Handle the client's `open` before anything is sent.

        Raises:
            MidstreamError: The `open` is refused.
        """
        self._stream.receive(body, now=self._now())
        for request in self._stream.requests():
            await self._do(request)
        if self._stream.failure is not None:
            raise self._stream.failure.again()

    async def run(self) -> MidstreamError | None:
        """Serve until the connection ends; return the error with which the server ended it, if any.

        After None the client has disconnected, sent `close`, or received its whole turn.
        """
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(self._follow())]
            if self._caller.is_known:
                loops.append(group.create_task(self._watch_access()))
            self._set_alarm()
            try:
                async with asyncio.timeout(None) as self._limit:
                    await self._listen()
            except TimeoutError:
                if self._stage is not _Stage.OVER:
                    raise
            finally:
                self._limit = None
                if self._alarm is not None:
                    self._alarm.cancel()
            for loop in loops:
                loop.cancel()
        await self._send_last_frames()
        return self._stream.failure

    def _finish(self) -> None:
        if self._stage is _Stage.OVER:
            return
        self._stage = _Stage.OVER
        if self._limit is not None:
            self._limit.reschedule(0.0)

    # --- the loops ---------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        await self._settle()
        await self._greet()
        while self._stage is not _Stage.OVER:
            body = await self._transport.receive()
            if body is None:
                self._sending.is_gone = True
                self._finish()
                return
            try:
                self._caller.count_frame()
            except MidstreamError as error:
                self.end(error)
                return
            self._stream.receive(body, now=self._now())
            await self._settle()

    async def _greet(self) -> None:
        """Send the welcome, and the events in memory, in one packet with the head of the answer."""
        runner, stream = self._runner, self._stream
        if runner is None or stream.snapshot_due is not None or stream.is_fenced_by(runner.state):
            return
        if runner.newest.position > stream.cursor:
            page = self._among.encoded_events_of(runner, stream.wire).page_after(stream.cursor)
            if page is not None:
                stream.pass_on(page, now=self._now())
        await self._flush()

    async def _follow(self) -> None:
        # A task of its own: waking the server's task would resume a chain of awaiting coroutines each time.
        while self._stage is _Stage.OPENING:
            await self._until(asyncio.get_running_loop().create_future())
        if self._runner is None:
            return
        try:
            await self._send_all_of(self._runner)
        except JournalMovedError:  # by another process
            self.end(SessionNotFoundError(f"session {self._session_id!r} was deleted"))
        except MidstreamError as error:
            self.end(error)
        else:
            self._finish()

    async def _send_all_of(self, runner: Runner) -> None:
        """Send all events, then new ones; raise the error that ends the session here."""
        stream, journal, coalesce_s = self._stream, runner.events, self._stream.coalesce_s
        copies = self._among.encoded_events_of(runner, stream.wire)
        is_numbered = self.number > 0  # only numbered connections can be fenced by the journal
        while self._stage is not _Stage.OVER:
            if is_numbered and stream.is_fenced_by(runner.state):
                raise fencing_error()
            if stream.snapshot_due is not None:
                await self.show_due()
            if journal.newest.position > stream.cursor:
                page = copies.page_after(stream.cursor)
                if page is not None:
                    stream.pass_on(page, now=self._now())
                    await self._flush()
                    continue
                await self._flush()
                try:
                    await copies.read(stream.cursor)
                except EventGoneError:  # pruned before this reader received it
                    stream.lose(journal.pruned_to, now=self._now())
            elif self._transport.ends_with_turn and self.is_turn_over:
                await self._flush()
                self.has_sent_turn = True
                return
            elif stream.has_frames:
                await self._flush()
            elif journal.ended is not None:
                raise journal.ended.again()
            else:
                news = journal.expect()
                try:
                    await self._until(news)
                finally:
                    journal.stop_waiting(news)
                if coalesce_s > 0 and journal.newest.position > stream.cursor:
                    await self._world.sleep(coalesce_s)

    def _until(self, woken: asyncio.Future[None]) -> asyncio.Future[None]:
        """Register a future that `_wake` also completes, and return it."""
        self._waiter = woken
        return woken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def show_due(self) -> None:
        """Queue a snapshot, if one is due.

        Raises:
            RecordUndecodableError: The beginning of the journal cannot be read.
        """
        if self._runner is None or self._stream.snapshot_due is None:
            return
        if self._stream.snapshot_due is SnapshotDue.BEGINNING:
            event_id, state = await self._runner.events.beginning()
            waits_for = ""
        else:
            event_id, state = self._runner.newest, self._runner.state
            waits_for = self._host.awake.waits_for(self._runner)
        snapshot = snapshot_of(self._caller.public_name(self._session_id), state, str(event_id), waits_for)
        self._stream.show(state, event_id, body_within(snapshot, SNAPSHOT_BYTES_MAX), now=self._now())

    def _check_clock(self) -> None:
        """Handle due deadlines, and set the next alarm."""
        now = self._now()
        if not self._sending.is_sending:
            if self._runner is not None and (outage := self._runner.outage) is not None:
                self.end(outage)  # instead of a heartbeat: without space there are no events
            self._meet_deadline(now)
            if self._calls is not None and self._runner is not None:
                self._calls.end_overdue(self._runner, self._stream.stream)
            if self._stream.is_closed:
                self._finish()
            else:
                self._wake()
        elif now >= self._sending.late_at:
            _log.info("a client stopped reading", extra={"session": self._session_id})
            self._sending.is_gone = True
            self._finish()
        self._set_alarm()

    def _set_alarm(self) -> None:
        now = self._now()
        self._alarm = self._world.later(max(self._next_check_at(now) - now, 0.0), self._check_clock)

    async def _watch_access(self) -> None:
        self.end(await self._caller.until_unauthorized())

    async def _watch_pass(self, held: SessionHold) -> None:
        self.end(await held.until_withdrawn())

    def _next_check_at(self, now: float) -> float:
        if self._sending.is_sending:
            return self._sending.late_at
        deadline = self._stream.next_deadline()
        return deadline.at if deadline else now + HEARTBEAT_S

    # --- shared by the tasks ----------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Carry out the requests of the stream in order, and send the resulting frames."""
        while requests := self._stream.requests():
            for request in requests:
                await self._do(request)
                if isinstance(request, Submit):
                    await self._flush()
        self._meet_deadline(self._now())
        if self._stream.is_closed:
            self._finish()
        elif self._sending.is_sending:  # read no more commands until the client reads
            await self._flush()
        else:
            self._wake()

    async def _do(self, request: Request) -> None:
        match request:
            case Admit():
                try:
                    with self._convert_errors():
                        await self._admit(request)
                except MidstreamError as error:
                    self._stream.fail(error, now=self._now())
            case Submit():
                assert self._runner is not None
                command = request.received.command
                try:
                    if not self._runner.state.has_accepted(request.received):
                        self._caller.count_command(command)
                        self._caller.trail.note_command(command)
                    with self._convert_errors():
                        await self._runner.submit(await attribute(self._caller, request.received))
                except MidstreamError as error:
                    self._caller.trail.note_refused_command(command, error.code)
                    self._stream.refuse(request.seqno, error, now=self._now())
                else:
                    self._world.reach(Fault.BEFORE_ACK)
                    self._stream.acknowledge(request.seqno, now=self._now())

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert a defect into an error frame, so that the client does not see a lost connection."""
        try:
            yield
        except MidstreamError:
            raise
        except Exception as error:
            _log.exception("a defect stopped a request", extra={"session": self._session_id})
            raise InternalError(INTERNAL) from error

    async def _admit(self, request: Admit) -> None:
        # A stream may begin a session, unless its client already has events of it. The first command may come after the
        # second request of the connection.
        has_seen_none = request.event_id is None or request.event_id == START
        is_new = bool(request.open.stream) and (has_seen_none or self.is_continued)
        if is_new:
            await self._caller.begin()
        elif request.open.stream:
            await self._caller.require(Action.SEND)
        digest = await self._unlock(request.open, is_new=is_new)
        runner = await self._host.session(self._session_id, create=is_new)
        epoch_at = None
        if request.event_id is not None and request.event_id.position > 0:
            epoch_at = await runner.events.epoch_at(request.event_id.position)
        self._stream.admit(
            runner.state,
            epoch_at=epoch_at,
            pruned_to=runner.events.pruned_to,
            secret_digest=digest,
            now=self._now(),
        )
        if not self._stream.is_admitted:
            return
        if request.event_id is not None and request.event_id.position > runner.newest.position:
            self._among.ahead += 1
            what = "a client has the event %s, and the journal ends with %s: cut, set back, or lost with the power"
            _log.warning(what, request.event_id, runner.newest, extra={"session": self._session_id})
        self._runner = runner
        runner.attach()
        if self._stream.stream:
            self._among.fence(self)
            self._write_notice(runner)
            self._calls = ConnectedCalls(
                self._among.connected_clients, self.place, self._transport.gap_s, self._world
            )
        presence = self._among.presence(self._host)
        if self._stream.cancels_after_s is not None or presence.has_mark(self.place):
            self._mark = await presence.arrive(self.place)
        if self._alarm is not None:  # a heartbeat may be due before the old deadline of the `open`
            self._alarm.cancel()
            self._set_alarm()
        if self._stage is _Stage.OPENING:
            self._stage = _Stage.ADMITTED
        self._wake()

    def _write_notice(self, runner: Runner) -> None:
        """Inform other processes, which may have older connections, that this one has the stream."""
        if self._stage is not _Stage.OVER and (self._host.has_peers or runner.is_following):
            notice = notice_of(runner.state, self._stream.stream, self.number)
            if notice is not None:
                self._among.notices.give(self._host, self._session_id, notice)

    async def _unlock(self, opening: Open, *, is_new: bool) -> str | None:
        """Decrypt the session with the client's secret; return the digest that replaces the secret in its streams."""
        shown = secrets_in(self._request, opening)
        action = Action.SEND if opening.stream else Action.READ
        with contextlib.ExitStack() as stack:
            opened = await unlock(self._host, self._session_id, shown, action, begins=is_new)
            held = stack.enter_context(opened)
            if held is None:
                return None
            if held.is_viewer:
                looking = self._world.spawn(self._watch_pass(held), name=f"viewer of {self._session_id}")
                stack.callback(looking.cancel)
            self._holding = stack.pop_all()
        return stream_digest_of(held)

    def _meet_deadline(self, now: float) -> None:
        deadline = self._stream.next_deadline()
        if deadline is None or now < deadline.at:
            return
        newest, waits_on = START, "nothing"
        if self._runner is not None:
            newest, waits_on = self._runner.newest, self._host.awake.waits_for(self._runner)
        self._stream.handle_deadline(newest=newest, waiting_on=waits_on, now=now)

    async def _flush(self) -> None:
        """Send the queued frames; return when the client has taken them."""
        await self._sending.flush()
        if self.is_gone or self._stream.is_closed or self._transport.is_full:
            self._finish()

    async def _send_last_frames(self) -> None:
        if self.is_gone:
            return
        try:
            async with asyncio.timeout(LAST_FRAME_S):
                await self._flush()
        except TimeoutError:
            _log.debug("a client did not take the last frame", extra={"session": self._session_id})
