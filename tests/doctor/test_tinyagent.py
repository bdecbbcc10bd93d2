"""Sessions of tunacode in their current format: judged in the form in which they are sent, and stored in their own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.doctor.examination import examine
from midstream.doctor.findings import Status
from midstream.doctor.shapes import Json
from midstream.doctor.tinyagent import repair_messages
from midstream.history.repair.placeholders import UNKNOWN
from tests.search import tried


def _text(words: str) -> Json:
    return {"type": "text", "text": words}


def _user(*words: str) -> Json:
    return {"role": "user", "content": [_text(each) for each in words], "timestamp": 1}


def _call(id_: str, **more: object) -> Json:
    return {
        "type": "tool_call",
        "id": id_,
        "name": "bash",
        "arguments": {"c": id_},
        "partial_json": "",
        **more,
    }


def _response(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks), "stop_reason": "stop", "usage": {"input": 1}}


def _result(name: str, words: str = "done") -> Json:
    return {
        "role": "tool_result",
        "tool_call_id": name,
        "tool_name": "bash",
        "content": [_text(words)],
        "details": {"kept": True},
        "is_error": False,
    }


THOUGHT: Json = {"type": "thinking", "thinking": "hm", "thinking_signature": "s"}


def test_a_valid_session_is_returned_as_the_same_list() -> None:
    image = {"type": "image", "url": "data:image/png;base64,AA=="}
    messages = [
        {"role": "user", "content": [_text("Look."), image]},
        _response(THOUGHT, _text("I look."), _call("a"), _call("b")),
        _result("a"),
        _result("b"),
        _response(_text("Done.")),
    ]
    done = repair_messages(messages, None)
    assert (done.is_changed, done.messages is messages) == (False, True)


def test_an_open_call_gets_a_result_and_the_rest_is_the_same_objects() -> None:
    messages = [_user("x"), _response(THOUGHT, _call("a"), _call("b")), _result("a"), _user("and?")]
    done = repair_messages(messages, None)
    assert [edit.code for edit in done.edits] == ["dangling-call"]
    assert [each is old for each, old in zip(done.messages[:3], messages[:3], strict=True)] == [True] * 3
    assert done.messages[3] == {
        "role": "tool_result",
        "tool_call_id": "b",
        "tool_name": "bash",
        "content": [_text(UNKNOWN)],
        "details": {},
        "is_error": True,
    }
    assert repair_messages(done.messages, None).edits == ()


def test_a_changed_message_keeps_its_other_fields() -> None:
    messages = [
        _user("x"),
        _response(THOUGHT, _text("y"), _call("a", name="ba sh")),
        _result("a"),
        _response(_text("z")),
    ]
    done = repair_messages(messages, None)
    response = done.messages[1]
    assert (response["usage"], response["content"][:2]) == ({"input": 1}, [THOUGHT, _text("y")])
    assert response["content"][2] == _call("a", name="ba_sh")


def test_arguments_that_are_not_an_object_become_one() -> None:
    done = repair_messages([_user("x"), _response(_call("a", arguments='{"cut')), _result("a")], None)
    assert done.messages[1]["content"][0]["arguments"] == {"_raw": '{"cut'}


def test_thoughts_of_a_response_that_is_not_sent_are_reported_as_lost() -> None:
    done = repair_messages([_user("x"), _response(THOUGHT), _user("y")], None)
    assert [edit.lost for edit in done.edits if edit.lost] == ["hm"]


def _session(*messages: Any) -> Json:  # noqa: ANN401 - any JSON
    return {
        "version": 1,
        "session_id": "0d1e",
        "project_id": "77aa",
        "thoughts": [],
        "messages": list(messages),
    }


def test_a_session_without_calls_is_recognized_by_its_other_fields(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(_session(_user("x"), _response(_text("y")))))
    document = examine(path).report
    assert (document.format, document.profile, document.status) == ("tunacode", "neutral", Status.CLEAN)


def test_the_rules_of_a_provider_can_be_applied(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(_session(_user("x"), _response(_call("a" * 50)), _result("a" * 50))))
    assert examine(path, profile="anthropic").report.status is Status.CLEAN
    assert examine(path, profile="mistral-v3").report.profile == "mistral-v3"
    assert {each.code for each in examine(path, profile="mistral-v3").report.findings} == {"bad-id"}


def test_its_format_is_refused_for_lines(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(_response(_call("a"))) + "\n" + json.dumps(_result("a")) + "\n")
    assert examine(path).report.reason == "wrong-format"


@pytest.mark.parametrize("role", ["tool_result", "user", "assistant"])
@pytest.mark.parametrize("content", ["", [], [_text("")]])
def test_a_second_repair_of_an_empty_message_changes_nothing(role: str, content: object) -> None:
    messages: list[Any] = [_user("x"), _response(_call("a")), _result("a"), _response(_text("y"), _call("b"))]
    messages[2] |= {"role": role, "content": content, "tool_call_id": None}
    done = repair_messages(messages, None)
    assert done.is_changed
    assert [edit.code for edit in repair_messages(done.messages, None).edits] == []


_ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, 7, "", "x", [], {}, [None], [{"type": "text"}], ["odd"], [{"type": "tool_call"}]]
)


@given(st.data())
@settings(max_examples=tried(200))
def test_any_content_is_repaired_and_a_second_repair_changes_nothing(data: st.DataObject) -> None:
    messages: list[Any] = [
        _user("x"),
        _response(THOUGHT, _text("y"), _call("a")),
        _result("a"),
        _response(_call("b")),
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        message = data.draw(
            st.sampled_from([each for each in messages if isinstance(each, dict)] or [_user("z")])
        )
        message[data.draw(st.sampled_from(sorted(message)))] = copy.deepcopy(data.draw(_ODD))
    before = copy.deepcopy(messages)
    done = repair_messages(messages, None)
    assert messages == before
    assert json.loads(json.dumps(done.messages)) == done.messages
    assert [edit.code for edit in repair_messages(done.messages, None).edits] == []


@pytest.mark.parametrize("mark", ["valid", "broken"])
def test_the_hand_made_sessions_are_those_of_tunacode(mark: str) -> None:
    path = Path(__file__).parent / "histories" / f"tunacode-tinyagent.{mark}.json"
    assert examine(path).report.format == "tunacode"
