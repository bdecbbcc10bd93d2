"""A client's process in the small world: its half of the protocol, its tools, its application; and its disk."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Self

from msgspec.structs import replace

from midstream.client.checkpoint_file import (
    CallAnswered,
    CallAsked,
    CallIntended,
    CallNoted,
    FileWrite,
    KeptCall,
    Place,
    StreamBegun,
)
from midstream.client.local_tools import LocalTools
from midstream.history.messages import ToolResult
from midstream.protocol import frames
from midstream.protocol.checkpoint import Checkpoint, CommandKept, CommandsAcked, CursorMoved, Forgotten
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import Applied, Forget, Replaced
from midstream.protocol.frames import EventId
from midstream.retries import Backoff
from midstream.session import records
from midstream.session.calls import CallState
from tests.protocol.values import copied, distinguishing_parts, shallow

AT = 0.0
"""Time of every event: nothing checked here depends on durations."""
AT_ONCE = Backoff(first_s=0.0, most_s=0.0)


class ClientDisk:
    """Data that survives a client's process: its checkpoint, its application's log, and its outside effects."""

    def __init__(self, stream: str, secret: str) -> None:
        self.state: Checkpoint | None = Checkpoint(stream, secret)
        self.calls: dict[Place, KeptCall] = {}
        self.lives = 0
        self.log: tuple[tuple[EventId, bytes], ...] = ()
        self.numbered: tuple[bytes, ...] = ()
        """Every payload that was ever numbered, unchanged; for the checks alone."""
        self.runs: dict[Place, int] = {}
        """Number of real runs of each tool: the outside world."""

    def copied(self) -> ClientDisk:
        """Return a copy of the folder."""
        other = shallow(self)
        other.calls, other.runs = dict(self.calls), dict(self.runs)
        return other

    def fingerprint(self) -> Hashable:
        calls, runs = tuple(self.calls.items()), tuple(self.runs.items())
        return self.state, calls, self.lives, hash(self.log), self.numbered, runs

    def write(self, writes: Iterable[FileWrite]) -> None:
        """Store changes, all or none."""
        for write in writes:
            self._apply(write)

    def _apply(self, write: FileWrite) -> None:
        state = self.state
        assert state is not None, f"{write} after it was forgotten"
        match write:
            case CommandKept(seqno, payload):
                assert seqno == state.next_seqno, f"{write} where {state.next_seqno} was next"
                unacked = (*state.unacked, (seqno, payload))
                self.state = replace(state, next_seqno=seqno + 1, unacked=unacked)
                self.numbered = (*self.numbered, payload)
            case CommandsAcked(seqno):
                self.state = replace(state, unacked=tuple(each for each in state.unacked if each[0] > seqno))
            case CursorMoved(event_id, promised, known):
                self.state = replace(state, event_id=event_id, promised=promised, known=known)
            case Forgotten():
                self.state = None
            case CallNoted(turn, response, call, plan):
                self.calls[turn, response, call.id] = KeptCall(
                    turn, response, CallState(call, plan), is_asked=False
                )
            case CallAsked(turn, response, call_id):
                kept = self.calls[turn, response, call_id]
                self.calls[turn, response, call_id] = replace(kept, is_asked=True)
            case CallIntended(turn, response, call_id, run, epoch):
                kept = self.calls[turn, response, call_id]
                state_of = replace(kept.state, runs=run, epoch=epoch)
                self.calls[turn, response, call_id] = replace(kept, state=state_of)
            case CallAnswered(turn, response, result):
                kept = self.calls[turn, response, result.call_id]
                state_of = replace(kept.state, result=result)
                self.calls[turn, response, result.call_id] = replace(kept, state=state_of)
            case StreamBegun():
                raise AssertionError("the world begins with it")


class ClientProcess:
    """One life of a client. After each action: `settle`."""

    def __init__(self, disk: ClientDisk) -> None:
        self.disk = disk
        self.begin()

    def begin(self) -> None:
        """Continue from the data on the disk."""
        assert self.disk.state is not None
        self.disk.lives += 1
        self.stream = self.resumed(self.disk.state)
        kept = self.disk.calls.values()
        self.tools = LocalTools("s", {}, epoch=self.disk.lives, kept=kept)
        self.unread: tuple[Applied | Forget, ...] = ()
        self.in_hand: EventId | None = None
        self.starts: tuple[Place, ...] = ()
        """Tools that run now."""
        self.can_abort = True
        self.delivered: EventId | None = None
        """The last event delivered to its application."""

    def resumed(self, checkpoint: Checkpoint) -> ClientStream:
        """Resume a stream."""
        patience = float("inf")
        return ClientStream.resume(
            checkpoint, life=self.disk.lives, backoff=AT_ONCE, patience_s=patience, now=AT
        )

    def clone(self) -> Self:
        other = shallow(self)
        other.disk = self.disk.copied()
        other.stream, other.tools = copied(self.stream), copied(self.tools)
        return other

    def fingerprint(self) -> Hashable:
        unread = tuple(each.event_id for each in self.unread)
        seen = (unread, self.in_hand, self.starts, self.can_abort, self.delivered)
        return (
            self.disk.fingerprint(),
            distinguishing_parts(self.stream),
            distinguishing_parts(self.tools),
            seen,
        )

    @property
    def has_unread(self) -> bool:
        """Return whether the application has an event to read."""
        return bool(self.unread) or self.in_hand is not None

    def settle(self) -> tuple[bytes, ...]:
        """Store, then send, then act, then deliver; return the frames to send."""
        events = []
        for event in self.stream.events():
            assert not isinstance(event, Replaced), "this client asks for no snapshot"
            events.append(event)
            if isinstance(event, Applied):
                self.tools.take(event.record)
        self.keep()
        sent = tuple(self.stream.frames_to_send())
        self.starts += tuple(start.place for start in self.tools.to_start())
        stopped = self.tools.to_stop()
        self.starts = tuple(place for place in self.starts if place not in stopped)
        self.unread += tuple(events)
        return sent

    def keep(self) -> None:
        """Store the writes of the halves, each time all or nothing."""
        while writes := self.writes():
            self.disk.write(writes)

    def writes(self) -> list[FileWrite]:
        """Return the writes of one transaction."""
        for payload in self.tools.answers():
            self.stream.submit(payload)
        kept = self.tools.writes() if self.stream.is_kept else []
        return [*self.stream.writes(), *kept]

    # --- acts of the application
    # -----------------------------------------------------------------------------------

    def send(self, payload: frames.Payload) -> None:
        """Send a payload on the stream."""
        self.stream.submit(payload)

    def abort(self) -> None:
        """Stop the turn."""
        self.can_abort = False
        self.stream.abort()

    def read(self) -> None:
        """Finish the current event, then take the next one and store it at once."""
        if self.in_hand is not None:
            self.stream.mark_handled(self.in_hand)
            self.in_hand = None
        if self.unread:
            event, self.unread = self.unread[0], self.unread[1:]
            self.apply(event)

    def apply(self, event: Applied | Forget) -> None:
        """Store an event by its position, as STREAM-24 requires."""
        if isinstance(event, Forget):
            self.delivered = None
            self.disk.log = tuple(
                each for each in self.disk.log if each[0].position <= event.event_id.position
            )
            return
        is_new = self.delivered is None or event.event_id > self.delivered
        assert is_new, f"the application received {event.event_id} after {self.delivered}"
        self.delivered = event.event_id
        before = tuple(each for each in self.disk.log if each[0].position < event.event_id.position)
        self.disk.log = (*before, (event.event_id, records.encode(event.record)))
        self.in_hand = event.event_id

    def run(self, place: Place) -> None:
        """Run a tool: from here on the world has changed."""
        kept = self.disk.calls[place]
        assert kept.state.runs > self.disk.runs.get(place, 0), f"{place} runs without an intent"
        self.disk.runs[place] = self.disk.runs.get(place, 0) + 1
        self.starts = tuple(each for each in self.starts if each != place)
        self.tools.note_end(place, ToolResult(place[2], "done"))

    def die(self) -> None:
        """Lose all data that is not on the disk; the next process resumes the rest."""
        if self.disk.state is not None:
            self.begin()
        else:
            self.unread, self.in_hand, self.starts = (), None, ()
