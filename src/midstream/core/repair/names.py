"""Tool names: what no provider takes gets the nearest name that all take."""

from __future__ import annotations

import re
from functools import lru_cache

from midstream.core.profiles import Profile

_PLAIN = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_LONG = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_DOTTED = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,127}")
_SHAPES = {"anthropic": _LONG, "gemini": _DOTTED}
"""By format; everybody else takes the plain ones."""
_SIZE_MAX = 64


@lru_cache(maxsize=4096)
def takes_name(name: object, form: str) -> bool:
    """Whether a provider of this format takes a tool of this name; with no format, whether all do."""
    return isinstance(name, str) and _SHAPES.get(form, _PLAIN).fullmatch(name) is not None


def names_of(form: str, profile: Profile) -> str:
    """Whose names a profile takes in this format: only providers who speak it take its longer or dotted ones."""
    return form if profile.speaks == form else ""


def nearest_name(name: str) -> str:
    """Return the name with every other character replaced; the same for every provider."""
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name.strip())[:_SIZE_MAX]
    return plain if plain[:1].isalpha() or plain[:1] == "_" else f"_{plain}"[:_SIZE_MAX]
