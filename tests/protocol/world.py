"""A small world in which both halves of the stream protocol live: clients, a server with its journal, a bad network.

Nothing here is a stand-in for our own code but the shells: the halves are the real ones, the journal is folded and
decided by `session/session.py`, a client's tools are `LocalTools`. A world is a value: it is copied, one thing
happens in the copy, and `fingerprint` distinguishes two worlds with different possible futures.

The network delivers the frames of one connection in order, until that breaks; but commands may overtake one another,
and come twice, as separate POST requests do. A client may lose a connection at any time, and the server notices it
later or never: commands of the older connection are still received while a newer one is open, also when they arrive
after its own. A server's process dies with all its connections; a client's process dies and the next one has only the
stored data. Where several servers' processes serve the journal, one owns it, the others read it with a delay, and
their commands are forwarded until the owner decides them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import suppress
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from midstream.history.messages import Finish, Response, Text, ToolCall
from midstream.protocol.frames import START, CommandFrame, EventId, SendPayload, decode_client
from midstream.protocol.server_stream import Admit, ServerStream, Submit, waiting_on
from midstream.session import records
from midstream.session.calls import CallPlan, Site, digest_of
from midstream.session.records import CommandAccepted, EpochStarted, Record, Sync, sync_of
from midstream.session.session import Received, Session, decide, fencing_error, fold, notice_of
from midstream.session.turn.commands import Command, ModelResponded, ModelStreamed, Recover, Refused
from midstream.session.turn.states import AwaitingModel
from tests.protocol.simulated_client import AT, ClientDisk, ClientProcess
from tests.protocol.values import copied, distinguishing_parts, shallow
from tests.session.turn_stories import streams

SECRET = "s" * 43
ZOMBIES_MAX = 1
"""Connections of one client that it dropped and the server still holds."""

Line = tuple[EventId, bytes]
Action = tuple[str | int, ...]


class WorldScenario(Struct, frozen=True):
    """Possible events, with their numbers.

    Args:
        clients: Processes that resume the same stream; all but the first from a copy of its checkpoint.
        servers: Processes that serve the journal; the first one owns it.
        has_tool: Whether the model calls a tool of the client before it answers.
        words: Pieces of the model's answers.
        aborts, losses, client_deaths, takeovers, power_cuts, repeats, overtakes, beats: How often.
    """

    clients: int = 1
    servers: int = 1
    has_tool: bool = False
    words: int = 1
    aborts: int = 0
    losses: int = 2
    client_deaths: int = 0
    takeovers: int = 0
    power_cuts: int = 0
    repeats: int = 0
    overtakes: int = 0
    beats: int = 0


class WorldConnection:
    """One connection: the server's half of the protocol, and the frames in flight in both directions."""

    def __init__(self, owner: int, place: int = 0) -> None:
        self.owner = owner
        """The client that opened it."""
        self.place = place
        """The server's process that has it."""
        self.is_held = True
        """Whether the client still has it."""
        self.server: ServerStream | None = ServerStream(now=AT)
        """None once the server's process died."""
        self.up: tuple[bytes, ...] = ()
        self.down: tuple[bytes, ...] = ()
        self.forwarded_commands: tuple[Submit | Received, ...] = ()
        """Work for the journal's node: commands, and a notice that this connection has the stream."""

    def clone(self) -> Self:
        other = shallow(self)
        other.server = self.server and copied(self.server)
        return other

    def fingerprint(self) -> Hashable:
        server = self.server and distinguishing_parts(self.server)
        forwarded_commands = tuple((each.seqno, type(each)) for each in self.forwarded_commands)
        return self.owner, self.place, self.is_held, server, self.up, self.down, forwarded_commands

    @property
    def are_commands_waiting(self) -> bool:
        """Return whether the next two frames to the server are commands, which as POSTs may come in another order."""
        waiting = self.up[:2]
        return len(waiting) > 1 and all(isinstance(decode_client(body), CommandFrame) for body in waiting)

    def flush(self) -> None:
        """Send the frames of the server's half; a connection that the client dropped delivers none."""
        if self.server is not None:
            sent = tuple(self.server.frames_to_send())
            self.down += sent if self.is_held else ()


class SmallWorld:
    """See the module's text. `actions` yields the possible actions, `act` performs one, `check` asserts the
    invariants.
    """

    def __init__(self, scenario: WorldScenario) -> None:
        self.left = scenario
        """Remaining numbers of faults."""
        self.may_lose_tail = scenario.power_cuts > 0
        self.session = Session()
        self.line: tuple[Line, ...] = ()
        self.line_mark = 0
        self.synced = 0
        """Records that survive a power cut."""
        self.connections: tuple[WorldConnection, ...] = ()
        """In the order of their creation."""
        self.speakers: tuple[WorldConnection | None, ...] = (None,) * scenario.servers
        """The connection that has the stream, for each server."""
        self.owner = 0
        """The server that decides."""
        self.views: tuple[Session, ...] = (self.session,) * scenario.servers
        """The position that each of the others has read."""
        self.brought: tuple[tuple[int, int], ...] = ()
        """Positions of the accepted commands, and the numbers of their connections."""
        self.start_epoch()
        disk = ClientDisk("a", SECRET)
        first = self.process(disk)
        first.send(SendPayload((Text("hi"),)))
        first.settle()
        self.processes = (first, *(self.process(disk.copied()) for _ in range(scenario.clients - 1)))

    def process(self, disk: ClientDisk) -> ClientProcess:
        """Start a client's process."""
        return ClientProcess(disk)

    def clone(self) -> Self:
        other = shallow(self)
        other.connections = tuple(each.clone() for each in self.connections)
        other.speakers = tuple(
            each and other.connections[self.connections.index(each)] for each in self.speakers
        )
        other.processes = tuple(each.clone() for each in self.processes)
        return other

    def fingerprint(self) -> int:
        speakers = tuple(each and self.connections.index(each) for each in self.speakers)
        servers = self.owner, speakers, tuple(each.position for each in self.views), self.brought
        connections = tuple(each.fingerprint() for each in self.connections)
        processes = tuple(each.fingerprint() for each in self.processes)
        return hash((self.left, self.line_mark, self.synced, servers, connections, processes))

    # --- the journal --------------------------------------------------------------------------------------------

    @property
    def newest(self) -> EventId:
        return self.line[-1][0] if self.line else START

    def start_epoch(self) -> None:
        epoch = self.session.epoch + 1
        self.append((EpochStarted(epoch, "host", AT),), epoch=epoch)
        self.do(Recover())

    def do(self, command: Command | Received) -> None:
        self.append(decide(self.session, command, epoch=self.session.epoch, at=AT))
        self.feed()

    def append(self, decided: tuple[Record, ...], *, epoch: int | None = None) -> None:
        epoch = epoch or self.session.epoch
        for record in decided:
            line = (EventId(epoch, len(self.line) + 1), records.encode(record))
            self.line = (*self.line, line)
            self.line_mark = hash((self.line_mark, line))
        self.session = fold(((epoch, record) for record in decided), self.session)
        if decided and sync_of(decided) is Sync.FULL:
            self.synced = len(self.line)
        self.read(self.owner)

    def read(self, place: int) -> None:
        """Let a server read the whole journal."""
        self.views = (*self.views[:place], self.session, *self.views[place + 1 :])

    # --- possible actions
    # ------------------------------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        """Yield all possible actions, faults last; the order is that of a good network."""
        yield from self.progress()
        left = self.left
        for number, connection in enumerate(self.connections):
            if connection.server is not None and connection.up and left.repeats:
                yield "repeat", number
            if connection.server is not None and left.overtakes and connection.are_commands_waiting:
                yield "overtake", number
            if connection.is_held and left.losses:
                yield "lose", connection.owner
        for number, process in enumerate(self.processes):
            if left.aborts and not process.stream.is_ended and process.can_abort:
                yield "cancel", number
            if left.client_deaths and (process.disk.state is not None or process.has_unread):
                yield "die", number
        if left.takeovers:
            yield ("takeover",)
        if left.power_cuts:
            yield ("power cut",)

    def progress(self) -> Iterator[Action]:
        """Yield the actions without faults."""
        for place, view in enumerate(self.views):
            if view.position < self.session.position:
                yield "read on", place
        for number, connection in enumerate(self.connections):
            server = connection.server
            if server is None:
                continue
            if connection.forwarded_commands:
                yield "decide", number
            if connection.up and not server.is_closed:
                yield "up", number
            if self.left.beats and server.is_admitted and connection.is_held:
                yield "beat", number
            if not connection.is_held:
                yield "end", number
        for number, process in enumerate(self.processes):
            held = self.held(number)
            if held is not None and not process.stream.is_connection_wanted:
                yield "drop", number
            elif held is not None and held.down:
                yield "down", number
            elif held is not None and (held.server is None or held.server.is_closed):
                yield "drop", number
            if held is None and not process.stream.is_ended:
                for place in range(len(self.views)):
                    yield "connect", number, place
            if process.has_unread:
                yield "read", number
            for call in process.starts:
                yield "run", number, *call
        yield from self.model()

    def model(self) -> Iterator[Action]:
        turn = self.session.turn
        if isinstance(turn, AwaitingModel) and turn.attempt:
            if self.left.words:
                yield ("word",)
            yield ("response",)

    def held(self, owner: int) -> WorldConnection | None:
        """Return the current connection of a client."""
        return next((each for each in self.connections if each.is_held and each.owner == owner), None)

    # --- actions
    # ---------------------------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Perform an action."""
        match action:
            case "up", int(number):
                self.up(self.connections[number])
            case "read on", int(place):
                self.read(place)
                self.feed()
            case "decide", int(number):
                self.decide_letter(self.connections[number])
            case "end", int(number):
                self.remove_connection(self.connections[number])
            case "beat", int(number):
                self.beat(self.connections[number])
            case "repeat", int(number):
                self.count("repeats")
                self.repeat(self.connections[number])
            case "overtake", int(number):
                self.count("overtakes")
                first, second, *rest = self.connections[number].up
                self.connections[number].up = (second, first, *rest)
            case ("word",):
                self.count("words")
                self.stream_word()
            case ("response",):
                self.response()
            case ("takeover",):
                self.count("takeovers")
                self.take_over()
            case ("power cut",):
                self.count("power_cuts")
                self.lose_tail()
                self.take_over()
            case str(name), int(owner), *place:
                self.act_at_client(name, owner, tuple(place))
            case _:
                raise AssertionError(action)

    def act_at_client(self, name: str, owner: int, place: Action) -> None:
        process = self.processes[owner]
        match name:
            case "down":
                held = self.held(owner)
                assert held is not None
                body, held.down = held.down[0], held.down[1:]
                process.stream.receive(body, now=AT)
            case "connect":
                self.connect(owner, int(place[0]))
            case "drop" | "lose":
                if name == "lose":
                    self.count("losses")
                self.drop_connection(owner)
                process.stream.end_connection(chance=0.0, now=AT)
            case "read":
                process.read()
            case "run":
                process.run(next(each for each in process.starts if each == place))
            case "cancel":
                self.count("aborts")
                process.abort()
            case "die":
                self.count("client_deaths")
                self.drop_connection(owner)
                process.die()
            case _:
                raise AssertionError(name)
        sent = process.settle()
        while process.has_unread and not self.left.client_deaths:
            process.read()  # Nothing can come between.
            process.settle()
        held = self.held(owner)
        if held is not None:
            held.up += sent

    def count(self, what: str) -> None:
        self.left = replace(self.left, **{what: getattr(self.left, what) - 1})

    def connect(self, owner: int, place: int) -> None:
        stream = self.processes[owner].stream
        deadline = stream.next_deadline()
        if deadline is not None:
            stream.handle_deadline(now=deadline.at)
        self.connections = (*self.connections, WorldConnection(owner, place))
        stream.begin_connection(now=AT)

    def drop_connection(self, owner: int) -> None:
        """Let the client drop its connection; the server has not noticed yet."""
        held = self.held(owner)
        if held is None:
            return
        held.is_held, held.down = False, ()
        if held.server is None or held.server.is_closed or not (held.up or held.forwarded_commands):
            self.remove_connection(held)
        zombies = [each for each in self.connections if each.owner == owner and not each.is_held]
        if len(zombies) > ZOMBIES_MAX:
            self.remove_connection(zombies[0])

    def remove_connection(self, connection: WorldConnection) -> None:
        self.connections = tuple(each for each in self.connections if each is not connection)
        self.speakers = tuple(None if each is connection else each for each in self.speakers)

    def up(self, connection: WorldConnection) -> None:
        body, connection.up = connection.up[0], connection.up[1:]
        self.take(connection, body)
        if not (connection.is_held or connection.up or connection.forwarded_commands):
            self.remove_connection(connection)

    def repeat(self, connection: WorldConnection) -> None:
        """Deliver a command a second time, as a POST that is sent again."""
        if isinstance(decode_client(connection.up[0]), CommandFrame):
            self.take(connection, connection.up[0])

    def take(self, connection: WorldConnection, body: bytes) -> None:
        """Deliver a frame to the server, which executes the requests of its half at once."""
        server = connection.server
        assert server is not None
        server.receive(body, now=AT)
        for request in server.requests():
            match request:
                case Admit():
                    self.admit(connection, request)
                case Submit():
                    self.submit(connection, request)
        connection.flush()

    def admit(self, connection: WorldConnection, request: Admit) -> None:
        server = connection.server
        assert server is not None
        self.read(connection.place)
        self.feed()
        server.admit(self.session, epoch_at=self.epoch_at(request.event_id), now=AT)
        if not server.is_admitted:
            return
        older = ended = self.speakers[connection.place]
        if older is not None and older.server is not None and self.is_before(server, older.server):
            ended = connection
        else:
            self.speakers = tuple(
                connection if place == connection.place else each for place, each in enumerate(self.speakers)
            )
        if ended is not None and ended.server is not None:
            ended.server.fail(fencing_error(), now=AT)
            ended.flush()
        if ended is not connection:
            self.give_notice(connection, server)
        connection.flush()
        self.feed()

    def give_notice(self, connection: WorldConnection, server: ServerStream) -> None:
        """Inform the other servers of a connection, soon."""
        notice = notice_of(self.session, server.stream, server.connection) if len(self.views) > 1 else None
        connection.forwarded_commands += (notice,) if notice is not None else ()

    def is_before(self, connection: ServerStream, speaker: ServerStream) -> bool:
        """Return whether the newly admitted connection is older than the current one."""
        return connection.is_before(speaker)

    def submit(self, connection: WorldConnection, request: Submit) -> None:
        if connection.place == self.owner:
            self.judge(connection, request)
        else:
            connection.forwarded_commands += (request,)

    def decide_letter(self, connection: WorldConnection) -> None:
        """Let the journal's node decide a forwarded command, or that a connection has the stream."""
        forwarded, connection.forwarded_commands = (
            connection.forwarded_commands[0],
            connection.forwarded_commands[1:],
        )
        if isinstance(forwarded, Submit):
            self.judge(connection, forwarded)
        else:
            with suppress(Refused):
                self.do(forwarded)
        connection.flush()

    def judge(self, connection: WorldConnection, request: Submit) -> None:
        server = connection.server
        assert server is not None
        try:
            decided = decide(self.session, request.received, epoch=self.session.epoch, at=AT)
        except Refused as refused:
            server.refuse(request.seqno, refused.error, now=AT)
            return
        accepted = [n for n, record in enumerate(decided, 1) if isinstance(record, CommandAccepted)]
        self.brought += tuple((len(self.line) + place, server.connection) for place in accepted)
        self.append(decided)
        self.read(connection.place)
        self.acknowledge(server, request.seqno)

    def acknowledge(self, server: ServerStream, seqno: int) -> None:
        """Acknowledge a command that is in the journal; its events are sent separately, and may come later."""
        server.acknowledge(seqno, now=AT)
        self.feed()

    def epoch_at(self, event_id: EventId | None) -> int | None:
        if event_id is None or not 0 < event_id.position <= len(self.line):
            return None
        return self.line[event_id.position - 1][0].epoch

    def feed(self) -> None:
        """Send every reader the new records of the journal."""
        for connection in self.connections:
            server, view = connection.server, self.views[connection.place]
            if server is None or not server.is_admitted:
                continue
            if self.is_fenced(server, view):
                server.fail(fencing_error(), now=AT)
            else:
                server.deliver(self.line[server.cursor : view.position], now=AT)
            connection.flush()

    def is_fenced(self, server: ServerStream, view: Session) -> bool:
        """Return whether a newer connection has the stream, as far as a server has read."""
        return server.is_fenced_by(view)

    def beat(self, connection: WorldConnection) -> None:
        self.count("beats")
        assert connection.server is not None
        deadline = connection.server.next_deadline()
        if deadline is not None:
            waits = waiting_on(self.session)
            connection.server.handle_deadline(newest=self.newest, waiting_on=waits, now=deadline.at)
            connection.flush()

    def stream_word(self) -> None:
        turn = self.session.turn
        assert isinstance(turn, AwaitingModel)
        command: ModelStreamed = streams(
            "word", turn=turn.turn, response=turn.response_no, attempt=turn.attempt
        )
        self.do(command)

    def response(self) -> None:
        """Let the model call the client's tool in its first response, and answer in the next."""
        turn = self.session.turn
        assert isinstance(turn, AwaitingModel)
        response, plans = Response((Text("word"),)), tuple[CallPlan, ...]()
        if self.left.has_tool and turn.response_no == 1:
            response = Response((ToolCall("c", "look"),), Finish.CALLS)
            plans = (CallPlan("c", digest_of("look", "{}"), Site.CLIENT),)
        self.do(ModelResponded(turn.ref, response, plans))

    def take_over(self) -> None:
        """The node's process dies with its connections; another one begins a new epoch."""
        self.speakers = tuple(
            None if place == self.owner else each for place, each in enumerate(self.speakers)
        )
        for connection in self.connections:
            if connection.place == self.owner:
                connection.server, connection.up, connection.forwarded_commands = None, (), ()
        self.connections = tuple(each for each in self.connections if each.is_held or each.server is not None)
        self.owner = (self.owner + 1) % len(self.views)
        self.start_epoch()

    def lose_tail(self) -> None:
        self.line = self.line[: self.synced]
        self.line_mark = 0
        for line in self.line:
            self.line_mark = hash((self.line_mark, line))
        self.session = fold((event_id.epoch, records.decode(body)) for event_id, body in self.line)
