"""Activity of sub-agents, as whole lines indented below their call. Several may run concurrently."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.cli.terminal import Ink, clean, indent_lines, shorten
from midstream.cli.transcript import INDENT, Called, call_line, note_of, ran_elsewhere
from midstream.history.messages import Text, ToolCall, UpstreamCall
from midstream.session.records import (
    CallEnded,
    CallStarted,
    ChildDelta,
    MessageAccepted,
    QuestionAsked,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
    decode,
)

STEP = "  "
"""Further indentation of a sub-agent below its caller."""
BAR = "│ "


class SubAgents:
    """Running sub-agents of one session. Text is shown with each complete response, a call at its end."""

    def __init__(self, ink: Ink, width: int, *, indent: str = INDENT) -> None:
        self._ink = ink
        self._width = width
        self._indent = indent
        self._calls: dict[tuple[str, int, str], Called] = {}
        self._below: dict[str, SubAgents] = {}

    def lines(self, delta: ChildDelta) -> Iterator[str]:
        """Yield the lines of a sub-agent's record."""
        record = decode(bytes(delta.record))
        if isinstance(record, ChildDelta):
            below = self._below.setdefault(
                delta.child, SubAgents(self._ink, self._width, indent=self._indent + STEP)
            )
            yield from below.lines(record)
        else:
            yield from self._lines(delta.child, record)

    def _lines(self, child: str, record: Record) -> Iterator[str]:
        match record:
            case ResponseCompleted():
                for part in record.body.parts:
                    if isinstance(part, Text):
                        yield from self._words(part.text)
                    elif isinstance(part, ToolCall):
                        self._calls[child, record.response, part.id] = Called(part.name, part.arguments)
                    elif isinstance(part, UpstreamCall):
                        line = call_line(ran_elsewhere(part), self._ink, self._room)
                        yield self._set_in(line.removeprefix(INDENT))
            case CallStarted():
                if called := self._calls.get((child, record.response, record.call_id)):
                    called.runs, called.started_at = record.run, record.at
                    called.arguments = record.arguments or called.arguments
            case CallEnded():
                key = (child, record.response, record.result.call_id)
                called = self._calls.pop(key, None) or Called("call", record.result.call_id)
                called.outcome, called.ended_at = record.result.outcome.value, record.at
                called.content = record.result.content
                line = call_line(called, self._ink, self._room, has_reason=True)
                yield self._set_in(line.removeprefix(INDENT))
            case MessageAccepted() | QuestionAsked() | TurnEnded(status=TurnStatus.COMPLETED):
                pass
            case TurnEnded():
                reason = f": {record.message} [{record.code}]" if record.code else ""
                yield self._note(f"the sub-agent {record.status.value}{reason}")
            case _:
                if note := note_of(record):
                    yield self._note(note)

    @property
    def _room(self) -> int:
        return max(20, (self._width or 200) - len(self._indent) - len(BAR))

    def _words(self, text: str) -> Iterator[str]:
        for line in indent_lines(clean(text).strip("\n"), "", self._room):
            yield self._set_in(line)

    def _note(self, text: str) -> str:
        return self._set_in(self._ink.yellow(shorten(f"~ {clean(text, is_one_line=True)}", self._room)))

    def _set_in(self, line: str) -> str:
        return f"{self._indent}{self._ink.dim(BAR)}{line}"
