"""Histories of any provider: values, and operations on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names

if TYPE_CHECKING:
    from midstream.history.messages import File as File
    from midstream.history.messages import History as History
    from midstream.history.messages import Outcome as Outcome
    from midstream.history.messages import Response as Response
    from midstream.history.messages import Step as Step
    from midstream.history.messages import Text as Text
    from midstream.history.messages import Thinking as Thinking
    from midstream.history.messages import ToolCall as ToolCall
    from midstream.history.messages import ToolResult as ToolResult
    from midstream.history.messages import ToolSpec as ToolSpec
    from midstream.history.messages import UpstreamCall as UpstreamCall
    from midstream.history.messages import UserMessage as UserMessage
    from midstream.history.profiles import PROFILES as PROFILES

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "history.messages": (
            "File History Outcome Response Step Text Thinking ToolCall ToolResult ToolSpec"
            " UpstreamCall UserMessage"
        ),
        "history.profiles": "PROFILES",
    },
)
