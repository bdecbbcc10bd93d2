"""Interrupted turns of pydantic-ai: the next message works, and has the finished parts."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

from midstream.frameworks.pydantic_ai_durable import DurableTurns
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import Delta, TurnEnded, TurnStatus, decode
from midstream.store.memory import MemoryStore
from tests.frameworks.pydantic_ai_lab import SESSION, Lab, answers, call
from tests.spec import spec


@spec("DRIVEN-9")
async def test_after_an_abort_the_next_message_works_and_has_the_finished_parts() -> None:
    lab = Lab([call("c1")], [call("c2"), call("c3")], [TextPart("never")])
    agent = lab.agent(system_prompt="Be brief.")
    lab.hangs_in = "c3"
    task = asyncio.create_task(lab.run(agent, prompt="go", key="k1"))
    async with asyncio.timeout(60):
        await lab.running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    received: list[list[ModelMessage]] = []

    def model(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
        received.append([*messages])
        return ModelResponse([TextPart("all right")])

    with agent.override(model=FunctionModel(model)):
        result = await lab.run(agent, prompt="stop that", key="k2")
    assert result.output == "all right"
    assert [
        (type(part).__name__, getattr(part, "content", "")) for each in received[0] for part in each.parts
    ] == [
        ("SystemPromptPart", "Be brief."),
        ("UserPromptPart", "go"),
        ("ToolCallPart", ""),
        ("ToolReturnPart", "result of c1"),
        ("ToolCallPart", ""),
        ("ToolCallPart", ""),
        ("ToolReturnPart", "result of c2"),
        ("ToolReturnPart", UNKNOWN_CONTENT),
        ("UserPromptPart", "stop that"),
    ]
    assert len(result.new_messages()) == 2
    assert [record.status for record in await lab.kinds(TurnEnded)] == [
        TurnStatus.CANCELLED,
        TurnStatus.COMPLETED,
    ]
    assert sorted(lab.ran) == ["c1", "c2", "c3"]
    lab.start_process()  # Replayed by another process: the same, without the model.
    lab_agent = lab.agent(system_prompt="Be brief.")
    again = await lab.run(lab_agent, prompt="stop that", key="k2")
    assert (again.output, len(again.all_messages()), len(received)) == (
        "all right",
        len(result.all_messages()),
        1,
    )
    kept = await lab.run(lab_agent, prompt="stop that", key="k2", message_history=result.all_messages()[:-2])
    assert len(kept.all_messages()) == len(result.all_messages())


@spec("DRIVEN-9")
async def test_text_of_a_cut_response_is_in_the_next_run() -> None:
    lab = Lab([TextPart("one two three")])
    agent = lab.agent()
    spoken = asyncio.Event()

    async def stream_text(_messages: list[ModelMessage], _info: AgentInfo) -> AsyncIterator[str]:
        yield "one "
        yield "two "
        spoken.set()
        await asyncio.Event().wait()

    async def read_stream() -> None:
        async with lab.durable.turn(SESSION):
            with agent.override(model=FunctionModel(stream_function=stream_text)):
                async with agent.run_stream("go") as streamed:
                    async for _ in streamed.stream_text(delta=True, debounce_by=None):
                        pass

    task = asyncio.create_task(read_stream())
    async with asyncio.timeout(60):
        await spoken.wait()
        async for stored in lab.durable.follow(SESSION):
            if isinstance(decode(stored.body), Delta):
                break
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lab.responses = ([], [TextPart("done")])
    result = await lab.run(prompt="and now?")
    texts = [
        part.content for each in result.all_messages() for part in each.parts if isinstance(part, TextPart)
    ]
    assert texts == ["one two ", "done"]


@spec("DRIVEN-9")
async def test_a_tool_that_raised_does_not_block_the_session() -> None:
    lab = Lab([call("c1", "fail")], [TextPart("done")])
    agent = lab.agent()

    @agent.tool_plain
    def fail(name: str) -> str:
        lab.ran.append(name)
        raise RuntimeError("no paper")

    with pytest.raises(RuntimeError, match="no paper"):
        await lab.run(agent)
    result = await lab.run(agent, prompt="something else")
    assert result.output == "done"
    assert (lab.ran, answers(result.all_messages())) == (["c1"], {"c1": "RuntimeError: no paper"})


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("keyword", ["instructions", "system_prompt"])
async def test_the_prompts_of_an_agent_override_those_of_a_stored_history(keyword: str, is_own: bool) -> None:  # noqa: FBT001 - pytest's parameter
    lab = Lab([TextPart("first")])
    lab.durable = DurableTurns(MemoryStore(lab.memory), own_prompts=is_own)
    received: list[list[ModelMessage]] = []

    def model(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
        received.append([*messages])
        return ModelResponse([TextPart("done")])

    stored: list[ModelMessage] = [
        ModelRequest([SystemPromptPart("Old."), UserPromptPart("go")]),
        ModelResponse([TextPart("first")]),
    ]
    options: dict[str, Any] = {keyword: "New."}
    agent: Agent[None, Any] = Agent(
        FunctionModel(model), deps_type=type(None), capabilities=[lab.durable], **options
    )
    await lab.run(agent, prompt="more", message_history=stored)
    prompts = [
        part.content for each in received[0] for part in each.parts if isinstance(part, SystemPromptPart)
    ]
    if not is_own:
        assert prompts == ["Old."]
    else:
        assert prompts == (["New."] if keyword == "system_prompt" else [])
        assert isinstance(stored[0].parts[0], SystemPromptPart)  # The application's own list is unchanged.
    plain: Agent[None, Any] = Agent(FunctionModel(model), deps_type=type(None), capabilities=[lab.durable])
    await lab.run(plain, prompt="and more", message_history=stored)
    assert "Old." in str(received[1])


KILLED = """
import asyncio, os, signal, sys
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from midstream.frameworks.pydantic_ai_durable import DurableTurns

path, prompt = sys.argv[1:]
durable = DurableTurns(path)

def model(messages, info):
    said = [part.content for each in messages for part in each.parts if part.part_kind == "user-prompt"]
    if said[-1] == "go":
        return ModelResponse([ToolCallPart("once", {}, "c1"), ToolCallPart("die", {}, "c2")])
    told = [part.content for each in messages for part in each.parts if part.part_kind == "tool-return"]
    return ModelResponse([TextPart(" | ".join([*said, *told]))])

agent = Agent(FunctionModel(model), capabilities=[durable])

@agent.tool_plain(sequential=True)
async def once() -> str:
    return "done once"

@agent.tool_plain(sequential=True)
async def die() -> str:
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with durable.turn("s", key=prompt):
        print((await agent.run(prompt)).output)
    await durable.close()

asyncio.run(main())
"""


@pytest.mark.slow
@spec("DRIVEN-9")
def test_the_message_after_a_kill_works_in_another_process(tmp_path: Path) -> None:
    def run(prompt: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-c", KILLED, str(tmp_path / "a.db"), prompt]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)

    assert run("go").returncode == -signal.SIGKILL
    for _ in range(2):  # The second time it is replayed from the journal.
        later = run("stop that")
        assert later.returncode == 0, later.stderr
        assert later.stdout.strip() == f"go | stop that | done once | {UNKNOWN_CONTENT}"
