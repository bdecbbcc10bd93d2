"""Requests and messages of AG-UI: reads the messages of a client, and renders a thread for a client.

A request has all messages of the thread. They become a chat (see `dialects.ui_messages`); the session receives only its
new messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from midstream.dialects.langgraph_messages import (
    call_id_of,
    interrupt_id_of,
    tool_message_id,
)
from midstream.dialects.langgraph_requests import answers_of
from midstream.dialects.request_digests import digest_of
from midstream.dialects.request_fields import bad_field
from midstream.dialects.run_fold import GivenAnswer, RunFold
from midstream.dialects.sent_text import Words, merge, words_of
from midstream.dialects.ui_message_stream import value_of
from midstream.errors import AnswerMismatchError, MalformedFrameError
from midstream.history.messages import (
    File,
    Outcome,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    UpstreamCall,
    UserMessage,
    UserPart,
    storable,
)
from midstream.json_depth import require_shallow
from midstream.session.calls import QuestionKind, Site
from midstream.session.questions import Question
from midstream.session.records import ClientTool
from midstream.session.session import GO_ON, Session
from midstream.session.turn.commands import Answer, CallFinished
from midstream.session.turn.states import Cancelling, RunningCalls

Json = dict[str, Any]

CONTINUES = "+"
"""Replaces the message id in the stream name of a run that brings answers instead of a message."""
UPSTREAM_MARK = "~upstream"
"""Suffix of the id of a call that the upstream runs itself."""
_NAME = re.compile(r"[!-~]{1,100}")
_MEDIA = ("image", "audio", "video")
_json = msgspec.json.encode
Identifier = Annotated[str, Meta(pattern="^[!-~]{1,100}$")]


class AgUiMessage(Struct):
    """A message of a thread in AG-UI; unknown fields are ignored."""

    role: Literal["user", "assistant", "tool", "system", "developer", "reasoning", "activity"]
    id: str = ""
    content: str | list[Json] | None = None
    toolCalls: list[Json] | None = None  # noqa: N815 - its name in the protocol
    toolCallId: str = ""  # noqa: N815 - likewise
    error: str | None = None


class AgUiTool(Struct):
    """A tool that the client runs; `parameters` is a JSON Schema of an object."""

    name: str
    description: str = ""
    parameters: Json | None = None


class AgUiResume(Struct):
    """The answer to an interrupt."""

    interruptId: str  # noqa: N815 - its name in the protocol
    status: Literal["resolved", "cancelled"]
    payload: Any = None


class RunAgentInput(Struct):
    """The body of a request; `state`, `context` and other fields are ignored. The last message is a user message or the
    result of a client tool, unless `resume` answers interrupts.
    """

    threadId: Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]  # noqa: N815 - its name in the protocol
    runId: Identifier  # noqa: N815 - likewise
    messages: list[AgUiMessage] = []
    tools: list[AgUiTool] = []
    resume: list[AgUiResume] | None = None


class AgUiRequest(Struct, frozen=True):
    """One request for a run.

    Args:
        thread, run_id: Ids that the client gave.
        messages: Messages of the thread that belong to the conversation.
        tools: Tools that the client runs.
        resume: Answers to interrupts.
        digest: Digest of the request, for recognizing a repetition.
    """

    thread: str
    run_id: str
    messages: tuple[AgUiMessage, ...]
    tools: tuple[ClientTool, ...]
    resume: tuple[AgUiResume, ...]
    digest: str

    @property
    def message_id(self) -> str:
        """The id of the newest message; "" if it is missing or invalid."""
        name = self.messages[-1].id if self.messages else ""
        return name if _NAME.fullmatch(name) and name != CONTINUES else ""


_input = msgspec.json.Decoder(RunAgentInput).decode


def read_input(body: bytes) -> AgUiRequest:
    """Read a request.

    Raises:
        MalformedFrameError: The body is no JSON object, or a field is invalid.
    """
    try:
        sent = _input(body)
        require_shallow([[each.content, each.toolCalls] for each in sent.messages])
        require_shallow([[each.parameters for each in sent.tools], [e.payload for e in sent.resume or ()]])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedFrameError(f"the body of this request is not a RunAgentInput: {error}") from error
    messages = tuple(each for each in sent.messages if each.role in ("user", "assistant", "tool"))
    digest = digest_of("ag-ui", sent.threadId, sent.runId, messages, sent.resume)
    tools = tuple(
        ClientTool(ToolSpec(each.name, each.description, each.parameters or {"type": "object"}))
        for each in sent.tools
    )
    resume = tuple(sent.resume or ())
    return AgUiRequest(sent.threadId, sent.runId, messages, tools, resume, digest)


# --- a client's messages as a chat --------------------------------------------------------------------------------


def chat_of(messages: Sequence[AgUiMessage]) -> list[Json]:
    """Convert messages to those of a chat: all messages between two user messages become one message."""
    results = {each.toolCallId: each for each in messages if each.role == "tool"}
    chat: list[Json] = []
    for message in messages:
        if message.role == "user":
            chat.append({"id": message.id, "role": "user", "parts": list(_user_parts(message.content))})
        elif message.role == "assistant":
            if not chat or chat[-1]["role"] == "user":
                chat.append({"id": message.id, "role": "assistant", "parts": []})
            chat[-1]["parts"] += [{"type": "step-start"}, *_assistant_parts(message, results)]
    return chat


def _user_parts(content: object) -> Iterator[Json]:
    for block in content if isinstance(content, list) else [content]:
        if isinstance(block, str):
            yield {"type": "text", "text": block}
        elif isinstance(block, dict):
            yield _user_block(block)
        else:
            raise bad_field("messages", "the content of a user message must be a string or a list of parts")


def _user_block(block: Json) -> Json:
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return {"type": "text", "text": str(block.get("text") or "")}
    if kind == "binary":  # its form before 1.0
        kind_of, place = ("url", block.get("url")) if block.get("url") else ("data", block.get("data"))
        source = {"type": kind_of, "value": place, "mimeType": block.get("mimeType")}
    if not isinstance(source, dict) or not isinstance(source.get("value"), str):
        raise bad_field("messages", f"a part of type {str(kind)[:40]!r} cannot be sent to the agent")
    default = f"{kind}/*" if kind in _MEDIA else "application/octet-stream"
    media_type, value = str(source.get("mimeType") or default), source["value"]
    url = value if source.get("type") == "url" else f"data:{media_type};base64,{value}"
    named = {"filename": block["filename"]} if isinstance(block.get("filename"), str) else {}
    return {"type": "file", "mediaType": media_type, "url": url, **named}


def _assistant_parts(message: AgUiMessage, results: dict[str, AgUiMessage]) -> Iterator[Json]:
    if isinstance(message.content, str) and message.content:
        yield {"type": "text", "text": message.content}
    for call in message.toolCalls or ():
        name, function = str(call.get("id") or ""), call.get("function")
        function = function if isinstance(function, dict) else {}
        part: Json = {
            "type": "dynamic-tool",
            "toolCallId": name.removesuffix(UPSTREAM_MARK),
            "toolName": str(function.get("name") or "tool"),
            "input": value_of(str(function.get("arguments") or "")),
        }
        if name.endswith(UPSTREAM_MARK):
            part["providerExecuted"] = True
        found = results.get(name)
        yield part if found is None else {**part, **_outcome(found)}


def _outcome(message: AgUiMessage) -> Json:
    if message.error:
        return {"state": "output-error", "errorText": message.error}
    content = message.content
    return {"state": "output-available", "output": "" if content is None else content}


# --- what a client answers ------------------------------------------------------------------------------------


class FoundResults(Struct, frozen=True):
    """Results of client tools in a request.

    Args:
        ready: Results of calls that run.
        is_early: Whether there are results of calls that start after others have ended.
    """

    ready: tuple[CallFinished, ...] = ()
    is_early: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no call waits for a result of the request."""
        return not self.ready and not self.is_early


def results_in(state: Session, open_id: str, messages: Sequence[AgUiMessage]) -> FoundResults:
    """Return the results in the newest messages for the client calls that a session waits for."""
    turn = state.turn
    if not isinstance(turn, RunningCalls):
        return FoundResults()
    sent = {each.toolCallId: each for each in _newest_results(messages)}
    ready: list[CallFinished] = []
    is_early = False
    for call in turn.calls:
        message = sent.get(call_id_of(open_id, call.call.id))
        if message is None or not call.is_open or call.plan.site is not Site.CLIENT:
            continue
        if call.is_running:
            result = _result_of(call.call.id, message)
            ready.append(CallFinished(turn.turn, turn.response_no, result))
        elif not call.is_asking:
            is_early = True
    return FoundResults(tuple(ready), is_early)


def _newest_results(messages: Sequence[AgUiMessage]) -> Iterator[AgUiMessage]:
    for message in reversed(messages):
        if message.role == "user":
            return
        if message.role == "tool":
            yield message


def _result_of(call_id: str, message: AgUiMessage) -> ToolResult:
    if message.error:
        return ToolResult(call_id, storable(message.error), Outcome.ERROR)
    content = message.content
    words = content if isinstance(content, str) else _json(content).decode()
    return ToolResult(call_id, storable(words))


def resumed_answers(
    questions: Iterable[Question], resume: Sequence[AgUiResume], given: Sequence[GivenAnswer]
) -> list[tuple[Question, Answer]]:
    """Return the answers of a request to all open questions of a session, each with its question.

    Raises:
        QuestionClosedError: The question is not open.
        AnswerMismatchError: An answer does not fit its question, or is missing.
    """
    open_questions = {interrupt_id_of(each): each for each in questions}
    sent = {each.interruptId: each for each in resume}
    missing = [name for name in open_questions if name not in sent]
    if missing:
        raise AnswerMismatchError(f"`resume` lacks the answers to {len(missing)} open interrupts")
    decided = {name: _decided(open_questions.get(name), each) for name, each in sent.items()}
    return answers_of(open_questions.values(), decided, given)


def _decided(question: Question | None, given: AgUiResume) -> object:
    if given.status == "cancelled":
        is_question = question is not None and question.kind is QuestionKind.QUESTION
        return "(the user gave no answer)" if is_question else {"approved": False, "reason": "cancelled"}
    return decision_of(given.payload)


def decision_of(payload: object) -> object:
    """Convert a payload of the form `responseSchema` to a value for `answers_of`."""
    if isinstance(payload, dict) and payload.get("approved") is True:
        if (edited := payload.get("editedArgs")) is not None:
            return {"type": "edit", "edited_action": {"args": edited}}
    return payload


# --- a thread as messages -------------------------------------------------------------------------------------


def part_id(name: str, kinds: Sequence[str]) -> str:
    """Return the id of the last part of a response. The first text has the id of the response."""
    number = len(kinds) - 1
    if kinds[number] == "thinking":
        return f"{name}.thought-{number}"
    return name if kinds.count("text") == 1 else f"{name}.text-{number}"


def snapshot_of(fold: RunFold) -> list[Json]:
    """Return all messages of the current thread, including the text of an unfinished response."""
    messages: list[Json] = []
    for entry, name in zip(fold.session.history.entries, fold.ids, strict=True):
        if isinstance(entry, Step):
            messages += _step_messages(name, entry.response, entry.results)
        elif entry != GO_ON:
            messages.append(_user_message(name, entry))
    open_id, words = fold.open_words
    if isinstance(fold.session.turn, RunningCalls | Cancelling):
        results = [call.result for call in fold.session.turn.calls if call.result is not None]
        messages += _step_messages(open_id, fold.session.turn.response, results)
    else:
        messages += (message for message, _ in _parts(open_id, words))
    return messages


def _user_message(name: str, message: UserMessage) -> Json:
    if all(isinstance(part, Text) for part in message.parts):
        content: object = "".join(part.text for part in message.parts if isinstance(part, Text))
    else:
        content = [_block(part) for part in message.parts]
    return {"id": name, "role": "user", "content": content}


def _block(part: UserPart) -> Json:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return _file_block(part)


def _file_block(part: File) -> Json:
    family = part.media_type.partition("/")[0]
    kind = family if family in _MEDIA else "document"
    is_inline = part.data is not None
    place = {"type": "data" if is_inline else "url", "value": part.data if is_inline else part.url}
    return {"type": kind, "source": {**place, "mimeType": part.media_type}}


def _parts(name: str, words: Sequence[Words]) -> Iterator[tuple[Json, str]]:
    kinds: list[str] = []
    for kind, text in words:
        kinds.append(kind)
        role = "reasoning" if kind == "thinking" else "assistant"
        yield {"id": part_id(name, kinds), "role": role, "content": text}, kind


def _step_messages(name: str, response: Response, results: Sequence[ToolResult]) -> list[Json]:
    messages = [message for message, _ in _parts(name, merge(words_of(response)))]
    upstream = [part for part in response.parts if isinstance(part, UpstreamCall)]
    if upstream:
        calls = [call_json(name, part) for part in upstream]
        messages.append(
            {"id": upstream_message_id(name), "role": "assistant", "content": "", "toolCalls": calls}
        )
    for part in upstream:
        if part.outcome is not None:
            result = ToolResult(part.id, part.content, part.outcome)
            messages.append(tool_message(name, result, is_upstream=True))
    if response.calls:
        owner = next((each for each in messages if each["id"] == name), None)
        if owner is None:
            owner = {"id": name, "role": "assistant", "content": ""}
            messages.append(owner)
        owner["toolCalls"] = [call_json(name, call) for call in response.calls]
    return [*messages, *(tool_message(name, result) for result in results)]


def upstream_message_id(name: str) -> str:
    """Return the id of the message with the calls that the upstream runs for a response."""
    return f"{name}.upstream"


def shown_call_id(name: str, call_id: str, *, is_upstream: bool = False) -> str:
    """Return the id of a call, unique in its thread."""
    return call_id_of(name, call_id) + (UPSTREAM_MARK if is_upstream else "")


def call_json(name: str, call: ToolCall | UpstreamCall) -> Json:
    """Return a call as an entry of its message."""
    shown = shown_call_id(name, call.id, is_upstream=isinstance(call, UpstreamCall))
    function = {"name": call.name or "tool", "arguments": arguments_of(call.arguments)}
    return {"id": shown, "type": "function", "function": function}


def arguments_of(arguments: str) -> str:
    """Return arguments as valid JSON text, since clients parse it."""
    try:
        msgspec.json.decode(arguments or "{}", type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeError):
        return _json({"input": arguments}).decode()
    return arguments or "{}"


def tool_message(name: str, result: ToolResult, *, is_upstream: bool = False) -> Json:
    """Return the result of a call as a message."""
    message: Json = {
        "id": tool_message_id(name, result.call_id),
        "role": "tool",
        "toolCallId": shown_call_id(name, result.call_id, is_upstream=is_upstream),
        "content": result.content,
    }
    return message if result.outcome is Outcome.OK else {**message, "error": result.content}


# --- interrupts -----------------------------------------------------------------------------------------------


_DECISION: Json = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}},
    "required": ["approved"],
}


def interrupts_in(fold: RunFold) -> list[Json]:
    """Return the open questions of a thread as interrupts."""
    return [_interrupt(each, fold) for each in fold.questions]


def _interrupt(question: Question, fold: RunFold) -> Json:
    is_call = isinstance(fold.session.turn, RunningCalls)
    is_own = not question.session
    schema: Json = _DECISION
    match question.kind:
        case QuestionKind.QUESTION:
            reason, schema = "input_required", {"type": "string"}
        case QuestionKind.DOUBT:
            reason = "midstream:in_doubt"
        case QuestionKind.APPROVAL:
            reason = "tool_call" if is_call and is_own else "confirmation"
            if is_call and not question.is_fixed:
                edited = {"type": "object", "description": "Takes the place of the arguments."}
                schema = {**schema, "properties": {**schema["properties"], "editedArgs": edited}}
    interrupt: Json = {"id": interrupt_id_of(question), "reason": reason, "responseSchema": schema}
    interrupt["message"] = question.text or _words_of(question)
    if is_call and is_own:  # no message of the thread contains a call of a sub-agent
        interrupt["toolCallId"] = shown_call_id(fold.open_words[0], question.call_id)
    if question.expires_at:
        expires = datetime.fromtimestamp(question.expires_at, UTC)
        interrupt["expiresAt"] = expires.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    about = {"name": question.name, "arguments": value_of(question.arguments)}
    interrupt["metadata"] = {"midstream": about if is_own else {**about, "agents": question.agents}}
    return interrupt


def _words_of(question: Question) -> str:
    if question.kind is QuestionKind.DOUBT:
        return (
            f"{question.name} was started, and whether it took effect is unknown. "
            "Approve to run it again, decline to not run it again."
        )
    return f"May {question.name} run?"
