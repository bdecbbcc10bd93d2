"""Patterns of frames.

A member that is not in a pattern may have any value. A string `$name` is the value that was captured or given under
that name. An object with one of these members is a rule:

- `$any` (any value), `$absent`, `$none` (null, or missing), `$one_of` (these values);
- `$at_least` (this number, or a higher one), `$event_id` (an event id);
- `$capture` (any value, which gets this name);
- `$above` (a number above the one captured under this name; it may be captured, too).
"""

from __future__ import annotations

from typing import Any

from midstream.errors import MalformedFrameError
from midstream.protocol.frames import EventId

Names = dict[str, Any]
_MISSING = object()


def fill(value: Any, names: Names) -> Any:  # noqa: ANN401 - JSON
    """Return a value with the values of its names.

    Raises:
        KeyError: A name has no value.
    """
    match value:
        case str() if value.startswith("$"):
            return names[value[1:]]
        case dict():
            return {key: fill(each, names) for key, each in value.items()}
        case list():
            return [fill(each, names) for each in value]
        case _:
            return value


def difference(pattern: Any, found: Any, names: Names, place: str = "") -> str | None:  # noqa: ANN401 - JSON
    """Return the first difference of `found` from the pattern, with its place; None if it matches."""
    match pattern:
        case {"$absent": _}:
            return None if found is _MISSING else f"{place} is {found!r} and must be absent"
        case {"$none": _}:
            return None if found in (None, _MISSING) else f"{place} is {found!r} and must be null or absent"
        case _ if found is _MISSING:
            return f"{place} is missing"
        case {"$any": _}:
            return None
        case {"$one_of": [*values]}:
            return None if found in fill(values, names) else f"{place} is {found!r}, none of {values!r}"
        case {"$at_least": least}:
            is_enough = isinstance(found, int | float) and found >= least
            return None if is_enough else f"{place} is {found!r}, not at least {least!r}"
        case {"$event_id": _}:
            return None if is_event_id(found) else f"{place} is {found!r} and no event id"
        case {"$above": name} if not isinstance(found, int | float) or found <= names[name]:
            return f"{place} is {found!r}, not above {names[name]!r}"
        case {"$capture": name}:
            names[name] = found
            return None
        case {"$above": _}:
            return None
        case dict():
            return _difference_within(pattern, found, names, place)
        case _:
            wanted = fill(pattern, names)
            return None if found == wanted else f"{place} is {found!r}, not {wanted!r}"


def _difference_within(pattern: Names, found: Any, names: Names, place: str) -> str | None:  # noqa: ANN401 - JSON
    if not isinstance(found, dict):
        return f"{place} is {found!r} and no object"
    for key, each in pattern.items():
        inner = f"{place}.{key}" if place else key
        if (what := difference(each, found.get(key, _MISSING), names, inner)) is not None:
            return what
    return None


def difference_of_event_ids(wanted: list[str], event_ids: list[str]) -> str | None:
    """Return the difference between the ids of received events and those of a script, or None.

    An id with a question mark after it may be missing: a client need not deliver the event of such a record.
    """
    left = list(event_ids)
    for each in wanted:
        name, is_optional = each.removesuffix("?"), each.endswith("?")
        if left[:1] == [name]:
            left.pop(0)
        elif not is_optional:
            break
    else:
        if not left:
            return None
    return f"the application received {event_ids}; expected {wanted}"


def is_event_id(value: object) -> bool:
    """Whether a value is an event id."""
    try:
        return isinstance(value, str) and bool(EventId.parse(value))
    except MalformedFrameError:
        return False
