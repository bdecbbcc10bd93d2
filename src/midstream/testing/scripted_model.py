"""A model with the output that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from msgspec import Struct

from midstream.environment import World
from midstream.errors import ModelError
from midstream.history.messages import Finish, History, Step, UserMessage
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta, ToolCallRequested
from midstream.session.model_settings import ModelSettings


class Pause(Struct, frozen=True):
    """Be silent for so many seconds."""

    seconds: float


class Stall(Struct, frozen=True):
    """Be silent for ever: a provider that accepted the request and went silent."""


class Gate(Struct, frozen=True):
    """Wait until the test sets the event."""

    event: asyncio.Event


ScriptedStep = ModelEvent | Pause | Stall | Gate | ModelError
Response = Sequence[ScriptedStep]
Script = Sequence[Response] | Callable[[ModelRequest], Response]


def text(words: str, *, tokens: int | None = None) -> list[ScriptedStep]:
    """Return the events of a response with `words` in pieces (one per word, or `tokens` equal ones)."""
    if tokens is None:
        pieces = [piece for piece in words.replace(" ", "\0 ").split("\0") if piece]
    else:
        size = max(1, -(-len(words) // tokens))
        pieces = [words[at : at + size] for at in range(0, len(words), size)]
    return [*(TextDelta(piece) for piece in pieces), Finished()]


def calls(*requests: tuple[str, str] | tuple[str, str, str], text: str = "") -> list[ScriptedStep]:
    """Return the events of a response that requests tools after `text`.

    Args:
        requests: `(name, arguments)` or `(id, name, arguments)` each.
    """
    steps: list[ScriptedStep] = [TextDelta(text)] if text else []
    for number, request in enumerate(requests, start=1):
        call_id, name, arguments = request if len(request) == 3 else (f"c{number}", *request)  # noqa: PLR2004 - the triple
        steps.append(ToolCallRequested(call_id, name, arguments))
    return [*steps, Finished(Finish.CALLS)]


class ScriptedModel:
    """Answer each request by a script.

    Args:
        script: A response for each model call of a turn, by its number since the last user message (so a new process
            continues where the old one died); or a function of the request. A call beyond the script gets "done".
        name: The name for users.
        delay_s: Seconds before each step.
        world: The clock for waits.

    Each response is a sequence of events, `Pause`, `Stall`, `Gate` or a `ModelError` to raise.
    """

    def __init__(
        self, script: Script, *, name: str = "scripted", delay_s: float = 0.0, world: World = World()
    ) -> None:
        self.name = name
        self.grants = frozenset(ModelSettings.__struct_fields__)
        """It accepts all settings for an answer, and ignores them."""
        self.requests: list[ModelRequest] = []
        """Every request so far, for assertions."""
        self._script = script
        self._delay_s = delay_s
        self._world = world

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Play the response for this request."""
        self.requests.append(request)
        for step in self._response_to(request):
            if self._delay_s:
                await self._world.sleep(self._delay_s)
            match step:
                case Pause():
                    await self._world.sleep(step.seconds)
                case Stall():
                    await asyncio.Event().wait()
                case Gate():
                    await step.event.wait()
                case ModelError():
                    raise step.again()
                case _:
                    yield step

    def _response_to(self, request: ModelRequest) -> Response:
        if callable(self._script):
            return self._script(request)
        number = steps_since_user(request.history)
        return self._script[number] if number < len(self._script) else text("done")


def steps_since_user(history: History) -> int:
    """Count the steps after the last user message: the number of the turn's model call, from 0."""
    count = 0
    for entry in reversed(history.entries):
        if isinstance(entry, UserMessage):
            break
        count += isinstance(entry, Step)
    return count
