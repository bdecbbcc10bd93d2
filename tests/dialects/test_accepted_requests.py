"""The conversation of a request, as the upstream behind the gateway receives it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from midstream.agents.pool import Pooled
from midstream.agents.upstream_abilities import Abilities
from midstream.dialects.application_sessions import REQUESTS
from midstream.dialects.usage_ledger import ENTRIES
from midstream.history.messages import Text, UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel, ScriptedStep, text
from midstream.testing.scripted_upstream import ScriptedUpstream, words_of
from midstream.testing.store_fakes import StoreInFront
from tests.dialects.gateway_serving import ServedGateway, asgi_client, chat, make_gateway, served
from tests.dialects.test_live_responses import WORDS, gated_response, until
from tests.spec import spec


def echo(request: ModelRequest) -> Sequence[ScriptedStep]:
    newest = [entry for entry in request.history.entries if isinstance(entry, UserMessage)][-1]
    return text(f"re: {newest.parts[0].text}" if isinstance(newest.parts[0], Text) else "a file")


async def sessions_of(gateway: ServedGateway, *bodies: dict[str, Any], **headers: str) -> list[str]:
    """Send each body in turn; return the session of each."""
    for body in bodies:
        answer = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
    return [request.session for request in gateway.model.requests[-len(bodies) :]]


FIRST = chat(("user", "hi"))
SECOND = chat(("user", "hi"), ("assistant", "re:  hi\n"), ("user", "more"))
THIRD = chat(
    *[(m["role"], m["content"]) for m in SECOND["messages"]], ("assistant", "re: more"), ("user", "end")
)


@spec("REUSE-73")
@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-midstream-session": "s1"}, {}),
        ({"x-session-affinity": "s1"}, {}),
        ({"x-claude-code-session-id": "s1"}, {}),
        ({}, {"metadata": {"session_id": "s1"}}),
        ({}, {"metadata": {"user_id": "user_1_account__session_01234567-89ab-cdef-0123-456789abcdef"}}),
    ],
)
async def test_a_client_application_may_name_the_conversation(
    headers: dict[str, str], fields: dict[str, Any]
) -> None:
    async with served(echo) as gateway:
        unlike = [{**chat(("user", "one")), **fields}, {**chat(("user", "two")), **fields}]
        first, second = await sessions_of(gateway, *unlike, **headers)
        assert first == second != ""
        (other,) = await sessions_of(gateway, FIRST, **{"x-midstream-session": "another"})
        assert other != first


@spec("REUSE-73")
async def test_without_a_name_a_conversation_is_identified_by_its_messages() -> None:
    async with served(echo) as gateway:
        first, second, third = await sessions_of(gateway, FIRST, SECOND, THIRD)
        assert first == second == third != ""


@spec("REUSE-73")
async def test_two_chats_with_the_same_start_are_separate() -> None:
    async with served(lambda request: text(f"answer {len(gateway.model.requests)}")) as gateway:
        ours, theirs = await sessions_of(gateway, FIRST, FIRST)
        assert ours != theirs
        continuing = [
            chat(("user", "hi"), ("assistant", f"answer {number}"), ("user", "more")) for number in (1, 2)
        ]
        assert await sessions_of(gateway, *continuing) == [ours, theirs]


@spec("REUSE-73")
async def test_an_unknown_history_is_a_new_conversation_and_evicts_none() -> None:
    async with served(echo) as gateway:
        (first,) = await sessions_of(gateway, FIRST)
        edited = chat(("user", "hi"), ("assistant", "words nobody said"), ("user", "more"))
        (foreign,) = await sessions_of(gateway, edited)
        (second,) = await sessions_of(gateway, SECOND)
        assert foreign != first == second


@spec("REUSE-73")
async def test_a_user_or_a_cache_key_narrows_the_search_for_a_conversation() -> None:
    async with served(echo) as gateway:
        for field in ("user", "prompt_cache_key"):
            ours, theirs = await sessions_of(gateway, {**FIRST, field: "a"}, {**FIRST, field: "b"})
            assert ours != theirs
            assert await sessions_of(gateway, {**SECOND, field: "a"}) == [ours]
            assert await sessions_of(gateway, {**chat(("user", "else")), field: "a"}) != [ours]


@spec("REUSE-74")
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (chat(("user", "hi")), {"x-midstream-ephemeral": "1"}),
        ({**chat(("user", "hi")), "metadata": {"ephemeral": "true"}}, {}),
        (chat(("system", "You are a title generator. You output ONLY a thread title."), ("user", "hi")), {}),
        (chat(("user", "Provide a concise, 5-word-or-less title for the conversation:\nhi")), {}),
    ],
)
async def test_side_calls_are_marked(body: dict[str, Any], headers: dict[str, str]) -> None:
    async with served(echo) as gateway:
        assert (await gateway.http.post("/v1/chat/completions", json=body, headers=headers)).is_success
        (request,) = gateway.model.requests
        assert (request.is_ephemeral, request.session) == (True, "")


@spec("REUSE-74")
async def test_a_client_application_can_declare_that_a_request_is_no_side_call() -> None:
    async with served(echo) as gateway:
        body = chat(("user", "Please response with a title for the chat"))
        await gateway.http.post("/v1/chat/completions", json=body, headers={"x-midstream-ephemeral": "no"})
        assert not gateway.model.requests[0].is_ephemeral


@spec("REUSE-74")
async def test_a_pooled_upstream_receives_each_message_once_and_side_calls_separately() -> None:
    upstream = ScriptedUpstream()
    app = make_gateway(Pooled(upstream, store := MemoryStore()), store=store)
    async with asgi_client(app) as client:
        messages: list[dict[str, str]] = []
        for words in ("one", "two", "three"):
            messages.append({"role": "user", "content": words})
            answer = await client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
            assert answer.status_code == 200, answer.text
            messages.append(
                {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
            )
            title = chat(
                ("system", "You are a title generator. You output ONLY a thread title."), ("user", words)
            )
            assert (await client.post("/v1/chat/completions", json=title)).status_code == 200
    # One agent received the conversation, each message once; each title had an agent that was deleted.
    talks = upstream.memory.talks.values()
    assert [
        [words_of(received.message) for received in talk.messages] for talk in talks if len(talk.messages) > 1
    ] == [["one", "two", "three"]]


@spec("REUSE-74")
@pytest.mark.parametrize(("is_stored", "received"), [(True, ["one", "two"]), (False, ["one", "one … two"])])
async def test_a_conversation_that_the_provider_may_not_store_is_sent_whole_each_time(
    *, is_stored: bool, received: list[str]
) -> None:
    upstream = ScriptedUpstream(abilities=Abilities(grants=frozenset({"store"})))
    app = make_gateway(Pooled(upstream, store := MemoryStore()), store=store)
    async with asgi_client(app) as client:
        messages: list[dict[str, str]] = []
        for words in ("one", "two"):
            messages.append({"role": "user", "content": words})
            body = {"model": "m", "store": is_stored, "messages": messages}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            messages.append(
                {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
            )
    arrived = [words_of(sent) for _, sent in upstream.memory.arrived]
    assert [each if each in ("one", "two") else "one … two" for each in arrived] == received
    assert "one" in arrived[-1] or is_stored
    assert "two" in arrived[-1]


@pytest.mark.parametrize(("takes_tools", "named"), [(True, ""), (False, "tools")])
async def test_the_header_names_an_agent_that_cannot_call_the_applications_tools(
    *, takes_tools: bool, named: str
) -> None:
    upstream = ScriptedUpstream(abilities=Abilities(takes_tools=takes_tools))
    app = make_gateway(Pooled(upstream, store := MemoryStore()), store=store)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with asgi_client(app) as client:
        answer = await client.post("/v1/chat/completions", json={**FIRST, "tools": tools})
        assert answer.headers.get("x-midstream-ignored", "") == named


async def test_two_simultaneous_equal_retries_are_one_run() -> None:
    """Two equal retries at the same instant, of which neither can have found the other's run, are one run."""
    async with served([[TextDelta("x")]]) as gateway:
        body = chat(("user", "hi"))
        await asyncio.gather(
            *(
                gateway.http.post("/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "1"})
                for _ in range(3)
            )
        )
        assert len(gateway.model.requests) == 1


class Stepwise(StoreInFront):
    """A store whose writes end together: when no new operation has started for some turns of the event loop."""

    TURNS = 20

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.together: list[list[str]] = []
        """The writes that ran at the same time."""
        self._is_open = False

    async def before_operation(self, operation: str, session: str) -> None:
        if operation in {"claim", "append"}:
            await self._write(operation)

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        if namespace in {REQUESTS, ENTRIES}:
            await self._write(namespace)
        return await super().kv_put(namespace, key, body, expected=expected, at=at)

    async def _write(self, what: str) -> None:
        if not self._is_open:
            self.together.append([])
            self._is_open = True
        self.together[-1].append(what)
        for _ in range(self.TURNS):
            await asyncio.sleep(0)
        self._is_open = False


async def test_the_writes_before_a_response_run_concurrently() -> None:
    store = Stepwise()
    app = make_gateway(ScriptedModel([[TextDelta("x"), Finished()]]), store=store)
    async with asgi_client(app) as client:
        assert (await client.post("/v1/chat/completions", json=FIRST)).status_code == 200
    before, begun = store.together[:2]
    assert (sorted(before), begun) == (["claim", REQUESTS, ENTRIES], ["append"])


@spec("REUSE-73")
@pytest.mark.parametrize(
    ("main", "other"),
    [
        (
            {"x-claude-code-session-id": "s"},
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a1"},
        ),
        ({"session-id": "s", "thread-id": "s"}, {"session-id": "s", "thread-id": "t"}),
        (
            {"session-id": "s", "thread-id": "s"},
            {"session-id": "s", "thread-id": "s", "x-openai-subagent": "compact"},
        ),
    ],
    ids=["claude", "codex", "codex-compaction"],
)
async def test_a_sub_agent_is_a_separate_conversation(main: dict[str, str], other: dict[str, str]) -> None:
    async with served(echo) as gateway:
        (ours,) = await sessions_of(gateway, FIRST, **main)
        (theirs,) = await sessions_of(gateway, FIRST, **other)
        assert ours != theirs
        assert await sessions_of(gateway, SECOND, **main) == [ours]


@spec("REUSE-74")
@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"properties": {"title": {"type": "string"}}}, {}),
        ({"properties": {"title": {"type": "string"}, "branch": {"type": "string"}}}, {}),
        (None, {"x-claude-code-request-class": "auxiliary"}),
    ],
)
async def test_a_request_for_a_title_is_a_side_call_whatever_its_words(
    fields: dict[str, Any] | None, headers: dict[str, str]
) -> None:
    named = {"x-claude-code-session-id": "s"}
    schema = {"type": "object", **(fields or {})}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {**chat(("user", "Fasse zusammen")), **({"response_format": form} if fields else {})}
    async with served(echo) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=body, headers=named | headers)
        assert answer.is_success
        assert gateway.model.requests[0].is_ephemeral
        answered = {**chat(("user", "Fasse zusammen")), "response_format": form}
        answered["response_format"]["json_schema"]["schema"] = {"properties": {"title": {}, "text": {}}}
        assert (await gateway.http.post("/v1/chat/completions", json=answered, headers=named)).is_success
        assert not gateway.model.requests[1].is_ephemeral


SHUFFLED: dict[str, Any] = {
    "client_metadata": {"b": "2", "a": "1"},
    "metadata": {"b": "2", "a": "1"},
    "input": "hi",
    "model": "m",
}
"""A request that Codex repeats with another order of its keys, also within an object."""


@spec("REUSE-70")
async def test_a_repetition_may_have_another_order_of_keys_and_no_stream() -> None:
    """Claude Code repeats without `stream` after a cut stream; both readers join one run."""
    gate = asyncio.Event()
    async with served([gated_response(gate)]) as gateway:
        again = {
            "model": "m",
            "stream": True,
            "metadata": {"a": "1", "b": "2"},
            "input": "hi",
            "client_metadata": {"turn": "another"},
        }
        named = {"x-claude-code-session-id": "s"}
        async with gateway.http.stream(
            "POST", "/v1/responses", json={**SHUFFLED, "stream": True}, headers=named
        ) as cut:
            lines = cut.aiter_lines()  # an iterator that is not kept would close the connection
            while "output_text.delta" not in await anext(lines):
                pass
            whole = asyncio.create_task(gateway.http.post("/v1/responses", json=SHUFFLED, headers=named))
            streamed = asyncio.create_task(gateway.http.post("/v1/responses", json=again, headers=named))
            await until(lambda: any(live.readers == 3 for live in gateway.gateway.responses.all()))
            gate.set()
            assert (await whole).json()["output"][0]["content"][0]["text"] == WORDS
            assert (await whole).headers["content-type"] == "application/json"
            events = await streamed
            assert events.headers["content-type"].startswith("text/event-stream")
            assert "response.completed" in events.text
        assert len(gateway.model.requests) == 1


@spec("REUSE-71")
async def test_an_equal_request_of_a_named_conversation_just_after_the_end_is_a_repetition() -> None:
    async with served(echo) as gateway:
        named = {"x-claude-code-session-id": "s"}
        first = await gateway.http.post("/v1/chat/completions", json=FIRST, headers=named)
        again = await gateway.http.post("/v1/chat/completions", json=FIRST, headers=named)
        assert again.json() == first.json()
        assert again.headers["x-midstream-replayed"] == "true"
        other = await gateway.http.post("/v1/chat/completions", json=FIRST)
        assert "x-midstream-replayed" not in other.headers
        assert len(gateway.model.requests) == 2


@spec("REUSE-70")
async def test_a_later_turn_of_a_conversation_without_a_name_is_found_again_after_its_end() -> None:
    """The answer's last bytes were lost on the way, and the SDK retries."""
    async with served(echo) as gateway:
        await gateway.http.post("/v1/chat/completions", json=FIRST)
        answer = await gateway.http.post("/v1/chat/completions", json=SECOND)
        retried = await gateway.http.post(
            "/v1/chat/completions", json=SECOND, headers={"x-stainless-retry-count": "1"}
        )
        assert (retried.json(), retried.headers["x-midstream-replayed"]) == (answer.json(), "true")
        assert len(gateway.model.requests) == 2
