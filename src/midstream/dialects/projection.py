"""The response to an application, computed from the records of its session: equal events for every reader."""

from __future__ import annotations

from midstream.dialects.api_errors import CANCELLED, ApiError, final, refusal_of_end
from midstream.dialects.dialect import Dialect, Form
from midstream.dialects.event_filter import render_call
from midstream.history.messages import Finish, Response, ResponsePart, Text, ToolCall, UpstreamCall, Usage
from midstream.models.responses import (
    Finished,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    is_progress,
)
from midstream.session.applications import ApplicationResponse
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    Delta,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
)


class Projection:
    """Converts the records of one response to events of its dialect, in order, for one reader.

    Args:
        dialect, form: Format of the response. The stream of a background response opens at once.
        response: The response, which identifies its records.
        shows_upstream_calls: Show tools that the upstream runs itself as thinking.
    """

    def __init__(
        self,
        dialect: Dialect,
        form: Form,
        response: ApplicationResponse,
        *,
        shows_upstream_calls: bool = True,
    ) -> None:
        self._form = form
        self._writer = dialect.writer(form)
        self._place = (response.turn, response.response)
        self._shows_upstream_calls = shows_upstream_calls
        self.is_open = False
        """Whether the stream was opened, so that errors are events."""
        self.has_begun = False
        """Whether the upstream has sent something, so that it may have run tools."""
        self.is_over = False
        self.refusal: ApiError | None = None
        """Error of a failed or stopped response."""
        self._retry_after_s: float | None = None
        self._finished = Finished()
        self._usage: Usage | None = None
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._started: set[tuple[int, int, int]] = set()
        """Places of the calls that the upstream has started."""

    @property
    def model_response(self) -> Response | None:
        """The response so far, as an application will resend it; None if it has no content."""
        words = "".join(self._texts)
        parts: tuple[ResponsePart, ...] = (*((Text(words),) if words else ()), *self._calls)
        return Response(parts) if parts else None

    def whole(self) -> bytes:
        """Return the response so far as one body."""
        return self._writer.whole()

    def take(self, record: Record) -> list[bytes]:
        """Return the events of the session's next record."""
        if self.is_over or not self._is_own(record):
            return []
        match record:
            case Delta():
                return self._delta(record)
            case AttemptStarted() if self._form.is_background:
                return self.open()
            case AttemptFailed():
                self._retry_after_s = record.retry_after_s
            case ResponseCompleted():
                return self._complete(record)
            case TurnEnded():
                return self._end_turn(record)
            case _:
                pass
        return []

    def open(self) -> list[bytes]:
        """Return the first events of the stream, at the first call only.

        A reader opens the stream when it has sent its headers: later errors are events.
        """
        if self.is_open:
            return []
        self.is_open = True
        return self._writer.begin()

    def fail(self, refusal: ApiError) -> list[bytes]:
        """End the response for this reader, such as when the process shuts down."""
        self.refusal = refusal
        self.is_over = True
        if not self.is_open:
            return []
        return self._writer.cancel(refusal) if refusal is CANCELLED else self._writer.fail(refusal)

    def _is_own(self, record: Record) -> bool:
        turn, model_response = self._place
        return (
            getattr(record, "turn", 0) == turn
            and getattr(record, "response", model_response) >= model_response
        )

    def _delta(self, delta: Delta) -> list[bytes]:
        self.has_begun = True
        event = self._event(delta)
        if event is None:
            return []
        opened = self.open() if is_progress(event) else []
        return opened + self._writer.write(event)

    def _event(self, delta: Delta) -> ModelEvent | None:
        if delta.requested is not None:
            call = delta.requested
            self._calls.append(call)
            return ToolCallRequested(call.id, call.name, call.arguments, call.signature)
        if delta.call is not None:
            return self._own_call(delta, delta.call)
        if delta.signature:
            return ThinkingDelta("", delta.signature)
        if not delta.text:
            return None
        if delta.kind == "thinking":
            return ThinkingDelta(delta.text)
        self._texts.append(delta.text)
        return TextDelta(delta.text)

    def _own_call(self, delta: Delta, call: UpstreamCall) -> ModelEvent | None:
        """Return the event of the start or end of a tool that the upstream runs; None for a change of its arguments."""
        place = (delta.response, delta.attempt, delta.part)
        is_change = call.outcome is None and place in self._started
        self._started.add(place)
        return render_call(call) if self._shows_upstream_calls and not is_change else None

    def _complete(self, record: ResponseCompleted) -> list[bytes]:
        body = record.body
        if body.usage is not None:
            self._usage = body.usage if self._usage is None else self._usage + body.usage
        self._finished = Finished(body.finish, body.model, self._usage, body.stop_sequence)
        if body.finish is Finish.INTERRUPTED or not body.calls:
            return []  # the turn continues, or its end follows
        return self._finish(record.at)

    def _end_turn(self, record: TurnEnded) -> list[bytes]:
        if record.status is TurnStatus.COMPLETED:
            return self._finish(record.at)
        refusal = refusal_of_end(record, retry_after_s=self._retry_after_s)
        pieces = self.fail(refusal)
        self.refusal = final(refusal) if self.has_begun else refusal
        return pieces

    def _finish(self, at: float) -> list[bytes]:
        self.is_over = True
        self._writer.end_at(at)
        return self.open() + self._writer.write(self._finished)
