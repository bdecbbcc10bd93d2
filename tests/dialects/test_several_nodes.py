"""Two gateways on one store: a response of one is followed, cancelled and repeated at the other."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from midstream.environment import World
from tests.cli.processes import WAIT_S
from tests.cli.test_gateway import key_of, start, stop
from tests.fault.stored import use_postgres
from tests.models.chat_server import Answer, ChatServer, chat_server, delta
from tests.models.chat_server import stream as streamed
from tests.spec import spec

pytestmark = pytest.mark.fault
FIRST, REST = "one two ", "three four"
ASK: list[Any] = [{"role": "user", "content": "hi"}]
RETRY = {"x-stainless-retry-count": "1"}
GRACE_S = 1.0
POLL_S = 0.005


def _slow() -> tuple[Answer, asyncio.Event]:
    """Return an answer whose end waits for an event."""
    answer = streamed(delta(content=FIRST), delta("stop", content=REST))
    answer.pieces[-2:] = [b"".join(answer.pieces[-2:])]
    answer.gate = asyncio.Event()
    return answer, answer.gate


class GatewayPair:
    """Two gateways, and the upstream behind both."""

    def __init__(
        self,
        upstream: ChatServer,
        urls: tuple[str, str],
        key: str,
        processes: Sequence[subprocess.Popen[str]],
    ) -> None:
        self.upstream = upstream
        self.urls = urls
        self._processes = processes
        self.clients = [
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=WAIT_S, max_retries=0)
            for url in urls
        ]

    async def kill(self, number: int) -> None:
        """Kill one of them, by SIGKILL, and wait for its end."""
        self._processes[number].kill()
        await asyncio.to_thread(self._processes[number].communicate, timeout=WAIT_S)


@contextlib.asynccontextmanager
async def _pair(store: str, home: Path, *answers: Answer) -> AsyncIterator[GatewayPair]:
    async with chat_server(*answers) as upstream:
        options = ["--upstream", f"openai-compatible:{upstream.url}", "--model", "m", "--store", store]
        begun: list[Any] = []
        try:
            # One after the other: the first one creates the key.
            begun.append(await asyncio.to_thread(start, home, *options, "--grace", str(GRACE_S)))
            begun.append(await asyncio.to_thread(start, home, *options, "--grace", str(GRACE_S)))
            pair = GatewayPair(
                upstream,
                (begun[0][1]["url"], begun[1][1]["url"]),
                key_of(begun[0][1]),
                [each[0] for each in begun],
            )
            async with contextlib.AsyncExitStack() as clients:
                for each in pair.clients:
                    await clients.enter_async_context(each)
                yield pair
        finally:
            for process, _ in begun:
                if process.poll() is None:
                    await asyncio.to_thread(stop, process)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "gateway.db")
    return use_postgres(tmp_path, request.getfixturevalue("engine"))


async def _text(stream: Any) -> str:  # noqa: ANN401 - of the SDK
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_a_retry_at_another_node_gets_the_answer_that_its_first_reader_left(
    store: str, tmp_path: Path
) -> None:
    answer, gate = _slow()
    async with _pair(store, tmp_path, answer) as pair:
        first, other = pair.clients
        reading = await first.chat.completions.create(model="m", messages=ASK, stream=True)
        assert (await anext(aiter(reading))).choices
        retry = await other.chat.completions.create(model="m", messages=ASK, stream=True, extra_headers=RETRY)
        await reading.close()
        asyncio.get_running_loop().call_later(2 * GRACE_S, gate.set)  # its grace period is over by then
        assert await _text(retry) == FIRST + REST
        assert len(pair.upstream.bodies) == 1


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
async def test_a_background_response_is_followed_cancelled_and_continued_at_another_node(
    store: str, tmp_path: Path
) -> None:
    (answer, gate), (stopped, _) = _slow(), _slow()
    next_answer = streamed(delta(content="more"), delta("stop"))
    async with _pair(store, tmp_path, answer, next_answer, stopped) as pair:
        first, other = pair.clients
        begun = await first.responses.create(model="m", input="hi", background=True, store=True)
        assert (await other.responses.retrieve(begun.id)).status in {"queued", "in_progress"}
        following = await other.responses.retrieve(begun.id, stream=True)
        text = ""
        async for event in following:
            if event.type == "response.output_text.delta":
                text += event.delta
                gate.set()
        assert text == FIRST + REST
        more = await other.responses.create(model="m", input="go on", previous_response_id=begun.id)
        assert more.output_text == "more"
        third = await first.responses.create(model="m", input="stop", background=True, store=True)
        assert (await other.responses.cancel(third.id)).status == "cancelled"
        assert (await first.responses.retrieve(third.id)).status == "cancelled"
        await other.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await first.responses.retrieve(begun.id)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_equal_requests_at_two_nodes_are_one(store: str, tmp_path: Path) -> None:
    answer, gate = _slow()
    async with _pair(store, tmp_path, answer) as pair:
        asyncio.get_running_loop().call_later(GRACE_S, gate.set)
        texts = await asyncio.gather(
            *(
                each.chat.completions.create(
                    model="m", messages=ASK, extra_headers={"idempotency-key": "one"}
                )
                for each in pair.clients
            )
        )
        assert [each.choices[0].message.content for each in texts] == [FIRST + REST] * 2
        assert len(pair.upstream.bodies) == 1


@spec("REUSE-71")
@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
async def test_an_answered_request_is_a_new_run_at_another_node_too(store: str, tmp_path: Path) -> None:
    answers = [streamed(delta(content=word), delta("stop")) for word in ("one", "two", "three")]
    async with _pair(store, tmp_path, *answers) as pair:
        words = []
        for number, client in enumerate((pair.clients[0], pair.clients[1], pair.clients[1])):
            if number == 2:
                await pair.kill(0)
            done = await client.chat.completions.create(model="m", messages=ASK)
            words.append(done.choices[0].message.content)
        assert words == ["one", "two", "three"]


@spec("REUSE-70")
@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
async def test_a_request_of_a_killed_node_joins_its_response_at_the_other_one(
    store: str, tmp_path: Path
) -> None:
    (first, _), rest = _slow(), streamed(delta(content="three four"), delta("stop"))
    async with _pair(store, tmp_path, first, rest) as pair:
        reading = await pair.clients[0].chat.completions.create(model="m", messages=ASK, stream=True)
        begun = await anext(aiter(reading))
        await pair.kill(0)
        again = await pair.clients[1].chat.completions.create(model="m", messages=ASK)
        assert again.id == begun.id, "it is the same response"
        assert (again.choices[0].message.content or "").startswith(FIRST)


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
@spec("REUSE-75")
async def test_a_background_response_of_a_killed_node_continues_at_the_other_one(
    store: str, tmp_path: Path
) -> None:
    cut = streamed(delta(content=FIRST), ending="hang")
    goes_on = streamed(delta(content=REST), delta("stop"))
    more = streamed(delta(content="more"), delta("stop"))
    async with _pair(store, tmp_path, cut, goes_on, more) as pair, asyncio.timeout(2 * WAIT_S):
        first, other = pair.clients
        kept = await first.conversations.create()
        seen: list[Any] = []
        stream = await first.responses.create(
            model="m", input="hi", background=True, stream=True, conversation=kept.id
        )
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await pair.kill(0)
        await stream.close()
        rest = await other.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
        seen += [event async for event in rest]
        whole = await other.responses.retrieve(seen[0].response.id)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text == FIRST + REST
        assert (whole.status, seen[-1].response) == ("completed", whole)
        listed: list[Any] = [item async for item in other.conversations.items.list(kept.id, order="asc")]
        assert [item.content[0].text for item in listed] == ["hi", FIRST + REST]
        again = await other.responses.create(model="m", input="go on", conversation=kept.id)
        assert again.output_text == "more"
        assert len(pair.upstream.bodies) == 3


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@spec("REUSE-75")
async def test_the_other_node_finishes_the_response_of_a_killed_one_without_a_request(
    store: str, tmp_path: Path
) -> None:
    cut = streamed(delta(content=FIRST), ending="hang")
    goes_on = streamed(delta(content=REST), delta("stop"))
    more = streamed(delta(content="more"), delta("stop"))
    async with _pair(store, tmp_path, cut, goes_on, more) as pair, asyncio.timeout(2 * WAIT_S):
        first, other = pair.clients
        begun = await first.responses.create(model="m", input="hi", background=True)
        while not pair.upstream.bodies:
            await World().sleep(POLL_S)
        await pair.kill(0)
        while len(pair.upstream.bodies) < 2:
            await World().sleep(POLL_S)
        while (whole := await other.responses.retrieve(begun.id)).status in {"queued", "in_progress"}:
            await World().sleep(POLL_S)
        assert (whole.status, whole.output_text) in {
            ("completed", FIRST + REST),
            ("completed", REST),  # it was killed before it had the first words
        }
        again = await other.responses.create(model="m", input="go on", previous_response_id=begun.id)
        assert again.output_text == "more"
