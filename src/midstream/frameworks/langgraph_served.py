"""Serve a LangGraph graph as an agent of midstream: sessions, page, approvals and CLI included.

    from midstream.frameworks.langgraph_served import make_agent

    agent = make_agent(graph)

`midstream serve module:graph` also calls it. The graph controls the turn; its state is in the engine's store, by
session. A response is one run of the graph until it needs results. Then the calls of its `ToolNode`s run one by one
like those of any agent, each journaled before it starts. Its interrupts are questions to people. With the results, the
graph continues.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct

from midstream.agents.upstream_errors import kind_of
from midstream.engine.agent import Agent, describe
from midstream.environment import World
from midstream.errors import (
    MidstreamError,
    ModelError,
    ModelRejectedError,
    ModelUnavailableError,
    UnavailableError,
    UsageError,
)
from midstream.extras import extra
from midstream.frameworks.langgraph_events import (
    APPROVE,
    INTERRUPT,
    GraphText,
    TurnSoFar,
    answer_of,
    calls_of,
    messages_since,
    new_messages,
)
from midstream.frameworks.langgraph_gate import (
    ASKED,
    MARK,
    POLICY_KEY,
    RUN_KEY,
    Captured,
    GraphPass,
    Guard,
    InterruptRaised,
    NestedInterruptError,
    can_repeat,
    install,
    text_of,
)
from midstream.frameworks.langgraph_saver import KeyValueSaver
from midstream.history.messages import Finish, Outcome, ToolSpec
from midstream.models.responses import Finished, ModelEvent, ModelRequest, ToolCallRequested, Working
from midstream.session.calls import OnDoubt
from midstream.store.contract import Escrow, Store
from midstream.tools.function_tools import TIMEOUT_S, StatedOutcome, Tool, current_call, question, tool

with extra("langgraph"):
    from langchain_core.tools import BaseTool
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.errors import GraphRecursionError
    from langgraph.graph import StateGraph
    from langgraph.graph.state import CompiledStateGraph
    from langgraph.prebuilt import ToolNode
    from langgraph.types import Command

LIVE_MAX = 1000
"""Sessions whose captured calls stay in memory; for others, the graph runs again to capture them."""
_POLICIES = (OnDoubt.UNKNOWN, OnDoubt.RERUN, OnDoubt.RERUN_WITH_KEY, OnDoubt.HOLD)
_TURN = "midstream_turn"
"""Key in the checkpoint metadata of the turn whose message is in the state."""
_NETWORK_ERRORS = {
    "APIConnectionError",
    "APITimeoutError",
    "ConnectError",
    "ReadError",
    "RemoteProtocolError",
}
_GONE = "This call did not run: the graph has continued without it."
_NESTED = (
    "This tool runs a graph that called `interrupt`, and the answer could not reach it. Call `interrupt` in the tool "
    "itself, or make the graph a subgraph."
)


def make_agent(
    graph: StateGraph[Any, Any, Any, Any] | CompiledStateGraph[Any, Any, Any, Any],
    *,
    context: Any = None,  # noqa: ANN401 - the application's own
    name: str | None = None,
    tool_timeout_s: float = TIMEOUT_S,
    world: World | None = None,
) -> Agent:
    """Convert a graph with a channel `messages`.

    Args:
        graph: A `StateGraph`, compiled or not, or the result of `create_agent` or `create_react_agent`. Its checkpoints
            are in the engine's store, so compile it without a checkpointer or with an `InMemorySaver`.
        context: The object `runtime.context` of its nodes, which all sessions share.
        name: Name of the agent; by default that of the graph.
        tool_timeout_s: Time limit of a tool call in seconds.
        world: Clock and tasks; the real ones by default.

    A call of a `ToolNode` is a call of the session: it is journaled before it starts, and its policy decides after a
    crash. The tool's metadata `{"midstream": policy}` sets the policy (`unknown`, `rerun`, `rerun_with_key`, `hold`).
    `interrupt(...)` is a question to a person; requests of `HumanInTheLoopMiddleware` are approvals.

    Raises:
        UsageError: `graph` is not such a graph, or has unsupported parts. The message lists all of them.
    """
    if isinstance(graph, StateGraph):
        graph = graph.compile()
    if not isinstance(graph, CompiledStateGraph):
        raise UsageError(
            f"`graph` is {describe(graph)}; expected a `StateGraph` of LangGraph, compiled or not"
        )
    nodes = [*_tool_nodes(graph)]
    found = [each for node in nodes for each in node.tools_by_name.values()]
    if refused := [*_refusals_of(graph), *_refusals_of_tools(found)]:
        raise UsageError(f"the graph cannot be served: {'; '.join(refused)}")
    for node in nodes:
        install(node)
    own = graph.get_name()
    model = GraphModel(
        graph, name=name or (own if own != "LangGraph" else "graph"), context=context, world=world
    )
    tools = {each.name: _tool(each, model, tool_timeout_s) for each in found}
    asking = (question(INTERRUPT, description="What the graph asks."), _approve)
    return Agent(
        model, tools=[*tools.values(), *asking], name=name or (own if own != "LangGraph" else "agent")
    )


@tool(name=APPROVE, has_effects=False, needs_approval=True)
def _approve(tool: str, arguments: dict[str, Any], description: str = "") -> str:  # noqa: ARG001 - shown to people
    """Ask a person whether the graph may call a tool."""
    return msgspec.json.encode({"tool": tool, "arguments": arguments}).decode()


# --- unsupported parts --------------------------------------------------------------------------------------


def _refusals_of(graph: CompiledStateGraph[Any, Any, Any, Any]) -> Iterator[str]:
    if "messages" not in graph.channels:
        yield "it has no channel `messages` (derive its state from `MessagesState`)"
    if graph.checkpointer and not isinstance(graph.checkpointer, InMemorySaver):
        yield (
            f"it has the checkpointer {describe(graph.checkpointer)} (compile it without one: its checkpoints are "
            "kept in the store of `midstream serve`)"
        )
    graphs: list[tuple[str, Any]] = [("", graph), *graph.get_subgraphs(recurse=True)]
    for place, each in graphs:
        where = f"its subgraph {place!r}" if place else "it"
        if place and not isinstance(saver := getattr(each, "checkpointer", None), bool | None):
            yield f"{where} has the checkpointer {describe(saver)} (compile it without one)"
        if getattr(each, "interrupt_before_nodes", ()) or getattr(each, "interrupt_after_nodes", ()):
            yield f"{where} has `interrupt_before` or `interrupt_after` (call `interrupt` in a node)"
        if any(
            type(channel).__name__ == "DeltaChannel" for channel in getattr(each, "channels", {}).values()
        ):
            yield f"{where} has a `DeltaChannel` (only the newest checkpoint is kept)"


def _refusals_of_tools(tools: Sequence[BaseTool]) -> Iterator[str]:
    policies: dict[str, object] = {}
    for each in tools:
        policy = _policy_of(each)
        if policy not in _POLICIES:
            expected = ", ".join(repr(known.value) for known in _POLICIES)
            yield f"the metadata {POLICY_KEY!r} of tool {each.name!r} is {policy!r}; expected one of {expected}"
        if policies.setdefault(each.name, policy) != policy:
            yield f"two tools are named {each.name!r}, with different policies"
        if each.name in (INTERRUPT, APPROVE):
            yield f"a tool is named {each.name!r}, which is reserved for questions to people; give it another name"


def _policy_of(each: BaseTool) -> object:
    known = each.metadata or {}
    return known.get(POLICY_KEY, OnDoubt.RERUN if can_repeat(known) else OnDoubt.UNKNOWN)


def _tool_nodes(graph: Any) -> Iterator[ToolNode]:  # noqa: ANN401 - a graph or a subgraph of any kind
    for _, each in [("", graph), *graph.get_subgraphs(recurse=True)]:
        for node in getattr(each, "nodes", {}).values():
            yield from (found for found in _within(node.bound) if isinstance(found, ToolNode))


def _within(runnable: Any) -> Iterator[Any]:  # noqa: ANN401 - any runnable
    yield runnable
    for inner in (*getattr(runnable, "steps", ()), *(filter(None, [getattr(runnable, "bound", None)]))):
        yield from _within(inner)


# --- the tools ------------------------------------------------------------------------------------------------


def _tool(each: BaseTool, model: GraphModel, timeout_s: float) -> Tool:
    shape = convert_to_openai_tool(each)["function"]
    spec = ToolSpec(each.name, shape.get("description", ""), shape.get("parameters", {}))
    has_effects = (each.metadata or {}).get("readOnlyHint") is not True

    async def call(**arguments: Any) -> StatedOutcome:  # noqa: ANN401 - any JSON of the model
        return await model.call(arguments)

    return Tool(spec, call, None, has_effects, OnDoubt(cast("Any", _policy_of(each))), timeout_s)


class _SessionState:
    """State of a session in memory between two runs of its graph."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.captured: dict[str, Captured] = {}
        self.interrupts: dict[str, InterruptRaised] = {}


class _Place(Struct, frozen=True):
    """Place of a request: session, turn and number of the response."""

    session: str
    turn: int
    response: int

    @classmethod
    def of(cls, request: ModelRequest) -> _Place:
        """Return the place of a request.

        Raises:
            ModelRejectedError: The request belongs to no session.
        """
        if request.session and not request.is_ephemeral:
            with contextlib.suppress(ValueError):
                _, turn, response = request.key.rsplit("/", 2)
                return cls(request.session, int(turn), int(response))
        raise ModelRejectedError("a graph answers only in a session, which its state needs")


class GraphModel:
    """A graph as the model of an `Agent` with the tools of the graph; see `make_agent`."""

    def __init__(
        self,
        graph: CompiledStateGraph[Any, Any, Any, Any],
        *,
        name: str,
        context: object = None,
        world: World | None = None,
    ) -> None:
        self.name = f"langgraph:{name}"
        self._world = world or World()
        self._saver = KeyValueSaver(self._world)
        self._graph = graph.copy({"checkpointer": self._saver})
        self._context = context
        self._escrow: Escrow | None = None
        self._live: OrderedDict[str, _SessionState] = OrderedDict()

    def begin_use(self, store: Store) -> None:
        """See `StoredModel.begin_use`."""
        self._saver.kv = store
        self._escrow = store.escrow

    async def end_use(self) -> None:
        """See `StoredModel.end_use`."""
        self._live.clear()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """See `Model.stream`: run the graph with new messages and results, until it needs further results."""
        place = _Place.of(request)
        try:
            async for event in self._run_request(request, place):
                yield event
        except ModelError:
            raise
        except UnavailableError as error:
            raise ModelUnavailableError(error.message) from error
        except MidstreamError as error:
            raise ModelRejectedError(error.message) from error
        except GraphRecursionError as error:
            raise ModelRejectedError(f"{self.name} failed: {error}") from error
        except Exception as error:
            typed = self._model_error_of(error)
            if typed is None:
                raise
            raise typed from error

    async def call(self, arguments: Mapping[str, Any]) -> StatedOutcome:
        """Run the current call."""
        context = current_call()
        live = self._live_of(context.session)
        async with live.lock:
            if context.call_id not in live.captured:
                await self._find_calls(context.session, context.turn, live)
            thread = self._saver.thread(context.session)
        captured = live.captured.get(context.call_id)
        if captured is None:
            return StatedOutcome(_GONE, Outcome.ERROR)
        answers = [self._saver.serde.loads_typed(each) for each in thread.answers.get(context.call_id, ())]
        try:
            value = await captured.run(context, arguments, answers, self._world)
        except NestedInterruptError:
            return StatedOutcome(_NESTED, Outcome.ERROR)
        if isinstance(value, InterruptRaised):
            live.interrupts[context.call_id] = value
            return StatedOutcome(ASKED)
        text, outcome, is_more = text_of(value, captured.call["id"])
        if is_more:
            with contextlib.suppress(TypeError, ValueError):  # then only its text is kept
                await self._saver.store_returned(context.session, context.call_id, text, value)
        return StatedOutcome(text, outcome)

    async def _run_request(self, request: ModelRequest, place: _Place) -> AsyncGenerator[ModelEvent, None]:
        if self._escrow is not None and await self._escrow.holds(place.session):
            raise ModelRejectedError(
                "a graph cannot store its state for a session that only its client can decrypt: begin another session"
            )
        live = self._live_of(place.session)
        thread = await self._saver.load(place.session)
        load = self._saver.serde.loads_typed
        so_far = TurnSoFar.of(request.history, place.response)
        await self._saver.keep_answers(place.session, so_far.answers)
        asking = {name: live.interrupts[name] for name in so_far.asking if name in live.interrupts}
        returned = {name: (text, load(value)) for name, (text, value) in thread.returned.items()}
        run = GraphPass(so_far.results, returned, asking)
        config = self._config(place.session, place.turn, run)
        state: Any = await self._graph.aget_state(config)
        words = GraphText(so_far.shown)
        is_taken = (state.metadata or {}).get(_TURN) == place.turn
        if is_taken:
            for message in messages_since(state.values.get("messages", ()), place.turn):
                for event in words.repeat_message(message):
                    yield event
        if not is_taken or state.tasks:  # includes tasks whose writes wait for the next checkpoint
            if is_taken:
                given = _resumption(state, so_far)
            else:
                known = int((state.metadata or {}).get(_TURN, 0))
                given = {"messages": new_messages(request.history, state, place.turn, known)}
            async for event in self._run(given, config, words):
                yield event
            state = await self._graph.aget_state(config)
        live.captured, live.interrupts = run.captured, {}
        calls = [*self._calls(run, state, so_far)]
        if state.tasks and not calls:
            raise ModelRejectedError(
                f"{self.name} stopped before {', '.join(state.next)} without an interrupt"
            )
        for number, each in enumerate(calls):
            yield msgspec.structs.replace(each, signature=words.signature()) if number == 0 else each
        if not calls:
            self._live.pop(place.session, None)
            self._saver.release_thread(place.session)
            for event in words.emit_last_if_empty(state.values.get("messages", ())):
                yield event
        yield Finished(Finish.CALLS if calls else Finish.STOP, words.model, words.usage)

    @staticmethod
    def _calls(run: GraphPass, state: Any, so_far: TurnSoFar) -> Iterator[ToolCallRequested]:  # noqa: ANN401 - LangGraph's
        for call_id, each in run.captured.items():
            arguments = msgspec.json.encode(each.call["args"]).decode()
            yield ToolCallRequested(call_id, each.call["name"], arguments)
        for call_id, raised in run.asking.items():
            number = len(so_far.answers.get(call_id, ()))
            yield from calls_of(f"{call_id}?{number}", raised.value)
        for interrupt in state.interrupts:
            if interrupt.value != MARK:
                yield from calls_of(interrupt.id, interrupt.value)

    async def _run(self, given: Any, config: Any, words: GraphText) -> AsyncGenerator[ModelEvent, None]:  # noqa: ANN401 - LangGraph's
        events: Any = self._graph.astream(
            given,
            config,
            context=self._context,
            stream_mode=["messages", "updates"],
            subgraphs=True,
            durability="sync",
        )
        async with contextlib.aclosing(events):
            async for namespace, mode, data in events:
                if mode == "messages":
                    message, metadata = data
                    for event in words.take_message(
                        str(metadata.get("langgraph_checkpoint_ns", "")), message
                    ):
                        yield event
                    continue
                for node in data:
                    for event in words.end_node("|".join((*namespace, node))):
                        yield event
                    yield Working(node)
        for event in words.end_run():
            yield event

    async def _find_calls(self, session: str, turn: int, live: _SessionState) -> None:
        """Run a graph that waits for results without passing any, to capture its calls again without running them."""
        await self._saver.load(session)
        run = GraphPass()
        async for _ in self._run(None, self._config(session, turn, run), GraphText(())):
            pass
        live.captured = run.captured

    def _config(self, session: str, turn: int, run: GraphPass) -> Any:  # noqa: ANN401 - LangGraph's
        return {
            "configurable": {"thread_id": session, RUN_KEY: run},
            "metadata": {_TURN: turn},
            "callbacks": [Guard()],
        }

    def _live_of(self, session: str) -> _SessionState:
        live = self._live.setdefault(session, _SessionState())
        self._live.move_to_end(session)
        if len(self._live) > LIVE_MAX:
            forgotten, _ = self._live.popitem(last=False)
            self._saver.release_thread(forgotten)
        return live

    def _model_error_of(self, error: Exception) -> ModelError | None:
        """Convert an error of a model in the graph; return None for any other error."""
        kind = type(error).__name__
        status = getattr(error, "status_code", None)
        words = f"{self.name} failed: {kind}: {error}"
        if isinstance(status, int):
            found = kind_of(str(error), names=[kind], status=status) or ModelError
            return found(words)
        if kind in _NETWORK_ERRORS or isinstance(error, ConnectionError):
            return ModelUnavailableError(words)
        return None


def _resumption(state: Any, so_far: TurnSoFar) -> Any:  # noqa: ANN401 - LangGraph's
    """Return the input with which a graph continues its turn."""
    pending = [each for each in state.interrupts if each.value != MARK]
    answers = {each.id: found for each in pending if (found := answer_of(each, so_far.results)) is not None}
    return Command(resume={name: found.value for name, found in answers.items()}) if answers else None
