"""Tool names: an invalid one is replaced by the nearest name that all providers accept."""

from __future__ import annotations

import re
from functools import lru_cache

from midstream.history.codecs.codec_spec import PLAIN_NAMES, Format
from midstream.history.profiles import Profile

_SIZE_MAX = 64


@lru_cache(maxsize=4096)
def takes_name(name: object, names: re.Pattern[str]) -> bool:
    """Whether a provider with this pattern accepts a tool of this name."""
    return isinstance(name, str) and names.fullmatch(name) is not None


def names_of(form: Format, profile: Profile) -> re.Pattern[str]:
    """Return the tool names of a profile in this format: longer or dotted ones only for providers with this format."""
    return form.spec.names if profile.format == form.name else PLAIN_NAMES


def nearest_name(name: str) -> str:
    """Return the name with every other character replaced; the same for every provider."""
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name.strip())[:_SIZE_MAX]
    return plain if plain[:1].isalpha() or plain[:1] == "_" else f"_{plain}"[:_SIZE_MAX]
