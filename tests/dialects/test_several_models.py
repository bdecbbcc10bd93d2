"""Several upstreams behind one gateway: a request's model chooses, also in the process after a SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import Response

from midstream.environment import World
from midstream.models.openai_compatible import OpenAICompatible
from midstream.models.routed_models import Route, RoutedModels
from midstream.testing.scripted_model import ScriptedModel, text
from tests.agents.scripted_peer import Orders
from tests.cli.test_gateway import key_of, start_with, stop
from tests.dialects.gateway_serving import WAIT_S, ServedGateway, chat_request, make_gateway, serving
from tests.dialects.test_passthrough_requests import VECTORS, whole
from tests.forked import Forked
from tests.house.source import ROOT
from tests.models.chat_server import chat_server

TWO = """
[models.amber]
upstream = "scripted:amber"

[models."vendor/blue"]
upstream = "scripted:blue"
"""
BLUE = "vendor/blue"
LOOKS, PAUSE_S = 600, 0.1
SLOW = "slow 3\none two three four five six seven eight nine ten"
ANSWER = f"blue: You said: {SLOW}"
ASK: list[Any] = [{"role": "user", "content": SLOW}]


@contextlib.asynccontextmanager
async def serve_models(**models: Any) -> AsyncIterator[ServedGateway]:  # noqa: ANN401 - models
    routes = {name: each if isinstance(each, Route) else Route(each) for name, each in models.items()}
    async with serving(make_gateway(RoutedModels(routes)), ScriptedModel(())) as gateway:
        yield gateway


async def test_the_model_of_a_request_chooses_in_every_api_and_the_first_one_is_the_default() -> None:
    one, two = ScriptedModel(lambda _: text("I am one")), ScriptedModel(lambda _: text("I am two"))
    hi: list[Any] = [{"role": "user", "content": "hi"}]
    async with serve_models(one=one, two=two) as gateway, gateway.openai(max_retries=0) as client:
        for name in ("one", "two"):
            chat = await client.chat.completions.create(model=name, messages=hi)
            assert (chat.choices[0].message.content, chat.model) == (f"I am {name}", name)
            response = await client.responses.create(model=name, input="hi")
            assert (response.output_text, response.model) == (f"I am {name}", name)
            async with gateway.anthropic(max_retries=0) as other:
                message = await other.messages.create(model=name, max_tokens=9, messages=hi)
            assert (message.content[0].text, message.model) == (f"I am {name}", name)  # type: ignore[union-attr]
        answer = await gateway.http.post("/v1/chat/completions", json={"messages": hi})
        assert (answer.json()["choices"][0]["message"]["content"], answer.json()["model"]) == (
            "I am one",
            "one",
        )
        assert [each.id async for each in await client.models.list()] == ["one", "two"]


async def test_an_unknown_model_is_not_found_in_the_form_of_each_api() -> None:
    async with serve_models(one=ScriptedModel(())) as gateway, gateway.openai(max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as chat:
            await client.chat.completions.create(model="three", messages=ASK)
        with pytest.raises(openai.NotFoundError) as response:
            await client.responses.create(model="three", input="hi")
        with pytest.raises(openai.NotFoundError) as vectors:
            await client.embeddings.create(model="three", input="hi")
        assert {each.value.code for each in (chat, response, vectors)} == {"model_not_found"}
        async with gateway.anthropic(max_retries=0) as other:
            with pytest.raises(anthropic.NotFoundError) as message:
                await other.messages.create(model="three", max_tokens=9, messages=ASK)
        body: Any = message.value.body
        assert body["error"]["type"] == "not_found_error"


async def test_a_model_supports_the_options_of_its_own_upstream() -> None:
    agent = ScriptedModel([text("hi")])
    agent.grants = frozenset()
    async with serve_models(model=ScriptedModel([text("hi")]), agent=agent) as gateway:
        for name, ignored in (("model", None), ("agent", "temperature")):
            answer = await gateway.http.post(
                "/v1/chat/completions", json={**chat_request("hi"), "model": name, "temperature": 0.5}
            )
            assert (answer.status_code, answer.headers.get("x-midstream-ignored")) == (200, ignored)


async def test_an_unavailable_upstream_does_not_affect_the_others() -> None:
    down = OpenAICompatible("http://127.0.0.1:9/v1", "m", "k")
    async with serve_models(down=down, up=ScriptedModel(lambda _: text("I am up"))) as gateway:
        bodies = [
            {**chat_request(f"hi {number}"), "model": name} for number in range(3) for name in ("down", "up")
        ]
        answers = await asyncio.gather(
            *(gateway.http.post("/v1/chat/completions", json=body) for body in bodies)
        )
        assert [answer.status_code for answer in answers] == [500, 200] * 3


async def test_embeddings_reach_the_server_of_their_model_under_its_own_name() -> None:
    async with chat_server(whole(VECTORS), path="/v1/embeddings") as server:
        vectors = Route(OpenAICompatible(server.url, "e-1", "k"), "e-1")
        async with (
            serve_models(chat=ScriptedModel(()), vectors=vectors) as gateway,
            gateway.openai(max_retries=0) as client,
        ):
            made = await client.embeddings.create(model="vectors", input="hi", encoding_format="float")
            assert made.data[0].embedding == [0.5, -1.25]
            assert server.bodies == [{"model": "e-1", "input": "hi", "encoding_format": "float"}]
            with pytest.raises(openai.NotFoundError) as refused:
                await client.embeddings.create(model="chat", input="hi")
            assert refused.value.code == "not_found"


class TwoModelGateway:
    """A gateway in its own process with two upstreams."""

    def __init__(self, home: Path, config: str) -> None:
        self.home = home
        self.config = home / "gateway.toml"
        self.config.write_text(config)
        self.process: Forked | None = None
        self.url = self.token = ""

    def start(self) -> None:
        self.process, ready = start_with(self.home, "--config", str(self.config))
        self.url, self.token = ready["url"], key_of(ready)
        assert "amber" in ready["upstream"].split(", ")

    def workers(self) -> list[int]:
        """Return the process ids of its workers, as `midstream nodes` lists them."""
        command = [
            sys.executable,
            "-m",
            "midstream",
            "nodes",
            "--json",
            "--store",
            str(self.home / "gateway.db"),
        ]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
        lines = [json.loads(line) for line in listed.splitlines()]
        return [line["pid"] for line in lines if line["worker"] and line["state"] == "serving"]

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=WAIT_S)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            stop(self.process)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.token, timeout=WAIT_S, max_retries=0
        )


@contextlib.asynccontextmanager
async def run_killable(home: Path, config: str = TWO) -> AsyncIterator[TwoModelGateway]:
    gateway = TwoModelGateway(home, config)
    try:
        await asyncio.to_thread(gateway.start)
        yield gateway
    finally:
        await asyncio.to_thread(gateway.stop)


async def await_response(client: openai.AsyncOpenAI, name: str) -> Response:
    """Follow a response to its end."""
    async for _ in await client.responses.retrieve(name, stream=True, starting_after=0):
        pass
    return await client.responses.retrieve(name)


async def test_a_gateway_killed_in_mid_answer_continues_with_the_same_upstream(tmp_path: Path) -> None:
    """The default is another one by then."""
    async with run_killable(tmp_path) as gateway:
        text = ""
        async with gateway.openai() as client, asyncio.timeout(WAIT_S):
            stream = await client.responses.create(model=BLUE, input=SLOW, background=True, stream=True)
            name = ""
            async for event in stream:
                name = event.response.id if event.type == "response.created" else name
                text += event.delta if event.type == "response.output_text.delta" else ""
                if "two" in text:
                    break
            await asyncio.to_thread(gateway.kill)
        first, _, second = TWO.partition('\n\n[models."')
        gateway.config.write_text(f'[models."{second}\n{first}')
        await asyncio.to_thread(gateway.start)
        async with gateway.openai() as client, asyncio.timeout(WAIT_S):
            response = await await_response(client, name)
            assert (response.status, response.output_text) == ("completed", ANSWER)
            amber = await client.responses.create(model="amber", input="hi")
            assert amber.output_text == "amber: You said: hi"


async def test_a_chat_repeated_after_a_kill_has_each_word_once(tmp_path: Path) -> None:
    async with run_killable(tmp_path) as gateway:
        text = ""
        async with gateway.openai() as client, asyncio.timeout(WAIT_S):
            async for chunk in await client.chat.completions.create(model=BLUE, messages=ASK, stream=True):
                text += chunk.choices[0].delta.content or ""
                if "two" in text:
                    break
            await asyncio.to_thread(gateway.kill)
        await asyncio.to_thread(gateway.start)
        async with gateway.openai() as client, asyncio.timeout(WAIT_S):
            answer = await client.chat.completions.create(model=BLUE, messages=ASK)
            assert answer.choices[0].message.content == ANSWER


async def test_a_request_whose_model_is_gone_after_a_kill_fails_and_others_continue(tmp_path: Path) -> None:
    async with run_killable(tmp_path) as gateway:
        async with gateway.openai() as client, asyncio.timeout(WAIT_S):
            stream = await client.responses.create(model=BLUE, input=SLOW, background=True, stream=True)
            begun = await anext(aiter(stream))
            assert begun.type == "response.created"
            name = begun.response.id
            await asyncio.to_thread(gateway.kill)
        gateway.config.write_text(TWO.replace(BLUE, "green"))
        await asyncio.to_thread(gateway.start)
        async with gateway.openai() as client, asyncio.timeout(WAIT_S):
            response = await await_response(client, name)
            assert (response.status, response.error is not None) == ("failed", True)
            amber = await client.responses.create(model="amber", input="hi")
            assert amber.output_text == "amber: You said: hi"


@pytest.mark.long
async def test_two_workers_have_all_tables_and_one_continues_the_work_of_a_killed_one(
    tmp_path: Path,
) -> None:
    async with run_killable(tmp_path, f'workers = 2\nstore = "gateway.db"\n{TWO}') as gateway:
        workers = await asyncio.to_thread(gateway.workers)
        assert len(workers) == 2
        async with gateway.openai() as client, asyncio.timeout(2 * WAIT_S):
            names = []
            for number in range(4):  # separate connections, to either worker
                async with gateway.openai() as other:
                    asked = f"{SLOW} {number}"
                    response = await other.responses.create(
                        model=("amber", BLUE)[number % 2], input=asked, background=True
                    )
                    names.append((response.id, f"{('amber', 'blue')[number % 2]}: You said: {asked}"))
            for worker in workers:
                known = await asyncio.to_thread(gateway.workers)
                os.kill(worker, signal.SIGKILL)
                await _until_replaced(gateway, known)
            for name, words in names:
                ended = await client.responses.retrieve(name)
                if ended.status != "completed":
                    ended = await await_response(client, name)
                assert (ended.status, ended.output_text) == ("completed", words)


async def _until_replaced(gateway: TwoModelGateway, known: Collection[int]) -> None:
    for _ in range(LOOKS):
        if {*await asyncio.to_thread(gateway.workers)} - {*known}:
            return
        await World().sleep(PAUSE_S)
    raise AssertionError("the worker was not replaced")


async def test_after_a_kill_of_the_gateway_two_pooled_conversations_continue_at_their_own_agents(
    tmp_path: Path,
) -> None:
    pytest.importorskip("acp")
    folders = {name: tmp_path / name for name in ("amber", "blue")}
    orders = {name: Orders(folder) for name, folder in folders.items()}
    tables = "".join(
        f"""
[models.{name}]
upstream = "acp:env PYTHONPATH={ROOT} {sys.executable} -m tests.agents.acp_agent {folder} load"
"""
        for name, folder in folders.items()
    )
    async with run_killable(tmp_path, tables) as gateway:
        async with gateway.openai() as client:
            for name in folders:
                first = await client.responses.create(
                    model=name, input=f"one {name}", extra_headers={"x-midstream-session": name}
                )
                assert first.output_text == f"one {name}"
            begun = {}
            for name in folders:
                orders[name].order("hang")
                begun[name] = await client.responses.create(
                    model=name,
                    input=[
                        {"role": "user", "content": f"one {name}"},
                        {"role": "assistant", "content": f"one {name}"},
                        {"role": "user", "content": f"two {name}"},
                    ],
                    background=True,
                    extra_headers={"x-midstream-session": name},
                )
            for name in folders:
                await _until_runs(orders[name])
        await asyncio.to_thread(gateway.kill)
        await asyncio.to_thread(gateway.start)
        async with gateway.openai() as client, asyncio.timeout(2 * WAIT_S):
            for name, response in begun.items():
                ended = await await_response(client, response.id)
                assert (ended.status, ended.output_text.endswith(f"two {name}")) == ("completed", True)
                assert "An earlier agent received this request and was cut off" in ended.output_text
                assert f"one {name}" in ended.output_text
    for name, other in (("amber", "blue"), ("blue", "amber")):
        received = [each["text"] for each in orders[name].recorded("told")]
        assert len(received) == 3
        assert not any(other in text for text in received)


async def _until_runs(orders: Orders) -> None:
    for _ in range(LOOKS):
        if orders.runs():
            return
        await World().sleep(PAUSE_S)
    raise AssertionError("the agent was not sent its message")
