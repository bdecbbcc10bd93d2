"""The UI message stream of the AI SDK (v1): one turn of a session as chunks, equal for every reader.

The chunks of a turn are computed from its records alone, so that the number of a chunk is a cursor at any process. A
client of the AI SDK reads a turn in runs. A run ends when the turn waits only for its client (a call of its tools, an
approval, a question). The answer begins the next run of the same message.

`reset-step` removes the parts of a void attempt. The text of a complete response is shown once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from typing_extensions import override

from midstream.dialects.record_events import RecordEvents
from midstream.dialects.resting_turns import is_resting
from midstream.dialects.shown_words import merge, rest_of, words_of
from midstream.history.messages import (
    Finish,
    Outcome,
    ToolCall,
    ToolResult,
    UpstreamCall,
    Usage,
)
from midstream.json_depth import is_text_too_deep
from midstream.session.calls import Choice, QuestionKind, Site
from midstream.session.records import (
    AnswerUsed,
    AttemptStarted,
    CallEnded,
    CallProgressed,
    CallStarted,
    ChildDelta,
    Delta,
    MessageAccepted,
    QuestionAnswered,
    QuestionAsked,
    QuestionClosed,
    Record,
    ResponseCompleted,
    TranscriptAccepted,
    TurnEnded,
    TurnResumed,
    TurnStatus,
)
from midstream.session.turn import folding
from midstream.session.turn.states import AwaitingModel, Idle, TurnState

Json = dict[str, Any]

HEADER = ("x-vercel-ai-ui-message-stream", "v1")
DONE = b"data: [DONE]\n\n"
RUN_MARK = "~"
"""Separates the name of a chat from the place of a run; session names cannot contain it."""

_FINISHES = {
    Finish.STOP: "stop",
    Finish.CALLS: "tool-calls",
    Finish.LENGTH: "length",
    Finish.FILTER: "content-filter",
    Finish.INTERRUPTED: "other",
}
_PARTS: dict[str, tuple[str, ...]] = {
    "source-url": ("sourceId", "url"),
    "source-document": ("sourceId", "mediaType", "title"),
    "file": ("url", "mediaType"),
}
"""Parts that a tool may report, with their required text fields; also any `data-…` with its `data`."""
_json = msgspec.json.encode


def approval_id_of(turn: int, response: int, digest: str, call_id: str) -> str:
    """Return the approval id for a client; its digest binds the answer to the shown arguments."""
    return f"{turn}.{response}.{digest}.{call_id}"


def tool_call_id(call_id: str, response: int) -> str:
    """Return an id of a call that is unique in its message; the model's id is unique in its response only."""
    return call_id if response == 1 else f"{call_id}{RUN_MARK}{response}"


class _OpenPart(msgspec.Struct):
    """The part to which text is appended.

    Args:
        name, id: Its kind, and its id for the client.
        place: Attempt, number and kind of the part in the journal.
        words: Text so far.
        head: Bytes before the text in each of its chunks.
    """

    name: str
    id: str
    place: tuple[int, int, str]
    words: list[str]
    head: bytes


class UiMessageStream(RecordEvents):
    """Converts the records of one turn to chunks, in order, for one reader.

    Args:
        chat: The client's name of the chat.
        turn: Number of the turn.
        run: Number of the requested run, from 0; None for the whole turn, without the ends between its runs.
    """

    def __init__(self, chat: str, turn: int, run: int | None = None) -> None:
        self._chat = chat
        self._turn = turn
        self._wanted = run
        self.run = 0
        """Number of the turn's current run."""
        self.answered: dict[str, int] = {}
        """For each answered call, by its id for the client: the run that began with or after the answer."""
        self._state: TurnState = Idle()
        self._chunks: list[Json] = []
        self._closing: list[Json] = []
        """Last chunks of the run, while the turn rests or has ended; empty while it continues."""
        self._is_stepping = False
        self._step = 0
        self._open: _OpenPart | None = None
        self._parts = 0
        self._shown: list[tuple[str, list[str]]] = []
        """Kind and text of each part of this attempt."""
        self._calls: dict[str, ToolCall] = {}
        self._sites: dict[str, Site] = {}
        self._visible: set[str] = set()
        """Calls that are shown as parts of the message."""
        self._usage: Usage | None = None
        self._finish = Finish.STOP

    @property
    def is_resting(self) -> bool:
        """Whether the turn needs a client's answer or a resume to continue."""
        return bool(self._closing)

    @override
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        if self.is_over:
            return []
        if isinstance(record, Delta) and (more := self._more_of(record)) is not None:
            return [more] if self._wanted in (None, self.run) else []
        if self._is_later(record):
            return self._end()
        if not self._is_own(record):
            return []
        self._state = folding.evolve(self._state, record, epoch=epoch)
        self._chunks = []
        self._write(record)
        if self._closing and (self._chunks or isinstance(record, TurnEnded | TurnResumed)):
            self._begin_run()
        is_wanted = self._wanted in (None, self.run)
        if not self._closing and (ending := self._ending(record)):
            self._close_step()
            self._closing = ending
            self.is_over = is_wanted and self._wanted is not None
            if self.is_over:
                self._chunks += ending
        return _events(self._chunks) if is_wanted else []

    @override
    def rest(self) -> list[bytes]:
        """End a reader if no chunks can follow for it: the whole turn rests, or has ended before the requested run."""
        is_last = self._wanted is None or isinstance(self._state, Idle)
        return self._end() if self.is_resting and is_last and not self.is_over else []

    def _end(self) -> list[bytes]:
        self.is_over = True
        return _events(self._closing)

    def _more_of(self, delta: Delta) -> bytes | None:
        """Return the chunk of text for the open part, a shortcut for most records of a turn; None for others."""
        part = self._open
        if part is None or delta.turn != self._turn or delta.call is not None or not delta.text:
            return None
        if part.place != (delta.attempt, delta.part, delta.kind):
            return None
        part.words.append(delta.text)
        return b"%b%b}\n\n" % (part.head, _json(delta.text))

    def _is_later(self, record: Record) -> bool:
        """Return whether a later turn begins with this record."""
        return isinstance(record, MessageAccepted | TranscriptAccepted) and record.turn > self._turn

    def _is_own(self, record: Record) -> bool:
        return getattr(record, "turn", 0) == self._turn

    def _begin_run(self) -> None:
        """Begin the next run after an answer; the whole turn has no chunks between runs."""
        self.run += 1
        self._closing = []
        if self._wanted is not None:
            self._chunks.insert(0, self._start())

    def _start(self) -> Json:
        return {"type": "start", "messageId": f"{self._chat}{RUN_MARK}{self._turn}"}

    # --- ends of runs -----------------------------------------------------------------------------------------

    def _ending(self, record: Record) -> list[Json]:
        """Return the last chunks of a run that ends with this record; empty if the turn continues."""
        if isinstance(record, TurnEnded):
            return self._end_of_turn(record)
        return [self._finished("tool-calls")] if is_resting(self._state, on_clients=True) else []

    def _end_of_turn(self, record: TurnEnded) -> list[Json]:
        match record.status:
            case TurnStatus.COMPLETED:
                return [self._finished(_FINISHES[self._finish])]
            case TurnStatus.CANCELLED:
                return [{"type": "abort", "reason": "stopped"}, self._finished("other")]
            case TurnStatus.FAILED | TurnStatus.INTERRUPTED:
                words = record.message or "the turn was interrupted; it can be resumed"
                return [{"type": "error", "errorText": words}, self._finished("error")]

    def _finished(self, reason: str) -> Json:
        chunk: Json = {"type": "finish", "finishReason": reason}
        if self._usage is not None:
            tokens = (self._usage.input_tokens, self._usage.output_tokens)
            usage = {"inputTokens": tokens[0], "outputTokens": tokens[1], "totalTokens": sum(tokens)}
            chunk["messageMetadata"] = {"usage": usage}
        return chunk

    def _close_step(self) -> None:
        self._close_part()
        if self._is_stepping and not isinstance(self._state, AwaitingModel):
            self._chunks.append({"type": "finish-step"})
            self._is_stepping = False

    # --- records ----------------------------------------------------------------------------------------------

    def _write(self, record: Record) -> None:
        match record:
            case Delta():
                self._write_delta(record)
            case MessageAccepted() | TranscriptAccepted():
                self._chunks.append(self._start())
            case AttemptStarted():
                self._begin_attempt(record)
            case ResponseCompleted():
                self._complete(record)
            case CallStarted():
                self._start_call(record)
            case CallProgressed():
                self._chunks.append(_progress(tool_call_id(record.call_id, record.response), record.text))
            case ChildDelta():
                self._write_child(record)
            case QuestionAsked():
                self._ask(record)
            case QuestionAnswered() | QuestionClosed() | AnswerUsed():
                self._settle(record)
            case CallEnded():
                self._end_call(record)
            case TurnEnded() | TurnResumed():
                self._close_part()
            case _:
                pass

    def _begin_attempt(self, record: AttemptStarted) -> None:
        self._close_part()
        is_again = self._is_stepping and self._step == record.response
        if is_again and self._parts:
            self._chunks.append({"type": "reset-step"})
            self._visible = {each for each in self._visible if each not in self._of_step()}
        elif not is_again:
            if self._is_stepping:
                self._chunks.append({"type": "finish-step"})
            self._chunks.append({"type": "start-step"})
        self._is_stepping, self._step, self._parts = True, record.response, 0
        self._shown = []

    def _of_step(self) -> set[str]:
        """Return the upstream's calls of the open step, whose response is not complete yet."""
        return {each for each in self._visible if each not in self._calls}

    def _write_delta(self, delta: Delta) -> None:
        if delta.call is not None:
            self._write_upstream(delta.response, delta.call)
        elif delta.text and delta.requested is None and not delta.signature:
            self._write_words(delta.kind, delta.text, (delta.attempt, delta.part, delta.kind))

    def _write_words(self, kind: str, words: str, place: tuple[int, int, str]) -> None:
        if self._open is None or self._open.place != place:
            self._close_part()
            name = "reasoning" if kind == "thinking" else "text"
            part = f"{self._turn}.{self._step}.{place[0]}.{self._parts}"
            head = b'data: {"type":"%b-delta","id":"%b","delta":' % (name.encode(), part.encode())
            self._open = _OpenPart(name, part, place, [], head)
            self._parts += 1
            self._shown.append((kind, self._open.words))
            self._chunks.append({"type": f"{name}-start", "id": part})
        self._open.words.append(words)
        self._chunks.append({"type": f"{self._open.name}-delta", "id": self._open.id, "delta": words})

    def _close_part(self) -> None:
        if self._open is not None:
            self._chunks.append({"type": f"{self._open.name}-end", "id": self._open.id})
            self._open = None

    def _write_upstream(self, response: int, call: UpstreamCall) -> None:
        """Show a tool that the upstream runs itself, marked as provider-executed."""
        self._close_part()
        self._parts += 1
        shown = tool_call_id(call.id, response)
        self._visible.add(shown)
        place: Json = {"toolCallId": shown, "providerExecuted": True, "dynamic": True}
        name = {"toolName": call.name or "tool"}
        self._chunks.append(
            {"type": "tool-input-available", **place, **name, "input": value_of(call.arguments)}
        )
        if call.outcome is Outcome.OK:
            self._chunks.append({"type": "tool-output-available", **place, "output": value_of(call.content)})
        elif call.outcome is not None:
            self._chunks.append(
                {"type": "tool-output-error", **place, "errorText": call.content or call.outcome.value}
            )

    def _complete(self, record: ResponseCompleted) -> None:
        body = record.body
        if body.usage is not None:
            self._usage = body.usage if self._usage is None else self._usage + body.usage
        self._finish = body.finish
        self._show_rest(record)
        self._close_part()
        sites = {plan.call_id: plan.site for plan in record.plans}
        for call in body.calls:
            shown = tool_call_id(call.id, record.response)
            self._calls[shown] = call
            self._sites[shown] = sites.get(call.id, Site.SERVER)
            if self._sites[shown] in (Site.SERVER, Site.CHILD):
                self._show_call(shown)
                self._chunks.append(self._input(shown, call.arguments))

    def _show_rest(self, record: ResponseCompleted) -> None:
        """Show the missing text of the complete response, or its whole text again if the shown text differs."""
        whole = words_of(record.body)
        shown = merge((kind, "".join(words)) for kind, words in self._shown)
        if merge(whole) == shown:
            return
        rest = rest_of(merge(whole), shown)
        if rest is None:
            self._close_part()
            self._chunks.append({"type": "reset-step"})
            self._shown, rest = [], whole
            for part in record.body.parts:
                if isinstance(part, UpstreamCall):
                    self._write_upstream(record.response, part)
        for number, (kind, words) in enumerate(rest):
            is_more = not number and self._open is not None and self._open.place[2] == kind
            place = (
                self._open.place
                if self._open is not None and is_more
                else (record.attempt, -1 - number, kind)
            )
            self._write_words(kind, words, place)

    # --- calls ------------------------------------------------------------------------------------------------

    def _show_call(self, shown: str) -> None:
        """Show a call as a part of the message, before its arguments."""
        if shown in self._visible:
            return
        self._visible.add(shown)
        call = self._calls[shown]
        self._chunks += (
            {"type": "tool-input-start", "toolCallId": shown, "toolName": call.name},
            {"type": "tool-input-delta", "toolCallId": shown, "inputTextDelta": call.arguments},
        )

    def _input(self, shown: str, arguments: str) -> Json:
        """Return the chunk with the arguments, at which the AI SDK starts a client's tool."""
        name = self._calls[shown].name
        value = value_of(arguments)
        return {"type": "tool-input-available", "toolCallId": shown, "toolName": name, "input": value}

    def _start_call(self, record: CallStarted) -> None:
        shown = tool_call_id(record.call_id, record.response)
        if shown not in self._calls:
            return
        is_client = self._sites[shown] is Site.CLIENT
        if is_client or record.arguments is not None:
            self._show_call(shown)
            arguments = record.arguments if record.arguments is not None else self._calls[shown].arguments
            self._chunks.append(self._input(shown, arguments))

    def _write_child(self, record: ChildDelta) -> None:
        """Show text of a sub-agent as a transient part; its result is the output of the call."""
        try:
            inner = msgspec.json.decode(record.record, type=_Words)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return  # another kind of record
        if inner.kind == "text" and inner.text:
            shown = tool_call_id(record.call_id, record.response)
            data = {"toolCallId": shown, "text": inner.text}
            self._chunks.append({"type": "data-agent", "data": data, "transient": True})

    def _ask(self, record: QuestionAsked) -> None:
        if record.attempt:
            self._close_part()
            self._parts += 1
            shown = tool_call_id(record.call_id, record.response)
            self._visible.add(shown)
            place: Json = {"toolCallId": shown, "providerExecuted": True, "dynamic": True}
            name = {"toolName": record.name or "permission"}
            self._chunks.append(
                {"type": "tool-input-available", **place, **name, "input": value_of(record.arguments)}
            )
        else:
            shown = tool_call_id(record.call_id, record.response)
            if shown not in self._calls:
                return
            self._show_call(shown)
            if record.kind is QuestionKind.QUESTION:
                self._chunks.append(self._input(shown, self._calls[shown].arguments))
                return
        chunk: Json = {
            "type": "tool-approval-request",
            "approvalId": _approval_id(record),
            "toolCallId": shown,
        }
        reason = record.text or (_DOUBT if record.kind is QuestionKind.DOUBT else "")
        self._chunks.append({**chunk, "reason": reason} if reason else chunk)

    def _settle(self, record: QuestionAnswered | QuestionClosed | AnswerUsed) -> None:
        """Show a decision, unless further approvers must decide."""
        shown = tool_call_id(record.call_id, record.response)
        if shown not in self._visible:
            return
        is_agents = shown not in self._calls
        if isinstance(record, QuestionAnswered):
            is_open = not is_agents and any(
                call.is_asking for call in getattr(self._state, "calls", ()) if call.call.id == record.call_id
            )
            if record.kind is QuestionKind.QUESTION or is_open:
                return
            allowed = record.choice in (Choice.ALLOW, Choice.RERUN)
            chunk: Json = {
                "type": "tool-approval-response",
                "approvalId": _approval_id(record),
                "approved": allowed,
            }
            self._chunks.append({**chunk, "reason": record.text} if record.text else chunk)
            self.answered[shown] = self.run + self.is_resting
            if is_agents and not allowed:
                self._chunks.append({"type": "tool-output-denied", "toolCallId": shown})
        elif is_agents and isinstance(record, QuestionClosed):
            self._chunks.append({"type": "tool-output-denied", "toolCallId": shown})
        elif is_agents:
            self._chunks.append({"type": "tool-output-available", "toolCallId": shown, "output": "allowed"})

    def _end_call(self, record: CallEnded) -> None:
        result = record.result
        shown = tool_call_id(result.call_id, record.response)
        call = self._calls.get(shown)
        if call is None:
            return
        self.answered[shown] = self.run + self.is_resting
        if shown not in self._visible:  # a call that never started is shown as a part that no client runs
            self._visible.add(shown)
            failed = {"toolName": call.name, "input": value_of(call.arguments), "errorText": result.content}
            self._chunks.append({"type": "tool-input-error", "toolCallId": shown, **failed})
            return
        self._chunks.append(_output(shown, result))


def _approval_id(record: QuestionAsked | QuestionAnswered) -> str:
    return approval_id_of(record.turn, record.response, record.digest, record.call_id)


class _Words(msgspec.Struct, tag="delta", tag_field="type"):
    """Text in a record of a sub-agent; other records have another tag."""

    kind: str = ""
    text: str = ""


_DOUBT = "It was started, and whether it took effect is unknown. Approve to run it again, deny to not run it again."


def _output(shown: str, result: ToolResult) -> Json:
    match result.outcome:
        case Outcome.OK:
            return {
                "type": "tool-output-available",
                "toolCallId": shown,
                "output": value_of(result.content),
            }
        case Outcome.DENIED:
            return {"type": "tool-output-denied", "toolCallId": shown}
        case Outcome.ERROR | Outcome.CANCELLED | Outcome.UNKNOWN:
            return {"type": "tool-output-error", "toolCallId": shown, "errorText": result.content}


def _progress(shown: str, text: str) -> Json:
    """Return a report of a running tool: JSON of a part as that part, else text."""
    value = value_of(text)
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str):
        needed = _PARTS.get(kind)
        if needed is not None and all(isinstance(value.get(name), str) for name in needed):
            return value
        if kind.startswith("data-") and "data" in value:
            is_named = isinstance(value.get("id"), str)
            return {name: value[name] for name in ("type", "data", *(["id"] if is_named else []))}
    return {"type": "data-progress", "id": shown, "data": {"toolCallId": shown, "text": text}}


def value_of(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Decode JSON text of an object or a list; return other text unchanged."""
    if not text.lstrip().startswith(("{", "[")) or is_text_too_deep(text):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return text


def _events(chunks: Iterable[Json]) -> list[bytes]:
    return [b"data: %b\n\n" % _json(chunk) for chunk in chunks]
