"""Tools: functions, dynamic sources of tools, MCP servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names

if TYPE_CHECKING:
    from midstream.store.contract import Transaction as Transaction
    from midstream.tools.function_tools import CallContext as CallContext
    from midstream.tools.function_tools import DidNotHappen as DidNotHappen
    from midstream.tools.function_tools import Happened as Happened
    from midstream.tools.function_tools import StatedOutcome as StatedOutcome
    from midstream.tools.function_tools import Tool as Tool
    from midstream.tools.function_tools import ToolSource as ToolSource
    from midstream.tools.function_tools import current_call as current_call
    from midstream.tools.function_tools import question as question
    from midstream.tools.function_tools import report_progress as report_progress
    from midstream.tools.function_tools import tool as tool
    from midstream.tools.function_tools import transaction as transaction
    from midstream.tools.mcp import McpServer as McpServer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "store.contract": "Transaction",
        "tools.function_tools": (
            "CallContext DidNotHappen Happened StatedOutcome Tool ToolSource current_call "
            "question report_progress tool transaction"
        ),
        "tools.mcp": "McpServer",
    },
)
