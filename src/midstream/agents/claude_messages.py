"""Translation of one turn's messages of a Claude Code process into events of an upstream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from midstream.agents.tool_value_json import json_text
from midstream.agents.upstream_errors import CHECK_ACCESS, upstream_error
from midstream.agents.upstreams import Marked, MessageTaken, ResponseRestarted, UpstreamEvent
from midstream.errors import ModelAccessError, ModelError, UpstreamFailedError, UpstreamGoneError
from midstream.extras import extra
from midstream.history.messages import Finish, Outcome, Usage
from midstream.models.responses import (
    Finished,
    KeepAlive,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)

with extra("claude"):
    from claude_agent_sdk import (
        AssistantMessage,
        ConversationResetMessage,
        HookEventMessage,
        Message,
        RateLimitEvent,
        ResultMessage,
        ServerToolResultBlock,
        ServerToolUseBlock,
        StreamEvent,
        SystemMessage,
        TextBlock,
        ThinkingBlock,
        ToolResultBlock,
        ToolUseBlock,
        UserMessage,
    )

_FINISHES = {"max_tokens": Finish.LENGTH, "refusal": Finish.FILTER}
_LIMITS = {"error_max_turns"}
"""Results of reached limits, which are no failures: the conversation can continue."""
_ACCESS_STATUSES = {401, 403}
"""Statuses that the CLI (2.1) retries ten times, in three minutes, although they need a person."""
_UNSPECIFIC = {"api_error"}
"""The CLI's names for any fault of its provider: the HTTP status is more exact."""


class ClaudeReader:
    """Reads one turn: pass each message to `read` until `is_ended`; then `failure` has the error, if any.

    Args:
        name: The upstream's name in errors.
        source: The conversation to continue, or "".
        is_branch: Messages go into a new conversation, which begins as a copy of that one.
        message_id: The id of the user's message; results of other turns are skipped.
    """

    def __init__(self, name: str, source: str, message_id: str, *, is_branch: bool = False) -> None:
        self.message_id = message_id
        self.is_ended = False
        self.failure: ModelError | None = None
        self._name = name
        self._source = source
        self._is_branch = is_branch
        self._session = ""
        """The CLI's id of the conversation; "" until it has taken the message."""
        self._model = ""
        self._streamed: set[str] = set()
        """Ids of messages whose text was streamed."""
        self._has_words = False
        self._open: dict[str, None] = {}
        """Ids of calls without a result, in order."""
        self._mark = ""
        self._spent: list[Usage] = []
        self._trouble: tuple[str, str] = ("", "")
        """The CLI's message instead of the model's: the kind of error, and its text."""
        self._resets_at: float | None = None

    def read(self, message: Message, *, now: float) -> Iterator[UpstreamEvent]:
        """Return the events of a message."""
        match message:
            case HookEventMessage():
                yield KeepAlive()
            case SystemMessage(subtype="init"):
                self._model = str(message.data.get("model") or "")
                yield from self._open_session(message.data.get("session_id"))
            case SystemMessage(subtype="api_retry"):
                yield ResponseRestarted()
                if message.data.get("error_status") in _ACCESS_STATUSES:
                    self._fail(ModelAccessError(f"{self._name} failed: its key is refused{CHECK_ACCESS}"))
            case StreamEvent() if message.parent_tool_use_id is None:
                yield from self._open_session(message.session_id)
                yield from self._piece(message.event)
            case AssistantMessage() if message.parent_tool_use_id is None:
                yield from self._assistant(message)
            case UserMessage() if message.parent_tool_use_id is None:
                yield from self._results(message)
            case ConversationResetMessage():
                self._fail(UpstreamGoneError(f"{self._name} replaced the conversation by an empty one"))
            case RateLimitEvent():
                if message.rate_limit_info.status == "rejected":
                    self._resets_at = message.rate_limit_info.resets_at
                yield KeepAlive()
            case ResultMessage():
                if self._is_ours(message):
                    yield from self._result(message, now=now)
            case StreamEvent() | AssistantMessage() | UserMessage():
                yield Working("a sub-agent")
            case _:
                yield KeepAlive()

    def _open_session(self, session: object) -> Iterator[UpstreamEvent]:
        if self._session or not isinstance(session, str) or not session:
            return
        self._session = session
        # The id of the conversation that the CLI writes to: of the branch if there is one, else of the continued one.
        yield MessageTaken(session, self._source if self._is_branch or not self._source else session)

    def _piece(self, event: dict[str, Any]) -> Iterator[UpstreamEvent]:
        match event:
            case {"type": "message_start", "message": {"id": str(message_id), **message}}:
                self._streamed.add(message_id)
                self._spent.append(usage_of(message.get("usage")))
                yield KeepAlive()
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": str(text)}}:
                self._has_words = self._has_words or bool(text)
                yield TextDelta(text)
            case {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": str(text)}}:
                yield ThinkingDelta(text)
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta"}}:
                yield Working("arguments")
            case {"type": "message_delta", "usage": {"output_tokens": int(tokens)}} if self._spent:
                self._spent[-1] = msgspec.structs.replace(self._spent[-1], output_tokens=tokens)
                yield KeepAlive()
            case _:
                yield KeepAlive()

    def _assistant(self, message: AssistantMessage) -> Iterator[UpstreamEvent]:
        words = "".join(block.text for block in message.content if isinstance(block, TextBlock))
        if message.error is not None:
            self._trouble = (message.error, words)
            return
        yield from self._open_session(message.session_id)
        self._model = message.model
        is_new = message.message_id not in self._streamed
        for block in message.content:
            match block:
                case TextBlock() if is_new:
                    self._has_words = self._has_words or bool(block.text)
                    yield TextDelta(block.text)
                case ThinkingBlock() if is_new:
                    yield ThinkingDelta(block.thinking)
                case ToolUseBlock() | ServerToolUseBlock():
                    self._open[block.id] = None
                    yield UpstreamCallStarted(block.id, block.name, json_text(block.input))
                case ToolResultBlock():
                    yield from self._end_call(block.tool_use_id, block.content, is_error=bool(block.is_error))
                case ServerToolResultBlock():
                    yield from self._end_call(block.tool_use_id, block.content, is_error=False)
                case _:
                    yield KeepAlive()
        self._mark = "" if self._open else message.uuid or ""

    def _results(self, message: UserMessage) -> Iterator[UpstreamEvent]:
        for block in message.content if isinstance(message.content, list) else []:
            if isinstance(block, ToolResultBlock):
                yield from self._end_call(block.tool_use_id, block.content, is_error=bool(block.is_error))

    def _end_call(self, call_id: str, content: object, *, is_error: bool) -> Iterator[UpstreamEvent]:
        if call_id in self._open:
            del self._open[call_id]
            yield UpstreamCallEnded(call_id, _text(content), Outcome.ERROR if is_error else Outcome.OK)

    def _is_ours(self, result: ResultMessage) -> bool:
        """Whether a result belongs to this turn: the CLI also takes turns itself, such as after a background task."""
        taken = result.user_message_uuids
        if result.is_error or taken is None:
            return result.origin is None or result.origin.get("kind") == "human"
        return self.message_id in taken

    def _result(self, result: ResultMessage, *, now: float) -> Iterator[UpstreamEvent]:
        reason = result.terminal_reason or ""
        if reason.startswith("aborted"):
            self._fail(UpstreamFailedError(f"{self._name} was stopped by another client during its answer"))
            return
        if result.subtype not in _LIMITS and (result.is_error or result.subtype != "success"):
            self._fail(self._error(result, now=now))
            return
        yield from self._open_session(result.session_id)
        if not self._has_words and result.result:
            yield TextDelta(result.result)
        for call_id in self._open:
            yield UpstreamCallEnded(call_id, "(it did not say how this ended)", Outcome.UNKNOWN)
        if self._mark:
            yield Marked(self._mark)
        finish = _FINISHES.get(result.stop_reason or "", Finish.STOP)
        self.is_ended = True
        whole = usage_of(result.usage) if result.usage else None
        yield Finished(
            Finish.LENGTH if result.subtype in _LIMITS else finish,
            self._model,
            _sum(self._spent) if self._spent else whole,
        )

    def _error(self, result: ResultMessage, *, now: float) -> ModelError:
        kind, words = self._trouble
        texts = [*(result.errors or []), result.result or "", words]
        wait_s = None if self._resets_at is None else max(0.0, self._resets_at - now)
        return upstream_error(
            self._name,
            "\n".join(dict.fromkeys(filter(None, texts))),
            names=[kind or None, exact_reason(result.terminal_reason), result.subtype],
            status=result.api_error_status,
            retry_after_s=wait_s,
        )

    def _fail(self, error: ModelError) -> None:
        self.is_ended = True
        self.failure = error


def exact_reason(terminal_reason: str | None) -> str | None:
    """Return the reason for the end of a run, or None if it may be any fault of the provider."""
    return None if terminal_reason in _UNSPECIFIC else terminal_reason


def usage_of(counted: object) -> Usage:
    """Return the tokens that Anthropic counted; input includes cache reads and writes."""
    if not isinstance(counted, dict):
        return Usage()

    def tokens(name: str) -> int:
        number = counted.get(name)
        return number if isinstance(number, int) else 0

    cached, made = tokens("cache_read_input_tokens"), tokens("cache_creation_input_tokens")
    return Usage(tokens("input_tokens") + cached + made, tokens("output_tokens"), cached, made)


def _sum(spent: Iterable[Usage]) -> Usage:
    return sum(spent, Usage())


def _text(content: object) -> str:
    """Return the text of a result; pictures are replaced by their kind."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json_text(content)
    return "\n".join(
        block["text"] if block.get("type") == "text" else f"[{block.get('type')}]"
        for block in content
        if isinstance(block, dict)
    )
