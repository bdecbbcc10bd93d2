"""OpenAI's chat completions: the tools of a request. `history/rendering.py` writes its messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from midstream.history.messages import ToolSpec


def render_tools(tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Return the `tools` of a request."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            }
            | ({} if tool.strict is None else {"strict": tool.strict}),
        }
        for tool in tools
    ]
