"""pydantic-ai, alone and with libraries for durability: DBOS, StepPersistence, midstream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import UsageLimits

from bench.durable.play import ANSWER, STEP_ARGUMENT, Contestant, Play, Turn

LIMITS = UsageLimits(request_limit=None)


def agent_of(
    play: Play, capabilities: Sequence[Any] = (), wrap: Callable[[Any], Any] = lambda tool: tool
) -> Agent[None, str]:
    def model(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
        responses = [each for each in messages if isinstance(each, ModelResponse)]
        results = [
            str(part.content) for each in messages for part in each.parts if isinstance(part, ToolReturnPart)
        ]
        requested = sum(isinstance(part, ToolCallPart) for each in responses for part in each.parts)
        names = play.calls(requested, results)
        calls: list[Any] = [
            ToolCallPart("act", {"name": name, "text": STEP_ARGUMENT}, name) for name in names
        ]
        return ModelResponse(parts=calls or [TextPart(ANSWER)])

    agent: Agent[None, str] = Agent(
        FunctionModel(model), name="bench", deps_type=type(None), capabilities=list(capabilities)
    )

    async def act(name: str, text: str) -> str:  # noqa: ARG001 - it has the size of a real argument
        return await play.work(name)

    agent.tool_plain(wrap(act))
    return agent


@asynccontextmanager
async def alone(play: Play) -> AsyncIterator[Turn]:
    """Run turns without persistence: the application can only start again."""
    agent = agent_of(play)

    async def turn(_session: str) -> str:
        return (await agent.run("go", usage_limits=LIMITS)).output

    yield turn


@asynccontextmanager
async def midstream(play: Play) -> AsyncIterator[Turn]:
    """Run turns with midstream. A resumed run is the same call as the first one."""
    from midstream.frameworks.pydantic_ai_durable import DurableTurns  # noqa: PLC0415 - not in every environment

    durable: DurableTurns[None] = DurableTurns(play.store("agent.db"))
    agent = agent_of(play, [durable])

    async def turn(session: str) -> str:
        async with durable.turn(session, key="k"):
            return (await agent.run("go", usage_limits=LIMITS)).output

    yield turn
    await durable.close()


def dbos(wrap_tools: Callable[[Any], Callable[[Any], Any]]) -> Contestant:
    @asynccontextmanager
    async def contestant(play: Play) -> AsyncIterator[Turn]:
        from dbos import DBOS, SetWorkflowID  # noqa: PLC0415 - not in every environment
        from pydantic_ai.durable_exec.dbos import DBOSDurability  # noqa: PLC0415

        database = play.database or f"sqlite:///{play.folder / 'dbos.sqlite'}"
        DBOS(
            config={
                "name": "bench",
                "system_database_url": database,
                "run_admin_server": False,
                "application_version": "1",
                "log_level": "CRITICAL",
            }
        )
        agent = agent_of(play, [DBOSDurability()], wrap_tools(DBOS))

        @DBOS.workflow()
        async def workflow() -> str:
            return (await agent.run("go", usage_limits=LIMITS)).output

        DBOS.launch()  # resumes interrupted workflows

        async def turn(session: str) -> str:
            if play.is_resumed:
                handle: Any = await DBOS.retrieve_workflow_async(session)
                return str(await handle.get_result())
            with SetWorkflowID(session):
                return await workflow()

        yield turn

    return contestant


@asynccontextmanager
async def step_persistence(play: Play) -> AsyncIterator[Turn]:
    """Run turns with `capture_frontier`; continue from the last snapshot without a new prompt."""
    from pydantic_ai_harness import StepPersistence  # noqa: PLC0415 - not in every environment
    from pydantic_ai_harness.step_persistence import SqliteStepStore, continue_run  # noqa: PLC0415

    store = SqliteStepStore(database=str(play.folder / "steps.db"))
    agent = agent_of(play, [StepPersistence(store=store, agent_name="bench", capture_frontier=True)])

    async def turn(session: str) -> str:
        if play.is_resumed:
            run = (await store.list_runs(conversation_id=session))[-1].run_id
            history = await continue_run(store, run_id=run, include_interrupted=True)
            return (await agent.run(message_history=history, conversation_id=session)).output
        return (await agent.run("go", conversation_id=session, usage_limits=LIMITS)).output

    yield turn


CONTESTANTS: dict[str, Contestant] = {
    "pydantic-ai": alone,
    "pydantic-ai + DBOS, tool not a step": dbos(lambda _: lambda tool: tool),
    "pydantic-ai + DBOS, tool a step": dbos(lambda engine: engine.step()),
    "pydantic-ai + StepPersistence": step_persistence,
    "pydantic-ai + midstream": midstream,
}
