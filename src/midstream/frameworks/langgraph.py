"""Tools of LangGraph that run at most once, although the graph may repeat their step.

    from midstream.frameworks.langgraph import at_most_once

    guard = at_most_once("calls.db")
    builder.add_node("tools", guard.tool_node(tools))

    async with guard.run(thread):
        state = await graph.ainvoke(given, config, durability="sync")

After a crash, LangGraph runs the whole tools node again, including calls that had ended. With this guard, an ended call
returns its result from the journal, and the policy decides about an interrupted call. It is for asynchronous graphs
with a checkpointer; the thread id determines the session.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from midstream.engine.active_runs import ActiveRun
from midstream.engine.call_cache import CallBook
from midstream.engine.journal import require_session_id
from midstream.environment import World
from midstream.errors import UsageError
from midstream.extras import extra
from midstream.frameworks.context_values import value_within
from midstream.frameworks.langchain import journaled_results
from midstream.history.messages import Outcome, ToolCall, ToolResult, storable
from midstream.observability.observers import Observer
from midstream.session.calls import SUSPENDED, CallPlan, OnDoubt, OnDoubtName, digest_of
from midstream.session.records import CallEnded
from midstream.store.contract import Store
from midstream.store.store_registry import open_store
from midstream.tools.function_tools import running

with extra("langgraph"):
    from langchain_core.messages import AIMessage, ToolMessage
    from langgraph.errors import GraphBubbleUp
    from langgraph.prebuilt import ToolNode

DRIVER = "langgraph"
WRITING_S = 5.0
"""Seconds for a cancelled graph to write its checkpoints, before its thread is released."""
_NOT_KEPT = "This tool finished, but its return value is not a message and was lost when the process died."
MESSAGES_KEY = "messages"
"""Key of the messages in the state of a graph, unless its `ToolNode` has another one."""
_DURABILITY = "__pregel_durability"
"""Key of a run's `durability` in LangGraph's config; absent for the default, "async"."""

_run: ContextVar[tuple[str, ActiveRun] | None] = ContextVar("midstream_langgraph_run", default=None)
"""The session and the run of the current context."""


class ToolCallRequest(Protocol):
    """LangGraph's argument of a wrapper of tool calls."""

    tool_call: Any
    state: Any
    runtime: Any


Execute = Callable[[Any], Awaitable[Any]]


class ToolGuard:
    """Lets each tool call of a graph start at most once; created by `at_most_once`.

    LangGraph calls it as the asynchronous wrapper of tool calls.
    """

    def __init__(self, book: CallBook, policies: Mapping[str, OnDoubt]) -> None:
        self._book = book
        self._policies = policies

    def tool_node(self, tools: Sequence[Any], **options: Any) -> ToolNode:  # noqa: ANN401 - LangGraph's options
        """Create a `ToolNode` with guarded calls; synchronous `invoke` and `stream` raise `UsageError`."""
        return ToolNode(
            tools,
            wrap_tool_call=self.refuse_synchronous_call,
            awrap_tool_call=functools.partial(self._run_call, options.get("messages_key", MESSAGES_KEY)),
            **options,
        )

    @asynccontextmanager
    async def run(self, thread: str) -> AsyncGenerator[None, None]:
        """Claim a thread for runs of its graph inside this context; no other process can run it meanwhile.

        Leaving the context without an error ends calls in doubt that the graph did not request again, with the outcome
        unknown.

        Raises:
            SessionBusyError: The thread is running in this process. Nothing was changed.
            LeaseHeldError: Another process runs the thread. Nothing was changed.
        """
        session = _session_of(thread)
        run = await self._book.begin_run(session)
        is_complete = False
        try:
            with (
                value_within(_run, (session, run)),
                journaled_results(lambda message, call: self._find_result(session, message, call)),
            ):
                yield
            is_complete = True
        except asyncio.CancelledError as error:
            await _settle(error)
            raise
        finally:
            await self._book.end_run(session, run, is_complete=is_complete)

    async def close(self) -> None:
        """Close the store. Running calls are in doubt for the next process."""
        await self._book.close()

    def refuse_synchronous_call(self, request: Any, execute: Any) -> NoReturn:  # noqa: ANN401, ARG002 - LangGraph's
        """Refuse a call of a synchronous run, before its tool starts.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "tools run at most once in asynchronous graphs only: use `ainvoke` or `astream` inside `guard.run(thread)`"
        )

    async def __call__(self, request: ToolCallRequest, execute: Execute) -> Any:  # noqa: ANN401 - a parameter of LangGraph
        """Run a call, or return its outcome from the journal.

        Raises:
            UsageError: The graph has no thread id, or does not run inside `run` with `durability="sync"`. The tool was
                not started.
            CallReusedError: The call's id was used with other arguments. The tool was not started.
        """
        return await self._run_call(MESSAGES_KEY, request, execute)

    async def _run_call(self, messages_key: str, request: ToolCallRequest, execute: Execute) -> Any:  # noqa: ANN401 - a parameter of LangGraph
        session, run = _require_run(request)
        call = _call_of(request, messages_key)
        policy = self._policies.get(call.name, OnDoubt.UNKNOWN)
        plan = CallPlan(call.id, digest_of(call.name, call.arguments), on_doubt=policy)
        started = await self._book.start(session, run, call, plan)
        if isinstance(started, CallEnded):
            return _message_of(started, request.tool_call)
        try:
            with running(started):
                value = await execute(request)
        except GraphBubbleUp:  # an interrupt: the tool starts again after a person's decision
            waits = ToolResult(call.id, "It waits for a person.", Outcome.CANCELLED)
            await self._book.finish(started, waits, SUSPENDED)
            raise
        except Exception as error:
            failed = ToolResult(call.id, storable(f"{type(error).__name__}: {error}"), Outcome.ERROR)
            await self._book.finish(started, failed)
            raise
        except BaseException:
            self._book.leave_in_doubt(started)
            raise
        await self._book.finish(started, *_result_of(call.id, value))
        return value

    def _find_result(self, session: str, message: AIMessage, call: Any) -> ToolMessage | None:  # noqa: ANN401 - LangChain's
        ended = self._book.end_overtaken(session, _call_id(message, call))
        return _message_of(ended, call) if ended is not None else None


def at_most_once(
    store: Store | str | Path,
    *,
    on_doubt: Mapping[str, OnDoubt | OnDoubtName] | None = None,
    world: World | None = None,
    observers: Iterable[Observer] = (),
) -> ToolGuard:
    """Create a guard of tool calls: use `guard.tool_node(tools)`, and `async with guard.run(thread)` around each run.

    Args:
        store: Store of the journals, or the path of a SQLite file, which is not that of the checkpointer.
        on_doubt: Policies for calls in doubt, by tool name: `unknown` (the default: the model is informed), `rerun`,
            `rerun_with_key`.
        world: Clock, random numbers and tasks; the real ones by default.
        observers: Notified of appends, such as `midstream.observability.opentelemetry.OpenTelemetry`.
    """
    opened = open_store(store, world=world or World())
    book = CallBook(DRIVER, opened, world=world, observers=observers)
    return ToolGuard(book, {name: OnDoubt(policy) for name, policy in (on_doubt or {}).items()})


async def _settle(error: asyncio.CancelledError) -> None:
    """Wait for the last writes of a cancelled graph, whose task LangGraph passes in the cancellation."""
    writing = [each for each in error.args if isinstance(each, asyncio.Task)]
    if writing:
        await asyncio.wait(writing, timeout=WRITING_S)


def _require_run(request: ToolCallRequest) -> tuple[str, ActiveRun]:
    """Return the session of a call, and its run.

    Raises:
        UsageError: The graph does not run as at-most-once calls require.
    """
    config = getattr(request.runtime, "config", None) or {}
    known = config.get("configurable", {})
    thread = str(known.get("thread_id", ""))
    if not thread:
        raise UsageError("a graph needs a checkpointer and a thread id for its tools to run at most once")
    claimed = _run.get()
    if claimed is None or claimed[0] != _session_of(thread):
        raise UsageError(
            f"thread {thread!r} is not claimed for this run: run the graph inside `async with guard.run({thread!r})`"
        )
    durability = known.get(_DURABILITY, "async")
    if durability != "sync":
        raise UsageError(
            f'the graph runs with durability="{durability}": after a kill its model is called again, and the tools '
            'run twice under other call ids. Pass durability="sync" to `ainvoke` or `astream`.'
        )
    return claimed


def _session_of(thread: str) -> str:
    name = f"{DRIVER}:{thread}"
    try:
        require_session_id(name)
    except UsageError:  # any text may be a thread id
        return f"{DRIVER}:{hashlib.blake2b(thread.encode(), digest_size=16).hexdigest()}"
    return name


def _call_of(request: ToolCallRequest, messages_key: str) -> ToolCall:
    """Return the call with an id that is unique in the thread: providers may reuse ids in later responses.

    Raises:
        UsageError: The message of the call has no id.
    """
    call = request.tool_call
    call_id = str(call["id"] or "")
    state = request.state
    is_mapping = isinstance(state, Mapping)
    messages = state.get(messages_key, []) if is_mapping else getattr(state, messages_key, state)
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, AIMessage) and any(each["id"] == call["id"] for each in message.tool_calls):
            if message.id is None:  # a later call with the same id would get the result of this one
                raise UsageError(
                    f"the message that requests the call {call_id!r} has no id: give the state's messages the reducer "
                    "`add_messages`, as in `MessagesState`, or set the id of each message"
                )
            call_id = _call_id(message, call)
            break
    arguments = msgspec.json.encode(call["args"], order="deterministic").decode()
    return ToolCall(storable(call_id) or "call", storable(str(call["name"])), arguments)


def _call_id(message: AIMessage, call: Any) -> str:  # noqa: ANN401 - LangChain's
    """Return an id that is unique in the thread. Calls of one message may have one id and differ in their arguments."""
    same = [(each["name"], each["args"]) for each in message.tool_calls if each["id"] == call["id"]]
    place = (call["name"], call["args"])
    number = same.index(place) if place in same else 0
    return storable(f"{message.id}/{call['id'] or ''}{f'#{number}' if number else ''}")


def _result_of(call_id: str, value: object) -> tuple[ToolResult, str]:
    if not isinstance(value, ToolMessage):
        return ToolResult(call_id, _NOT_KEPT, Outcome.ERROR), ""
    outcome = Outcome.ERROR if value.status == "error" else Outcome.OK
    try:
        native = storable(value.model_dump_json())
    except ValueError:  # an artifact that is not JSON is available in this run only
        native = storable(value.model_copy(update={"artifact": None}).model_dump_json())
    return ToolResult(call_id, storable(str(value.text)), outcome), native


def _message_of(ended: CallEnded, call: Any) -> ToolMessage:  # noqa: ANN401 - LangChain's
    if ended.native:
        return ToolMessage.model_validate_json(ended.native)
    status = "success" if ended.result.outcome is Outcome.OK else "error"
    return ToolMessage(
        ended.result.content,
        tool_call_id=call["id"],
        name=call["name"],
        status=status,
    )
