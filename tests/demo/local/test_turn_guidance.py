"""Decisions for a model that is too small to plan, and the prompts that it receives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.demo.local.turn_guidance import (
    CALLS_MAX,
    COMPOSED_CHARS_MAX,
    EARLIER_CHARS_MAX,
    RESULT_CHARS_MAX,
    Due,
    Instruction,
    answer_prompt,
    arguments_prompt,
    choice_prompt,
    due_call,
    instructions_of,
    is_circling,
)
from midstream.history.messages import (
    Finish,
    History,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    UserMessage,
)
from midstream.models.responses import ModelRequest
from midstream.tools.function_tools import tool


@tool(has_effects=False)
def list_files(folder: str) -> str:
    """List or show the files in a folder."""
    return folder


@tool(has_effects=False)
def read_file(path: str) -> str:
    """Read or open a file."""
    return path


@tool(has_effects=False)
def search(query: str, folder: str = ".") -> str:
    """Search or look for a word in the files of a folder."""
    return query + folder


@tool
def write_note(path: str, text: str) -> str:
    """Write or save a note to a file."""
    return path + text


TOOLS = tuple(each.spec for each in (list_files, read_file, search, write_note))
LONG = (
    "List the files in the notes folder, read notes/harbour.txt, search for 'salt, and pepper', "
    "write a note called sea.txt about salt and the sea, then explain how tides work."
)


def request(text: str, *results: str, earlier: tuple[tuple[str, str], ...] = ()) -> ModelRequest:
    history = History()
    for content, answered in earlier:
        history = history.then(UserMessage.of(content)).then(Step(Response((Text(answered),))))
    history = history.then(UserMessage.of(text))
    for number, result in enumerate(results):
        call = ToolCall(f"c{number}", "read_file")
        history = history.then(Step(Response((call,), Finish.CALLS), (ToolResult(call.id, result),)))
    return ModelRequest("", history, TOOLS)


def split(text: str) -> list[tuple[str, str | None]]:
    """Return each instruction with the best of its tools."""
    found = instructions_of(text, TOOLS)
    return [(each.text, each.tools[-1].name if each.tools else None) for each in found]


def next_step(text: str, *results: str) -> Due:
    found = due_call(request(text, *results))
    assert found is not None
    return found


def schema_of(tool_name: str, text: str, *results: str) -> dict[str, Any]:
    spec = next(each for each in TOOLS if each.name == tool_name)
    schema = arguments_prompt(next_step(text, *results), spec).schema
    assert schema is not None
    properties: dict[str, Any] = schema["properties"]
    return properties


def test_a_message_is_split_into_its_instructions() -> None:
    assert split(LONG) == [
        ("List the files in the notes folder", "list_files"),
        ("read notes/harbour.txt", "read_file"),
        ("search for 'salt, and pepper'", "search"),
        ("write a note called sea.txt about salt and the sea", "write_note"),
        ("explain how tides work", None),
    ]


@pytest.mark.parametrize(
    ("text", "tool_name"),
    [
        ("search for tide", "search"),
        ("look for the word rope in the work folder", "search"),
        ("Show me the files in the letters folder", "list_files"),
        ("Which files are in the recipes folder?", "list_files"),
        ("open letters/anna.txt", "read_file"),
        ("Please save a note called plan.txt about a picnic", "write_note"),
        ("What is a note?", None),
        ("Write a short story about a fisherman.", None),
        ("Tell me about the sea.", None),
        ("hello", None),
        ("", None),
    ],
)
def test_a_call_is_due_if_a_tool_is_named(text: str, tool_name: str | None) -> None:
    found = due_call(request(text))
    assert (found.instruction.tools[-1].name if found else None) == tool_name


def test_each_call_of_a_turn_has_its_instruction_and_then_the_answer_is_due() -> None:
    results: list[str] = []
    instructions = []
    while (found := due_call(request(LONG, *results))) is not None:
        instructions.append(found.instruction.text.split()[0])
        assert found.results == tuple(results)
        results.append("done")
    assert instructions == ["List", "read", "search", "write"]


def test_the_calls_of_a_turn_are_limited() -> None:
    text = "\n".join(f"Read the file number{number}.txt" for number in range(CALLS_MAX + 5))
    assert due_call(request(text, *["done"] * (CALLS_MAX - 1))) is not None
    assert due_call(request(text, *["done"] * CALLS_MAX)) is None


def test_calls_of_earlier_turns_do_not_count() -> None:
    history = request("Read a.txt", "A").history.then(Step(Response((Text("It says A."),))))
    request_of = ModelRequest("", history.then(UserMessage.of("Read b.txt")), TOOLS)
    found = due_call(request_of)
    assert found is not None
    assert found.instruction.text == "Read b.txt"
    assert found.results == ()


def test_without_tools_the_answer_is_due_at_once() -> None:
    assert due_call(ModelRequest("", request(LONG).history)) is None


def test_the_choice_is_between_the_tools_that_share_a_word_the_best_last() -> None:
    prompt = choice_prompt(next_step("read notes/harbour.txt"))
    assert prompt.schema is not None
    names = prompt.schema["properties"]["tool"]["enum"]
    assert names == ["search", "write_note", "list_files", "read_file"]
    shown = [json.loads(each["content"])["tool"] for each in prompt.messages if each["role"] == "assistant"]
    assert shown == names
    assert prompt.messages[-1] == {"role": "user", "content": "read notes/harbour.txt"}


def test_a_short_argument_is_one_of_the_words_of_the_message() -> None:
    assert schema_of("list_files", "List the files in the notes folder")["folder"] == {"enum": ["notes"]}
    assert schema_of("read_file", "Read notes/a.txt for me")["path"] == {"enum": ["notes/a.txt"]}
    searching = schema_of("search", "Search for 'late ferry' in the letters folder")
    assert searching["query"] == {"enum": ["late ferry", "letters"]}
    assert searching["folder"] == {"enum": ["late ferry", "letters"]}


def test_an_optional_argument_is_omitted_if_no_word_is_left_for_it() -> None:
    assert set(schema_of("search", "Search for 'invoice'")) == {"query"}


def test_a_path_may_come_from_an_earlier_result() -> None:
    text = "List the files in the notes folder and read one of the files"
    paths = schema_of("read_file", text, "notes/a.txt\nnotes/b.txt")["path"]
    assert paths == {"enum": ["notes/a.txt", "notes/b.txt"]}


def test_a_text_argument_is_written_freely_and_ends() -> None:
    writing = schema_of("write_note", "Write a note called sea.txt about the sea")
    assert writing["text"] == {"type": "string", "maxLength": COMPOSED_CHARS_MAX}
    assert writing["path"] == {"enum": ["sea.txt"]}


def test_a_text_about_a_result_is_written_with_the_result_in_the_prompt() -> None:
    text = "Read anna.txt and write a note called response.txt about it"
    spec = TOOLS[3]
    assert (
        arguments_prompt(next_step(text, "Dear Anna"), spec).messages[-1]["content"].startswith("Dear Anna\n")
    )
    about_the_sea = "Read anna.txt and write a note called response.txt about the sea"
    assert "Dear" not in arguments_prompt(next_step(about_the_sea, "Dear Anna"), spec).messages[-1]["content"]


def test_every_string_and_list_of_a_schema_ends() -> None:
    @tool
    def order_goods(names: list[str], size: int, kind: dict[str, list[str]], note: str | None = None) -> str:
        """Order goods."""
        return ""

    instruction = Instruction("order goods", (order_goods.spec,))
    schema = arguments_prompt(Due(instruction), order_goods.spec).schema
    assert schema is not None
    unbounded = [
        piece
        for piece in pieces_of(schema)
        if (piece.get("type") == "string" and "maxLength" not in piece)
        or (piece.get("type") == "array" and "maxItems" not in piece)
    ]
    assert unbounded == []
    assert schema["properties"]["size"] == {"type": "integer"}


def pieces_of(schema: object) -> list[dict[str, Any]]:
    if isinstance(schema, list):
        return [piece for each in schema for piece in pieces_of(each)]
    if isinstance(schema, dict):
        return [schema, *(piece for each in schema.values() for piece in pieces_of(each))]
    return []


def test_a_question_about_the_results_is_above_them() -> None:
    request_of = request("Read a.txt, then summarise it.", "A" * (RESULT_CHARS_MAX + 1))
    (system, question) = answer_prompt(request_of).messages
    assert system["content"] == "You are a helpful assistant."
    assert question["content"] == f"Read a.txt, then summarise it.\n\nResults:\n{'A' * RESULT_CHARS_MAX}"


def test_an_independent_question_is_repeated_below_the_results() -> None:
    messages = answer_prompt(request("Read a.txt, then explain tides.", "A")).messages
    assert [message["content"] for message in messages[1:]] == [
        "Read a.txt, then explain tides.\n\nResults:\nA",
        "Done.",
        "Explain tides.",
    ]


def test_earlier_turns_are_shown_as_text_up_to_a_limit() -> None:
    earlier = (("too long", "x" * EARLIER_CHARS_MAX), ("one", "two"), ("three", ""))
    assert answer_prompt(request("four", earlier=earlier)).messages[1:] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "(no reply was recorded)"},
        {"role": "user", "content": "four"},
    ]


def test_a_repeating_answer_is_distinguished_from_a_list() -> None:
    sentence = "The sea is a place where people can dream of it. "
    assert not is_circling(sentence * 2)
    assert is_circling(sentence * 3)
    assert not is_circling("".join(f"{number}. Another file of the folder.\n" for number in range(20)))


@given(st.text(max_size=80), st.lists(st.text(max_size=20), max_size=3))
def test_every_message_has_a_due_call_or_answer(text: str, results: list[str]) -> None:
    request_of = request(text, *results)
    found = due_call(request_of)
    if found is None:
        assert answer_prompt(request_of).messages[-1]["role"] == "user"
    else:
        for spec in found.instruction.tools:
            schema = arguments_prompt(found, spec).schema
            assert schema is not None
            assert set(schema["required"]) <= set(schema["properties"])
