"""The current tools of an agent: its own, and those of its sources."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from msgspec import Struct

from midstream.engine.agent import Agent
from midstream.errors import ToolsUnavailableError
from midstream.tools.function_tools import Tool, ToolSource

READ_S = 15.0
"""Seconds that a model call waits for the list of tools. A server that is just starting may need them. A slower one is
asked again at the next model call."""

_log = logging.getLogger(__name__)


class Toolset(Struct, frozen=True):
    """The tools that can be called now.

    Args:
        tools: All tools by name.
        found: The names of the tools that come from sources.
        unreachable: The names of the sources that did not answer; their tools are omitted.
    """

    tools: Mapping[str, Tool]
    found: frozenset[str] = frozenset()
    unreachable: frozenset[str] = frozenset()


async def read_toolset(agent: Agent) -> Toolset:
    """Read all sources concurrently, within `READ_S`. Errors of a source are logged, not raised.

    If two tools have one name, the agent's own tool is used, else that of the first source.
    """
    if not agent.sources:
        return Toolset(agent.tools)
    offers = await asyncio.gather(*(_offer_of(source) for source in agent.sources))
    tools = dict(agent.tools)
    for source, offer in zip(agent.sources, offers, strict=True):
        for each in offer or ():
            if each.name in tools:
                _log.warning("%r of %r is omitted: another tool has this name", each.name, source.name)
            else:
                tools[each.name] = each
    unreachable = (source.name for source, offer in zip(agent.sources, offers, strict=True) if offer is None)
    return Toolset(tools, frozenset(tools.keys() - agent.tools.keys()), frozenset(unreachable))


async def _offer_of(source: ToolSource) -> Sequence[Tool] | None:
    """Return a source's tools, or None if it fails or does not answer in time."""
    try:
        async with asyncio.timeout(READ_S):
            return await source.tools()
    except TimeoutError:
        _log.warning("the tools of %r are omitted: no answer within %g s", source.name, READ_S)
    except ToolsUnavailableError as error:
        _log.info("the tools of %r are omitted: %s", source.name, error.message)
    except (Exception, SystemExit):  # noqa: BLE001 - foreign code: a turn must not die of it
        _log.exception("the tools of %r are omitted: their source failed", source.name)
    return None
