"""Serves the agent as a tool to clients of the Model Context Protocol (MCP), over Streamable HTTP.

A tool call is a turn of a session. Its messages and its task are derived from the session's journal, so that any server
can resume a call. Only MCP sessions are stored outside the journals.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, cast

import msgspec
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send
from typing_extensions import override

from midstream.dialects import mcp_messages as mcp
from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.langgraph_runs import BEGINNING
from midstream.dialects.mcp_messages import (
    CallPlace,
    CallStream,
    Json,
    McpClient,
    McpError,
    McpOptions,
    McpTool,
    RpcMessage,
)
from midstream.dialects.mcp_stream import (
    CallEvents,
    McpCall,
    McpFold,
    event,
    event_id,
    read_event_id,
    read_question_id,
    stream_name,
)
from midstream.dialects.opaque_tokens import unpack
from midstream.engine.conversation import PAGE_RECORDS
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import (
    AnswerMismatchError,
    FrameTooLargeError,
    JournalMovedError,
    MidstreamError,
    NotFoundError,
    QuestionClosedError,
    SessionBusyError,
    SessionNotFoundError,
    StreamReusedError,
    UnavailableError,
    UsageError,
)
from midstream.history.messages import UserMessage
from midstream.protocol.frames import secret_digest_of
from midstream.server.api.event_body import RecordBody
from midstream.server.api.http_endpoints import NO_STORE, json_response
from midstream.server.api.mcp_sessions import McpSessions
from midstream.server.api.opened_sessions import opened_session
from midstream.server.api.request_bodies import body_of
from midstream.server.api.run_folds import RunFolds
from midstream.server.api.turn_requests import STOPPING_S, submit
from midstream.server.auth.caller import Caller, caller_of
from midstream.server.auth.principals import Action
from midstream.server.transports.connection import Connections
from midstream.session.journal_reading import JournalReader
from midstream.session.session import Received
from midstream.session.turn.commands import Cancel, SendMessage

SESSION_HEADER = "mcp-session-id"
BACK_S = 10.0
"""Seconds after which the call of a disconnected client is cancelled, in the modern version."""


class McpEvent(msgspec.Struct, frozen=True):
    """One server-sent event; `data` is a JSON-RPC message, `id` contains its place in the session's journal."""

    data: str
    id: str = ""


class McpPlace(msgspec.Struct, frozen=True, rename={"last_event_id": "last-event-id"}):
    """The header of a request that resumes a stream: the id of the last event that the client has."""

    last_event_id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]+\.[0-9-]+$")]


class _CallBody(RecordBody):
    """Sends the messages of a call to one client."""

    def __init__(self, calls: McpCalls, name: str, caller: Caller, events: CallEvents, position: int) -> None:
        super().__init__(calls.host, calls.connections, name, caller, events, position)
        self._options = calls.options
        self._stream = events.stream
        self._first_id = event_id(events.stream, events.after)

    @override
    async def pump(self, send: Send) -> None:
        can_resume = McpClient(self._stream.version).can_resume
        if can_resume:
            await self.write(send, [event(self._first_id, b"", self._options.retry_s)])
        may_close = can_resume and self._stream.version != mcp.MODERN
        with suppress(TimeoutError):  # the client continues with another request
            async with asyncio.timeout(self._options.stream_s if may_close else None):
                await super().pump(send)


class McpCalls:
    """Serves MCP calls as turns of sessions."""

    def __init__(self, host: Host, connections: Connections, options: McpOptions) -> None:
        self.host = host
        self.connections = connections
        self.options = options
        self.sessions = McpSessions(host)
        self._folds = RunFolds(host, McpFold)

    async def before(self, runner: Runner, place: CallPlace) -> tuple[McpCall, int]:
        """Return a call before its records, and the position of the last record before them.

        Raises:
            McpError: There is no such call, or it is no longer kept.
        """
        run = (await self._folds.now(runner, place.session)).of_turn(place.turn)
        if run is None:
            raise McpError(mcp.BAD_PARAMS, "there is no such call, or it is no longer kept")
        found = await self._folds.before(runner, place.session, run_id=run.id)
        return McpCall(found.fold, place), found.position

    async def now(self, runner: Runner, place: CallPlace, *, wait_s: float = 0.0) -> McpCall:
        """Return the current call; `wait_s` first waits up to so many seconds for it to end, or to ask.

        Raises:
            McpError: There is no such call, or it is no longer kept.
        """
        state, after = await self.before(runner, place)
        reader = JournalReader()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s or None):
                while not state.is_over:
                    page = await runner.read(after=after, limit=PAGE_RECORDS)
                    for stored in page:
                        state.take(reader.read(stored.body), epoch=stored.epoch)
                        after = stored.position
                    if not page and (not wait_s or state.questions):
                        break
                    if not page:
                        await runner.wait(after)
        return state

    async def answer(self, runner: Runner, caller: Caller, session: str, responses: object) -> None:
        """Answer questions by their ids; ignores questions that are closed."""
        sent = responses if isinstance(responses, dict) else {}
        for question in (await self._folds.now(runner, session)).questions:
            name = interrupt_id_of(question)
            if name in sent:
                answer = await caller.attribute(mcp.answer_to(question, sent[name]))
                with suppress(QuestionClosedError, AnswerMismatchError):  # another answer came first
                    await self._folds.answer(runner, session, question, answer)

    async def send_stream(
        self,
        request: Request,
        send: Send,
        runner: Runner,
        stream: CallStream,
        after: tuple[int, int] = BEGINNING,
        *,
        is_kept: bool = True,
    ) -> None:
        """Send the messages of a call after a place.

        Args:
            is_kept: Whether the call continues if its client disconnects, since it may reconnect.
        """
        state, position = await self.before(runner, stream.place)
        events, caller = CallEvents(state, stream, after), caller_of(request.scope)
        body = _CallBody(self, runner.session_id, caller, events, position)
        world, session, began_at = self.host.world, runner.session_id, self.host.world.now()
        is_whole = await body.send_to(request.receive, send)
        if not is_whole and not is_kept:

            def leave() -> None:
                world.spawn(self._leave(stream.place, session, began_at), name=f"leave {session}")

            world.later(BACK_S, leave)

    async def _leave(self, place: CallPlace, session: str, began_at: float) -> None:
        """Cancel a call whose client has not reconnected to any server."""
        with suppress(MidstreamError):
            if await self.sessions.returned_at(place) < began_at:
                await cancel(await self.host.session(session), place.turn)


class McpEndpoint:
    """Accepts messages of clients, and resumes streams."""

    def __init__(self, calls: McpCalls) -> None:
        self._calls = calls
        self._sessions = calls.sessions
        self._host = calls.host

    async def mcp(self, request: Request, send: Send) -> None:
        """Accept a message of a client."""
        rpc_id: object = None
        version = request.headers.get("mcp-protocol-version", "")
        is_modern = version not in ("", *mcp.HANDSHAKES)
        try:
            message = mcp.read_message(await body_of(request))
            rpc_id = None if message.id is UNSET else message.id
            is_modern = is_modern or mcp.VERSION in message.meta
            answer = await self._answer(request, message, send, is_modern=is_modern)
        except McpError as error:
            status = mcp.STATUSES.get(error.code, 200) if is_modern or rpc_id is None else 200
            answer = json_response({"jsonrpc": "2.0", "id": rpc_id, "error": error.body()}, status=status)
        if answer is not None:
            await answer(request.scope, request.receive, send)

    async def mcp_read(self, request: Request, send: Send) -> None:
        """Resume a stream."""
        text = request.headers.get("last-event-id")
        if text is None:  # messages of the server exist only in calls
            raise HTTPException(405, headers={"Allow": "DELETE, POST"})
        found = read_event_id(text)
        if found is None:
            raise NotFoundError("`Last-Event-ID` is not the id of an event of a call")
        stream, after = found
        if stream.version != mcp.MODERN:
            await self._client_of(request)
        async with opened_session(self._host, request, stream.place.session, Action.READ) as (runner, _):
            if stream.version == mcp.MODERN:
                await self._sessions.note_return(stream.place)
            try:
                await self._calls.send_stream(request, send, runner, stream, after)
            except McpError as error:
                raise NotFoundError(str(error)) from error

    async def end_mcp_session(self, request: Request) -> None:
        """End an MCP session. Its calls continue; its id becomes unknown."""
        name = request.headers.get(SESSION_HEADER, "")
        if not await self._sessions.end(caller_of(request.scope), name):
            raise NotFoundError("there is no such MCP session")

    async def _client_of(self, request: Request) -> McpClient:
        """Return the client of a request with an MCP session.

        Raises:
            UsageError: The request names no MCP session.
            NotFoundError: The session does not exist; the client must initialize another one.
        """
        name = request.headers.get(SESSION_HEADER)
        if not name:
            raise UsageError("this request needs the header `Mcp-Session-Id`, which `initialize` returns")
        client = await self._sessions.find(caller_of(request.scope), name)
        if client is None:
            raise NotFoundError("there is no such MCP session: initialize another one")
        return client

    async def _answer(
        self, request: Request, message: RpcMessage, send: Send, *, is_modern: bool
    ) -> Response | None:
        """Answer a message; return None if the answer was sent as a stream."""
        caller, method = caller_of(request.scope), message.method
        if is_modern and message.id is UNSET:
            return Response(status_code=202, headers=NO_STORE)  # this version has no notifications of clients
        if is_modern:
            client = mcp.modern_client(message, request.headers)
        elif method == "initialize":
            client = await self._sessions.begin(caller, message.params)
            found = mcp.server_of(client, self._host.agent.name)
            answer = self._result(message, found)
            answer.headers[SESSION_HEADER] = client.session
            return answer
        else:
            client = await self._client_of(request)
        if message.id is UNSET or not method:
            await self._take(request, message, client)
            return Response(status_code=202, headers=NO_STORE)
        if method == "tools/call":
            return await self._call(request, message, client, send)
        if method.startswith("tasks/"):
            return await self._task(request, message, client, send)
        if method == "tools/list":
            return self._result(message, mcp.tools_of(client, self._calls.options, self._host.agent.name))
        if method == "ping" and not is_modern:
            return self._result(message, {})
        if method == "server/discover" and is_modern:
            return self._result(message, mcp.server_of(client, self._host.agent.name))
        raise _no_method(method)

    def _result(self, message: RpcMessage, result: Json) -> Response:
        return json_response({"jsonrpc": "2.0", "id": message.id, "result": result})

    # --- notifications, and answers of people -----------------------------------------------------------------

    async def _take(self, request: Request, message: RpcMessage, client: McpClient) -> None:
        """Process a notification or a response; ignores one without effect."""
        if message.method == "notifications/cancelled":
            rpc_id = message.params.get("requestId")
            name = stream_name(mcp.digest_of("rpc", client.session, rpc_id))
            session, name = await self._sessions.find_call(client, rpc_id) or (name, name)
            with suppress(SessionNotFoundError, UsageError):
                async with opened_session(self._host, request, session, Action.SEND) as (runner, _):
                    known = runner.state.streams.get(name)
                    if known is not None and known.turn:
                        await cancel(runner, known.turn)
        found = None if message.method else read_question_id(message.id)
        if found is not None:
            place, interrupt = found
            result = {"action": "cancel"} if message.result is UNSET else message.result
            with suppress(SessionNotFoundError, UsageError):
                async with opened_session(self._host, request, place.session, Action.READ) as (runner, _):
                    await self._calls.answer(
                        runner, caller_of(request.scope), place.session, {interrupt: result}
                    )

    # --- calls ------------------------------------------------------------------------------------------------

    async def _call(
        self, request: Request, message: RpcMessage, client: McpClient, send: Send
    ) -> Response | None:
        tool = self._calls.options.find(message.params.get("name"))
        wants_task = "task" in message.params and client.version == mcp.NEWEST_HANDSHAKE
        _require_way(tool, client, wants_task=wants_task)
        chosen = message.meta.get(mcp.CALL_ID)
        is_kept = not client.is_modern or isinstance(chosen, str)
        try:
            async with self._begun(request, message, client, tool) as (runner, stream):
                if wants_task:
                    state = await self._calls.now(runner, stream.place)
                    task = {**state.task(client), "status": "working"}
                    return self._result(message, {"task": task})
                if client.has_tasks and tool.task != "forbidden":
                    task_or_none = await self._as_task(runner, client, tool, stream)
                    if task_or_none is not None:
                        return self._result(message, task_or_none)
                is_anothers = stream.since > 0 and "requestState" not in message.params
                is_kept = is_kept or is_anothers
                await self._calls.send_stream(request, send, runner, stream, is_kept=is_kept)
                return None
        except (SessionBusyError, SessionNotFoundError, UsageError, FrameTooLargeError) as error:
            content = [{"type": "text", "text": str(error)}]
            return self._result(message, mcp.complete(client, {"content": content, "isError": True}))
        except StreamReusedError as error:
            raise McpError(mcp.INVALID, "this id was used for another call") from error

    async def _as_task(
        self, runner: Runner, client: McpClient, tool: McpTool, stream: CallStream
    ) -> Json | None:
        """Return a task if the call takes longer than `task_after_s`; None for an immediate answer."""
        must = tool.task == "required"
        wait_s = 0.0 if must else self._calls.options.task_after_s
        state = await self._calls.now(runner, stream.place, wait_s=wait_s)
        is_at_once = state.is_over or (bool(state.questions) and client.can_elicit)
        if is_at_once and not must:
            return None
        return {**state.task(client), "resultType": "task"}

    @asynccontextmanager
    async def _begun(
        self, request: Request, message: RpcMessage, client: McpClient, tool: McpTool
    ) -> AsyncIterator[tuple[Runner, CallStream]]:
        """Begin a call, or find the call that this message repeats or continues."""
        calls, caller = self._calls, caller_of(request.scope)
        token = message.progress_token
        rpc_id = cast("mcp.RpcId", message.id)

        def stream(place: CallPlace, since: int = 0) -> CallStream:
            return CallStream(place, rpc_id, client.version, token, client.can_elicit, since=since)

        if client.is_modern and "requestState" in message.params:
            pause = unpack(message.params["requestState"], mcp.PauseState)
            responses = message.params.get("inputResponses")
            if pause is None or pause != pause.with_check():
                raise McpError(mcp.BAD_PARAMS, "`requestState` was changed")
            async with self._at(request, pause.place, Action.READ) as runner:
                await calls.answer(runner, caller, pause.place.session, responses)
                yield runner, stream(pause.place, runner.newest.position)
            return
        text, session = mcp.read_arguments(tool, message.params.get("arguments"))
        if not text.strip():
            async with opened_session(self._host, request, session, Action.READ) as (runner, _):
                if not runner.state.turns:
                    raise UsageError(f"session {session!r} has no message yet")
                yield runner, stream(CallPlace(session, runner.state.turns), runner.newest.position)
            return
        name = stream_name(self._id_of(message, client))
        if client.session and (session or mcp.CALL_ID in message.meta):
            await self._sessions.note_call(client, rpc_id, session or name, name)
        session = session or name
        async with opened_session(self._host, request, session, Action.SEND, begins=True) as (
            runner,
            secret,
        ):
            turn = await self._submit_message(runner, caller, name, message.digest, text, secret)
            yield runner, stream(CallPlace(session, turn))

    def _id_of(self, message: RpcMessage, client: McpClient) -> str:
        """Return the identity of a call: the id that its client chose, or the request id in its MCP session."""
        chosen = message.meta.get(mcp.CALL_ID)
        if isinstance(chosen, str):
            return mcp.digest_of("id", chosen)
        if client.session:
            return mcp.digest_of("rpc", client.session, message.id)
        return self._host.world.new_id("call")

    async def _submit_message(
        self, runner: Runner, caller: Caller, name: str, digest: str, text: str, secret: str | None
    ) -> int:
        """Send the message of a call once; return the number of its turn."""
        known = runner.state.streams.get(name)
        if known is None or not known.turn:
            if runner.state.is_live:
                raise SessionBusyError(
                    "this session is still answering its last message: wait with an empty `message`"
                )
            command = SendMessage(UserMessage.of(text), turns=runner.state.turns)
            caller.count_command(command)
            secret = secret or secret_digest_of(digest)
            try:
                await submit(runner, Received(name, secret, 0, digest, command))
            except JournalMovedError as error:
                raise SessionBusyError("another message came first") from error
        elif (*known.digests, *known.newest)[:1] != (digest,):
            raise StreamReusedError("this id was used for another call")
        turn = runner.state.streams[name].turn
        if not turn:
            raise UnavailableError("the call has not begun yet: retry", retry_after_s=1.0)
        return turn

    # --- tasks ------------------------------------------------------------------------------------------------

    async def _task(
        self, request: Request, message: RpcMessage, client: McpClient, send: Send
    ) -> Response | None:
        method, params, calls = message.method, message.params, self._calls
        known = ("get", "cancel", "update") if client.is_modern else ("get", "cancel", "result")
        has_tasks = client.is_modern or client.version == mcp.NEWEST_HANDSHAKE
        if not has_tasks or method.removeprefix("tasks/") not in known:
            raise _no_method(method)
        if client.is_modern and not client.has_tasks:
            raise _no_tasks()
        place = unpack(params.get("taskId"), CallPlace)
        if place is None:
            raise McpError(mcp.BAD_PARAMS, "there is no such task")
        action = Action.SEND if method == "tasks/cancel" else Action.READ
        async with self._at(request, place, action) as runner:
            state = await calls.now(runner, place)
            if method == "tasks/get":
                task = state.detailed_task(client) if client.is_modern else state.task(client)
                return self._result(message, task)
            if method == "tasks/result":
                rpc_id = cast("mcp.RpcId", message.id)
                since = runner.newest.position
                stream = CallStream(
                    place, rpc_id, client.version, None, client.can_elicit, task=True, since=since
                )
                await calls.send_stream(request, send, runner, stream)
                return None
            if method == "tasks/update":
                responses = params.get("inputResponses")
                await calls.answer(runner, caller_of(request.scope), place.session, responses)
            elif not state.is_over:
                await cancel(runner, place.turn)
                state = await calls.now(runner, place, wait_s=STOPPING_S)
            elif not client.is_modern:
                raise McpError(mcp.BAD_PARAMS, f"the task is {state.status()} already")
            return self._result(message, mcp.complete(client, {} if client.is_modern else state.task(client)))

    @asynccontextmanager
    async def _at(self, request: Request, place: CallPlace, action: Action) -> AsyncIterator[Runner]:
        try:
            async with opened_session(self._host, request, place.session, action) as (runner, _):
                yield runner
        except (SessionNotFoundError, UsageError) as error:
            raise McpError(mcp.BAD_PARAMS, "there is no such task") from error


async def cancel(runner: Runner, turn: int) -> None:
    """Stop a turn if it is open."""
    if runner.state.is_live and runner.state.turns == turn:
        await runner.submit(Cancel(turn))


def _require_way(tool: McpTool, client: McpClient, *, wants_task: bool) -> None:
    """Raise an error unless the tool supports the call with or without a task."""
    if client.version == mcp.NEWEST_HANDSHAKE:
        if tool.task == ("forbidden" if wants_task else "required"):
            raise McpError(mcp.NO_METHOD, f"`{tool.name}` is {tool.task} as a task")
    elif client.is_modern and tool.task == "required" and not client.has_tasks:
        raise _no_tasks()


def _no_tasks() -> McpError:
    data: Json = {"requiredCapabilities": {"extensions": {mcp.TASKS: {}}}}
    return McpError(mcp.NO_CAPABILITY, f"this needs the client capability {mcp.TASKS!r}", data)


def _no_method(method: str) -> McpError:
    return McpError(mcp.NO_METHOD, f"there is no method {method[:80]!r}")
