"""Requests of the real clients, to a provider on this machine that refuses what the real ones refuse."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest

from midstream.errors import HistoryRefusedError, UsageError
from midstream.frameworks.http_hooks import BODY_BYTES_MAX, repair_body, repairing
from midstream.history.operations import Mode, Repaired
from tests.models.strict_provider import StrictProvider, strict_provider

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx")

CLAUDE = "claude-test-1"
CALL = {"type": "tool_use", "id": "toolu_1", "name": "deploy", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
BROKEN_ANTHROPIC: list[Any] = [
    {"role": "user", "content": "deploy é"},
    {"role": "assistant", "content": [CALL]},
    {"role": "user", "content": "and now?"},
]
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "deploy", "arguments": "{}"}}
BROKEN_CHAT: list[Any] = [
    {"role": "user", "content": "deploy"},
    {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
    {"role": "user", "content": "and now?"},
]
BROKEN_RESPONSES: list[Any] = [
    {"role": "user", "content": "deploy"},
    {"type": "function_call", "call_id": "c1", "name": "deploy", "arguments": "{}"},
    {"role": "user", "content": "and now?"},
]
PAUSED: list[Any] = [
    {"role": "user", "content": "look it up"},
    {
        "role": "assistant",
        "content": [{"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}],
    },
]


@pytest.fixture
def provider() -> Iterator[StrictProvider]:
    with strict_provider() as provider:
        yield provider


def test_anthropics_client_continues_after_a_call_without_result(provider: StrictProvider) -> None:
    repairs: list[Repaired] = []
    with httpx2.Client() as http, httpx2.Client() as plain:
        client = anthropic.Anthropic(
            base_url=provider.url,
            api_key="k",
            http_client=repairing(http, on_repair=repairs.append),
            max_retries=0,
        )
        bare = anthropic.Anthropic(base_url=provider.url, api_key="k", http_client=plain, max_retries=0)
        with pytest.raises(anthropic.BadRequestError, match="without `tool_result`"):
            bare.messages.create(model=CLAUDE, max_tokens=9, messages=BROKEN_ANTHROPIC)
        response = client.messages.create(model=CLAUDE, max_tokens=9, messages=BROKEN_ANTHROPIC)
    assert response.content[0].text == "on it"
    assert [[edit.code for edit in done.edits] for done in repairs] == [["dangling-call"]]
    assert provider.last["messages"] == repairs[0].messages
    assert provider.last["messages"][:2] == BROKEN_ANTHROPIC[:2]
    assert int(provider.headers[-1]["Content-Length"]) == len(provider.bodies[-1])
    assert "anthropic-version" in {name.lower() for name in provider.headers[-1]}


async def test_anthropics_async_client_continues(provider: StrictProvider) -> None:
    async with repairing(anthropic.DefaultAsyncHttpxClient()) as http:
        client = anthropic.AsyncAnthropic(base_url=provider.url, api_key="k", http_client=http, max_retries=0)
        await client.messages.create(model=CLAUDE, max_tokens=9, messages=BROKEN_ANTHROPIC)
    assert len(provider.bodies) == 1


def test_openais_client_continues_in_chat_and_in_responses(provider: StrictProvider) -> None:
    with httpx2.Client() as http:
        client = openai.OpenAI(
            base_url=f"{provider.url}/v1", api_key="k", http_client=repairing(http), max_retries=0
        )
        answer = client.chat.completions.create(model="gpt-5", messages=BROKEN_CHAT)
        assert answer.choices[0].message.content == "on it"
        assert [message["role"] for message in provider.last["messages"]] == [
            "user",
            "assistant",
            "tool",
            "user",
        ]
        assert client.responses.create(model="gpt-5", input=BROKEN_RESPONSES).output_text == "on it"
        assert [item.get("type") for item in provider.last["input"]] == [
            None,
            "function_call",
            "function_call_output",
            None,
        ]


async def test_openais_async_client_continues(provider: StrictProvider) -> None:
    async with repairing(openai.DefaultAsyncHttpxClient()) as http:
        client = openai.AsyncOpenAI(
            base_url=f"{provider.url}/v1", api_key="k", http_client=http, max_retries=0
        )
        await client.chat.completions.create(model="gpt-5", messages=BROKEN_CHAT)
        await client.responses.create(model="gpt-5", input=BROKEN_RESPONSES)
    assert len(provider.bodies) == 2


def test_a_valid_request_is_sent_byte_for_byte(provider: StrictProvider) -> None:
    body = b'{ "model":"m",\n "messages": [{"role":"user","content":"caf\\u00e9", "extra": 1.0e2}] }'
    repairs: list[Repaired] = []
    with repairing(httpx2.Client(), on_repair=repairs.append) as http:
        http.post(f"{provider.url}/v1/messages", content=body)
        http.post(f"{provider.url}/v1/chat/completions", content=body)
    assert (provider.bodies, repairs) == ([body, body], [])


def test_the_callers_messages_are_not_changed(provider: StrictProvider) -> None:
    before = copy.deepcopy(BROKEN_CHAT)
    with repairing(httpx2.Client()) as http:
        http.post(f"{provider.url}/v1/chat/completions", json={"messages": BROKEN_CHAT})
    assert before == BROKEN_CHAT


def test_an_httpx_client_is_supported_too(provider: StrictProvider) -> None:
    with repairing(httpx.Client()) as http:
        answer = http.post(f"{provider.url}/v1/messages?beta=true", json={"messages": BROKEN_ANTHROPIC})
    assert answer.status_code == 200


async def test_a_body_in_pieces_is_repaired(provider: StrictProvider) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        body = json.dumps({"messages": BROKEN_ANTHROPIC}).encode()
        yield body[:20]
        yield body[20:]

    async with repairing(httpx2.AsyncClient()) as http:
        answer = await http.post(f"{provider.url}/v1/messages", content=pieces())
    assert answer.status_code == 200
    assert "Transfer-Encoding" not in provider.headers[-1]


def test_the_existing_hooks_of_a_client_stay(provider: StrictProvider) -> None:
    seen: list[str] = []
    hooks = {"request": [lambda request: seen.append(request.url.path)]}
    with repairing(httpx2.Client(event_hooks=hooks)) as http:
        http.post(f"{provider.url}/v1/messages", json={"messages": BROKEN_ANTHROPIC}).raise_for_status()
    assert seen == ["/v1/messages"]


def test_thinking_is_disabled_if_the_tool_loop_lost_its_own(provider: StrictProvider) -> None:
    loop = [
        {"role": "user", "content": "deploy"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [RESULT]},
    ]
    asked = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "messages": loop,
    }
    repairs: list[Repaired] = []
    with httpx2.Client() as plain, repairing(httpx2.Client(), on_repair=repairs.append) as http:
        assert plain.post(f"{provider.url}/v1/messages", json=asked).status_code == 400
        assert http.post(f"{provider.url}/v1/messages", json=asked).status_code == 200
    assert provider.last == {"thinking": {"type": "disabled"}, "messages": loop}
    assert [(done.edits, done.advice.thinking) for done in repairs] == [((), False)]


def test_adaptive_thinking_may_continue_without_any() -> None:
    loop = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [CALL]}]
    asked = {"thinking": {"type": "adaptive"}, "messages": [*loop, {"role": "user", "content": [RESULT]}]}
    assert repair_body("/v1/messages", json.dumps(asked).encode()) is None


@pytest.mark.parametrize("kept", [{"previous_response_id": "resp_0"}, {"conversation": "conv_1"}])
def test_results_of_calls_stored_by_the_provider_are_no_orphans(kept: dict[str, str]) -> None:
    items = [{"type": "function_call_output", "call_id": "c1", "output": "done"}]
    assert repair_body("/v1/responses", json.dumps({"input": items, **kept}).encode()) is None
    assert repair_body("/v1/responses", json.dumps({"input": items}).encode()) is not None


def test_items_by_reference_are_left_to_the_provider() -> None:
    items = [
        {"type": "item_reference", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    assert repair_body("/v1/responses", json.dumps({"input": items}).encode()) is None


def test_a_paused_response_is_sent_back_unchanged() -> None:
    assert repair_body("/v1/messages", json.dumps({"messages": PAUSED}).encode()) is None
    went_on = [*PAUSED, {"role": "user", "content": "well?"}]
    assert repair_body("/v1/messages", json.dumps({"messages": went_on}).encode()) is not None


def test_a_system_prompt_moves_to_the_place_that_the_provider_requires() -> None:
    asked = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]}
    done = repair_body("/v1/messages", json.dumps(asked).encode())
    assert done is not None
    assert json.loads(done.body) == {"messages": [{"role": "user", "content": "hi"}], "system": "Be brief."}


def test_gemini_is_recognized_by_its_path_and_needs_signatures_from_its_third_version() -> None:
    call = {"functionCall": {"name": "deploy", "args": {}}}
    asked = {
        "contents": [
            {"role": "user", "parts": [{"text": "deploy"}]},
            {"role": "model", "parts": [call]},
            {"role": "user", "parts": [{"functionResponse": {"name": "deploy", "response": {"ok": 1}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
    }
    body = json.dumps(asked).encode()
    assert repair_body("/v1beta/models/gemini-2.5-pro:generateContent", body) is None
    done = repair_body("/v1beta/models/gemini-3-pro-preview:streamGenerateContent", body)
    assert done is not None
    assert [edit.code for edit in done.repaired.edits] == ["call-without-signature"]
    assert json.loads(done.body)["systemInstruction"] == asked["systemInstruction"]


def test_bedrocks_converse_is_recognized_by_its_path() -> None:
    use = {"toolUse": {"toolUseId": "a", "name": "deploy", "input": {}}}
    messages = [
        {"role": "user", "content": [{"text": "deploy"}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"text": "and now?"}]},
    ]
    body = json.dumps({"messages": messages}).encode()
    done = repair_body("/model/us.anthropic.claude-v1:0/converse-stream", body)
    assert done is not None
    assert "toolResult" in json.loads(done.body)["messages"][2]["content"][0]
    assert list(json.loads(done.body)) == ["messages"]


@pytest.mark.parametrize(
    ("path", "is_known"),
    [
        ("/v1/messages", True),
        ("/anthropic/v1/messages/count_tokens", True),
        ("/v1/projects/p/locations/l/publishers/anthropic/models/claude-sonnet-4-5@1:streamRawPredict", True),
        ("/model/us.anthropic.claude-sonnet-4-5-v1:0/invoke-with-response-stream", True),
        ("/model/mistral.large/invoke", False),
        ("/v1/threads/t/messages/m", False),
        ("/v1/messages/batches", False),
        ("/v1/embeddings", False),
    ],
)
def test_requests_are_recognized_by_their_path(path: str, is_known: bool) -> None:  # noqa: FBT001 - a row
    done = repair_body(path, json.dumps({"messages": BROKEN_ANTHROPIC}).encode())
    assert (done is not None) is is_known


def test_the_caller_can_choose_the_profile() -> None:
    asked = {
        "messages": [*BROKEN_CHAT[:1], {**BROKEN_CHAT[1], "tool_calls": [{**CHAT_CALL, "id": "call:1"}]}]
    }
    done = repair_body("/v1/chat/completions", json.dumps(asked).encode(), profile="strict-template")
    assert done is not None
    assert len(json.loads(done.body)["messages"][1]["tool_calls"][0]["id"]) == 9
    with pytest.raises(UsageError, match="unknown profile 'opnai'"):
        repairing(httpx2.Client(), profile="opnai")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"messages": 7}',
        b'{"messages": "hi"}',
        b'{"messages": null}',
        b"\xff",
        b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"top_p": NaN, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}',
        b"",
    ],
    ids=["cut", "a list", "a number", "a text", "null", "no UTF-8", "deep", "NaN", "nothing"],
)
def test_a_request_that_cannot_be_repaired_is_sent_unchanged(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[bytes] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.content)
        return httpx2.Response(200)

    with repairing(httpx2.Client(transport=httpx2.MockTransport(answer))) as http:
        assert http.post("http://provider/v1/messages", content=body).status_code == 200
    assert sent == [body]
    assert all(record.exc_info is None for record in caplog.records)


def test_a_failing_callback_stops_nothing_and_is_logged(
    provider: StrictProvider, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(done: Repaired) -> None:
        raise RuntimeError(f"cannot store {done.messages}")

    with repairing(httpx2.Client(), on_repair=failing) as http:
        http.post(f"{provider.url}/v1/messages", json={"messages": BROKEN_ANTHROPIC}).raise_for_status()
    assert [record.getMessage().rpartition(":")[0] for record in caplog.records] == [
        "a repaired history was sent, but `on_repair` failed: RuntimeError in failing"
    ]


def test_the_log_describes_the_repair_without_content(
    provider: StrictProvider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "midstream")
    with repairing(httpx2.Client()) as http:
        http.post(f"{provider.url}/v1/messages", json={"messages": BROKEN_ANTHROPIC}).raise_for_status()
    logged = [record for record in caplog.records if record.name.startswith("midstream")]
    assert [(record.getMessage(), vars(record)["codes"]) for record in logged] == [
        ("repaired the history in a request", ["dangling-call"])
    ]
    assert not any("deploy" in str(vars(record)) for record in logged)


@pytest.mark.parametrize(
    "headers", [{"authorization": "AWS4-HMAC-SHA256 Credential=…"}, {"content-encoding": "gzip"}]
)
def test_signed_and_compressed_bodies_are_left_alone(headers: dict[str, str]) -> None:
    sent: list[bytes] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.content)
        return httpx2.Response(200)

    body = json.dumps({"messages": BROKEN_ANTHROPIC}).encode()
    ascii_headers = {name: value.replace("…", "x") for name, value in headers.items()}
    with repairing(httpx2.Client(transport=httpx2.MockTransport(answer))) as http:
        http.post("http://provider/v1/messages", content=body, headers=ascii_headers)
    assert sent == [body]


def test_a_body_beyond_the_limit_is_sent_unchanged() -> None:
    sent: list[int] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(len(request.content))
        return httpx2.Response(200)

    body = json.dumps({"messages": BROKEN_ANTHROPIC}).encode().ljust(BODY_BYTES_MAX + 1)
    with repairing(httpx2.Client(transport=httpx2.MockTransport(answer))) as http:
        http.post("http://provider/v1/messages", content=body)
    assert sent == [BODY_BYTES_MAX + 1]


def test_a_redirected_request_keeps_its_repair() -> None:
    sent: list[Any] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(request.read()))
        is_first = request.url.path == "/v1/messages"
        return (
            httpx2.Response(307, headers={"location": "/b/v1/messages"}) if is_first else httpx2.Response(200)
        )

    client = httpx2.Client(transport=httpx2.MockTransport(answer), follow_redirects=True)
    with repairing(client) as http:
        http.post("http://provider/v1/messages", json={"messages": BROKEN_ANTHROPIC})
    assert sent[0] == sent[1] != {"messages": BROKEN_ANTHROPIC}


def _sent(mode: Mode, history: list[Any]) -> list[Any]:
    body = json.dumps({"model": "m", "messages": history}).encode()
    instead = repair_body("/v1/chat/completions", body, mode=mode)
    assert instead is not None
    messages: list[Any] = json.loads(instead.body)["messages"]
    return messages


def test_every_mode_keeps_the_prompt_and_the_instructions_of_the_request() -> None:
    top: Any = {"role": "system", "content": "be brief"}
    history = [top, *BROKEN_CHAT]
    assert _sent("drop", history) == [top, BROKEN_CHAT[0], BROKEN_CHAT[2]]
    assert _sent("rollback", history) == [top, BROKEN_CHAT[0], BROKEN_CHAT[2]]
    assert _sent("sanitize", [*history, top, BROKEN_CHAT[2]]) == [top, BROKEN_CHAT[2]]


def test_strict_sends_no_request_that_the_provider_would_refuse(provider: StrictProvider) -> None:
    with httpx2.Client() as http:
        client = openai.OpenAI(
            base_url=f"{provider.url}/v1",
            api_key="k",
            http_client=repairing(http, mode="strict"),
            max_retries=0,
        )
        with pytest.raises(Exception) as refused:  # noqa: PT011 - the client may wrap it
            client.chat.completions.create(model="m", messages=BROKEN_CHAT)
    errors = [refused.value, refused.value.__cause__]
    assert any(isinstance(error, HistoryRefusedError) for error in errors)
    with pytest.raises(UsageError):
        repairing(httpx2.Client(), mode="clean")  # type: ignore[arg-type]  # an application may pass it
