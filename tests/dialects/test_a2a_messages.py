"""Messages, errors and the card of A2A."""

from __future__ import annotations

import re
from typing import Any

import pytest

from midstream.dialects import a2a_messages as a2a
from midstream.dialects.a2a_messages import A2aError, A2aOptions, A2aSkill
from midstream.errors import AccessError, SessionBusyError, SessionNotFoundError, UsageError
from midstream.history.messages import File, Text

Json = dict[str, Any]
OPTIONS = A2aOptions()


def sent(*parts: Json, **more: object) -> Json:
    return {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [*parts], **more}}


def test_parts_become_parts_of_a_message() -> None:
    found = a2a.read_message(
        sent(
            {"text": "Look:"},
            {"data": {"a": None}},
            {"raw": "AAAA", "mediaType": "image/png", "filename": "a.png"},
            {"url": "https://x.example/b", "mediaType": "application/pdf"},
        ),
        OPTIONS,
    )
    assert found.message.parts == (
        Text("Look:"),
        Text('{"a":null}'),
        File("image/png", data="AAAA", name="a.png"),
        File("application/pdf", url="https://x.example/b"),
    )
    assert found.answer == {"a": None}


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({}, a2a.BAD_PARAMS),
        ({"message": []}, a2a.BAD_PARAMS),
        (sent(), a2a.BAD_PARAMS),
        (sent({"text": "hi"}, messageId=""), a2a.BAD_PARAMS),
        (sent({"text": "hi"}, role="ROLE_AGENT"), a2a.BAD_PARAMS),
        (sent({"text": "hi", "url": "x"}), a2a.BAD_PARAMS),
        (sent({"mediaType": "text/plain"}), a2a.BAD_PARAMS),
        (sent({"raw": "?", "mediaType": "image/png"}), a2a.BAD_PARAMS),
        (sent({"raw": "AAAA", "mediaType": "video/mp4"}), a2a.BAD_TYPE),
        (sent({"raw": "AAAA"}), a2a.BAD_TYPE),
        (sent({"text": "hi", "mediaType": "image/png"}), a2a.BAD_TYPE),
        ({**sent({"text": "hi"}), "configuration": {"historyLength": "many"}}, a2a.BAD_PARAMS),
    ],
)
def test_an_invalid_form_is_refused(params: Json, code: int) -> None:
    with pytest.raises(A2aError) as refused:
        a2a.read_message(params, OPTIONS)
    assert refused.value.code == code


def test_unknown_fields_are_ignored_and_protobuf_names_are_accepted() -> None:
    found = a2a.read_message(sent({"text": "hi", "more": 1}, context_id="c", more=2) | {"x": 1}, OPTIONS)
    assert found.context == "c"
    query = a2a.read_params({"page_size": "2", "contextId": "c"}, a2a.TasksQuery)
    assert (query.pageSize, query.contextId) == (2, "c")


def test_a_message_is_identified_by_its_id_and_its_content() -> None:
    first = a2a.read_message(sent({"text": "hi"}), OPTIONS)
    assert first.stream == a2a.read_message(sent({"text": "hi"}, contextId="c"), OPTIONS).stream
    others = (
        sent({"text": "hi"}, messageId="n"),
        sent({"text": "ho"}),
        sent({"text": "hi"}, messageId="x" * 300),
    )
    streams = [a2a.read_message(each, OPTIONS).stream for each in others]
    assert len({first.stream, *streams}) == 4
    assert all(re.fullmatch(r"a2a-\S{1,100} [0-9a-f]{16}", each) for each in (first.stream, *streams))


@pytest.mark.parametrize("name", ["", "c", "c~", "c~0", "c~-1", "c~01", "~1", "c~x", "c~²", "c~" + "9" * 10])
def test_a_task_id_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(A2aError) as refused:
        a2a.place_of_task(name)
    assert refused.value.code == a2a.NO_TASK
    assert a2a.place_of_task(a2a.task_id("c:1", 12)) == ("c:1", 12)


def test_errors_have_the_form_of_both_bindings() -> None:
    found = a2a.error_of(SessionNotFoundError("no session 'x'"))
    assert found is not None
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "domain": "a2a-protocol.org",
        "reason": "TASK_NOT_FOUND",
    }
    words = "there is no such task"
    assert found.rpc_body() == {"code": -32001, "message": words, "data": [info]}
    assert found.http_body() == {
        "error": {"code": 404, "status": "NOT_FOUND", "message": words, "details": [info]}
    }
    codes = [getattr(a2a.error_of(each), "code", None) for each in (UsageError("x"), SessionBusyError("x"))]
    assert codes == [a2a.BAD_PARAMS, a2a.UNSUPPORTED]
    assert a2a.error_of(AccessError("x")) is None


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("words", {"text": "words"}),
        ("12", {"text": "12"}),
        ('{"a": 1}', {"data": {"a": 1}, "mediaType": "application/json"}),
        ("[1]", {"data": [1], "mediaType": "application/json"}),
        ('{"url": "https://x.example"}', {"url": "https://x.example"}),
        ('{"url": 1}', {"data": {"url": 1}, "mediaType": "application/json"}),
    ],
)
def test_the_result_of_a_tool_is_a_part(content: str, part: Json) -> None:
    assert a2a.artifact_part(content) == part


@pytest.mark.parametrize(("length", "kept"), [(None, [1, 2, 3]), (0, None), (2, [2, 3]), (9, [1, 2, 3])])
def test_the_newest_messages_of_a_history_are_kept(length: int | None, kept: list[int] | None) -> None:
    assert a2a.with_history({"history": [1, 2, 3]}, length).get("history") == kept


def test_instants_have_the_form_of_the_protocol() -> None:
    assert a2a.instant(1.5) == "1970-01-01T00:00:01.500Z"
    assert a2a.read_instant("1970-01-01T00:00:01.500Z") == 1.5
    with pytest.raises(A2aError):
        a2a.read_instant("yesterday")


def test_the_card_has_its_operators_values() -> None:
    skill = A2aSkill("sum", "Sum", "Adds numbers.", ("math",), ("1 + 1",))
    options = A2aOptions("Counts.", "2.1", "https://agents.example/", (skill,), ("image/png",))
    card = a2a.agent_card(options, "counter", "7", "http://127.0.0.1:8000/", is_authenticated=True)
    assert [(each["protocolBinding"], each["url"]) for each in card["supportedInterfaces"]] == [
        ("JSONRPC", "https://agents.example/v1/a2a"),
        ("HTTP+JSON", "https://agents.example/v1/a2a"),
    ]
    assert (card["name"], card["description"], card["version"]) == ("counter", "Counts.", "2.1")
    assert [*card["skills"][0]["examples"]] == ["1 + 1"]
    assert card["securityRequirements"] == [{"schemes": {"bearer": {"list": []}}}]
    plain = a2a.agent_card(OPTIONS, "counter", "7", "http://127.0.0.1:8000/", is_authenticated=False)
    assert (plain["version"], plain["skills"][0]["id"], "securitySchemes" in plain) == ("7", "counter", False)
