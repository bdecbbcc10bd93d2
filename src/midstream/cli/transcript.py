"""A journal as a readable transcript: messages, answers, outcomes of calls, and ends of turns.

Two pure steps: `read` converts records to turns, `lines` formats them for a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import UNSET, Struct, UnsetType, field

from midstream.cli.terminal import Ink, clean, indent_lines, shorten, width_of
from midstream.cli.times import duration_of, time_of
from midstream.cli.visible_text import reveal_line
from midstream.history.messages import (
    File,
    Outcome,
    Response,
    Step,
    Text,
    Thinking,
    ToolCall,
    UpstreamCall,
    UserMessage,
)
from midstream.session.calls import DAMAGED_CONTENT
from midstream.session.records import (
    AttemptContinued,
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallInDoubt,
    CallProgressed,
    CallStarted,
    CancelRequested,
    ChildDelta,
    CloseReason,
    Delta,
    EpochStarted,
    HistoryCompacted,
    JournalPruned,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    OutcomeDamaged,
    QuestionAnswered,
    QuestionAsked,
    QuestionClosed,
    Record,
    ResponseCompleted,
    ResultArrivedLate,
    StallEnded,
    StallNoticed,
    ToolsChanged,
    TranscriptAccepted,
    TurnEnded,
    TurnResumed,
    TurnStatus,
    decode,
)
from midstream.session.session import GO_ON, Session, restore_session
from midstream.timing import StalledOn

RESULT_LINES_MAX = 3
"""Lines of a tool result that are shown; `export` has all."""
NAMES_MAX = 8
"""Tools that a note about a change lists; `export` has all."""
CONTINUED_NOTE = "cut; the provider kept the response, which continues where it stopped"
INDENT = "       "
INNER = "  "
"""Further indentation of a sub-agent's work below its call."""


class SpokenText(Struct, tag="text", tag_field="type"):
    """Text of a person or of the agent; `is_cut` if it is incomplete."""

    by: str
    text: str
    is_cut: bool = False


class Called(Struct, tag="called", tag_field="type"):
    """One tool call. `outcome` is "" while it is unknown, `runs` counts the starts.

    `within` has the turns of a sub-agent that the call runs; `is_elsewhere` means that the upstream ran it itself.
    """

    name: str
    arguments: str
    runs: int = 0
    outcome: str = ""
    content: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    within: list[TurnTranscript] = field(default_factory=list)
    is_elsewhere: bool = False


class Noted(Struct, tag="noted", tag_field="type"):
    """A remark about the turn: a failed attempt, a new process, a cancel."""

    what: str


class TurnTranscript(Struct):
    """One turn; `status` is "running" while it is open, `at` is 0 if its events are no longer kept."""

    turn: int
    at: float
    entries: list[SpokenText | Called | Noted]
    status: str = "running"
    ended_at: float | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


def read(records: Iterable[Record]) -> list[TurnTranscript]:
    """Return the turns of a journal."""
    reading = _Reading()
    for record in records:
        reading.take(record)
    return reading.turns


class _Reading:
    """State of the conversion of records to turns."""

    def __init__(self) -> None:
        self.turns: list[TurnTranscript] = []
        self._calls: dict[tuple[int, str], Called] = {}
        self._children: dict[str, _Reading] = {}
        self._parts: dict[int, SpokenText | Called] = {}
        """Text of the current attempt, and calls that its upstream ran, by part."""

    def take(self, record: Record) -> None:
        if isinstance(record, JournalPruned):
            self._take_history(restore_session(record))
        elif isinstance(record, TranscriptAccepted) and self.turns and self.turns[-1].turn == record.turn:
            pass  # the application sent the results of its calls
        elif isinstance(record, MessageAccepted | TranscriptAccepted):
            self._parts, self._calls = {}, {}
            self.turns.append(
                TurnTranscript(record.turn, record.at, [SpokenText("user", words_of(record.message))])
            )
        elif self.turns:
            self._take(record, self.turns[-1])

    def _take(self, record: Record, turn: TurnTranscript) -> None:
        match record:
            case AttemptStarted():
                self._void_words(turn)
            case Delta():
                self._take_delta(record, turn)
            case ResponseCompleted():
                self._take_response(record.response, record.body, turn)
            case CallStarted():
                called = self._calls[record.response, record.call_id]
                called.runs, called.started_at = record.run, record.at
                called.arguments = record.arguments or called.arguments
            case ChildDelta():
                self._take_child(record)
            case CallEnded():
                called = self._calls[record.response, record.result.call_id]
                called.outcome, called.content = record.result.outcome.value, record.result.content
                called.ended_at = record.at
            case OutcomeDamaged():
                called = self._calls[record.response, record.call_id]
                called.outcome, called.content = Outcome.UNKNOWN.value, DAMAGED_CONTENT
            case EpochStarted() if turn.status != "running":
                pass
            case TurnResumed():
                turn.status, turn.ended_at, turn.code, turn.message = "running", UNSET, UNSET, UNSET
                turn.entries.append(Noted(note_of(record)))
            case TurnEnded():
                turn.status, turn.ended_at = record.status.value, record.at
                turn.code, turn.message = record.code or UNSET, record.message or UNSET
            case CallProgressed():
                pass  # progress is not shown after the end
            case _:
                if note := note_of(record):
                    turn.entries.append(Noted(note))

    def _take_history(self, state: Session) -> None:
        """Begin with the history of a pruned journal, which has text and results, but no times."""
        opened = [isinstance(each, UserMessage) and each != GO_ON for each in state.history.entries]
        number = state.turns - sum(opened)
        response = 0
        for entry, is_opening in zip(state.history.entries, opened, strict=True):
            if is_opening and isinstance(entry, UserMessage):
                number, response = number + 1, 0
                words = SpokenText("user", words_of(entry))
                self.turns.append(TurnTranscript(number, 0.0, [words], TurnStatus.COMPLETED.value))
            elif isinstance(entry, Step) and self.turns:
                response += 1
                self._take_response(response, entry.response, self.turns[-1])
                for result in entry.results:
                    called = self._calls[response, result.call_id]
                    called.outcome, called.content = result.outcome.value, result.content
        if self.turns and state.is_live:
            self.turns[-1].status = "running"
        elif self.turns and state.last_turn is not None:
            self.turns[-1].status = state.last_turn.status.value

    def _take_delta(self, delta: Delta, turn: TurnTranscript) -> None:
        known = self._parts.get(delta.part)
        if known is None:
            by = "thinking" if delta.kind == "thinking" else "agent"
            known = ran_elsewhere(delta.call) if delta.call is not None else SpokenText(by, "", is_cut=True)
            self._parts[delta.part] = known
            turn.entries.append(known)
        if isinstance(known, SpokenText):
            known.text += delta.text
        elif delta.call is not None:
            known.arguments = delta.call.arguments
            if delta.call.outcome is not None:
                known.outcome, known.content = delta.call.outcome.value, delta.call.content

    def _void_words(self, turn: TurnTranscript) -> None:
        """Drop the text of an interrupted attempt; keep the calls that its upstream ran."""
        void = {id(part) for part in self._parts.values() if isinstance(part, SpokenText)}
        turn.entries[:] = [entry for entry in turn.entries if id(entry) not in void]
        self._parts = {}

    def _take_child(self, delta: ChildDelta) -> None:
        called = self._calls[delta.response, delta.call_id]
        if delta.child not in self._children:
            self._children[delta.child] = reading = _Reading()
            called.within = reading.turns
        self._children[delta.child].take(decode(bytes(delta.record)))

    def _take_response(self, number: int, response: Response, turn: TurnTranscript) -> None:
        for begun in self._parts.values():
            turn.entries.remove(begun)
        self._parts = {}
        for part in response.parts:
            match part:
                case Text():
                    turn.entries.append(SpokenText("agent", part.text))
                case Thinking():
                    turn.entries.append(SpokenText("thinking", part.text))
                case ToolCall():
                    called = self._calls[number, part.id] = Called(part.name, part.arguments)
                    turn.entries.append(called)
                case UpstreamCall():
                    turn.entries.append(ran_elsewhere(part))


def ran_elsewhere(call: UpstreamCall) -> Called:
    """Return the entry of a call that the upstream runs itself."""
    outcome = "" if call.outcome is None else call.outcome.value
    name = call.name or "a tool"
    return Called(name, call.arguments, outcome=outcome, content=call.content, is_elsewhere=True)


def note_of(record: Record) -> str:
    """Return the remark about a record; "" for text, calls and ends."""
    match record:
        case AttemptFailed():
            return f"attempt {record.attempt} failed: {record.message} [{record.code}]"
        case AttemptContinued():
            return CONTINUED_NOTE
        case StallNoticed():
            return stall_note(record)
        case StallEnded():
            return f"resumed after {duration_of(record.silent_s, digits=0)}"
        case HistoryCompacted():
            return "longer than the model can read; the model no longer receives the older part"
        case ToolsChanged():
            return tools_note(record)
        case EpochStarted() if record.epoch > 1:
            return f"a new process took over (epoch {record.epoch})"
        case CancelRequested():
            return (
                "the time limit of the turn was reached"
                if record.status is TurnStatus.FAILED
                else "stopped on request"
            )
        case TurnResumed():
            return f"turn {record.turn} continues"
        case MessageQueued():
            return f"message {record.number} is queued until the end of this turn: {words_of(record.message)}"
        case MessageWithdrawn():
            return f"message {record.number} was withdrawn"
        case _:
            return _note_of_call(record)


def _note_of_call(record: Record) -> str:
    match record:
        case CallProgressed():
            return record.text
        case CallInDoubt():
            return "the process that ran a call died; its outcome is unknown"
        case QuestionAsked() if record.attempt:
            return f"requests permission for {record.name} {record.arguments}"
        case QuestionClosed():
            why = (
                "no answer came in time"
                if record.why is CloseReason.EXPIRED
                else "no answer is needed any more"
            )
            return f"the question is closed: {why}"
        case QuestionAsked():
            return f"waits for a person: {record.text or record.kind.value}"
        case QuestionAnswered():
            who = record.by or "a person"
            changed = ", with other arguments" if record.arguments is not None else ""
            return (
                f"{who} answered: {record.choice.value}{changed}{f': {record.text}' if record.text else ''}"
            )
        case ResultArrivedLate():
            result = record.result
            return f"the outcome of a call arrived late ({result.outcome.value}): {result.content}"
        case _:
            return ""


def tools_note(changed: ToolsChanged) -> str:
    """Describe which tools were added and removed."""
    notes = [
        f"{what} {', '.join(names[:NAMES_MAX])}{', …' if len(names) > NAMES_MAX else ''}"
        for what, names in (
            ("tools added:", changed.added),
            ("tools gone:", changed.removed),
            ("not reachable:", changed.unreachable),
        )
        if names
    ]
    return "; ".join(notes) or "all tools are reachable again"


def stall_note(noticed: StallNoticed) -> str:
    """Describe a stall and its duration."""
    who = {StalledOn.FIRST_TOKEN: "the model has not begun", StalledOn.TOOL: "a tool has been silent"}
    return f"{who.get(noticed.waiting_for, 'the model has been silent')} for {duration_of(noticed.silent_s, digits=0)}"


def words_of(message: UserMessage) -> str:
    """Return the text of a person's message, with the names of attachments."""
    return "\n".join(_words(part) for part in message.parts)


def _words(part: Text | File) -> str:
    return part.text if isinstance(part, Text) else f"[{part.media_type} {part.name or part.url or 'file'}]"


def lines(turns: Iterable[TurnTranscript], ink: Ink, width: int) -> Iterator[str]:
    """Format turns for a terminal of `width` columns. All text is cleaned."""
    for turn in turns:
        title = f"turn {turn.turn} · {time_of(turn.at) if turn.at else 'its events are no longer kept'}"
        yield ink.dim(f"── {title} {'─' * max(0, width - len(title) - 4)}")
        for entry in turn.entries:
            yield from _entry_lines(entry, ink, width)
        yield _ending(turn, ink)


def _entry_lines(entry: SpokenText | Called | Noted, ink: Ink, width: int) -> Iterator[str]:
    match entry:
        case SpokenText():
            yield from _message_lines(entry, ink, width)
        case Called():
            yield call_line(entry, ink, width)
            for turn in entry.within:
                for inner in turn.entries[1:]:
                    yield from (f"{INNER}{line}" for line in _entry_lines(inner, ink, width - len(INNER)))
            content = indent_lines(clean(entry.content), INDENT + "  ", width) if entry.content else []
            yield from (ink.dim(line) for line in content[:RESULT_LINES_MAX])
            if len(content) > RESULT_LINES_MAX:
                yield ink.dim(f"{INDENT}  … {len(content) - RESULT_LINES_MAX} more lines")
        case Noted():
            yield ink.yellow(shorten(f"{INDENT}~ {clean(entry.what, is_one_line=True)}", width))


def _message_lines(message: SpokenText, ink: Ink, width: int) -> Iterator[str]:
    text = clean(message.text).strip("\n") + (" …(cut)" if message.is_cut else "")
    body = indent_lines(text, INDENT, width)
    if message.by == "thinking":
        yield from (ink.dim(line) for line in body)
        return
    label = ink.bold("you  ") if message.by == "user" else ink.cyan("agent")
    yield f"{label}  {body[0][len(INDENT) :]}"
    yield from body[1:]


_SIGNS = {"ok": "✓", "error": "✗", "cancelled": "∅", "unknown": "?", "denied": "⊘"}


REASON_COLUMNS_MIN = 30
"""Columns reserved for the reason of a failure; the arguments get the rest."""
_REASONED = ("error", "denied")


def call_line(called: Called, ink: Ink, width: int, *, has_reason: bool = False) -> str:
    """Format a call as one line: sign, name, arguments and outcome; with `has_reason`, also the reason of a failure."""
    took = (
        f" {duration_of(called.ended_at - called.started_at)}"
        if called.started_at and called.ended_at
        else ""
    )
    runs = f" (run {called.runs})" if called.runs > 1 else ""
    state = called.outcome or ("running" if called.runs or called.is_elsewhere else "waiting")
    tail = f" {state}{took}{runs}{', elsewhere' if called.is_elsewhere else ''}"
    head = f"{INDENT}{_SIGNS.get(called.outcome, '·')} {reveal_line(called.name)}"
    arguments = reveal_line(called.arguments)
    reason = ""
    if has_reason and called.outcome in _REASONED and called.content.strip():
        reason = f": {clean(called.content.strip().splitlines()[0], is_one_line=True)}"
    room = min(width_of(reason), REASON_COLUMNS_MIN)
    line = f"{shorten(f'{head} {arguments}', max(20, width - len(tail) - room))}{tail}"
    if reason:
        line = shorten(f"{line}{reason}", max(width, width_of(line) + 1))
    match called.outcome:
        case "ok":
            return ink.green(line)
        case "error":
            return ink.red(line)
        case "unknown" | "cancelled" | "denied":
            return ink.yellow(line)
        case _:
            return line


def _ending(turn: TurnTranscript, ink: Ink) -> str:
    if turn.status == "running":
        return ink.yellow(f"{INDENT}… still running")
    took = (
        f" after {duration_of(turn.ended_at - turn.at)}"
        if turn.at and isinstance(turn.ended_at, float)
        else ""
    )
    reason = f": {clean(turn.message, is_one_line=True)}" if isinstance(turn.message, str) else ""
    code = f" [{turn.code}]" if isinstance(turn.code, str) else ""
    text = f"{INDENT}{turn.status}{took}{reason}{code}"
    return ink.dim(text) if turn.status == "completed" else ink.yellow(text)
