"""Requests, messages, errors and the card of the Agent2Agent protocol (A2A), version 1.0. No function has side effects.

A context is a session, and a task is one of its turns. The id of a task names both.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from midstream.dialects import request_digests
from midstream.dialects.ag_ui_messages import interrupts_in
from midstream.dialects.run_fold import RunFold
from midstream.errors import (
    AnswerMismatchError,
    ConflictError,
    MidstreamError,
    NotFoundError,
    ProtocolError,
    StreamReusedError,
    UsageError,
)
from midstream.history.messages import File, Text, UserMessage, UserPart, storable
from midstream.json_depth import require_shallow_text
from midstream.version import __version__

Json = dict[str, Any]

VERSION = "1.0"
"""The supported version. A request without a version has 0.3, which is not supported."""
PATH = "/v1/a2a"
DATA_TYPE, TEXT_TYPE = "application/json", "text/plain"
_IMAGES = tuple(f"image/{kind}" for kind in ("gif", "jpeg", "png", "webp"))
TASK_MARK = "~"
"""Separates the context and the turn in the id of a task; no session name contains it."""
STREAM_PREFIX = "a2a-"
"""Prefix of the names of streams that messages open in their sessions."""
ID_DIGITS = 16
"""Digits of a message's digest in its stream name: some clients give one id to several messages."""
PAGE_MAX = 100
"""Maximum number of tasks on a page of a list."""
_MESSAGE_ID = re.compile(r"[!-~]{1,100}")
_TURN = re.compile(r"[1-9][0-9]{0,8}")
_SNAKE = re.compile(r"_([a-z])")
_json = msgspec.json.encode
digest_of = partial(request_digests.digest_of, "a2a")
_Kind = TypeVar("_Kind")
_Length = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Size = Annotated[int, Meta(ge=1, le=PAGE_MAX)]

PARSE, INVALID, NO_METHOD, BAD_PARAMS, INTERNAL = -32700, -32600, -32601, -32602, -32603
NO_TASK, NOT_CANCELABLE, NO_PUSH, UNSUPPORTED, BAD_TYPE = -32001, -32002, -32003, -32004, -32005
NO_VERSION = -32009
_ERRORS = {
    PARSE: (400, "INVALID_ARGUMENT", ""),
    INVALID: (400, "INVALID_ARGUMENT", ""),
    NO_METHOD: (404, "NOT_FOUND", ""),
    BAD_PARAMS: (400, "INVALID_ARGUMENT", ""),
    INTERNAL: (500, "INTERNAL", ""),
    NO_TASK: (404, "NOT_FOUND", "TASK_NOT_FOUND"),
    NOT_CANCELABLE: (400, "FAILED_PRECONDITION", "TASK_NOT_CANCELABLE"),
    NO_PUSH: (400, "FAILED_PRECONDITION", "PUSH_NOTIFICATION_NOT_SUPPORTED"),
    UNSUPPORTED: (400, "FAILED_PRECONDITION", "UNSUPPORTED_OPERATION"),
    BAD_TYPE: (400, "INVALID_ARGUMENT", "CONTENT_TYPE_NOT_SUPPORTED"),
    NO_VERSION: (400, "FAILED_PRECONDITION", "VERSION_NOT_SUPPORTED"),
}
"""HTTP status, gRPC status name and reason, by JSON-RPC code."""


class A2aError(Exception):
    """An error of the protocol; a `status` replaces the HTTP status of the code."""

    def __init__(self, code: int, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        known, self._name, reason = _ERRORS[code]
        self.status = status or known
        info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "domain": "a2a-protocol.org"}
        self._details = [{**info, "reason": reason}] if reason else []

    def rpc_body(self) -> Json:
        """Return the JSON-RPC error."""
        data = {"data": self._details} if self._details else {}
        return {"code": self.code, "message": str(self), **data}

    def http_body(self) -> Json:
        """Return the body of an HTTP error."""
        details = {"details": self._details} if self._details else {}
        return {"error": {"code": self.status, "status": self._name, "message": str(self), **details}}


def error_of(error: MidstreamError) -> A2aError | None:
    """Convert an error to A2A; return None for an error that stays an HTTP error, such as a missing permission."""
    match error:
        case NotFoundError():
            return A2aError(NO_TASK, "there is no such task")
        case UsageError() | ProtocolError() | StreamReusedError() | AnswerMismatchError():
            return A2aError(BAD_PARAMS, str(error))
        case ConflictError():
            return A2aError(UNSUPPORTED, str(error))
    return None


class A2aSkill(Struct, frozen=True, omit_defaults=True):
    """A skill of an agent, for its A2A agent card.

    Args:
        id, name, description: Text for clients and their models.
        tags: Keywords, at least one.
        examples: Messages for which the skill is suitable.
    """

    id: str
    name: str
    description: str
    tags: tuple[str, ...]
    examples: tuple[str, ...] = ()


class A2aOptions(Struct, frozen=True):
    """Options of an app for A2A clients.

    Args:
        description: Description of the agent on the card; "" for the agent's name.
        version: Version on the card; "" for that of the agent, or of midstream.
        url: Public address of the app, such as `https://agents.example`; "" for the address of each request.
        skills: Skills on the card; if empty, the agent is the only skill.
        input_types: Media types of files that messages may contain, in addition to text and data.
        artifacts: Tools whose results become artifacts of the task. A JSON object with `url` or `raw` (base64) is a
            file, with `mediaType` and `filename`. Other JSON objects and lists are data; any other result is text.
        is_direct: Called with the JSON of a message; if it returns true, the answer is a message instead of a task. It
            must be fast, and deterministic.
        has_unique_ids: Whether each message has a unique id, as the protocol requires. False is for clients that give
            several messages one id: a message without a context is then always new, even if a client retries it. Only a
            repetition with a context is recognized.
    """

    description: str = ""
    version: str = ""
    url: str = ""
    skills: tuple[A2aSkill, ...] = ()
    input_types: tuple[str, ...] = (*_IMAGES, "application/pdf")
    artifacts: tuple[str, ...] = ()
    is_direct: Callable[[Json], bool] | None = None
    has_unique_ids: bool = True


class RpcRequest(Struct):
    """A JSON-RPC 2.0 request."""

    jsonrpc: Literal["2.0"]
    method: str
    id: str | int | None = None
    params: Json = {}


class A2aPart(Struct):
    """A part of a message, with one of `text`, `raw` (base64), `url` and `data`."""

    text: str | UnsetType = UNSET
    raw: str | UnsetType = UNSET
    url: str | UnsetType = UNSET
    data: Any = UNSET
    mediaType: str = ""  # noqa: N815 - its name in the protocol
    filename: str = ""


class A2aMessage(Struct):
    """A message of a client; other fields are ignored."""

    messageId: str  # noqa: N815 - its name in the protocol
    role: Literal["ROLE_USER"]
    parts: list[A2aPart]
    contextId: str = ""  # noqa: N815 - likewise
    taskId: str = ""  # noqa: N815 - likewise


class SendConfiguration(Struct):
    """The requested form of an answer."""

    historyLength: _Length | None = None  # noqa: N815 - its name in the protocol
    returnImmediately: bool = False  # noqa: N815 - likewise


class SendMessageParams(Struct):
    """The parameters of a message. The message keeps unknown fields, for `A2aOptions.is_direct`."""

    message: Json
    configuration: SendConfiguration | None = None


class SendMessageBody(Struct):
    """A message to the agent."""

    message: A2aMessage
    configuration: SendConfiguration | None = None


class TaskQuery(Struct):
    """A request for one task, with the newest `historyLength` messages of its history; all if it is missing."""

    id: str = ""
    historyLength: _Length | None = None  # noqa: N815 - its name in the protocol


class TasksQuery(Struct):
    """Filters and paging of a list of tasks."""

    contextId: str = ""  # noqa: N815 - its name in the protocol
    status: str = ""
    pageSize: _Size | None = None  # noqa: N815 - likewise
    pageToken: str = ""  # noqa: N815 - likewise
    historyLength: _Length | None = None  # noqa: N815 - likewise
    statusTimestampAfter: str = ""  # noqa: N815 - likewise
    includeArtifacts: bool = False  # noqa: N815 - likewise


def read_params(params: Json, kind: type[_Kind], *, strict: bool = False) -> _Kind:
    """Read the parameters of a method. Accepts snake-case names and, unless `strict`, strings for numbers, for query
    strings.

    Raises:
        A2aError: The parameters are invalid.
    """
    named = {_SNAKE.sub(lambda found: found[1].upper(), name): value for name, value in params.items()}
    try:
        return msgspec.convert(named, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise A2aError(BAD_PARAMS, f"the parameters are invalid: {error}") from error


def read_body(body: bytes, kind: type[_Kind]) -> _Kind:
    """Read the body of a request.

    Raises:
        A2aError: The body is no JSON, or invalid.
    """
    try:
        require_shallow_text(body)
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise A2aError(INVALID, f"this request is invalid: {error}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError, MidstreamError) as error:
        raise A2aError(PARSE, f"this request is not valid JSON: {error}") from error


class Sent(Struct, frozen=True):
    """A parsed message of a client.

    Args:
        id, context, task: Ids that the client gave; "" for none.
        message: Message for the agent.
        answer: Value, if the message answers a question.
        digest: Digest of the message, for recognizing a repetition.
        stream: Name of the stream that carries the message.
        is_direct: Whether the answer is a message instead of a task.
        configuration: Requested form of the answer.
    """

    id: str
    context: str
    task: str
    message: UserMessage
    answer: object
    digest: str
    stream: str
    is_direct: bool
    configuration: SendConfiguration


def read_message(params: Json, options: A2aOptions) -> Sent:
    """Read the parameters of a message.

    Raises:
        A2aError: The parameters are invalid, or the media type of a part is not supported.
    """
    request = read_params(params, SendMessageParams, strict=True)
    sent = read_params(request.message, A2aMessage, strict=True)
    if not sent.messageId or not sent.parts:
        raise A2aError(BAD_PARAMS, "a message needs a `messageId` and at least one part")
    parts = tuple(_user_part(each, options) for each in sent.parts)
    data = next((each.data for each in sent.parts if each.data is not UNSET), None)
    words = "".join(part.text for part in parts if isinstance(part, Text))
    digest = digest_of(sent.messageId, sent.taskId, request.message["parts"])
    known_id = sent.messageId if _MESSAGE_ID.fullmatch(sent.messageId) else digest_of(sent.messageId)
    return Sent(
        id=sent.messageId,
        context=sent.contextId,
        task=sent.taskId,
        message=UserMessage(parts),
        answer=words if data is None else data,
        digest=digest,
        stream=f"{STREAM_PREFIX}{known_id} {digest[:ID_DIGITS]}",
        is_direct=options.is_direct is not None and not sent.taskId and options.is_direct(request.message),
        configuration=request.configuration or SendConfiguration(),
    )


def _user_part(part: A2aPart, options: A2aOptions) -> UserPart:
    given = [each for each in (part.text, part.raw, part.url, part.data) if each is not UNSET]
    if len(given) != 1:
        raise A2aError(BAD_PARAMS, "a part needs exactly one of `text`, `raw`, `url` and `data`")
    kind = part.mediaType.partition(";")[0].strip().lower()
    if isinstance(part.text, str):
        if kind and not kind.startswith("text/"):
            raise _bad_type(kind)
        return Text(storable(part.text))
    if part.data is not UNSET:
        if kind not in ("", DATA_TYPE):
            raise _bad_type(kind)
        return Text(storable(_json(part.data).decode()))
    if kind not in options.input_types:
        raise _bad_type(kind)
    name = part.filename or None
    if isinstance(part.url, str):
        return File(kind, url=part.url, name=name)
    try:
        b64decode(str(part.raw), validate=True)
    except (binascii.Error, ValueError) as error:
        raise A2aError(BAD_PARAMS, "`raw` is not valid base64") from error
    return File(kind, data=str(part.raw), name=name)


def _bad_type(kind: str) -> A2aError:
    return A2aError(BAD_TYPE, f"parts of the media type {kind[:80]!r} are not accepted; see the agent's card")


# --- ids and values -------------------------------------------------------------------------------------------


def task_id(context: str, turn: int) -> str:
    """Return the id of a task."""
    return f"{context}{TASK_MARK}{turn}"


def place_of_task(name: str) -> tuple[str, int]:
    """Return the context and the turn from the id of a task.

    Raises:
        A2aError: The id is not a valid task id.
    """
    context, _, turn = name.rpartition(TASK_MARK)
    if not context or not _TURN.fullmatch(turn):
        raise A2aError(NO_TASK, "there is no such task")
    return context, int(turn)


def instant(at: float) -> str:
    """Format seconds since 1970 as a timestamp of the protocol."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_instant(text: str) -> float:
    """Parse a timestamp to seconds since 1970; 0 for "".

    Raises:
        A2aError: The timestamp is invalid.
    """
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except (ValueError, OverflowError) as error:
        raise A2aError(BAD_PARAMS, "a timestamp has the form `2026-10-27T10:00:00Z`") from error


def parts_of(message: UserMessage) -> list[Json]:
    """Return the A2A parts of an accepted message."""
    return [{"text": part.text} if isinstance(part, Text) else _file_part(part) for part in message.parts]


def _file_part(part: File) -> Json:
    place = {"url": part.url} if part.url is not None else {"raw": part.data or ""}
    named = {"filename": part.name} if part.name else {}
    return {**place, "mediaType": part.media_type, **named}


def question_parts(fold: RunFold) -> list[Json]:
    """Return the open questions of a task, as text for a person and as data for a program."""
    interrupts = interrupts_in(fold)
    words = [{"text": each["message"]} for each in interrupts]
    return [*words, {"data": {"questions": interrupts}, "mediaType": DATA_TYPE}]


def artifact_part(content: str) -> Json:
    """Convert the result of a tool to the part of an artifact."""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {"text": content}
    if isinstance(value, dict):
        for place in ("url", "raw"):
            if isinstance(value.get(place), str):
                named = {
                    name: value[name]
                    for name in ("mediaType", "filename")
                    if isinstance(value.get(name), str)
                }
                return {place: value[place], **named}
    return {"data": value, "mediaType": DATA_TYPE} if isinstance(value, dict | list) else {"text": content}


def with_history(task: Json, length: int | None) -> Json:
    """Return a task with only the newest `length` messages of its history."""
    if length is None:
        return task
    kept = task["history"][-length:] if length else []
    without = {name: value for name, value in task.items() if name != "history"}
    return {**without, "history": kept} if kept else without


# --- the card -------------------------------------------------------------------------------------------------


def agent_card(options: A2aOptions, name: str, version: str, url: str, *, is_authenticated: bool) -> Json:
    """Return the card of an agent.

    Args:
        options: Options of the operator.
        name, version: Name and version of the agent.
        url: Address of the app.
        is_authenticated: Whether clients need a credential.
    """
    description = options.description or name
    skills: Sequence[A2aSkill] = options.skills or (A2aSkill(name, name, description, ("chat",)),)
    place = (options.url or url).rstrip("/") + PATH
    card: Json = {
        "name": name,
        "description": description,
        "version": options.version or version or __version__,
        "supportedInterfaces": [
            {"url": place, "protocolBinding": binding, "protocolVersion": VERSION}
            for binding in ("JSONRPC", "HTTP+JSON")
        ],
        "capabilities": {"streaming": True, "pushNotifications": False, "extendedAgentCard": False},
        "defaultInputModes": [TEXT_TYPE, DATA_TYPE, *options.input_types],
        "defaultOutputModes": [TEXT_TYPE, DATA_TYPE],
        "skills": [msgspec.to_builtins(each) for each in skills],
    }
    if is_authenticated:
        card["securitySchemes"] = {"bearer": {"httpAuthSecurityScheme": {"scheme": "bearer"}}}
        card["securityRequirements"] = [{"schemes": {"bearer": {"list": []}}}]
    return card
