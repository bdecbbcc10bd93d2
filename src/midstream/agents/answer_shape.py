"""Answers with tools that the upstream ran itself, in a form for client applications.

A client application waits for the result of every call that it received. One that declared no tools accepts no tool
part. `Paired` gives every call one start and one end, `Folded` describes calls as thoughts.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from midstream.history.messages import UPSTREAM_CUT, Finish, Outcome
from midstream.history.upstream_calls import end_call, start_call, words_of
from midstream.models.responses import (
    Finished,
    ModelEvent,
    ThinkingDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
)

FOLDED_CHARS_MAX = 2000
"""Characters of arguments and of content in the description of a call. Declare tools to get all of it."""


class Paired:
    """Passes an answer's events on, with exactly one start and one end for each call of the upstream.

    After the last event or an error, also pass on the result of `cut()`.
    """

    def __init__(self) -> None:
        self._open: dict[str, None] = {}
        self._over: set[str] = set()

    def take(self, event: ModelEvent) -> Sequence[ModelEvent]:
        """Return the events to pass on for one event."""
        match event:
            case UpstreamCallStarted():
                if event.id in self._open or event.id in self._over:
                    return ()
                self._open[event.id] = None
            case UpstreamCallEnded():
                if event.id in self._over:
                    return ()
                self._over.add(event.id)
                if event.id not in self._open:
                    return (UpstreamCallStarted(event.id, "", "{}"), event)
                del self._open[event.id]
            case Finished():
                return (*self.cut(), event)
            case _:
                pass
        return (event,)

    def cut(self) -> Sequence[UpstreamCallEnded]:
        """Return an end for each call that is still open: an error with the text that its outcome is unknown."""
        ends = tuple(UpstreamCallEnded(call_id, UPSTREAM_CUT, Outcome.UNKNOWN) for call_id in self._open)
        self._over.update(self._open)
        self._open.clear()
        return ends


class Folded:
    """Describes every call as a thought, for a turn that declared no tools.

    Calls of the upstream are described when they have ended. A call of the client application's tools is described,
    too: there are none, so it will not run.
    """

    def __init__(self) -> None:
        self._paired = Paired()
        self._starts: dict[str, UpstreamCallStarted] = {}

    def take(self, event: ModelEvent) -> Sequence[ModelEvent]:
        """Return the events to pass on for one event; never a part of a tool."""
        folded: list[ModelEvent] = []
        for each in self._paired.take(event):
            match each:
                case UpstreamCallStarted():
                    self._starts[each.id] = each
                case UpstreamCallEnded():
                    folded.append(self._render_call(each))
                case ToolCallRequested():
                    notice = (
                        f"[asked for {each.name or 'a tool'} {_short(each.arguments)}, which was not offered]"
                    )
                    folded.append(_render_thought(notice))
                case Finished(finish=Finish.CALLS):
                    folded.append(replace(each, finish=Finish.STOP))
                case _:
                    folded.append(each)
        return folded

    def cut(self) -> Sequence[ModelEvent]:
        """Return the events for the calls that are still open when the answer ends early."""
        return [self._render_call(end) for end in self._paired.cut()]

    def _render_call(self, end: UpstreamCallEnded) -> ThinkingDelta:
        start = self._starts.pop(end.id)
        call = start_call(start.id, start.name, _short(start.arguments))
        return _render_thought(words_of(end_call(call, _short(end.content), end.outcome)))


def _render_thought(words: str) -> ThinkingDelta:
    # The empty signature ends the part, so that a model's signature covers only its own text.
    return ThinkingDelta(f"{words}\n", signature="")


def _short(text: str) -> str:
    if len(text) <= FOLDED_CHARS_MAX:
        return text
    return f"{text[:FOLDED_CHARS_MAX]}\n[+{len(text) - FOLDED_CHARS_MAX} characters]"
