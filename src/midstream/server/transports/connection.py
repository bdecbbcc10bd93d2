"""One client connection, whatever carries it: a `ServerStream` on one side, a live session on the other.

Three loops share one stream: `_listen` takes the client's frames, `_follow` sends what the journal gained, and
`_keep_door` ends it when the client may no longer be here (a viewer of an encrypted session: `_keep_lock`); an alarm
calls the stream at its deadlines. Nothing is queued: `_follow` reads the next records only after the transport has
taken those before, so that a slow reader costs its position and one write. A connection that ends, for whatever reason,
cancels nothing of the turn.
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
from midstream.server.auth.caller import Caller, Stranger, attribute
from midstream.server.auth.principals import Action
from midstream.server.auth.unlocking import secrets_in, stream_digest_of, unlock
from midstream.server.limits import CONNECTIONS_MAX
from midstream.server.transports.client_calls import ClientStays, ConnectedCalls
from midstream.server.transports.disconnects import Presence
from midstream.server.transports.encoded_pages import Copies
from midstream.server.transports.frame_sending import FrameSending
from midstream.server.transports.stream_fencing import Notices
from midstream.session.session import fencing_error, notice_of

LAST_WORDS_S = 1.0
"""Seconds for the last frame of a connection that the server ends."""
NAMES_MAX = 10_000
"""Streams of which it is remembered which named connection spoke last, and its number; about 2 MiB."""

_log = logging.getLogger(__name__)


class FrameTransport(Protocol):
    """Transport of the frames of one connection."""

    ends_with_turn: bool
    """Whether it is over when the turn of its stream is, as a body is that a client reads to its end."""
    gap_s: float
    """Seconds that may be between it and the next one of the same connection, where a connection is several; else 0."""

    @property
    def is_full(self) -> bool:
        """Whether it is over because it takes no more, as a whole answer is once it has frames."""

    async def receive(self) -> bytes | None:
        """Return the next frame of the client; None when it has gone. Cancelling loses no frame."""

    def send(self, frames: Sequence[bytes]) -> Awaitable[None]:
        """Send frames in order; it is done when the client may take more.

        Raises:
            OSError: The client has gone.
        """


class OpenStream(Protocol):
    """A stream to a client, as the server counts and ends it."""

    @property
    def place(self) -> tuple[str, str]:
        """The session, and the stream of the protocol that it speaks for; "" for none."""

    def end(self, error: MidstreamError) -> None:
        """End it. Calling it again is harmless."""


class Connections:
    """The open connections of one process: how many there are, and which one speaks for each stream.

    A connection over plain HTTP is several requests, which show its name; the newest name is stored between them, so
    that the requests of an older connection are refused.

    Args:
        limit: How many may be open at once.
        settings: How streams are served; may be replaced at any time.
    """

    def __init__(self, *, limit: int = CONNECTIONS_MAX, settings: StreamSettings | None = None) -> None:
        self.settings = settings or StreamSettings()
        self._limit = limit
        self._open: set[OpenStream] = set()
        self._speakers: dict[tuple[str, str], list[Connection]] = {}
        """Who speaks for each stream: one connection, or several requests that show one name."""
        self._names: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self._told: OrderedDict[tuple[str, str], StreamSettings] = OrderedDict()
        """Settings in the welcome of a named connection, by its session and its name."""
        self._under_way: dict[tuple[str, str], list[int]] = {}
        """Commands of each stream that came in requests of their own and are not answered yet."""
        self._ending: MidstreamError | None = None
        self._copies: WeakValueDictionary[tuple[str, FrameEncoding], Copies] = WeakValueDictionary()
        self._presence: Presence | None = None
        self.stays = ClientStays()
        self.notices = Notices()
        """Data of the connections here that other processes need."""
        self.ahead = 0
        """How often a client showed an event that is behind the end here (STREAM-100)."""

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: OpenStream) -> None:
        """Count a connection, if there is room for it.

        Raises:
            OverloadedError: As many are open as are allowed.
            DrainingError: All are being ended.
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
        speakers = self._speakers.get(connection.place, [])
        if any(each is connection for each in speakers):
            speakers[:] = [each for each in speakers if each is not connection]
            if not speakers:
                del self._speakers[connection.place]

    def fence(self, connection: Connection) -> None:
        """Let an admitted connection speak for its stream; older ones are ended (STREAM-8, STREAM-50).

        A request with the name of an open one was duplicated by a network: it ends no connection.

        Raises:
            StreamFencedError: It is one request more of a connection that was fenced between two of them.
        """
        place = connection.place
        speakers = [each for each in self._speakers.get(place, []) if each is not connection]
        _, newest = self._names.get(place, ("", 0))
        if any(map(connection.is_before, speakers)) or 0 < connection.number < newest:
            connection.end(fencing_error())
            return
        if connection.is_continued:
            self.check(place, connection.name, connection.number)
        if connection.name or place in self._names:
            self._names[place] = connection.name, connection.number
            self._names.move_to_end(place)
            if len(self._names) > NAMES_MAX:
                self._names.popitem(last=False)
        same = [each for each in speakers if connection.name and each.name == connection.name]
        self._speakers[place] = [*same, connection]
        for older in speakers:
            if older not in same:
                older.end(fencing_error())

    def check(self, place: tuple[str, str], name: str, number: int) -> None:
        """Let a request of a named connection pass if no newer one speaks for its stream, as far as is known here.

        Where its client counts, another name with a lower number is that of an older connection: the newer one was
        opened at another server (STREAM-101).

        Raises:
            StreamFencedError: A newer one does.
        """
        spoke, newest = self._names.get(place, (name, 0))
        if spoke != name and not 0 < newest < number:
            raise fencing_error()

    def settings_of(self, session_id: str, name: str) -> StreamSettings:
        """Return how a connection of several requests is served: as in its welcome, whatever was changed since.

        One that shows no name, or was made at another server, is served as the settings are now.
        """
        return self._told.get((session_id, name), self.settings)

    def choose_settings(self, session_id: str, name: str) -> StreamSettings:
        """Return how a new connection is served, and keep it for the other requests that show its name."""
        if name:
            self._told[session_id, name] = self.settings
            self._told.move_to_end((session_id, name))
            if len(self._told) > NAMES_MAX:
                self._told.popitem(last=False)
        return self.settings

    @contextlib.contextmanager
    def under_way(self, place: tuple[str, str], seqno: int, *, most: int) -> Iterator[None]:
        """Count a command that came in a request of its own, until it is answered (STREAM-56).

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
        """End a connection that its client closed by a request of its own, where it is open here."""
        for speaker in self._speakers.get(place, []):
            if speaker.name == name and speaker.is_opened_with(secret):
                speaker.hang_up()

    def stream(
        self,
        host: Host,
        *,
        wire: FrameEncoding | None = None,
        settings: StreamSettings | None = None,
        headers: Open | None = None,
    ) -> ServerStream:
        """Make the half of the protocol for a new connection, as the settings are now, or as these are."""
        now = host.world.monotonic()
        return ServerStream.under(
            settings or self.settings,
            stalls=host.agent.stalls,
            retention=host.retention,
            wire=wire,
            headers=headers,
            now=now,
        )

    def copies_of(self, runner: Runner, wire: FrameEncoding) -> Copies:
        """Return what the readers of a session share whose frames are written down in one way."""
        copies = self._copies.get((runner.session_id, wire))
        if copies is None or copies.runner is not runner:
            copies = self._copies[runner.session_id, wire] = Copies(runner, wire)
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
    """How far a connection has come."""

    OPENING = "opening"
    ADMITTED = "admitted"
    OVER = "over"


class Connection:
    """Serve one client: `with` it, `await run()` (after `admit()`, to learn first whether the client is admitted).

    Entering raises what `Connections.enter` raises; leaving gives its place and its session back.

    Args:
        name: What a client calls a connection that is several requests; "" for one that is whole.
        is_continued: This is not the first request of the named connection.
        request: What it came by; its headers may have a viewer's word.
    """

    def __init__(
        self,
        host: Host,
        session_id: str,
        stream: ServerStream,
        transport: FrameTransport,
        among: Connections,
        visitor: Caller | None = None,
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
        self._visitor = visitor or Stranger()
        self._request = request or HTTPConnection({"type": "http", "headers": []})
        self._holding: contextlib.ExitStack | None = None
        """What keeps its session open, where a client holds the key of it."""
        self._runner: Runner | None = None
        self._mark: bytes | None = None
        """That it is here, where its turn is not to go on without its client."""
        self._stage = _Stage.OPENING
        self.has_told_turn = False
        """Whether it ended because the turn of its stream was sent to the end (STREAM-27)."""
        self._calls: ConnectedCalls | None = None
        """The calls at its client, once the client was admitted with a stream."""
        self._alarm: Cancellable | None = None
        self._rest: asyncio.Future[None] | None = None
        """What `_follow` waits for, where it has sent all there is."""
        self._limit: asyncio.Timeout | None = None
        """What cuts `_listen` off."""

    def __enter__(self) -> Self:
        self._visitor.enter()
        try:
            self._among.enter(self)
        except MidstreamError:
            self._visitor.leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._among.leave(self)
        if self._calls is not None:
            self._calls.leave()
        self._visitor.leave()
        if self._runner is not None:
            self._runner.detach()
        if self._mark is None:
            self._release()
            return
        after_s = self._stream.cancels_after_s
        after_s = None if after_s is None else max(after_s, self._transport.gap_s)
        left = self._among.presence(self._host).leave(self.place, self._mark, after_s)
        left.add_done_callback(lambda _: self._release())  # the turn may have to be stopped until then

    def _now(self) -> float:
        return self._world.monotonic()

    @property
    def is_gone(self) -> bool:
        """Whether the client has gone or stopped reading."""
        return self._sending.is_gone

    def _release(self) -> None:
        if self._holding is not None:
            self._holding.close()

    @property
    def place(self) -> tuple[str, str]:
        """The session and the stream it speaks for."""
        return self._session_id, self._stream.stream

    @property
    def number(self) -> int:
        """How the client numbered it; 0 where it does not count its connections."""
        return self._stream.connection

    def is_opened_with(self, secret: str) -> bool:
        """Whether the client showed this secret when it opened the stream it speaks for."""
        return self._stream.is_opened_with(secret)

    def is_before(self, other: Connection) -> bool:
        """Whether the client made it before the other one of the same stream, and numbered it so."""
        return self._stream.is_before(other._stream)

    def end(self, error: MidstreamError) -> None:
        """End it with an `error` frame. Calling it again is harmless."""
        self._stream.fail(error, now=self._now())
        self._finish()

    def hang_up(self) -> None:
        """Take the client's `close`, which came another way. Calling it again is harmless."""
        self._stream.receive(encode(Close()), now=self._now())
        self._finish()

    @property
    def is_turn_over(self) -> bool:
        """Whether the turn of its stream has ended and was sent to the end."""
        return self._runner is not None and self._stream.is_turn_over(self._runner.state)

    async def admit(self, body: bytes) -> None:
        """Take the client's `open` before anything is sent.

        Raises:
            MidstreamError: It is refused.
        """
        self._stream.receive(body, now=self._now())
        for request in self._stream.requests():
            await self._do(request)
        if self._stream.failure is not None:
            raise self._stream.failure.again()

    async def run(self) -> MidstreamError | None:
        """Serve until the client goes or the stream closes; return why the server ended it, if it did.

        After None the client has gone, sent `close`, or got its turn to the end.
        """
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(self._follow())]
            if self._visitor.is_known:
                loops.append(group.create_task(self._keep_door()))
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
        """Let `run` come to its end."""
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
                self._visitor.count_frame()
            except MidstreamError as error:
                self.end(error)
                return
            self._stream.receive(body, now=self._now())
            await self._settle()

    async def _greet(self) -> None:
        """Send the welcome and what is in memory with the head of the answer, in one packet."""
        runner, stream = self._runner, self._stream
        if runner is None or stream.snapshot_due is not None or stream.is_fenced_by(runner.state):
            return
        if runner.newest.position > stream.cursor:
            page = self._among.copies_of(runner, stream.wire).at_hand(stream.cursor)
            if page is not None:
                stream.pass_on(page, now=self._now())
        await self._flush()

    async def _follow(self) -> None:
        # In a task of its own, not in the server's: each time it is woken, all coroutines that wait for it are passed.
        while self._stage is _Stage.OPENING:
            await self._until(asyncio.get_running_loop().create_future())
        if self._runner is None:
            return
        try:
            await self._send_all_of(self._runner)
        except JournalMovedError:  # by another process: a retry finds another session, or none
            self.end(SessionNotFoundError(f"session {self._session_id!r} was deleted"))
        except MidstreamError as error:
            self.end(error)
        else:
            self._finish()

    async def _send_all_of(self, runner: Runner) -> None:
        """Send what there is and what comes; raises what ended the session here."""
        stream, journal, coalesce_s = self._stream, runner.events, self._stream.coalesce_s
        copies = self._among.copies_of(runner, stream.wire)
        is_numbered = self.number > 0  # readers need no check with each delivery
        while self._stage is not _Stage.OVER:
            if is_numbered and stream.is_fenced_by(runner.state):
                raise fencing_error()
            if stream.snapshot_due is not None:
                await self.show_due()
            if journal.newest.position > stream.cursor:
                page = copies.at_hand(stream.cursor)
                if page is not None:
                    stream.pass_on(page, now=self._now())
                    await self._flush()
                    continue
                await self._flush()
                try:
                    await copies.read(stream.cursor)
                except EventGoneError:  # it was pruned before this reader came so far
                    stream.lose(journal.pruned_to, now=self._now())
            elif self._transport.ends_with_turn and self.is_turn_over:
                await self._flush()
                self.has_told_turn = True
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
        """Return a wait that ends when something happens, there is something to send, or the connection is over."""
        self._rest = woken
        return woken

    def _wake(self) -> None:
        if self._rest is not None and not self._rest.done():
            self._rest.set_result(None)

    async def show_due(self) -> None:
        """Queue the snapshot that is due, if one is.

        Raises:
            RecordUndecodableError: What the journal begins with cannot be read.
        """
        if self._runner is None or self._stream.snapshot_due is None:
            return
        if self._stream.snapshot_due is SnapshotDue.BEGINNING:
            event_id, state = await self._runner.events.beginning()
            waits_for = ""
        else:
            event_id, state = self._runner.newest, self._runner.state
            waits_for = self._host.waits_for(self._runner)
        snapshot = snapshot_of(self._visitor.public_name(self._session_id), state, str(event_id), waits_for)
        self._stream.show(state, event_id, body_within(snapshot, SNAPSHOT_BYTES_MAX), now=self._now())

    def _check_clock(self) -> None:
        """Do what is due, and come again when something else may be."""
        now = self._now()
        if not self._sending.is_sending:
            if self._runner is not None and (outage := self._runner.outage) is not None:
                self.end(outage)  # in the place of a heartbeat: nothing else would come until there is space
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

    async def _keep_door(self) -> None:
        self.end(await self._visitor.until_unwelcome())

    async def _keep_lock(self, held: SessionHold) -> None:
        self.end(await held.until_withdrawn())

    def _next_check_at(self, now: float) -> float:
        if self._sending.is_sending:
            return self._sending.late_at
        deadline = self._stream.next_deadline()
        return deadline.at if deadline else now + HEARTBEAT_S

    # --- what they share ----------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Do what the stream asks for, in its order, and send what came of it."""
        while requests := self._stream.requests():
            for request in requests:
                await self._do(request)
                if isinstance(request, Submit):
                    await self._flush()
        self._meet_deadline(self._now())
        if self._stream.is_closed:
            self._finish()
        elif self._sending.is_sending:  # from a client that does not read, nothing is read either
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
                try:
                    if not self._runner.state.has_accepted(request.received):
                        self._visitor.count_command(request.received.command)
                    with self._convert_errors():
                        await self._runner.submit(await attribute(self._visitor, request.received))
                except MidstreamError as error:
                    self._stream.refuse(request.seqno, error, now=self._now())
                else:
                    self._world.reach(Fault.BEFORE_ACK)
                    self._stream.acknowledge(request.seqno, now=self._now())

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Turn a defect into an error that the client receives, so that it does not take it for a lost connection."""
        try:
            yield
        except MidstreamError:
            raise
        except Exception as error:
            _log.exception("a defect stopped a request", extra={"session": self._session_id})
            raise InternalError(INTERNAL) from error

    async def _admit(self, request: Admit) -> None:
        # A stream may begin a session; a client with events of it has proof that there was one. The first command may
        # come after the second request of its connection.
        has_seen_none = request.event_id is None or request.event_id == START
        is_new = bool(request.open.stream) and (has_seen_none or self.is_continued)
        if is_new:
            await self._visitor.begin()
        elif request.open.stream:
            await self._visitor.require(Action.SPEAK)
        digest = await self._unlock(request.open, is_new=is_new)
        runner = await self._host.session(self._session_id, create=is_new)
        if request.event_id is not None and request.event_id.position > runner.newest.position:
            await (
                runner.refresh()
            )  # another node may have taken the session while this one was frozen or cut off
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
            self._give_notice(runner)
            self._calls = ConnectedCalls(self._among.stays, self.place, self._transport.gap_s, self._world)
        presence = self._among.presence(self._host)
        if self._stream.cancels_after_s is not None or presence.waits_for(self.place):
            self._mark = await presence.arrive(self.place)
        if self._alarm is not None:  # the first heartbeat may be due long before the `open` had to come
            self._alarm.cancel()
            self._set_alarm()
        if self._stage is _Stage.OPENING:
            self._stage = _Stage.ADMITTED
        self._wake()

    def _give_notice(self, runner: Runner) -> None:
        """Inform the other processes that this connection has its stream, where they may have older ones of it."""
        if self._stage is not _Stage.OVER and (self._host.has_peers or runner.is_following):
            notice = notice_of(runner.state, self._stream.stream, self.number)
            if notice is not None:
                self._among.notices.give(self._host, self._session_id, notice)

    async def _unlock(self, opening: Open, *, is_new: bool) -> str | None:
        """Open the session with the secret that was shown, and return what stands for that in the session's streams."""
        shown = secrets_in(self._request, opening)
        action = Action.SPEAK if opening.stream else Action.READ
        with contextlib.ExitStack() as stack:
            opened = await unlock(self._host, self._session_id, shown, action, begins=is_new)
            held = stack.enter_context(opened)
            if held is None:
                return None
            if held.is_viewer:
                looking = self._world.spawn(self._keep_lock(held), name=f"viewer of {self._session_id}")
                stack.callback(looking.cancel)
            self._holding = stack.pop_all()
        return stream_digest_of(held)

    def _meet_deadline(self, now: float) -> None:
        deadline = self._stream.next_deadline()
        if deadline is None or now < deadline.at:
            return
        newest, waits_on = START, "nothing"
        if self._runner is not None:
            newest, waits_on = self._runner.newest, self._host.waits_for(self._runner)
        self._stream.handle_deadline(newest=newest, waiting_on=waits_on, now=now)

    async def _flush(self) -> None:
        """Send what is queued; return when the client has taken it."""
        await self._sending.flush()
        if self.is_gone or self._stream.is_closed or self._transport.is_full:
            self._finish()

    async def _send_last_frames(self) -> None:
        if self.is_gone:
            return
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._flush()
        except TimeoutError:
            _log.debug("a client did not take the last frame", extra={"session": self._session_id})
