"""Imports for the fork server of `tests.forked`: what the programs of the tests use.

Garbage collection ignores all that is imported here. Otherwise each program collects, in its first second, the objects
of a thousand modules, and so copies their memory: a gateway that answers one request needs 0.4 s of CPU, not 0.08 s.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Final

from tests.permanent_objects import permanent_objects

USUAL: Final = (
    *(
        f"tests.fault.{name}_process"
        for name in ("pool", "person", "fault_server", "worker", "stored_response")
    ),
    "tests.chaos.chaos_server_process",
    "tests.chaos.chaos_client_process",
    *(f"midstream.cli.{name}" for name in ("acp_command", "chat", "gateway", "login", "resume", "serve")),
    "midstream.cli.sessions",
    "midstream.testing",
    "midstream.tools.mcp",
    "midstream.frameworks.pydantic_ai_durable",
    "pydantic_ai.models.function",
    "langchain.agents.middleware",
    "midstream.frameworks.langgraph",
)
"""Modules that a program of the tests imports. Those that are not installed are left out."""
CONTRACT: Final = (
    "agents.testing",
    "langgraph.checkpoint.sqlite.aio",
    "midstream.frameworks.langgraph",
    "midstream.frameworks.openai_agents",
)
"""The same in the environment of `make contract`, where only the programs of test_driven.py are forked."""


def _import(names: tuple[str, ...]) -> None:
    """Import modules, except those whose packages are not installed.

    Raises:
        RuntimeError: A module of this repository does not exist. The fork server would ignore an `ImportError`.
    """
    with permanent_objects():
        for name in names:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in ("tests", "midstream"):
                    raise RuntimeError(f"{error.name} does not exist") from error


_import(CONTRACT if importlib.util.find_spec("agents") else USUAL)
