"""Capture of a LangGraph graph's tool calls, which its server then runs one by one.

Under a `GraphPass`, a `ToolNode` does not run its tools: each call without a result is captured, and its task stops as
if it had called `interrupt`. The captured call runs later, in the context of the graph (state, store, runtime, config).
When the graph continues, the node receives the results.
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
"""Key of a run's `GraphPass` in its config. LangGraph passes it to every task, and excludes it from checkpoints."""
MARK = "midstream: a call waits here"
"""Value of the interrupt with which a captured call stops its task."""
ASKED = "The tool stopped to ask a person. It runs again with the answer."
"""Result content of a call whose tool called `interrupt`."""
POLICY_KEY = "midstream"
"""Key of the policy in a tool's metadata: `metadata={"midstream": "rerun"}`."""
GRACE_S = 1.0
"""Seconds for a cancelled tool to end; then it is abandoned."""
_RUN_ONE = "_arun_one"
"""Method of a `ToolNode` that runs one call; there is no public hook."""
_SCRATCHPAD, _SEND, _NAMESPACE = "__pregel_scratchpad", "__pregel_send", "checkpoint_ns"

_is_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("midstream_langgraph_call", default=False)


class InterruptRaised(Struct, frozen=True):
    """A tool called `interrupt`, and waits for a person: see `Captured.run`."""

    value: Any
    wants_json: bool = False


class NestedInterruptError(Exception):
    """A graph inside a tool called `interrupt`; the answer could not reach it."""


class Captured:
    """A captured call, with the context of its graph."""

    def __init__(self, original: Callable[..., Any], call: Any, kind: str, runtime: Any) -> None:  # noqa: ANN401 - LangGraph's
        self.call = call
        self._original = original
        self._kind = kind
        self._runtime = runtime
        self._context = contextvars.copy_context()

    async def run(
        self, context: CallContext, arguments: Mapping[str, Any], answers: Sequence[object], world: World
    ) -> Any:  # noqa: ANN401 - a tool's result
        """Run the tool and return its value, or `InterruptRaised` if it needs another answer.

        Args:
            context: The call, for `current_call`.
            arguments: The model's arguments, or those of a person who changed them.
            answers: Return values of its `interrupt` calls, in order.

        Raises:
            NestedInterruptError: A graph inside the tool needs the answer.
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
    """One run of a graph, until it needs results to continue.

    Args:
        results: Results of captured calls by id, without calls whose tool called `interrupt`.
        returned: Return values of these calls that are not only text.
        asking: Calls whose tool called `interrupt`, and has no answer yet.
    """

    def __init__(
        self,
        results: Mapping[str, ToolResult] | None = None,
        returned: Mapping[str, tuple[str, Any]] | None = None,
        asking: Mapping[str, InterruptRaised] | None = None,
    ) -> None:
        self.captured: dict[str, Captured] = {}
        self.asking: dict[str, InterruptRaised] = {}
        """The calls of `asking` that the graph requested again."""
        self._results = results or {}
        self._returned = returned or {}
        self._known_asking = asking or {}

    def take(self, original: Callable[..., Any], call: Any, kind: str, runtime: Any) -> Any:  # noqa: ANN401 - LangGraph's
        """Return the result of a call, or capture the call and stop its task."""
        call_id = _call_id(call, runtime.config["configurable"].get(_NAMESPACE, ""))
        result = self._results.get(call_id)
        if result is not None:
            text, value = self._returned.get(call_id, ("", None))
            return value if value is not None and text == result.content else message_of(call, result)
        if (raised := self._known_asking.get(call_id)) is not None:
            self.asking[call_id] = raised
        else:
            self.captured[call_id] = Captured(original, call, kind, runtime)
        raise GraphInterrupt(
            (Interrupt(MARK, id=hashlib.md5(call_id.encode(), usedforsecurity=False).hexdigest()),)
        )


def install(node: langgraph.prebuilt.ToolNode) -> None:
    """Let a node pass its calls to the `GraphPass` of a run, if there is one."""
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
    """Refuses tools that a node runs itself: a crash could run them twice, and they are not in the journal."""

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
        """Refuse a tool outside of a captured call, unless it may run again."""
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
    """Return whether a tool may run again, by its policy or the hints of an MCP server."""
    hinted = metadata.get("readOnlyHint") is True or metadata.get("idempotentHint") is True
    return bool(metadata.get(POLICY_KEY, "rerun" if hinted else "") == "rerun")


def message_of(call: Any, result: ToolResult) -> ToolMessage:  # noqa: ANN401 - LangGraph's
    """Convert a result to a message of the graph."""
    status = "success" if result.outcome is Outcome.OK else "error"
    return ToolMessage(result.content, tool_call_id=call["id"], name=call["name"], status=status)


def text_of(value: Any, call_id: str) -> tuple[str, Outcome, bool]:  # noqa: ANN401 - a tool's result
    """Return a tool's value as text, its outcome, and whether the value is more than that text."""
    if isinstance(value, ToolMessage):
        outcome = Outcome.ERROR if value.status == "error" else Outcome.OK
        is_more = (
            value.artifact is not None or not isinstance(value.content, str) or bool(value.additional_kwargs)
        )
        return storable(str(value.text)), outcome, is_more
    messages = [each for each in _messages_in(value) if each.tool_call_id == call_id]
    return "\n\n".join(storable(str(each.text)) for each in messages) or "Done.", Outcome.OK, True


def _messages_in(value: Any) -> list[ToolMessage]:  # noqa: ANN401 - a tool's result
    if isinstance(value, ToolMessage):
        return [value]
    if isinstance(value, list):
        return [message for each in value for message in _messages_in(each)]
    update = getattr(value, "update", None)
    return _messages_in(update.get("messages", [])) if isinstance(update, dict) else []


def _call_id(call: Any, namespace: str) -> str:  # noqa: ANN401 - LangGraph's
    """Return an id of a call that is unique in the thread, and the same when its task runs again."""
    known = msgspec.json.encode([namespace, call["id"], call["name"], call["args"]], order="deterministic")
    digest = hashlib.blake2b(known, digest_size=4).hexdigest()
    return f"{storable(str(call['id'] or 'call'))[:100]}-{digest}"
