"""Updates of the Agent Client Protocol, computed from the records of a session.

The protocol cannot remove text. If an attempt is interrupted, the next attempt repeats its text, and the client
receives only what follows the text that it has. If the new attempt differs, it becomes a separate message. A load omits
the text of interrupted attempts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from midstream.dialects.langgraph_messages import call_id_of
from midstream.dialects.run_fold import (
    AnswerCompleted,
    AnswerVoided,
    Fact,
    RunFold,
    ToolBegan,
    ToolFinished,
    ToolReported,
    WordsCame,
)
from midstream.dialects.sent_text import RepeatedWords, Words, merge, words_of
from midstream.dialects.ui_message_stream import value_of
from midstream.history.messages import (
    Entry,
    File,
    Finish,
    Outcome,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    UpstreamCall,
    Usage,
    UserMessage,
    UserPart,
)
from midstream.session.calls import CallPlan, QuestionKind
from midstream.session.questions import questions_of
from midstream.session.records import (
    MessageAccepted,
    QuestionAnswered,
    QuestionAsked,
    Record,
    ResponseCompleted,
    TranscriptAccepted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.session import GO_ON, Session

Json = dict[str, Any]

KINDS = frozenset(("read", "edit", "delete", "move", "search", "execute", "think", "fetch"))
"""Kinds of tools in the protocol. The tools of an upstream agent with this protocol have them as names."""
_CHUNKS = {"text": "agent_message_chunk", "thinking": "agent_thought_chunk"}
_STOP_REASONS = {Finish.LENGTH: "max_tokens", Finish.FILTER: "refusal"}


class AcpFold(RunFold):
    """The runs and messages of a session; streams of this protocol do not contain their ids."""

    @override
    def ids_in(self, stream: str) -> tuple[str, str]:
        return "", ""


class AcpUpdates:
    """Converts the records of a session to updates, in order, for one client.

    Args:
        fold: The state at the beginning of the journal.
    """

    def __init__(self, fold: AcpFold) -> None:
        self.fold = fold
        self.own: set[str] = set()
        """Stream keys of this client's messages, and ids of calls whose questions this client answered."""
        self.turns: dict[str, int] = {}
        """Turn that the message of each stream opened."""
        self.ended: dict[int, TurnEnded] = {}
        self.usage: dict[int, Usage] = {}
        """Tokens of each turn."""
        self._finishes: dict[int, Finish] = {}
        """Finish reason of the last response of each turn."""
        self._open: list[int] = []
        """Indexes in `_past` of the text of the current response."""
        self._shown: list[Words] = []
        """Text of the current response that was sent to the client."""
        self._repeated = RepeatedWords(())
        self._is_apart = False
        """Whether the text of this attempt is a separate message."""
        self._calls: set[str] = set()
        """Calls that were sent to the client and have not ended."""
        self._past: list[Json | None] | None = [*self._entries(0)]
        """The updates before `replay`, with None for text of interrupted attempts; None after `replay`."""

    def take(self, record: Record, *, epoch: int) -> list[Json]:
        """Return the updates of the next record; before `replay`, collect them and return none."""
        before = self.fold.session
        facts = self.fold.take(record, epoch=epoch)
        updates: list[Json] = []
        match record:
            case MessageAccepted() | TranscriptAccepted():
                updates += self._accept(record, before)
            case QuestionAsked(kind=QuestionKind.QUESTION):
                updates += self._question(record)
            case QuestionAnswered(kind=QuestionKind.QUESTION) if record.call_id not in self.own:
                updates.append(
                    self._chunk("user_message_chunk", f"answer-{record.call_id}", _text(record.text))
                )
            case TurnEnded():
                self.ended[record.turn] = record
            case _:
                pass
        plans = record.plans if isinstance(record, ResponseCompleted) else ()
        for fact in facts:
            rendered = [*self._render(fact, plans)]
            if self._past is not None and isinstance(fact, WordsCame):
                place = len(self._past) + len(updates)
                self._open += range(place, place + len(rendered))
            updates += rendered
        if self._past is None:
            return updates
        self._past += updates
        return []

    def replay(self) -> list[Json]:
        """Return the updates of all records so far, without text of interrupted attempts."""
        found = [each for each in self._past or () if each is not None]
        self._past, self._open = None, []
        return found

    def stop_reason(self, turn: int) -> str:
        """Return the protocol's stop reason of an ended turn."""
        ended = self.ended.get(turn)
        if ended is not None and ended.status is TurnStatus.CANCELLED:
            return "cancelled"
        return _STOP_REASONS.get(self._finishes.get(turn, Finish.STOP), "end_turn")

    def call_name(self, call_id: str) -> str:
        """Return an id of a call of the open response that is unique in the session."""
        return self._call_name(self.fold.open_words[0], call_id)

    def _accept(self, record: MessageAccepted | TranscriptAccepted, before: Session) -> Iterator[Json]:
        self._begin_response()
        stream: str = getattr(record, "stream", "")
        self.turns[stream] = record.turn
        if stream not in self.own:
            keep: int | None = record.keep
            yield from self._entries(len(before.history.entries) if keep is None else keep)

    # --- facts ------------------------------------------------------------------------------------------------

    def _render(self, fact: Fact, plans: Sequence[CallPlan]) -> Iterator[Json]:
        match fact:
            case WordsCame(message_id, kind, words):
                yield from self._write(message_id, kind, words)
            case AnswerVoided():
                self._void()
            case AnswerCompleted(message_id, response):
                yield from self._complete(message_id, response, plans)
            case ToolBegan(message_id, call):
                name = self._call_name(message_id, call.id)
                if name in self._calls:
                    arguments = value_of(call.arguments)
                    yield _call_update(name, status="in_progress", rawInput=arguments)
                else:
                    yield self._show_call(message_id, call, status="in_progress")
            case ToolReported(message_id, call_id, words):
                yield _call_update(self._call_name(message_id, call_id), content=_content(words))
            case ToolFinished(message_id, _, result):
                yield self._show_result(message_id, result)
            case _:
                pass

    def _begin_response(self) -> None:
        self._open, self._shown, self._repeated, self._is_apart = [], [], RepeatedWords(()), False

    def _void(self) -> None:
        """Drop the text of an interrupted attempt; text that the client already has is repeated or superseded."""
        shown = merge(self._shown)
        for at in self._open if self._past is not None else ():
            assert self._past is not None
            self._past[at] = None
        self._begin_response()
        if self._past is None:
            self._shown, self._repeated = [*shown], RepeatedWords(shown)

    def _complete(self, message_id: str, response: Response, plans: Sequence[CallPlan]) -> Iterator[Json]:
        turn = self.fold.session.turns
        self._finishes[turn] = response.finish
        if response.usage is not None:
            self.usage[turn] = self.usage.get(turn, Usage()) + response.usage
        if (
            not self._repeated.is_over
        ):  # it is shorter than the text that the client has of an interrupted attempt
            for kind, words in merge(words_of(response)):
                yield self._chunk(_CHUNKS[kind], message_id, _text(words))
        self._begin_response()
        read_only = {plan.call_id for plan in plans if not plan.has_effects}
        for call in response.calls:
            yield self._show_call(message_id, call, is_read_only=call.id in read_only)

    def _write(self, message_id: str, kind: str, words: str) -> Iterator[Json]:
        more, is_apart = [(kind, words)], False
        if not self._repeated.is_over:
            more, is_apart = self._repeated.take(kind, words)
        if is_apart:
            self._shown, self._is_apart = [], True
        name = message_id if self._is_apart else message_id.partition(".")[0]
        for each_kind, each in more:
            self._shown.append((each_kind, each))
            yield self._chunk(_CHUNKS[each_kind], name, _text(each))

    def _show_call(
        self, message_id: str, call: ToolCall, *, status: str = "pending", is_read_only: bool = False
    ) -> Json:
        name = self._call_name(message_id, call.id)
        self._calls.add(name)
        kind = "read" if is_read_only else "other"
        return {
            "sessionUpdate": "tool_call",
            "toolCallId": name,
            "title": call.name or "tool",
            "kind": call.name if call.name in KINDS else kind,
            "status": status,
            "rawInput": value_of(call.arguments),
        }

    def _show_result(self, message_id: str, result: ToolResult) -> Json:
        name = self._call_name(message_id, result.call_id)
        self._calls.discard(name)
        status = "completed" if result.outcome is Outcome.OK else "failed"
        content, output = _content(result.content), value_of(result.content)
        return _call_update(name, status=status, content=content, rawOutput=output)

    def _question(self, record: QuestionAsked) -> Iterator[Json]:
        """Show a question that the next prompt answers with text."""
        for each in questions_of("", self.fold.session):
            if each.call_id == record.call_id:
                yield self._chunk(_CHUNKS["text"], f"question-{each.call_id}", _text(each.text or each.name))

    # --- whole entries ----------------------------------------------------------------------------------------

    def _entries(self, since: int) -> Iterator[Json]:
        entries = self.fold.session.history.entries[since:]
        for entry, name in zip(entries, self.fold.ids[since:], strict=True):
            yield from self._entry(entry, name)

    def _entry(self, entry: Entry, name: str) -> Iterator[Json]:
        if isinstance(entry, UserMessage):
            if entry != GO_ON:
                for part in entry.parts:
                    yield self._chunk("user_message_chunk", name, block_of(part))
        elif isinstance(entry, Step):
            yield from self._response(name, entry.response)
            for result in entry.results:
                yield self._show_result(name, result)

    def _response(self, name: str, response: Response) -> Iterator[Json]:
        for kind, words in merge(words_of(response)):
            yield self._chunk(_CHUNKS[kind], name, _text(words))
        for part in response.parts:
            if isinstance(part, UpstreamCall):
                yield self._show_call(
                    name, ToolCall(part.id, part.name, part.arguments), status="in_progress"
                )
                yield self._show_result(
                    name, ToolResult(part.id, part.content, part.outcome or Outcome.UNKNOWN)
                )
        for call in response.calls:
            yield self._show_call(name, call)

    def _chunk(self, kind: str, name: str, block: Json) -> Json:
        return {"sessionUpdate": kind, "messageId": self._name(name), "content": block}

    def _name(self, name: str) -> str:
        """Return a message id that is unique by turn, because an edited history repeats ids."""
        return f"{self.fold.session.turns}-{name}"

    def _call_name(self, message_id: str, call_id: str) -> str:
        return self._name(call_id_of(message_id, call_id))


def _call_update(name: str, **fields: Any) -> Json:  # noqa: ANN401 - any JSON
    return {"sessionUpdate": "tool_call_update", "toolCallId": name, **fields}


def _text(words: str) -> Json:
    return {"type": "text", "text": words}


def _content(words: str) -> list[Json]:
    return [{"type": "content", "content": _text(words)}]


def block_of(part: UserPart) -> Json:
    """Return a part of a user's message as a content block."""
    if isinstance(part, Text):
        return _text(part.text)
    return _file_block(part)


def _file_block(part: File) -> Json:
    family, name = part.media_type.partition("/")[0], part.name or part.media_type
    if part.data is None:
        return {"type": "resource_link", "uri": part.url, "name": name, "mimeType": part.media_type}
    if family in ("image", "audio"):
        return {"type": family, "data": part.data, "mimeType": part.media_type}
    blob = {"uri": part.name or "attachment:", "blob": part.data, "mimeType": part.media_type}
    return {"type": "resource", "resource": blob}


def usage_json(usage: Usage) -> Json:
    """Return the tokens of a turn."""
    return {
        "totalTokens": usage.input_tokens + usage.output_tokens,
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "thoughtTokens": usage.reasoning_tokens,
        "cachedReadTokens": usage.cached_tokens,
        "cachedWriteTokens": usage.cache_write_tokens,
    }
