"""Repair of pydantic-ai's histories, before a run and before each of its requests.

    from midstream.frameworks.pydantic_ai_history import repair_history
    from pydantic_ai.capabilities import ProcessHistory

    agent = Agent("openai:gpt-5", capabilities=[ProcessHistory(repair_history())])
    result = await agent.run("go on", message_history=repair_history()(stored))

Only the second line keeps everything: at the start of a run, pydantic-ai drops results without a call before it calls
processors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, overload

import msgspec

from midstream.errors import InvalidHistoryError
from midstream.extras import extra
from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import Repaired
from midstream.history.profiles import find_profile, profile_for
from midstream.history.repair.modes import CallerKnowledge, Mode, repair_in_mode, require_mode

with extra("pydantic-ai"):
    from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelRequest, ModelResponse
    from pydantic_ai.tools import RunContext

Messages = list[ModelMessage]


class HistoryProcessor(Protocol):
    """Repairs a list of messages; called with the list, or by a run with its context and the list."""

    @overload
    def __call__(self, messages: Messages, /) -> Messages: ...

    @overload
    def __call__(self, ctx: RunContext[Any], messages: Messages, /) -> Messages: ...


_FORMAT = "pydantic-ai"
_PLACE = "midstream_at"
"""Key of a message's index during the repair of its list."""


def repair_history(
    profile: str | None = None,
    *,
    mode: Mode = "repair",
    on_repair: Callable[[Repaired], None] | None = None,
) -> HistoryProcessor:
    """Return a history processor.

    Without findings, the processor returns the same list. Otherwise it returns a new list, in which unchanged messages,
    and unchanged parts of changed messages, are the same objects. A suspended response at the end of the list does not
    change.

    Args:
        profile: Profile of the provider; by default, the rules of every provider.
        mode: As in `midstream.repair`. Inside a run, `rollback` keeps the prompt, and `sanitize` the system prompts of
            the run.
        on_repair: Called with each repair; `messages` is the new list, `edits` the changes.

    Raises:
        UsageError: The profile or the mode is unknown.

    The processor raises `InvalidHistoryError` if a message has no JSON form, and `HistoryRefusedError` in mode
    `strict`. Nothing is changed then.
    """
    if profile is not None:
        find_profile(profile)
    require_mode(mode)
    form = find_format(_FORMAT)
    rules = profile_for(form, profile)

    def repair_messages(messages: Messages, run_id: str | None) -> Messages:
        history = messages[:-1] if _is_bare(messages) else messages
        dumped = _dump(history)
        own = {place for place, message in enumerate(history) if run_id and message.run_id == run_id}
        given = CallerKnowledge(
            live_tail=_is_suspended(history), own=own, has_prompt=bool(run_id) and history is messages
        )
        done = repair_in_mode(mode, dumped, form, rules, given)
        if done.messages is dumped:
            return messages
        loaded = _Loading(history, dumped).load(done.messages)
        if isinstance(messages[-1], ModelRequest) and not (loaded and isinstance(loaded[-1], ModelRequest)):
            # The run continues from it, and it has the instructions.
            loaded.append(replace(messages[-1], parts=[]))
        if on_repair is not None:
            on_repair(msgspec.structs.replace(done, messages=loaded))
        return loaded

    # pydantic-ai passes its context to a function whose first parameter has this annotation.
    def process_history(first: RunContext[Any] | Messages, messages: Messages | None = None, /) -> Messages:
        if isinstance(first, list):
            return repair_messages(first, None)
        return repair_messages(messages or [], first.run_id)

    process_history.__annotations__["first"] = RunContext[Any]
    return process_history


def _is_bare(messages: list[ModelMessage]) -> bool:
    """Return whether a run continues without a new prompt: its last request then has only instructions."""
    last = messages[-1] if messages else None
    return isinstance(last, ModelRequest) and not last.parts


def _is_suspended(messages: list[ModelMessage]) -> bool:
    """Return whether the provider has suspended the last response."""
    last = messages[-1] if messages else None
    return isinstance(last, ModelResponse) and last.state == "suspended"


def _dump(messages: list[ModelMessage]) -> list[Any]:
    try:
        dumped: list[Any] = ModelMessagesTypeAdapter.dump_python(messages, mode="json")
    except ValueError as error:
        raise InvalidHistoryError(f"a message has no JSON form: {type(error).__name__}") from error
    for place, message in enumerate(dumped):
        message[_PLACE] = place
    return dumped


class _Loading:
    """Converts repaired JSON back to messages, and reuses unchanged originals."""

    def __init__(self, messages: list[ModelMessage], dumped: list[Any]) -> None:
        self._messages = messages
        self._dumped = dumped
        self._parts = {
            id(raw): part
            for message, written in zip(messages, dumped, strict=True)
            for part, raw in zip(message.parts, written["parts"], strict=True)
        }

    def load(self, repaired: list[Any]) -> list[ModelMessage]:
        return [self._message(written) for written in repaired]

    def _message(self, written: dict[str, Any]) -> ModelMessage:
        place: int | None = written.get(_PLACE)
        original = self._messages[place] if place is not None else None
        if place is not None and written is self._dumped[place]:
            return self._messages[place]
        loaded = ModelMessagesTypeAdapter.validate_python([written])[0]
        # A part's JSON form may lose information (for example the type of a returned object).
        parts: list[Any] = [
            self._parts.get(id(raw), part) for raw, part in zip(written["parts"], loaded.parts, strict=True)
        ]
        if isinstance(loaded, ModelRequest):
            request = original if isinstance(original, ModelRequest) else loaded
            return replace(request, parts=parts, run_id=loaded.run_id)
        response = original if isinstance(original, ModelResponse) else loaded
        return replace(response, parts=parts, run_id=loaded.run_id)
