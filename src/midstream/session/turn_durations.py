"""Durations of turns, model calls and tool calls, computed from records.

A fold for observers. It begins at some moment, so that intervals which began before are missing. Intervals that never
end are dropped when too many are open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from midstream.history.messages import Usage
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallStarted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    TranscriptAccepted,
    TurnEnded,
    TurnResumed,
)

OPEN_MAX = 10_000
"""Open intervals; beyond it the oldest is dropped."""
OK = "ok"


class IntervalKind(StrEnum):
    """Kind of work that took time."""

    TURN = "turn"
    MODEL = "model"
    CALL = "call"


class Interval(Struct, frozen=True):
    """A turn, a model call or a tool call, begun and perhaps ended: names, numbers and times without any text.

    Args:
        kind, session, turn, response, attempt, call_id: Its kind and place.
        began_at, ended_at: Seconds since 1970; 0 while it has not ended.
        name: The name of the tool, or of the model after its response.
        outcome: `ok`; the status of a turn; else the code of an error, or the outcome of a call.
        code: The code of a turn's error.
        usage: Tokens of a response, if the provider counted them.
        finish: Why a response ended.
    """

    kind: IntervalKind
    session: str
    turn: int
    response: int
    attempt: int
    call_id: str
    began_at: float
    ended_at: float = 0.0
    name: str = ""
    outcome: str = ""
    code: str = ""
    usage: Usage | None = None
    finish: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return not self.ended_at

    @property
    def seconds(self) -> float:
        """Its duration; not negative, although clocks of several nodes may differ."""
        return max(0.0, self.ended_at - self.began_at)


_Key = tuple[IntervalKind, str, int, int, str]


class Intervals:
    """Folds records into intervals; yields each one at its begin and at its end."""

    def __init__(self) -> None:
        self._open: OrderedDict[_Key, Interval] = OrderedDict()
        self._names: OrderedDict[tuple[str, int, int], dict[str, str]] = OrderedDict()
        """Names of the calls of a session's newest responses."""

    def add(self, session: str, record: Record) -> Iterator[Interval]:
        """Process the next record of a session."""
        match record:
            case MessageAccepted() | TranscriptAccepted() | TurnResumed():
                yield self._begin(Interval(IntervalKind.TURN, session, record.turn, 0, 0, "", record.at))
            case AttemptStarted(turn, response, attempt, at):
                yield self._begin(Interval(IntervalKind.MODEL, session, turn, response, attempt, "", at))
            case AttemptFailed(turn, response, _, code, _, at):
                yield from self._end((IntervalKind.MODEL, session, turn, response, ""), at, outcome=code)
            case ResponseCompleted():
                yield from self._complete_response(session, record)
            case CallStarted():
                name = self._names.get((session, record.turn, record.response), {}).get(record.call_id, "")
                began = Interval(
                    IntervalKind.CALL,
                    session,
                    record.turn,
                    record.response,
                    record.run,
                    record.call_id,
                    record.at,
                )
                yield self._begin(replace(began, name=name))
            case CallEnded(turn, response, result, at):
                key = (IntervalKind.CALL, session, turn, response, result.call_id)
                yield from self._end(key, at, outcome=result.outcome.value)
            case TurnEnded(turn, status, at, code):
                yield from self._end(
                    (IntervalKind.TURN, session, turn, 0, ""), at, outcome=status.value, code=code
                )
            case _:
                pass

    def _complete_response(self, session: str, record: ResponseCompleted) -> Iterator[Interval]:
        response = record.body
        self._names[session, record.turn, record.response] = {call.id: call.name for call in response.calls}
        if len(self._names) > OPEN_MAX:
            self._names.popitem(last=False)
        ended = {"name": response.model, "usage": response.usage, "finish": response.finish.value}
        key = (IntervalKind.MODEL, session, record.turn, record.response, "")
        for interval in self._end(key, record.at, outcome=OK):
            yield replace(interval, **ended)

    def _begin(self, interval: Interval) -> Interval:
        self._open[_key_of(interval)] = interval
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)
        return interval

    def _end(self, key: _Key, at: float, *, outcome: str, code: str = "") -> Iterator[Interval]:
        began = self._open.pop(key, None)
        if began is not None:
            yield replace(began, ended_at=at, outcome=outcome, code=code)


def _key_of(interval: Interval) -> _Key:
    return interval.kind, interval.session, interval.turn, interval.response, interval.call_id
