"""Requests of the AI SDK, in which a client resends all messages of a chat.

The client's messages take precedence, as in the other dialects: after the common beginning, they replace the rest of
the session's history. Messages are equal if their text (without white space) and their calls are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from midstream.dialects.request_digests import digest_of
from midstream.dialects.request_fields import bad_field
from midstream.dialects.ui_message_stream import (
    RUN_MARK,
    SUB_AGENT_MARK,
    approval_id_of,
    shown_call_id,
    tool_call_id,
    value_of,
)
from midstream.errors import MalformedFrameError
from midstream.history.messages import (
    Entry,
    File,
    Outcome,
    Response,
    ResponsePart,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
    UpstreamCall,
    UserMessage,
    UserPart,
    storable,
    with_distinct_ids,
)
from midstream.json_depth import require_shallow
from midstream.session.calls import Choice, QuestionKind, Site
from midstream.session.questions import Question, questions_of
from midstream.session.records import ClientTool
from midstream.session.session import GO_ON, Session
from midstream.session.turn.commands import Answer, CallFinished
from midstream.session.turn.states import RunningCalls

Json = dict[str, Any]

CHAT_ID_CHARS_MIN = 12
"""Minimum length of a first message's id that identifies a chat; a shorter id may not be unique."""
_LOST = "(the client sent no result for this call)"
_OUTPUT_STATES = ("output-available", "output-error")
_DONE_STATES = (*_OUTPUT_STATES, "output-denied")
_json = msgspec.json.encode


class ChatMessage(Struct):
    """One UI message with parts of the AI SDK."""

    role: Literal["system", "user", "assistant"]
    parts: list[Json]
    id: str = ""


class ChatTool(Struct):
    """A tool that the client runs; `inputSchema` is a JSON schema of an object."""

    name: str
    description: str = ""
    inputSchema: Json = {}  # noqa: N815 - its name in the protocol
    needsApproval: bool = False  # noqa: N815 - likewise
    hasEffects: bool = True  # noqa: N815 - likewise


class ChatBody(Struct):
    """The body of a request of the AI SDK; other fields are ignored. The last message is a user message with text or a
    file, or an assistant message with answers to the open turn.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    id: Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]{0,128}$")] | None = None
    trigger: str | None = None
    messageId: str | None = None  # noqa: N815 - its name in the protocol
    tools: list[ChatTool] = []


class ChatRequest(Struct, frozen=True):
    """One request for an answer.

    Args:
        chat: Id of the chat; "" without one.
        messages: Messages of the chat, without system messages: the agent has its own instructions.
        tools: Tools of the client.
        is_regenerated: Whether the last answer is requested again.
        digest: Digest of the request.
    """

    chat: str
    messages: tuple[Json, ...]
    tools: tuple[ClientTool, ...]
    is_regenerated: bool
    digest: str

    @property
    def is_answer(self) -> bool:
        """Whether it contains results and decisions for the open turn, instead of a new message."""
        return str(self.messages[-1]["role"]) == "assistant"


class ChatChange(Struct, frozen=True):
    """Difference between a chat and its session.

    Args:
        message: The newest user message.
        keep: Number of history entries that stay; None if all stay, without further entries.
        before: New entries before the message.
    """

    message: UserMessage
    keep: int | None = None
    before: tuple[Entry, ...] = ()


_chat_body = msgspec.json.Decoder(ChatBody).decode


def read_chat_request(body: bytes) -> ChatRequest:
    """Read a request.

    Raises:
        MalformedFrameError: The body is not a JSON object, or a field is invalid.
    """
    try:
        sent = _chat_body(body)
        require_shallow([message.parts for message in sent.messages])
        require_shallow([tool.inputSchema for tool in sent.tools])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedFrameError(f"the body of this request is not a chat: {error}") from error
    messages: tuple[Json, ...] = tuple(
        {"id": each.id, "role": each.role, "parts": each.parts}
        for each in sent.messages
        if each.role != "system"
    )
    if not messages:
        raise bad_field("messages", "`messages` has no user message")
    chat, first = sent.id or "", messages[0]["id"]
    if not chat and len(first) >= CHAT_ID_CHARS_MIN:
        chat = first
    digest = digest_of("chat", chat, sent.trigger, sent.messageId, messages)
    tools = tuple(
        ClientTool(
            ToolSpec(each.name, each.description, each.inputSchema or {"type": "object"}),
            has_effects=each.hasEffects,
            needs_approval=each.needsApproval,
        )
        for each in sent.tools
    )
    return ChatRequest(chat, messages, tools, sent.trigger == "regenerate-message", digest)


# --- what is new ----------------------------------------------------------------------------------------------


def find_change(history: Sequence[Entry], messages: Sequence[Json]) -> ChatChange:
    """Compare a chat, whose last message is a user message, with a session.

    Raises:
        BadFieldError: The last message is empty.
    """
    *earlier, last = messages
    message = _user_message(last)
    if not message.parts:
        raise bad_field("messages", "the last message has no text and no file")
    known = [*_turns_of(history)]
    sent = [each for each in earlier if _gist_of(each) != _NOTHING]
    count = keep = 0
    for (gist, end), each in zip(known, sent, strict=False):
        if gist != _gist_of(each):
            break
        count, keep = count + 1, end
    if keep == len(history) and count == len(sent):
        return ChatChange(message)
    return ChatChange(message, keep, tuple(entry for each in sent[count:] for entry in _entries_of(each)))


_Gist = tuple[str, str, tuple[str, ...]]
_NOTHING: _Gist = ("assistant", "", ())


def _turns_of(history: Sequence[Entry]) -> Iterator[tuple[_Gist, int]]:
    """Yield the gist of each UI message of a history, and the number of entries up to its end.

    The steps between two user messages are one UI message.
    """
    words, calls, is_open = "", list[str](), False
    for number, entry in enumerate(history):
        if isinstance(entry, Step):
            words += _without_spaces(entry.response.text)
            calls += (call.id for call in entry.response.calls)  # a client has them in another order
            is_open = True
        elif entry != GO_ON:
            if is_open and (gist := ("assistant", words, tuple(sorted(calls)))) != _NOTHING:
                yield gist, number
            words, calls, is_open = "", [], False
            yield _gist_of_user(entry), number + 1
    if is_open and (gist := ("assistant", words, tuple(sorted(calls)))) != _NOTHING:
        yield gist, len(history)


def _gist_of(message: Json) -> _Gist:
    if message["role"] == "user":
        return _gist_of_user(_user_message(message))
    words = "".join(_text(part) for part in message["parts"] if part.get("type") == "text")
    calls = (part for part in message["parts"] if _is_tool(part) and not part.get("providerExecuted"))
    names = (_model_id(part) for part in calls if not _is_sub_agents(part))
    return "assistant", _without_spaces(words), tuple(sorted(names))


def _gist_of_user(message: UserMessage) -> _Gist:
    words = "".join(part.text for part in message.parts if isinstance(part, Text))
    files = (part for part in message.parts if isinstance(part, File))
    return "user", _without_spaces(words), tuple(f"{part.media_type} {part.name or ''}" for part in files)


def _without_spaces(words: str) -> str:
    return "".join(words.split())


def _is_tool(part: Json) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and (kind == "dynamic-tool" or kind.startswith("tool-"))


def _is_sub_agents(part: Json) -> bool:
    """Whether a part shows the call of a sub-agent, which is in no history of the chat."""
    return str(part.get("toolCallId", "")).startswith(SUB_AGENT_MARK)


def _tool_name(part: Json) -> str:
    return str(part.get("toolName") or "tool") if part["type"] == "dynamic-tool" else part["type"][5:]


def _model_id(part: Json) -> str:
    """Return the model's id of a call, without the part that makes it unique in its message."""
    return str(part.get("toolCallId", "")).rpartition(RUN_MARK)[0] or str(part.get("toolCallId", ""))


def _text(part: Json) -> str:
    words = part.get("text")
    return storable(words) if isinstance(words, str) else ""


def _user_message(message: Json) -> UserMessage:
    parts: list[UserPart] = []
    for part in message["parts"]:
        if part.get("type") == "text" and _text(part):
            parts.append(Text(_text(part)))
        elif part.get("type") == "file" and isinstance(part.get("url"), str):
            parts.append(_file_of(part))
    return UserMessage(tuple(parts))


def _file_of(part: Json) -> File:
    url, name = storable(part["url"]), part.get("filename")
    head, comma, data = url.partition(";base64,")
    kind = str(part.get("mediaType") or head.removeprefix("data:") or "application/octet-stream")
    named = storable(name) if isinstance(name, str) else None
    if comma and head.startswith("data:"):
        return File(kind, data=data, name=named)
    return File(kind, url=url, name=named)


def _entries_of(message: Json) -> Iterator[Entry]:
    """Yield the history entries of a message; an assistant message has a step for each response."""
    if message["role"] == "user":
        yield _user_message(message)
        return
    parts: list[ResponsePart] = []
    results: list[ToolResult] = []
    for part in (*message["parts"], {"type": "step-start"}):
        kind = part.get("type")
        if kind == "step-start":
            if parts:
                whole = with_distinct_ids(tuple(parts), response_no=len(parts))
                ids = [each.id for each in whole if isinstance(each, ToolCall)]
                answered = (msgspec.structs.replace(r, call_id=i) for r, i in zip(results, ids, strict=True))
                yield Step(Response(whole), tuple(answered))
            parts, results = [], []
        elif kind == "text" and _text(part):
            parts.append(Text(_text(part)))
        elif kind == "reasoning" and _text(part):
            parts.append(Thinking(_text(part)))
        elif _is_tool(part) and not _is_sub_agents(part):
            arguments = _json(part.get("input") if isinstance(part.get("input"), dict) else {}).decode()
            if part.get("providerExecuted"):
                content = _content_of(part).content
                parts.append(UpstreamCall(_model_id(part), _tool_name(part), arguments, content, Outcome.OK))
            else:
                parts.append(ToolCall(_model_id(part), storable(_tool_name(part)), arguments))
                results.append(_content_of(part))


def _content_of(part: Json) -> ToolResult:
    call_id, state = _model_id(part), part.get("state")
    if state == "output-available":
        output = part.get("output")
        content = output if isinstance(output, str) else _json(output).decode()
        return ToolResult(call_id, storable(content))
    if state == "output-error":
        return ToolResult(call_id, storable(str(part.get("errorText") or "error")), Outcome.ERROR)
    if state == "output-denied":
        return ToolResult(call_id, "A person declined this call.", Outcome.DENIED)
    return ToolResult(call_id, _LOST, Outcome.UNKNOWN)


# --- answers --------------------------------------------------------------------------------------------------


def answered_calls(message: Json) -> list[str]:
    """Return the ids of calls with an answer in an assistant message, in order."""
    return [
        str(part.get("toolCallId"))
        for part in message["parts"]
        if _is_tool(part) and part.get("state") in (*_DONE_STATES, "approval-responded")
    ]


def answers_in(questions: Iterable[Question], message: Json) -> list[tuple[Question, Answer]]:
    """Return the answers of a message to open questions, each with its question."""
    parts = _calls_in(message)
    found = []
    for each in questions:
        part = parts.get(shown_call_id(each.session, each.turn, each.response, each.call_id))
        if part and (answer := _answer_to(each, part)):
            found.append((each, answer))
    return found


def next_answer(state: Session, message: Json) -> Answer | CallFinished | None:
    """Return the first answer in a message for which the session waits, or None."""
    for _, answer in answers_in(questions_of("", state), message):
        return answer
    parts, turn = _calls_in(message), state.turn
    if isinstance(turn, RunningCalls):
        for call in turn.calls:
            part = parts.get(tool_call_id(call.call.id, turn.response_no))
            is_clients = call.is_running and call.plan.site is Site.CLIENT
            if part and is_clients and part.get("state") in _OUTPUT_STATES:
                result = msgspec.structs.replace(_content_of(part), call_id=call.call.id)
                return CallFinished(turn.turn, turn.response_no, result)
    return None


def _calls_in(message: Json) -> dict[str, Json]:
    return {str(part.get("toolCallId")): part for part in message["parts"] if _is_tool(part)}


def _answer_to(question: Question, part: Json) -> Answer | None:
    if question.kind is not QuestionKind.QUESTION:
        return _decision(question, part)
    if part.get("state") not in _OUTPUT_STATES:
        return None
    return Answer(question.ref, question.digest, Choice.RESPOND, _content_of(part).content)


def _decision(question: Question, part: Json) -> Answer | None:
    """Return the client's decision about the shown arguments, or None."""
    approval = part.get("approval")
    if not isinstance(approval, dict) or not isinstance(approval.get("approved"), bool):
        return None
    ref = question.ref
    name = part["toolCallId"] if question.session else ref.call_id
    if approval.get("id") != approval_id_of(ref.turn, ref.response_no, question.digest, name):
        return None
    is_doubt = question.kind is QuestionKind.DOUBT
    yes, no = (Choice.RERUN, Choice.SKIP) if is_doubt else (Choice.ALLOW, Choice.DENY)
    reason = approval.get("reason")
    words = storable(reason) if isinstance(reason, str) else ""
    return Answer(ref, question.digest, yes if approval["approved"] else no, words)


# --- a history as messages ------------------------------------------------------------------------------------


def messages_of(chat: str, state: Session) -> list[Json]:
    """Return the history of a session as UI messages.

    The newest answer has the id of its stream, so that a replay replaces it.
    """
    messages: list[Json] = []
    for number, entry in enumerate(state.history.entries):
        if isinstance(entry, UserMessage):
            if entry != GO_ON:
                parts = [_user_part(part) for part in entry.parts]
                messages.append({"id": f"{chat}{RUN_MARK}u{number}", "role": "user", "parts": parts})
            continue
        if not messages or messages[-1]["role"] == "user":
            messages.append({"id": f"{chat}{RUN_MARK}a{number}", "role": "assistant", "parts": []})
        parts = messages[-1]["parts"]
        step = 1 + sum(part["type"] == "step-start" for part in parts)
        parts += _step_parts(entry, step)
    if messages and messages[-1]["role"] == "assistant":
        messages[-1]["id"] = f"{chat}{RUN_MARK}{state.turns}"
    return messages


def _user_part(part: UserPart) -> Json:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    url = part.url or f"data:{part.media_type};base64,{part.data or ''}"
    named = {"filename": part.name} if part.name else {}
    return {"type": "file", "mediaType": part.media_type, "url": url, **named}


def _step_parts(entry: Step, step: int) -> Iterator[Json]:
    yield {"type": "step-start"}
    results = {result.call_id: result for result in entry.results}
    for part in entry.response.parts:
        match part:
            case Text():
                yield {"type": "text", "text": part.text, "state": "done"}
            case Thinking():
                if part.text:
                    yield {"type": "reasoning", "text": part.text, "state": "done"}
            case ToolCall():
                called = {"type": f"tool-{part.name}", "toolCallId": tool_call_id(part.id, step)}
                yield {**called, "input": value_of(part.arguments), **_outcome(results[part.id])}
            case UpstreamCall():
                result = ToolResult(part.id, part.content, part.outcome or Outcome.UNKNOWN)
                shown: Json = {
                    "type": "dynamic-tool",
                    "toolName": part.name or "tool",
                    "providerExecuted": True,
                }
                place = {"toolCallId": tool_call_id(part.id, step), "input": value_of(part.arguments)}
                yield {**shown, **place, **_outcome(result)}


def _outcome(result: ToolResult) -> Json:
    if result.outcome is Outcome.OK:
        return {"state": "output-available", "output": value_of(result.content)}
    return {"state": "output-error", "errorText": result.content}
