"""Agents of pydantic-ai in midstream's own loop: supported, refused and journaled parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, RunContext, ToolReturn
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.exceptions import ApprovalRequired, ModelRetry
from pydantic_ai.messages import ModelMessage, ModelRequest, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import DeferredToolRequests, ToolDefinition
from pydantic_ai.toolsets import ExternalToolset, FunctionToolset, WrapperToolset

from midstream.engine.host import Host
from midstream.errors import ToolsUnavailableError, UsageError
from midstream.frameworks import tool_connections
from midstream.frameworks.pydantic_ai_served import make_agent
from midstream.session.calls import OnDoubt
from midstream.store.memory import MemoryStore
from midstream.tools.function_tools import Tool, current_call

WAIT_S = 60.0


@dataclass
class Hotels:
    city: str


def calling_model(name: str, arguments: str, seen: list[AgentInfo] | None = None) -> FunctionModel:
    """Return a model that calls one tool, and then answers with its result."""

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        if seen is not None:
            seen.append(info)
        last = messages[-1]
        returned = [part for part in last.parts if isinstance(part, ToolReturnPart)]
        if not returned:
            yield {0: DeltaToolCall(name, arguments, tool_call_id="c1")}
        else:
            assert isinstance(last, ModelRequest)
            yield f"The tool returned: {returned[0].model_response_str()}"

    return FunctionModel(stream_function=stream)


async def answer_of(agent: Agent[Any, Any], *, deps: object = None) -> str:
    async with asyncio.timeout(WAIT_S):
        async with Host(make_agent(agent, deps=deps), MemoryStore()) as host:
            return await host.ask("s", "go")


async def tools_of(agent: Agent[Any, Any]) -> dict[str, Tool]:
    return {each.name: each for source in make_agent(agent).sources for each in await source.tools()}


async def test_a_tool_receives_deps_its_call_and_valid_arguments() -> None:
    agent = Agent(calling_model("book", '{"nights": "2"}'), deps_type=Hotels, name="porter")

    @agent.tool
    def book(ctx: RunContext[Hotels], nights: int) -> str:
        key = current_call().effect_key
        return f"{nights + 1} in {ctx.deps.city}, {ctx.tool_name} {ctx.tool_call_id} {ctx.conversation_id}, {key}"

    answer = await answer_of(agent, deps=Hotels("Oslo"))
    assert answer == "The tool returned: 3 in Oslo, book c1 s, s/1/1/c1"
    assert make_agent(agent, deps=Hotels("Oslo")).name == "porter"
    assert make_agent(agent, deps=Hotels("Oslo"), name="other").name == "other"


async def test_the_model_receives_prompts_settings_and_schemas() -> None:
    seen: list[AgentInfo] = []
    agent = Agent(
        calling_model("book", "{}", seen),
        instructions=["Be brief.", "Be kind."],
        system_prompt="You book.",
        model_settings=ModelSettings(temperature=0.5),
        toolsets=[FunctionToolset(instructions="Ask before you book.")],
    )

    @agent.tool_plain
    def book(city: str = "Oslo") -> str:
        """Book a hotel."""
        return city

    assert await answer_of(agent) == "The tool returned: Oslo"
    (sent,) = seen[0].function_tools
    assert (sent.name, sent.description) == ("book", "Book a hotel.")
    assert sent.parameters_json_schema["properties"] == {"city": {"default": "Oslo", "type": "string"}}
    assert seen[0].instructions == "You book.\n\nBe brief.\n\nBe kind.\n\nAsk before you book."
    assert (seen[0].model_settings or {}).get("temperature") == 0.5


async def test_the_model_receives_the_end_of_a_tool() -> None:
    def retry() -> str:
        raise ModelRetry("Try Bergen.")

    def broken() -> str:
        raise ValueError("no such city")

    def later() -> str:
        raise ApprovalRequired

    def rich() -> ToolReturn[dict[str, int]]:
        return ToolReturn({"rooms": 2}, content="Both have a view.")

    def unwritable() -> object:
        return object()

    async def cancelled() -> str:
        raise asyncio.CancelledError

    ends: dict[Callable[[], object], str] = {
        retry: "Try Bergen.",
        broken: "ValueError: no such city",
        later: "This tool did not run",
        rich: '{"rooms":2}\n\nBoth have a view.',
        unwritable: "its answer has no JSON form",
        cancelled: "the tool cancelled itself",
    }
    for function, end in ends.items():
        answer = await answer_of(Agent(calling_model(function.__name__, "{}"), tools=[function]))
        assert end in answer, function.__name__


async def test_invalid_arguments_never_reach_the_tool() -> None:
    ran: list[int] = []
    agent = Agent(calling_model("book", '{"nights": "many"}'))

    @agent.tool_plain
    def book(nights: int) -> None:
        ran.append(nights)

    answer = await answer_of(agent)
    assert "The arguments of 'book' do not fit its schema" in answer
    assert "nights" in answer
    assert ran == []


async def test_policies_come_from_metadata_and_hints() -> None:
    agent = Agent(TestModel())

    def plain() -> None: ...

    policies: dict[str, dict[str, Any]] = {
        "nothing": {},
        "again": {"midstream": "rerun"},
        "keyed": {"midstream": "rerun_with_key"},
        "held": {"midstream": "hold", "annotations": {"idempotentHint": True}},
        "reads": {"annotations": {"readOnlyHint": True}},
        "same": {"annotations": {"idempotentHint": True}},
    }
    for name, metadata in policies.items():
        agent.tool_plain(name=name, metadata=metadata)(plain)
    agent.tool_plain(name="asked", requires_approval=True, timeout=7.0)(plain)
    tools = await tools_of(agent)
    assert {name: (each.on_doubt, each.has_effects) for name, each in tools.items()} == {
        "nothing": (OnDoubt.UNKNOWN, True),
        "again": (OnDoubt.RERUN, True),
        "keyed": (OnDoubt.RERUN_WITH_KEY, True),
        "held": (OnDoubt.HOLD, True),
        "reads": (OnDoubt.RERUN, False),
        "same": (OnDoubt.RERUN, True),
        "asked": (OnDoubt.UNKNOWN, True),
    }
    assert [name for name, each in tools.items() if each.needs_approval] == ["asked"]
    assert tools["asked"].timeout_s == 7.0


class Response(BaseModel):
    text: str


def refused_agents() -> dict[str, Agent[Any, Any]]:
    """Return agents with one unsupported part each, by the text of the error."""
    prompted, validated, instructed = Agent(TestModel()), Agent(TestModel()), Agent(TestModel())
    prompted.system_prompt(lambda: "x")
    validated.output_validator(lambda text: text)
    instructed.instructions(lambda: "x")

    def get_x() -> str:
        return "x"

    nested = WrapperToolset(FunctionToolset(instructions=get_x))
    external = ExternalToolset([ToolDefinition(name="far")])
    policy = Agent(TestModel())
    policy.tool_plain(name="odd", metadata={"midstream": "probe"})(get_x)
    return {
        "`output_type` is": Agent(TestModel(), output_type=Response),
        "(a session's answer is text)": Agent(TestModel(), output_type=[str, Response]),
        "output validators": validated,
        "the capability `ProcessHistory`": Agent(
            TestModel(), capabilities=[ProcessHistory(lambda notes: notes)]
        ),
        "system prompts from a function": prompted,
        "instructions from a function or a template": instructed,
        "its `model_settings` are a function": Agent(TestModel(), model_settings=lambda _: ModelSettings()),
        "`max_concurrency`": Agent(TestModel(), max_concurrency=1),
        "a toolset from a function": Agent(TestModel(), toolsets=[lambda _: FunctionToolset()]),
        "instructions from a function": Agent(TestModel(), toolsets=[nested]),
        "an `ExternalToolset`": Agent(TestModel(), toolsets=[external]),
        "`ApprovalRequiredToolset`": Agent(TestModel(), toolsets=[FunctionToolset().approval_required()]),
        "'midstream' of tool 'odd' is 'probe'; expected one of 'unknown'": policy,
        "has no model": Agent(),
        "make_agent(your_agent, deps=...)": Agent(TestModel(), deps_type=Hotels),
    }


@pytest.mark.parametrize("expected", refused_agents())
def test_unsupported_parts_are_refused_by_name(expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_agent(refused_agents()[expected])
    assert expected in raised.value.message


def test_all_unsupported_parts_are_named_at_once_and_deferred_requests_are_supported() -> None:
    make_agent(Agent(TestModel(), output_type=[str, DeferredToolRequests]))
    make_agent(Agent(TestModel(), output_type=str | DeferredToolRequests))  # type: ignore[arg-type, unused-ignore]
    with pytest.raises(UsageError, match=r"output_type.*max_concurrency.*pydantic_ai_durable"):
        make_agent(Agent(TestModel(), output_type=Response, max_concurrency=1))
    with pytest.raises(UsageError, match=r"`agent` is 7; expected a `pydantic_ai.Agent`"):
        make_agent(7)  # type: ignore[arg-type]


class Connected(WrapperToolset[Any]):
    """Counts its open contexts, and their tasks."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(FunctionToolset([self.ping]))
        self.failures = failures
        self.notes: list[str] = []
        self.tasks: set[asyncio.Task[Any] | None] = set()

    async def ping(self) -> str:
        return json.dumps(self.notes)

    async def __aenter__(self) -> Self:
        self.notes.append("in")
        self.tasks.add(asyncio.current_task())
        if self.failures:
            self.failures -= 1
            raise OSError("no way there")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.notes.append("out")
        self.tasks.add(asyncio.current_task())


async def test_a_toolset_is_open_from_its_first_use_until_it_is_closed() -> None:
    toolset = Connected()
    converted = make_agent(Agent(calling_model("ping", "{}"), toolsets=[toolset]))
    assert toolset.notes == []
    async with asyncio.timeout(WAIT_S), Host(converted, MemoryStore()) as host:
        assert await host.ask("s", "go") == 'The tool returned: ["in"]'
    for source in converted.sources:
        await source.close()
        await source.close()
    assert (toolset.notes, len(toolset.tasks)) == (["in", "out"], 1)


async def test_a_toolset_that_cannot_be_opened_is_tried_again() -> None:
    toolset = Connected(failures=1)
    source = make_agent(Agent(TestModel(), toolsets=[toolset])).sources[1]
    with pytest.raises(ToolsUnavailableError, match="no way there"):
        await source.tools()
    assert [each.name for each in await source.tools()] == ["ping"]
    await source.close()
    assert toolset.notes == ["in", "in", "out"]


async def test_a_finished_call_does_not_wait_for_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_connections, "GRACE_S", 0.01)
    began, release = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(WAIT_S)

    agent = Agent(calling_model("hang", "{}"), tools=[hang], tool_timeout=1.0)
    answer = await answer_of(agent)
    release.set()
    await asyncio.wait_for(began.wait(), WAIT_S)
    assert "gave no answer within 1 s" in answer or "Timed out after 1" in answer
