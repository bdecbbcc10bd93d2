"""Histories of pydantic-ai: its own test model, its real OpenAI and Anthropic models against a strict provider."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
from pydantic_ai import Agent
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.providers.openai import OpenAIProvider

from midstream.errors import HistoryRefusedError, InvalidHistoryError, UsageError
from midstream.frameworks.pydantic_ai_history import repair_history
from midstream.history.operations import Repaired
from midstream.history.repair.placeholders import UNKNOWN
from tests.models.strict_provider import strict_provider

AT = datetime(2026, 1, 1, tzinfo=UTC)
ASKED = ModelRequest([SystemPromptPart("Be brief.", timestamp=AT), UserPromptPart("deploy", timestamp=AT)])
CALLED = ModelResponse([ThinkingPart("hm"), ToolCallPart("deploy", {"to": "prod"}, "c1")], timestamp=AT)
AND_NOW = ModelRequest([UserPromptPart("and now?", timestamp=AT)], instructions="Be kind.", run_id="r2")
BROKEN: list[ModelMessage] = [ASKED, CALLED, AND_NOW]


def test_a_valid_list_is_returned_as_the_same_object() -> None:
    returned = ToolReturnPart("deploy", {"ok": True}, "c1")
    picture = BinaryContent(b"\x89PNG", media_type="image/png")
    messages: list[ModelMessage] = [
        ASKED,
        CALLED,
        ModelRequest([returned, UserPromptPart(["look", picture])]),
        ModelResponse([TextPart("done")]),
    ]
    repairs: list[Repaired] = []
    assert repair_history(on_repair=repairs.append)(messages) is messages
    assert repair_history()([]) == []
    assert repairs == []


def test_a_call_without_result_gets_one_and_the_rest_are_the_same_objects() -> None:
    repairs: list[Repaired] = []
    messages = repair_history(on_repair=repairs.append)(BROKEN)
    assert [part.part_kind for message in messages for part in message.parts] == [
        "system-prompt",
        "user-prompt",
        "thinking",
        "tool-call",
        "tool-return",
        "user-prompt",
    ]
    assert messages[0] is ASKED
    assert messages[1] is CALLED
    assert messages[-1] is AND_NOW
    assert [edit.code for edit in repairs[0].edits] == ["dangling-call"]
    assert repairs[0].messages is messages
    assert repair_history()(messages) is messages
    assert BROKEN == [ASKED, CALLED, AND_NOW]


@dataclass
class Report:
    lines: int


def test_parts_of_a_changed_message_stay_the_same_objects() -> None:
    report = ToolReturnPart("deploy", Report(3), "c1")
    both = ModelResponse([ToolCallPart("deploy", {}, "c1"), ToolCallPart("test", {}, "c2")], timestamp=AT)
    half = ModelRequest([UserPromptPart("wait"), report], instructions="I", metadata={"kept": True})
    messages = repair_history()([ASKED, both, half, ModelResponse([TextPart("ok")])])
    requests = [message for message in messages[2:] if isinstance(message, ModelRequest)]
    returns = [part for each in requests for part in each.parts if isinstance(part, ToolReturnPart)]
    assert [part.tool_call_id for part in returns] == ["c1", "c2"]
    assert returns[0] is report
    assert [(each.instructions, each.metadata) for each in requests if each.metadata] == [
        ("I", {"kept": True})
    ]


def test_a_repaired_history_can_be_stored() -> None:
    messages = repair_history()(BROKEN)
    stored = ModelMessagesTypeAdapter.dump_json(messages)
    loaded = ModelMessagesTypeAdapter.validate_json(stored)
    assert repair_history()(loaded) is loaded


async def test_a_stored_run_is_not_repaired_again() -> None:
    repairs: list[Repaired] = []
    repaired = repair_history(on_repair=repairs.append)
    agent = Agent(TestModel(call_tools=[]), capabilities=[ProcessHistory(repaired)])
    first = await agent.run("go on", message_history=repaired(BROKEN))
    assert len(repairs) == 1
    stored = first.all_messages()
    assert repaired(stored) is stored
    await agent.run("and on", message_history=stored)
    assert len(repairs) == 1


async def test_a_run_of_an_agent_continues_from_a_history_repaired_at_each_request() -> None:
    seen: list[list[ModelMessage]] = []

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append(messages)
        return ModelResponse([TextPart("on it")])

    agent = Agent(FunctionModel(answer), capabilities=[ProcessHistory(repair_history())])
    late = ModelRequest([ToolReturnPart("deploy", "done", "c1")])
    result = await agent.run("go on", message_history=[ASKED, CALLED, AND_NOW, late])
    assert result.output == "on it"
    kinds = [[part.part_kind for part in message.parts] for message in seen[0]]
    flat = [kind for message in kinds for kind in message]
    assert flat.index("tool-return") == flat.index("tool-call") + 1
    assert flat.count("user-prompt") == 3


async def test_a_result_without_call_is_kept_if_the_history_is_repaired_before_the_run() -> None:
    seen: list[list[ModelMessage]] = []

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append(messages)
        return ModelResponse([TextPart("on it")])

    orphan = ModelRequest([ToolReturnPart("read", "the only copy", "gone")])
    stored = repair_history()([ASKED, orphan, ModelResponse([TextPart("ok")])])
    await Agent(FunctionModel(answer)).run("go on", message_history=stored)
    assert "the only copy" in repr(seen[0])


async def test_a_new_prompt_may_follow_an_unanswered_call() -> None:
    stored = repair_history()([ASKED, CALLED])
    result = await Agent(TestModel()).run("go on", message_history=stored)
    assert UNKNOWN in repr(result.all_messages())


@pytest.mark.parametrize("prompt", ["  ", None])
async def test_a_run_without_a_new_message_keeps_its_request_and_its_instructions(prompt: str | None) -> None:
    agent = Agent(TestModel(), instructions="Be kind.", capabilities=[ProcessHistory(repair_history())])
    history: list[ModelMessage] = [ASKED, ModelResponse([]), ModelRequest([UserPromptPart("and?")])]
    result = await agent.run(prompt, message_history=history)
    requests = [message for message in result.all_messages() if isinstance(message, ModelRequest)]
    assert requests[-1].instructions == "Be kind."


def test_a_request_with_only_instructions_stays_the_last_one() -> None:
    bare = ModelRequest([], instructions="Be kind.")
    fine: list[ModelMessage] = [ASKED, ModelResponse([TextPart("ok")]), bare]
    assert repair_history()(fine) is fine
    repaired = repair_history()([ASKED, CALLED, bare])
    assert [part.part_kind for part in repaired[-1].parts] in ([], ["tool-return"])
    blank = repair_history()([ASKED, ModelResponse([TextPart("ok")]), ModelRequest([UserPromptPart(" ")])])
    assert isinstance(blank[-1], ModelRequest)


def test_a_suspended_response_is_left_alone() -> None:
    at_work = ModelResponse([ToolCallPart("deploy", {}, "c1")], state="suspended")
    messages: list[ModelMessage] = [ASKED, at_work]
    assert repair_history()(messages) is messages


async def test_the_real_openai_model_is_no_longer_refused() -> None:
    """pydantic-ai leaves a late return in its place, and the provider refuses it."""
    late: list[ModelMessage] = [
        ASKED,
        ModelResponse([ToolCallPart("deploy", {}, "c1")]),
        ModelRequest([UserPromptPart("wait")]),
        ModelResponse([TextPart("waiting")]),
        ModelRequest([ToolReturnPart("deploy", "done", "c1")]),
    ]
    with strict_provider() as provider:
        async with httpx2.AsyncClient() as http:
            made = OpenAIProvider(base_url=f"{provider.url}/v1", api_key="k", http_client=http)
            model = OpenAIChatModel("gpt-5", provider=made)
            agent: Agent[None, str] = Agent(model, capabilities=[ProcessHistory(repair_history())])
            result = await agent.run("go on", message_history=late)
    assert result.output == "on it"
    sent: list[dict[str, Any]] = provider.last["messages"]
    roles = [message["role"] for message in sent]
    assert roles[roles.index("assistant") + 1] == "tool"


def test_a_message_without_json_form_is_a_typed_error() -> None:
    with pytest.raises(InvalidHistoryError, match="no JSON form"):
        repair_history()([ASKED, CALLED, ModelRequest([ToolReturnPart("deploy", object(), "c1")])])


def test_an_unknown_profile_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="unknown profile 'x'"):
        repair_history("x")


def test_a_stored_list_is_prepared_for_the_next_run() -> None:
    prompted = ModelRequest([SystemPromptPart("Old."), UserPromptPart("deploy")], run_id="r1")
    half = ModelResponse([TextPart("let me"), ToolCallPart("deploy", {}, "c1")], run_id="r1")
    repairs: list[Repaired] = []
    (asked, content) = repair_history(mode="sanitize", on_repair=repairs.append)([prompted, half])
    assert asked.parts == prompted.parts[1:]
    assert content.parts == half.parts[:1]
    assert (asked.run_id, content.run_id) == (None, None)
    assert {"Old.", "r1", "deploy({})"} == {edit.lost for edit in repairs[0].edits}
    with pytest.raises(HistoryRefusedError):
        repair_history(mode="strict")([prompted, half, prompted])


async def test_a_running_runs_own_prompts_and_results_stay() -> None:
    seen: list[list[ModelMessage]] = []

    def model(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        seen.append([*messages])
        if len(seen) == 1:
            return ModelResponse([ToolCallPart("look", {}, "c2")])
        return ModelResponse([TextPart("done")])

    sanitize = ProcessHistory[None](repair_history(mode="sanitize"))
    agent = Agent(FunctionModel(model), system_prompt="New.", capabilities=[sanitize])

    @agent.tool_plain
    def look() -> str:
        return "found"

    fresh = await agent.run("look")
    assert [part for part in seen[1][0].parts if isinstance(part, SystemPromptPart)]
    assert len(fresh.new_messages()) == 4
    stored: list[ModelMessage] = [
        ModelRequest([SystemPromptPart("Old."), UserPromptPart("deploy")], run_id="r1"),
        ModelResponse([TextPart("let me")], run_id="r1"),
    ]
    seen.clear()
    later = await agent.run("and now?", message_history=stored)
    assert "Old." not in str(seen)
    assert [type(part).__name__ for message in seen[1] for part in message.parts] == [
        *("UserPromptPart", "TextPart"),
        *("UserPromptPart", "ToolCallPart", "ToolReturnPart"),
    ]
    assert len(later.new_messages()) == 4
