"""Both halves of the stream protocol, joined in memory by a link that can be cut at every frame.

All of our own code is real: the host folds and decides with `session/session.py`. It has no disk and no
tasks, so that a test decides each next event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from midstream.protocol.checkpoint import (
    Checkpoint,
    CommandKept,
    CommandsAcked,
    CursorMoved,
    Forgotten,
    Write,
)
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import ClientEvent
from midstream.protocol.frames import START, EventId
from midstream.protocol.server_stream import Admit, ServerStream, Submit, waiting_on
from midstream.session import records
from midstream.session.records import EpochStarted, Record, Sync, sync_of
from midstream.session.session import Received, Session, decide, fold
from midstream.session.turn.commands import Command, Recover, Refused

Line = tuple[EventId, bytes]


class MemoryHost:
    """The journal of one session, and its one node."""

    def __init__(self) -> None:
        self.session = Session()
        self.line: list[Line] = []
        self.synced = 0
        """Records that survive a power cut."""
        self.start_epoch(at=0.0)

    @property
    def newest(self) -> EventId:
        return self.line[-1][0] if self.line else START

    def start_epoch(self, *, at: float) -> None:
        """Claim the session for a new node and recover it."""
        epoch = self.session.epoch + 1
        self.append((EpochStarted(epoch, "host", at),), epoch=epoch)
        self.do(Recover(), at=at)

    def cut_power(self, *, at: float) -> None:
        """Lose all unsynced records; a new node starts."""
        del self.line[self.synced :]
        epoch = self.session.epoch
        self.session = fold((event_id.epoch, records.decode(body)) for event_id, body in self.line)
        self.session = fold((), self.session)
        assert self.session.epoch == epoch, "an epoch begins synced"
        self.start_epoch(at=at)

    def do(self, command: Command | Received, *, at: float) -> None:
        self.append(decide(self.session, command, epoch=self.session.epoch, at=at))

    def append(self, decided: Sequence[Record], *, epoch: int | None = None) -> None:
        epoch = epoch or self.session.epoch
        for record in decided:
            self.line.append((EventId(epoch, len(self.line) + 1), records.encode(record)))
        self.session = fold(((epoch, record) for record in decided), self.session)
        if decided and sync_of(decided) is Sync.FULL:
            self.synced = len(self.line)

    def epoch_at(self, event_id: EventId | None) -> int | None:
        if event_id is None or not 0 < event_id.position <= len(self.line):
            return None
        return self.line[event_id.position - 1][0].epoch

    def serve(self, stream: ServerStream, *, now: float) -> None:
        """Execute the requests of a connection, and feed it."""
        for request in stream.requests():
            match request:
                case Admit(event_id=event_id):
                    stream.admit(self.session, epoch_at=self.epoch_at(event_id), now=now)
                case Submit(seqno, command):
                    try:
                        self.do(command, at=now)
                    except Refused as refused:
                        stream.refuse(seqno, refused.error, now=now)
                    else:
                        stream.acknowledge(seqno, now=now)
        if stream.is_admitted:
            stream.deliver(self.line[stream.cursor :], now=now)
        deadline = stream.next_deadline()
        if deadline is not None and deadline.at <= now:
            stream.handle_deadline(newest=self.newest, waiting_on=waiting_on(self.session), now=now)


class MemoryCheckpoint:
    """A client's checkpoint file, in memory."""

    def __init__(self, stream: str, secret: str) -> None:
        self.state: Checkpoint | None = Checkpoint(stream, secret)

    def write(self, writes: Iterable[Write]) -> None:
        for write in writes:
            state = self.state
            assert state is not None, f"{write} after it was forgotten"
            match write:
                case CommandKept(seqno, payload):
                    assert seqno == state.next_seqno
                    unacked = (*state.unacked, (seqno, payload))
                    self.state = replace(state, next_seqno=state.next_seqno + 1, unacked=unacked)
                case CommandsAcked(seqno):
                    unacked = tuple(pair for pair in state.unacked if pair[0] > seqno)
                    self.state = replace(state, unacked=unacked)
                case CursorMoved(event_id, promised, known):
                    self.state = replace(state, event_id=event_id, promised=promised, known=known)
                case Forgotten():
                    self.state = None


class Link:
    """A client, a host and the network between them, one frame at a time."""

    def __init__(self, client: ClientStream, checkpoint: MemoryCheckpoint, host: MemoryHost) -> None:
        self.client = client
        self.checkpoint = checkpoint
        self.host = host
        self.server: ServerStream | None = None
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.now = 0.0
        self.unread: deque[ClientEvent] = deque()
        self.connections = 0
        self.is_swallowing = False

    def settle(self) -> None:
        """Writes, then frames, then events: the order of every shell."""
        self.checkpoint.write(self.client.writes())
        sent = self.client.frames_to_send()
        if self.server is not None and not self.is_swallowing:
            self.up.extend(sent)
        self.unread.extend(self.client.events())

    def send_up(self) -> None:
        """Deliver one frame of the client to the server."""
        if self.server is not None and self.up:
            self.server.receive(self.up.popleft(), now=self.now)
            self.feed()

    def feed(self) -> None:
        if self.server is not None:
            self.host.serve(self.server, now=self.now)
            sent = self.server.frames_to_send()
            self.down.extend([] if self.is_swallowing else sent)

    def send_down(self) -> None:
        """Deliver one frame of the server to the client; a closed connection ends when all are delivered."""
        if self.down:
            self.client.receive(self.down.popleft(), now=self.now)
            self.settle()
            if not self.client.is_connection_wanted:
                self.cut()
        elif self.server is not None and self.server.is_closed:
            self.cut()

    def cut(self, *, chance: float = 0.5) -> None:
        """Drop the connection with all its frames in flight."""
        if self.server is not None or not self.client.is_connection_wanted:
            self.server = None
            self.up.clear()
            self.down.clear()
            self.client.end_connection(chance=chance, now=self.now)
            self.settle()

    def black_hole(self) -> None:
        """Lose all current and later frames of this connection, without informing either side."""
        self.up.clear()
        self.down.clear()
        self.is_swallowing = self.server is not None

    def connect(self) -> None:
        self.server = ServerStream(now=self.now)
        self.connections += 1
        self.is_swallowing = False
        self.client.begin_connection(now=self.now)
        self.settle()

    def wait(self) -> None:
        """Advance time to the next deadline, and connect if it is for that."""
        deadlines = [self.client.next_deadline(), self.server.next_deadline() if self.server else None]
        due = min((deadline.at for deadline in deadlines if deadline is not None), default=self.now)
        self.now = max(self.now, due)
        self.client.handle_deadline(now=self.now)
        self.settle()
        if not self.client.is_connection_wanted:
            self.cut()
        elif self.server is None:
            self.connect()
        self.feed()

    def restart_client(self) -> None:
        """Kill the client's process, and start a new one from the checkpoint."""
        self.server = None
        self.up.clear()
        self.down.clear()
        self.unread.clear()
        assert self.checkpoint.state is not None
        self.client = ClientStream.resume(self.checkpoint.state, now=self.now)

    def run(self, steps: int = 200) -> None:
        """Deliver everything, and advance time only as far as necessary."""
        for _ in range(steps):
            if self.client.is_ended:
                return
            if self.up:
                self.send_up()
            elif self.down or (self.server is not None and self.server.is_closed):
                self.send_down()
            elif self.server is None:
                self.wait()
            else:
                self.feed()
                if not self.down:
                    return
        raise AssertionError(f"nothing came to rest within {steps} steps")
