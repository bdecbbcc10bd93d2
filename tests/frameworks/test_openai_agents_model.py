"""Models of the OpenAI Agents SDK against scripted servers of both of OpenAI's APIs: `make contract`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("agents.testing", reason="the SDK is in its own environment: `make contract`")

from agents import (
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    WebSearchTool,
    function_tool,
)
from agents.models.interface import Model
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
)
from midstream.frameworks.openai_agents_model import OpenAIAgentsModel, spec_of
from midstream.history.messages import (
    Finish,
    History,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    Usage,
    UserMessage,
)
from midstream.models.prompt_prefix import cache_key_of
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from tests.models.chat_server import WAIT_S, Answer, call, chat_server, delta, refusal, stream, usage
from tests.models.responses_server import (
    HELLO,
    Link,
    call_events,
    call_item,
    completed,
    event,
    responses_server,
    text_deltas,
)

OTHER = ToolSpec("other", "Of a client.", {"type": "object", "properties": {"path": {"type": "string"}}})
HI = History((UserMessage.of("hi"),))
CALLED = Response((Text("I look."), ToolCall("c1", "read", '{"path":"a"}')), Finish.CALLS)
WITH_RESULT = HI.then(Step(CALLED, (ToolResult("c1", "it is empty"),)))


@function_tool
def read(path: str) -> str:
    """Read a file."""
    return path


_clients: list[AsyncOpenAI] = []


@pytest.fixture(autouse=True)
async def closed_clients() -> AsyncIterator[None]:
    yield
    while _clients:
        await _clients.pop().close()


def client(url: str) -> AsyncOpenAI:
    _clients.append(AsyncOpenAI(api_key="key", base_url=url, max_retries=0))
    return _clients[-1]


def responses_agent(url: str, **more: Any) -> Agent[Any]:
    return Agent(name="a", model=OpenAIResponsesModel("m", client(url)), **more)


def adapter(agent: Agent[Any], context: object = None) -> OpenAIAgentsModel:
    functions = {each.name: each for each in agent.tools if isinstance(each, FunctionTool)}
    return OpenAIAgentsModel(agent, context, functions)


def request(history: History = HI, *tools: ToolSpec, **more: Any) -> ModelRequest:
    return ModelRequest("Be brief.", history, tools, **more)


async def events_of(model: OpenAIAgentsModel, asking: ModelRequest) -> list[ModelEvent]:
    """Return a model's events without keep-alives."""
    async with asyncio.timeout(WAIT_S):
        events = [each async for each in model.stream(asking)]
    return [each for each in events if not isinstance(each, KeepAlive | Working)]


async def error_of(agent: Agent[Any]) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await events_of(adapter(agent), request())
    return caught.value


async def test_text_thoughts_and_calls_arrive_as_they_are_streamed() -> None:
    thought = event("reasoning_summary_text.delta", item_id="r", output_index=0, summary_index=0, delta="Hm.")
    item = call_item('{"path":"a"}', "c1")
    response = [thought, *text_deltas("I ", "look."), *call_events('{"path":"a"}', "c1"), completed(item)]
    async with responses_server(response) as server:
        agent = responses_agent(server.url, instructions="Be brief.", tools=[read])
        model = adapter(agent)
        assert model.name == "openai-agents:m"
        assert await events_of(model, request(HI, spec_of(read))) == [
            ThinkingDelta("Hm."),
            TextDelta("I "),
            TextDelta("look."),
            ToolCallRequested("c1", "read", '{"path":"a"}'),
            Finished(Finish.CALLS, "m-1", Usage(7, 2, 5)),
        ]


async def test_a_request_has_the_agents_settings_its_tools_and_the_whole_history() -> None:
    async with responses_server(HELLO) as server:
        agent = responses_agent(
            server.url,
            instructions="Be brief.",
            tools=[read, WebSearchTool()],
            model_settings=ModelSettings(temperature=0.5, max_tokens=9, extra_args={"service_tier": "flex"}),
        )
        await events_of(adapter(agent), request(WITH_RESULT, spec_of(read), OTHER, session="s"))
        (body,) = server.bodies
    assert body["instructions"] == "Be brief."
    assert [each.get("type", each.get("role")) for each in body["input"]][-2:] == [
        "function_call",
        "function_call_output",
    ]
    assert body["input"][-1]["output"] == "it is empty"
    words = [{"type": "output_text", "text": "I look.", "annotations": []}]
    assert body["input"][1] == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": words,
    }
    settings = (body["temperature"], body["max_output_tokens"], body["service_tier"], body["stream"])
    assert settings == (0.5, 9, "flex", True)
    assert [(each["type"], each.get("name"), each.get("strict")) for each in body["tools"]] == [
        ("function", "other", False),
        ("function", "read", True),
        ("web_search", None, None),
    ]
    assert body["tools"][1]["parameters"]["additionalProperties"] is False
    assert "prompt_cache_key" not in body  # another server may refuse it


async def test_a_cache_key_of_the_session_is_sent_if_the_model_supports_it() -> None:
    async with responses_server(HELLO, HELLO, HELLO) as server:
        agent = responses_agent(server.url)
        agent.model._supports_default_prompt_cache_key = lambda: True  # as for OpenAI's own servers
        await events_of(adapter(agent), request(session="s"))
        await events_of(adapter(agent), request(session="s", is_ephemeral=True))
        agent.model_settings.extra_args = {"prompt_cache_key": "own"}
        await events_of(adapter(agent), request(session="s"))
        assert [each.get("prompt_cache_key") for each in server.bodies] == [cache_key_of("s"), None, "own"]


async def test_a_forced_tool_is_forced_once_in_a_turn_and_never_without_tools() -> None:
    async with responses_server(HELLO, HELLO, HELLO, HELLO) as server:
        agent = responses_agent(
            server.url, tools=[read], model_settings=ModelSettings(tool_choice="required")
        )
        again = WITH_RESULT.then(Step(Response((Text("Empty."),)))).then(UserMessage.of("again"))
        for history in (HI, WITH_RESULT, again):
            await events_of(adapter(agent), request(history, spec_of(read)))
        await events_of(adapter(agent), request())
        assert [each.get("tool_choice") for each in server.bodies] == ["required", None, "required", None]


@dataclass
class Guest:
    name: str


def plain_instructions(context: Any, agent: Agent[Any]) -> str:
    return f"{agent.name} serves {context.context.name}."


async def awaited_instructions(context: Any, agent: Agent[Any]) -> str:
    return plain_instructions(context, agent)


def failing_instructions(context: Any, agent: Agent[Any]) -> str:
    raise KeyError(agent.name)


@pytest.mark.parametrize("instructions", [plain_instructions, awaited_instructions])
async def test_functions_that_make_instructions_receive_the_context(instructions: Any) -> None:
    async with responses_server(HELLO, HELLO) as server:
        agent = responses_agent(server.url, instructions=instructions)
        model = adapter(agent, Guest("Ada"))
        await events_of(model, ModelRequest("", HI))
        await events_of(model, ModelRequest("Make a title.", HI, is_ephemeral=True))
        assert [each["instructions"] for each in server.bodies] == ["a serves Ada.", "Make a title."]


async def test_failing_instructions_reject_the_request() -> None:
    agent = responses_agent("http://127.0.0.1:1/v1", instructions=failing_instructions)
    error = await error_of(agent)
    assert (type(error), error.message) == (
        ModelRejectedError,
        "the instructions of 'a' failed with KeyError: 'a'",
    )


async def test_a_stored_prompt_of_the_provider_is_sent() -> None:
    async with responses_server(HELLO) as server:
        agent = responses_agent(server.url, prompt=lambda data: {"id": f"of-{data.context.context.name}"})
        await events_of(adapter(agent, Guest("Ada")), request())
        assert server.bodies[0]["prompt"]["id"] == "of-Ada"


async def test_a_tool_that_the_provider_runs_is_shown() -> None:
    item = {
        "type": "web_search_call",
        "id": "w1",
        "status": "completed",
        "action": {"type": "search", "query": "Oslo"},
    }
    added = event("output_item.added", output_index=0, item={**item, "status": "in_progress"})
    response = [
        added,
        event("output_item.done", output_index=0, item=item),
        *text_deltas("Rain."),
        completed(item),
    ]
    async with responses_server(response) as server:
        started, ended, *rest = await events_of(
            adapter(responses_agent(server.url, tools=[WebSearchTool()])), request()
        )
    assert isinstance(started, UpstreamCallStarted)
    assert (started.id, started.name, "Oslo" in started.arguments) == ("w1", "web_search", True)
    assert ended == UpstreamCallEnded("w1", "completed")
    assert rest[0] == TextDelta("Rain.")


async def test_a_model_of_chat_completions_gives_the_same_events() -> None:
    first = stream(
        delta(content="I look."),
        delta(tool_calls=[call(0, '{"path":"a"}', "c1", "read")]),
        delta("tool_calls"),
    )
    second = stream(delta(content="Emp"), delta("stop", content="ty."), usage(7, 2))
    async with chat_server(first, second) as server:
        model = OpenAIChatCompletionsModel("m", client(server.url))
        agent = Agent(name="a", model=model, instructions="Be brief.", tools=[read])
        events = await events_of(adapter(agent), request(HI, spec_of(read)))
        assert [each for each in events if not isinstance(each, Finished)] == [
            TextDelta("I look."),
            ToolCallRequested("c1", "read", '{"path":"a"}'),
        ]
        events = await events_of(adapter(agent), request(WITH_RESULT, spec_of(read)))
        assert events[:2] == [TextDelta("Emp"), TextDelta("ty.")]
        assert isinstance(events[-1], Finished)
        assert events[-1].usage == Usage(7, 2)
        sent = server.bodies[1]["messages"]
    assert [each["role"] for each in sent] == ["system", "user", "assistant", "tool"]
    assert (sent[2]["tool_calls"][0]["id"], sent[3]["content"]) == ("c1", "it is empty")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(429, **{"retry-after": "7"}), ModelRateLimitedError),
        (refusal(500), ModelUnavailableError),
        (refusal(401), ModelAccessError),
        (refusal(400), ModelRejectedError),
        (refusal(400, {"code": "context_length_exceeded", "message": "too long"}), ContextOverflowError),
        (stream(ending="cut"), ModelUnavailableError),
        (stream(event("output_text.delta", delta="Hel"), is_marked=False), ModelUnavailableError),
        (stream(event("failed", response={"error": {"code": "server_error"}})), ModelUnavailableError),
        (Answer([b"data: {\n\n"]), ModelUnavailableError),
    ],
)
async def test_failures_have_types(answer: Answer, kind: type[ModelError]) -> None:
    async with chat_server(answer, path="/v1/responses") as server:
        error = await error_of(responses_agent(server.url))
    assert type(error) is kind
    if answer.headers:
        assert getattr(error, "retry_after_s", None) == 7.0


async def test_an_unreachable_server_is_a_retriable_error() -> None:
    assert type(await error_of(responses_agent("http://127.0.0.1:1/v1"))) is ModelUnavailableError


async def test_the_timeout_of_the_settings_applies_to_the_whole_answer() -> None:
    async with responses_server(HELLO, links=[Link(events_max=3, ending="hang")]) as server:
        error = await error_of(responses_agent(server.url, model_settings=ModelSettings(timeout=1.0)))
        assert (type(error), error.message) == (
            ModelStalledError,
            "openai-agents:m sent no complete answer within 1 s",
        )
        await asyncio.wait_for(server.left.wait(), WAIT_S)


async def test_closing_the_answer_closes_the_connection() -> None:
    async with responses_server(HELLO, links=[Link(events_max=3, ending="hang")]) as server:
        answer = adapter(responses_agent(server.url)).stream(request())
        async for each in answer:
            if isinstance(each, TextDelta):
                break
        await answer.aclose()
        await asyncio.wait_for(server.left.wait(), WAIT_S)


class Own(Model):  # type: ignore[misc, unused-ignore]
    """A model of the application that does not number its events, and ends without a last one."""

    async def get_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        for word in ("all ", "done"):
            yield ResponseTextDeltaEvent(
                content_index=0,
                delta=word,
                item_id="i",
                logprobs=[],
                output_index=0,
                sequence_number=0,
                type="response.output_text.delta",
            )


async def test_a_model_of_the_application_may_number_freely_but_must_end_its_answer() -> None:
    answer = adapter(Agent(name="a", model=Own())).stream(request())
    assert [await anext(answer), await anext(answer)] == [TextDelta("all "), TextDelta("done")]
    with pytest.raises(ModelUnavailableError, match="the stream of openai-agents:Own broke off"):
        await anext(answer)
