"""Messages of the Model Context Protocol (MCP). Versions 2024-11-05 to 2025-11-25 have a handshake and sessions;
version 2026-07-28 has an envelope in each request.

No function has side effects. A server has the tool `ask` for its agent, and the tools that its operator declares.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from midstream.dialects import request_digests
from midstream.dialects.opaque_tokens import pack
from midstream.errors import MalformedFrameError, UsageError
from midstream.json_depth import require_shallow_text
from midstream.number_checks import require_seconds
from midstream.session.calls import Choice, QuestionKind
from midstream.session.questions import Question
from midstream.session.turn.commands import Answer
from midstream.version import __version__

Json = dict[str, Any]
RpcId = str | int

NEWEST_HANDSHAKE = "2025-11-25"
HANDSHAKES = ("2024-11-05", "2025-03-26", "2025-06-18", NEWEST_HANDSHAKE)
"""Versions that begin with `initialize`. A client that requests an unknown version gets the newest one."""
MODERN = "2026-07-28"
"""The version whose requests contain version and capabilities in an envelope."""
TASKS = "io.modelcontextprotocol/tasks"
"""The task extension of the modern version."""
RELATED_TASK = "io.modelcontextprotocol/related-task"
CALL_ID = "midstream/call"
"""Key in the `_meta` of a call for an id that the client chose. An equal id is the same call."""
VERSION, CAPABILITIES = (
    "io.modelcontextprotocol/protocolVersion",
    "io.modelcontextprotocol/clientCapabilities",
)
SERVER_INFO = "io.modelcontextprotocol/serverInfo"

INVALID, NO_METHOD, BAD_PARAMS, INTERNAL = -32600, -32601, -32602, -32603
HEADER_MISMATCH, NO_CAPABILITY, NO_VERSION, CANCELLED = -32020, -32021, -32022, -32800
STATUSES = {
    **dict.fromkeys((INVALID, BAD_PARAMS, HEADER_MISMATCH, NO_CAPABILITY, NO_VERSION), 400),
    NO_METHOD: 404,
}
"""HTTP status of the errors of the modern version. Other versions use 200 if a request has an id."""
_NAMES = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    **dict.fromkeys(("tasks/get", "tasks/update", "tasks/cancel"), "taskId"),
}
"""Methods, and the parameter that the header `Mcp-Name` repeats."""
ID_CHARS_MAX = 200
"""Maximum length of a request id, in characters."""
LIST_MS = 300_000
"""Milliseconds for which a client may cache the list of tools."""
_json = msgspec.json.encode
digest_of = partial(request_digests.digest_of, "mcp")
TaskSupport = Literal["forbidden", "optional", "required"]


class McpTool(Struct, frozen=True):
    """A tool for MCP clients. A call of it sends a message to the agent.

    The agent receives the JSON text `{"tool": name, "arguments": {...}}` as a user message.

    Args:
        name: Name for clients.
        description: Text for the model of the client: when to use the tool.
        input_schema: JSON Schema of the arguments, an object. Only the presence of required arguments is checked.
        task: Whether a call may or must become a task. In the modern version, an `optional` call becomes a task if the
            answer takes longer than `McpOptions.task_after_s`.
    """

    name: str
    description: str = ""
    input_schema: Json = msgspec.field(default_factory=lambda: {"type": "object"})
    task: TaskSupport = "optional"


class McpOptions(Struct, frozen=True):
    """Options of an app for MCP clients.

    Args:
        tools: Tools in addition to `ask`.
        stream_s: Seconds after which the stream of a running call is closed. The client continues with a new request.
            Applies only to clients that can resume (version 2025-11-25).
        retry_s: Seconds that clients wait before they reconnect to a stream that ended.
        task_after_s: Seconds after which a running call becomes a task, if its client supports tasks (2026-07-28).

    Raises:
        UsageError: Two tools have the same name, or a number is not one of seconds.
    """

    tools: tuple[McpTool, ...] = ()
    stream_s: float = 300.0
    retry_s: float = 3.0
    task_after_s: float = 0.5

    def __post_init__(self) -> None:
        for option in ("stream_s", "retry_s", "task_after_s"):
            require_seconds(option, getattr(self, option))
        names = [ASK.name, *(each.name for each in self.tools)]
        if len({*names}) < len(names):
            raise UsageError(f"several tools for MCP have the same name: {', '.join(names)}")

    def find(self, name: object) -> McpTool:
        """Return the tool of this name.

        Raises:
            McpError: There is no such tool.
        """
        for each in (ASK, *self.tools):
            if each.name == name:
                return each
        raise McpError(BAD_PARAMS, f"there is no tool {str(name)[:80]!r}")


ASK = McpTool(
    "ask",
    "Send a message to the agent and get its whole answer. The agent can take minutes and uses tools of its own. Each "
    "answer names its `session`: pass it to go on with that conversation. With an empty `message`, wait for the answer "
    "to the newest message of a session.",
    {
        "type": "object",
        "properties": {
            "message": {"type": "string", "description": "The message"},
            "session": {
                "type": "string",
                "description": "The conversation to go on with; a new one without it",
            },
        },
        "required": ["message"],
    },
)
_OUTPUT: Json = {
    "type": "object",
    "properties": {
        "answer": {"type": "string"},
        "session": {"type": "string", "description": "The conversation, to go on with"},
        "waiting": {
            "type": "array",
            "items": {"type": "string"},
            "description": "What people are to decide first",
        },
    },
    "required": ["answer", "session"],
}


class McpError(Exception):
    """A JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Json | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data

    def body(self) -> Json:
        """Return the `error` object of a message."""
        data = {} if self.data is None else {"data": self.data}
        return {"code": self.code, "message": str(self), **data}


class RpcMessage(Struct):
    """A JSON-RPC message of a client: a request, a notification (without `id`), or a response (without `method`)."""

    jsonrpc: Literal["2.0"]
    id: RpcId | UnsetType = UNSET
    method: str = ""
    params: Json = {}
    result: Json | UnsetType = UNSET
    error: Json | UnsetType = UNSET

    @property
    def meta(self) -> Json:
        """The metadata of a request."""
        meta = self.params.get("_meta")
        return meta if isinstance(meta, dict) else {}

    @property
    def progress_token(self) -> RpcId | None:
        """The progress token of a request; None if it is missing, or too long for an event id."""
        token = self.meta.get("progressToken")
        is_token = isinstance(token, int) or (isinstance(token, str) and len(token) <= ID_CHARS_MAX)
        return token if is_token else None

    @property
    def digest(self) -> str:
        """Digest of the call, without its id, for recognizing a repetition."""
        call = {name: self.params.get(name) for name in ("name", "arguments")}
        return digest_of("call", call)


_message = msgspec.json.Decoder(RpcMessage).decode


class McpClient(Struct, frozen=True):
    """Facts about the client of a request.

    Args:
        version: Protocol version.
        capabilities: Capabilities that the client declared.
        session: Id of the MCP session; "" in the modern version.
    """

    version: str
    capabilities: Json = {}
    session: str = ""

    @property
    def is_modern(self) -> bool:
        """Whether requests have an envelope, and no MCP session."""
        return self.version == MODERN

    @property
    def can_elicit(self) -> bool:
        """Whether the client can show its user a form."""
        elicits = self.capabilities.get("elicitation")
        return isinstance(elicits, dict) and (not elicits or "form" in elicits)

    @property
    def can_resume(self) -> bool:
        """Whether the client can resume a stream, which then begins with an event without data."""
        return self.version in (NEWEST_HANDSHAKE, MODERN)

    @property
    def has_tasks(self) -> bool:
        """Whether a call of the modern version may become a task."""
        extensions = self.capabilities.get("extensions")
        return self.is_modern and isinstance(extensions, dict) and TASKS in extensions


def read_message(body: bytes) -> RpcMessage:
    """Read the body of a request.

    Raises:
        MalformedFrameError: The body is not a single JSON-RPC message, or nested too deep.
    """
    try:
        require_shallow_text(body)
        message = _message(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedFrameError(f"the body is not a single JSON-RPC message: {error}") from error
    is_whole = message.method or message.result is not UNSET or message.error is not UNSET
    if not is_whole or (isinstance(message.id, str) and len(message.id) > ID_CHARS_MAX):
        raise MalformedFrameError(
            f"a message needs a method or a result, and an id of {ID_CHARS_MAX} characters at most"
        )
    return message


def modern_client(message: RpcMessage, headers: Mapping[str, str]) -> McpClient:
    """Return the client of a request of the modern version.

    Raises:
        McpError: The envelope is incomplete, a header differs from the body, or the version is not supported.
    """
    meta = message.meta
    version, capabilities = meta.get(VERSION), meta.get(CAPABILITIES)
    if not isinstance(version, str) or not isinstance(capabilities, dict):
        raise McpError(BAD_PARAMS, f"`params._meta` must contain {VERSION!r} and {CAPABILITIES!r}")
    wanted = {"mcp-protocol-version": version, "mcp-method": message.method}
    name = _NAMES.get(message.method)
    if name is not None and message.params.get(name) is not None:
        wanted["mcp-name"] = message.params[name]
    for header, value in wanted.items():
        if _decoded_header(headers.get(header)) != value:
            raise McpError(HEADER_MISMATCH, f"the header {header} differs from the body")
    if version != MODERN:
        data = {"supported": [MODERN], "requested": version}
        raise McpError(NO_VERSION, "this version of the protocol is not supported", data)
    return McpClient(version, capabilities)


def _decoded_header(value: str | None) -> str | None:
    if value is None or not (value.startswith("=?base64?") and value.endswith("?=")):
        return None if value is None else value.strip()
    try:
        return base64.b64decode(value[9:-2], validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None


# --- the server and its tools -----------------------------------------------------------------------------------


def server_of(client: McpClient, agent: str) -> Json:
    """Return the result of `initialize`, or of `server/discover`."""
    info = {"name": "midstream", "title": agent, "version": __version__}
    if client.is_modern:
        return {
            "supportedVersions": [MODERN],
            "capabilities": {"tools": {}, "extensions": {TASKS: {}}},
            **complete(client, {"ttlMs": LIST_MS, "cacheScope": "private", "_meta": {SERVER_INFO: info}}),
        }
    capabilities: Json = {"tools": {}}
    if client.version == NEWEST_HANDSHAKE:
        capabilities["tasks"] = {"cancel": {}, "requests": {"tools": {"call": {}}}}
    return {"protocolVersion": client.version, "capabilities": capabilities, "serverInfo": info}


def tools_of(client: McpClient, options: McpOptions, agent: str) -> Json:
    """Return the result of `tools/list`."""
    tools = []
    for each in (ASK, *options.tools):
        title = {"title": f"Ask {agent}"} if each is ASK else {}
        shown = {
            "name": each.name,
            **title,
            "description": each.description,
            "inputSchema": each.input_schema,
        }
        if client.version == NEWEST_HANDSHAKE:
            shown["execution"] = {"taskSupport": each.task}
        tools.append({**shown, "outputSchema": _OUTPUT})
    return complete(client, {"tools": tools}, {"ttlMs": LIST_MS, "cacheScope": "private"})


def complete(client: McpClient, result: Json, only_modern: Json | None = None) -> Json:
    """Return a result with the fields that the client's version requires in every result."""
    return {**result, "resultType": "complete", **(only_modern or {})} if client.is_modern else result


def read_arguments(tool: McpTool, arguments: object) -> tuple[str, str]:
    """Return the message and the session id of a call; an id of "" for a new session.

    Raises:
        UsageError: The arguments do not fit the tool.
    """
    given = {} if arguments is None else arguments
    if not isinstance(given, dict):
        raise UsageError(f"the arguments of `{tool.name}` must be an object")
    if missing := [name for name in tool.input_schema.get("required", ()) if name not in given]:
        raise UsageError(f"`{tool.name}` requires {', '.join(missing)}")
    if tool is not ASK:
        return _json({"tool": tool.name, "arguments": given}).decode(), ""
    message, session = given["message"], given.get("session") or ""
    if not isinstance(message, str) or not isinstance(session, str):
        raise UsageError("`message` and `session` must be strings")
    if not message.strip() and not session:
        raise UsageError("`message` is empty; an empty message waits for an answer, and needs a `session`")
    return message, session


# --- places: ids of tasks, events and questions -----------------------------------------------------------------------


class CallPlace(Struct, frozen=True, array_like=True):
    """Identifies a call: the client's id of a session, and a turn of it. Encoded, it is the id of a task."""

    session: str
    turn: int


class CallStream(Struct, frozen=True, array_like=True):
    """A stream of messages about a call, for one request. Event ids begin with its encoding, so that any server can
    resume it.

    Args:
        place: Identity of the call.
        id: Id of the request, which the response repeats.
        version: Protocol version.
        token: Progress token; None for none.
        can_elicit: Whether the client is sent questions.
        task: Whether the request waits for the result of a task.
        since: Journal position at the time of the request, if the call was already running; earlier messages are not
            sent again.
    """

    place: CallPlace
    id: RpcId
    version: str
    token: RpcId | None
    can_elicit: bool
    task: bool = False
    since: int = 0


class PauseState(Struct, frozen=True, array_like=True):
    """The `requestState` of a call that waits for answers. The checksum detects errors; it does not replace the check
    of the sender's permissions.
    """

    place: CallPlace
    position: int
    check: str = ""

    def with_check(self) -> PauseState:
        """Return a copy with its checksum."""
        return PauseState(self.place, self.position, digest_of("pause", self.place, self.position))


# --- questions --------------------------------------------------------------------------------------------------------


def elicitation(question: Question) -> Json:
    """Return the form by which a client shows a question."""
    text = question.text
    if question.kind is QuestionKind.QUESTION:
        properties: Json = {"answer": {"type": "string", "title": "Answer"}}
    elif question.kind is QuestionKind.APPROVAL:
        text = "\n".join([f"May `{question.name}` run?", question.arguments, *([text] if text else [])])
        properties = {
            "confirm": {"type": "boolean", "title": f"Let {question.name} run", "default": False},
        }
    else:
        text = f"It is unknown whether `{question.name}` was done: {question.arguments}"
        choices = [each.value for each in question.choices]
        properties = {
            "outcome": {"type": "string", "title": "What is to be assumed", "enum": choices},
        }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    params = {"mode": "form", "message": text or question.name, "requestedSchema": schema}
    return {"method": "elicitation/create", "params": params}


def answer_to(question: Question, result: object) -> Answer:
    """Convert a returned form to an answer. A dismissed form denies an approval, and does not repeat a call."""
    given = result if isinstance(result, dict) else {}
    content = given.get("content") if given.get("action") == "accept" else None
    content = content if isinstance(content, dict) else {}
    if question.kind is QuestionKind.QUESTION:
        text = content.get("answer")
        text = (
            text
            if isinstance(text, str)
            else _json(content).decode()
            if content
            else "(the user gave no answer)"
        )
        return Answer(question.ref, question.digest, Choice.RESPOND, text)
    if question.kind is QuestionKind.APPROVAL:
        is_allowed = content.get("confirm") is True
        return Answer(question.ref, question.digest, Choice.ALLOW if is_allowed else Choice.DENY)
    outcome = content.get("outcome")
    choices = {each.value: each for each in question.choices}
    return Answer(question.ref, question.digest, choices.get(str(outcome), Choice.SKIP))


# --- tasks ------------------------------------------------------------------------------------------------------------


def task_of(client: McpClient, place: CallPlace, status: str, times: tuple[float, float]) -> Json:
    """Return a task in the form of the client's version. It is kept as long as the records of its turn."""
    unit = "Ms" if client.is_modern else ""
    created, updated = (datetime.fromtimestamp(at, UTC).isoformat() for at in times)
    shown = {"taskId": pack(place), "status": status, "createdAt": created, "lastUpdatedAt": updated}
    return {**shown, f"ttl{unit}": None, f"pollInterval{unit}": 1000}
