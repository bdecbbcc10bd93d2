from __future__ import annotations

import json
from typing import Any

import pytest

from midstream.integrations.history_hooks import pydantic_ai_processor, repaired_body, repaired_langchain
from tests.core.repair.reported import PYDANTIC_AI, chat_call, chat_reply, reply, result, use, user


def test_a_pydantic_ai_agent_goes_on_with_a_history_that_was_cut() -> None:
    agents = pytest.importorskip("pydantic_ai")
    shapes = pytest.importorskip("pydantic_ai.messages")
    model = pytest.importorskip("pydantic_ai.models.function").FunctionModel
    sent: list[Any] = []

    def answer(messages: list[Any], info: object) -> Any:  # noqa: ANN401 - pydantic-ai's
        sent.extend(messages)
        return shapes.ModelResponse(parts=[shapes.TextPart("done")])

    repaired = pydantic_ai_processor()
    history = repaired(shapes.ModelMessagesTypeAdapter.validate_python(PYDANTIC_AI[0].messages))
    agent = agents.Agent(model(answer))
    done = agent.run_sync("and now?", message_history=history)
    assert done.output == "done"
    kinds = [part.part_kind for message in sent for part in message.parts]
    assert kinds.index("tool-return") == kinds.index("tool-call") + 1


def test_a_good_pydantic_ai_history_is_the_same_object() -> None:
    shapes = pytest.importorskip("pydantic_ai.messages")
    history = [shapes.ModelRequest(parts=[shapes.UserPromptPart("hi")])]
    assert pydantic_ai_processor()(history) is history


def test_langchain_messages_are_repaired() -> None:
    core = pytest.importorskip("langchain_core.messages")
    call = {"name": "run", "args": {}, "id": "a", "type": "tool_call"}
    history = [core.HumanMessage("q"), core.AIMessage("", tool_calls=[call]), core.HumanMessage("w")]
    done = repaired_langchain(history)
    assert [message.type for message in done] == ["human", "ai", "tool", "human"]
    assert repaired_langchain(done) is done


def test_a_request_is_repaired_on_its_way_out() -> None:
    body = {"model": "m", "messages": [user("q"), chat_reply(chat_call("a")), user("w")]}
    done = json.loads(repaired_body("/v1/chat/completions", json.dumps(body).encode()))
    assert [message["role"] for message in done["messages"]] == ["user", "assistant", "tool", "user"]
    assert done["model"] == "m"


def test_thinking_is_turned_off_when_the_loop_lost_its_thought() -> None:
    messages = [user("q"), reply(use("a")), user([result("a")])]
    body = {"messages": messages, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    done = json.loads(repaired_body("/v1/messages", json.dumps(body).encode()))
    assert done == {"messages": messages}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", b'{"messages": [{"role": "user", "content": "hi"}]}'),
        ("/v1/models", b'{"messages": [{"role": "assistant", "content": ""}]}'),
        ("/v1/messages", b"no json"),
        ("/v1/messages", b"[]"),
    ],
)
def test_what_is_fine_or_unknown_is_the_same_bytes(path: str, body: bytes) -> None:
    assert repaired_body(path, body) is body
