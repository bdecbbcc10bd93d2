"""A started answer is never made twice: the effects of its tools are in an external ledger once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from msgspec import Struct

from midstream.dialects import live_responses
from midstream.errors import ModelError, ModelStalledError, ModelUnavailableError, UpstreamBusyError
from midstream.models.responses import (
    Finished,
    ModelEvent,
    ModelRequest,
    TextDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from tests.dialects.gateway_serving import ServedGateway, chat_request, make_gateway, serving
from tests.dialects.test_live_responses import until
from tests.spec import spec

ASK: list[Any] = [{"role": "user", "content": "order it"}]
RETRY = {"x-stainless-retry-count": "1"}
REFUSED: Any = (openai.APIStatusError, anthropic.APIStatusError)
FAILURES = [
    ModelUnavailableError("the connection broke"),
    ModelUnavailableError("too many requests", retry_after_s=0.01),
    ModelStalledError("silence"),
    UpstreamBusyError("in another run"),
    RuntimeError("a bug of the upstream's"),
]


class Ledgered:
    """An upstream whose agent runs its own tool, which writes a line into a file, and then fails."""

    name = "ledgered"

    def __init__(self, ledger: Path, error: Exception | None, *, is_informed: bool = True) -> None:
        self._ledger = ledger
        self._error = error
        self._is_informed = is_informed
        self.may_continue = asyncio.Event()
        self.may_continue.set()

    @property
    def runs(self) -> int:
        """How often the tool ran."""
        return len(self._ledger.read_text().splitlines()) if self._ledger.exists() else 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        yield UpstreamCallStarted("c1", "order", "{}") if self._is_informed else Working("order")
        with self._ledger.open("a") as ledger:
            ledger.write(f"ordered for {request.session}\n")
        if self._is_informed:
            yield UpstreamCallEnded("c1", "ordered")
        await self.may_continue.wait()
        if self._error is not None:
            raise self._error
        yield TextDelta("done")
        yield Finished()


class RetryingApi(Struct, frozen=True):
    """One API as its own client uses it."""

    client: Callable[..., Any]
    ask: Callable[[Any, dict[str, str]], Awaitable[str | None]]


async def chat(client: openai.AsyncOpenAI, headers: dict[str, str]) -> str | None:
    answer = await client.chat.completions.create(model="m", messages=ASK, extra_headers=headers)
    return answer.choices[0].message.content


async def responses(client: openai.AsyncOpenAI, headers: dict[str, str]) -> str:
    return (await client.responses.create(model="m", input="order it", extra_headers=headers)).output_text


async def messages(client: anthropic.AsyncAnthropic, headers: dict[str, str]) -> str:
    answer = await client.messages.create(model="m", max_tokens=99, messages=ASK, extra_headers=headers)
    return "".join(block.text for block in answer.content if block.type == "text")


APIS = {
    "chat completions": RetryingApi(ServedGateway.openai, chat),
    "responses": RetryingApi(ServedGateway.openai, responses),
    "messages": RetryingApi(ServedGateway.anthropic, messages),
}


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> RetryingApi:
    return APIS[request.param]


def ask(api: RetryingApi, client: Any, **headers: str) -> Awaitable[str | None]:  # noqa: ANN401 - of either SDK
    return api.ask(client, headers)


@spec("REUSE-70")
@pytest.mark.parametrize("hides_tools", [False, True])
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
async def test_no_sdk_repeats_an_answer_that_failed_after_a_tool_ran(
    api: RetryingApi, error: Exception, tmp_path: Path, *, hides_tools: bool
) -> None:
    model: Any = Ledgered(tmp_path / "ledger", error)
    app = make_gateway(model, shows_upstream_calls=not hides_tools)
    async with serving(app, model) as gateway, api.client(gateway, max_retries=3) as client:
        with pytest.raises(REFUSED) as caught:
            await ask(api, client)
        response = caught.value.response
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
        assert caught.value.status_code in (500, 502, 504)
        assert "x-midstream-replayed" not in response.headers  # it was not requested again
        assert model.runs == 1


@spec("REUSE-70")
async def test_undescribed_work_of_the_upstream_counts_too(api: RetryingApi, tmp_path: Path) -> None:
    model: Any = Ledgered(tmp_path / "ledger", ModelUnavailableError("gone"), is_informed=False)
    async with serving(make_gateway(model), model) as gateway, api.client(gateway, max_retries=3) as client:
        with pytest.raises(REFUSED):
            await ask(api, client)
        assert model.runs == 1


@spec("REUSE-70")
@pytest.mark.parametrize("extra", [{}, RETRY, {"idempotency-key": "k1"}], ids=["plain", "retry", "key"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_clients_that_always_retry_get_the_same_failure(
    extra: dict[str, str], tmp_path: Path, *, is_stream: bool
) -> None:
    """Not every client reads `x-should-retry`."""
    model: Any = Ledgered(tmp_path / "ledger", ModelUnavailableError("the connection broke"))
    body = chat_request("order it", stream=is_stream)
    async with serving(make_gateway(model), model) as gateway:
        answers = [
            await gateway.http.post("/v1/chat/completions", json=body, headers=extra if number else {})
            if extra != {"idempotency-key": "k1"}
            else await gateway.http.post("/v1/chat/completions", json=body, headers=extra)
            for number in range(3)
        ]
        assert [answer.content for answer in answers] == [answers[0].content] * 3
        assert [answer.headers.get("x-midstream-replayed") for answer in answers] == [None, "true", "true"]
        assert model.runs == 1


@spec("REUSE-70")
async def test_a_person_who_asks_again_later_or_under_another_key_gets_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = Ledgered(tmp_path / "ledger", ModelUnavailableError("the connection broke"))
    async with serving(make_gateway(model), model) as gateway:
        for key in ("k1", "k2"):
            headers = {"idempotency-key": key}
            await gateway.http.post("/v1/chat/completions", json=chat_request("order it"), headers=headers)
        assert model.runs == 2
        monkeypatch.setattr(live_responses, "FAILED_S", 0.0)
        for _ in range(2):
            await gateway.http.post("/v1/chat/completions", json=chat_request("order it"))
        assert model.runs == 4


@spec("REUSE-70")
async def test_a_retry_after_the_grace_does_not_restart_the_answer(api: RetryingApi, tmp_path: Path) -> None:
    """The answer was cancelled because no client read it; its tool's effect remains."""
    model: Any = Ledgered(tmp_path / "ledger", None)
    model.may_continue.clear()
    async with serving(make_gateway(model, grace_s=0.0), model) as gateway:
        async with api.client(gateway, url=gateway.cutter.url, max_retries=0) as client:
            asking = asyncio.ensure_future(ask(api, client))
            await until(lambda: model.runs == 1)
            assert gateway.cutter.cut() == 1
            with pytest.raises((openai.APIConnectionError, anthropic.APIConnectionError)):
                await asking
            await until(lambda: not len(gateway.gateway.responses))
        async with api.client(gateway, max_retries=3) as client:
            with pytest.raises(REFUSED) as caught:
                await ask(api, client, **RETRY)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert model.runs == 1


@pytest.mark.slow
@spec("REUSE-68")
async def test_an_answer_that_has_not_started_may_be_repeated(api: RetryingApi) -> None:
    errors: list[ModelError] = [ModelUnavailableError("not yet"), ModelUnavailableError("not yet")]

    class Late:
        name = "late"

        async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
            del request
            if errors:
                raise errors.pop()
            yield TextDelta("done")
            yield Finished()

    model: Any = Late()
    async with serving(make_gateway(model), model) as gateway, api.client(gateway, max_retries=3) as client:
        assert await ask(api, client) == "done"
        assert not errors
