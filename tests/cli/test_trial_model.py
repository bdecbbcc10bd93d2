"""`midstream gateway --upstream scripted`: tests of client applications with calls, failures and slow answers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from midstream.cli.trial_model import FAILURES, TrialModel
from midstream.environment import World
from midstream.errors import ModelError, ModelOverloadedError, ModelRejectedError
from midstream.history.messages import (
    Finish,
    History,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    UserMessage,
)
from midstream.models.responses import ModelEvent, ModelRequest, TextDelta, ToolCallRequested
from midstream.session.session import CONTINUE
from tests.cli.test_gateway import WAIT_S, key_of, start, stop

TOOL: Any = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
CALLS = 'call look {"at": "a tree"}\ncall look'


class PauseRecordingWorld(World):
    """A clock that only records its pauses."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_s = 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


LOOK = ToolSpec("look", "Look.", TOOL["parameters"])


async def _events(history: History, world: World = World()) -> list[ModelEvent]:
    return [each async for each in TrialModel("scripted", world).stream(ModelRequest("", history, (LOOK,)))]


def _text(events: list[ModelEvent]) -> str:
    return "".join(each.text for each in events if isinstance(each, TextDelta))


@pytest.fixture
def gateway(tmp_path: Path) -> Any:  # noqa: ANN401 - decoded from the output of the program
    process, ready = start(tmp_path)
    yield ready
    stop(process)


async def test_any_other_message_is_repeated() -> None:
    assert _text(await _events(History((UserMessage.of("hi  there"),)))) == "You said: hi  there"
    assert _text(await _events(History((UserMessage.of(""),)))) == "You said nothing."


async def test_answers_start_with_the_prefix_of_their_model() -> None:
    cut = Step(Response((Text("amber: You said: one"),), Finish.INTERRUPTED))
    for entries, words in (((), "amber: You said: one two"), ((cut, UserMessage.of(CONTINUE)), " two")):
        history = History((UserMessage.of("one two"), *entries))
        model = TrialModel("scripted", prefix="amber: ")
        assert _text([each async for each in model.stream(ModelRequest("", history, (LOOK,)))]) == words


async def test_calls_have_their_own_ids_and_their_results_are_listed() -> None:
    asked = History((UserMessage.of(CALLS),))
    called = [each for each in await _events(asked) if isinstance(each, ToolCallRequested)]
    assert [(each.name, each.arguments) for each in called] == [("look", '{"at": "a tree"}'), ("look", "{}")]
    again = [each for each in await _events(asked) if isinstance(each, ToolCallRequested)]
    assert len({each.id for each in (*called, *again)}) == 4
    calls = tuple(ToolCall(each.id, each.name, each.arguments) for each in called)
    step = Step(Response(calls), tuple(ToolResult(each.id, f"result {each.arguments}") for each in calls))
    answer = 'look returned: result {"at": "a tree"}\nlook returned: result {}'
    assert _text(await _events(asked.then(step))) == answer
    begun = Step(Response((Text("look returned: "),)), ())
    assert _text(await _events(asked.then(step).then(begun))) == answer.removeprefix("look returned: ")


async def test_a_slow_answer_takes_its_time() -> None:
    world = PauseRecordingWorld()
    assert _text(await _events(History((UserMessage.of("slow 2.5\nhi"),)), world)) == "You said: slow 2.5\nhi"
    assert world.slept_s == pytest.approx(2.5)


@pytest.mark.parametrize("kind", FAILURES)
async def test_it_fails_with_the_requested_error(kind: str) -> None:
    with pytest.raises(ModelError) as caught:
        await _events(History((UserMessage.of(f"fail {kind}"),)))
    assert type(caught.value) is FAILURES[kind]


async def test_a_slow_answer_fails_after_its_text() -> None:
    message = "slow 1\nfail overloaded"
    stream = TrialModel("scripted", PauseRecordingWorld()).stream(
        ModelRequest("", History((UserMessage.of(message),)), ())
    )
    text = ""
    while text != f"You said: {message}":
        text += _text([await anext(stream)])
    with pytest.raises(ModelOverloadedError):
        await anext(stream)


async def test_a_side_call_only_repeats_its_message() -> None:
    history = History((UserMessage.of("fail access\ncall look"),))
    request = ModelRequest("", history, (LOOK,), is_ephemeral=True)
    events = [each async for each in TrialModel("scripted").stream(request)]
    assert _text(events) == "You said: fail access\ncall look"


async def test_a_call_of_an_unknown_tool_lists_the_tools_of_the_request() -> None:
    answer = _text(await _events(History((UserMessage.of("call loook"),))))
    assert answer == "The request has no tool loook, but: look"


async def test_an_unknown_failure_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelRejectedError, match="rate_limit, overloaded"):
        await _events(History((UserMessage.of("fail somehow"),)))


async def test_clients_of_each_api_receive_tool_calls(gateway: dict[str, Any]) -> None:
    url, key = gateway["url"], key_of(gateway)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT_S) as client:
        messages: list[Any] = [{"role": "user", "content": CALLS}]
        tools: list[Any] = [{"type": "function", "function": TOOL}]
        chat: Any = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        calls = chat.choices[0].message.tool_calls
        messages += [
            chat.choices[0].message,
            *({"role": "tool", "tool_call_id": each.id, "content": "green"} for each in calls),
        ]
        chat = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert chat.choices[0].message.content == "look returned: green\nlook returned: green"

        functions: list[Any] = [{"type": "function", "strict": False, **TOOL}]
        response: Any = await client.responses.create(model="m", input="call look", tools=functions)
        [call] = response.output
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        response = await client.responses.create(model="m", input=[output], previous_response_id=response.id)
        assert response.output_text == "look returned: blue"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=WAIT_S) as other:
        spec: Any = {"name": "look", "description": "Look.", "input_schema": TOOL["parameters"]}
        asked: list[Any] = [{"role": "user", "content": "call look"}]
        answer: Any = await other.messages.create(model="m", max_tokens=99, messages=asked, tools=[spec])
        [use] = answer.content
        asked += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "red"}]},
        ]
        answer = await other.messages.create(model="m", max_tokens=99, messages=asked, tools=[spec])
        assert answer.content[0].text == "look returned: red"


@pytest.mark.parametrize(
    ("kind", "of_openai", "of_anthropic"),
    [
        ("rate_limit", openai.RateLimitError, anthropic.RateLimitError),
        ("overloaded", openai.InternalServerError, anthropic.InternalServerError),
        ("overflow", openai.BadRequestError, anthropic.BadRequestError),
        ("not_found", openai.NotFoundError, anthropic.NotFoundError),
    ],
)
async def test_clients_receive_the_failure_of_their_api(
    gateway: dict[str, Any], kind: str, of_openai: type[Exception], of_anthropic: type[Exception]
) -> None:
    url, key = gateway["url"], key_of(gateway)
    words: list[Any] = [{"role": "user", "content": f"fail {kind}"}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT_S) as client:
        with pytest.raises(of_openai):
            await client.chat.completions.create(model="m", messages=words)
        with pytest.raises(of_openai):
            await client.responses.create(model="m", input=words[0]["content"])
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=WAIT_S) as other:
        with pytest.raises(of_anthropic):
            await other.messages.create(model="m", max_tokens=9, messages=words)


async def test_a_slow_answer_of_a_killed_gateway_continues_after_its_text(tmp_path: Path) -> None:
    words = "slow 2\n" + " ".join(f"word{number}" for number in range(40))

    async def deltas(client: openai.AsyncOpenAI) -> AsyncGenerator[str]:
        async for event in await client.responses.create(model="m", input=words, stream=True):
            if event.type == "response.output_text.delta":
                yield event.delta

    process, ready = start(tmp_path)
    try:
        async with asyncio.timeout(WAIT_S), _openai(ready) as client:
            async with aclosing(deltas(client)) as first:
                await anext(first)
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.communicate)
        process, ready = start(tmp_path)
        async with asyncio.timeout(WAIT_S), _openai(ready) as client:
            assert "".join([each async for each in deltas(client)]) == f"You said: {words}"
    finally:
        stop(process)


def _openai(ready: dict[str, Any]) -> openai.AsyncOpenAI:
    url = f"{ready['url']}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key_of(ready), max_retries=0, timeout=WAIT_S)
