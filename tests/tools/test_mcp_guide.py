"""The example of `docs/guides/mcp.md` runs, and its table of options is complete."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from midstream.engine.agent import Agent
from midstream.tools.mcp import McpServer, ServerOptions

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "mcp.md").read_text(encoding="utf-8")


def test_the_example_builds_an_agent_with_two_servers() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "mcp.md", "exec"), names)  # The code is from our own guide.
    agent = names["agent"]
    assert isinstance(agent, Agent)
    assert [source.name for source in agent.sources] == ["files", "mail"]


def test_the_table_has_every_option() -> None:
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`.*?) \|", GUIDE, re.MULTILINE))))
    taken = set(ServerOptions.__annotations__)
    for make in (McpServer.stdio, McpServer.http):
        taken |= {
            name
            for name, parameter in inspect.signature(make).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
    assert taken - {"world"} == named & taken
