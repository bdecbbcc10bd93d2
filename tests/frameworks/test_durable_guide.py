"""The examples of `docs/guides/pydantic-ai.md` about pydantic-ai run together, with a model that calls tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import BinaryContent, UserContent
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "pydantic-ai.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


async def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    monkeypatch.setenv("OPENAI_API_KEY", "k")
    names: dict[str, Any] = {}
    for example in EXAMPLES[:2]:
        exec(compile(example, GUIDE.name, "exec"), names)  # it is our own guide
    with names["agent"].override(model=TestModel()):
        first = await names["answer"]("chat-42", "m-1", "Book a hotel in Oslo")
        assert first == '{"book":"booked in a"}'
        assert await names["answer"]("chat-42", "m-1", "Book a hotel in Oslo") == first
    await names["carry_on"]()  # nothing is open
    await names["durable"].close()


async def test_a_prompt_with_a_file_is_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    prompt: list[UserContent] = ["Which hotel is this?", BinaryContent(b"pixels", media_type="image/png")]
    names: dict[str, Any] = {}
    for example in EXAMPLES[:2]:
        exec(compile(example, GUIDE.name, "exec"), names)  # it is our own guide
    received: list[list[ModelMessage]] = []

    def respond(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        received.append(messages)
        if len(received) == 1:
            raise RuntimeError("the model failed")
        return ModelResponse([TextPart("the Grand")])

    with names["agent"].override(model=FunctionModel(respond)):
        with pytest.raises(RuntimeError):
            await names["answer"]("chat-42", "m-1", prompt)
        await names["carry_on"]()
        assert await names["answer"]("chat-42", "m-1", prompt) == "the Grand"
    assert [part.content for part in received[1][0].parts if isinstance(part, UserPromptPart)] == [prompt]
    assert len(received) == 2
    await names["durable"].close()


@pytest.mark.parametrize("beside", [[], ["look"]])
async def test_a_payment_is_approved_also_beside_another_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    names: dict[str, Any] = {}
    for example in EXAMPLES[:4]:
        exec(compile(example, GUIDE.name, "exec"), names)  # it is our own guide
    looked: list[str] = []

    @names["cashier"].tool_plain
    def look() -> str:
        """Look at the invoice."""
        looked.append("look")
        return "an invoice"

    def respond(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        if len(messages) == 1:
            calls = [ToolCallPart(name, tool_call_id=name) for name in beside]
            return ModelResponse([*calls, ToolCallPart("pay", {"amount": 3}, tool_call_id="pay")])
        results = [part.content for part in messages[-1].parts if isinstance(part, ToolReturnPart)]
        return ModelResponse([TextPart(f"{results}")])

    with names["cashier"].override(model=FunctionModel(respond)):
        stored = await names["ask_to_pay"]("chat-42", "m-1", "Pay.")
        assert looked == beside
        answer = await names["pay_or_not"]("chat-42", "m-1", stored, is_allowed=True)
        assert "'paid 3'" in answer
        assert await names["pay_or_not"]("chat-42", "m-1", stored, is_allowed=True) == answer
    assert looked == beside
    await names["payments"].close()
