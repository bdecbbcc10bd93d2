"""Runs the steps of a client's script against midstream's own client half, in the role of a server.

Steps:

- `submit`: the application submits this payload. `cancel`: it cancels the turn. `detach`: it leaves.
- `connected`: a connection that the client requires is opened. `lost`: it has ended.
- `receive`: the client receives this frame. `receive_text`: it receives this text, which may be no frame.
- `sent`: since the last such step, exactly these frames were sent, each matching its pattern.
- `delivered`: since the last such step, exactly the events of these ids were delivered to the application. `gone` means
  that the client received a `gone` frame. An id with a question mark after it may be missing.
- `mark_handled`: the application has handled the event of this id.
- `waiting`: the client requires no connection now, and requires one later. `dropped`: it ended its connection.
- `silence`: it receives nothing until its next deadline.
- `restart`: its process dies, and the next one continues with the checkpoint.
- `is_acknowledged`, `is_reconnecting`, `is_degraded`, `has_checkpoint`: the client's own properties, true or false.
- `ended`: the stream has ended, with the error of this code, or without one (null).

After the last step, no sent frame or delivered event may be left without a step.

Names: `$stream`, `$secret`.
"""

from __future__ import annotations

import msgspec
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
from midstream.protocol.event_inbox import Forget
from midstream.protocol.frames import EventId, decode_payload
from midstream.testing.conformance.matching import Names, difference, difference_of_event_ids, fill
from midstream.testing.conformance.scripts import Json, Script
from midstream.testing.conformance.server_side import ScriptOutcome

STREAM = "stream-of-the-script"
SECRET = "s" * 43


def checkpoint_after(kept: Checkpoint | None, write: Write) -> Checkpoint | None:
    """Return a checkpoint in memory after a write; None if it was deleted."""
    if kept is None:
        return None
    match write:
        case CommandKept(seqno, payload):
            return replace(kept, next_seqno=seqno + 1, unacked=(*kept.unacked, (seqno, payload)))
        case CommandsAcked(seqno):
            return replace(kept, unacked=tuple(each for each in kept.unacked if each[0] > seqno))
        case CursorMoved(event_id, promised, known):
            return replace(kept, event_id=event_id, promised=promised, known=known)
        case Forgotten():
            return None


class ClientTrial:
    """midstream's client half, a checkpoint in memory, and a clock that only the script advances."""

    def __init__(self) -> None:
        self._names: Names = {"stream": STREAM, "secret": SECRET}
        self._checkpoint: Checkpoint | None = Checkpoint(STREAM, SECRET)
        self._lives = 0
        self._now = 0.0
        self._sent: list[Json] = []
        self._event_ids: list[str] = []
        self._begin()

    def run(self, script: Script) -> ScriptOutcome:
        """Run one script, and return the result."""
        for number, step in enumerate(script.steps, start=1):
            if (what := self._difference(step)) is not None:
                last_frames = tuple(msgspec.json.encode(frame).decode() for frame in self._sent[-3:])
                return ScriptOutcome(script.name, script.clauses, what, number, last_frames)
        problem = self._find_left_over() or ""
        return ScriptOutcome(script.name, script.clauses, problem, len(script.steps) + 1 if problem else 0)

    def _find_left_over(self) -> str | None:
        """Return the difference of frames or events without a step, or None."""
        what = self._difference_of_sent([])
        return what or (
            f"after the last step, the application had received {self._event_ids}"
            if self._event_ids
            else None
        )

    def _begin(self) -> None:
        assert self._checkpoint is not None
        self._stream = ClientStream.resume(self._checkpoint, life=self._lives, now=self._now)
        self._lives += 1

    def _settle(self) -> None:
        if self._stream.needs_secret:
            self._stream.show(SECRET)  # another secret is never set
        for write in self._stream.writes():
            self._checkpoint = checkpoint_after(self._checkpoint, write)
        self._sent += [msgspec.json.decode(frame) for frame in self._stream.frames_to_send()]
        self._event_ids += [
            "gone" if isinstance(event, Forget) else str(event.event_id) for event in self._stream.events()
        ]

    def _difference(self, step: Json) -> str | None:
        match step:
            case {"sent": list(patterns)}:
                return self._difference_of_sent(patterns)
            case {"delivered": list(wanted)}:
                event_ids, self._event_ids = self._event_ids, []
                return difference_of_event_ids(wanted, event_ids)
            case {"waiting": _}:
                is_waiting = not (self._stream.is_connection_wanted or self._stream.is_ended)
                return None if is_waiting else "the client is not waiting"
            case {"dropped": _}:
                return "the connection was kept" if self._stream.is_connection_wanted else None
            case {"ended": code}:
                return self._difference_of_end(code)
            case _:
                return (
                    self._difference_of_state(step)
                    if len(step) == 1 and step.keys() <= STATES
                    else self._act(step)
                )

    def _act(self, step: Json) -> str | None:
        stream = self._stream
        match step:
            case {"submit": dict(payload)}:
                stream.submit(decode_payload(msgspec.json.encode(fill(payload, self._names))))
            case {"cancel": _}:
                stream.abort()
            case {"detach": _}:
                stream.detach()
            case {"connected": _}:
                self._wait()
                if not stream.is_connection_wanted:
                    return "no connection is expected"
                stream.begin_connection(now=self._now)
            case {"receive": dict(frame)}:
                stream.receive(msgspec.json.encode(fill(frame, self._names)), now=self._now)
            case {"receive_text": str(text)}:
                stream.receive(text.encode(), now=self._now)
            case {"lost": _}:
                stream.end_connection(chance=0.0, now=self._now)
            case {"silence": _}:
                self._wait()
            case {"mark_handled": str(event_id)}:
                stream.mark_handled(EventId.parse(event_id))
            case {"restart": _}:
                if self._checkpoint is None:
                    return "no checkpoint was stored"
                self._begin()
            case _:
                return f"the script has an unknown step: {sorted(step)}"
        self._settle()
        return None

    def _wait(self) -> None:
        """Advance the clock to the client's next deadline, and handle it."""
        deadline = self._stream.next_deadline()
        if deadline is not None:
            self._now = max(self._now, deadline.at)
            self._stream.handle_deadline(now=self._now)

    def _difference_of_sent(self, patterns: list[Json]) -> str | None:
        sent, self._sent = self._sent, []
        if len(sent) != len(patterns):
            return f"{len(sent)} frames were sent, not {len(patterns)}: {[frame['type'] for frame in sent]}"
        for number, (pattern, frame) in enumerate(zip(patterns, sent, strict=True)):
            if (what := difference(pattern, frame, self._names)) is not None:
                return f"frame {number}: {what}"
        return None

    def _difference_of_end(self, code: str | None) -> str | None:
        if not self._stream.is_ended:
            return "the stream has not ended"
        found = self._stream.error.code if self._stream.error else None
        return None if found == code else f"the stream ended with {found!r}, not {code!r}"

    def _difference_of_state(self, step: Json) -> str | None:
        ((name, wanted),) = step.items()
        found = {
            "is_acknowledged": self._stream.is_acknowledged,
            "is_reconnecting": self._stream.is_reconnecting,
            "is_degraded": self._stream.is_degraded,
            "has_checkpoint": self._checkpoint is not None,
        }[name]
        return None if found is wanted else f"{name} is {found}"


STATES = frozenset({"is_acknowledged", "is_reconnecting", "is_degraded", "has_checkpoint"})
"""Steps that check properties of the client."""
