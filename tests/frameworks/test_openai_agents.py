"""The contract with the OpenAI Agents SDK, which needs its own environment: `make contract` runs this."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

pytest.importorskip("agents.testing", reason="the SDK is in its own environment: `make contract`")

from agents import Agent, ModelResponse, Runner, ToolOutputImage, Usage, function_tool, set_tracing_disabled
from agents.models.interface import Model
from agents.testing import assistant_message, function_call
from openai.types.responses import ResponseTextDeltaEvent

from midstream.errors import SessionBusyError, UsageError
from midstream.frameworks.openai_agents import DurableAgents, _completed_event
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import Delta, Record, ResponseCompleted, TurnEnded, TurnStatus, decode
from midstream.store.memory import Memory, MemoryStore
from midstream.tools.function_tools import current_call

set_tracing_disabled(True)
IMAGE = "data:image/png;base64,AA=="


class TwoCallModel(Model):
    """Requests `a` and `b` at once, then answers; counts its requests."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None

    async def get_response(self, system: Any, input: Any, *args: Any, **keywords: Any) -> ModelResponse:
        self.asked += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return ModelResponse(self._output(input), Usage(requests=1, input_tokens=3, total_tokens=3), "resp")

    async def stream_response(
        self, system: Any, input: Any, *args: Any, **keywords: Any
    ) -> AsyncIterator[Any]:
        self.asked += 1
        output = self._output(input)
        if output[0].type == "message":
            for word in ("all ", "done"):
                yield ResponseTextDeltaEvent(
                    content_index=0,
                    delta=word,
                    item_id="i",
                    logprobs=[],
                    output_index=0,
                    sequence_number=0,
                    type="response.output_text.delta",
                )
        yield _completed_event(ModelResponse(output, Usage(), "resp"))

    def _output(self, input: Any) -> list[Any]:
        items = input if isinstance(input, list) else []
        if any(each.get("type") == "function_call" for each in items):
            return [assistant_message("all done")]
        return [function_call("act", {"name": name}, call_id=name) for name in ("a", "b")]


class Lab:
    def __init__(self) -> None:
        self.memory = Memory()
        self.model = TwoCallModel()
        self.ran: list[str] = []
        self.appended: list[str] = []
        self.hangs = asyncio.Event()
        self.hangs_in = ""

    def agent(self) -> tuple[DurableAgents, Any]:
        self.memory.living.clear()
        durable = DurableAgents(MemoryStore(self.memory), observers=[self])

        @function_tool
        async def act(name: str) -> Any:
            """Act."""
            self.ran.append(name)
            if name == self.hangs_in:
                self.hangs.set()
                await asyncio.Event().wait()
            return {"of": name, "key": current_call().effect_key}

        tools = durable.tools([act])
        return durable, Agent(name="agent", model=durable.model(self.model), tools=tools)

    def on_append(self, session: str, records: Sequence[Record]) -> None:
        self.appended += [f"{session} {type(record).__name__}" for record in records]

    async def run(self, *, key: str = "k") -> Any:
        durable, agent = self.agent()
        async with durable.turn("s", "go", key=key):
            return await Runner.run(agent, "go")

    def records(self, kind: type[Any]) -> list[Any]:
        return [
            record
            for each in self.memory.sessions["s"].records
            if isinstance(record := decode(each.body), kind)
        ]


def outputs(result: Any) -> dict[str, Any]:
    items = [each for each in result.to_input_list() if each.get("type") == "function_call_output"]
    return {each["call_id"]: each["output"] for each in items}


async def test_a_turn_is_replayed_without_model_and_tools() -> None:
    lab = Lab()
    first, again = await lab.run(), await lab.run()
    assert (first.final_output, again.final_output) == ("all done", "all done")
    assert (lab.model.asked, sorted(lab.ran)) == (2, ["a", "b"])
    assert outputs(again) == outputs(first)
    assert [end.status for end in lab.records(TurnEnded)] == [TurnStatus.COMPLETED]
    assert lab.appended.count("s TurnEnded") == 1


async def test_a_cancelled_run_keeps_finished_siblings_and_marks_unknown_ones() -> None:
    lab = Lab()
    lab.hangs_in = "b"
    task = asyncio.create_task(lab.run())
    await lab.hangs.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lab.hangs_in = ""
    result = await lab.run()
    assert json.loads(json.dumps(outputs(result)["b"])) == UNKNOWN_CONTENT
    assert (lab.model.asked, sorted(lab.ran)) == (2, ["a", "b"])


async def test_a_failed_model_call_is_retried() -> None:
    lab = Lab()
    lab.model.error = ConnectionError("gone")
    with pytest.raises(ConnectionError):
        await lab.run()
    assert (await lab.run()).final_output == "all done"
    assert lab.records(ResponseCompleted)[0].attempt == 2


async def test_a_streamed_run_is_journaled_delta_by_delta_and_replayed() -> None:
    lab = Lab()
    for _ in range(2):
        durable, agent = lab.agent()
        async with durable.turn("s", "go", key="k"):
            streamed = Runner.run_streamed(agent, "go")
            events = [event.type async for event in streamed.stream_events()]
        assert (streamed.final_output, "raw_response_event" in events) == ("all done", True)
    assert lab.model.asked == 2
    assert "".join(record.text for record in lab.records(Delta)) == "all done"


async def test_turns_of_a_session_run_one_at_a_time() -> None:
    durable, _ = Lab().agent()
    async with durable.turn("s", "go"):
        with pytest.raises(SessionBusyError):
            async with durable.turn("s", "go"):
                pass
        assert [each async for each in durable.open_turns()] == []
    await durable.abandon("s")
    await durable.close()


async def test_a_loop_that_requests_more_after_the_end_is_refused() -> None:
    lab = Lab()
    await lab.run()
    durable, agent = lab.agent()
    async with durable.turn("s", "go", key="k"):
        await Runner.run(agent, "go")
        with pytest.raises(UsageError, match="is over"):
            await Runner.run(agent, "go")


async def test_an_image_of_an_abandoned_turn_is_still_an_image() -> None:
    lab = Lab()
    durable, _ = lab.agent()

    @function_tool
    async def act(name: str) -> Any:
        """Act."""
        lab.model.error = ConnectionError("gone")  # of the next request
        return ToolOutputImage(image_url=IMAGE) if name == "a" else [name]

    agent = Agent(name="agent", model=durable.model(lab.model), tools=durable.tools([act]))
    with pytest.raises(ConnectionError):
        async with durable.turn("s", "go", key="k"):
            await Runner.run(agent, "go")
    outputs = [each["output"] for each in await durable.abandon("s") if "output" in each]
    assert outputs == [[{"type": "input_image", "image_url": IMAGE}], "['b']"]
    await durable.close()
