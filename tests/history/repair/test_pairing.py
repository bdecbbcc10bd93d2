# ruff: noqa: ANN401 - a history may hold anything
from __future__ import annotations

from typing import Any

import pytest

from midstream.history.operations import FormatName, repair
from midstream.history.repair.pairing import Pairing
from midstream.history.repair.placeholders import ORPHAN, UNKNOWN
from tests.history.repair.makers import codes, task_for, turns_for
from tests.history.repair.reported import (
    chat_call,
    chat_response,
    fcall,
    fresponse,
    human,
    model,
    response,
    result,
    text,
    thought,
    tool,
    use,
    user,
)


def answers(form: str, messages: list[Any]) -> tuple[list[Any], list[str]]:
    task = task_for(form)
    pairing = Pairing(turns_for(task, messages), task)
    pairing.run()
    return [[answer.body for answer in call.answers or ()] for call in pairing.calls], codes(task)


def test_one_constant_id_pairs_by_order() -> None:
    calls = chat_response(chat_call("x"), chat_call("x", name="other"))
    assert answers("openai-chat", [calls, tool("x", "1"), tool("x", "2")]) == ([["1"], ["2"]], [])


def test_a_result_belongs_to_the_latest_response_with_an_open_call() -> None:
    messages = [chat_response(chat_call("x")), user("hm"), chat_response(chat_call("x")), tool("x", "1")]
    assert answers("openai-chat", messages)[0] == [[], ["1"]]


def test_the_only_open_call_gets_the_result_with_a_foreign_id() -> None:
    assert answers("anthropic", [response(use("a")), user([result("b", "1")])]) == (
        [["1"]],
        ["foreign-result-id"],
    )


def test_two_open_calls_get_no_result_by_guessing() -> None:
    assert answers("anthropic", [response(use("a"), use("b")), user([result("c", "1")])])[0] == [[], []]


def test_a_call_written_twice_is_one_call() -> None:
    found, function_response = answers(
        "openai-chat", [chat_response(chat_call("a")), chat_response(chat_call("a")), tool("a", "1")]
    )
    assert (found, function_response) == ([["1"]], ["repeated-call"])


def test_a_real_result_replaces_its_placeholder() -> None:
    messages = [response(use("a")), user([result("a", UNKNOWN)]), user("and?"), user([result("a", "1")])]
    assert answers("anthropic", messages) == ([["1"]], ["late-result"])


def test_a_result_before_its_call_is_found() -> None:
    assert answers("openai-chat", [tool("a", "1"), chat_response(chat_call("a"))])[0] == [["1"]]


def _said(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


TWO_TURNS: dict[FormatName, tuple[list[Any], list[Any]]] = {
    "openai-chat": (
        [user("weather?"), tool("call_0", "sunny in Rome"), _said("It is sunny.")],
        [user("delete it"), chat_response(chat_call("call_0", name="delete_file")), user("did it work?")],
    ),
    "anthropic": (
        [user([result("call_0", "sunny in Rome"), text("weather?")]), response(text("It is sunny."))],
        [user("delete it"), response(use("call_0", name="delete_file")), user("did it work?")],
    ),
    "gemini": (
        [
            human({"text": "weather?"}, fresponse("weather", {"r": "sunny in Rome"}, id="call_0")),
            model({"text": "It is sunny."}),
        ],
        [
            human({"text": "delete it"}),
            model(fcall("delete_file", id="call_0")),
            human({"text": "did it work?"}),
        ],
    ),
}
"""By format: a turn whose response with the call is gone, and a turn with an interrupted call of the same id."""


@pytest.mark.parametrize("form", TWO_TURNS)
def test_the_result_of_an_earlier_turn_is_no_result_of_an_interrupted_call(form: FormatName) -> None:
    first, second = TWO_TURNS[form]
    done = repair([*first, *second], format=form)
    assert [(edit.code, edit.at) for edit in done.edits][:2] == [
        ("orphan-result", next(at for at, message in enumerate(first) if "sunny in" in str(message))),
        ("dangling-call", len(first) + 1),
    ]
    end = str(done.messages[-2:])
    assert UNKNOWN in end
    assert "sunny in Rome" not in end
    assert repair(done.messages, format=form).edits == ()


@pytest.mark.parametrize("form", TWO_TURNS)
def test_marked_text_stays_when_a_later_turn_uses_the_id_again(form: FormatName) -> None:
    first, second = TWO_TURNS[form]
    before = repair(first, format=form).messages
    assert ORPHAN in str(before)
    whole = repair([*first, *second], format=form).messages
    assert whole[: len(before)] == before
    assert repair([*before, *second], format=form).messages == whole


def _lang(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "data": {"type": kind, "content": "", **more}}


def _early(form: FormatName, name: str, called: str) -> list[Any]:
    """Return a turn with a result of the tool `name` before a call of the tool `called`, under the same id."""
    if form == "langchain":
        return [
            _lang("human", content="q"),
            _lang("tool", content="1", tool_call_id="call_0", name=name),
            _lang("ai", tool_calls=[{"id": "call_0", "name": called, "args": {}, "type": "tool_call"}]),
        ]
    if form == "pydantic-ai":
        ids = {"tool_call_id": "call_0"}
        returned = {"part_kind": "tool-return", "tool_name": name, "content": "1", **ids}
        call = {"part_kind": "tool-call", "tool_name": called, "args": {}, **ids}
        return [
            {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "q"}]},
            {"kind": "request", "parts": [returned]},
            {"kind": "response", "parts": [call]},
        ]
    if form == "openai-chat":
        return [user("q"), tool("call_0", "1", name=name), chat_response(chat_call("call_0", name=called))]
    answer = fresponse(name, "1", id="call_0")
    return [human({"text": "q"}), human(answer), model(fcall(called, id="call_0"))]


@pytest.mark.parametrize("form", ["langchain", "pydantic-ai", "openai-chat", "gemini"])
def test_a_result_before_its_call_has_the_name_of_its_tool(form: FormatName) -> None:
    assert answers(form, _early(form, "weather", "delete_file"))[0] == [[]]
    assert answers(form, _early(form, "weather", "weather"))[0] == [["1"]]


@pytest.mark.parametrize("form", ["langchain", "pydantic-ai", "openai-chat", "gemini"])
@pytest.mark.parametrize(("name", "called"), [("get weather", "get weather"), ("weather", "")])
def test_a_result_before_its_call_is_found_though_the_name_of_the_call_is_invalid(
    form: FormatName, name: str, called: str
) -> None:
    found = [edit.code for edit in repair(_early(form, name, called), format=form).edits]
    assert "misplaced-result" in found
    assert "orphan-result" not in found


def test_a_result_before_two_calls_with_its_id_never_belongs_to_the_second() -> None:
    first, second = chat_response(chat_call("x")), chat_response(chat_call("x", name="delete_file"))
    messages = [user("q"), tool("x", "1"), first, tool("x", "2"), second]
    assert answers("openai-chat", messages)[0] == [["2"], []]


def test_a_result_before_its_call_is_found_unless_the_user_wrote_between_them() -> None:
    call = response(use("a"))
    assert answers("anthropic", [user([text("q"), result("a", "1")]), call])[0] == [["1"]]
    assert answers("anthropic", [user("q"), user([result("a", "1"), text("w")]), call])[0] == [[]]
    assert answers("anthropic", [user("q"), user([result("a", "1")]), user("w"), call])[0] == [[]]
    steps = [user([result("b", "2")]), call, user([result("a", "1")]), response(use("b"))]
    assert answers("anthropic", [user("q"), *steps])[0] == [["1"], ["2"]]


def test_the_files_of_a_result_before_its_call_are_no_message_of_the_user() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    shown = tool("a", [{"type": "text", "text": "1"}, image])
    done = repair([user("q"), shown, chat_response(chat_call("a"))], format="openai-chat")
    assert [edit.code for edit in done.edits] == ["misplaced-file", "misplaced-result"]
    assert done.messages[2:] == [chat_response(chat_call("a")), tool("a", "1")]


def test_a_system_prompt_between_a_result_and_its_call_is_no_message_of_the_user() -> None:
    messages = [
        user("q"),
        tool("a", "1"),
        {"role": "system", "content": "be brief"},
        chat_response(chat_call("a")),
    ]
    for profile in (None, "strict-template"):
        done = repair(messages, format="openai-chat", profile=profile)
        assert [edit.code for edit in done.edits if "result" in edit.code or "call" in edit.code] == [
            "misplaced-result"
        ]


def test_functions_without_ids_pair_by_name() -> None:
    call = {"functionCall": {"name": "f", "args": {}}}
    answer = {"functionResponse": {"name": "f", "response": {"r": 1}}}
    messages = [{"role": "model", "parts": [call, call]}, {"role": "user", "parts": [answer, answer]}]
    assert answers("gemini", messages)[0] == [[{"r": 1}], [{"r": 1}]]


def test_results_refer_to_their_calls() -> None:
    task = task_for()
    pairing = Pairing(turns_for(task, [response(use("a")), user([result("a")])]), task)
    turns = pairing.run()
    found = turns[1].parts[0]
    assert found.owner == id(turns[0].parts[0])


def test_a_late_result_under_a_foreign_id_replaces_its_placeholder() -> None:
    messages = [response(use("a")), user([result("a", UNKNOWN)]), user([result("b", "late")])]
    assert answers("anthropic", messages) == ([["late"]], ["foreign-result-id", "late-result"])


def test_without_ids_the_latest_placeholder_of_the_name_is_replaced() -> None:
    def function_response(response: str, key: str = "result") -> dict[str, Any]:
        return {"functionResponse": {"name": "read", "response": {key: response}}}

    call = {"role": "model", "parts": [{"functionCall": {"name": "read", "args": {}}}]}
    stand_in = {"role": "user", "parts": [function_response(UNKNOWN, "error")]}
    late = {"role": "user", "parts": [{"text": "w"}, function_response("late")]}
    found, named = answers("gemini", [call, stand_in, dict(call), dict(stand_in), late])
    assert found == [[{"error": UNKNOWN}], [{"result": "late"}]]
    assert named == ["late-result"]


def test_a_result_with_the_id_of_a_call_belongs_to_no_call_without_an_id() -> None:
    calls = [{"functionCall": {"name": "read", "args": {}}}]
    other = [{"functionCall": {"id": "x", "name": "read", "args": {"path": "a"}}}]
    early = {"functionResponse": {"id": "x", "name": "read", "response": {"result": "1"}}}
    messages = [{"role": "model", "parts": calls}, {"role": "user", "parts": [early]}]
    found, _ = answers("gemini", [*messages, {"role": "model", "parts": other}])
    assert found == [[], [{"result": "1"}]]


def test_of_two_copies_of_a_response_the_signed_one_stays() -> None:
    bare, signed = response(thought("hm", None), use("a")), response(thought(), use("a"))
    done = repair([user("q"), bare, signed, user([result("a")])])
    assert done.messages == [user("q"), signed, user([result("a")])]
    assert "repeated-call" in [edit.code for edit in done.edits]


def test_a_function_result_under_a_tool_call_id_becomes_a_tool_result() -> None:
    answer = {"role": "function", "tool_call_id": "a", "name": "run", "content": "w"}
    done = repair([user("q"), chat_response(chat_call("a")), answer], format="openai-chat")
    assert done.messages[2] == {"role": "tool", "tool_call_id": "a", "name": "run", "content": "w"}


def test_a_result_without_an_id_gets_the_kind_of_its_call() -> None:
    answer = {"role": "function", "name": "run", "content": "w"}
    done = repair([user("q"), chat_response(chat_call("a")), answer], format="openai-chat")
    assert done.messages[2] == {"role": "tool", "tool_call_id": "a", "name": "run", "content": "w"}
    old = {"role": "assistant", "content": None, "function_call": {"name": "run", "arguments": "{}"}}
    done = repair([user("q"), old, tool("a", "w")], format="openai-chat")
    assert done.messages[2] == {"role": "function", "content": "w", "name": "run"}


def test_a_result_with_the_item_id_of_an_answered_call_is_another_result_of_it() -> None:
    def called(number: int) -> dict[str, Any]:
        ids = {"id": f"fc_{number}", "call_id": f"c{number}"}
        return {"type": "function_call", **ids, "name": "read", "arguments": "{}"}

    def answered(call_id: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call_id, "output": f"of {call_id}"}

    first = [{"role": "user", "content": "q"}, called(1), called(2), answered("c1"), answered("c2")]
    done = repair([*first, called(3), answered("fc_2")], format="openai-responses")
    assert [(edit.code, edit.at) for edit in done.edits] == [
        ("foreign-result-id", 6),
        ("dangling-call", 5),
        ("repeated-result", 6),
    ]
    assert done.messages[:5] == first
    assert done.messages[-1]["content"].endswith("of fc_2")
