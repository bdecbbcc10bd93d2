"""Requests of LangGraph's clients, read and refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from midstream.dialects.langgraph_messages import interrupts_of
from midstream.dialects.langgraph_requests import (
    RunBody,
    RunCommand,
    answers_of,
    ignored_of,
    input_of,
    modes_of,
)
from midstream.dialects.request_fields import BadFieldError
from midstream.dialects.run_fold import RunFold
from midstream.errors import AnswerMismatchError, QuestionClosedError
from midstream.history.messages import File, Text, UserMessage
from midstream.session.calls import CHOICES, Choice, QuestionKind
from midstream.session.questions import Question
from tests.dialects.langgraph_journal import approved, facts_of

Json = dict[str, Any]


def run_request() -> RunFold:
    fold = RunFold("t")
    facts_of(approved()[:8], fold)
    return fold


def test_an_equal_input_with_an_id_is_the_same_run_and_one_without_is_another() -> None:
    given: Json = {"messages": [{"role": "user", "content": "hi", "id": "m1"}]}
    first, second = (input_of("t", given, fresh=each) for each in "ab")
    assert first == second
    assert input_of("u", given, fresh="a").run_id != first.run_id
    given = {"messages": "hi"}
    assert input_of("t", given, fresh="a").run_id != input_of("t", given, fresh="b").run_id


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("hi", (Text("hi"),)),
        (["user", "hi"], (Text("hi"),)),
        ({"type": "human", "content": [{"type": "text", "text": "hi"}]}, (Text("hi"),)),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "https://x.example/a.png"}]},
            (File("image/*", url="https://x.example/a.png"),),
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "file", "mime_type": "text/plain", "data": "aGk=", "metadata": {"name": "a.txt"}}
                ],
            },
            (File("text/plain", data="aGk=", name="a.txt"),),
        ),
    ],
)
def test_messages_are_read_in_the_forms_of_langchain(given: object, parts: tuple[object, ...]) -> None:
    assert input_of("t", {"messages": [given]}, fresh="a").messages == (UserMessage(parts),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [7]},
    ],
)
def test_other_inputs_are_refused(given: object) -> None:
    with pytest.raises(BadFieldError):
        input_of("t", given, fresh="a")


def test_a_decision_is_bound_to_the_shown_interrupt() -> None:
    fold = run_request()
    (asked,) = interrupts_of(fold.questions)
    ((_, answer),) = answers_of(fold.questions, {asked["id"]: {"decisions": [{"type": "approve"}]}})
    assert (answer.choice, answer.digest, answer.ref.call_id) == (Choice.ALLOW, "dig", "c")
    with pytest.raises(QuestionClosedError, match="not open"):
        answers_of(fold.questions, {"0" * 32: True})


@pytest.mark.parametrize(
    ("value", "choice", "words", "arguments"),
    [
        (True, Choice.ALLOW, "", None),
        ("Deny", Choice.DENY, "", None),
        ({"approved": False, "reason": "no"}, Choice.DENY, "no", None),
        (
            {"type": "edit", "args": {"action": "burn", "args": {"what": "wood"}}},
            Choice.ALLOW,
            "",
            '{"what":"wood"}',
        ),
        ([{"type": "ignore"}], Choice.DENY, "", None),
    ],
)
def test_decisions_have_several_forms(
    value: object, choice: Choice, words: str, arguments: str | None
) -> None:
    ((_, answer),) = answers_of(run_request().questions, value)
    assert (answer.choice, answer.text, answer.arguments) == (choice, words, arguments)


@pytest.mark.parametrize(
    "value",
    [
        "perhaps",
        3,
        {"type": "edit", "args": "x"},
        {"type": "edit", "edited_action": {"name": "keep", "args": {"what": "wood"}}},
        {"type": "edit", "args": {"action": "keep", "args": {"what": "wood"}}},
        {},
        {"decisions": []},
        "happened",
        {"decisions": [{"type": "happened", "message": "I saw it"}]},
    ],
)
def test_an_invalid_decision_is_refused(value: object) -> None:
    with pytest.raises(AnswerMismatchError):
        answers_of(run_request().questions, value)


def test_a_call_in_doubt_does_not_run_again_with_other_arguments() -> None:
    choices = CHOICES[QuestionKind.DOUBT]
    asked = Question("s", 1, 1, "c", QuestionKind.DOUBT, "d", "burn", "{}", choices, 0.0)
    ((_, answer),) = answers_of([asked], {"decisions": [{"type": "approve"}]})
    assert answer.choice is Choice.RERUN
    with pytest.raises(AnswerMismatchError, match="its own arguments"):
        answers_of([asked], {"type": "edit", "edited_action": {"name": "burn", "args": {"what": "wood"}}})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"checkpoint_id": "c"}, "checkpoint_id"),
        ({"interrupt_after": ["tools"]}, "interrupt_after"),
        ({"command": {"update": {"x": 1}}}, "command.update"),
        ({"after_seconds": 3.0}, "after_seconds"),
        ({"multitask_strategy": "rollback"}, "multitask_strategy"),
        ({"stream_mode": ["values", "debug"]}, "stream_mode"),
    ],
)
def test_an_unsupported_option_is_refused_by_name(fields: Json, name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({"assistant_id": "agent", **fields}, RunBody)


def test_modes_are_read_and_other_fields_ignored() -> None:
    assert modes_of("values") == ("values",)
    with pytest.raises(BadFieldError, match="debug"):
        modes_of(["values", "debug"])
    assert ignored_of(RunBody("agent", context={"a": 1})) == ("context",)
    assert RunBody("agent").resume is msgspec.UNSET
    assert RunBody("agent", command=RunCommand(None)).resume is None
