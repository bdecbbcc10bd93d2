"""Conversion of a LangGraph graph's output to events of a model, and of a session's history to messages."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from midstream.extras import extra
from midstream.frameworks.langgraph_gate import ASKED
from midstream.history.messages import File, History, Outcome, Step, Text, ToolResult, Usage, UserMessage
from midstream.models.responses import ModelEvent, TextDelta, ThinkingDelta, ToolCallRequested, Working
from midstream.session.calls import NOT_STARTED_CONTENT

with extra("langgraph"):
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage

INTERRUPT = "interrupt"
"""Name of the call with which a graph asks a person."""
APPROVE = "approve"
"""Name of the call with which a graph requests the approval of a tool call."""
BREAK = "\n\n"
"""Separator of the texts of two messages in one response."""


# --- text -----------------------------------------------------------------------------------------------------


class GraphText:
    """Emits the text of a graph's messages in one response: each message once, parallel nodes one after the other.

    Args:
        shown: Ids of messages that earlier responses of the turn contain.
    """

    def __init__(self, shown: Collection[str]) -> None:
        self.usage: Usage | None = None
        self.model = ""
        self._before = {*shown}
        self._emitted: list[str] = []
        self._whole: set[str] = set()
        self._has_text = False
        self._queues: dict[str, list[BaseMessage]] = {}
        """Messages by task; those of the first task were emitted."""
        self._over: set[str] = set()

    def take_message(self, task: str, message: BaseMessage) -> Iterator[ModelEvent]:
        """Handle a message of a task, or a chunk of one."""
        if not isinstance(message, AIMessage):
            return
        queue = self._queues.setdefault(task, [])
        if next(iter(self._queues)) == task:
            yield from self._emit(message)
        else:
            queue.append(message)
            yield Working(task.rpartition("|")[2].partition(":")[0])

    def end_node(self, node: str) -> Iterator[ModelEvent]:
        """Handle the end of a node's tasks."""
        self._over |= {task for task in self._queues if task.rpartition(":")[0] == node}
        while self._queues and (task := next(iter(self._queues))) in self._over:
            del self._queues[task]
            yield from self._emit_next()

    def end_run(self) -> Iterator[ModelEvent]:
        """Handle the end of the run."""
        while self._queues:
            del self._queues[next(iter(self._queues))]
            yield from self._emit_next()

    def repeat_message(self, message: BaseMessage) -> Iterator[ModelEvent]:
        """Handle a complete message of an earlier attempt."""
        if isinstance(message, AIMessage):
            yield from self._emit(message)

    def emit_last_if_empty(self, messages: Sequence[BaseMessage]) -> Iterator[ModelEvent]:
        """Emit the last message if there was no text: a node may have written it without an id."""
        if not self._has_text and messages and isinstance(messages[-1], AIMessage):
            yield from self._text_of(messages[-1])

    def signature(self) -> str:
        """Return the data for `TurnSoFar`, which the journal stores with the first call of this response."""
        return msgspec.json.encode({"shown": self._emitted}).decode()

    def _emit_next(self) -> Iterator[ModelEvent]:
        for message in next(iter(self._queues.values()), []):
            yield from self._emit(message)

    def _emit(self, message: AIMessage | BaseMessage) -> Iterator[ModelEvent]:
        known = message.id or ""
        if known in self._before or known in self._whole:
            return
        if known and not isinstance(message, AIMessageChunk):
            self._whole.add(known)
            if known in self._emitted:  # its chunks were emitted
                return
        yield from self._text_of(message)
        if known and known not in self._emitted:
            self._emitted.append(known)

    def _text_of(self, message: Any) -> Iterator[ModelEvent]:  # noqa: ANN401 - LangChain's
        self._count(message)
        is_new = not message.id or message.id not in self._emitted
        text = str(message.text)
        thinking = "".join(_thinking_in(message))
        if thinking:
            yield ThinkingDelta(thinking)
        if text:
            gap = BREAK if self._has_text and is_new else ""
            self._has_text = True
            yield TextDelta(f"{gap}{text}")
        elif not thinking:
            yield Working("message")

    def _count(self, message: Any) -> None:  # noqa: ANN401 - LangChain's
        self.model = (message.response_metadata or {}).get("model_name", "") or self.model
        used = message.usage_metadata
        if used:
            details = used.get("input_token_details") or {}
            more = Usage(
                used.get("input_tokens", 0),
                used.get("output_tokens", 0),
                details.get("cache_read", 0) or 0,
                details.get("cache_creation", 0) or 0,
            )
            self.usage = self.usage + more if self.usage else more


def _thinking_in(message: Any) -> Iterator[str]:  # noqa: ANN401 - LangChain's
    if isinstance(message.content, str):
        return
    for block in message.content_blocks:
        if block.get("type") == "reasoning":
            yield str(block.get("reasoning", ""))


# --- state of a turn ------------------------------------------------------------------------------------------


class TurnSoFar(Struct, frozen=True):
    """The messages in the earlier responses of a turn, and the outcomes of their calls.

    Args:
        shown: Ids of the messages.
        results: Results by call, without calls whose tool called `interrupt`, which run again.
        answers: Answers of people by call, for calls whose tool called `interrupt`.
        asking: Calls whose tool called `interrupt` and has no answer.
    """

    shown: frozenset[str]
    results: dict[str, ToolResult]
    answers: dict[str, list[Any]]
    asking: frozenset[str]

    @classmethod
    def of(cls, history: History, response: int) -> TurnSoFar:
        """Compute it from a history, for the response with this number."""
        steps = [each for each in history.entries if isinstance(each, Step)]
        shown: set[str] = set()
        results: dict[str, ToolResult] = {}
        answers: dict[str, list[Any]] = {}
        asking: set[str] = set()
        for step in steps[len(steps) - (response - 1) :] if response > 1 else ():
            for call, result in zip(step.response.calls, step.results, strict=True):
                shown |= {*_message_ids_in(call.signature)}
                results[result.call_id] = result
                asker, mark, _ = result.call_id.rpartition("?")
                if mark:
                    answers.setdefault(asker, []).append(value_of(result.content))
                    asking.discard(asker)
                    results.pop(asker, None)
                elif result.content.endswith(ASKED):
                    asking.add(result.call_id)
                    del results[result.call_id]
        return cls(frozenset(shown), results, answers, frozenset(asking))


def _message_ids_in(signature: str | None) -> list[str]:
    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode(signature or "{}", type=dict[str, list[str]]).get("shown", [])
    return []


# --- questions ------------------------------------------------------------------------------------------------


class InterruptAnswer(Struct, frozen=True):
    """The value that a graph receives for an interrupt."""

    value: Any


def calls_of(interrupt_id: str, value: Any) -> Iterator[ToolCallRequested]:  # noqa: ANN401 - the application's own
    """Yield the calls that show an interrupt to people: one for each approval, else one question."""
    actions = _actions_in(value)
    if not actions:
        yield ToolCallRequested(interrupt_id, INTERRUPT, _json(_question_of(value)))
    for number, action in enumerate(actions):
        # By default the description repeats the tool and its arguments.
        words = str(action.get("description", "")).partition("\n\nTool: ")[0]
        shown = {
            "tool": action["name"],
            "arguments": action["args"],
            "description": words,
        }
        yield ToolCallRequested(f"{interrupt_id}.{number}", APPROVE, _json(shown))


def answer_of(interrupt: Any, results: Mapping[str, ToolResult]) -> InterruptAnswer | None:  # noqa: ANN401 - LangGraph's
    """Return the answer to an interrupt, or None."""
    actions = _actions_in(interrupt.value)
    if not actions:
        found = results.get(interrupt.id)
        return (
            None
            if found is None or found.outcome is not Outcome.OK
            else InterruptAnswer(value_of(found.content))
        )
    outcomes = [results.get(f"{interrupt.id}.{number}") for number in range(len(actions))]
    decided = [
        _decision(action, each) for action, each in zip(actions, outcomes, strict=True) if each is not None
    ]
    return InterruptAnswer({"decisions": decided}) if len(decided) == len(actions) else None


def value_of(words: str) -> Any:  # noqa: ANN401 - the application's own
    """Return the value of `interrupt` for an answer: objects, lists, true and false are JSON, anything else is text."""
    with contextlib.suppress(msgspec.DecodeError):
        value = msgspec.json.decode(words)
        if isinstance(value, dict | list | bool):
            return value
    return words


def _actions_in(value: Any) -> Sequence[Mapping[str, Any]]:  # noqa: ANN401 - the application's own
    """Return the calls of a `HumanInTheLoopMiddleware` request if each can be allowed and declined, else none."""
    if not isinstance(value, Mapping) or not isinstance(value.get("review_configs"), list):
        return ()
    choices = [{*each.get("allowed_decisions", ())} for each in value["review_configs"]]
    actions: Sequence[Mapping[str, Any]] = value.get("action_requests") or ()
    return actions if all({"approve", "reject"} <= each for each in choices) else ()


def _decision(action: Mapping[str, Any], result: ToolResult) -> dict[str, Any]:
    if result.outcome is not Outcome.OK:
        return {"type": "reject", "message": result.content}
    allowed = msgspec.json.decode(result.content.splitlines()[-1])
    if (allowed["tool"], allowed["arguments"]) == (action["name"], action["args"]):
        return {"type": "approve"}
    edited = {"name": allowed["tool"], "args": allowed["arguments"]}
    return {"type": "edit", "edited_action": edited}


def _question_of(value: Any) -> dict[str, Any]:  # noqa: ANN401 - the application's own
    if isinstance(value, str):
        return {"question": value}
    if isinstance(value, Mapping) and isinstance(value.get("question"), str):
        options = value.get("options")
        has_options = isinstance(options, list | tuple) and all(isinstance(each, str) for each in options)
        if {*value} == {"question"} or ({*value} == {"question", "options"} and has_options):
            return dict(value)
    return {"question": _json(value)}


def _json(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


# --- messages -------------------------------------------------------------------------------------------------


def message_id(turn: int) -> str:
    """Return the id of a turn's message in the state of a graph."""
    return f"midstream-{turn}"


def messages_since(messages: Sequence[BaseMessage], turn: int) -> Sequence[BaseMessage]:
    """Return the messages after that of a turn; none if the graph has removed it."""
    ids = [each.id for each in messages]
    known = message_id(turn)
    return messages[ids.index(known) + 1 :] if known in ids else ()


def new_messages(history: History, state: Any, turn: int, known: int) -> list[BaseMessage]:  # noqa: ANN401 - LangGraph's
    """Return the messages of a history that the state of a graph lacks; the message of this turn is the last one.

    Args:
        history: History of the session.
        state: The graph's newest state.
        turn: Number of this turn.
        known: Number of the turn whose message is in the state; 0 for none.
    """
    turns: list[list[UserMessage | Step]] = []
    for entry in history.entries:
        if isinstance(entry, UserMessage) or not turns:
            turns.append([])
        turns[-1].append(entry)
    missing = turns[known - turn :] if known else turns
    cut = turns[known - turn - 1] if known and len(turns) > turn - known else []
    messages = [*_ends(state, cut)] if state.tasks else []
    for place, entries in enumerate(missing, start=turn - len(missing) + 1):
        for entry in entries:
            messages += _of_entry(entry, place)
    return messages


def _ends(state: Any, cut: Sequence[UserMessage | Step]) -> Iterator[BaseMessage]:  # noqa: ANN401 - LangGraph's
    """Yield the end of an interrupted turn: a result for each open call, and the last text."""
    steps = [each for each in cut if isinstance(each, Step)]
    results = [result for each in steps for result in each.results]
    open_calls: dict[str, Any] = {}
    for message in state.values.get("messages", ()):
        if isinstance(message, AIMessage):
            open_calls |= {str(call["id"]): call for call in message.tool_calls}
        elif isinstance(message, ToolMessage):
            open_calls.pop(message.tool_call_id, None)
    for call_id, call in open_calls.items():
        ended = [each.content for each in results if each.call_id.rpartition("-")[0] == call_id]
        yield ToolMessage(
            ended[-1] if ended else NOT_STARTED_CONTENT,
            tool_call_id=call_id,
            name=call["name"],
            status="error",
        )
    if steps and not steps[-1].response.calls and steps[-1].response.text:
        yield AIMessage(steps[-1].response.text)


def _of_entry(entry: UserMessage | Step, turn: int) -> Iterable[BaseMessage]:
    if isinstance(entry, UserMessage):
        only = entry.parts[0] if len(entry.parts) == 1 else None
        content: Any = only.text if isinstance(only, Text) else [_block(each) for each in entry.parts]
        return [HumanMessage(content, id=message_id(turn))]
    calls = [
        {"name": call.name, "args": _arguments(call.arguments), "id": call.id, "type": "tool_call"}
        for call in entry.response.calls
    ]
    names = {call.id: call.name for call in entry.response.calls}
    results = [
        ToolMessage(
            each.content,
            tool_call_id=each.call_id,
            name=names[each.call_id],
            status="success" if each.outcome is Outcome.OK else "error",
        )
        for each in entry.results
    ]
    return [AIMessage(entry.response.text, tool_calls=calls), *results]


def _arguments(text: str) -> dict[str, Any]:
    with contextlib.suppress(msgspec.DecodeError):
        value = msgspec.json.decode(text or "{}")
        if isinstance(value, dict):
            return value
    return {}


def _block(part: Text | File) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    kind = part.media_type.partition("/")[0]
    block: dict[str, Any] = {"type": kind if kind in ("image", "audio", "video") else "file"}
    if part.data is not None:
        return {**block, "base64": part.data, "mime_type": part.media_type}
    return {**block, "url": part.url, "mime_type": part.media_type}
