"""Messages of MCP: parsed and refused requests, the server's descriptions, and questions as forms."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from midstream.dialects import mcp_messages as mcp
from midstream.dialects.mcp_messages import (
    ASK,
    CallPlace,
    McpClient,
    McpError,
    McpOptions,
    McpTool,
    answer_to,
    elicitation,
    modern_client,
    read_arguments,
    read_message,
    server_of,
    task_of,
    tools_of,
)
from midstream.errors import MalformedFrameError, UsageError
from midstream.session.calls import CHOICES, Choice, QuestionKind
from midstream.session.questions import Question

Json = dict[str, Any]
META: Json = {mcp.VERSION: mcp.MODERN, mcp.CAPABILITIES: {}}
OLD, NEW = McpClient("2025-11-25"), McpClient(mcp.MODERN)


def message(method: str, **params: object) -> mcp.RpcMessage:
    return mcp.RpcMessage("2.0", 1, method, params)


def question_of(kind: QuestionKind) -> Question:
    return Question("s", 1, 1, "c", kind, "dig", "burn", '{"what": "tree"}', CHOICES[kind], 1.0, "Which?")


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"{",
            b"[]",
            b'{"jsonrpc": "2.0"}',
            b'{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}',
            b"[" * 200,
        ),
        msgspec.json.encode({"jsonrpc": "2.0", "id": "x" * 201, "method": "ping"}),
        msgspec.json.encode([{"jsonrpc": "2.0", "id": 1, "method": "ping"}]),
    ],
)
def test_a_body_that_is_not_a_single_message_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        read_message(body)


def test_equal_calls_have_one_digest_whatever_their_ids_and_metadata() -> None:
    first = message("tools/call", name="ask", arguments={"message": "a", "session": "s"})
    again = mcp.RpcMessage("2.0", 9, "tools/call", {**first.params, "_meta": {"progressToken": 3}})
    assert first.digest == again.digest
    assert first.digest != message("tools/call", name="ask", arguments={"message": "b"}).digest


@pytest.mark.parametrize(("token", "kept"), [(3, 3), ("t", "t"), ("t" * 201, None), ([], None), (None, None)])
def test_a_token_that_would_not_fit_an_event_id_gets_no_progress(token: object, kept: object) -> None:
    assert message("tools/call", _meta={"progressToken": token}).progress_token == kept


@pytest.mark.parametrize(
    ("method", "params", "headers", "code"),
    [
        ("tools/list", {}, {}, mcp.BAD_PARAMS),
        ("tools/list", {"_meta": META}, {"mcp-method": "tools/list"}, mcp.HEADER_MISMATCH),
        ("tools/list", {"_meta": META}, {"mcp-protocol-version": mcp.MODERN}, mcp.HEADER_MISMATCH),
        ("tools/call", {"_meta": META, "name": "ask"}, {"mcp-name": "other"}, mcp.HEADER_MISMATCH),
        ("tools/call", {"_meta": META, "name": "é"}, {"mcp-name": "=?base64?w6k?="}, mcp.HEADER_MISMATCH),
        ("ping", {"_meta": {**META, mcp.VERSION: "2099-01-01"}}, {}, mcp.NO_VERSION),
    ],
)
def test_a_modern_request_whose_envelope_and_headers_disagree_is_refused(
    method: str, params: Json, headers: Json, code: int
) -> None:
    meta = params.get("_meta", {})
    if len(headers) == 0 or "mcp-name" in headers:
        headers = {"mcp-protocol-version": meta.get(mcp.VERSION, ""), "mcp-method": method, **headers}
    with pytest.raises(McpError) as refused:
        modern_client(message(method, **params), headers)
    assert refused.value.code == code
    assert mcp.STATUSES[code] == 400


def test_a_name_may_be_encoded() -> None:
    headers = {"mcp-protocol-version": mcp.MODERN, "mcp-method": "tools/call", "mcp-name": "=?base64?w6k=?="}
    assert modern_client(message("tools/call", _meta=META, name="é"), headers) == NEW


def test_abilities_of_a_client_follow_from_its_capabilities() -> None:
    assert not OLD.can_elicit
    assert McpClient("2025-06-18", {"elicitation": {}}).can_elicit
    assert not McpClient(mcp.MODERN, {"elicitation": {"url": {}}}).can_elicit
    tasks: Json = {"extensions": {mcp.TASKS: {}}}
    assert (McpClient(mcp.MODERN, tasks).has_tasks, McpClient("2025-11-25", tasks).has_tasks) == (True, False)
    assert [McpClient(each).can_resume for each in (*mcp.HANDSHAKES, mcp.MODERN)] == [False] * 3 + [True] * 2


def test_the_server_describes_itself_in_the_form_of_each_version() -> None:
    assert server_of(OLD, "chat")["capabilities"]["tasks"]["requests"] == {"tools": {"call": {}}}
    assert "tasks" not in server_of(McpClient("2025-06-18"), "chat")["capabilities"]
    assert server_of(NEW, "chat")["capabilities"]["extensions"] == {mcp.TASKS: {}}
    options = McpOptions((McpTool("rate", "Rate a text.", task="required"),))
    old, new = (tools_of(each, options, "chat") for each in (OLD, NEW))
    assert [each["execution"]["taskSupport"] for each in old["tools"]] == ["optional", "required"]
    assert (new["resultType"], new["cacheScope"]) == ("complete", "private")
    assert [each["name"] for each in new["tools"]] == ["ask", "rate"]


def test_two_tools_with_the_same_name_are_refused() -> None:
    with pytest.raises(UsageError, match="same name: ask, ask"):
        McpOptions((McpTool("ask"),))
    with pytest.raises(McpError, match="no tool 'x'"):
        McpOptions().find("x")


def test_arguments_are_the_message_of_a_call() -> None:
    assert read_arguments(ASK, {"message": "hi", "session": "s"}) == ("hi", "s")
    rate = McpTool("rate", "", {"type": "object", "required": ["text"]})
    assert read_arguments(rate, {"text": "a"}) == ('{"tool":"rate","arguments":{"text":"a"}}', "")
    for tool, given in ((ASK, {}), (ASK, {"message": " "}), (ASK, {"message": 1}), (rate, {}), (rate, [])):
        with pytest.raises(UsageError):
            read_arguments(tool, given)


def test_a_form_is_answered_and_a_dismissed_one_denies() -> None:
    approval, words, doubt = (
        question_of(each) for each in (QuestionKind.APPROVAL, QuestionKind.QUESTION, QuestionKind.DOUBT)
    )
    assert "burn" in elicitation(approval)["params"]["message"]
    assert elicitation(words)["params"]["message"] == "Which?"
    assert elicitation(doubt)["params"]["requestedSchema"]["properties"]["outcome"]["enum"] == [
        *("happened", "rerun", "skip")
    ]
    accepted: list[tuple[Question, Json, Choice, str]] = [
        (approval, {"confirm": True}, Choice.ALLOW, ""),
        (approval, {"confirm": "yes"}, Choice.DENY, ""),
        (words, {"answer": "Both"}, Choice.RESPOND, "Both"),
        (words, {"other": 1}, Choice.RESPOND, '{"other":1}'),
        (doubt, {"outcome": "happened"}, Choice.HAPPENED, ""),
        (doubt, {"outcome": "nonsense"}, Choice.SKIP, ""),
    ]
    for question, content, choice, text in accepted:
        found = answer_to(question, {"action": "accept", "content": content})
        assert (found.choice, found.text, found.digest) == (choice, text, "dig")
    for question, choice in ((approval, Choice.DENY), (words, Choice.RESPOND), (doubt, Choice.SKIP)):
        for result in ({"action": "decline"}, {"action": "cancel", "content": {"confirm": True}}, None):
            assert answer_to(question, result).choice is choice


def test_a_pause_has_a_check_of_its_place() -> None:
    pause = mcp.PauseState(CallPlace("s", 3), 9).with_check()
    assert msgspec.structs.replace(pause, position=8).with_check() != msgspec.structs.replace(
        pause, position=8
    )


def test_a_task_has_the_fields_of_its_version() -> None:
    old, new = (task_of(each, CallPlace("s", 1), "working", (0.0, 1.5)) for each in (OLD, NEW))
    assert (old["ttl"], old["pollInterval"], new["ttlMs"], new["pollIntervalMs"]) == (None, 1000, None, 1000)
    assert new["lastUpdatedAt"] == "1970-01-01T00:00:01.500000+00:00"


@pytest.mark.parametrize("option", ["stream_s", "retry_s", "task_after_s"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_options_that_are_no_numbers_of_seconds_are_refused(option: str, seconds: float) -> None:
    with pytest.raises(UsageError, match=option):
        McpOptions(**{option: seconds})  # type: ignore[arg-type]
