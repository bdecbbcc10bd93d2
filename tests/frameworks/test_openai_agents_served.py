"""Agents of the OpenAI Agents SDK in midstream's own loop: `make contract`, the SDK has its own environment."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents.testing", reason="the SDK is in its own environment: `make contract`")

from agents import (
    Agent,
    FileSearchTool,
    FunctionTool,
    GuardrailFunctionOutput,
    HostedMCPTool,
    InputGuardrail,
    ModelSettings,
    OutputGuardrail,
    StopAtTools,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrail,
    ToolOutputGuardrail,
    ToolOutputImage,
    ToolOutputText,
    ToolsToFinalOutputResult,
    WebSearchTool,
    function_tool,
)
from agents.lifecycle import AgentHooks
from agents.mcp import MCPServerStdio
from agents.retry import ModelRetrySettings
from agents.testing import ScriptedModel, assistant_message, function_call
from agents.tool import ImageGenerationTool
from agents.tool_context import ToolContext

import midstream
from midstream.cli.agents import find_agent
from midstream.engine.host import Host
from midstream.errors import AgentNotFoundError, ToolsUnavailableError, UsageError
from midstream.frameworks.openai_agents_served import make_agent
from midstream.history.messages import Outcome
from midstream.session.call_references import CallRef
from midstream.session.calls import Choice, OnDoubt
from midstream.session.records import CallEnded, ChildDelta, QuestionAsked, decode
from midstream.session.turn.commands import Answer
from midstream.store.memory import MemoryStore
from midstream.tools.function_tools import Tool, current_call

WAIT_S = 60.0
ROOT = Path(__file__).parents[2]


@dataclass
class Hotels:
    city: str


def scripted_model(*calls: tuple[str, str]) -> ScriptedModel:
    """Return a model that requests these calls at once, and then answers."""
    requested = [
        function_call(name, arguments, call_id=f"c{number}") for number, (name, arguments) in enumerate(calls)
    ]
    return ScriptedModel([*([requested] if requested else []), [assistant_message("It is done.")]])


async def result_of(agent: midstream.Agent, text: str = "go") -> tuple[str, Outcome]:
    """Run one turn, and return the result of its last call."""
    ended = [event.record for event in await events_of(agent, text) if isinstance(event.record, CallEnded)]
    return ended[-1].result.content, ended[-1].result.outcome


async def events_of(agent: midstream.Agent, text: str = "go") -> list[Any]:
    async with asyncio.timeout(WAIT_S), Host(agent, MemoryStore()) as host:
        return [event async for event in host.send("s", text)]


async def tools_of(agent: midstream.Agent) -> dict[str, Tool]:
    return {each.name: each for source in agent.sources for each in await source.tools()}


async def test_a_tool_receives_its_context_its_call_and_the_effect_key() -> None:
    @function_tool
    def book(context: ToolContext[Hotels], nights: int) -> str:
        key = current_call().effect_key
        return f"{nights + 1} in {context.context.city}, {context.tool_name} {context.tool_call_id}, {key}"

    agent = Agent[Hotels](name="porter", model=scripted_model(("book", '{"nights": 2}')), tools=[book])
    found = make_agent(agent, context=Hotels("Oslo"))
    assert await result_of(found) == ("3 in Oslo, book c0, s/1/1/c0", Outcome.OK)
    assert found.name == "porter"
    assert make_agent(agent, context=Hotels("Oslo"), name="other").name == "other"


async def test_the_model_receives_the_end_of_a_tool() -> None:
    def own_words(_: Any, error: Exception) -> str:
        return f"No luck: {error}"

    async def own_words_later(_: Any, error: Exception) -> str:
        return f"No luck: {error}"

    def fails() -> str:
        raise ValueError("no such city")

    @function_tool
    def rich() -> list[Any]:
        return [ToolOutputText(text="a view"), ToolOutputImage(image_url="http://127.0.0.1/view.png")]

    @function_tool
    def plain() -> dict[str, int]:
        return {"rooms": 2}

    ends: dict[str, tuple[FunctionTool, tuple[str, Outcome]]] = {
        "default": (
            function_tool(fails),
            ("An error occurred while running the tool. Please try again.", Outcome.ERROR),
        ),
        "own": (
            function_tool(fails, failure_error_function=own_words),
            ("No luck: no such city", Outcome.ERROR),
        ),
        "awaited": (
            function_tool(fails, failure_error_function=own_words_later),
            ("No luck: no such city", Outcome.ERROR),
        ),
        "raised": (
            function_tool(fails, failure_error_function=None),
            ("ValueError: no such city", Outcome.ERROR),
        ),
        "rich": (rich, ("a view\n\n[image]", Outcome.OK)),
        "plain": (plain, ("{'rooms': 2}", Outcome.OK)),
    }
    for name, (tool, end) in ends.items():
        agent = Agent(name="a", model=scripted_model((tool.name, "{}")), tools=[tool])
        assert await result_of(make_agent(agent)) == end, name


async def test_invalid_arguments_are_passed_to_the_tools_own_error_function() -> None:
    ran: list[int] = []

    @function_tool(failure_error_function=lambda _, error: type(error).__name__)
    def book(nights: int) -> None:
        ran.append(nights)

    agent = Agent(name="a", model=scripted_model(("book", '{"nights": "many"}')), tools=[book])
    assert await result_of(make_agent(agent)) == ("ModelBehaviorError", Outcome.ERROR)
    assert ran == []


async def test_a_tool_that_times_out_may_have_taken_effect() -> None:
    async def slow() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    tools = {
        "Tool 'slow' timed out after 0.01 seconds.": function_tool(slow, timeout=0.01),
        "Too slow.": function_tool(
            slow, timeout=0.01, timeout_error_function=lambda _context, _error: "Too slow."
        ),
        "Tool 'slow' timed out after 0.02 seconds.": function_tool(
            slow, timeout=0.02, timeout_behavior="raise_exception"
        ),
    }
    for expected, tool in tools.items():
        agent = Agent(name="a", model=scripted_model(("slow", "{}")), tools=[tool])
        assert await result_of(make_agent(agent)) == (
            f"{expected} It may or may not have taken effect.",
            Outcome.UNKNOWN,
        )


async def test_guardrails_of_a_tool_run_before_and_after_it() -> None:
    ran: list[str] = []

    def judge(data: Any) -> ToolGuardrailFunctionOutput:
        if data.context.tool_arguments == '{"city":"Oslo"}':
            return ToolGuardrailFunctionOutput.reject_content("Not Oslo.")
        if data.context.tool_arguments == '{"city":"Rome"}':
            return ToolGuardrailFunctionOutput.raise_exception()
        return ToolGuardrailFunctionOutput.allow()

    def check(data: Any) -> ToolGuardrailFunctionOutput:
        return (
            ToolGuardrailFunctionOutput.reject_content("A secret.")
            if "secret" in data.output
            else judge(data)
        )

    @function_tool(
        tool_input_guardrails=[ToolInputGuardrail(judge, name="judge")],
        tool_output_guardrails=[ToolOutputGuardrail(check)],
    )
    def book(city: str) -> str:
        ran.append(city)
        return f"booked in {city}"

    ends = {
        "Oslo": ("Not Oslo.", Outcome.ERROR),
        "Rome": ("This tool call was stopped by the guardrail 'judge'.", Outcome.ERROR),
        "a secret": ("A secret.", Outcome.ERROR),
        "Lima": ("booked in Lima", Outcome.OK),
    }
    for city, end in ends.items():
        agent = Agent(name="a", model=scripted_model(("book", f'{{"city": "{city}"}}')), tools=[book])
        assert await result_of(make_agent(agent)) == end
    assert ran == ["a secret", "Lima"]


async def test_policies_are_given_by_name_and_those_without_a_tool_are_refused() -> None:
    @function_tool
    def look() -> str:
        return "x"

    agent = Agent(name="a", model=scripted_model(), tools=[look])
    assert (await tools_of(make_agent(agent)))["look"].on_doubt is OnDoubt.UNKNOWN
    assert (await tools_of(make_agent(agent, on_doubt={"look": "rerun"})))["look"].on_doubt is OnDoubt.RERUN
    with pytest.raises(UsageError, match="`on_doubt` names the tool 'lok', which it does not have"):
        make_agent(agent, on_doubt={"lok": "rerun"})
    with pytest.raises(UsageError, match="'look' is 'probe'; expected one of 'unknown', 'rerun'"):
        make_agent(agent, on_doubt={"look": "probe"})


async def test_a_disabled_tool_is_not_offered() -> None:
    opened: list[str] = []

    async def is_open(context: Any, _: Any) -> bool:
        return context.context.city in opened

    @function_tool(is_enabled=is_open)
    def book() -> str:
        return "x"

    @function_tool(is_enabled=False)
    def never() -> str:
        return "x"

    @function_tool(is_enabled=lambda _context, agent: agent.name == "a")
    def always() -> str:
        return "x"

    agent = Agent(name="a", model=scripted_model(), tools=[book, never, always])
    found = make_agent(agent, context=Hotels("Oslo"))
    assert [*await tools_of(found)] == ["always"]
    opened.append("Oslo")
    assert [*await tools_of(found)] == ["book", "always"]


@pytest.mark.parametrize(
    ("rule", "arguments", "is_asked"),
    [
        ("always", '{"sum": 1}', True),
        ("large", '{"sum": 1}', False),
        ("large", '{"sum": 9}', True),
        ("large", "{}", True),
        ("waits", '{"sum": 1}', True),
        ("fails", '{"sum": 1}', True),
        ("of the call", '{"sum": 1}', False),
    ],
)
async def test_a_person_is_asked_according_to_the_tools_rule(
    rule: str, arguments: str, *, is_asked: bool
) -> None:
    async def is_large(_: Any, parameters: dict[str, Any], __: str) -> bool:
        return bool(parameters.get("sum", 0) > 5)

    async def waits(*_: Any) -> bool:
        await asyncio.sleep(0)
        return False

    async def fails(*_: Any) -> bool:
        raise ValueError(rule)

    async def is_other_call(context: Any, _: dict[str, Any], call_id: str) -> bool:
        return (context.context.city, call_id) != ("Oslo", "c0")

    rules: dict[str, Any] = {
        "always": True,
        "large": is_large,
        "waits": waits,
        "fails": fails,
        "of the call": is_other_call,
    }

    @function_tool(needs_approval=rules[rule], strict_mode=False)
    def pay(sum: int = 7) -> str:
        return f"paid {sum}"

    agent = Agent(name="a", model=scripted_model(("pay", arguments)), tools=[pay])
    async with (
        asyncio.timeout(WAIT_S),
        Host(make_agent(agent, context=Hotels("Oslo")), MemoryStore()) as host,
    ):
        events = host.send("s", "go")
        async for event in events:
            if isinstance(event.record, QuestionAsked | CallEnded):
                assert isinstance(event.record, QuestionAsked) is is_asked
                break
        else:
            raise AssertionError("no call ended and no person was asked")


async def test_an_agent_as_a_tool_runs_within_its_call() -> None:
    other = Agent(name="clerk", model=scripted_model(), instructions="You are the clerk.")
    tool = other.as_tool("ask_clerk", "Ask the clerk.")
    agent = Agent(name="a", model=scripted_model(("ask_clerk", '{"input": "two rooms"}')), tools=[tool])
    assert await result_of(make_agent(agent)) == ("It is done.", Outcome.OK)
    asked = other.model.last_call
    assert (asked.system_instructions, asked.input[0]["content"]) == ("You are the clerk.", "two rooms")


async def test_a_sub_agent_of_a_served_agent_asks_a_person_in_its_own_session() -> None:
    ran: list[str] = []

    @function_tool(needs_approval=True)
    def pay() -> str:
        ran.append("pay")
        return "paid"

    clerk = make_agent(Agent(name="clerk", model=scripted_model(("pay", "{}")), tools=[pay]))
    model = scripted_model(("clerk", '{"task": "pay them"}'))
    helper = midstream.sub_agent(clerk, description="Pays.")
    boss = make_agent(Agent(name="boss", model=model)).with_tools(helper)
    async with asyncio.timeout(WAIT_S), Host(boss, MemoryStore()) as host:
        async for event in host.send("s", "go"):
            if not isinstance(event.record, ChildDelta):
                continue
            inner = decode(bytes(event.record.record))
            if isinstance(inner, QuestionAsked):
                assert ran == []
                child = await host.session(event.record.child)
                answer = Answer(
                    CallRef(inner.turn, inner.response, inner.call_id), inner.digest, Choice.ALLOW
                )
                await child.submit(answer)
    assert ran == ["pay"]
    assert model.last_call.input[-1]["output"] == "It is done."


def mcp_server(folder: Path, **more: Any) -> MCPServerStdio:
    environment = {**os.environ, "LEDGER": str(folder / "ledger"), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    script = str(ROOT / "tests" / "tools" / "misbehaving_server.py")
    return MCPServerStdio(
        {"command": sys.executable, "args": [script], "env": environment},
        name="files",
        client_session_timeout_seconds=WAIT_S,
        **more,
    )


async def test_an_mcp_server_is_connected_from_its_first_use_until_it_is_closed(tmp_path: Path) -> None:
    server = mcp_server(tmp_path, require_approval={"always": {"tool_names": ["send"]}})
    agent = Agent(name="a", model=scripted_model(("add", '{"a": 1, "b": 2}')), mcp_servers=[server])
    found = make_agent(agent, on_doubt={"send": "hold"})
    assert server.session is None
    async with asyncio.timeout(WAIT_S):
        content, outcome = await result_of(found)
        assert ("3" in content, outcome) == (True, Outcome.OK)
        tools = await tools_of(found)
        seen = {name: (tools[name].on_doubt, tools[name].has_effects) for name in ("add", "put", "send")}
        assert seen == {
            "add": (OnDoubt.RERUN, False),
            "put": (OnDoubt.RERUN, True),
            "send": (OnDoubt.HOLD, True),
        }
        assert [name for name, each in tools.items() if each.needs_approval] == ["send"]
        for source in found.sources:
            await source.close()
            await source.close()
    assert server.session is None


async def test_a_server_that_dies_in_a_call_leaves_it_in_doubt_and_is_restarted(tmp_path: Path) -> None:
    model = scripted_model(("die", "{}"))
    found = make_agent(Agent(name="a", model=model, mcp_servers=[mcp_server(tmp_path)]))
    async with asyncio.timeout(WAIT_S):
        content, outcome = await result_of(found)
        assert (content.endswith("It may or may not have taken effect."), outcome) == (True, Outcome.UNKNOWN)
        # The server was there for the next request.
        assert "die" in [tool.name for tool in model.last_call.tools]
        for source in found.sources:
            await source.close()
    started = [line.split()[0] for line in (tmp_path / "ledger").read_text().splitlines()]
    assert started == ["started", "die", "started"]


async def test_a_connection_of_the_application_is_used_and_left_open(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), mcp_server(tmp_path) as server:
        found = make_agent(Agent(name="a", model=scripted_model(), mcp_servers=[server]))
        assert "add" in await tools_of(found)
        for source in found.sources:
            await source.close()
        assert server.session is not None


async def test_a_server_that_cannot_be_connected_does_not_affect_other_tools() -> None:
    @function_tool
    def look() -> str:
        return "nothing"

    gone = MCPServerStdio({"command": "/no/such/program"}, name="gone")
    agent = Agent(name="a", model=scripted_model(("look", "{}")), tools=[look], mcp_servers=[gone])
    found = make_agent(agent)
    assert await result_of(found) == ("nothing", Outcome.OK)
    with pytest.raises(ToolsUnavailableError, match="'gone-0'"):
        await found.sources[1].tools()


def refused_agents() -> dict[str, Agent[Any]]:
    """Return agents with one unsupported part each, by the text of the error."""

    @function_tool(needs_approval=True)
    def pay() -> str:
        return "x"

    def check(*_: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(None, tripwire_triggered=False)

    def final(*_: Any) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(is_final_output=False)

    model = scripted_model()
    behind = Agent(name="clerk", model=model, tools=[pay])
    between = Agent(name="boss", model=model, handoffs=[behind])
    hosted: Any = {"type": "mcp", "server_label": "far", "server_url": "https://far.example"}
    return {
        "`output_type` is <class 'int'>": Agent(name="a", model=model, output_type=int),
        "`handoffs` (give the other agents as tools": Agent(name="a", model=model, handoffs=[behind]),
        "`input_guardrails`": Agent(name="a", model=model, input_guardrails=[InputGuardrail(check)]),
        "`output_guardrails`": Agent(name="a", model=model, output_guardrails=[OutputGuardrail(check)]),
        "`hooks`": Agent(name="a", model=model, hooks=AgentHooks()),
        "`tool_use_behavior`": Agent(name="a", model=model, tool_use_behavior=final),
        "`model_settings.retry`": Agent(
            name="a", model=model, model_settings=ModelSettings(retry=ModelRetrySettings(max_retries=1))
        ),
        "a `ImageGenerationTool`": Agent(
            name="a", model=model, tools=[ImageGenerationTool({"type": "image_generation"})]
        ),
        "the hosted MCP server 'far' requires approvals": Agent(
            name="a", model=model, tools=[HostedMCPTool(hosted)]
        ),
        "'boss' has tools that need approval ('pay'": Agent(
            name="a", model=model, tools=[between.as_tool("boss", "x")]
        ),
        "make_agent(your_agent, context=...)": Agent[Hotels](name="a", model=model),
        "the model 'odd/one' cannot be used": Agent(name="a", model="odd/one"),
    }


@pytest.mark.parametrize("expected", refused_agents())
def test_unsupported_parts_are_refused_by_name(expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_agent(refused_agents()[expected])
    assert expected in raised.value.message


def test_all_unsupported_parts_are_named_at_once() -> None:
    agent = Agent(name="a", model=scripted_model(), output_type=int, hooks=AgentHooks())
    with pytest.raises(UsageError, match=r"output_type.*hooks.*midstream.frameworks.openai_agents"):
        make_agent(agent)
    with pytest.raises(UsageError, match=r"`agent` is 7; expected an `agents.Agent`"):
        make_agent(7)  # type: ignore[arg-type, unused-ignore]


def test_a_model_without_a_key_is_refused_by_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UsageError, match=r"the model 'gpt-5' cannot be used: .*OPENAI_API_KEY"):
        make_agent(Agent(name="a", model="gpt-5"))


def test_tools_of_the_provider_are_kept() -> None:
    hosted: Any = {
        "type": "mcp",
        "server_label": "far",
        "server_url": "https://far.example",
        "require_approval": "never",
    }
    tools = [WebSearchTool(), FileSearchTool(vector_store_ids=["v"]), HostedMCPTool(hosted)]
    assert make_agent(Agent(name="a", model=scripted_model(), tools=tools)).name == "a"


@pytest.mark.parametrize("behavior", ["stop_on_first_tool", StopAtTools(stop_at_tool_names=["look", "none"])])
async def test_the_result_of_a_tool_may_be_the_answer(behavior: Any) -> None:
    @function_tool
    def look() -> str:
        return "there are rooms"

    model = scripted_model(("look", "{}"))
    agent = Agent(name="a", model=model, tools=[look], tool_use_behavior=behavior)
    async with asyncio.timeout(WAIT_S), Host(make_agent(agent), MemoryStore()) as host:
        assert await host.ask("s", "go") == "there are rooms"
        assert len(model.calls) == 1
        assert await host.ask("s", "once more") == "It is done."


APP = """
from agents import Agent
from agents.testing import ScriptedModel

class Own(Agent):
    pass

plain = Agent(name="the porter", model=ScriptedModel())
own = Own(name="of a subclass", model=ScriptedModel())
structured = Agent(name="a", model=ScriptedModel(), output_type=int)
other = 7
"""


def test_the_command_line_and_the_server_accept_it_like_other_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sdk_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = find_agent("sdk_app:plain")
    assert (type(found), found.name) == (midstream.Agent, "the porter")
    assert find_agent("sdk_app:own").name == "of a subclass"
    with pytest.raises(AgentNotFoundError, match=r"'sdk_app:structured'.*`output_type` is <class 'int'>"):
        find_agent("sdk_app:structured")
    with pytest.raises(AgentNotFoundError, match=r"Did you mean sdk_app:own or sdk_app:plain"):
        find_agent("sdk_app:other")
    agent: Any = Agent(name="a", model=ScriptedModel())
    with pytest.raises(UsageError, match=r"a `agents.Agent`.*openai_agents_served.make_agent\(agent\)"):
        midstream.asgi(agent)
    with pytest.raises(UsageError, match=r"`agents.Agent`; expected a `midstream.Agent`"):
        Host(agent, MemoryStore())
