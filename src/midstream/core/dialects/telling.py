"""Selection of a model's events for a host: never more than it asked for, and each call under an id of its own.

A host that declared no tools refuses an answer with calls in it; one that did would run whatever looks like a call of
its own. So what the upstream runs itself is told as thinking, and so is a call for a host without tools.
"""

from __future__ import annotations

from msgspec.structs import replace

from midstream.core.messages import Finish, Outcome, storable
from midstream.core.replies import (
    CallRequested,
    Finished,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
)

ARGUMENTS_CHARS_MAX = 500
RESULT_CHARS_MAX = 2000
"""Characters a host is shown of what an upstream's own tool was given and has read."""


class Telling:
    """Turns a model's events into those a host can be told, in order.

    Args:
        has_tools: The host declared tools.
        shows_upstream_calls: Tools that the upstream runs itself are told as thinking, not left out.
    """

    def __init__(self, *, has_tools: bool, shows_upstream_calls: bool = True) -> None:
        self._has_tools = has_tools
        self._shows = shows_upstream_calls
        self._ids: set[str] = set()
        self._names: dict[str, str] = {}

    def told(self, event: ModelEvent) -> ModelEvent | None:
        """Return what the host is told of an event, or None where it is told nothing."""
        match event:
            case TextDelta():
                return TextDelta(storable(event.text)) if event.text else None
            case ThinkingDelta():
                return ThinkingDelta(storable(event.text), event.signature)
            case CallRequested():
                return self._call(event)
            case UpstreamCallStarted():
                self._names[event.id] = event.name
                words = f"\n[{event.name} {_short(event.arguments, ARGUMENTS_CHARS_MAX)}]\n"
                return ThinkingDelta(storable(words)) if self._shows else None
            case UpstreamCallEnded():
                name = self._names.pop(event.id, "tool")
                how = "" if event.outcome is Outcome.OK else f" ({event.outcome})"
                words = f"\n[{name}{how}: {_short(event.content, RESULT_CHARS_MAX)}]\n"
                return ThinkingDelta(storable(words)) if self._shows else None
            case Finished() if event.finish is Finish.CALLS and not self._has_tools:
                return replace(event, finish=Finish.STOP)
            case Finished() if event.finish is Finish.STOP and self._ids:
                return replace(event, finish=Finish.CALLS)
            case _:
                return event

    def _call(self, event: CallRequested) -> ModelEvent:
        arguments = storable(event.arguments)
        if not self._has_tools:
            words = f"\n[{event.name} {_short(arguments, ARGUMENTS_CHARS_MAX)}]\n"
            return ThinkingDelta(storable(words))
        call_id = storable(event.id) or f"call_{len(self._ids) + 1}"
        while call_id in self._ids:
            call_id += "_"
        self._ids.add(call_id)
        return replace(event, id=call_id, name=storable(event.name), arguments=arguments or "{}")


def _short(words: str, most: int) -> str:
    left_out = len(words) - most
    return f"{words[:most]} (+{left_out} characters)" if left_out > 0 else words
