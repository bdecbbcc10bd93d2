"""The gateway with independent clients: the SDKs of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.agents.agent_runs import SILENCE_MAX_S
from midstream.agents.pool import Pooled
from midstream.agents.upstream_abilities import Abilities
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UpstreamBusyError,
    UsageError,
)
from midstream.history.messages import Finish, Step, Text, Thinking, Usage, UserMessage
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
)
from midstream.server import uvicorn_server as serve_module
from midstream.server.uvicorn_server import serve
from midstream.session.model_settings import ModelSettings
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel, Stall, text
from midstream.testing.scripted_upstream import ScriptedUpstream
from tests.dialects.gateway_serving import (
    TOKEN,
    WAIT_S,
    asgi_client,
    chat_request,
    make_gateway,
    served,
    serving,
)
from tests.search import tried
from tests.spec import spec

HELLO: list[ModelEvent] = [
    ThinkingDelta("hm"),
    TextDelta("Hello "),
    TextDelta("you"),
    Finished(Finish.STOP, "m-1", Usage(10, 5, 3, 2)),
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@spec("REUSE-66")
async def test_the_openai_client_receives_chat_completions() -> None:
    async with served([HELLO]) as gateway, gateway.openai() as client:
        whole = await client.chat.completions.create(model="m", messages=MESSAGES)
        assert whole.choices[0].message.content == "Hello you"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        counted = (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens)
        assert (counted, whole.usage.prompt_tokens_details.cached_tokens) == ((10, 5, 15), 3)
        assert whole.usage.prompt_tokens_details.model_dump()["cache_write_tokens"] == 2

        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="m", messages=MESSAGES, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        words = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(word for word in words if word) == "Hello you"
        assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [15]
        assert chunks[-2].choices[0].finish_reason == "stop"


@spec("REUSE-66")
async def test_the_openai_client_calls_a_tool_and_sends_its_result() -> None:
    asks: list[ModelEvent] = [
        TextDelta("I look."),
        ToolCallRequested("call_7", "look", '{"at": "it"}'),
        Finished(Finish.CALLS),
    ]
    async with served([asks, text("It is there.")]) as gateway, gateway.openai() as client:
        tools: Any = [TOOL]
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, tools=tools, stream=True)
        pieces = [chunk.choices[0] async for chunk in stream]
        calls = [call for piece in pieces for call in piece.delta.tool_calls or ()]
        assert (calls[0].id, calls[0].function and calls[0].function.name) == ("call_7", "look")
        assert "".join(call.function.arguments or "" for call in calls if call.function) == '{"at": "it"}'
        assert pieces[-1].finish_reason == "tool_calls"

        messages: list[Any] = [
            *MESSAGES,
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {"id": "call_7", "type": "function", "function": {"name": "look", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_7", "content": "a tree"},
        ]
        answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert answer.choices[0].message.content == "It is there."
        last = gateway.model.requests[-1].history.entries[-1]
        assert isinstance(last, Step)
        assert [(result.call_id, result.content) for result in last.results] == [("call_7", "a tree")]


@spec("REUSE-66")
async def test_the_openai_client_receives_responses() -> None:
    asks: list[ModelEvent] = [
        *HELLO[:-1],
        ToolCallRequested("call_7", "look", '{"at":1}'),
        Finished(Finish.CALLS),
    ]
    async with served([asks]) as gateway, gateway.openai() as client:
        tools: Any = [{"type": "function", **TOOL["function"], "strict": False}]
        async with client.responses.stream(model="m", input="hi", tools=tools) as stream:
            events = [event async for event in stream]
            whole = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        assert (whole.output_text, whole.status) == ("Hello you", "completed")
        kinds = [event.type for event in events]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3

        following = await client.responses.create(
            model="m",
            previous_response_id=whole.id,
            input=[{"type": "function_call_output", "call_id": "call_7", "output": "a tree"}],
            tools=tools,
        )
        assert following.previous_response_id == whole.id
        entries = gateway.model.requests[-1].history.entries
        assert [type(entry) for entry in entries] == [UserMessage, Step]
        items = await client.responses.input_items.list(whole.id)
        assert [item.type for item in items.data] == ["message"]


@spec("REUSE-66")
async def test_the_anthropic_client_receives_messages() -> None:
    asks: list[ModelEvent] = [
        ThinkingDelta("hm", "signed"),
        TextDelta("I look."),
        ToolCallRequested("toolu_7", "look", '{"at": "it"}'),
        Finished(Finish.CALLS, "m-1", Usage(10, 5, 3, 2)),
    ]
    async with served([asks, text("It is there.")]) as gateway, gateway.anthropic() as client:
        tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        async with client.messages.stream(
            model="m", max_tokens=99, messages=MESSAGES, tools=tools, thinking=thinking, system="Be brief."
        ) as stream:
            message = await stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert (message.content[0].signature, message.content[2].input) == ("signed", {"at": "it"})  # type: ignore[union-attr]  # its types are above
        assert message.stop_reason == "tool_use"
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (5, 3)
        assert message.usage.cache_creation_input_tokens == 2

        result: Any = {"type": "tool_result", "tool_use_id": "toolu_7", "content": "a tree"}
        messages: list[Any] = [
            *MESSAGES,
            {"role": "assistant", "content": [block.model_dump() for block in message.content]},
            {"role": "user", "content": [result]},
        ]
        answer = await client.messages.create(model="m", max_tokens=99, messages=messages, tools=tools)
        assert [block.model_dump()["text"] for block in answer.content] == ["It is there."]
        request = gateway.model.requests[0]
        assert (request.instructions, [tool.name for tool in request.tools]) == ("Be brief.", ["look"])
        assert (await client.messages.count_tokens(model="m", messages=MESSAGES)).input_tokens > 0


async def test_thinking_is_shown_to_anthropic_clients_only_where_they_request_it() -> None:
    async with served([HELLO]) as gateway, gateway.anthropic() as client:
        message = await client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
        assert [block.type for block in message.content] == ["text"]


@spec("REUSE-67")
async def test_a_tool_run_by_the_upstream_is_never_a_call_for_the_client() -> None:
    script: list[ModelEvent] = [
        UpstreamCallStarted("u1", "Bash", '{"command": "ls"}'),
        UpstreamCallEnded("u1", "README.md"),
        TextDelta("One file."),
        Finished(),
    ]
    for tools in ([], [TOOL]):
        async with served([script]) as gateway, gateway.openai() as client:
            given: Any = {"tools": tools} if tools else {}
            whole = await client.chat.completions.create(model="m", messages=MESSAGES, **given)
            message = whole.choices[0].message
            assert (message.content, message.tool_calls) == ("One file.", None)
            thought = message.model_dump()["reasoning_content"]
            assert "Bash" in thought
            assert "README.md" in thought
    async with served([script], shows_upstream_calls=False) as gateway, gateway.openai() as client:
        whole = await client.chat.completions.create(model="m", messages=MESSAGES)
        assert "reasoning_content" not in whole.choices[0].message.model_dump()


@spec("REUSE-67")
async def test_a_client_without_tools_receives_no_calls() -> None:
    script: list[ModelEvent] = [
        ToolCallRequested("c1", "look", "{}"),
        TextDelta("Done."),
        Finished(Finish.CALLS),
    ]
    async with served([script]) as gateway, gateway.openai() as client:
        choice = (await client.chat.completions.create(model="m", messages=MESSAGES)).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
            "Done.",
            None,
            "stop",
        )


REFUSALS: list[tuple[ModelError, int, str]] = [
    (ModelUnavailableError("slow down", retry_after_s=7.0), 429, "rate_limit_error"),
    (ModelUnavailableError("the connection broke"), 500, "api_error"),
    (ModelOverloadedError("overloaded"), 529, "overloaded_error"),
    (ModelRateLimitedError("slow down"), 429, "rate_limit_error"),
    (ModelNotFoundError("no such model"), 404, "not_found_error"),
    (UpstreamBusyError("in another run"), 409, "conflict_error"),
    (ModelStalledError("silence"), 504, "timeout_error"),
    (ModelRejectedError("never"), 400, "invalid_request_error"),
    (ModelAccessError("the key"), 403, "permission_error"),
    (ContextOverflowError("too long"), 400, "invalid_request_error"),
    (ModelFilteredError("filtered"), 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), REFUSALS)
@spec("REUSE-68")
async def test_an_error_before_the_first_token_has_its_status_in_every_api(
    error: ModelError, status: int, kind: str
) -> None:
    async with served([[error]]) as gateway:
        async with gateway.anthropic(max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError) as met:
                await client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
            assert met.value.status_code == status
            assert met.value.response.json()["error"]["type"] == kind
            with pytest.raises(anthropic.APIStatusError) as met:
                await client.messages.create(model="m", max_tokens=9, messages=MESSAGES, stream=True)
            assert met.value.status_code == status
        async with gateway.openai(max_retries=0) as other:
            with pytest.raises(openai.APIStatusError) as seen:
                await other.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            assert seen.value.status_code == (503 if status == 529 else status)
            with pytest.raises(openai.APIStatusError):
                await other.responses.create(model="m", input="hi")


async def test_a_context_overflow_is_recognisable_by_code_and_by_text() -> None:
    async with served([[ContextOverflowError("too long")]]) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        answer = await gateway.http.post("/v1/messages", json=chat_request("hi"))
        assert answer.json()["error"]["message"].startswith("prompt is too long")


async def test_errors_carry_a_retry_delay_or_a_request_not_to_retry() -> None:
    async with served([[ModelUnavailableError("slow down", retry_after_s=7.0)]]) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))
        assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("7", "true")
    async with served([[ModelRejectedError("never")]]) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))
        assert answer.headers["x-should-retry"] == "false"


@spec("REUSE-68")
async def test_an_error_after_the_first_token_is_in_the_stream() -> None:
    async with served([[TextDelta("Hel"), ModelUnavailableError("gone")]]) as gateway:
        async with gateway.openai(max_retries=0) as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            with pytest.raises(openai.APIError, match="gone"):
                _ = [chunk async for chunk in stream]
            events = await client.responses.create(model="m", input="hi", stream=True)
            last = [event async for event in events][-1]
            assert last.type == "response.failed"
            assert last.response.error is not None
        async with gateway.anthropic(max_retries=0) as other:
            answer = await other.messages.create(model="m", max_tokens=9, messages=MESSAGES, stream=True)
            with pytest.raises(anthropic.APIStatusError, match="gone"):
                _ = [event async for event in answer]


async def test_a_bug_of_an_upstream_is_reported_without_detail(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name = "broken"

        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            del request
            yield KeepAlive()
            raise ZeroDivisionError("secret")

    app = make_gateway(Broken())
    async with asgi_client(app) as client:
        answer = await client.post("/v1/chat/completions", json=chat_request("hi"))
    assert (answer.status_code, "secret" in answer.text) == (500, False)
    assert "ZeroDivisionError" in caplog.text


# --- authorization and request forms
# ----------------------------------------------------------------------------


@spec("REUSE-69")
async def test_a_request_without_the_key_is_refused() -> None:
    async with served([HELLO]) as gateway:
        for shown in ({}, {"authorization": "Bearer other"}, {"x-api-key": ""}, {"authorization": TOKEN}):
            answer = await gateway.http.post(
                "/v1/messages", json=chat_request("hi"), headers={"authorization": "", **shown}
            )
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        answer = await gateway.http.get("/v1/models", headers={"authorization": "", "x-api-key": TOKEN})
        assert answer.status_code == 200
        assert (await gateway.http.get("/health", headers={"authorization": ""})).json()["status"] == "ok"
        assert gateway.model.requests == []


async def test_without_a_key_a_page_of_another_site_is_refused() -> None:
    async with served([HELLO], token=None) as gateway:
        foreign = {"origin": "https://elsewhere.example"}
        assert (
            await gateway.http.post("/v1/chat/completions", json=chat_request("hi"), headers=foreign)
        ).status_code == 403
        assert (await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", b'{"messages": []}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": [1]}', 400),
        ("/v1/responses", b'{"input": 1}', 400),
        ("/v1/responses", b'{"input": "x", "background": true, "store": false}', 400),
        ("/v1/responses", b'{"input": "x", "conversation": "conv_1"}', 404),
        ("/v1/responses", b'{"input": "x", "previous_response_id": "resp_none"}', 400),
        ("/v1/messages", b'{"messages": "x"}', 400),
        ("/v1/elsewhere", b"{}", 404),
    ],
)
async def test_a_malformed_request_is_refused(path: str, body: bytes, status: int) -> None:
    async with served([HELLO]) as gateway:
        answer = await gateway.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert gateway.model.requests == []


async def test_an_unknown_model_is_refused_only_where_names_were_given() -> None:
    async with served([HELLO], names=["ours"]) as gateway, gateway.openai() as client:
        with pytest.raises(openai.NotFoundError) as met:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert met.value.code == "model_not_found"
        assert [model.id for model in (await client.models.list()).data] == ["ours"]
        assert (await client.models.retrieve("ours")).id == "ours"
        async with gateway.anthropic() as other:
            assert [model.id for model in (await other.models.list()).data] == ["ours"]


async def test_settings_that_a_model_supports_reach_it_and_the_rest_is_named() -> None:
    async with served([HELLO]) as gateway:
        body = chat_request("hi", temperature=0, logprobs=True, max_tokens=9, seed=None)
        answer = await gateway.http.post("/v1/chat/completions", json=body)
        assert answer.headers["x-midstream-ignored"] == "logprobs"
        assert gateway.model.requests[0].settings == ModelSettings(temperature=0, tokens_max=9)


async def test_unsupported_settings_are_named() -> None:
    model = ScriptedModel([HELLO])
    model.grants = frozenset({"stop"})
    async with serving(make_gateway(model), model) as gateway:
        body = chat_request("hi", stop="END", temperature=0, max_completion_tokens=9, tool_choice="required")
        answer = await gateway.http.post("/v1/chat/completions", json=body)
        assert answer.headers["x-midstream-ignored"] == "tool_choice,temperature,max_completion_tokens"
        assert model.requests[0].settings == ModelSettings(stop=("END",))


async def test_a_pooled_upstream_receives_the_settings_it_supports() -> None:
    upstream, store = ScriptedUpstream(abilities=Abilities(grants=frozenset({"top_p"}))), MemoryStore()
    model = ScriptedModel([])
    async with serving(make_gateway(Pooled(upstream, store), store=store), model) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=chat_request("hi", top_p=0.5, seed=3))
        assert answer.headers["x-midstream-ignored"] == "seed"
        assert [sent.settings for _, sent in upstream.memory.arrived] == [ModelSettings(top_p=0.5)]


async def test_a_draining_gateway_refuses_new_work() -> None:
    async with served([HELLO]) as gateway:
        gateway.gateway.drain()
        answer = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert (await gateway.http.get("/ready")).status_code == 503


async def test_answers_stopped_by_the_shutdown_end_with_an_error_of_their_api(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_module, "GOODBYE_S", 0.05)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    app = make_gateway(ScriptedModel([[TextDelta("half "), Stall()]]))
    work = serve(app, port=0, stop_within_s=0.0, on_listening=listening.set_result, stop=stop)
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        serving = group.create_task(work)
        async with httpx2.AsyncClient(base_url=await listening, headers=headers, timeout=WAIT_S) as client:
            whole = group.create_task(client.post("/v1/chat/completions", json=chat_request("whole")))
            asked = chat_request("streamed", stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=asked) as stream:
                pieces = stream.aiter_text()
                received = await anext(pieces)
                while sum(run.has_begun for run in app.responses.all()) < 2:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0)
                stop.set()
                async for piece in pieces:
                    received += piece
            refused = await whole
        await serving
    assert received.rstrip().endswith('"type":"server_error","param":null,"code":"draining"}}')
    assert (refused.status_code, refused.headers["x-should-retry"]) == (502, "false")
    assert refused.json()["error"]["code"] == "draining"


@pytest.mark.parametrize("steps", range(1, 5))
async def test_a_cancelled_stop_still_closes_the_store(steps: int) -> None:
    app = make_gateway(ScriptedModel([]), store=(store := MemoryStore()))
    await app.start()
    stopping = asyncio.create_task(app.stop())
    for _ in range(steps):
        await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait({stopping}, timeout=60)
    async with asyncio.timeout(60):
        while store.node:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0)


async def test_a_late_request_does_not_start_a_stopped_gateway() -> None:
    store = MemoryStore()
    app = make_gateway(ScriptedModel([HELLO]), store=store)
    async with asgi_client(app) as client:
        assert (await client.post("/v1/chat/completions", json=chat_request("hi"))).status_code == 200
        await app.stop()
        late = await client.get("/v1/responses/resp_1")
    assert (late.status_code, late.headers["retry-after"]) == (503, "2")
    assert store.node == "", "it was not opened again"


async def test_the_gateway_starts_and_stops_with_the_server_it_is_mounted_in() -> None:
    app = make_gateway(ScriptedModel([]))
    received: list[str] = []
    content = iter(("lifespan.startup", "lifespan.shutdown"))

    async def receive() -> dict[str, Any]:
        return {"type": next(content)}

    async def send(message: MutableMapping[str, Any]) -> None:
        received.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert received == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_model_is_closed_with_the_gateway() -> None:
    class Closing(ScriptedModel):
        closed = 0

        async def aclose(self) -> None:
            self.closed += 1

    model = Closing([HELLO])
    async with asgi_client(make_gateway(model)) as client:
        assert (await client.post("/v1/chat/completions", json=chat_request("hi"))).is_success
    assert model.closed == 1


async def test_only_the_pool_limits_the_silence_of_an_agent() -> None:
    """A gateway with `--silence 600` waits so long: no other limit is shorter."""
    async with served([HELLO]) as gateway:
        assert (await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))).is_success
        budgets = gateway.gateway._durable.host.agent.stalls
        assert gateway.model.requests[0].stalls is None
    limits = (budgets.first_token_max_s, budgets.between_tokens_max_s, budgets.upstream_tool_max_s)
    assert min(limits) >= SILENCE_MAX_S


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=9)
    | st.sampled_from(["user", "text", "tool"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "type",
                    "text",
                    "tool_calls",
                    "tool_call_id",
                    "id",
                    "call_id",
                    "name",
                    "arguments",
                    "output",
                    "function",
                    "input",
                    "tool_use_id",
                    "summary",
                    "source",
                    "image_url",
                    "refusal",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(st.lists(JUNK, min_size=1, max_size=6), st.sampled_from(["chat/completions", "responses", "messages"]))
@settings(max_examples=tried(120), suppress_health_check=[HealthCheck.too_slow])
async def test_no_malformed_transcript_causes_an_internal_error(messages: list[Any], path: str) -> None:
    from midstream.testing.scripted_model import ScriptedModel

    model = ScriptedModel([HELLO])
    app = make_gateway(model)
    field = "input" if path == "responses" else "messages"
    async with asgi_client(app) as client:
        answer = await client.post(f"/v1/{path}", json={field: messages, "model": "m", "store": False})
    assert answer.status_code == 200, answer.text
    (request,) = model.requests
    for entry in request.history.entries:
        if isinstance(entry, Step):
            assert all(isinstance(part, Text | Thinking) or part.id for part in entry.response.parts)


@pytest.mark.parametrize("option", ["grace_s", "kept_s"])
def test_limits_that_are_no_numbers_are_refused(option: str) -> None:
    limits: dict[str, Any] = {option: math.nan}
    with pytest.raises(UsageError, match=option):
        make_gateway(ScriptedModel([]), **limits)
