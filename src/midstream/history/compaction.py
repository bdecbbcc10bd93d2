"""Compaction: the part of a conversation that a model gets if the whole is too long.

The history is not changed. A cut is the number of omitted entries at the beginning. Entries are never split, so a call
stays with its result, and the user message of the first shown entry is always included. The result is deterministic.
"""

from __future__ import annotations

from midstream.history.messages import (
    Entry,
    History,
    ResponsePart,
    Step,
    Text,
    ToolCall,
    ToolResult,
    UpstreamCall,
    UserMessage,
)

SHOWN_CHARS_MAX = 512 * 1024
"""Characters of one result for a model: more than most models read at all (about 130,000 tokens)."""


LEFT_OUT = "[Older parts of this conversation were left out here, because it is longer than you can read.]"
FILE_CHARS_MAX = 20_000
"""Greatest number of characters that an attachment counts: a model reads it in fewer tokens than it has bytes."""


def cut_history(history: History, cut: int) -> History:
    """Return the history for a model without the first `cut` entries."""
    if cut <= 0:
        return history
    opening = _opening(history, cut)
    entry = history.entries[opening] if opening is not None else None
    parts = entry.parts if isinstance(entry, UserMessage) else ()
    rest = history.entries[cut + 1 if opening == cut else cut :]
    return History((UserMessage((Text(LEFT_OUT), *parts)), *rest))


def next_cut(history: History, cut: int = 0) -> int | None:
    """Return a cut that omits about the older half of the rest after `cut`; None if nothing can be omitted.

    The newest entry is never omitted.
    """
    entries = history.entries
    last = len(entries) - 1
    if last <= cut:
        return None
    sizes = [_size(entry) for entry in entries[cut:]]
    room = sum(sizes) / 2
    found, kept = last, sizes[-1]
    while found - 1 > cut and kept + sizes[found - 1 - cut] <= room:
        found -= 1
        kept += sizes[found - cut]
    for place in range(found, last + 1):
        opening = _opening(history, place)
        is_same_opening = opening is not None and cut <= opening < place
        if place - cut - is_same_opening > 0:
            return place
    return None


def _opening(history: History, cut: int) -> int | None:
    """Return the place of the user message to which the first shown entry belongs."""
    for place in range(min(cut, len(history.entries) - 1), -1, -1):
        if isinstance(history.entries[place], UserMessage):
            return place
    return None


def _size(entry: Entry) -> int:
    """Return the approximate size of an entry in a model's context, in characters."""
    if isinstance(entry, Step):
        return (
            1
            + sum(map(_part_size, entry.response.parts))
            + sum(_result_size(result) for result in entry.results)
        )
    texts = (
        len(part.text) if isinstance(part, Text) else min(len(part.data or part.url or ""), FILE_CHARS_MAX)
        for part in entry.parts
    )
    return 1 + sum(texts)


def _part_size(part: ResponsePart) -> int:
    if isinstance(part, UpstreamCall):
        return len(part.name) + len(part.arguments) + len(part.content)
    return len(part.name) + len(part.arguments) if isinstance(part, ToolCall) else len(part.text)


def _result_size(result: ToolResult) -> int:
    # A model gets the whole of a large result, which the record does not contain.
    return min(result.size, SHOWN_CHARS_MAX) if result.blob else len(result.content)
