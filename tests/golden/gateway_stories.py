"""Stories of the SDKs of OpenAI and Anthropic with the gateway, from which the golden transcripts are
recorded.

Only recording needs this file; a transcript is replayed as raw HTTP.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.golden.gateway_adapter import TOKEN, WAIT_S, Upstream
from tests.golden.transcripts import IdNames, recorded_request, recorded_response

Json = dict[str, Any]
Script = Sequence[Sequence[Json]]
ASK: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS},
}
FLAT_TOOL: Any = {"type": "function", **TOOL["function"], "strict": False}
MESSAGES_TOOL: Any = {"name": "look", "description": "Look.", "input_schema": PARAMETERS}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TITLE = "You are a title generator. Answer with a title."
HELLO: list[Json] = [{"thinking": "hm"}, {"text": "Hello "}, {"text": "you"}]
LOOK: list[Json] = [{"text": "I look."}, {"call": ["call_7", "look", '{"at": "it"}']}]
THERE: list[Json] = [{"text": "It is there."}]


class Recorder(httpx2.AsyncBaseTransport):
    """A transport for SDKs that records each step once its response has been read or left."""

    def __init__(self, upstream: Upstream) -> None:
        self.steps: list[Json] = []
        self.names = IdNames()
        self._upstream = upstream
        self._wire = httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        step: Json = {"request": recorded_request(request, body, self.names)}
        self.steps.append(step)
        request.headers["accept-encoding"] = "identity"
        response = await self._wire.handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Copied(response, response.stream, step, self.names)
        return response

    def release(self) -> None:
        """Release the upstream from the next `hold`."""
        self.steps.append({"release": True})
        self._upstream.gate.set()

    async def aclose(self) -> None:
        await self._wire.aclose()


class _Copied(httpx2.AsyncByteStream):
    def __init__(
        self, response: httpx2.Response, stream: httpx2.AsyncByteStream, step: Json, names: IdNames
    ) -> None:
        self._response = response
        self._stream = stream
        self._step = step
        self._names = names
        self._body = b""
        self._is_whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._body += piece
            yield piece
        self._is_whole = True

    async def aclose(self) -> None:
        await self._stream.aclose()
        if "response" in self._step:
            return
        status, headers = self._response.status_code, self._response.headers
        shown = recorded_response(status, headers, self._body, self._names)
        self._step["response"] = shown
        # An SDK reads no further than the end marker.
        if not self._is_whole and shown.get("events", [{}])[-1].get("data") != "[DONE]":
            self._step["events_read"] = len(shown.get("events", ()))


class GatewayClients:
    """Both SDKs, pointed at the gateway."""

    def __init__(self, url: str, recorder: Recorder) -> None:
        self.recorder = recorder
        options: Any = {"api_key": TOKEN, "timeout": WAIT_S, "max_retries": 0}
        self._http = httpx2.AsyncClient(transport=recorder)
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", http_client=self._http, **options)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, http_client=self._http, **options)


@contextlib.asynccontextmanager
async def gateway_clients(url: str, upstream: Upstream) -> AsyncIterator[GatewayClients]:
    recorder = Recorder(upstream)
    talk = GatewayClients(url, recorder)
    try:
        yield talk
    finally:
        await talk.openai.close()
        await recorder.aclose()


async def _all(stream: Any) -> list[Any]:  # noqa: ANN401 - of either SDK
    return [each async for each in stream]


async def _first(stream: Any, count: int) -> None:  # noqa: ANN401 - as above
    """Read the first events and leave: all events before the upstream holds, so that none is in flight."""
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == count:
            break
    await stream.close()


# --- chat completions ----------------------------------------------------------------------------------------------


async def _chat(talk: GatewayClients) -> None:
    create = talk.openai.chat.completions.create
    system: list[Any] = [{"role": "system", "content": "Be brief."}, *ASK]
    whole = await create(model="m", messages=system, temperature=0.5, max_tokens=99)
    assert whole.choices[0].message.content == "Hello you"
    commands = await _all(
        await create(model="m", messages=system, stream=True, stream_options={"include_usage": True})
    )
    assert commands[-1].usage.total_tokens == 15
    assert await _all(await create(model="m-2", messages=system, stream=True))


async def _chat_with_tools(talk: GatewayClients) -> None:
    create = talk.openai.chat.completions.create
    whole = await create(model="m", messages=ASK, tools=[TOOL])
    sent_messages = whole.choices[0].message
    assert sent_messages.tool_calls
    messages: list[Any] = [
        *ASK,
        sent_messages.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": "call_7", "content": "a tree"},
    ]
    assert (await create(model="m", messages=messages, tools=[TOOL])).choices[
        0
    ].message.content == "It is there."
    messages += [{"role": "assistant", "content": "It is there."}, {"role": "user", "content": "again"}]
    assert await _all(await create(model="m", messages=messages, tools=[TOOL], stream=True))
    assert (await create(model="m", messages=ASK)).choices[0].finish_reason == "stop"


async def _chat_images(talk: GatewayClients) -> None:
    content = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    ]
    messages: list[Any] = [{"role": "user", "content": content}]
    assert (await talk.openai.chat.completions.create(model="m", messages=messages)).choices


async def _chat_errors(talk: GatewayClients) -> None:
    create = talk.openai.chat.completions.create
    for error in (
        openai.RateLimitError,
        openai.APIStatusError,
        openai.BadRequestError,
        openai.APIStatusError,
    ):
        with pytest.raises(error):
            await create(model="m", messages=ASK)
    with pytest.raises(openai.APIStatusError):
        await create(model="m", messages=[{"role": "user", "content": "cut"}])
    with pytest.raises(openai.APIError):
        await _all(
            await create(model="m", messages=[{"role": "user", "content": "cut a stream"}], stream=True)
        )
    with pytest.raises(openai.RateLimitError):
        await create(model="m", messages=ASK, stream=True)
    with pytest.raises(openai.NotFoundError):
        await create(model="unknown", messages=ASK)
    with pytest.raises(openai.BadRequestError):
        await create(model="m", messages="no list")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(openai.AuthenticationError):
        await talk.openai.with_options(api_key="wrong").chat.completions.create(model="m", messages=ASK)
    assert [each.id async for each in talk.openai.models.list()] == ["m", "m-2"]


async def _repeats(talk: GatewayClients) -> None:
    create = talk.openai.chat.completions.create
    key = {"idempotency-key": "k1"}
    await _first(await create(model="m", messages=ASK, stream=True, extra_headers=key), 3)
    talk.recorder.release()
    repeated = await _all(await create(model="m", messages=ASK, stream=True, extra_headers=key))
    assert "".join(each.choices[0].delta.content or "" for each in repeated) == "one two three"
    with pytest.raises(openai.UnprocessableEntityError):
        await create(model="m", messages=[{"role": "user", "content": "else"}], extra_headers=key)
    retried: list[Any] = [{"role": "user", "content": "retried"}]
    whole = await create(model="m", messages=retried)
    again = await create(model="m", messages=retried, extra_headers={"x-stainless-retry-count": "1"})
    assert again.id == whole.id
    assert (await create(model="m", messages=retried)).id != whole.id  # A cancellation by the user.


# --- Responses -----------------------------------------------------------------------------------------------------


async def _responses(talk: GatewayClients) -> None:
    responses = talk.openai.responses
    whole = await responses.create(model="m", input="hi", instructions="Be brief.")
    assert whole.output_text == "Hello you"
    events = await _all(await responses.create(model="m", input="hi", instructions="Be brief.", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    following = await responses.create(model="m", input="more", previous_response_id=whole.id)
    assert following.previous_response_id == whole.id
    assert (await responses.retrieve(whole.id)).output_text == "Hello you"
    assert [item.type for item in (await responses.input_items.list(following.id)).data]
    assert (
        len(await _all(await responses.retrieve(whole.id, stream=True, starting_after=2))) == len(events) - 3
    )
    await responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(whole.id)


async def _responses_with_tools(talk: GatewayClients) -> None:
    responses = talk.openai.responses
    first = await responses.create(model="m", input="hi", tools=[FLAT_TOOL], stream=True)
    done = (await _all(first))[-1].response
    result: Any = {"type": "function_call_output", "call_id": "call_7", "output": "a tree"}
    second = await responses.create(
        model="m", input=[result], previous_response_id=done.id, tools=[FLAT_TOOL]
    )
    assert second.output_text == "It is there."
    items: list[Any] = [
        {"role": "user", "content": "hi"},
        *[each.model_dump() for each in done.output],
        result,
    ]
    assert (await responses.create(model="m", input=items, tools=[FLAT_TOOL], store=False)).output_text


async def _responses_not_stored(talk: GatewayClients) -> None:
    responses = talk.openai.responses
    whole = await responses.create(model="m", input="hi", store=False)
    for refused in (
        responses.retrieve(whole.id),
        responses.create(model="m", input="more", previous_response_id=whole.id),
        responses.create(model="m", input="hi", background=True, store=False),
        responses.cancel(whole.id),
    ):
        with pytest.raises(openai.APIStatusError):
            await refused


async def _responses_in_the_background(talk: GatewayClients) -> None:
    responses = talk.openai.responses
    made = await responses.create(model="m", input="hi", background=True)
    await _first(await responses.retrieve(made.id, stream=True), 6)
    assert (await responses.retrieve(made.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError):
        await responses.create(model="m", input="more", previous_response_id=made.id)
    talk.recorder.release()
    assert await _all(await responses.retrieve(made.id, stream=True, starting_after=3))
    assert (await responses.retrieve(made.id)).output_text == "one two three"
    cancelled = await responses.create(model="m", input="stop", background=True)
    await _first(await responses.retrieve(cancelled.id, stream=True), 6)
    assert (await responses.cancel(cancelled.id)).status == "cancelled"
    assert (await responses.retrieve(cancelled.id)).status == "cancelled"
    failed = await responses.create(model="m", input="fail", background=True)
    assert await _all(await responses.retrieve(failed.id, stream=True))
    assert (await responses.retrieve(failed.id)).status == "failed"


async def _responses_images_and_errors(talk: GatewayClients) -> None:
    responses = talk.openai.responses
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}
    content = [{"type": "input_text", "text": "see"}, image]
    assert (await responses.create(model="m", input=[{"role": "user", "content": content}])).output_text  # type: ignore[list-item, misc]  # a plain dict
    with pytest.raises(openai.RateLimitError):
        await responses.create(model="m", input="hi")
    assert (await _all(await responses.create(model="m", input="cut", stream=True)))[
        -1
    ].type == "response.failed"
    with pytest.raises(openai.APIStatusError):
        await responses.create(model="m", input="hi", previous_response_id="resp_unknown")


# --- Messages ------------------------------------------------------------------------------------------------------


async def _messages(talk: GatewayClients) -> None:
    create = talk.anthropic.messages.create
    system: Any = [{"type": "text", "text": "Be brief."}]
    whole = await create(model="m", max_tokens=99, messages=ASK, system=system)
    assert [block.type for block in whole.content] == ["text"]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    whole = await create(model="m", max_tokens=99, messages=ASK, thinking=thinking)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert await _all(await create(model="m", max_tokens=99, messages=ASK, thinking=thinking, stream=True))
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    sent_messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}]
    assert (await create(model="m", max_tokens=99, messages=sent_messages)).content
    assert (await talk.anthropic.messages.count_tokens(model="m", messages=ASK)).input_tokens
    assert [each.id async for each in talk.anthropic.models.list()] == ["m", "m-2"]


async def _messages_with_tools(talk: GatewayClients) -> None:
    create = talk.anthropic.messages.create
    async with talk.anthropic.messages.stream(
        model="m", max_tokens=99, messages=ASK, tools=[MESSAGES_TOOL]
    ) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]
    result: Any = {"type": "tool_result", "tool_use_id": "call_7", "content": "a tree"}
    messages: list[Any] = [
        *ASK,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
    ]
    assert (await create(model="m", max_tokens=99, messages=messages, tools=[MESSAGES_TOOL])).content


async def _messages_errors(talk: GatewayClients) -> None:
    create = talk.anthropic.messages.create
    for error in (anthropic.RateLimitError, anthropic.InternalServerError):
        with pytest.raises(error):
            await create(model="m", max_tokens=9, messages=ASK)
    with pytest.raises(anthropic.APIStatusError):
        await _all(await create(model="m", max_tokens=9, messages=ASK, stream=True))
    with pytest.raises(anthropic.NotFoundError):
        await create(model="unknown", max_tokens=9, messages=ASK)
    with pytest.raises(anthropic.AuthenticationError):
        await talk.anthropic.with_options(api_key="wrong").messages.create(
            model="m", max_tokens=9, messages=ASK
        )


# --- stateful agents
# -------------------------------------------------------------------------------------------------


def transcript(*words: str) -> list[Any]:
    """Return a resent transcript: texts of a user and of the assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": each} for number, each in enumerate(words)]


async def _agent(talk: GatewayClients) -> None:
    async def send_messages(*words: str, **more: Any) -> None:  # noqa: ANN401 - of the SDK
        system: list[Any] = [{"role": "system", "content": "Be brief."}]
        answer = await talk.openai.chat.completions.create(
            model="m", messages=[*system, *transcript(*words)], **more
        )
        assert answer.choices[0].message.content

    await send_messages("hi")
    await send_messages("hi", "one", "more")
    await talk.openai.chat.completions.create(
        model="m", messages=[{"role": "system", "content": TITLE}, {"role": "user", "content": "hi"}]
    )
    await send_messages("aside", extra_headers={"x-midstream-ephemeral": "true"})
    await send_messages("hi", "one", "more", "two", "end")
    await send_messages("hi", "one", "other")  # A branch.
    await send_messages("changed", "one", "more", "two", "end")  # An edit.
    await send_messages("hi", "one", "more", "two", "end", "three", "after the branch")


async def _agent_with_tools_of_its_own(talk: GatewayClients) -> None:
    create = talk.openai.chat.completions.create
    named = {"x-midstream-session": "mine"}
    whole = await create(model="m", messages=transcript("list"), extra_headers=named)
    assert whole.choices[0].message.content == "One file."
    assert await _all(
        await create(
            model="m", messages=transcript("list", "One file.", "again"), stream=True, extra_headers=named
        )
    )
    stored = await talk.openai.responses.create(model="m", input="hi")
    assert (
        await talk.openai.responses.create(model="m", input="more", previous_response_id=stored.id)
    ).output_text
    message = await talk.anthropic.messages.create(model="m", max_tokens=99, messages=transcript("list"))
    assert message.content


async def _agent_in_trouble(talk: GatewayClients) -> None:
    create = talk.openai.chat.completions.create
    assert (await create(model="m", messages=transcript("hi"))).choices
    assert (await create(model="m", messages=transcript("hi", "one", "gone"))).choices
    with pytest.raises(openai.APIStatusError):
        await create(model="m", messages=transcript("dies"))
    assert (await create(model="m", messages=transcript("hi", "one", "gone", "two", "on"))).choices


class GatewayStory:
    """Calls of SDKs, and the script of the upstream behind the gateway."""

    def __init__(
        self, live: Callable[[GatewayClients], Awaitable[None]], script: Script, kind: str = "provider"
    ) -> None:
        self.live = live
        self.script = script
        self.kind = kind


LIMITED: list[Json] = [{"status": 429, "message": "slow down", "headers": {"retry-after": "7"}}]
HELD: list[Json] = [{"text": "one"}, {"text": " two"}, {"hold": True}, {"text": " three"}]
CUT: list[Json] = [{"text": "Half of"}, {"cut": True}]
STORIES: dict[str, GatewayStory] = {
    "chat": GatewayStory(_chat, [HELLO] * 3),
    "chat_tools": GatewayStory(_chat_with_tools, [LOOK, THERE, LOOK, LOOK]),
    "chat_images": GatewayStory(_chat_images, [THERE]),
    "chat_errors": GatewayStory(
        _chat_errors,
        [
            LIMITED,
            [{"status": 503, "message": "overloaded"}],
            [{"status": 400, "message": "never"}],
            [{"status": 401, "message": "the key"}],
            CUT,
            CUT,
            LIMITED,
        ],
    ),
    "repeats": GatewayStory(_repeats, [HELD, HELLO, HELLO]),
    "responses": GatewayStory(_responses, [HELLO] * 3),
    "responses_tools": GatewayStory(_responses_with_tools, [LOOK, THERE, THERE]),
    "responses_not_stored": GatewayStory(_responses_not_stored, [HELLO]),
    "responses_background": GatewayStory(_responses_in_the_background, [HELD, HELD, CUT]),
    "responses_images_and_errors": GatewayStory(_responses_images_and_errors, [THERE, LIMITED, CUT]),
    "messages": GatewayStory(_messages, [HELLO] * 4),
    "messages_tools": GatewayStory(_messages_with_tools, [LOOK, THERE]),
    "messages_errors": GatewayStory(_messages_errors, [LIMITED, [{"status": 500, "message": "broken"}], CUT]),
    "agent": GatewayStory(
        _agent,
        [[{"text": words}] for words in ("one", "two", "A title", "beside", "three", "other", "new", "four")],
        "agent",
    ),
    "agent_tools": GatewayStory(
        _agent_with_tools_of_its_own,
        [
            [{"tool": ["u1", "Bash", '{"command": "ls"}', "README.md"]}, {"text": "One file."}],
            THERE,
            THERE,
            THERE,
            [{"tool": ["u2", "Bash", "{}", "x"]}, {"text": "One."}],
        ],
        "agent",
    ),
    "agent_trouble": GatewayStory(
        _agent_in_trouble,
        [
            [{"text": "one"}],
            [{"trouble": "gone"}],
            [{"text": "two"}],
            [{"text": "Half"}, {"trouble": "dies_speaking"}],
            [{"text": "three"}],
        ],
        "agent",
    ),
}
