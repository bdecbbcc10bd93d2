"""Events of a session for an application: one for each record, also of the sub-agents below it."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import ConnectionLostError, StoreDamagedError, TurnFailedError
from midstream.history.messages import UpstreamCall
from midstream.protocol.answer_text import AnswerSoFar, AnswerText
from midstream.protocol.frames import Gone, SnapshotFrame
from midstream.session.records import (
    ChildDelta,
    Delta,
    MessageWithdrawn,
    QuestionAsked,
    Record,
    TurnEnded,
    TurnStatus,
    decode,
    is_of_unknown_type,
)


class PlaybackLost(Struct, frozen=True, tag="playback_lost", tag_field="type"):
    """Notice that a message of this client, never acknowledged, cannot be read any more and is not sent again.

    Args:
        reason: What is damaged.
        session: The session as the server has it: what `GET /v1/sessions/{id}` answers, as JSON. Put it in the place
            of all that you have of it.
    """

    reason: str
    session: msgspec.Raw


class Event(Struct, frozen=True, eq=False):
    """One thing that happened in a session, or in that of a sub-agent at work for it.

    Args:
        id: Its place on the session's line. Keep it beside what you make of the event: where it comes again, you
            have it.
        record: What happened; see `midstream.session.records`. After a `Gone`, events behind `id` are not in the
            journal any more (lost in a power cut, or pruned): drop them; the existing ones follow. A `SnapshotFrame`
            is the session as it was at `id`: put it in the place of all that you have of it. A `PlaybackLost` begins
            what is left of a turn whose state is damaged here (STREAM-48).
        answer: The text of the turn's answer after this event; see `transcript`. It is no part of what makes two events
            equal.
    """

    id: str
    record: Record | Gone | SnapshotFrame | PlaybackLost
    answer: AnswerSoFar = AnswerSoFar([], 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and (self.id, self.record) == (other.id, other.record)

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def transcript(self) -> str:
        """The whole text of the turn's answer so far: put it in the place of what you show, and that is right.

        Each word once: the words of a cut attempt are dropped when the next attempt differs. The texts of two
        responses are two paragraphs. Text of sub-agents and thinking are not in it.
        """
        return self.answer.transcript

    @property
    def replaces(self) -> bool:
        """Whether what was shown of this answer so far does not stand: show `transcript` in its place.

        Where it is False, appending `text` to what was shown gives the same as `transcript`.
        """
        return self.answer.replaces

    @property
    def text(self) -> str:
        """The words that this event adds to what was shown; "" where it adds none.

        Where the model is asked again after a cut, the words that it repeats are not added again. Only where it
        differs `replaces` is True, and this is the whole text of the new attempt.
        """
        return self.answer.added

    @property
    def upstream_call(self) -> UpstreamCall | None:
        """A tool that the upstream runs itself, when it starts (without `outcome`) and when it ended; else None. It
        is for display and must not be run.
        """
        return self.record.call if isinstance(self.record, Delta) else None

    @property
    def is_end(self) -> bool:
        """Whether a turn ends here."""
        return isinstance(self.record, TurnEnded)

    @property
    def path(self) -> tuple[str, ...]:
        """The sessions of the sub-agents it comes from, the outermost first; () for the session itself."""
        return self._seen_through()[0]

    @property
    def innermost(self) -> Record | Gone | SnapshotFrame | PlaybackLost:
        """Return the record seen through the sub-agents that report it: that of the last session of `path`.

        A sub-agent's record of an unknown type stays in the `ChildDelta` that reports it.

        Raises:
            RecordUndecodableError: A sub-agent's record is of a known type, and this version cannot read it.
        """
        return self._seen_through()[1]

    @property
    def question(self) -> QuestionAsked | None:
        """The question to a person that is asked here, by the agent or by a sub-agent; None where none is.

        It is answered in the session that asks: the last one of `path`, where there is any.
        """
        record = self.innermost
        return record if isinstance(record, QuestionAsked) else None

    def _seen_through(self) -> tuple[tuple[str, ...], Record | Gone | SnapshotFrame | PlaybackLost]:
        path: list[str] = []
        record = self.record
        while isinstance(record, ChildDelta):
            path.append(record.child)
            body = bytes(record.record)
            if is_of_unknown_type(body):  # STREAM-34
                break
            record = decode(body)
        return tuple(path), record


class EventReader:
    """Make events of what is read of a session, in order.

    Args:
        answer: What was read before.
    """

    def __init__(self, answer: AnswerText | None = None) -> None:
        self._answer = answer or AnswerText()
        self._is_first = answer is not None and bool(answer.now.count)

    def event(self, event_id: str, record: Record | Gone | SnapshotFrame | PlaybackLost) -> Event:
        """Return the next event."""
        if isinstance(record, PlaybackLost):
            return Event(event_id, record, self._answer.restart(record.session))
        answer = self._answer.take(record)
        if self._is_first:  # nothing of what was read before is shown here
            self._is_first, answer = False, replace(answer, replaces=True)
        return Event(event_id, record, answer)


def completed_text(session: str, last: Event | None) -> str:
    """Return the text of the answer whose turn ended with this event.

    Raises:
        TurnFailedError: It did not complete.
        ConnectionLostError: There is no such event, or it ends no turn: the client was closed before.
        StoreDamagedError: What this client had sent cannot be read any more.
    """
    if last is None:
        raise ConnectionLostError(f"the turn of session {session!r} continues without this client")
    match last.record:
        case TurnEnded(status=TurnStatus.COMPLETED):
            return last.transcript
        case TurnEnded(turn=turn, status=status, code=code, message=message):
            raise TurnFailedError(
                f"turn {turn} of session {session!r} was not completed ({status.value})"
                + (f": {message} [{code}]" if code else ""),
                status=status.value,
                cause=code,
                transcript=last.transcript,
            )
        case MessageWithdrawn(number=number):
            raise TurnFailedError(
                f"message {number} of session {session!r} was withdrawn", status="withdrawn"
            )
        case PlaybackLost(reason=reason):
            raise StoreDamagedError(f"the message to session {session!r} can no longer be read: {reason}")
        case SnapshotFrame(session=shown):
            ended = msgspec.json.decode(shown, type=_SessionNow).last
            if ended == TurnStatus.COMPLETED:
                return last.transcript
            message = f"the turn of session {session!r} was not completed ({ended})"
            raise TurnFailedError(message, status=ended, transcript=last.transcript)
        case _:
            raise ConnectionLostError(f"the turn of session {session!r} continues without this client")


class _SessionNow(Struct):
    last: str = ""
