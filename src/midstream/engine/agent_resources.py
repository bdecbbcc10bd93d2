"""Tool servers, pools and stored models of an agent and its sub-agents: in use while their host runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence

from midstream.engine.agent import Agent, SubAgent
from midstream.environment import World
from midstream.errors import ToolDefinitionError
from midstream.models.model import StoredModel
from midstream.session.calls import OnDoubt
from midstream.store.contract import Store
from midstream.tools.function_tools import ToolSource

SOURCES_CLOSE_S = 10.0
"""Seconds that tool servers have to end: the MCP SDK closes stdin, waits 2 s, terminates, waits 2 s, kills."""

_log = logging.getLogger(__name__)


class AgentResources:
    """Tool servers and models that one host opens and closes for its agent."""

    def __init__(self, agent: Agent, world: World) -> None:
        self._agent = agent
        self._world = world
        self._models: list[StoredModel] = []
        """The models that store values, while the host runs."""
        self.of_sessions: dict[str, tuple[ToolSource, ...]] = {}
        """The tool sources of single sessions."""

    def check(self, store: Store) -> None:
        """Check that the store supports the agent's tools.

        Raises:
            ToolDefinitionError: A tool needs the store's transactions, and this store has none for tools.
        """
        if store.transactional is None and (names := sorted(_transactional_tools(self._agent))):
            message = (
                "tools with on_doubt='in_transaction' need a store that is `transactional`: "
                "SQLite or PostgreSQL"
            )
            raise ToolDefinitionError(f"{message}: {', '.join(names)}")

    def begin_use(self, store: Store) -> None:
        """Give the open store to the models that store values."""
        self._models = _models_with_storage(self._agent)
        for model in self._models:
            model.begin_use(store)

    async def set_sources(self, session_id: str, sources: Sequence[ToolSource]) -> None:
        """Replace the tool sources of a session, and close the previous ones."""
        old = self.of_sessions.pop(session_id, ())
        if sources:
            self.of_sessions[session_id] = tuple(sources)
        await self._end(self._closing(old))

    async def close(self) -> None:
        """Close the tool servers, pools and models concurrently, within `SOURCES_CLOSE_S`."""
        sources = [each for agent in _family_of(self._agent) for each in agent.sources]
        sources += (each for those in self.of_sessions.values() for each in those)
        closing = self._closing(sources)
        closing += [self._world.spawn(each.end_use(), name="close a model") for each in self._models]
        self._models, self.of_sessions = [], {}
        await self._end(closing)

    def _closing(self, sources: Iterable[ToolSource]) -> list[asyncio.Task[None]]:
        each_once = {id(each): each for each in sources}
        return [self._world.spawn(each.close(), name="close tools") for each in each_once.values()]

    async def _end(self, closing: list[asyncio.Task[None]]) -> None:
        if not closing:
            return
        done, late = await asyncio.wait(closing, timeout=SOURCES_CLOSE_S)
        for task in late:
            task.cancel()
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a source of tools or a model was not closed", exc_info=error)


def _family_of(agent: Agent) -> Iterator[Agent]:
    """Yield an agent and all its sub-agents; a shared sub-agent is yielded repeatedly."""
    yield agent
    for each in agent.tools.values():
        if isinstance(each, SubAgent):
            yield from _family_of(each.agent)


def _models_with_storage(agent: Agent) -> list[StoredModel]:
    """Return the models of an agent and its sub-agents that store values, without duplicates."""
    models = {id(each.model): each.model for each in _family_of(agent)}
    return [model for model in models.values() if isinstance(model, StoredModel)]


def _transactional_tools(agent: Agent) -> set[str]:
    """Return the names of all tools of an agent and its sub-agents that use the store's transactions."""
    tools = (each for one in _family_of(agent) for each in one.tools.values())
    return {each.name for each in tools if each.on_doubt is OnDoubt.IN_TRANSACTION}
