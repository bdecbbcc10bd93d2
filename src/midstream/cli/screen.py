"""Live display of a session: text as it arrives, each call as one line, everything else as a remark.

A `Screen` receives each event once and in order, and prints nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable

from midstream.cli.subagents import SubAgents
from midstream.cli.terminal import Ink, clean, indent_lines, shorten, width_of
from midstream.cli.transcript import INDENT, Called, call_line, note_of, ran_elsewhere, words_of
from midstream.client import PlaybackLost
from midstream.history.messages import ToolCall, UpstreamCall
from midstream.protocol.answer_text import text_of
from midstream.protocol.frames import Gone, SnapshotFrame
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    ChildDelta,
    Delta,
    MessageAccepted,
    QuestionAsked,
    Record,
    ResponseCompleted,
    TranscriptAccepted,
    TurnEnded,
    TurnStatus,
)

Write = Callable[[str], None]
_ERASE_LINE = "\r\x1b[K"


class Flow:
    """Wraps text that arrives in pieces: a word is written when the space after it has arrived.

    Args:
        write: Prints text.
        indent: Indentation of every line except the first.
        width: Columns of a line; 0 writes text at once, without wrapping.
    """

    def __init__(self, write: Write, *, indent: str, width: int) -> None:
        self._write = write
        self._indent = indent
        self._width = width
        self._column = width_of(indent)
        self._gap = 0
        """Spaces before the current word."""
        self._word = ""
        self._is_begun = False

    def add(self, text: str) -> None:
        """Add cleaned text."""
        if not self._width:
            self._write(text)
            return
        for character in text.expandtabs(4):
            if character not in " \n":
                self._word += character
                continue
            self._flush()
            if character == "\n":
                self._break()
            elif self._is_begun:
                self._gap += 1

    def end(self) -> None:
        """Write the last word and end the line."""
        self._flush()
        self._write("\n")

    def _flush(self) -> None:
        if not self._word:
            return
        wide = self._gap + width_of(self._word)
        if self._column + wide > self._width and self._column > len(self._indent):
            self._break()
            wide = width_of(self._word)
        self._write(" " * self._gap + self._word)
        self._column += wide
        self._word, self._gap, self._is_begun = "", 0, True

    def _break(self) -> None:
        self._write(f"\n{self._indent}")
        self._column, self._gap = len(self._indent), 0


class Screen:
    """Shows the events of one session.

    Args:
        print_text: Prints the agent's text.
        print_line: Prints whole lines about everything else.
        ink: Colors; on a terminal, the line of a running call is overwritten when it ends.
        width: Columns of a terminal; 0 for a pipe or a file. These receive only complete responses, because printed
            text of a void attempt cannot be removed.
    """

    def __init__(self, print_text: Write, print_line: Write, ink: Ink, width: int) -> None:
        self._print_text = print_text
        self._print_line = print_line
        self._ink = ink
        self._width = width
        self._flow: Flow | None = None
        self._kind = ""
        self._held = ""
        """Text of the attempt, which is shown when the response is complete."""
        self._calls: dict[tuple[int, int, str], Called] = {}
        self._below = SubAgents(ink, width)
        self._running: Called | None = None
        """The running call in the last line, which can be overwritten."""
        self._elsewhere = ""
        """Id of that call, if the upstream runs it."""

    def show(self, record: Record | Gone | SnapshotFrame | PlaybackLost) -> None:
        """Show one event."""
        match record:
            case Delta():
                self._delta(record)
            case MessageAccepted() | TranscriptAccepted():
                self._show_message(clean(words_of(record.message)))
            case AttemptStarted() if record.attempt > 1:
                self._held = ""
                self.note(f"retried (attempt {record.attempt}): the text of the previous attempt is void")
            case ResponseCompleted():
                self.pause()
                self._settle(record)
                calls = [part for part in record.body.parts if isinstance(part, ToolCall)]
                for call in calls:
                    self._calls[record.turn, record.response, call.id] = Called(call.name, call.arguments)
            case CallStarted():
                self._show_call_start(record)
            case CallEnded():
                self._show_call_end(record)
            case TurnEnded():
                self._show_turn_end(record)
            case Gone(has_snapshot=True):
                pass  # the snapshot contains the rest
            case Gone():
                self.note(f"the server lost all events after {record.resume_from}; ignore their output")
            case SnapshotFrame():
                self.note(
                    "the missed events are no longer kept; `midstream sessions show` prints the conversation"
                )
            case PlaybackLost():
                self.note(f"the last message was lost; send it again: {record.reason}")
            case ChildDelta():
                for line in self._below.lines(record):
                    self.remark(line)
            case QuestionAsked():
                pass  # `Answering` shows it, with all data
            case _:
                if note := note_of(record):
                    self.note(note)

    def note(self, text: str) -> None:
        """Print a remark about the turn."""
        line = f"{INDENT}~ {clean(text, is_one_line=True)}"
        self.remark(self._ink.yellow(shorten(line, self._width) if self._width else line))

    def remark(self, line: str) -> None:
        """Print a separate line."""
        self.pause()
        self._print_line(f"{line}\n")

    def pause(self) -> None:
        """End the current line, if any."""
        if self._flow is not None:
            self._flow.end()
            self._flow, self._kind = None, ""
        if self._running is not None:
            self._print_line("\n")
            self._running, self._elsewhere = None, ""

    def _show_message(self, words: str) -> None:
        lines = indent_lines(words, INDENT, self._width) if self._width else [f"{INDENT}{words}"]
        self.remark("\n".join([f"{self._ink.bold('you')}    {lines[0][len(INDENT) :]}", *lines[1:]]))

    def _delta(self, delta: Delta) -> None:
        if delta.call is not None:
            self._ran_elsewhere(delta.call)
            return
        if delta.kind == "text" and not self._width:
            self._held += delta.text
            return
        if self._flow is None or self._kind != delta.kind:
            self.pause()
            self._begin(delta.kind)
        assert self._flow is not None
        self._flow.add(clean(delta.text))

    def _settle(self, record: ResponseCompleted) -> None:
        """Write the text of a complete response to a pipe."""
        self._held = ""
        if not self._width and (text := text_of(record.body)):
            self._begin("text")
            assert self._flow is not None
            self._flow.add(clean(text))
            self.pause()

    def _begin(self, kind: str) -> None:
        self._kind = kind
        if kind == "thinking":
            self._print_line(INDENT if self._width else "thinking: ")
            self._flow = Flow(
                lambda text: self._print_line(self._ink.dim(text)), indent=INDENT, width=self._width
            )
            return
        if self._width:
            self._print_text(f"{self._ink.cyan('agent')}  ")
        self._flow = Flow(self._print_text, indent=INDENT, width=self._width)

    def _show_call_start(self, record: CallStarted) -> None:
        called = self._calls.get((record.turn, record.response, record.call_id))
        if called is None:
            return  # another screen has shown its response
        self.pause()
        called.runs, called.started_at = record.run, record.at
        called.arguments = record.arguments or called.arguments
        self._print_line(self._line_of(called))
        if self._ink.is_terminal:
            self._running = called
        else:
            self._print_line("\n")

    def _show_call_end(self, record: CallEnded) -> None:
        key = (record.turn, record.response, record.result.call_id)
        called = self._calls.pop(key, None) or Called("call", record.result.call_id)
        called.outcome, called.ended_at = record.result.outcome.value, record.at
        called.content = record.result.content
        if called is self._running:
            self._running = None
            self._print_line(_ERASE_LINE)
        self.remark(self._line_of(called))

    def _ran_elsewhere(self, call: UpstreamCall) -> None:
        called = ran_elsewhere(call)
        if call.outcome is not None:
            if self._elsewhere == call.id and self._running is not None:
                self._running = None
                self._print_line(_ERASE_LINE)
            self._elsewhere = ""
            self.remark(self._line_of(called))
            return
        if self._elsewhere == call.id and self._running is not None:  # its arguments may have changed
            self._print_line(_ERASE_LINE)
        else:
            self.pause()
        self._print_line(self._line_of(called))
        if self._ink.is_terminal:
            self._running, self._elsewhere = called, call.id
        else:
            self._print_line("\n")

    def _show_turn_end(self, record: TurnEnded) -> None:
        if record.status is TurnStatus.COMPLETED:
            self.pause()
            return
        if self._held:
            self.note(f"the answer was interrupted: {self._held}")
            self._held = ""
        reason = f": {record.message} [{record.code}]" if record.code else ""
        self.note(f"turn {record.turn} {record.status.value}{reason}")

    def _line_of(self, called: Called) -> str:
        return call_line(called, self._ink, self._width or 200, has_reason=True)
