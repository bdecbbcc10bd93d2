"""Sessions of client applications, by the names of conversations, requests and responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from typing_extensions import override

from midstream.dialects import accepted_requests, application_sessions, live_responses
from midstream.dialects.application_sessions import (
    REQUESTS,
    REQUESTS_KEPT_S,
    response_id,
    session_of_response,
)
from midstream.dialects.usage_ledger import ENTRIES
from midstream.environment import World
from midstream.errors import ModelUnavailableError
from midstream.history.messages import Step
from midstream.session.turn.commands import Cancel
from midstream.store.contract import KeyValueEntry
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.scripted_model import ScriptedModel, calls, text
from tests.dialects.gateway_serving import (
    WAIT_S,
    Json,
    ServedGateway,
    asgi_client,
    chat,
    chat_request,
    make_gateway,
    served,
    serving,
)
from tests.dialects.test_live_responses import POLL_S, gated_response, until
from tests.spec import spec

WORDS = "one two"
RETRY = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize(
    "name",
    ["resp_1", "resp_", "chatcmpl-1", "resp_zz000001", "resp_ab²²²²²²", "resp_ä000001", "resp_" + "0" * 38],
)
async def test_an_unknown_response_id_is_not_found(name: str) -> None:
    async with served([text(WORDS)]) as gateway, gateway.openai() as client:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(name)


def test_the_id_of_a_response_names_its_session() -> None:
    assert response_id("resp_", "gw-ab12", 7) == "resp_ab12000007"


@spec("REUSE-75")
async def test_a_continued_response_can_be_continued_again() -> None:
    async with served([text(WORDS)]) as gateway, gateway.openai() as client:
        first = await client.responses.create(model="m", input="a")
        second = await client.responses.create(model="m", input="b", previous_response_id=first.id)
        fork = await client.responses.create(model="m", input="c", previous_response_id=first.id)
        await client.responses.create(model="m", input="d", previous_response_id=second.id)
        await client.responses.create(model="m", input="e", previous_response_id=fork.id)
    asked = [
        [part.text for entry in request.history.entries for part in getattr(entry, "parts", ())]
        for request in gateway.model.requests
    ]
    assert asked == [["a"], ["a", "b"], ["a", "c"], ["a", "b", "d"], ["a", "c", "e"]]


@spec("REUSE-75")
async def test_each_fork_of_a_response_with_calls_has_its_own_results() -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    async with served([calls(("c1", "look", "{}")), text(WORDS)]) as gateway:
        body = {"model": "m", "tools": [tool]}
        made = (await gateway.http.post("/v1/responses", json={**body, "input": "hi"})).json()
        for words in ("rain", "sun", "snow"):
            output = [{"type": "function_call_output", "call_id": "c1", "output": words}]
            again = {**body, "input": output, "previous_response_id": made["id"]}
            answer = (await gateway.http.post("/v1/responses", json=again)).json()
            assert answer["output"][0]["content"][0]["text"] == WORDS
            _, step = gateway.model.requests[-1].history.entries
            assert isinstance(step, Step)
            assert [result.content for result in step.results] == [words]
        other = {**body, "input": "never mind", "previous_response_id": made["id"]}
        assert (await gateway.http.post("/v1/responses", json=other)).is_success
        assert "rain" not in str(gateway.model.requests[-1].history.entries)


@spec("REUSE-70")
async def test_a_repetition_finds_its_response_at_another_process() -> None:
    memory = Memory()
    first, second = (make_gateway(ScriptedModel([text(WORDS)]), store=MemoryStore(memory)) for _ in range(2))
    async with asgi_client(first) as ours, asgi_client(second) as theirs:
        key = {"idempotency-key": "k"}
        made = await ours.post("/v1/chat/completions", json=chat_request("hi"), headers=key)
        again = await theirs.post("/v1/chat/completions", json=chat_request("hi"), headers=key)
        assert (again.json(), again.headers["x-midstream-replayed"]) == (made.json(), "true")
        other = await theirs.post("/v1/chat/completions", json=chat_request("ho"), headers=key)
        assert other.status_code == 422


class _PausingStore(MemoryStore):
    """Waits once after requests are noted: its node has not started their responses then."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.noted, self.proceed = asyncio.Event(), asyncio.Event()

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        version = await super().kv_put(namespace, key, body, expected=expected, at=at)
        if namespace == REQUESTS and key.startswith("key "):
            self.noted.set()
            await asyncio.wait_for(self.proceed.wait(), WAIT_S)
        return version


@spec("REUSE-70")
@pytest.mark.parametrize("is_dead", [False, True])
async def test_a_request_noted_and_not_started_by_another_process_is_awaited_for_a_while(
    *, is_dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted_requests, "EQUAL_S", 0.5 if is_dead else WAIT_S)
    store = _PausingStore(memory := Memory())
    models = [ScriptedModel([text(WORDS)]) for _ in range(2)]
    first = make_gateway(models[0], store=store)
    second = make_gateway(models[1], store=MemoryStore(memory))
    async with asgi_client(first) as ours, asgi_client(second) as theirs:
        key = {"idempotency-key": "k"}
        begun = asyncio.create_task(ours.post("/v1/chat/completions", json=chat_request("hi"), headers=key))
        await asyncio.wait_for(store.noted.wait(), WAIT_S)
        other = asyncio.create_task(theirs.post("/v1/chat/completions", json=chat_request("hi"), headers=key))
        if is_dead:
            assert (await other).is_success
            begun.cancel()
        else:
            asyncio.get_running_loop().call_later(0.2, store.proceed.set)
            assert (await begun).json() == (await other).json()
        assert [len(each.requests) for each in models] == [int(not is_dead), int(is_dead)]
        store.proceed.set()


class _RacingStore(MemoryStore):
    """Returns the first request's entry after another node has read, too: neither finds the other's."""

    def __init__(self, memory: Memory, both: asyncio.Barrier) -> None:
        super().__init__(memory)
        self._both = both
        self._is_first = True

    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        found = await super().kv_get(namespace, key)
        if namespace == REQUESTS and self._is_first:
            self._is_first = False
            await asyncio.wait_for(self._both.wait(), WAIT_S)
        return found


@spec("REUSE-70")
async def test_of_equal_retries_at_two_processes_one_is_started_and_counted() -> None:
    memory, both = Memory(), asyncio.Barrier(2)
    models = [ScriptedModel([text(WORDS)]) for _ in range(2)]
    stores = [_RacingStore(memory, both) for _ in range(2)]
    first, second = (make_gateway(model, store=store) for model, store in zip(models, stores, strict=True))
    async with asgi_client(first) as ours, asgi_client(second) as theirs:
        answers = await asyncio.gather(
            *(
                client.post("/v1/chat/completions", json=chat_request("hi"), headers=RETRY)
                for client in (ours, theirs)
            )
        )
        assert answers[0].json() == answers[1].json()
        assert sum(len(each.requests) for each in models) == 1
        assert len(await stores[0].kv_list(ENTRIES)) == 1
        assert len([each async for each in stores[0].list()]) == 1


async def test_a_request_whose_response_failed_at_another_process_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepted_requests, "EQUAL_S", 2 * WAIT_S)
    memory = Memory()
    first = make_gateway(ScriptedModel([[ModelUnavailableError("away")]]), store=MemoryStore(memory))
    second = make_gateway(ScriptedModel([text(WORDS)]), store=MemoryStore(memory))
    async with asgi_client(first) as ours, asgi_client(second) as theirs:
        key = {"idempotency-key": "k"}
        failed = await ours.post("/v1/chat/completions", json=chat_request("hi"), headers=key)
        assert failed.status_code == 500
        async with asyncio.timeout(WAIT_S):
            again = await theirs.post("/v1/chat/completions", json=chat_request("hi"), headers=key)
        assert again.is_success
        assert "x-midstream-replayed" not in again.headers


async def test_two_concurrent_requests_of_one_conversation_are_both_answered() -> None:
    async with served([text(WORDS)]) as gateway:
        headers = {"x-midstream-session": "s"}
        answers = await asyncio.gather(
            *(
                gateway.http.post(
                    "/v1/chat/completions", json=chat_request(f"question {number}"), headers=headers
                )
                for number in range(8)
            )
        )
    assert [answer.status_code for answer in answers] == [200] * 8


@spec("REUSE-71")
async def test_a_sleeping_session_keeps_the_delivery_of_its_response() -> None:
    async with served([text(WORDS)]) as gateway:
        for count in (1, 3):
            assert (await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))).is_success
            assert len(gateway.model.requests) == count
            host = gateway.gateway._durable.host
            for live in gateway.gateway.responses.all():
                assert await host.put_to_sleep(live.found.session)
            await gateway.http.post("/v1/chat/completions", json=chat_request(f"other {count}"))


class LaterWorld(World):
    """Its clock may be set forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


async def sweep(gateway: ServedGateway) -> None:
    """Wait for one whole sweep over the old entries: the second of two old entries is deleted by a later sweep."""
    store = gateway.gateway._durable.host.store
    for name in ("first", "second"):
        await store.kv_put(REQUESTS, name, b"gw-none", expected=0, at=0.0)
        async with asyncio.timeout(WAIT_S):
            while await store.kv_get(REQUESTS, name) is not None:
                await World().sleep(POLL_S)


@spec("REUSE-70")
async def test_a_request_is_found_again_as_long_as_its_response_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application_sessions, "SWEEP_S", 0.01)
    world, may_continue = LaterWorld(), asyncio.Event()
    async with served([gated_response(may_continue)], world=world, grace_s=WAIT_S) as gateway:
        async with gateway.http.stream(
            "POST", "/v1/chat/completions", json=chat_request("hi", stream=True)
        ) as cut:
            lines = cut.aiter_lines()
            while "two" not in await anext(lines):
                pass
            world.ahead_s = 2 * REQUESTS_KEPT_S
            await sweep(gateway)
        await until(lambda: not any(live.readers for live in gateway.gateway.responses.all()))
        may_continue.set()
        again = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"), headers=RETRY)
        assert again.headers["x-midstream-replayed"] == "true"
        assert len(gateway.model.requests) == 1
        world.ahead_s += 2 * REQUESTS_KEPT_S
        await sweep(gateway)
        assert await gateway.gateway._durable.host.store.kv_list(REQUESTS) == []


@spec("REUSE-75")
async def test_a_deleted_response_stays_deleted_as_long_as_its_conversation_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(application_sessions, "SWEEP_S", 0.01)
    world = LaterWorld()
    async with (
        served([text(WORDS)], world=world, kept_s=100.0) as gateway,
        gateway.openai() as client,
    ):
        first = await client.responses.create(model="m", input="a")
        newest = await client.responses.create(model="m", input="b", previous_response_id=first.id)
        await client.responses.delete(first.id)
        for _ in range(3):
            world.ahead_s += 50.0
            newest = await client.responses.create(model="m", input="c", previous_response_id=newest.id)
        await sweep(gateway)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)


async def leave_open(memory: Memory, *, is_background: bool = False) -> str:
    """Begin a response, and stop its gateway after the second word; return the id of the response."""
    model = ScriptedModel([gated_response(asyncio.Event())], name="old")
    async with (
        serving(make_gateway(model, store=MemoryStore(memory)), model) as gateway,
        gateway.openai() as client,
    ):
        begun = await client.responses.create(model="m", input="hi", background=is_background, stream=True)
        async for event in begun:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta" and "two" in event.delta:
                break
    return response_id


@spec("REUSE-72")
async def test_a_response_of_an_upstream_that_is_gone_is_stopped_when_it_is_wanted_again() -> None:
    """A reader would wait for ever: another upstream does not continue it."""
    memory = Memory()
    await leave_open(memory)
    kept = await leave_open(memory, is_background=True)
    model = ScriptedModel([text(WORDS)], name="new")
    async with (
        asyncio.timeout(WAIT_S),
        serving(make_gateway(model, store=MemoryStore(memory)), model) as gateway,
        gateway.openai(max_retries=0) as client,
    ):
        found = await client.responses.retrieve(kept)
        assert (found.status, found.output_text) == ("cancelled", "one two")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.responses.create(model="m", input="hi", background=False, extra_headers=RETRY)
        assert (refused.value.status_code, refused.value.code) == (499, "cancelled")
        again = await client.responses.create(model="m", input="hi", background=False)
        assert (again.output_text, len(model.requests)) == (WORDS, 1)


@spec("REUSE-75")
async def test_a_response_of_an_upstream_that_is_gone_is_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(application_sessions, "SWEEP_S", 0.01)
    memory, world = Memory(), LaterWorld()
    await leave_open(memory)
    model = ScriptedModel([text(WORDS)], name="new")
    async with serving(
        make_gateway(model, store=MemoryStore(memory), world=world, kept_s=100.0), model
    ) as gateway:
        store = gateway.gateway._durable.host.store
        await sweep(gateway)
        (info,) = [info async for info in store.list(live=True)]
        world.ahead_s = 200.0
        await sweep(gateway)
        assert [each async for each in store.list(live=True)] == []
        world.ahead_s = 400.0
        await gateway.gateway._durable.host.put_to_sleep(info.session)
        await gateway.gateway._durable.host.tidy(info.session)
        assert await store.find(info.session) is None


@spec("REUSE-76")
async def test_a_gateway_with_another_upstream_on_the_same_store_answers_its_requests_itself() -> None:
    """The other gateway still has the session, to which a request would be forwarded."""
    memory = Memory()
    models = [ScriptedModel([text(f"from {name}")], name=name) for name in ("one", "two")]
    first, second = (make_gateway(model, store=MemoryStore(memory)) for model in models)
    begun = chat(("user", "hi"))
    continued = chat(("user", "hi"), ("assistant", "from one"), ("user", "more"))
    async with asgi_client(first) as ours, asgi_client(second) as theirs:
        for headers in ({"x-session-affinity": "s"}, {}):
            texts = [
                (await client.post("/v1/chat/completions", json=body, headers=headers)).json()["choices"][0]
                for client, body in ((ours, begun), (theirs, begun), (theirs, continued), (ours, continued))
            ]
            assert [each["message"]["content"] for each in texts] == [
                "from one",
                "from two",
                "from two",
                "from one",
            ]
        made = await ours.post("/v1/responses", json={"model": "m", "input": "hi"})
        answer = await theirs.post(
            "/v1/responses", json={"model": "m", "input": "more", "previous_response_id": made.json()["id"]}
        )
        assert answer.json()["output"][0]["content"][0]["text"] == "from two"
        assert len(models[1].requests[-1].history.entries) == 3
        conversation = (await ours.post("/v1/conversations", json={})).json()["id"]
        body = {"model": "m", "input": "hi", "conversation": conversation}
        assert (await ours.post("/v1/responses", json=body)).is_success
        refused = await theirs.post("/v1/responses", json={**body, "input": "more"})
        assert (refused.status_code, refused.headers["retry-after"]) == (409, "10")
        assert "a gateway with another upstream has this conversation" in refused.text


class WaitingStore(MemoryStore):
    """A store whose entries of usage wait for the test, as those of a busy store do."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.is_waiting, self.may_continue = asyncio.Event(), asyncio.Event()

    @override
    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        if namespace == ENTRIES:
            self.is_waiting.set()
            await self.may_continue.wait()
        return await super().kv_put(namespace, key, body, expected=expected, at=at)


@pytest.mark.parametrize("is_kept", [False, True])
@spec("REUSE-76")
async def test_a_request_that_reaches_a_gateway_with_another_upstream_is_answered_by_its_own(
    *, is_kept: bool
) -> None:
    """A person cancels the open call at the other gateway while the request of this one is being prepared."""
    memory = Memory()
    store = WaitingStore(memory)
    one = ScriptedModel([calls(("look", "{}"))], name="one")
    again, two = ScriptedModel((), name="one"), ScriptedModel(lambda _: text("from two"), name="two")
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    body: Json = {"model": "m", "tools": [look]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
    async with asyncio.timeout(WAIT_S), asgi_client(make_gateway(two, store=store)) as client:
        async with asgi_client(make_gateway(one, store=MemoryStore(memory))) as old:
            if is_kept:
                body["conversation"] = (await old.post("/v1/conversations", json={})).json()["id"]
            made = (await old.post("/v1/responses", json={**body, "input": "hi"})).json()
        if not is_kept:
            body["previous_response_id"] = made["id"]
        asking = asyncio.create_task(client.post("/v1/responses", json={**body, "input": [result]}))
        await store.is_waiting.wait()
        started = make_gateway(again, store=MemoryStore(memory))
        async with asgi_client(started):
            await started.start()
            runner = await started._durable.host.session(session_of_response(made["id"]))
            await runner.submit(Cancel())
            store.may_continue.set()
            answer = await asking
            if is_kept:
                assert (answer.status_code, answer.headers["retry-after"]) == (409, "10")
            else:
                assert answer.json()["output"][0]["content"][0]["text"] == "from two"
                assert len(two.requests[0].history.entries) == 2
            assert again.requests == []
        assert len(await store.kv_list(ENTRIES)) == (1 if is_kept else 2), "a refused answer has no entry"


@spec("REUSE-72")
async def test_a_reader_of_an_upstream_that_ends_is_not_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request came while the other gateway was alive."""
    monkeypatch.setattr(live_responses, "CHECK_S", 0.01)
    memory = Memory()
    old = ScriptedModel([gated_response(asyncio.Event())], name="old")
    new = ScriptedModel([text(WORDS)], name="new")
    async with (
        asyncio.timeout(WAIT_S),
        serving(make_gateway(new, store=MemoryStore(memory)), new) as gateway,
        gateway.openai(max_retries=0) as client,
    ):
        async with (
            serving(make_gateway(old, store=MemoryStore(memory)), old) as other,
            other.openai() as first,
        ):
            begun = await first.responses.create(model="m", input="hi", background=True)
            reading = await client.responses.retrieve(begun.id, stream=True)
            kinds: list[str] = [(await anext(reading)).type]
        kinds += [event.type async for event in reading]
        assert kinds[-1] == "response.cancelled"
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"


@spec("REUSE-73")
async def test_a_response_that_was_found_by_its_id_leads_to_its_conversation() -> None:
    """The application retrieves the response after a restart, and repeats its request then."""
    memory = Memory()
    kept = await leave_open(memory)
    model = ScriptedModel([text("three")], name="old")
    async with (
        asyncio.timeout(WAIT_S),
        serving(make_gateway(model, store=MemoryStore(memory)), model) as gateway,
        gateway.openai(max_retries=0) as client,
    ):
        [event async for event in await client.responses.retrieve(kept, stream=True)]
        again = await client.responses.create(
            model="m", input="hi", background=False, stream=False, extra_headers=RETRY
        )
        assert again.id == kept
        resent: Any = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": again.output_text},
            {"role": "user", "content": "more"},
        ]
        more = await client.responses.create(model="m", input=resent)
        assert session_of_response(more.id) == session_of_response(kept)


async def test_an_idempotency_key_is_stored_as_a_digest() -> None:
    """The names of entries are not encrypted, and applications write names of people and orders into their keys."""
    async with served([text(WORDS)]) as gateway:
        headers = {"idempotency-key": "order-of-ada"}
        await gateway.http.post("/v1/chat/completions", json=chat_request("hi"), headers=headers)
        names = [kept.key for kept in await gateway.gateway._durable.host.store.kv_list(REQUESTS)]
        assert len(names) == 2
        assert not any("ada" in name for name in names)
