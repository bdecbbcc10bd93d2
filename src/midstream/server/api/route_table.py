"""Table of the HTTP operations, for the router and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from http import HTTPStatus
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from midstream.dialects.a2a_messages import RpcRequest, SendMessageBody, TaskQuery, TasksQuery
from midstream.dialects.ag_ui_messages import RunAgentInput
from midstream.dialects.mcp_messages import RpcMessage
from midstream.dialects.stream_subscriptions import ClaimAnswer, ReportAnswer, SubscriptionAnswer, WakeReport
from midstream.dialects.ui_messages import ChatBody
from midstream.protocol import frames
from midstream.server.api import openapi
from midstream.server.api.a2a_endpoint import A2aEndpoint, A2aEvent, A2aRefusal
from midstream.server.api.ag_ui_endpoint import AgUiEndpoint, AgUiEvent
from midstream.server.api.chat_endpoint import ChatEndpoint, ChatEvent
from midstream.server.api.durable_stream_endpoint import (
    STREAM_PATH,
    PlainStreamQuery,
    PlainStreamReader,
    PlainStreamWriter,
)
from midstream.server.api.http_endpoints import (
    NO_STORE,
    EventsEndpoint,
    HttpEndpoints,
    JournalLine,
    StreamEvent,
    json_response,
)
from midstream.server.api.langgraph_endpoint import LangGraphAssistants, LangGraphThreads
from midstream.server.api.langgraph_protocol_endpoint import LangGraphProtocol, ProtocolEvent
from midstream.server.api.langgraph_runs_endpoint import GraphEvent, LangGraphRuns
from midstream.server.api.mcp_endpoint import McpEndpoint, McpEvent, McpPlace
from midstream.server.api.metrics import Metrics
from midstream.server.api.nodes_endpoint import NodesEndpoint
from midstream.server.api.openapi import Operation
from midstream.server.api.probe_endpoint import ProbeChunk, ProbeEndpoints
from midstream.server.api.request_bodies import decode_body, decode_query
from midstream.server.api.session_streams import SessionEvent, SessionStreamQuery, SessionStreamReader
from midstream.server.api.stream_names import CONTROL, SESSIONS
from midstream.server.api.subscription_endpoint import (
    JsonWebKeySet,
    SubscriptionOwnerEndpoint,
    WakeEndpoint,
)
from midstream.server.auth.access_routes import AccessRoutes, CallerDescription
from midstream.server.auth.viewer_token_routes import ViewerRoutes
from midstream.server.transports.http_commands import CommandsEndpoint
from midstream.server.transports.long_poll import PollAnswer, PollEndpoint, PollQuery
from midstream.server.transports.stream_headers import FollowerHeaders, FollowQuery, FrameSender
from midstream.session.session import COMMANDS_MAX

TEXT, BYTES = "text/plain", "application/octet-stream"
LINES, EVENTS = "application/x-ndjson", "text/event-stream"
_Key = Annotated[frames.Word, Meta(min_length=1)]


class FirstCommand(Struct, tag="command"):
    """The first command of a stream."""

    seqno: Annotated[int, Meta(ge=0, le=0)]
    payload: frames.Payload


class NextCommand(Struct, tag="command"):
    """A later command. A message, or the request to resume a turn, is always the first command."""

    seqno: Annotated[int, Meta(ge=1, le=COMMANDS_MAX)]
    payload: frames.ResultPayload | frames.CancelPayload | frames.AnswerPayload | frames.WithdrawPayload


class ReaderOpen(frames.Open, frozen=True, kw_only=True, tag="open"):
    """The `open` of a reader, which has no stream."""

    stream: Annotated[str, Meta(max_length=0)] = ""


class StreamOpen(frames.Open, frozen=True, kw_only=True, tag="open"):
    """The `open` of a stream."""

    stream: _Key
    secret: _Key


class OpenApiEndpoint:
    """Endpoint of the OpenAPI document."""

    async def show(self, _: Request) -> openapi.Json:
        """Return the OpenAPI document of this server."""
        return document()


_URL = "/v1/sessions/{session_id}"
_READER = f"{_URL}/readers/{{reader}}"
_OPENS = (ReaderOpen, StreamOpen)
_FOLLOWER = (FollowerHeaders,)
# The columns of the endpoints that are ASGI apps.
_COMMAND: openapi.Json = {
    "errors": (409, 422),
    "answer": frames.Ack | frames.HeartbeatFrame | None,
    "headers": (FrameSender,),
    "bodies": (FirstCommand, NextCommand, frames.Ping, frames.Close),
}
_EVENTS: openapi.Json = {"errors": (409,), "answer": StreamEvent, "media": EVENTS}
_CHAT = "/v1/chat"
_RUN: openapi.Json = {"errors": (404, 409, 422), "answer": ChatEvent, "media": EVENTS}
_RUN_OR_NONE: openapi.Json = {"errors": (404,), "answer": ChatEvent | None, "media": EVENTS}
_AG_UI = "/v1/ag-ui"
_AG_UI_EVENTS: openapi.Json = {"errors": (404, 409, 422), "answer": AgUiEvent, "media": EVENTS}
_MCP = "/v1/mcp"
_MCP_EVENTS: openapi.Json = {"errors": (404, 405), "answer": McpEvent, "media": EVENTS}
_A2A = "/v1/a2a"
_TASK = f"{_A2A}/tasks/{{task}}"
_A2A_JSON: openapi.Json = {"errors": (404,), "answer": openapi.Json, "refusal": A2aRefusal}
_A2A_EVENTS: openapi.Json = {**_A2A_JSON, "answer": A2aEvent, "media": EVENTS}
_STREAM = f"{STREAM_PATH}{{stream}}"
_CONTROL = f"{STREAM_PATH}{CONTROL}"
_SUBSCRIPTION = f"{_CONTROL}/subscriptions/{{subscription}}"
_MADE: openapi.Json = {"answer": SubscriptionAnswer}
_REPORT: openapi.Json = {
    "errors": (404, 409),
    "answer": ReportAnswer,
    "bodies": (WakeReport,),
    "is_open": True,
}
_GRAPH = "/v1/langgraph"
"""Base path for LangGraph clients."""
_THREAD = f"{_GRAPH}/threads/{{thread}}"
_GRAPH_RUN = f"{_THREAD}/runs/{{run_id}}"
_BEGIN: openapi.Json = {"errors": (404, 409, 422)}
_THREAD_EVENTS: openapi.Json = {
    "errors": (404,),
    "answer": ProtocolEvent,
    "media": EVENTS,
}
_POLL: openapi.Json = {"errors": (409,), "answer": PollAnswer}
OPERATIONS = (
    Operation("health", "GET", "/health", HttpEndpoints.health, is_open=True),
    Operation("ready", "GET", "/ready", HttpEndpoints.ready, is_open=True),
    Operation("openapi", "GET", "/v1/openapi.json", OpenApiEndpoint.show),
    Operation("questions", "GET", "/v1/questions", HttpEndpoints.questions),
    Operation("sessions", "GET", "/v1/sessions", HttpEndpoints.sessions),
    Operation("show", "GET", _URL, HttpEndpoints.show),
    Operation("delete", "DELETE", _URL, HttpEndpoints.delete, errors=(409,)),
    Operation("records", "GET", f"{_URL}/records", HttpEndpoints.records, 200, (410,), JournalLine, LINES),
    Operation("blob", "GET", f"{_URL}/blobs/{{digest}}", HttpEndpoints.blob, answer=str, media=TEXT),
    Operation("cancel", "POST", f"{_URL}/cancel", HttpEndpoints.cancel, 202, (409,)),
    Operation("answer", "POST", f"{_URL}/answer", HttpEndpoints.answer, 202, (409,)),
    Operation("resume", "POST", f"{_URL}/resume", HttpEndpoints.resume, 202, (409,)),
    Operation("withdraw", "POST", f"{_URL}/withdraw", HttpEndpoints.withdraw, 202, (409,)),
    Operation("commands", "POST", f"{_URL}/commands", CommandsEndpoint, **_COMMAND),
    Operation(
        "events",
        "GET",
        f"{_URL}/events",
        EventsEndpoint,
        **_EVENTS,
        query=(FollowQuery,),
        headers=_FOLLOWER,
    ),
    Operation("open_events", "POST", f"{_URL}/events", EventsEndpoint, **_EVENTS, bodies=_OPENS),
    Operation(
        "poll",
        "GET",
        f"{_URL}/poll",
        PollEndpoint,
        **_POLL,
        query=(PollQuery, FollowQuery),
        headers=_FOLLOWER,
    ),
    Operation("open_poll", "POST", f"{_URL}/poll", PollEndpoint, **_POLL, query=(PollQuery,), bodies=_OPENS),
    Operation("chat", "POST", _CHAT, ChatEndpoint.chat, **_RUN, bodies=(ChatBody,)),
    Operation("chat_stream", "GET", f"{_CHAT}/{{run}}/stream", ChatEndpoint.chat_stream, **_RUN_OR_NONE),
    Operation(
        "chat_messages", "GET", f"{_CHAT}/{{chat}}/messages", ChatEndpoint.chat_messages, errors=(404,)
    ),
    Operation("ag_ui_run", "POST", _AG_UI, AgUiEndpoint.ag_ui_run, **_AG_UI_EVENTS, bodies=(RunAgentInput,)),
    Operation(
        "ag_ui_connect",
        "POST",
        f"{_AG_UI}/connect",
        AgUiEndpoint.ag_ui_connect,
        **_AG_UI_EVENTS,
        bodies=(RunAgentInput,),
    ),
    Operation(
        "ag_ui_read",
        "GET",
        f"{_AG_UI}/threads/{{thread}}/runs/{{run_id}}",
        AgUiEndpoint.ag_ui_read,
        **_AG_UI_EVENTS,
    ),
    Operation(
        "mcp", "POST", _MCP, McpEndpoint.mcp, errors=(404,), answer=RpcMessage | None, bodies=(RpcMessage,)
    ),
    Operation("mcp_read", "GET", _MCP, McpEndpoint.mcp_read, **_MCP_EVENTS, headers=(McpPlace,)),
    Operation("end_mcp_session", "DELETE", _MCP, McpEndpoint.end_mcp_session, errors=(404,)),
    Operation(
        "agent_card",
        "GET",
        "/.well-known/agent-card.json",
        A2aEndpoint.agent_card,
        answer=openapi.Json,
        is_open=True,
    ),
    Operation("a2a", "POST", _A2A, A2aEndpoint.a2a, **_A2A_JSON, bodies=(RpcRequest,)),
    Operation(
        "a2a_send",
        "POST",
        f"{_A2A}/message:send",
        A2aEndpoint.a2a_send,
        **_A2A_JSON,
        bodies=(SendMessageBody,),
    ),
    Operation(
        "a2a_stream",
        "POST",
        f"{_A2A}/message:stream",
        A2aEndpoint.a2a_stream,
        **_A2A_EVENTS,
        bodies=(SendMessageBody,),
    ),
    Operation("a2a_list", "GET", f"{_A2A}/tasks", A2aEndpoint.a2a_list, **_A2A_JSON, query=(TasksQuery,)),
    Operation("a2a_subscribe", "POST", f"{_TASK}:subscribe", A2aEndpoint.a2a_subscribe, **_A2A_EVENTS),
    Operation("a2a_follow", "GET", f"{_TASK}:subscribe", A2aEndpoint.a2a_subscribe, **_A2A_EVENTS),
    Operation("a2a_cancel", "POST", f"{_TASK}:cancel", A2aEndpoint.a2a_cancel, **_A2A_JSON),
    Operation("a2a_get", "GET", _TASK, A2aEndpoint.a2a_get, **_A2A_JSON, query=(TaskQuery,)),
    Operation(
        "webhook_keys",
        "GET",
        f"{_CONTROL}/jwks.json",
        WakeEndpoint.webhook_keys,
        answer=JsonWebKeySet,
        media="application/jwk-set+json",
        is_open=True,
    ),
    Operation(
        "create_subscription",
        "PUT",
        _SUBSCRIPTION,
        SubscriptionOwnerEndpoint.create_subscription,
        201,
        (404, 409),
        **_MADE,
        is_ok_too=True,
    ),
    Operation(
        "show_subscription",
        "GET",
        _SUBSCRIPTION,
        SubscriptionOwnerEndpoint.show_subscription,
        errors=(404,),
        **_MADE,
    ),
    Operation(
        "delete_subscription",
        "DELETE",
        _SUBSCRIPTION,
        SubscriptionOwnerEndpoint.delete_subscription,
        errors=(404,),
    ),
    Operation(
        "link_streams",
        "POST",
        f"{_SUBSCRIPTION}/streams",
        SubscriptionOwnerEndpoint.link_streams,
        errors=(404,),
    ),
    Operation(
        "unlink_stream",
        "DELETE",
        f"{_SUBSCRIPTION}/streams/{{stream}}",
        SubscriptionOwnerEndpoint.unlink_stream,
        errors=(404,),
    ),
    Operation(
        "claim_wake",
        "POST",
        f"{_SUBSCRIPTION}/claim",
        SubscriptionOwnerEndpoint.claim_wake,
        errors=(404, 409),
        answer=ClaimAnswer,
    ),
    Operation(
        "report_callback", "POST", f"{_SUBSCRIPTION}/callback", WakeEndpoint.report_callback, **_REPORT
    ),
    Operation("report_ack", "POST", f"{_SUBSCRIPTION}/ack", WakeEndpoint.report_ack, **_REPORT),
    Operation(
        "release_wake",
        "POST",
        f"{_SUBSCRIPTION}/release",
        WakeEndpoint.release_wake,
        errors=(404, 409),
        bodies=(WakeReport,),
        is_open=True,
    ),
    Operation(
        "read_session_stream",
        "GET",
        f"{STREAM_PATH}{SESSIONS}/{{session_id}}",
        SessionStreamReader.read_session_stream,
        errors=(404, 410),
        answer=list[SessionEvent] | None,
        query=(SessionStreamQuery,),
    ),
    Operation(
        "create_plain_stream",
        "PUT",
        _STREAM,
        PlainStreamWriter.create_plain_stream,
        201,
        errors=(404, 409, 413, 415),
        answer=str,
        media=BYTES,
        is_ok_too=True,
    ),
    Operation(
        "append_to_plain_stream",
        "POST",
        _STREAM,
        PlainStreamWriter.append_to_plain_stream,
        errors=(404, 409, 410, 413, 415),
        answer=str | None,
        media=BYTES,
    ),
    Operation(
        "delete_plain_stream", "DELETE", _STREAM, PlainStreamWriter.delete_plain_stream, errors=(404, 410)
    ),
    Operation(
        "read_plain_stream",
        "GET",
        _STREAM,
        PlainStreamReader.read_plain_stream,
        errors=(404, 410),
        answer=str | None,
        media=BYTES,
        query=(PlainStreamQuery,),
    ),
    Operation("graph_info", "GET", f"{_GRAPH}/info", LangGraphAssistants.graph_info),
    Operation(
        "search_assistants", "POST", f"{_GRAPH}/assistants/search", LangGraphAssistants.search_assistants
    ),
    Operation(
        "assistant", "GET", f"{_GRAPH}/assistants/{{assistant}}", LangGraphAssistants.assistant, errors=(404,)
    ),
    Operation(
        "assistant_schemas",
        "GET",
        f"{_GRAPH}/assistants/{{assistant}}/schemas",
        LangGraphAssistants.assistant_schemas,
        errors=(404,),
    ),
    Operation(
        "assistant_graph",
        "GET",
        f"{_GRAPH}/assistants/{{assistant}}/graph",
        LangGraphAssistants.assistant_graph,
        errors=(404,),
    ),
    Operation(
        "create_thread", "POST", f"{_GRAPH}/threads", LangGraphThreads.create_thread, errors=(404, 409)
    ),
    Operation("search_threads", "POST", f"{_GRAPH}/threads/search", LangGraphThreads.search_threads),
    Operation("thread", "GET", _THREAD, LangGraphThreads.thread, errors=(404,)),
    Operation("change_thread", "PATCH", _THREAD, LangGraphThreads.change_thread, errors=(404,)),
    Operation("delete_thread", "DELETE", _THREAD, LangGraphThreads.delete_thread, errors=(404, 409)),
    Operation("thread_state", "GET", f"{_THREAD}/state", LangGraphThreads.thread_state, errors=(404,)),
    Operation("thread_history", "GET", f"{_THREAD}/history", LangGraphThreads.thread_history, errors=(404,)),
    Operation("search_history", "POST", f"{_THREAD}/history", LangGraphThreads.search_history, errors=(404,)),
    Operation("create_run", "POST", f"{_THREAD}/runs", LangGraphRuns.create_run, errors=(404, 409)),
    Operation("runs", "GET", f"{_THREAD}/runs", LangGraphRuns.runs, errors=(404,)),
    Operation(
        "stream_run",
        "POST",
        f"{_THREAD}/runs/stream",
        LangGraphRuns.stream_run,
        **_BEGIN,
        answer=GraphEvent,
        media=EVENTS,
    ),
    Operation(
        "wait_run", "POST", f"{_THREAD}/runs/wait", LangGraphRuns.wait_run, **_BEGIN, answer=openapi.Json
    ),
    Operation("run", "GET", _GRAPH_RUN, LangGraphRuns.run, errors=(404,)),
    Operation(
        "join_run", "GET", f"{_GRAPH_RUN}/join", LangGraphRuns.join_run, errors=(404,), answer=openapi.Json
    ),
    Operation(
        "read_run",
        "GET",
        f"{_GRAPH_RUN}/stream",
        LangGraphRuns.read_run,
        errors=(404,),
        answer=GraphEvent,
        media=EVENTS,
    ),
    Operation(
        "cancel_graph_run",
        "POST",
        f"{_GRAPH_RUN}/cancel",
        LangGraphRuns.cancel_graph_run,
        202,
        errors=(404, 409),
    ),
    Operation(
        "thread_events", "POST", f"{_THREAD}/stream/events", LangGraphProtocol.thread_events, **_THREAD_EVENTS
    ),
    Operation(
        "graph_command", "POST", f"{_THREAD}/commands", LangGraphProtocol.graph_command, errors=(404, 409)
    ),
    Operation("probe_events", "GET", "/v1/probe/events", ProbeEndpoints.events, 200, (), StreamEvent, EVENTS),
    Operation("probe_poll", "GET", "/v1/probe/poll", ProbeEndpoints.poll, answer=ProbeChunk),
    Operation("probe_chunks", "POST", "/v1/probe/chunks", ProbeEndpoints.chunks, 200, (413, 415), str, BYTES),
    Operation("me", "GET", "/v1/me", AccessRoutes.me),
    Operation("challenge", "POST", "/v1/challenge", AccessRoutes.challenge, errors=(404,), is_open=True),
    Operation("login", "POST", "/v1/login", AccessRoutes.login, 200, (409,), CallerDescription, is_open=True),
    Operation("login_link", "POST", "/v1/login-links", AccessRoutes.login_link, 201),
    Operation("logout", "POST", "/v1/logout", AccessRoutes.logout),
    Operation("credentials", "GET", "/v1/access", AccessRoutes.credentials),
    Operation("revoke_all", "DELETE", "/v1/access", AccessRoutes.revoke_all),
    Operation("revoke", "DELETE", "/v1/access/{credential}", AccessRoutes.revoke, errors=(404,)),
    Operation("ticket", "POST", f"{_URL}/tickets", AccessRoutes.ticket, 201),
    Operation("viewer", "POST", f"{_URL}/viewers", ViewerRoutes.issue_view, 201),
    Operation("revoke_viewer_tokens", "DELETE", f"{_URL}/viewers", ViewerRoutes.withdraw),
    Operation("owner", "GET", f"{_URL}/owner", AccessRoutes.owner),
    Operation("add_reader", "PUT", _READER, AccessRoutes.add_reader, errors=(409,)),
    Operation("remove_reader", "DELETE", _READER, AccessRoutes.remove_reader, errors=(409,)),
    Operation("nodes", "GET", "/v1/nodes", NodesEndpoint.nodes),
    Operation("metrics", "GET", "/metrics", Metrics.show, answer=str, media=TEXT),
)


@cache
def document() -> openapi.Json:
    """Return the OpenAPI document, which is the same for all servers of this version."""
    return openapi.document(OPERATIONS)


def routes_of(endpoint: Any) -> list[Route]:  # noqa: ANN401 - any class of endpoints
    """Return the routes of an endpoint, which is an ASGI app or has a method for each operation."""
    routes = []
    for each in OPERATIONS:
        handler = getattr(endpoint, each.handler.__name__, None)
        if each.handler is type(endpoint):
            route = Route(_path_of(each), endpoint, methods=[each.method])
            assert route.methods is not None, "they were given"
            route.methods.discard("HEAD")  # which Starlette adds to GET: streams of frames have no head alone
            routes.append(route)
        elif handler is not None and getattr(handler, "__func__", None) is each.handler:
            signature = each.signature()
            call: Any = partial(_respond, each.status, handler, signature)
            if "send" in signature:
                call = _SendingHandler(handler, signature)
            routes.append(Route(_path_of(each), call, methods=[each.method]))
    return routes


class _StreamName(Convertor[str]):
    """Converter of a plain stream's name in a path. It may contain slashes, and excludes control paths."""

    regex = rf"(?!{CONTROL}(?:/|$)|{SESSIONS}/)[^\n]+"

    @override
    def convert(self, value: str) -> str:
        return value

    @override
    def to_string(self, value: str) -> str:
        return value


register_url_convertor("stream", _StreamName())


def _path_of(operation: Operation) -> str:
    return operation.path.replace("{stream}", "{stream:stream}")


class _SendingHandler:
    """ASGI app for a method that sends its answer itself, such as a stream."""

    def __init__(self, handler: Callable[..., Awaitable[None]], signature: Mapping[str, Any]) -> None:
        self._handler = handler
        self._signature = signature

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await self._handler(request, send=send, **await _arguments_of(request, self._signature))


async def _arguments_of(request: Request, signature: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if "query" in signature:
        arguments["query"] = decode_query(request, signature["query"])
    if "body" in signature:
        arguments["body"] = await decode_body(request, signature["body"])
    return arguments


async def _respond(
    status: int, handler: Callable[..., Awaitable[Any]], signature: Mapping[str, Any], request: Request
) -> Response:
    answer = await handler(request, **await _arguments_of(request, signature))
    if isinstance(answer, Response):
        return answer
    if answer is None:
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=NO_STORE)
    return json_response(answer, status=status)
