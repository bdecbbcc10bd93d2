"""pydantic-ai's models as models of ours: its test doubles, and its real OpenAI model against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import anthropic
import httpx2
import msgspec
import openai
import pytest
from pydantic_ai import messages
from pydantic_ai.models import Model as PydanticModel
from pydantic_ai.models import StreamedResponse
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.function import AgentInfo, DeltaThinkingPart, DeltaToolCall, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelMissingError,
    ModelQuotaError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelUnavailableError,
    UsageError,
)
from midstream.history.messages import (
    File,
    Finish,
    History,
    Outcome,
    Response,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
    Usage,
    UserMessage,
)
from midstream.models.model import Model
from midstream.models.pydantic_ai import PydanticAIModel, render_request
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ModelRequest,
    ResponseBuilder,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)
from midstream.session.call_references import AttemptRef
from tests.history.codecs import messages_wire as claudes
from tests.models.chat_server import WAIT_S, Answer, call, chat_server, delta, refusal, silence, stream, usage
from tests.spec import spec

READ = ToolSpec("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
REQUEST = ModelRequest("Be brief.", History((UserMessage.of("hi"),)), (READ,))
HELLO = stream(delta(content="Hel"), delta("stop", content="lo"), usage(7, 2))


async def events_of_model(model: Model, request: ModelRequest = REQUEST) -> list[ModelEvent]:
    async with asyncio.timeout(WAIT_S):
        events = [event async for event in model.stream(request)]
    return [event for event in events if not isinstance(event, KeepAlive | Working)]


@contextlib.asynccontextmanager
async def openai_at(url: str) -> AsyncIterator[PydanticModel]:
    """Make pydantic-ai's real OpenAI model; its own retries are off, as the docstring advises."""
    async with httpx2.AsyncClient() as http:
        client = openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, http_client=http)
        yield OpenAIChatModel("m-1", provider=OpenAIProvider(openai_client=client))


async def answered_by(answer: Answer) -> list[ModelEvent]:
    async with chat_server(answer) as server, openai_at(server.url) as model:
        return await events_of_model(PydanticAIModel(model))


def response_of(events: Sequence[ModelEvent]) -> Response:
    builder = ResponseBuilder(AttemptRef(1, 1, 1))
    for event in events:
        builder.add(event)
    response = builder.response()
    assert response is not None
    return response


async def test_a_test_model_calls_and_then_answers() -> None:
    model = PydanticAIModel(TestModel(custom_output_text="all done"))
    assert model.name == "test:test"
    asked = response_of(await events_of_model(model))
    assert [made.name for made in asked.calls] == ["read"]
    step = Step(asked, (ToolResult(asked.calls[0].id, "X"),))
    response = response_of(
        await events_of_model(model, ModelRequest("", REQUEST.history.then(step), (READ,)))
    )
    assert (response.text, response.finish) == ("all done", Finish.STOP)


async def test_thinking_text_and_calls_are_converted() -> None:
    async def stream_response(
        sent: list[messages.ModelMessage], info: AgentInfo
    ) -> AsyncIterator[str | dict[int, DeltaThinkingPart] | dict[int, DeltaToolCall]]:
        yield {0: DeltaThinkingPart(content="let me ")}
        yield {0: DeltaThinkingPart(content="see", signature="sig")}
        yield "I will "
        yield "look."
        yield {1: DeltaToolCall(name="read", json_args='{"path"', tool_call_id="a")}
        yield {2: DeltaToolCall(name="read", json_args='{"path": "y"}', tool_call_id="b")}
        yield {1: DeltaToolCall(json_args=': "x"}')}

    *events, finished = await events_of_model(PydanticAIModel(FunctionModel(stream_function=stream_response)))
    assert events == [
        ThinkingDelta("let me "),
        ThinkingDelta("see", "sig"),
        TextDelta("I will "),
        TextDelta("look."),
        ToolCallRequested("a", "read", '{"path": "x"}'),
        ToolCallRequested("b", "read", '{"path": "y"}'),
    ]
    assert isinstance(finished, Finished)
    assert finished.finish is Finish.CALLS


async def test_the_provider_receives_the_tools_and_the_instructions() -> None:
    seen: list[tuple[AgentInfo, str | None]] = []

    async def stream_response(sent: list[messages.ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        last = sent[-1]
        assert isinstance(last, messages.ModelRequest)
        seen.append((info, last.instructions))
        yield "ok"

    await events_of_model(PydanticAIModel(FunctionModel(stream_function=stream_response)))
    (info, instructions) = seen[0]
    assert instructions == "Be brief."
    found = [(each.name, each.description, each.parameters_json_schema) for each in info.function_tools]
    assert found == [("read", "Read a file.", READ.parameters)]


class RecordingTransport(httpx2.AsyncBaseTransport):
    """A transport that records the requests to Anthropic, and refuses or answers with a stream."""

    def __init__(self, answer: bytes = b"") -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answer = answer

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.bodies.append(msgspec.json.decode(await request.aread()))
        if self._answer:
            return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self._answer)
        return httpx2.Response(400, json={"type": "error", "error": {"type": "invalid", "message": "no"}})


def claude(seen: RecordingTransport) -> PydanticModel:
    client = anthropic.AsyncAnthropic(
        api_key="key", max_retries=0, http_client=httpx2.AsyncClient(transport=seen)
    )
    return AnthropicModel("claude-test", provider=AnthropicProvider(anthropic_client=client))


async def test_redacted_thinking_is_received_and_sent_back_unchanged() -> None:
    thoughts = [*claudes.thought(0, "hm"), *claudes.redacted(1, "c2VhbGVk")]
    words = [*claudes.text(2, "I look."), *claudes.call(3, "{}")]
    events = [claudes.message_start("claude-test"), *thoughts, *words, *claudes.message_end("tool_use")]
    seen = RecordingTransport(claudes.wire(events))
    model = PydanticAIModel(claude(seen))
    responded = response_of(await events_of_model(model))
    assert responded.parts[:2] == (Thinking("hm", "c2ln"), Thinking("", "c2VhbGVk", is_redacted=True))

    history = REQUEST.history.then(Step(responded, (ToolResult("toolu_1", "X"),)))
    await events_of_model(model, ModelRequest("", history, (READ,)))
    (_, content, _) = unmarked(seen.bodies[1]["messages"])
    assert content["content"][:2] == [
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "c2VhbGVk"},
    ]


CALL_STEP = Step(Response((ToolCall("a", "read", "{}"),), Finish.CALLS), (ToolResult("a", "X"),))
CLAUDES = [
    ModelRequest("Be brief.", REQUEST.history, (READ,)),
    ModelRequest("Be brief.", REQUEST.history.then(CALL_STEP), (READ,)),
    ModelRequest(
        "Be brief.",
        REQUEST.history.then(CALL_STEP).then(Step(Response((Text("X."),)))).then(UserMessage.of("on")),
        (READ,),
    ),
]


@spec("REUSE-61")
async def test_requests_to_anthropic_have_cache_marks() -> None:
    seen = RecordingTransport()
    model = PydanticAIModel(claude(seen))
    for request in CLAUDES:
        with pytest.raises(ModelRejectedError):
            await events_of_model(model, request)

    assert all("cache_control" in body for body in seen.bodies)  # Its mark at the end of the messages.
    assert all("cache_control" in body["tools"][-1] for body in seen.bodies)
    assert all("cache_control" in body["system"][-1] for body in seen.bodies)
    opening = [body["messages"][0]["content"][0] for body in seen.bodies]
    assert ["cache_control" in block for block in opening] == [False, True, True]
    assert {block["text"] for block in opening} == {"hi"}
    before, then, now = (msgspec.json.encode(unmarked(body["messages"]))[:-1] for body in seen.bodies)
    assert (then.startswith(before), now.startswith(then)) == (True, True)


def unmarked(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, list):
        return [unmarked(each) for each in value]
    if isinstance(value, dict):
        return {key: unmarked(each) for key, each in value.items() if key != "cache_control"}
    return value


@spec("REUSE-61")
@pytest.mark.parametrize(
    ("options", "request_of"),
    [
        ({"is_cached": False}, {}),
        ({"settings": {"anthropic_cache": False}}, {}),
        ({}, {"is_ephemeral": True}),
    ],
)
async def test_nothing_is_marked_where_it_is_disabled(
    options: dict[str, Any], request_of: dict[str, Any]
) -> None:
    seen = RecordingTransport()
    request = msgspec.structs.replace(CLAUDES[1], **request_of)
    with pytest.raises(ModelRejectedError):
        await events_of_model(PydanticAIModel(claude(seen), **options), request)

    assert b"cache_control" not in msgspec.json.encode(seen.bodies)


def test_a_history_is_rendered_completely() -> None:
    made = (ToolCall("a", "read", '{"path": "x"}'), ToolCall("b", "read", "{broken"))
    responded = Response((Thinking("hm", "sig"), Text("I will look."), *made), Finish.CALLS, "test")
    history = History(
        (
            UserMessage.of("hi"),
            Step(responded, (ToolResult("a", "X"), ToolResult("b", "no", Outcome.ERROR))),
            Step(Response((Thinking("nothing to say"),), model="test")),
            UserMessage.of("go on"),
        )
    )
    (asking, answering, results, continuing), _ = render_request(history, "Be brief.", TestModel())
    assert [part.part_kind for part in asking.parts] == ["user-prompt"]
    assert answering.parts == [
        messages.ThinkingPart("hm", signature="sig", provider_name="test"),
        messages.TextPart("I will look."),
        messages.ToolCallPart("read", '{"path": "x"}', tool_call_id="a"),
        messages.ToolCallPart("read", '{"_raw":"{broken"}', tool_call_id="b"),
    ]
    kinds = [(part.part_kind, getattr(part, "outcome", None)) for part in results.parts]
    assert kinds == [("tool-return", "success"), ("tool-return", "failed")]
    assert [part.part_kind for part in continuing.parts] == ["user-prompt"]


def test_the_thinking_of_another_model_is_not_sent() -> None:
    responded = Response((Thinking("hm", "sig"), Text("yes")), model="another")
    ((_, answering), _) = render_request(History((UserMessage.of("hi"), Step(responded))), "", TestModel())
    assert answering.parts == [messages.TextPart("yes")]


def test_files_are_converted_by_their_kind() -> None:
    files = (
        File("image/png", data="AAAA"),
        File("image/png", url="https://example.org/a.png"),
        File("audio/wav", url="https://example.org/a.wav"),
        File("video/mp4", url="https://example.org/a.mp4"),
        File("application/pdf", url="https://example.org/a.pdf"),
    )
    ((asking,), _) = render_request(History((UserMessage(files),)), "", TestModel())
    (prompt,) = asking.parts
    assert isinstance(prompt, messages.UserPromptPart)
    kinds = [type(part) for part in prompt.content]
    assert kinds == [
        messages.BinaryImage,
        messages.ImageUrl,
        messages.AudioUrl,
        messages.VideoUrl,
        messages.DocumentUrl,
    ]


def test_an_invalid_attachment_does_not_end_the_session() -> None:
    history = History((UserMessage((File("image/png", data="!"),)),))
    ((asking,), _) = render_request(history, "", TestModel())
    (prompt,) = asking.parts
    assert isinstance(prompt, messages.UserPromptPart)
    assert prompt.content == "[attached file: image/png, which you cannot be shown]"


def test_an_attachment_arrives_byte_for_byte() -> None:
    history = History((UserMessage((File("image/png", data="++//AA=="),)),))
    ((asking,), _) = render_request(history, "", TestModel())
    (prompt,) = asking.parts
    assert isinstance(prompt, messages.UserPromptPart)
    image = prompt.content[0]
    assert isinstance(image, messages.BinaryContent)
    assert image.data == b"\xfb\xef\xff\x00"


@pytest.mark.parametrize(
    ("system", "name", "profile"),
    [
        ("test", "m", "pydantic-ai"),
        ("bedrock", "mistral.large", "bedrock-mistral"),
        ("deepseek", "r", "deepseek"),
    ],
)
def test_the_provider_decides_the_profile(system: str, name: str, profile: str) -> None:
    class Named(TestModel):
        @property
        def system(self) -> str:
            return system

    assert PydanticAIModel(Named(model_name=name))._profile == profile
    assert PydanticAIModel(Named(model_name=name), profile="portable")._profile == "portable"


async def test_a_tool_loop_that_lost_its_thinking_continues_without_it() -> None:
    seen: list[object] = []

    async def stream_response(sent: list[messages.ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        seen.append((info.model_settings or {}).get("anthropic_thinking"))
        yield "ok"

    thinking = {"type": "enabled", "budget_tokens": 2000}
    model = PydanticAIModel(
        FunctionModel(stream_function=stream_response),
        settings=cast("ModelSettings", {"anthropic_thinking": thinking}),
        profile="anthropic",
    )
    await events_of_model(model)
    step = Step(Response((ToolCall("a", "read"),)), (ToolResult("a", "X"),))
    await events_of_model(model, ModelRequest("", REQUEST.history.then(step), (READ,)))
    assert seen == [thinking, {"type": "disabled"}]


async def test_a_real_model_streams_text_with_its_usage() -> None:
    assert await answered_by(HELLO) == [
        TextDelta("Hel"),
        TextDelta("lo"),
        Finished(Finish.STOP, "m-1", Usage(7, 2)),
    ]


async def test_a_real_model_makes_parallel_calls() -> None:
    events = await answered_by(
        stream(
            delta(tool_calls=[call(0, '{"path": ', "a", "read")]),
            delta(tool_calls=[call(1, "{", "b", "read"), call(0, '"x"}')]),
            delta("tool_calls", tool_calls=[call(1, "}")]),
        )
    )
    assert events == [
        ToolCallRequested("a", "read", '{"path": "x"}'),
        ToolCallRequested("b", "read", "{}"),
        Finished(Finish.CALLS, "m-1", Usage()),
    ]


async def test_a_real_model_streams_its_thinking() -> None:
    events = await answered_by(stream(delta(reasoning_content="hm"), delta("stop", content="yes")))
    assert [type(event) for event in events if not isinstance(event, Finished)][-1] is TextDelta
    assert any(isinstance(event, ThinkingDelta) and event.text == "hm" for event in events)


async def test_the_request_carries_the_whole_conversation() -> None:
    step = Step(Response((ToolCall("a", "read", '{"path": "x"}'),)), (ToolResult("a", "X"),))
    request = ModelRequest("Be brief.", REQUEST.history.then(step), (READ,))
    async with chat_server(HELLO) as server, openai_at(server.url) as model:
        await events_of_model(PydanticAIModel(model), request)
        sent = server.bodies[0]["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[2]["tool_calls"][0]["id"] == sent[3]["tool_call_id"] == "a"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(429, {"message": "slow down"}, **{"retry-after": "3"}), ModelRateLimitedError),
        (refusal(500), ModelUnavailableError),
        (refusal(429, {"message": "pay first", "code": "insufficient_quota"}), ModelQuotaError),
        (refusal(400), ModelRejectedError),
        (refusal(401), ModelAccessError),
        (refusal(400, {"message": "long", "code": "context_length_exceeded"}), ContextOverflowError),
        (stream(delta(content="Hel"), ending="cut"), ModelUnavailableError),
        (stream(delta(content="Hel"), {"error": {"message": "overloaded"}}), ModelUnavailableError),
        (stream(delta("content_filter")), ModelFilteredError),
    ],
    ids=["429", "500", "quota", "400", "401", "overflow", "cut", "error-inside", "filter"],
)
async def test_each_failure_is_typed(answer: Answer, kind: type[ModelError]) -> None:
    with pytest.raises(ModelError) as caught:
        await answered_by(answer)
    assert type(caught.value) is kind


async def test_the_delay_requested_by_a_provider_is_kept() -> None:
    with pytest.raises(ModelUnavailableError) as caught:
        await answered_by(refusal(429, **{"retry-after": "3"}))
    assert caught.value.retry_after_s == 3.0


async def test_an_absent_provider_is_unavailable() -> None:
    async with chat_server() as server:
        gone = server.url
    async with openai_at(gone) as model:
        with pytest.raises(ModelUnavailableError):
            await events_of_model(PydanticAIModel(model))


async def test_closing_the_iterator_closes_the_connection() -> None:
    async with (
        chat_server(stream(delta(content="Hel"), ending="hang")) as server,
        openai_at(server.url) as model,
        asyncio.timeout(WAIT_S),
    ):
        async with contextlib.aclosing(PydanticAIModel(model).stream(REQUEST)) as events:
            assert await anext(events) == TextDelta("Hel")
        await server.left.wait()


async def test_a_provider_that_never_answers_can_be_cancelled_and_called_again() -> None:
    async with chat_server(silence(), HELLO) as server, openai_at(server.url) as model:
        async with asyncio.timeout(WAIT_S):
            asking = asyncio.create_task(events_of_model(PydanticAIModel(model)))
            await server.asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await server.left.wait()
        assert TextDelta("lo") in await events_of_model(PydanticAIModel(model))
    assert len(set(server.connections)) == 2


def test_an_unknown_model_or_a_missing_key_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UsageError, match="Unknown model"):
        PydanticAIModel("nobody:nothing")
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        PydanticAIModel("openai:gpt-5")
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    assert PydanticAIModel("openai:gpt-5").name == "openai:gpt-5"


def test_a_provider_with_a_missing_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "groq", None)
    monkeypatch.delitem(sys.modules, "pydantic_ai.models.groq", raising=False)
    with pytest.raises(ModelMissingError, match="groq"):
        PydanticAIModel("groq:llama")


def test_without_pydantic_ai_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_ai", None)
    monkeypatch.delitem(sys.modules, "midstream.models.pydantic_ai")
    with pytest.raises(ModelMissingError, match=r"pip install 'midstream\[models\]'"):
        importlib.import_module("midstream.models.pydantic_ai")


class Google(TestModel):
    """A double of Google's models: its calls have a thought signature."""

    @property
    def system(self) -> str:
        return "google"

    @contextlib.asynccontextmanager
    async def request_stream(self, *args: Any, **more: Any) -> AsyncIterator[StreamedResponse]:  # noqa: ANN401 - its parameters
        async with super().request_stream(*args, **more) as streamed:
            whole = streamed.get

            def signed() -> messages.ModelResponse:
                response = whole()
                for part in response.parts:
                    if isinstance(part, messages.ToolCallPart):
                        part.provider_details = {"thought_signature": "c2ln"}
                return response

            vars(streamed)["get"] = signed
            yield streamed


async def test_a_thought_signature_is_received_with_its_call_and_sent_back() -> None:
    model = Google(model_name="gemini-3-pro")
    *_, called, finished = await events_of_model(PydanticAIModel(model))
    assert isinstance(called, ToolCallRequested)
    assert called.signature == "c2ln"
    assert isinstance(finished, Finished)

    builder = ResponseBuilder(AttemptRef(1, 1, 1))
    for event in (called, finished):
        builder.add(event)
    response = builder.response()
    assert response is not None
    history = History((UserMessage.of("hi"), Step(response, (ToolResult(response.calls[0].id, "X"),))))
    sent, _ = render_request(history, "", model)
    (back,) = [part for message in sent for part in message.parts if isinstance(part, messages.ToolCallPart)]
    assert (back.provider_name, back.provider_details) == ("google", {"thought_signature": "c2ln"})
    other, _ = render_request(history, "", Google(model_name="gemini-2.5-pro"))
    (unsigned,) = [p for message in other for p in message.parts if isinstance(p, messages.ToolCallPart)]
    assert unsigned.provider_details is None
