"""Repair of LangChain's message lists and LangGraph's states before a model receives them.

    from midstream.frameworks.langchain import repair_messages

    agent = create_react_agent(model, tools, pre_model_hook=repair_messages, checkpointer=saver)
    chain = prompt | RunnableLambda(repair_messages) | model
    messages = repair_messages(stored, profile="anthropic")

In a graph, the repaired list replaces the stored one, so that the repair is done once. Set options there with
`functools.partial(repair_messages, profile="anthropic")`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast, overload

import msgspec

from midstream.errors import UsageError
from midstream.extras import extra
from midstream.frameworks.context_values import value_within
from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import Repaired
from midstream.history.profiles import find_profile, profile_for
from midstream.history.repair.modes import CallerKnowledge, Mode, repair_in_mode

with extra("langgraph"):
    from langchain_core.messages import (
        AIMessage,
        BaseMessage,
        RemoveMessage,
        SystemMessage,
        ToolMessage,
        messages_from_dict,
    )
    from langchain_core.prompt_values import PromptValue

_FORMAT = "langchain"
_ALL = "__remove_all__"
"""LangGraph's `REMOVE_ALL_MESSAGES`, copied because LangGraph may not be installed."""
_PLACE = "midstream_at"
"""Key of a message's index during the repair of its list."""
_FIELDS = ("content", "name", "tool_calls", "invalid_tool_calls", "tool_call_id", "status")
"""Fields of a message that a repair reads and writes. Others (artifacts, metadata) may not be JSON."""

OnRepair = Callable[[Repaired], None]
FindResult = Callable[[AIMessage, Any], ToolMessage | None]
"""Returns the result of a message's call from a journal, or None."""

_find_result: ContextVar[FindResult | None] = ContextVar("midstream_langchain_results", default=None)


@contextmanager
def journaled_results(find: FindResult) -> Generator[None, None, None]:
    """Let `repair_messages` take missing results from a journal, inside this context."""
    with value_within(_find_result, find):
        yield


class State(Protocol):
    """The state of a graph that is an object instead of a mapping."""

    messages: list[BaseMessage]


@overload
def repair_messages(
    given: list[BaseMessage] | PromptValue,
    *,
    profile: str | None = None,
    mode: Mode = "repair",
    on_repair: OnRepair | None = None,
) -> list[BaseMessage]: ...


@overload
def repair_messages(
    given: Mapping[str, Any] | State,
    *,
    profile: str | None = None,
    mode: Mode = "repair",
    on_repair: OnRepair | None = None,
) -> dict[str, list[BaseMessage]]: ...


def repair_messages(
    given: list[BaseMessage] | PromptValue | Mapping[str, Any] | State,
    *,
    profile: str | None = None,
    mode: Mode = "repair",
    on_repair: OnRepair | None = None,
) -> list[BaseMessage] | dict[str, list[BaseMessage]]:
    """Repair a list of messages, a prompt, or the state of a graph.

    For a list without findings, the same list is returned; otherwise a new one, in which unchanged messages are the
    same objects. For a state (with `messages`), an update is returned: without messages if there are no findings,
    otherwise the removal of all messages and the repaired ones. Inside `run` of a guard
    (`midstream.frameworks.langgraph`), missing results are taken from the journal.

    Args:
        profile: Profile of the provider; by default, the rules of every provider. System messages at the top of the
            list stay there also if the provider's API separates the system prompt: LangChain moves them.
        mode: As in `midstream.repair`. `rollback` keeps the prompt at the end, and `sanitize` the system messages at
            the top.
        on_repair: Called with each repair; `messages` is the new list, `edits` the changes.

    Raises:
        HistoryRefusedError: In mode `strict`, the provider would refuse the history.
        InvalidHistoryError: A message contains a value without JSON form. Nothing was changed.
        UsageError: The profile or the mode is unknown; or `given` has something else than LangChain's messages.
    """
    if isinstance(given, PromptValue):
        return _repair(_with_journaled(given.to_messages()), profile, mode, on_repair)
    if isinstance(given, list):
        return _repair(_with_journaled(given), profile, mode, on_repair)
    stored = given.get("messages") if isinstance(given, Mapping) else getattr(given, "messages", None)
    if not isinstance(stored, Sequence) or isinstance(stored, str):
        raise UsageError(
            f"`given` is a `{type(given).__name__}` without a list `messages`; "
            "expected a list of LangChain messages, a prompt or the state of a graph"
        )
    kept = _repair(_with_journaled(cast("list[BaseMessage]", stored)), profile, mode, on_repair)
    return {"messages": [] if kept is stored else [RemoveMessage(id=_ALL), *kept]}


def _repair(
    messages: list[BaseMessage], profile: str | None, mode: Mode, on_repair: OnRepair | None
) -> list[BaseMessage]:
    for place, message in enumerate(messages):
        if not isinstance(message, BaseMessage):
            raise UsageError(
                f"message {place} is a `{type(message).__name__}`; expected a LangChain message. "
                "`midstream.repair` repairs lists of dicts"
            )
    systems = _systems_at_top(messages)
    top = systems if profile and find_profile(profile).system == "apart" else 0
    written = [_write(message, place) for place, message in enumerate(messages)][top:]
    form = find_format(_FORMAT)
    given = CallerKnowledge(own=range(systems - top), has_prompt=True)
    done = repair_in_mode(mode, written, form, profile_for(form, profile), given)
    if done.messages is written:
        return messages
    loaded = [*messages[:top], *_Loading(messages, written, top).load(done.messages)]
    if on_repair is not None:
        edits = tuple(msgspec.structs.replace(edit, at=edit.at + top) for edit in done.edits)
        on_repair(msgspec.structs.replace(done, messages=loaded, edits=edits))
    return loaded


def _with_journaled(messages: list[BaseMessage]) -> list[BaseMessage]:
    """Add results of calls from a journal to the messages; return the same list without such results."""
    find = _find_result.get()
    if find is None:
        return messages
    complete: list[BaseMessage] = []
    missing: list[ToolMessage] = []
    for place, message in enumerate(messages):
        if missing and not isinstance(message, ToolMessage):
            complete += missing
            missing = []
        complete.append(message)
        if isinstance(message, AIMessage):
            answered = _answered_after(messages, place)
            calls = (call for call in message.tool_calls if call["id"] not in answered)
            missing = [found for call in calls if (found := find(message, call)) is not None]
    complete += missing
    return complete if len(complete) > len(messages) else messages


def _answered_after(messages: list[BaseMessage], place: int) -> set[str]:
    """Return the ids of calls with a result before the next response."""
    answered: set[str] = set()
    for message in messages[place + 1 :]:
        if isinstance(message, AIMessage):
            break
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
    return answered


def _systems_at_top(messages: list[BaseMessage]) -> int:
    for place, message in enumerate(messages):
        if not isinstance(message, SystemMessage):
            return place
    return len(messages)


def _write(message: BaseMessage, place: int) -> dict[str, Any]:
    fields = {name: value for name in _FIELDS if (value := getattr(message, name, None)) is not None}
    return {"type": message.type, "data": fields, _PLACE: place}


class _Loading:
    """Converts repaired JSON back to messages, and reuses unchanged originals."""

    def __init__(self, messages: list[BaseMessage], written: list[dict[str, Any]], top: int) -> None:
        self._messages = messages
        self._written = written
        self._top = top
        self._taken: set[int] = set()

    def load(self, repaired: list[dict[str, Any]]) -> list[BaseMessage]:
        return [self._message(written) for written in repaired]

    def _message(self, written: dict[str, Any]) -> BaseMessage:
        place: int | None = written.get(_PLACE)
        if place is None or self._messages[place].type != written["type"]:
            return messages_from_dict([{"type": written["type"], "data": written["data"]}])[0]
        original = self._messages[place]
        if written is self._written[place - self._top]:
            return original
        update = {name: value for name, value in written["data"].items() if name in _FIELDS}
        if update.get("tool_calls") != getattr(original, "tool_calls", None):
            # Remove the provider's own form of the calls, from which LangChain would read them again.
            kept = {key: value for key, value in original.additional_kwargs.items() if key != "tool_calls"}
            update["additional_kwargs"] = kept
        if place in self._taken:
            update["id"] = None  # one message became two; LangGraph would merge messages with equal ids
        self._taken.add(place)
        return original.model_copy(update=update)
