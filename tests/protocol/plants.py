"""Planted bugs for the explorer: each is our own code without one promise."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import suppress

from msgspec.structs import replace

from midstream.client.checkpoint_file import CallIntended, FileWrite
from midstream.protocol.checkpoint import Checkpoint, CommandKept, CursorMoved
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import Applied, Forget
from midstream.protocol.frame_errors import error_of
from midstream.protocol.frames import Error, EventId, Events, Open, encode
from midstream.protocol.server_stream import Admit, ServerStream, Submit
from midstream.session.records import CommandAccepted, EpochStarted, Record, StreamOpened
from midstream.session.session import Received, Session
from midstream.session.turn.commands import Recover, Refused
from tests.protocol.simulated_client import AT, AT_ONCE, ClientDisk, ClientProcess
from tests.protocol.world import Action, SmallWorld, WorldConnection, WorldScenario


class EventsFirst(SmallWorld):
    """No bug: the events of a command overtake its ack."""

    def acknowledge(self, server: ServerStream, seqno: int) -> None:
        self.feed()
        super().acknowledge(server, seqno)


# --- the server -------------------------------------------------------------------------------------------------


class AckBeforeAppend(SmallWorld):
    """A server that acknowledges a command a little before its append."""

    unkept: tuple[Received, ...] = ()

    def submit(self, connection: WorldConnection, request: Submit) -> None:
        assert connection.server is not None
        connection.server.acknowledge(request.seqno, now=AT)
        self.unkept += (request.received,)

    def progress(self) -> Iterator[Action]:
        if self.unkept:
            yield ("append",)
        yield from super().progress()

    def act(self, action: Action) -> None:
        if action != ("append",):
            super().act(action)
            return
        command, self.unkept = self.unkept[0], self.unkept[1:]
        with suppress(Refused):
            self.do(command)

    def take_over(self) -> None:
        self.unkept = ()
        super().take_over()

    def fingerprint(self) -> int:
        return hash((super().fingerprint(), tuple(each.digest for each in self.unkept)))


class AckBeforeSync(SmallWorld):
    """A server that acknowledges a command when it is in memory and not yet on disk."""

    def append(self, decided: tuple[Record, ...], *, epoch: int | None = None) -> None:
        synced = self.synced
        super().append(decided, epoch=epoch)
        if not any(isinstance(record, EpochStarted) for record in decided):
            self.synced = synced


class TakesAnyOrder(SmallWorld):
    """A server that accepts a number after a gap."""

    def submit(self, connection: WorldConnection, request: Submit) -> None:
        super().submit(connection, request)
        command = request.received
        known = self.session.streams.get(command.stream)
        if request.seqno > (known.accepted if known else 0):
            opened = () if known else (StreamOpened(command.stream, command.secret_digest),)
            self.append((*opened, CommandAccepted(command.stream, command.seqno, command.digest)))


class NoDedupe(SmallWorld):
    """A server that accepts a repeated number again."""

    def submit(self, connection: WorldConnection, request: Submit) -> None:
        known = self.session.streams.get(request.received.stream)
        if known and request.seqno < known.accepted:
            forgetful = replace(known, digests=(known.digests + known.newest)[: request.seqno], newest=())
            self.session = replace(
                self.session, streams={**self.session.streams, request.received.stream: forgetful}
            )
        super().submit(connection, request)


class NoDigest(SmallWorld):
    """A server that acknowledges a repeated number with any payload."""

    def submit(self, connection: WorldConnection, request: Submit) -> None:
        known = self.session.streams.get(request.received.stream)
        if known and request.seqno < known.accepted:
            assert connection.server is not None
            self.acknowledge(connection.server, request.seqno)
        else:
            super().submit(connection, request)


class FencedByArrival(SmallWorld):
    """A server for which the connection that arrived last is the newest."""

    def is_before(self, connection: ServerStream, speaker: ServerStream) -> bool:
        del connection, speaker
        return False


class FencedInOneProcess(SmallWorld):
    """A server that does not end older connections after it has read of newer ones elsewhere."""

    def is_fenced(self, server: ServerStream, view: Session) -> bool:
        del server, view
        return False


class TakenFromOlder(SmallWorld):
    """A server that accepts a command from any connection."""

    def judge(self, connection: WorldConnection, request: Submit) -> None:
        super().judge(connection, replace(request, received=replace(request.received, connection=0)))


class ReplayTooLate(SmallWorld):
    """A server whose replay begins one event late."""

    def admit(self, connection: WorldConnection, request: Admit) -> None:
        if request.event_id is not None and request.event_id.position < len(self.line):
            position = request.event_id.position + 1
            request = Admit(request.open, EventId(request.event_id.epoch, position))
            assert connection.server is not None
            vars(connection.server)["_event_id"] = request.event_id
        super().admit(connection, request)


class EpochReused(SmallWorld):
    """A server that takes over in the epoch of its predecessor."""

    def start_epoch(self) -> None:
        epoch = max(self.session.epoch, 1)
        self.append((EpochStarted(epoch, "host", AT),), epoch=epoch)
        self.do(Recover())


# --- the client -------------------------------------------------------------------------------------------------


class GapIsTheEnd(ClientStream):
    """A client whose stream ends with an early command."""

    def _take_error(self, frame: Error) -> None:
        self._end_with(error_of(frame))


class NoPlayback(ClientStream):
    """A client that does not resend the commands of its last connection."""

    def begin_connection(self, *, now: float) -> None:
        sent = self._outbox.sent
        super().begin_connection(now=now)
        opened = self._frames[:1]
        self._outbox.sent = max(sent, self._outbox.sent)
        self._frames = [*opened, *self._frames[1 + sent - self._outbox.acked :]]


class DeliversTwice(ClientStream):
    """A client that restarts at the beginning with every connection and delivers events again."""

    def _take_events(self, frame: Events) -> None:
        first = EventId.parse(frame.events[0].id)
        self._inbox.received = EventId(first.epoch, first.position - 1)
        super()._take_events(frame)

    def begin_connection(self, *, now: float) -> None:
        super().begin_connection(now=now)
        self._frames[0] = encode(
            Open(self._stream, self.secret, None, self._outbox.next_seqno, self._link.number)
        )


class DeletesTooEarly(ClientStream):
    """A client that deletes the checkpoint when the end of the turn arrives, and not when the application has
    handled it.
    """

    def _finish_at(self, end: EventId) -> None:
        super()._finish_at(end)
        self._drop_checkpoint()

    def mark_handled(self, event_id: EventId) -> None:
        if self.is_kept:
            super().mark_handled(event_id)


class MovesTooEarly(ClientStream):
    """A client that stores the last received event as its cursor."""

    def _apply(self, event: Applied) -> None:
        super()._apply(event)
        if self._events and self._inbox.end is None:
            self._keep(CursorMoved(event.event_id))


class _With(ClientProcess):
    """A process with another half of the protocol."""

    half: type[ClientStream]

    def resumed(self, checkpoint: Checkpoint) -> ClientStream:
        patience = float("inf")
        return self.half.resume(
            checkpoint, life=self.disk.lives, backoff=AT_ONCE, patience_s=patience, now=AT
        )


class WritesLate(ClientProcess):
    """A client that stores data a little late."""

    unwritten: tuple[FileWrite, ...] = ()

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), self.unwritten

    def begin(self) -> None:
        self.unwritten = ()
        super().begin()

    def write(self) -> None:
        if self.disk.state is not None:
            self.disk.write(self.unwritten)
        self.unwritten = ()


class SendBeforeWrite(WritesLate):
    """A client that sends data before it is on the disk."""

    def keep(self) -> None:
        self.unwritten += tuple(self.writes())


class OutcomeApart(WritesLate):
    """A client that stores an outcome, and its command a little later."""

    def keep(self) -> None:
        writes = self.writes()
        commands = tuple(write for write in writes if isinstance(write, CommandKept))
        self.unwritten += commands
        self.disk.write([write for write in writes if write not in commands])


class RunBeforeIntent(WritesLate):
    """A client that starts a tool, and stores its intent a little later."""

    def keep(self) -> None:
        writes = self.writes()
        intents = tuple(write for write in writes if isinstance(write, CallIntended))
        self.unwritten += intents
        self.disk.write([write for write in writes if write not in intents])


class AppliesLate(ClientProcess):
    """An application that reports an event as handled, and stores it a little later."""

    unapplied: Applied | Forget | None = None

    def read(self) -> None:
        if self.unapplied is not None:
            self.apply(self.unapplied)
            self.unapplied, self.in_hand = None, None
            return
        event, self.unread = self.unread[0], self.unread[1:]
        self.unapplied, self.in_hand = event, event.event_id
        self.stream.mark_handled(event.event_id)

    def begin(self) -> None:
        self.unapplied = None
        super().begin()


def at_client(kind: type[ClientProcess | ClientStream]) -> type[SmallWorld]:
    """Return the world whose clients are of this kind."""
    made: type[ClientProcess] = (
        type(kind.__name__, (_With,), {"half": kind}) if issubclass(kind, ClientStream) else kind
    )

    class Of(SmallWorld):
        def __init__(self, scenario: WorldScenario) -> None:
            super().__init__(scenario)
            for process in self.processes:
                if isinstance(process, WritesLate):
                    process.write()  # The message sent before the world began.

        def process(self, disk: ClientDisk) -> ClientProcess:
            return made(disk)

        def progress(self) -> Iterator[Action]:
            yield from super().progress()
            for number, process in enumerate(self.processes):
                if isinstance(process, WritesLate) and process.unwritten:
                    yield "write", number

        def act_at_client(self, name: str, owner: int, place: Action) -> None:
            process = self.processes[owner]
            if name == "write" and isinstance(process, WritesLate):
                process.write()
            else:
                super().act_at_client(name, owner, place)

    Of.__name__ = made.__name__
    return Of
