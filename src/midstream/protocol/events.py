"""Events of a session for an application, one for each record, including those of its sub-agents."""

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
    """Notice that an unacknowledged message of this client cannot be read and is not sent again.

    Args:
        reason: The damage.
        session: The server's state of the session: the JSON of `GET /v1/sessions/{id}`. Replace your data by it.
    """

    reason: str
    session: msgspec.Raw


class Event(Struct, frozen=True, eq=False):
    """One event of a session, or of a sub-agent's session.

    Args:
        id: Its event id. Store it with the results of the event, to recognize a repetition.
        record: The record; see `midstream.session.records`. A `Gone`: events after `id` are no longer in the journal
            (lost in a power cut, or pruned). Drop them; the existing ones follow. A `SnapshotFrame` is the session at
            `id`: replace all your data of the session by it. A `PlaybackLost` comes first if the turn's state at this
            client is damaged (STREAM-48).
        answer: The text of the turn's answer after this event; see `transcript`. Comparisons ignore it.
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
        """The whole text of the turn's answer so far, which can always replace the displayed text.

        The text of a cut attempt is dropped when the next attempt differs. The texts of two responses are two
        paragraphs. Text of sub-agents and thinking are not included.
        """
        return self.answer.transcript

    @property
    def replaces(self) -> bool:
        """Whether the displayed text of this answer is not valid any more: replace it by `transcript`.

        If False, the displayed text with `text` appended equals `transcript`.
        """
        return self.answer.replaces

    @property
    def text(self) -> str:
        """The text that this event adds to the displayed text; "" if it adds none.

        After a cut, text that the next attempt repeats is not added again. When it differs, `replaces` is True, and
        this is the whole text of the new attempt.
        """
        return self.answer.added

    @property
    def upstream_call(self) -> UpstreamCall | None:
        """The tool that the upstream runs itself, at its start (without `outcome`) and at its end; else None. For
        display; it must not be run.
        """
        return self.record.call if isinstance(self.record, Delta) else None

    @property
    def is_end(self) -> bool:
        """Whether a turn ends here."""
        return isinstance(self.record, TurnEnded)

    @property
    def path(self) -> tuple[str, ...]:
        """The sessions of the sub-agents that it comes from, the outermost first; () for the session itself."""
        return self._seen_through()[0]

    @property
    def innermost(self) -> Record | Gone | SnapshotFrame | PlaybackLost:
        """Return the record of the innermost sub-agent: of the last session of `path`.

        A sub-agent's record of an unknown type stays in the `ChildDelta` that reports it.

        Raises:
            RecordUndecodableError: A sub-agent's record has a known type and cannot be decoded.
        """
        return self._seen_through()[1]

    @property
    def question(self) -> QuestionAsked | None:
        """The question of the agent or a sub-agent to a person in this event, or None.

        The answer belongs to the asking session: the last one of `path`, if there is one.
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
    """Creates the events of a session's records, in order.

    Args:
        answer: The text of the earlier records.
    """

    def __init__(self, answer: AnswerText | None = None) -> None:
        self._answer = answer or AnswerText()
        self._is_first = answer is not None and bool(answer.now.count)

    def event(self, event_id: str, record: Record | Gone | SnapshotFrame | PlaybackLost) -> Event:
        """Return the next event."""
        if isinstance(record, PlaybackLost):
            return Event(event_id, record, self._answer.restart(record.session))
        answer = self._answer.take(record)
        if self._is_first:  # the earlier text is not displayed here
            self._is_first, answer = False, replace(answer, replaces=True)
        return Event(event_id, record, answer)


def completed_text(session: str, last: Event | None) -> str:
    """Return the text of the answer of the turn that this event ended.

    Raises:
        TurnFailedError: The turn was not completed.
        ConnectionLostError: There is no event, or it ends no turn: the client was closed before the end.
        StoreDamagedError: This client's message cannot be read any more.
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
