"""Messages and interrupts as LangGraph's clients read them."""

from __future__ import annotations

import msgspec
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage, convert_to_messages
from msgspec.structs import replace

from midstream.dialects import langgraph_messages as messages
from midstream.dialects.run_fold import RunFold
from midstream.history.messages import (
    File,
    Finish,
    Outcome,
    Response,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from midstream.session.calls import CHOICES, QuestionKind
from midstream.session.questions import Question
from midstream.session.session import GO_ON
from tests.dialects.langgraph_journal import approved, facts_of

CALL = ToolCall("c", "look", '{"at": "sea"}')
WHOLE = Response((Thinking("hm"), Text("I look."), CALL), Finish.CALLS, "m", Usage(3, 4))


def test_langchain_reads_our_messages_as_its_own() -> None:
    human = messages.human_message("m1", UserMessage((Text("hi"), File("image/png", data="aGk="))))
    ai = messages.ai_message("ai-1", WHOLE)
    tool = messages.tool_message("ai-1", CALL, ToolResult("c", "blue"))
    read = convert_to_messages([human, ai, tool])
    assert [type(each) for each in read] == [HumanMessage, AIMessage, ToolMessage]
    assert isinstance(read[1], AIMessage)
    assert isinstance(read[2], ToolMessage)
    assert read[1].tool_calls[0]["args"] == {"at": "sea"}
    assert read[1].tool_calls[0]["id"] == read[2].tool_call_id


def test_chunks_add_up_to_the_message() -> None:
    pieces = [
        messages.words_chunk("ai-1", "thinking", "hm"),
        messages.words_chunk("ai-1", "text", "I "),
        messages.words_chunk("ai-1", "text", "look."),
        messages.call_chunk("ai-1", CALL, 0),
        messages.last_chunk("ai-1", WHOLE.usage),
    ]
    whole = messages.ai_message("ai-1", WHOLE)
    chunks = [
        AIMessageChunk(**{name: value for name, value in each.items() if name != "type"}) for each in pieces
    ]
    total = sum(chunks[1:], chunks[0])
    assert (total.content, total.tool_calls) == (whole["content"], whole["tool_calls"])
    assert total.additional_kwargs == whole["additional_kwargs"]
    assert total.usage_metadata == whole["usage_metadata"]


def test_malformed_arguments_are_an_invalid_call_and_a_failed_call_has_an_error_status() -> None:
    broken = ToolCall("c", "look", "{")
    ai = messages.ai_message("ai-1", Response((broken,), Finish.CALLS))
    assert (ai["tool_calls"], ai["invalid_tool_calls"][0]["args"]) == ([], "{")
    failed = messages.tool_message("ai-1", CALL, ToolResult("c", "no", Outcome.ERROR))
    assert failed["status"] == "error"


def test_content_for_the_model_only_is_not_a_message() -> None:
    fold = RunFold("t")
    facts_of(approved(), fold)
    shown = fold.state.values()["messages"]
    assert [each["type"] for each in shown] == ["human", "ai", "tool", "ai"]
    resumed = replace(fold.session, history=fold.session.history.then(GO_ON))
    assert messages.messages_of(resumed, (*fold.ids, "go on"), "") == shown


@pytest.mark.parametrize("field", ["session", "digest", "call_id", "kind", "approved_by"])
def test_an_interrupt_binds_its_answer_to_the_shown_arguments(field: str) -> None:
    choices = CHOICES[QuestionKind.APPROVAL]
    asked = Question("s", 1, 1, "c", QuestionKind.APPROVAL, "d", "burn", "{}", choices, 0.0)
    other = {
        "session": "s::1.1.0",
        "digest": "e",
        "call_id": "x",
        "kind": QuestionKind.DOUBT,
        "approved_by": ("ada",),
    }[field]
    assert messages.interrupt_id_of(asked) != messages.interrupt_id_of(
        msgspec.structs.replace(asked, **{field: other})
    )
