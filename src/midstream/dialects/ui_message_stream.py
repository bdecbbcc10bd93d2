"""The UI message stream of the AI SDK (v1): one turn of a session as chunks, equal for every reader.

The chunks of a turn are computed from its records alone, so that the number of a chunk is a cursor at any process. A
client of the AI SDK reads a turn in runs. A run ends when the turn waits only for its client (a call of its tools, an
approval, a question). The answer begins the next run of the same message.

A question of a sub-agent is a part of the message, as one of the agent is. The AI SDK sends answers when all calls of
the last step have one. So calls that sub-agents do are in a step before: no person answers them.

`reset-step` removes the parts of a void attempt. The text of a complete response is shown once.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import msgspec
from typing_extensions import override

from midstream.dialects.open_questions import ShownSubAgents, is_turn_waiting, open_questions, take_record
from midstream.dialects.record_events import RecordEvents
from midstream.dialects.request_digests import digest_of
from midstream.dialects.sent_text import merge, rest_of, words_of
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
from midstream.session.questions import Question
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
from midstream.session.session import Session
from midstream.session.turn import folding
from midstream.session.turn.states import AwaitingModel, Idle, TurnState

Json = dict[str, Any]

HEADER = ("x-vercel-ai-ui-message-stream", "v1")
DONE = b"data: [DONE]\n\n"
RUN_MARK = "~"
"""Separates the name of a chat from the place of a run; session names cannot contain it."""
SUB_AGENT_MARK = f"{RUN_MARK}sub-agent."
"""Prefix of the ids of calls of sub-agents."""

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
_ASKING = QuestionAsked | QuestionAnswered | QuestionClosed | AnswerUsed | CallEnded
_json = msgspec.json.encode


class _Stepping(Enum):
    """The step of the message that is open; OF_SUB_AGENTS: the next part of a call begins another one."""

    NOT = auto()
    OPEN = auto()
    OF_SUB_AGENTS = auto()


def approval_id_of(turn: int, response: int, digest: str, call_id: str) -> str:
    """Return the approval id for a client; its digest binds the answer to the shown arguments."""
    return f"{turn}.{response}.{digest}.{call_id}"


def tool_call_id(call_id: str, response: int) -> str:
    """Return an id of a call that is unique in its message; the model's id is unique in its response only."""
    return call_id if response == 1 else f"{call_id}{RUN_MARK}{response}"


def shown_call_id(session: str, turn: int, response: int, call_id: str) -> str:
    """Return the id of a call for the client. `session` is the sub-agent's that makes it, "" for the chat's own."""
    if not session:
        return tool_call_id(call_id, response)
    return SUB_AGENT_MARK + digest_of("chat", "sub-agent", session, turn, response, call_id)


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
        self._stepping = _Stepping.NOT
        self._step = 0
        self._open: _OpenPart | None = None
        self._parts = 0
        self._shown: list[tuple[str, list[str]]] = []
        """Kind and text of each part of this attempt."""
        self._calls: dict[str, ToolCall] = {}
        self._sites: dict[str, Site] = {}
        self._visible: set[str] = set()
        """Calls that are shown as parts of the message."""
        self._below = _CallsBelow()
        self._usage: Usage | None = None
        self._finish = Finish.STOP

    @property
    def is_waiting(self) -> bool:
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
        self._write_below(record, epoch)
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
        return self._end() if self.is_waiting and is_last and not self.is_over else []

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
        return [self._finished("tool-calls")] if self._below.is_waiting(self._state) else []

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
        if self._stepping is not _Stepping.NOT and not isinstance(self._state, AwaitingModel):
            self._chunks.append({"type": "finish-step"})
            self._stepping = _Stepping.NOT

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
        is_open = self._stepping is not _Stepping.NOT
        is_again = is_open and self._step == record.response
        if is_again and self._parts:
            self._chunks.append({"type": "reset-step"})
            self._visible = {each for each in self._visible if each not in self._of_step()}
        elif not is_again:
            if is_open:
                self._chunks.append({"type": "finish-step"})
            self._chunks.append({"type": "start-step"})
        self._stepping, self._step, self._parts = _Stepping.OPEN, record.response, 0
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
        works = {plan.call_id for plan in record.plans if plan.site is Site.CHILD and not plan.needs_approval}
        for call in sorted(body.calls, key=lambda call: call.id not in works):
            shown = tool_call_id(call.id, record.response)
            self._calls[shown] = call
            self._sites[shown] = sites.get(call.id, Site.SERVER)
            if self._sites[shown] in (Site.SERVER, Site.CHILD):
                self._show_call(shown)
                self._chunks.append(self._input(shown, call.arguments))
            if call.id in works:
                self._stepping = _Stepping.OF_SUB_AGENTS

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
        self._part_step()
        call = self._calls[shown]
        self._chunks += (
            {"type": "tool-input-start", "toolCallId": shown, "toolName": call.name},
            {"type": "tool-input-delta", "toolCallId": shown, "inputTextDelta": call.arguments},
        )

    def _part_step(self) -> None:
        if self._stepping is _Stepping.OF_SUB_AGENTS:
            self._chunks += ({"type": "finish-step"}, {"type": "start-step"})
            self._stepping = _Stepping.OPEN

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
        self._chunks.append(_approval_request(record, shown, record.call_id))

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
            response = _approval_response(record, record.call_id)
            self._chunks.append(response)
            self.answered[shown] = self.run + self.is_waiting
            if is_agents and not response["approved"]:
                self._chunks.append({"type": "tool-output-denied", "toolCallId": shown})
        elif is_agents and isinstance(record, QuestionClosed):
            self._chunks.append({"type": "tool-output-denied", "toolCallId": shown})
        elif is_agents:
            self._chunks.append({"type": "tool-output-available", "toolCallId": shown, "output": "allowed"})

    def _write_below(self, record: Record, epoch: int) -> None:
        """Show what sub-agents ask, and what comes of it; an answer begins a run at once."""
        for chunk in self._below.take(self._state, record, epoch=epoch):
            if chunk["type"] == "tool-input-available":
                self._part_step()
            self._chunks.append(chunk)
        if self._below.answered:
            self.answered[self._below.answered] = self.run + self.is_waiting

    def _end_call(self, record: CallEnded) -> None:
        result = record.result
        shown = tool_call_id(result.call_id, record.response)
        call = self._calls.get(shown)
        if call is None:
            return
        self._chunks += self._below.end_of(shown)
        self.answered[shown] = self.run + self.is_waiting
        if shown not in self._visible:  # a call that never started is shown as a part that no client runs
            self._visible.add(shown)
            failed = {"toolName": call.name, "input": value_of(call.arguments), "errorText": result.content}
            self._chunks.append({"type": "tool-input-error", "toolCallId": shown, **failed})
            return
        self._chunks.append(_output(shown, result))


class _CallsBelow:
    """Calls of sub-agents about which people are asked, as parts of the message."""

    def __init__(self) -> None:
        self.answered = ""
        """The call that the last record answered a question about; "" for none."""
        self._sub_agents: ShownSubAgents = {}
        self._open: dict[str, str] = {}
        """Open parts, each with the call of the chat that its sub-agent works for."""

    def is_waiting(self, turn: TurnState) -> bool:
        """Whether the turn of the chat and its sub-agents wait for people and clients only."""
        return is_turn_waiting(turn, self._sub_agents, on_clients=True)

    def take(self, turn: TurnState, record: Record, *, epoch: int) -> list[Json]:
        """Return the chunks for the next record of the chat, which has this turn then."""
        self.answered = ""
        self._sub_agents, where, done = take_record(self._sub_agents, turn, record, epoch=epoch)
        if not (isinstance(record, ChildDelta) and where and isinstance(done, _ASKING)):
            return []
        call_id = done.result.call_id if isinstance(done, CallEnded) else done.call_id
        shown = shown_call_id(where, done.turn, done.response, call_id)
        found = open_questions(Session(turn=turn), self._sub_agents)
        place = (where, call_id)
        question = next((each for each in found if (each.session, each.call_id) == place), None)
        match done:
            case QuestionAsked():
                above = tool_call_id(record.call_id, record.response)
                return [] if question is None else self._ask(question, done, shown, above)
            case QuestionAnswered():
                return self._settle(done, shown) if shown in self._open and question is None else []
            case QuestionClosed():
                return self._end(shown, {"type": "tool-output-denied"})
            case AnswerUsed():
                return self._end(shown, {"type": "tool-output-available", "output": "allowed"})
            case CallEnded():
                return self._end(shown, _output(shown, done.result))

    def end_of(self, above: str) -> list[Json]:
        """Return the chunks for the end of a call that a sub-agent worked for: it answers no question any more."""
        ended = [shown for shown, each in self._open.items() if each == above]
        chunk: Json = {"type": "tool-output-error", "errorText": "The sub-agent has ended."}
        return [each for shown in ended for each in self._end(shown, chunk)]

    def _ask(self, question: Question, record: QuestionAsked, shown: str, above: str) -> list[Json]:
        chunks = list[Json]()
        if shown not in self._open:
            self._open[shown] = above
            called = {"toolName": question.name or "permission", "input": value_of(question.arguments)}
            about = {"toolMetadata": {"midstream": {"agents": question.agents}}}
            chunks.append({"type": "tool-input-available", "toolCallId": shown, **called, **about})
        if record.kind is not QuestionKind.QUESTION:
            chunks.append(_approval_request(record, shown, shown))
        return chunks

    def _settle(self, record: QuestionAnswered, shown: str) -> list[Json]:
        self.answered = shown
        if record.kind is QuestionKind.QUESTION:
            return self._end(shown, {"type": "tool-output-available", "output": record.text})
        is_denied = record.choice is Choice.DENY
        ended = self._end(shown, {"type": "tool-output-denied"}) if is_denied else []
        return [_approval_response(record, shown), *ended]

    def _end(self, shown: str, chunk: Json) -> list[Json]:
        return [{**chunk, "toolCallId": shown}] if self._open.pop(shown, None) else []


def _approval_request(record: QuestionAsked, shown: str, call_id: str) -> Json:
    approval = approval_id_of(record.turn, record.response, record.digest, call_id)
    chunk = {"type": "tool-approval-request", "approvalId": approval, "toolCallId": shown}
    reason = record.text or (_DOUBT if record.kind is QuestionKind.DOUBT else "")
    return {**chunk, "reason": reason} if reason else chunk


def _approval_response(record: QuestionAnswered, call_id: str) -> Json:
    approval = approval_id_of(record.turn, record.response, record.digest, call_id)
    allowed = record.choice in (Choice.ALLOW, Choice.RERUN)
    chunk = {"type": "tool-approval-response", "approvalId": approval, "approved": allowed}
    return {**chunk, "reason": record.text} if record.text else chunk


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
