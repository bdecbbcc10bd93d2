"""A chat model of LangChain whose responses a function computes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import agenerate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

Response = Callable[[Sequence[BaseMessage]], str | list[dict[str, Any]]]
"""Returns a text, or calls: `{"name": ..., "args": {...}, "id": ...}`."""


class ScriptedChat(BaseChatModel):
    """Answers in pieces of one word; a call arrives whole."""

    response: Any

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> ScriptedChat:
        return self

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        raise NotImplementedError

    async def _agenerate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages))

    async def _astream(
        self, messages: list[BaseMessage], *_: Any, **__: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        answer = self.response(messages)
        if isinstance(answer, str):
            for piece in answer.split(" "):
                yield ChatGenerationChunk(message=AIMessageChunk(content=f"{piece} "))
        else:
            for each in answer:
                yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_calls=[each]))
        usage: Any = {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}
        yield ChatGenerationChunk(message=AIMessageChunk(content="", usage_metadata=usage))


def tool_call(tool_name: str, call_id: str = "c1", /, **args: Any) -> dict[str, Any]:
    return {"name": tool_name, "id": call_id, "args": args}


def calling_model(*calls: dict[str, Any]) -> ScriptedChat:
    """Return a model that calls tools, and then answers with their results."""

    def response(messages: Sequence[BaseMessage]) -> str | list[dict[str, Any]]:
        turn = max(place for place, each in enumerate(messages) if isinstance(each, HumanMessage))
        results = [str(each.text) for each in messages[turn:] if isinstance(each, ToolMessage)]
        return f"Told: {', '.join(results)}" if results else [*calls]

    return ScriptedChat(response=response)


def text_model(words: str) -> ScriptedChat:
    return ScriptedChat(response=lambda _: words)
