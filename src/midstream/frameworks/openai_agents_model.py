"""The model of an agent of the OpenAI Agents SDK for midstream's own loop, used by `openai_agents_served`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, cast

import httpx2

from midstream.errors import (
    ModelError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)
from midstream.extras import extra
from midstream.history.codecs.codec_spec import Value
from midstream.history.messages import History, Outcome, Step, ToolSpec
from midstream.history.rendering import render
from midstream.models.openai_responses_stream import ResponsesReader
from midstream.models.prompt_prefix import cache_key_of, canonical_tools
from midstream.models.provider_errors import error_of
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta

with extra("openai-agents"):
    import agents
    import openai
    from agents import FunctionTool, ModelSettings, RunContextWrapper
    from agents.exceptions import AgentsException, ModelTimeoutError, UserError
    from agents.models.fake_id import FAKE_RESPONSES_ID
    from agents.models.interface import Model, ModelTracing
    from agents.models.multi_provider import MultiProvider

_FAULTS = (openai.OpenAIError, AgentsException, httpx2.HTTPError, json.JSONDecodeError)
"""Errors of models that are converted; any other error is a defect."""
_LAST = (Outcome.OK, Outcome.ERROR)
"""Outcomes of a tool call with which its result may end the turn (`tool_use_behavior`)."""


class OpenAIAgentsModel:
    """The model of an agent, with the agent's settings, prompt and hosted tools.

    Args:
        agent: The agent. Its model is a `Model`, or a name that the SDK's providers resolve.
        context: The application's object for functions of the agent.
        function_tools: The function tools of the agent by name, so that requests contain their declarations.

    Reasoning is shown and journaled, but not sent back. The SDK's tracing is off for these requests.

    Raises:
        UsageError: The SDK cannot create a model of this name, or has no key for it.
    """

    def __init__(
        self,
        agent: agents.Agent[Any],
        context: object = None,
        function_tools: Mapping[str, FunctionTool] | None = None,
    ) -> None:
        self._agent = agent
        self._context = context
        self._function_tools = {} if function_tools is None else function_tools
        self._model = _resolve_model(agent.model)
        self.name = f"openai-agents:{getattr(self._model, 'model', None) or type(self._model).__name__}"

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer `request`; closing the iterator closes the connection.

        Raises:
            ModelUnavailableError: Network fault, rate limit, overload, or a response that broke off.
            ModelStalledError: No answer within `model_settings.timeout`, or the client's own limit.
            ModelRejectedError: The provider will never accept this request, or the agent's instructions failed.
            ContextOverflowError: The request exceeds the context window of the model.
        """
        if not request.is_ephemeral and (output := self._final_output(request.history)):
            yield TextDelta(output)
            yield Finished()
            return
        reader, limit_s = ResponsesReader(), self._agent.model_settings.timeout
        deadline = asyncio.get_running_loop().time() + limit_s if limit_s else None
        answer = await self._request(request)
        try:
            async with contextlib.aclosing(cast("AsyncGenerator[Any, None]", answer)) as events:
                while not reader.is_ended:
                    async with asyncio.timeout_at(deadline):
                        event = await anext(events, None)
                    if event is None:
                        raise ModelUnavailableError(f"the stream of {self.name} broke off")
                    # The sequence numbers of other models are not reliable; only the order counts.
                    data = event.model_dump_json(exclude={"sequence_number"}, warnings=False)
                    for each in reader.read_json(data.encode()):
                        yield each
        except TimeoutError as error:
            raise ModelStalledError(f"{self.name} sent no complete answer within {limit_s:g} s") from error
        except _FAULTS as error:
            raise _model_error_of(error, self.name) from error
        if reader.failure is not None:
            raise reader.failure

    async def _request(self, request: ModelRequest) -> AsyncIterator[Any]:
        instructions, prompt = request.instructions, None
        if not request.is_ephemeral:
            made, prompt = await self._make_instructions()
            # The request already contains text instructions, but not those of a function.
            instructions = instructions if isinstance(self._agent.instructions, str) else made
        sent = render(request.history, "", "responses", form="openai-responses")
        events: AsyncIterator[Any] = self._model.stream_response(
            instructions or None,
            cast("Any", [_item(each) for each in sent.messages]),
            self._settings(request),
            self._tools(request),
            None,
            [],
            ModelTracing.DISABLED,
            previous_response_id=None,
            conversation_id=None,
            prompt=prompt,
        )
        return events

    async def _make_instructions(self) -> tuple[str, Any]:
        """Return the results of the agent's functions: instructions, and the provider's stored prompt."""
        context: RunContextWrapper[Any] = RunContextWrapper(self._context)
        try:
            return await self._agent.get_system_prompt(context) or "", await self._agent.get_prompt(context)
        except Exception as error:
            raise ModelRejectedError(
                f"the instructions of {self._agent.name!r} failed with {type(error).__name__}: {error}"
            ) from error

    def _settings(self, request: ModelRequest) -> ModelSettings:
        settings = self._agent.model_settings
        is_reset = self._agent.reset_tool_choice and _has_used_tools(request.history)
        if is_reset or not request.tools:
            settings = dataclasses.replace(settings, tool_choice=None)
        takes_key = getattr(self._model, "_supports_default_prompt_cache_key", None)
        extra_args, body = settings.extra_args or {}, settings.extra_body or {}
        is_named = "prompt_cache_key" in extra_args or "prompt_cache_key" in cast("dict[str, Any]", body)
        if request.session and not request.is_ephemeral and callable(takes_key) and takes_key():
            if not is_named:
                key = {"prompt_cache_key": cache_key_of(request.session)}
                settings = dataclasses.replace(settings, extra_args={**extra_args, **key})
        return settings

    def _tools(self, request: ModelRequest) -> list[Any]:
        hosted = [each for each in self._agent.tools if not isinstance(each, FunctionTool)]
        return [
            *(self._tool(each) for each in canonical_tools(request.tools)),
            *(() if request.is_ephemeral else hosted),
        ]

    def _tool(self, spec: ToolSpec) -> FunctionTool:
        known = self._function_tools.get(spec.name)
        if known is not None and spec_of(known) == spec:
            return known
        parameters = spec.parameters or {"type": "object", "properties": {}}
        return FunctionTool(spec.name, spec.description, parameters, _refuse_to_run, strict_json_schema=False)

    def _final_output(self, history: History) -> str:
        """Return the tool result that is the final answer by the agent's `tool_use_behavior`, or ""."""
        behavior: Any = self._agent.tool_use_behavior
        last = history.entries[-1] if history.entries else None
        if behavior == "run_llm_again" or not isinstance(last, Step):
            return ""
        names = None if isinstance(behavior, str) else behavior["stop_at_tool_names"]
        for call, result in zip(last.response.calls, last.results, strict=True):
            if (names is None or call.name in names) and result.outcome in _LAST:
                return result.content
        return ""


def spec_of(tool: FunctionTool) -> ToolSpec:
    """Return the declaration of a function tool for a model."""
    return ToolSpec(tool.name, tool.description, tool.params_json_schema)


async def _refuse_to_run(*_: object) -> None:
    raise AssertionError("midstream runs this tool")


def _item(message: Value) -> Value:
    """Return an assistant message as an output item, which the SDK joins with the following calls."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    content = message["content"]
    parts: Value = (
        [{"type": "output_text", "text": content, "annotations": []}] if isinstance(content, str) else content
    )
    return {**message, "id": FAKE_RESPONSES_ID, "status": "completed", "content": parts}


def _resolve_model(model: str | Model | None) -> Model:
    if isinstance(model, Model):
        return model
    try:
        return MultiProvider().get_model(model)
    except (AgentsException, openai.OpenAIError, ImportError) as error:
        what = f"the model {model!r}" if model else "the SDK's default model"
        raise UsageError(f"{what} cannot be used: {error}") from error


def _has_used_tools(history: History) -> bool:
    for entry in reversed(history.entries):
        if not isinstance(entry, Step):
            return False
        if entry.response.calls:
            return True
    return False


def _model_error_of(error: Exception, name: str) -> ModelError:
    if isinstance(error, openai.APIStatusError):
        body = error.body.get("error", error.body) if isinstance(error.body, dict) else error.body
        wait = error.response.headers.get("retry-after", "")
        wait_s = float(wait) if wait.isdecimal() else None
        return error_of(body or error.message, status=error.status_code, retry_after_s=wait_s)
    if isinstance(error, openai.APITimeoutError | ModelTimeoutError | httpx2.TimeoutException):
        return ModelStalledError(f"{name} sent no answer in time")
    if isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
        return error_of(error.body or error.message)
    if isinstance(error, openai.APIError | httpx2.HTTPError | json.JSONDecodeError):
        return ModelUnavailableError(f"the connection to {name} failed: {type(error).__name__}")
    if isinstance(error, UserError | openai.OpenAIError):
        return ModelRejectedError(f"{name} refused this request: {error}")
    return ModelUnavailableError(f"{name} sent an invalid response: {error}")
