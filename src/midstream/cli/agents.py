"""Import of agents, access objects and MCP servers that options name, with helpful errors."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from midstream.engine.agent import Agent, require_agent
from midstream.errors import AgentNotFoundError, MidstreamError, UsageError
from midstream.server.auth.access import Access
from midstream.tools.function_tools import ToolSource


class _Framework(NamedTuple):
    """Agents of one framework: their classes, and the module with `make_agent` for their conversion."""

    module: str
    classes: tuple[str, ...]
    converter: str


_FRAMEWORKS = (
    _Framework("pydantic_ai.agent", ("AbstractAgent",), "midstream.frameworks.pydantic_ai_served"),
    _Framework("langgraph", ("Pregel", "StateGraph"), "midstream.frameworks.langgraph_served"),
    _Framework("agents.agent", ("AgentBase",), "midstream.frameworks.openai_agents_served"),
)


def find_agent(name: str) -> Agent:
    """Import the module (from the current folder first) and return its agent.

    An agent of another framework is converted by `make_agent` of its integration (`_FRAMEWORKS`).

    Raises:
        AgentNotFoundError: `name` is invalid, the module is missing or its import fails, or the attribute is missing or
            not an agent. The message contains the fix.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise AgentNotFoundError(f"expected the agent as MODULE:AGENT, such as app:agent; got {name!r}")
    module = _import(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        raise AgentNotFoundError(f"module {module_name!r} has no {attribute!r}: {_agents_in(module)}")
    if (framework := _framework_of(found)) is not None:
        return _convert(found, name, framework)
    try:
        return require_agent(found)
    except UsageError as error:
        hint = _agents_in(module)
        raise AgentNotFoundError(f"{name!r}: {error.message} {hint[0].upper()}{hint[1:]}") from error


def find_access(name: str) -> Access:
    """Import the module (from the current folder first) and return its `Access`.

    Raises:
        UsageError: The module or the attribute is missing, or is not an `Access`.
    """
    module_name, colon, attribute = name.partition(":")
    found = getattr(_import(module_name), attribute, None) if colon and module_name and attribute else None
    if not isinstance(found, Access):
        raise UsageError(f"expected a `midstream.server.auth.access.Access` as MODULE:NAME; got {name!r}")
    return found


def find_server(text: str) -> ToolSource:
    """Return the MCP server that `NAME=COMMAND ...` or `NAME=URL` names. Nothing is started or sent yet.

    Raises:
        UsageError: `text` is invalid, or the extra is not installed. The message contains the fix.
    """
    name, equals, where = text.partition("=")
    if not equals or not where.strip():
        raise UsageError(
            "expected an MCP server as NAME=COMMAND or NAME=URL, such as --mcp 'files=npx -y server .'"
        )
    try:
        from midstream.tools.mcp import McpServer  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise UsageError("MCP servers need an extra: pip install 'midstream[mcp]'") from error
    if re.match(r"https?://", where):
        return McpServer.http(where, name=name)
    try:
        command, *arguments = shlex.split(where)
    except ValueError as error:
        raise UsageError(f"the command of the MCP server {name!r} cannot be parsed: {error}") from error
    return McpServer.stdio(command, arguments, name=name)


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    if name.endswith(".py"):
        right = name.removesuffix(".py").replace("/", ".")
        raise AgentNotFoundError(f"{name!r} is a file; give its module instead: {right!r}")
    try:
        is_there = find_spec(name) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise AgentNotFoundError(
            f"no module {name!r} in {here} or on the Python path: "
            "run this in the folder of your agent's file, or correct the name"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise AgentNotFoundError(
            f"module {name!r} could not be imported: {type(error).__name__}: {error}: "
            f"`{Path(sys.executable).name} -c 'import {name}'` shows where"
        ) from error


def _framework_of(value: object) -> _Framework | None:
    """Return the framework of an agent, or None. Frameworks are not imported, which may be slow or impossible."""
    kinds = [(kind.__module__, kind.__qualname__) for kind in type(value).__mro__]
    for each in _FRAMEWORKS:
        if any(name in each.classes and f"{home}.".startswith(f"{each.module}.") for home, name in kinds):
            return each
    return None


def _convert(agent: Any, name: str, framework: _Framework) -> Agent:  # noqa: ANN401 - of a package that may be missing
    try:
        made: Agent = importlib.import_module(framework.converter).make_agent(agent)
    except MidstreamError as error:
        raise AgentNotFoundError(f"{name!r}: {error.message}") from error
    return made


def _agents_in(module: ModuleType) -> str:
    there = vars(module).items()
    names = sorted(name for name, value in there if isinstance(value, Agent) or _framework_of(value))
    if names:
        return f"did you mean {' or '.join(f'{module.__name__}:{name}' for name in names)}?"
    return f"create one with `agent = midstream.Agent(...)` in {module.__name__}"
