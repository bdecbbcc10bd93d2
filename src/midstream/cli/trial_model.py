"""The upstream `scripted`, for trying client applications without a model. It follows the newest message.

    call NAME {"a": 1}    a line that calls a tool of the application; several lines make several calls
    fail KIND             a line that makes the model fail: see `FAILURES`
    slow SECONDS          a line that spreads the answer over SECONDS; a failure follows its text

Any other text is repeated. After the results of the calls, the answer contains them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping

from midstream.environment import World
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelQuotaError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelUnavailableError,
)
from midstream.history.messages import Finish, History, Step, Text, UserMessage
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta, ToolCallRequested
from midstream.session.model_settings import ModelSettings
from midstream.session.session import CONTINUE

FAILURES: Mapping[str, type[ModelError]] = {
    "rate_limit": ModelRateLimitedError,
    "overloaded": ModelOverloadedError,
    "unavailable": ModelUnavailableError,
    "overflow": ContextOverflowError,
    "rejected": ModelRejectedError,
    "filtered": ModelFilteredError,
    "access": ModelAccessError,
    "quota": ModelQuotaError,
    "not_found": ModelNotFoundError,
}
"""Failures of the model by the word after `fail`."""
RETRY_AFTER_S = 1.0
"""The pause that a rate limit requests."""
SLOW_S_MAX = 3600.0
_CALL = re.compile(r"call\s+([A-Za-z0-9_.-]+)\s*(\{.*\})?\s*")
_FAIL = re.compile(r"fail\s+(\w+)\s*")
_SLOW = re.compile(r"slow\s+(\d{1,4}(?:\.\d+)?)\s*")


class TrialModel:
    """A model that follows the newest user message.

    Args:
        name: Displayed name of the model.
        prefix: Beginning of its answers, to distinguish several of these models.
        world: The clock, and ids of calls.
    """

    def __init__(self, name: str, world: World = World(), *, prefix: str = "") -> None:
        self.name = name
        self.grants = frozenset(ModelSettings.__struct_fields__)
        """It accepts every setting, without effect."""
        self._world = world
        self._prefix = prefix

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Stream the answer.

        Raises:
            ModelError: The message has a line that requests it.
        """
        message, steps = _turn_of(request.history)
        lines = (
            [] if request.is_ephemeral else message.splitlines()
        )  # a request for a title may quote such a line
        failure = next((found[1] for line in lines if (found := _FAIL.fullmatch(line))), "")
        slow_s = max((float(found[1]) for line in lines if (found := _SLOW.fullmatch(line))), default=0.0)
        if failure and not slow_s:
            raise _failure(failure)
        calls = [found for line in lines if (found := _CALL.fullmatch(line))]
        if calls and not steps:
            known = [tool.name for tool in request.tools]
            if missing := [found[1] for found in calls if found[1] not in known]:
                yield TextDelta(f"The request has no tool {missing[0]}, but: {', '.join(known) or 'none'}")
                yield Finished()
                return
            for name, arguments in (found.groups() for found in calls):
                yield ToolCallRequested(self._world.new_id("call"), name, arguments or "{}")
            yield Finished(Finish.CALLS)
            return
        answer = "\n".join(line for step in steps for line in _results(step)) or _repeat(message)
        begun = "".join(step.response.text for step in steps if not step.results)
        rest = f"{self._prefix}{answer}".removeprefix(begun)  # a resumed answer continues after its own text
        pieces = rest.replace(" ", "\0 ").split("\0")
        for piece in pieces:
            if slow_s:
                await self._world.sleep(min(slow_s, SLOW_S_MAX) / len(pieces))
            yield TextDelta(piece)
        if failure:
            raise _failure(failure)
        yield Finished()


def _turn_of(history: History) -> tuple[str, list[Step]]:
    """Return the text of the newest user message, and the steps after it, including an interrupted answer."""
    steps: list[Step] = []
    for entry in reversed(history.entries):
        if isinstance(entry, Step):
            steps.insert(0, entry)
        elif isinstance(entry, UserMessage):
            text = "".join(part.text for part in entry.parts if isinstance(part, Text))
            if text != CONTINUE:
                return text, steps
    return "", steps


def _repeat(words: str) -> str:
    return f"You said: {words}" if words else "You said nothing."


def _failure(kind: str) -> ModelError:
    if kind not in FAILURES:
        return ModelRejectedError(f"`fail {kind}` is unknown; known: {', '.join(FAILURES)}")
    pause_s = RETRY_AFTER_S if kind == "rate_limit" else None
    return FAILURES[kind](f"the message has a line for this failure: {kind}", retry_after_s=pause_s)


def _results(step: Step) -> Iterator[str]:
    names = {call.id: call.name for call in step.response.calls}
    for result in step.results:
        yield f"{names.get(result.call_id, result.call_id)} returned: {result.content}"
