"""Serves the agent to other agents by A2A over HTTP, in both bindings (JSON-RPC, and HTTP with JSON).

A context is a session. A message begins a turn of it, which is a task, or answers a question of the task. All answers
are derived from the session's journal, so that any server can resume a task. The id of a message identifies a
repetition, which returns the same task.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.dialects import a2a_messages as a2a
from midstream.dialects.a2a_messages import A2aError, A2aOptions, Json, Sent, TaskQuery, TasksQuery
from midstream.dialects.a2a_stream import STATES, A2aFold, AnswerForm, TaskEvents, TaskReading
from midstream.dialects.ag_ui_messages import decision_of
from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.langgraph_requests import answers_of
from midstream.dialects.opaque_tokens import pack, unpack
from midstream.engine.conversation import kept_records
from midstream.engine.host import Host
from midstream.engine.journal import require_session_id
from midstream.engine.runner import Runner
from midstream.errors import AnswerMismatchError, MidstreamError, SessionNotFoundError, WrongSecretError
from midstream.protocol.frames import secret_digest_of
from midstream.server.api.event_body import PieceBody, RecordBody
from midstream.server.api.http_endpoints import NO_STORE, json_response
from midstream.server.api.opened_sessions import opened_session
from midstream.server.api.request_bodies import body_of
from midstream.server.api.run_folds import RunFolds
from midstream.server.api.turn_requests import find_or_begin, stop_turn, submit
from midstream.server.auth.caller import Caller, KnownCaller, caller_of
from midstream.server.auth.middleware import path_of
from midstream.server.auth.principals import Action
from midstream.server.auth.session_unlocking import secrets_in, unlock_at_once
from midstream.server.transports.connection import Connections
from midstream.session.child_names import PART_MARK
from midstream.session.records import MessageAccepted, TranscriptAccepted
from midstream.session.session import Received, Session
from midstream.session.turn.commands import SendMessage
from midstream.store.contract import is_session

CARD_S = 300
"""Seconds for which a client may cache the card."""
LISTED_MAX = 100
"""Maximum number of contexts in a list without `contextId`: those that changed last."""
PAGE_TASKS = 50
"""Default number of tasks on a page."""
_PUSH = re.compile(rf"{a2a.PATH}/tasks/[^/]+/pushNotificationConfigs(/[^/]+)?")
Encode = Callable[[Json], bytes]
_T = TypeVar("_T")


class A2aEvent(Struct, frozen=True):
    """One server-sent event; `data` is a `StreamResponse`."""

    data: str


class A2aRefusal(Struct, frozen=True):
    """The body of an error of A2A."""

    error: Json


class _Place(Struct, frozen=True):
    """A task before its records, and the position of the last record before it."""

    runner: Runner
    events: TaskEvents
    position: int


class _Call(Struct, frozen=True):
    """One request in one binding.

    Args:
        encode: Function that encodes a result for the body, or for an event.
    """

    request: Request
    send: Send
    encode: Encode

    @property
    def caller(self) -> Caller:
        """The client."""
        return caller_of(self.request.scope)

    async def answer(self, result: Json) -> None:
        """Send a result."""
        response = Response(self.encode(result), headers=NO_STORE, media_type="application/json")
        await response(self.request.scope, self.request.receive, self.send)

    def event(self, result: Json) -> bytes:
        """Encode a result as an event."""
        return b"data: %b\n\n" % self.encode(result)


class A2aTasks:
    """Serves turns of sessions as tasks, by the methods of the protocol."""

    def __init__(self, host: Host, connections: Connections, options: A2aOptions) -> None:
        self.host = host
        self.connections = connections
        self.options = options
        self._folds = RunFolds(host, A2aFold)
        self._methods: dict[str, Callable[[_Call, Json], Awaitable[None]]] = {
            "SendMessage": self._send,
            "SendStreamingMessage": partial(self._send, streams=True),
            "GetTask": self._get,
            "ListTasks": self._list,
            "CancelTask": self._cancel,
            "SubscribeToTask": self._subscribe,
        }

    async def call(self, call: _Call, method: str, params: Json) -> None:
        """Call a method.

        Raises:
            A2aError: The protocol refuses the call.
            MidstreamError: The call fails with an HTTP error, such as for a missing permission.
        """
        version = call.request.headers.get("a2a-version") or call.request.query_params.get("A2A-Version", "")
        if version.split(".")[:2] != a2a.VERSION.split("."):
            shown = version[:20] or "0.3"
            raise A2aError(
                a2a.NO_VERSION, f"version {shown} is not served; send `A2A-Version: {a2a.VERSION}`"
            )
        if "PushNotificationConfig" in method:
            raise A2aError(a2a.NO_PUSH, "this agent sends no push notifications")
        if method == "GetExtendedAgentCard":
            raise A2aError(a2a.UNSUPPORTED, "this agent has no extended card")
        known = self._methods.get(method)
        if known is None:
            raise A2aError(a2a.NO_METHOD, f"there is no method {method[:80]!r}")
        try:
            await known(call, params)
        except MidstreamError as error:
            found = a2a.error_of(error)
            if found is None:
                raise
            raise found from error

    # --- messages ---------------------------------------------------------------------------------------------

    async def _send(self, call: _Call, params: Json, *, streams: bool = False) -> None:
        sent = a2a.read_message(params, self.options)
        length = sent.configuration.historyLength
        form: AnswerForm = "events" if streams else "task"
        if sent.is_direct:
            form = "message"

        def encode(result: Json) -> bytes:
            task = result.get("task")
            return call.encode({"task": a2a.with_history(task, length)} if task else result)

        async with self._begun(call, sent) as (place, since):
            if form == "task" and sent.configuration.returnImmediately:
                now = (await self._read(place)).task()
                await call.answer({"task": a2a.with_history(now, length)})
                return
            task = TaskReading(place.events, call.event if streams else encode, form=form, since=since)
            await self._send_events(call, place, task, RecordBody if streams else PieceBody)

    async def _send_events(
        self, call: _Call, place: _Place, events: TaskReading, kind: type[RecordBody] = RecordBody
    ) -> None:
        session = place.runner.session_id
        body = kind(self.host, self.connections, session, call.caller, events, place.position)
        await body.send_to(call.request.receive, call.send)

    @asynccontextmanager
    async def _begun(self, call: _Call, sent: Sent) -> AsyncIterator[tuple[_Place, int]]:
        """Accept a message; yield its task, and the position of the message in it, 0 if it began the task."""
        context, turn = sent.context, 0
        if sent.task:
            context, turn = a2a.place_of_task(sent.task)
            if sent.context not in ("", context):
                raise A2aError(a2a.BAD_PARAMS, "`contextId` is not the context of the task")
        elif not context and not self.options.has_unique_ids:
            context = self.host.world.new_id("a2a")
        elif not context:
            caller = call.caller
            whose = caller.counted_name if isinstance(caller, KnownCaller) else ""
            context = a2a.STREAM_PREFIX + a2a.digest_of(whose, sent.digest)
        async with opened_session(self.host, call.request, context, Action.SEND, begins=not sent.task) as (
            runner,
            secret,
        ):
            place = (runner, context, turn)
            begun = await self._take(call.caller, place, sent, secret or secret_digest_of(sent.digest))
            since = runner.newest.position if sent.task else 0
            yield await self._before(runner, context, begun), since

    async def _take(self, caller: Caller, place: tuple[Runner, str, int], sent: Sent, secret: str) -> int:
        """Submit a message to the session once; return the turn of its task."""
        runner, _, turn = place

        async def find() -> int | None:
            known = runner.state.streams.get(sent.stream)
            return None if known is None else known.turn or turn

        async def begin() -> None:
            received = Received(sent.stream, secret, 0, sent.digest, None)
            if turn:
                await self._answer(caller, place, sent, received)
                return
            command = self._message(runner, sent)
            caller.count_command(command)
            await submit(runner, replace(received, command=command))

        return await find_or_begin(find, begin)

    def _message(self, runner: Runner, sent: Sent) -> SendMessage:
        state = runner.state
        if state.is_live:
            raise A2aError(
                a2a.UNSUPPORTED,
                f"the task of turn {state.turns} of this context is open: wait for its end, or cancel it",
            )
        return SendMessage(sent.message, turns=state.turns)

    async def _answer(
        self, caller: Caller, place: tuple[Runner, str, int], sent: Sent, received: Received
    ) -> None:
        """Answer the first open question of a task by a message, or the question that the message names.

        A question of a sub-agent is recorded in this session before the sub-agent gets the answer, so that a repetition
        of the message does not answer another question.
        """
        runner, context, turn = place
        state, mark = runner.state, f"{sent.stream} "
        noted = next((name.removeprefix(mark) for name in state.streams if name.startswith(mark)), "")
        fold = await self._folds.now(runner, context)
        if not noted:
            _require_open(fold, state, turn)
        value, name = sent.answer, noted or interrupt_id_of(fold.questions[0])
        if isinstance(value, dict) and "questionId" in value:
            value, name = value.get("answer", value), str(value["questionId"])
        try:
            answers = answers_of(fold.questions, {name: decision_of(value)}, fold.answers if noted else ())
        except AnswerMismatchError as error:
            words = 'the answer is "yes" or "no", or data of the `responseSchema` of the question'
            raise A2aError(a2a.BAD_PARAMS, words) from error
        for question, given in answers:
            answer = await caller.attribute(given)
            if not question.session:
                await submit(runner, replace(received, command=answer))
                return
            await submit(runner, replace(received, stream=mark + name))
            await self._folds.answer(runner, context, question, answer)
        await submit(runner, received)

    # --- tasks ------------------------------------------------------------------------------------------------

    async def _get(self, call: _Call, params: Json) -> None:
        query = a2a.read_params(params, TaskQuery)
        async with self._task(call, query.id, Action.READ) as place:
            events = await self._read(place)
            await call.answer(a2a.with_history(events.task(), query.historyLength))

    async def _cancel(self, call: _Call, params: Json) -> None:
        query = a2a.read_params(params, TaskQuery)
        async with self._task(call, query.id, Action.SEND) as place:
            runner, turn = place.runner, place.events.turn
            if not runner.state.is_live or runner.state.turns != turn:
                raise A2aError(a2a.NOT_CANCELABLE, "the task has ended already")
            await stop_turn(runner)
            await call.answer((await self._read(place)).task())

    async def _subscribe(self, call: _Call, params: Json) -> None:
        query = a2a.read_params(params, TaskQuery)
        async with self._task(call, query.id, Action.READ) as place:
            runner, since = place.runner, place.runner.newest.position
            if (await self._read(place)).is_over:
                raise A2aError(a2a.UNSUPPORTED, "the task has ended: `GetTask` returns it")
            again = await self._before(runner, place.events.fold.thread, place.events.turn)
            task = TaskReading(again.events, call.event, follows=True, since=since)
            await self._send_events(call, again, task)

    @asynccontextmanager
    async def _task(self, call: _Call, name: str, action: Action) -> AsyncIterator[_Place]:
        context, turn = a2a.place_of_task(name)
        async with opened_session(self.host, call.request, context, action) as (runner, _):
            yield await self._before(runner, context, turn)

    async def _before(self, runner: Runner, context: str, turn: int) -> _Place:
        run = (await self._folds.now(runner, context)).of_turn(turn)
        if run is None:
            raise A2aError(a2a.NO_TASK, "there is no such task, or it is no longer kept")
        found = await self._folds.before(runner, context, run_id=run.id)
        events = TaskEvents(found.fold, turn, self.options.artifacts)
        if found.fold.session.turns > turn:
            raise A2aError(a2a.NO_TASK, "this task is no longer kept")
        return _Place(runner, events, found.position)

    async def _read(self, place: _Place) -> TaskEvents:
        events = place.events
        events.begin()
        async for stored, record in kept_records(place.runner, place.position):
            events.take(record, epoch=stored.epoch)
            if events.is_over:
                break
        return events

    # --- lists ------------------------------------------------------------------------------------------------

    async def _list(self, call: _Call, params: Json) -> None:
        query = a2a.read_params(params, TasksQuery)
        size = PAGE_TASKS if query.pageSize is None else query.pageSize
        if query.status not in ("", *STATES):
            raise A2aError(a2a.BAD_PARAMS, "`status` is not a task state")
        since, before = (
            a2a.read_instant(query.statusTimestampAfter),
            unpack(query.pageToken, tuple[float, str]),
        )
        if query.pageToken and before is None:
            raise A2aError(a2a.BAD_PARAMS, "`pageToken` is not from an earlier list")
        found = [
            (each.changed_at, each.task())
            for events in [
                await self._tasks_of(call, name) for name in await self._contexts(call, query.contextId)
            ]
            for each in events
            if each.state and query.status in ("", each.state) and each.changed_at >= since
        ]
        found.sort(key=lambda each: (each[0], each[1]["id"]), reverse=True)
        left = [each for each in found if before is None or (each[0], each[1]["id"]) < before]
        page, is_last = left[:size], len(left) <= size
        tasks = [a2a.with_history(task, query.historyLength) for _, task in page]
        if not query.includeArtifacts:
            tasks = [{name: value for name, value in task.items() if name != "artifacts"} for task in tasks]
        token = "" if is_last else pack((page[-1][0], page[-1][1]["id"]))
        await call.answer(
            {"tasks": tasks, "nextPageToken": token, "pageSize": len(tasks), "totalSize": len(found)}
        )

    async def _contexts(self, call: _Call, context: str) -> list[str]:
        caller = call.caller
        if context:
            require_session_id(context)
            caller.set_session(caller.stored_name(context))
            return [context]
        caller.set_session("")
        names: list[str] = []
        async for info in self.host.store.list(of=await caller.visible_sessions()):
            if (
                is_session(info.session)
                and PART_MARK not in info.session
                and await caller.may_list(info.session)
            ):
                names.append(caller.public_name(info.session))
            if len(names) == LISTED_MAX:
                break
        return names

    async def _tasks_of(self, call: _Call, context: str) -> list[TaskEvents]:
        """Return the tasks of a context whose records are kept; empty if the caller may not read it."""
        name, found = call.caller.stored_name(context), list[TaskEvents]()
        with suppress(WrongSecretError, SessionNotFoundError):
            if not await call.caller.may_list(name):
                return []
            with await unlock_at_once(self.host, name, secrets_in(call.request), Action.READ):
                runner = await self.host.session(name)
                event_id, session = await runner.events.beginning()
                fold = A2aFold(context, session)
                if session.turns:
                    found.append(TaskEvents(fold, session.turns, self.options.artifacts))
                    found[-1].begin()
                async for stored, record in kept_records(runner, event_id.position):
                    if isinstance(record, MessageAccepted | TranscriptAccepted):
                        if record.turn > fold.session.turns:
                            found.append(TaskEvents(fold, record.turn, self.options.artifacts))
                    if found:
                        found[-1].take(record, epoch=stored.epoch)
                    else:
                        fold.take(record, epoch=stored.epoch)
        return found


def _require_open(fold: A2aFold, state: Session, turn: int) -> None:
    """Raise an error unless the task of a turn waits for an answer."""
    if not turn <= state.turns:
        raise A2aError(a2a.NO_TASK, "there is no such task")
    if turn < state.turns or not state.is_live:
        raise A2aError(a2a.UNSUPPORTED, "the task has ended: send a message with its `contextId` alone")
    if not fold.questions:
        raise A2aError(
            a2a.UNSUPPORTED, "the task accepts no message while it works: wait for its end, or cancel it"
        )


# --- the two bindings -----------------------------------------------------------------------------------------


class A2aEndpoint:
    """The methods of A2A in both bindings, and the card of the agent.

    Args:
        tasks: Implementation of the methods.
        is_authenticated: Whether clients need a credential.
    """

    def __init__(self, tasks: A2aTasks, *, is_authenticated: bool) -> None:
        self._tasks = tasks
        self._is_authenticated = is_authenticated

    async def a2a(self, request: Request, send: Send) -> None:
        """Call an A2A 1.0 method by JSON-RPC; the answer is JSON, or streams the events of a task."""
        rpc_id = None
        try:
            rpc_request = await _body_of(request, a2a.RpcRequest)
            rpc_id = rpc_request.id

            def encode(result: Json) -> bytes:
                return msgspec.json.encode({"jsonrpc": "2.0", "id": rpc_id, "result": result})

            await self._tasks.call(_Call(request, send, encode), rpc_request.method, rpc_request.params)
        except A2aError as error:
            body = {"jsonrpc": "2.0", "id": rpc_id, "error": error.rpc_body()}
            status = 400 if error.code in (a2a.PARSE, a2a.INVALID) else 200
            await json_response(body, status=status)(request.scope, request.receive, send)

    async def a2a_send(self, request: Request, send: Send) -> None:
        """Send a message to the agent (A2A); the answer is the task after it has ended, or waits for its client."""
        await self.call("SendMessage", request, send)

    async def a2a_stream(self, request: Request, send: Send) -> None:
        """Send a message to the agent (A2A); the answer streams the task."""
        await self.call("SendStreamingMessage", request, send)

    async def a2a_get(self, request: Request, send: Send) -> None:
        """Return a task (A2A)."""
        await self.call("GetTask", request, send)

    async def a2a_list(self, request: Request, send: Send) -> None:
        """List tasks, newest change first (A2A); without `contextId`, of the hundred contexts that changed last."""
        await self.call("ListTasks", request, send)

    async def a2a_cancel(self, request: Request, send: Send) -> None:
        """Cancel a task (A2A)."""
        await self.call("CancelTask", request, send)

    async def a2a_subscribe(self, request: Request, send: Send) -> None:
        """Follow a running task (A2A): its current state, then its events."""
        await self.call("SubscribeToTask", request, send)

    async def call(self, method: str, request: Request, send: Send) -> None:
        """Call a method by the HTTP binding.

        Raises:
            MidstreamError: The call fails with an ordinary HTTP error.
        """
        try:
            call = _Call(request, send, msgspec.json.encode)
            await self._tasks.call(call, method, await _params_of(request))
        except A2aError as error:
            response = json_response(error.http_body(), status=error.status)
            await response(request.scope, request.receive, send)

    async def agent_card(self, request: Request) -> Response:
        """Return the agent card, by which A2A clients discover the agent."""
        agent, url = self._tasks.host.agent, str(request.base_url)
        is_known = self._is_authenticated
        card = a2a.agent_card(self._tasks.options, agent.name, agent.version, url, is_authenticated=is_known)
        body = msgspec.json.encode(card)
        headers = {
            "cache-control": f"public, max-age={CARD_S}",
            "etag": f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"',
            "x-content-type-options": "nosniff",
        }
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="application/json")


async def _body_of(request: Request, kind: type[_T]) -> _T:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in ("", "application/json", "application/a2a+json"):
        raise A2aError(a2a.BAD_TYPE, "the body of a request must be JSON", status=415)
    return a2a.read_body(await body_of(request), kind)


async def _params_of(request: Request) -> Json:
    params: Json = await _body_of(request, Json) if request.method == "POST" else {}
    params |= {name: value for name, value in request.query_params.items() if name != "A2A-Version"}
    return params | ({"id": request.path_params["task"]} if "task" in request.path_params else {})


class A2aRest:
    """Serves undocumented paths: unsupported methods, and an alternative spelling of the A2A path.

    Args:
        endpoint: Implementation of the methods.
        default: App for all other requests.
    """

    def __init__(self, endpoint: A2aEndpoint, default: ASGIApp) -> None:
        self._endpoint = endpoint
        self._default = default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that has no route."""
        path = path_of(scope) if scope["type"] == "http" else ""
        if path == f"{a2a.PATH}/" and scope["method"] == "POST":
            await self._endpoint.a2a(Request(scope, receive), send)
        elif _PUSH.fullmatch(path):
            await self._endpoint.call("ListTaskPushNotificationConfigs", Request(scope, receive), send)
        elif path == f"{a2a.PATH}/extendedAgentCard":
            await self._endpoint.call("GetExtendedAgentCard", Request(scope, receive), send)
        else:
            await self._default(scope, receive, send)
