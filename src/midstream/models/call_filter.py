"""Filter for the calls that a client application gets: only those of its own tools.

An application that declared no tools refuses a response with calls, so a call becomes thinking there.
"""

from __future__ import annotations

from msgspec.structs import replace

from midstream.history.messages import Finish, storable
from midstream.models.responses import Finished, ModelEvent, ThinkingDelta, ToolCallRequested

ARGUMENTS_CHARS_MAX = 500
"""Characters of the arguments of a call that an application cannot run."""


class CallFilter:
    """Passes calls on to an application with tools, each with a unique id.

    Args:
        has_tools: Whether the application declared tools.
    """

    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._ids: set[str] = set()

    def apply(self, event: ModelEvent) -> ModelEvent:
        """Return the event for the application."""
        match event:
            case ToolCallRequested():
                return self._call(event)
            case Finished() if event.finish is Finish.CALLS and not self._has_tools:
                return replace(event, finish=Finish.STOP)
            case Finished() if event.finish is Finish.STOP and self._ids:
                return replace(event, finish=Finish.CALLS)
            case _:
                return event

    def _call(self, event: ToolCallRequested) -> ModelEvent:
        arguments = storable(event.arguments)
        if not self._has_tools:
            return ThinkingDelta(f"\n[{event.name} {shorten(arguments, ARGUMENTS_CHARS_MAX)}]\n")
        call_id = storable(event.id) or f"call_{len(self._ids) + 1}"
        while call_id in self._ids:
            call_id += "_"
        self._ids.add(call_id)
        return replace(event, id=call_id, name=storable(event.name), arguments=arguments or "{}")


def shorten(words: str, most: int) -> str:
    """Return a shortened text with the number of omitted characters."""
    left_out = len(words) - most
    return f"{words[:most]} (+{left_out} characters)" if left_out > 0 else words
