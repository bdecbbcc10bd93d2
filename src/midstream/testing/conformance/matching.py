"""Patterns of frames: what must be there, and what may be anything.

A member that a pattern does not name may have any value. A string `$name` stands for what was captured or given under
that name. An object with one of these members stands for a rule: `$any` (something is there), `$absent`, `$one_of`
(values), `$least` (a number), `$none` (null, or nothing), `$event_id` (an event id), `$capture` (any value, to be known
by that name from then on), `$above` (a number above the one that was captured under this name; it may be captured too).
"""

from __future__ import annotations

from typing import Any

from midstream.errors import MalformedFrameError
from midstream.protocol.frames import EventId

Names = dict[str, Any]
_MISSING = object()


def fill(value: Any, names: Names) -> Any:  # noqa: ANN401 - JSON
    """Return a value with what stands for names put in.

    Raises:
        KeyError: Nothing is known by a name.
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
    """Return the first place in which `found` differs from the pattern, and how; None where it is."""
    match pattern:
        case {"$absent": _}:
            return None if found is _MISSING else f"{place} is {found!r} and should not be there"
        case {"$none": _}:
            return None if found in (None, _MISSING) else f"{place} is {found!r} and should be nothing"
        case _ if found is _MISSING:
            return f"{place} is missing"
        case {"$any": _}:
            return None
        case {"$one_of": [*values]}:
            return None if found in fill(values, names) else f"{place} is {found!r}, none of {values!r}"
        case {"$least": least}:
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


def difference_of_told(wanted: list[str], told: list[str]) -> str | None:
    """Return how the ids of events that an application received differ from a script's; None where they do not.

    An id with a question mark behind it may be missing: the event of a record that a client need not deliver.
    """
    left = list(told)
    for each in wanted:
        name, is_optional = each.removesuffix("?"), each.endswith("?")
        if left[:1] == [name]:
            left.pop(0)
        elif not is_optional:
            break
    else:
        if not left:
            return None
    return f"the application received {told}; expected {wanted}"


def is_event_id(value: object) -> bool:
    """Return whether a value is an event id."""
    try:
        return isinstance(value, str) and bool(EventId.parse(value))
    except MalformedFrameError:
        return False
