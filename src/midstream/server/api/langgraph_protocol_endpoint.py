"""Serves the thread protocol of LangGraph clients over HTTP: commands by POST, and events of a thread as one stream."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import Send
from typing_extensions import override

from midstream.dialects.langgraph_protocol import PHASES, ProtocolEvents, Subscription
from midstream.dialects.langgraph_requests import CommandBody, EventsBody, RunBody, RunCommand
from midstream.engine.journal import require_session_id
from midstream.errors import AnswerMismatchError, QuestionClosedError
from midstream.server.api.event_body import EventBody
from midstream.server.api.langgraph_runs_endpoint import RunStarter
from midstream.server.api.langgraph_threads import GraphThreads, OpenThread

Json = dict[str, Any]

UNBEGUN_S = 0.25
"""Seconds between two checks for the first message of a thread that a client reads."""


class ProtocolEvent(Struct, frozen=True):
    """One server-sent event of a thread; `data` is an event of the thread protocol with its `seq`."""

    id: str
    event: str
    data: str


class ThreadStream(EventBody):
    """Sends the events of a thread to one client, from its first message until the client disconnects."""

    def __init__(self, threads: GraphThreads, opened: OpenThread, wanted: Subscription) -> None:
        super().__init__(threads.host, threads.connections, opened.session, opened.caller)
        self._folds = threads.folds
        self._thread = opened.id
        self._wanted = wanted

    @override
    async def pump(self, send: Send) -> None:
        while await self._host.store.find(self._session) is None:
            await self._host.world.sleep(UNBEGUN_S)
        runner = await self._host.session(self._session)
        found = await self._folds.after(runner, self._thread, since=self._wanted.since)
        newest = await self._folds.newest_seq(runner, self._thread)
        wanted = self._wanted if self._wanted.since <= newest else replace(self._wanted, since=found.seq)
        events = ProtocolEvents(found.fold, found.seq, wanted, self._host.agent.name)
        await self.follow(send, events, found.position)


class LangGraphProtocol:
    """Handles the events and commands of the thread protocol."""

    def __init__(self, threads: GraphThreads) -> None:
        self._threads = threads
        self._starter = RunStarter(threads)
        self._graph = threads.host.agent.name

    async def thread_events(self, request: Request, body: EventsBody, send: Send) -> None:
        """Follow a thread."""
        async with self._threads.opened(request) as opened:
            await ThreadStream(self._threads, opened, body.subscription()).send_to(request.receive, send)

    async def graph_command(self, request: Request, body: CommandBody) -> Json:
        """Send a command to a thread: `run.start`, `input.respond` or `agent.getTree` (thread protocol v3)."""
        require_session_id(request.path_params["thread"])
        match body.method:
            case "run.start":
                return await self._start(request, body)
            case "input.respond":
                return await self._respond(request, body)
            case "agent.getTree":
                async with self._threads.opened(request) as opened:
                    return await self._tree(opened, body)
            case _:
                return _error(body, "unknown_command", f"Unknown protocol command: {body.method[:80]}")

    async def _start(self, request: Request, body: CommandBody) -> Json:
        params = {**body.params, "if_not_exists": "create"}
        try:
            wanted = msgspec.convert({**params, **_in_snake_case(params)}, RunBody)
        except msgspec.ValidationError as error:
            return _error(body, "invalid_argument", str(error))
        async with self._starter.start(request, wanted) as run:
            return _success(body, {"run_id": run.id}, seq=run.seq)

    async def _respond(self, request: Request, body: CommandBody) -> Json:
        entries = body.params.get("responses", [body.params])
        entries = entries if isinstance(entries, list) else []
        answers: Json = {}
        for entry in entries:
            name = entry.get("interrupt_id") if isinstance(entry, dict) else None
            if not isinstance(name, str) or not name:
                return _error(body, "invalid_argument", "input.respond requires an interrupt_id.")
            answers[name] = entry.get("response")
        if not answers:
            return _error(body, "invalid_argument", "input.respond requires at least one response.")
        if any(body.params.get(name) for name in ("update", "goto")):
            return _error(body, "not_supported", "a session has no state to update and no nodes to go to")
        wanted = RunBody(self._graph, command=RunCommand(answers))
        try:
            async with self._starter.start(request, wanted):
                return _success(body, {})
        except QuestionClosedError as error:
            return _error(body, "no_such_interrupt", error.message)
        except AnswerMismatchError as error:
            return _error(body, "invalid_argument", error.message)

    async def _tree(self, opened: OpenThread, body: CommandBody) -> Json:
        status = "started"
        if opened.runner is not None:
            run = (await self._threads.folds.now(opened.runner, opened.id)).run
            status = PHASES.get(run.status, run.status) if run else status
        return _success(body, {"tree": {"namespace": [], "status": status, "graph_name": self._graph}})


def _in_snake_case(params: Json) -> Json:
    """Rename fields from the thread protocol to the spelling of the runs API."""
    strategy = params.get("multitaskStrategy")
    return {"multitask_strategy": strategy} if strategy else {}


def _success(body: CommandBody, result: Json, *, seq: int = 0) -> Json:
    meta = {"applied_through_seq": seq}
    return {"type": "success", "id": body.id, "result": result, "meta": meta}


def _error(body: CommandBody, code: str, message: str) -> Json:
    return {"type": "error", "id": body.id, "error": code, "message": message}
