"""Tool calls of a LangGraph graph, taken out of the graph and run one by one by its server.

A `ToolNode` in a graph that runs under a `GraphPass` does not run its tools: each call without a result is noted in the
pass, and its task stops as if it had called `interrupt`. The noted call is run later, in the context that the graph
made for it (state, store, runtime, config). When the graph then runs on, the node gets the results.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.errors import UsageError
from midstream.extras import extra
from midstream.history.messages import Outcome, ToolResult, storable
from midstream.tools.function_tools import CallContext, running

with extra("langgraph"):
    import langgraph.prebuilt
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.messages import ToolMessage
    from langgraph.errors import GraphInterrupt
    from langgraph.types import Interrupt

RUN_KEY = "__midstream_pass"
"""The key of a run's `GraphPass` in its config. LangGraph hands it on to every task, and keeps it out of
checkpoints."""
MARK = "midstream: a call waits here"
"""The value of the interrupt with which a call stops its task."""
ASKED = "The tool stopped to ask a person. It runs again with the answer."
"""The content of a call whose tool called `interrupt`."""
POLICY_KEY = "midstream"
"""A tool's metadata under this key is its policy: `metadata={"midstream": "rerun"}`."""
GRACE_S = 1.0
"""Seconds that a cancelled tool has to end; then it is abandoned."""
_RUN_ONE = "_arun_one"
"""The method of a `ToolNode` that runs one call; there is no public place to stand between."""
_SCRATCHPAD, _SEND, _NAMESPACE = "__pregel_scratchpad", "__pregel_send", "checkpoint_ns"

_is_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("midstream_langgraph_call", default=False)


class InterruptRaised(Struct, frozen=True):
    """A tool called `interrupt` and waits for a person: see `Captured.run`."""

    value: Any
    wants_json: bool = False


class NestedInterruptError(Exception):
    """A graph that a tool runs called `interrupt`; the answer would not reach it."""


class Captured:
    """A call that waits to be run, in the context that its graph made for it."""

    def __init__(self, original: Callable[..., Any], call: Any, kind: str, runtime: Any) -> None:  # noqa: ANN401 - LangGraph's
        self.call = call
        self._original = original
        self._kind = kind
        self._runtime = runtime
        self._context = contextvars.copy_context()

    async def run(
        self, context: CallContext, arguments: Mapping[str, Any], answers: Sequence[object], world: World
    ) -> Any:  # noqa: ANN401 - what a tool returns
        """Run the tool and return what it returned; `InterruptRaised` where it needs another answer.

        Args:
            context: The call, for `current_call`.
            arguments: The model's arguments, or those of the person who changed them.
            answers: What its `interrupt` calls return, in their order.

        Raises:
            NestedInterruptError: A graph within the tool requires the answer.
        """
        interrupts = itertools.count()
        known = self._runtime.config["configurable"]
        scratchpad = dataclasses.replace(
            known[_SCRATCHPAD],
            interrupt_counter=lambda: next(interrupts),
            get_null_resume=lambda _consume: None,
            resume=[*answers],
        )
        own = {**known, _SCRATCHPAD: scratchpad, _SEND: lambda _writes: None}
        runtime = dataclasses.replace(self._runtime, config={**self._runtime.config, "configurable": own})

        async def work() -> Any:  # noqa: ANN401 - see `run`
            _is_inside.set(True)
            with running(context):
                return await self._original({**self.call, "args": dict(arguments)}, self._kind, runtime)

        spawned: list[asyncio.Task[Any]] = []
        self._context.copy().run(lambda: spawned.append(world.spawn(work(), name="run a tool of a graph")))
        (task,) = spawned
        try:
            return await asyncio.shield(task)
        except GraphInterrupt as stop:
            if next(interrupts) <= len(answers):
                raise NestedInterruptError from stop
            (found, *_) = stop.args[0]
            return InterruptRaised(found.value, getattr(found, "response_schema", None) is not None)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task], timeout=GRACE_S)
            raise


class GraphPass:
    """One run of a graph, up to where nothing goes on without a result.

    Args:
        results: How calls ended, by the id under which they were noted; without those that stopped to ask.
        returned: Of those, what returned more than text.
        asking: Calls whose tools stopped to ask, and have no answer yet.
    """

    def __init__(
        self,
        results: Mapping[str, ToolResult] | None = None,
        returned: Mapping[str, tuple[str, Any]] | None = None,
        asking: Mapping[str, InterruptRaised] | None = None,
    ) -> None:
        self.captured: dict[str, Captured] = {}
        self.asking: dict[str, InterruptRaised] = {}
        """The calls of `asking` that are still wanted."""
        self._results = results or {}
        self._returned = returned or {}
        self._known_asking = asking or {}

    def take(self, original: Callable[..., Any], call: Any, kind: str, runtime: Any) -> Any:  # noqa: ANN401 - LangGraph's
        """Return the result of a call, or note it and stop its task."""
        call_id = _call_id(call, runtime.config["configurable"].get(_NAMESPACE, ""))
        result = self._results.get(call_id)
        if result is not None:
            text, value = self._returned.get(call_id, ("", None))
            return value if value is not None and text == result.content else message_of(call, result)
        if (asked := self._known_asking.get(call_id)) is not None:
            self.asking[call_id] = asked
        else:
            self.captured[call_id] = Captured(original, call, kind, runtime)
        raise GraphInterrupt(
            (Interrupt(MARK, id=hashlib.md5(call_id.encode(), usedforsecurity=False).hexdigest()),)
        )


def install(node: langgraph.prebuilt.ToolNode) -> None:
    """Let a node run its tools by the `GraphPass` of a run; without one it does what it did."""
    original = getattr(node, _RUN_ONE, None)
    if original is None:
        raise UsageError(
            f"graphs of this version of LangGraph cannot be served: `ToolNode` has no {_RUN_ONE!r}"
        )
    if not isinstance(original, _Gate):
        setattr(node, _RUN_ONE, _Gate(node, original))


class _Gate:
    def __init__(
        self, node: langgraph.prebuilt.ToolNode, original: Callable[..., Coroutine[Any, Any, Any]]
    ) -> None:
        self._node = node
        self._original = original

    async def __call__(self, call: Any, input_type: str, tool_runtime: Any) -> Any:  # noqa: ANN401 - LangGraph's
        current = tool_runtime.config.get("configurable", {}).get(RUN_KEY)
        if current is None or _is_inside.get():
            return await self._original(call, input_type, tool_runtime)
        if call["name"] not in self._node.tools_by_name:
            known = ", ".join(sorted(self._node.tools_by_name)) or "none"
            return ToolMessage(
                f"There is no tool named {call['name']!r}. Known tools: {known}.",
                tool_call_id=call["id"],
                name=call["name"],
                status="error",
            )
        return current.take(self._original, call, input_type, tool_runtime)


class Guard(BaseCallbackHandler):  # type: ignore[misc, unused-ignore]
    """Refuses tools that a node runs itself: a crash would run them twice, and the journal would not have them."""

    raise_error = True
    run_inline = True

    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,  # noqa: ARG002 - LangChain's names
        *,
        metadata: dict[str, Any] | None = None,
        **_: Any,  # noqa: ANN401 - LangChain's
    ) -> None:
        """Refuse a tool outside of a noted call, unless running it again does no harm."""
        known = metadata or {}
        if _is_inside.get() or can_repeat(known):
            return
        name = (serialized or {}).get("name", "a tool")
        raise UsageError(
            f"the node {known.get('langgraph_node', '')!r} runs the tool {name!r} itself, so a crash could run it "
            f"twice; it did not run. Add `ToolNode(tools)` to the graph as a node, or give the tool "
            f"`metadata={{'{POLICY_KEY}': 'rerun'}}` if it may run again"
        )


def can_repeat(metadata: Mapping[str, Any]) -> bool:
    """Whether a tool may run again by itself: by its policy, or by the hints of an MCP server."""
    hinted = metadata.get("readOnlyHint") is True or metadata.get("idempotentHint") is True
    return bool(metadata.get(POLICY_KEY, "rerun" if hinted else "") == "rerun")


def message_of(call: Any, result: ToolResult) -> ToolMessage:  # noqa: ANN401 - LangGraph's
    """Return a result as the graph reads it."""
    status = "success" if result.outcome is Outcome.OK else "error"
    return ToolMessage(result.content, tool_call_id=call["id"], name=call["name"], status=status)


def text_of(value: Any, call_id: str) -> tuple[str, Outcome, bool]:  # noqa: ANN401 - what a tool returned
    """Return what a tool returned as text, how it ended, and whether it is more than that text."""
    if isinstance(value, ToolMessage):
        outcome = Outcome.ERROR if value.status == "error" else Outcome.OK
        is_more = (
            value.artifact is not None or not isinstance(value.content, str) or bool(value.additional_kwargs)
        )
        return storable(str(value.text)), outcome, is_more
    told = [each for each in _messages_in(value) if each.tool_call_id == call_id]
    return "\n\n".join(storable(str(each.text)) for each in told) or "Done.", Outcome.OK, True


def _messages_in(value: Any) -> list[ToolMessage]:  # noqa: ANN401 - what a tool returned
    if isinstance(value, ToolMessage):
        return [value]
    if isinstance(value, list):
        return [message for each in value for message in _messages_in(each)]
    update = getattr(value, "update", None)
    return _messages_in(update.get("messages", [])) if isinstance(update, dict) else []


def _call_id(call: Any, namespace: str) -> str:  # noqa: ANN401 - LangGraph's
    """Return an id for a call that is its own in the whole thread, and the same when its task runs again."""
    known = msgspec.json.encode([namespace, call["id"], call["name"], call["args"]], order="deterministic")
    digest = hashlib.blake2b(known, digest_size=4).hexdigest()
    return f"{storable(str(call['id'] or 'call'))[:100]}-{digest}"
