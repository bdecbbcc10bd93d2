"""Serves LangGraph's API for assistants and threads: the agent is the assistant, and a thread is a session."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request

from midstream.dialects.langgraph_messages import interrupts_of
from midstream.dialects.langgraph_protocol import checkpoint_id
from midstream.dialects.langgraph_requests import (
    AssistantSearch,
    HistoryBody,
    ThreadBody,
    ThreadPatch,
    ThreadSearch,
)
from midstream.dialects.run_fold import RunFold, uuid_of
from midstream.engine.host import Host
from midstream.engine.journal import require_session_id
from midstream.errors import ConflictError, NotFoundError, SessionNotFoundError, WrongSecretError
from midstream.server.api.langgraph_threads import GraphThreads, OpenThread, ThreadNote
from midstream.server.auth.caller import caller_of
from midstream.server.auth.principals import Action
from midstream.server.auth.session_unlocking import secrets_in, unlock_at_once
from midstream.session.child_names import PART_MARK
from midstream.session.records import SessionStatus
from midstream.session.turn.states import AwaitingModel, Cancelling, Idle, RunningCalls
from midstream.store.contract import SessionInfo, is_session
from midstream.version import __version__

Json = dict[str, Any]

ThreadStatus = Literal["idle", "busy", "interrupted", "error"]
_LISTED: dict[str, ThreadStatus] = {
    SessionStatus.RUNNING: "busy",
    SessionStatus.LOCKED: "busy",
    SessionStatus.WAITING: "interrupted",
    SessionStatus.FAILED: "error",
    SessionStatus.INTERRUPTED: "error",
}
SEARCHED_MAX = 5000
"""Maximum number of sessions that a search examines."""


class GraphAssistant(Struct, frozen=True):
    """The served agent, as an assistant."""

    assistant_id: str
    graph_id: str
    name: str
    config: Json
    context: Json
    metadata: Json
    created_at: str
    updated_at: str
    version: int
    description: str | None


class GraphSchemas(Struct, frozen=True):
    """JSON Schemas of an assistant's input, output and state."""

    graph_id: str
    input_schema: Json
    output_schema: Json
    state_schema: Json
    config_schema: Json
    context_schema: Json


class GraphNodes(Struct, frozen=True):
    """The nodes and edges of an assistant."""

    nodes: list[Json]
    edges: list[Json]


class ThreadView(Struct, frozen=True):
    """A thread. `values` has its messages."""

    thread_id: str
    created_at: str
    updated_at: str
    state_updated_at: str
    metadata: Json
    status: ThreadStatus
    config: Json
    values: Json | None
    error: str | None = None
    interrupts: dict[str, list[Json]] = {}


class GraphState(Struct, frozen=True):
    """The state of a thread."""

    values: Json
    next: list[str]
    tasks: list[Json]
    metadata: Json | None
    created_at: str | None
    checkpoint: Json | None
    parent_checkpoint: Json | None
    interrupts: list[Json]
    checkpoint_id: str | None
    parent_checkpoint_id: str | None


class ServerInfo(Struct, frozen=True):
    """The server and its version."""

    version: str
    host: Json


def assistant_id_of(name: str) -> str:
    """Return the assistant id of an agent of this name."""
    return uuid_of(f"agent {name}".encode())


def require_assistant(host: Host, wanted: str) -> None:
    """Check that a request names the served agent, by its name or its assistant id.

    Raises:
        NotFoundError: The request names another agent.
    """
    name = host.agent.name
    if wanted not in (name, assistant_id_of(name)):
        raise NotFoundError(f"no assistant {wanted[:80]!r}; this server has {name!r}")


def metadata_of(host: Host) -> Json:
    """Return the metadata of the agent for threads and runs."""
    return {"graph_id": host.agent.name, "assistant_id": assistant_id_of(host.agent.name)}


def timestamp(seconds: float) -> str:
    """Format a time as LangGraph does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


class LangGraphAssistants:
    """Handles requests about the agent."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def graph_info(self, _: Request) -> ServerInfo:
        """Return the name and version of the server."""
        return ServerInfo(__version__, {"kind": "midstream"})

    async def search_assistants(self, _: Request, body: AssistantSearch) -> list[GraphAssistant]:
        """List the assistants: the served agent."""
        name = self._host.agent.name
        is_wanted = body.graph_id in (None, name) and (body.name or "").casefold() in name.casefold()
        return [self._assistant()] if is_wanted and not body.offset else []

    async def assistant(self, request: Request) -> GraphAssistant:
        """Return the served agent as an assistant."""
        require_assistant(self._host, request.path_params["assistant"])
        return self._assistant()

    async def assistant_schemas(self, request: Request) -> GraphSchemas:
        """Return the JSON schemas of the agent's input and state."""
        require_assistant(self._host, request.path_params["assistant"])
        messages = {"type": "array", "items": {"type": "object"}}
        state = {"type": "object", "properties": {"messages": messages}, "required": ["messages"]}
        none: Json = {"type": "object", "properties": {}}
        return GraphSchemas(self._host.agent.name, state, state, state, none, none)

    async def assistant_graph(self, request: Request) -> GraphNodes:
        """Return the agent as a graph: the model and its tools."""
        require_assistant(self._host, request.path_params["assistant"])
        names = ("__start__", "agent", "tools", "__end__")
        edges = (("__start__", "agent"), ("agent", "tools"), ("tools", "agent"), ("agent", "__end__"))
        return GraphNodes(
            [{"id": name, "type": "runnable", "data": {"id": name, "name": name}} for name in names],
            [{"source": source, "target": target} for source, target in edges],
        )

    def _assistant(self) -> GraphAssistant:
        name, made_at = self._host.agent.name, timestamp(0)
        return GraphAssistant(
            assistant_id_of(name), name, name, {}, {}, {"created_by": "system"}, made_at, made_at, 1, None
        )


class LangGraphThreads:
    """Handles requests about threads."""

    def __init__(self, threads: GraphThreads) -> None:
        self._host = threads.host
        self._threads = threads

    async def create_thread(self, request: Request, body: ThreadBody) -> ThreadView:
        """Create a thread; without a message, it is kept for a day."""
        thread = body.thread_id or uuid_of(self._host.world.new_id("thread").encode())
        require_session_id(thread)
        caller = caller_of(request.scope)
        session = caller.stored_name(thread)
        caller.set_session(session)
        await caller.begin()
        is_there = await self._host.store.find(session) is not None
        note = await self._threads.notes.find(session)
        if is_there or note is not None:
            if body.if_exists == "raise":
                raise ConflictError(f"thread {thread!r} exists")
            if not is_there:
                return self._empty(thread, note or ThreadNote(self._host.world.now()))
            runner = await self._host.session(session)
            with await unlock_at_once(self._host, session, secrets_in(request), Action.READ):
                return await self._show(OpenThread(thread, session, caller, runner, note))
        await self._threads.notes.sweep()
        return self._empty(thread, await self._threads.notes.change(session, body.metadata or {}))

    async def thread(self, request: Request) -> ThreadView:
        """Return a thread with its messages."""
        async with self._threads.opened(request) as opened:
            return await self._show(opened)

    async def change_thread(self, request: Request, body: ThreadPatch) -> ThreadView:
        """Add metadata to a thread."""
        async with self._threads.opened(request, Action.SEND) as opened:
            note = await self._threads.notes.change(opened.session, body.metadata)
            return await self._show(replace(opened, note=note))

    async def delete_thread(self, request: Request) -> None:
        """Delete a thread, its session, and those of its sub-agents."""
        async with self._threads.opened(request, Action.OWN) as opened:
            if opened.runner is not None:
                await self._host.delete(opened.session)
            await self._threads.notes.delete(opened.session)

    async def search_threads(self, request: Request, body: ThreadSearch) -> list[ThreadView]:
        """List threads that have a message, newest change first."""
        caller = caller_of(request.scope)
        wanted = None if body.ids is None else {caller.stored_name(each) for each in body.ids}
        found: list[ThreadView] = []
        left, skip = SEARCHED_MAX, body.offset
        async for info in self._host.store.list(of=await caller.visible_sessions()):
            left -= 1
            if len(found) == body.limit or left < 0:
                break
            is_wanted = wanted is None or info.session in wanted
            is_thread = is_session(info.session) and PART_MARK not in info.session
            listed = _of_listing(info)
            may_wait = listed == "busy" and body.status == "interrupted"  # a sub-agent may wait for an answer
            if not (is_wanted and is_thread and (may_wait or body.status in (None, listed))):
                continue
            note = await self._threads.notes.find(info.session) or ThreadNote(info.created_at)
            about = {**metadata_of(self._host), **note.metadata}
            if any(about.get(name) != value for name, value in body.metadata.items()):
                continue
            if not await caller.may_list(info.session):
                continue
            with suppress(WrongSecretError, SessionNotFoundError):
                line = await self._line(request, info, note)
                if listed == "busy" and body.status not in (None, line.status):
                    continue
                if skip:
                    skip -= 1
                else:
                    found.append(line)
        return found

    async def _line(self, request: Request, info: SessionInfo, note: ThreadNote) -> ThreadView:
        caller = caller_of(request.scope)
        with await unlock_at_once(self._host, info.session, secrets_in(request), Action.READ):
            runner = await self._host.session(info.session)
            name = caller.public_name(info.session)
            return await self._show(OpenThread(name, info.session, caller, runner, note))

    async def thread_state(self, request: Request) -> GraphState:
        """Return the state of a thread: its messages, next nodes, and interrupts."""
        async with self._threads.opened(request) as opened:
            return await self._state(opened)

    async def thread_history(self, request: Request) -> list[GraphState]:
        """Return the states of a thread: only the newest one, as sessions do not go back."""
        async with self._threads.opened(request) as opened:
            return [] if opened.runner is None else [await self._state(opened)]

    async def search_history(self, request: Request, body: HistoryBody) -> list[GraphState]:
        """Return the states of a thread: only the newest one, as sessions do not go back."""
        return [] if body.before is not None else (await self.thread_history(request))[: body.limit]

    # --- as LangGraph shows them ------------------------------------------------------------------------------

    def _empty(self, thread: str, note: ThreadNote) -> ThreadView:
        at = timestamp(note.at)
        return ThreadView(thread, at, at, at, note.metadata, "idle", {}, None)

    async def _show(self, opened: OpenThread) -> ThreadView:
        note = opened.note or ThreadNote(0.0)
        if opened.runner is None:
            return self._empty(opened.id, note)
        fold = await self._threads.folds.now(opened.runner, opened.id)
        task = _task_id(fold)
        interrupts = interrupts_of(fold.questions)
        is_failed = (
            isinstance(fold.session.turn, Idle) and fold.run is not None and fold.run.status == "error"
        )
        changed_at = timestamp(fold.at)
        return ThreadView(
            opened.id,
            timestamp(note.at or fold.session.started_at),
            changed_at,
            changed_at,
            {**metadata_of(self._host), **note.metadata},
            _status_of(fold),
            {"configurable": {}},
            fold.state.values(),
            fold.run.message if is_failed and fold.run else None,
            {task: interrupts} if interrupts else {},
        )

    async def _state(self, opened: OpenThread) -> GraphState:
        if opened.runner is None:
            return GraphState({}, [], [], None, None, None, None, [], None, None)
        fold = await self._threads.folds.now(opened.runner, opened.id)
        name = checkpoint_id(fold.session.position)
        run = fold.run
        about = {
            **metadata_of(self._host),
            "thread_id": opened.id,
            "run_id": run.id if run else None,
            "source": "loop",
            "step": fold.state.step,
        }
        place = {"thread_id": opened.id, "checkpoint_ns": "", "checkpoint_id": name}
        tasks = _tasks_of(fold)
        following = [task["name"] for task in tasks]
        return GraphState(
            fold.state.values(),
            following,
            tasks,
            about,
            timestamp(fold.at),
            place,
            None,
            interrupts_of(fold.questions),
            name,
            None,
        )


def _of_listing(info: SessionInfo) -> ThreadStatus:
    return _LISTED.get(info.mark.status, "idle")


def _status_of(fold: RunFold) -> ThreadStatus:
    run = fold.run
    if run is None or run.status == "success":
        return "idle"
    if run.status == "running":
        return "busy"
    if run.status == "error":
        return "error"
    return "interrupted" if fold.questions else "idle"


def _task_id(fold: RunFold) -> str:
    run = fold.run
    return uuid_of(f"task {run.id if run else ''}".encode())


def _tasks_of(fold: RunFold) -> list[Json]:
    """Return the next tasks of a thread: none at rest, otherwise its model or tools, with an error if one failed."""
    name = {AwaitingModel: "agent", RunningCalls: "tools", Cancelling: "tools"}.get(type(fold.session.turn))
    run = fold.run
    error = None
    if name is None:
        if run is None or run.status != "error":
            return []
        name, error = "agent", f"{run.error}: {run.message}"
    interrupts: Sequence[Json] = interrupts_of(fold.questions)
    task = {"id": _task_id(fold), "name": name, "path": ["__pregel_pull", name], "error": error}
    return [{**task, "interrupts": interrupts, "checkpoint": None, "state": None, "result": None}]
