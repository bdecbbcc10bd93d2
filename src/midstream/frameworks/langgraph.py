"""Tools of LangGraph that run at most once, however often the graph runs their step again.

    from midstream.frameworks.langgraph import at_most_once

    node = ToolNode(tools, awrap_tool_call=at_most_once("calls.db"))

LangGraph runs the whole tools node again after a crash: calls that had ended run a second time. With this, a call
that ended gives its result from the journal, and a call that was cut is handled by its policy. For asynchronous
graphs with a checkpointer, whose thread id names the session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from midstream.engine.call_cache import SUSPENDED, CallBook
from midstream.engine.journal import require_session_id
from midstream.environment import World
from midstream.errors import UsageError
from midstream.extras import extra
from midstream.history.messages import Outcome, ToolCall, ToolResult, storable
from midstream.observability.observers import Observer
from midstream.session.calls import CallPlan, OnDoubt, OnDoubtName, digest_of
from midstream.session.records import CallEnded
from midstream.store.contract import Store
from midstream.store.store_registry import open_store
from midstream.tools.function_tools import running

with extra("langgraph"):
    from langchain_core.messages import AIMessage, ToolMessage
    from langgraph.errors import GraphBubbleUp

DRIVER = "langgraph"
_NOT_KEPT = "This tool finished, but what it returned is no message and was lost when the process died."


class ToolCallRequest(Protocol):
    """Argument of a wrapper of tool calls, as LangGraph passes it."""

    tool_call: Any
    state: Any
    runtime: Any


Execute = Callable[[Any], Awaitable[Any]]
Wrapper = Callable[[Any, Execute], Awaitable[Any]]


def at_most_once(
    store: Store | str | Path,
    *,
    on_doubt: Mapping[str, OnDoubt | OnDoubtName] | None = None,
    world: World | None = None,
    observers: Iterable[Observer] = (),
) -> Wrapper:
    """Make a wrapper for `ToolNode(awrap_tool_call=...)` or for `awrap_tool_call` of a LangChain middleware.

    Args:
        store: Where the journals live: a store, or the path of an SQLite file. Not the checkpointer's.
        on_doubt: Policies by tool name, for calls that started and whose outcome is unknown: `unknown` (the default:
            the model is informed), `rerun`, `rerun_with_key`.
        world: Clock, chance and tasks; the real ones by default.
        observers: Notified of appends, such as `midstream.observability.opentelemetry.OpenTelemetry`.

    The wrapper raises `UsageError` where the graph runs without a thread id, `CallReusedError` where an id comes again
    with other arguments, `LeaseHeldError` where another process works on the thread.
    """
    opened = open_store(store, world=world or World())
    book = CallBook(DRIVER, opened, world=world, observers=observers)
    policies = {name: OnDoubt(policy) for name, policy in (on_doubt or {}).items()}

    async def wrapped(request: ToolCallRequest, execute: Execute) -> Any:  # noqa: ANN401 - what LangGraph takes
        call = _call_of(request)
        policy = policies.get(call.name, OnDoubt.UNKNOWN)
        plan = CallPlan(call.id, digest_of(call.name, call.arguments), on_doubt=policy)
        started = await book.start(_session_of(request), call, plan)
        if isinstance(started, CallEnded):
            return _message_of(started, request)
        try:
            with running(started):
                value = await execute(request)
        except GraphBubbleUp:  # an interrupt: a person decides, then the tool begins anew
            waits = ToolResult(call.id, "It waits for somebody.", Outcome.CANCELLED)
            await book.finish(started, waits, SUSPENDED)
            raise
        except Exception as error:
            failed = ToolResult(call.id, storable(f"{type(error).__name__}: {error}"), Outcome.ERROR)
            await book.finish(started, failed)
            raise
        except BaseException:
            book.leave_in_doubt(started)
            raise
        await book.finish(started, *_result_of(call.id, value))
        return value

    return wrapped


def _session_of(request: ToolCallRequest) -> str:
    config = getattr(request.runtime, "config", None) or {}
    thread = str(config.get("configurable", {}).get("thread_id", ""))
    if not thread:
        raise UsageError("a graph needs a checkpointer and a thread id for its tools to run at most once")
    name = f"{DRIVER}:{thread}"
    try:
        require_session_id(name)
    except UsageError:  # a thread may be called anything
        return f"{DRIVER}:{hashlib.blake2b(thread.encode(), digest_size=16).hexdigest()}"
    return name


def _call_of(request: ToolCallRequest) -> ToolCall:
    """Return the call under an id that is its own in the whole thread: providers use one again in a later response."""
    asked = request.tool_call
    call_id = str(asked["id"] or "")
    state = request.state
    messages = state.get("messages", []) if isinstance(state, Mapping) else getattr(state, "messages", state)
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, AIMessage) and any(each["id"] == asked["id"] for each in message.tool_calls):
            call_id = f"{message.id}/{call_id}"
            break
    arguments = msgspec.json.encode(asked["args"], order="deterministic").decode()
    return ToolCall(storable(call_id) or "call", storable(str(asked["name"])), arguments)


def _result_of(call_id: str, value: object) -> tuple[ToolResult, str]:
    if not isinstance(value, ToolMessage):
        return ToolResult(call_id, _NOT_KEPT, Outcome.ERROR), ""
    outcome = Outcome.ERROR if value.status == "error" else Outcome.OK
    try:
        native = storable(value.model_dump_json())
    except ValueError:  # an artifact that is no JSON stays with this run
        native = storable(value.model_copy(update={"artifact": None}).model_dump_json())
    return ToolResult(call_id, storable(str(value.text)), outcome), native


def _message_of(ended: CallEnded, request: ToolCallRequest) -> ToolMessage:
    if ended.native:
        return ToolMessage.model_validate_json(ended.native)
    status = "success" if ended.result.outcome is Outcome.OK else "error"
    return ToolMessage(
        ended.result.content,
        tool_call_id=request.tool_call["id"],
        name=request.tool_call["name"],
        status=status,
    )
