"""Find the agent that `module:attribute` names, or say what to do."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from midstream.errors import AgentNotFoundError
from midstream.runtime.agent import Agent


def find_agent(name: str) -> Agent:
    """Import the module (from the current folder first) and return its agent.

    Raises:
        AgentNotFoundError: `name` has another form, there is no such module, it fails when it is imported, it has no
            such attribute, or that is no `Agent`. The message says what to do.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise AgentNotFoundError(f"name the agent as MODULE:AGENT, such as app:agent, not {name!r}")
    module = _imported(module_name)
    found = getattr(module, attribute, None)
    if isinstance(found, Agent):
        return found
    if found is None:
        raise AgentNotFoundError(f"module {module_name!r} has no {attribute!r}: {_agents_in(module)}")
    kind = type(found).__name__
    raise AgentNotFoundError(f"{name!r} is no Agent but of type {kind}: {_agents_in(module)}")


def _imported(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    if name.endswith(".py"):
        right = name.removesuffix(".py").replace("/", ".")
        raise AgentNotFoundError(f"{name!r} is a file: name its module, {right!r}")
    try:
        is_there = find_spec(name) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise AgentNotFoundError(
            f"there is no module {name!r} in {here} or on the Python path: "
            "run this in the folder of your agent's file, or correct the name"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise AgentNotFoundError(
            f"module {name!r} could not be imported: {type(error).__name__}: {error}: "
            f"`{Path(sys.executable).name} -c 'import {name}'` shows where"
        ) from error


def _agents_in(module: ModuleType) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, Agent))
    if names:
        return f"did you mean {' or '.join(f'{module.__name__}:{name}' for name in names)}?"
    return f"make one with `agent = midstream.Agent(...)` in {module.__name__}"
