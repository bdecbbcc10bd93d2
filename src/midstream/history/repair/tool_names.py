"""Tool names: what no provider takes gets the nearest name that all take."""

from __future__ import annotations

import re
from functools import lru_cache

from midstream.history.codecs.codec_spec import PLAIN_NAMES, Format
from midstream.history.profiles import Profile

_SIZE_MAX = 64


@lru_cache(maxsize=4096)
def takes_name(name: object, names: re.Pattern[str]) -> bool:
    """Whether a provider that takes these names takes a tool of this one."""
    return isinstance(name, str) and names.fullmatch(name) is not None


def names_of(form: Format, profile: Profile) -> re.Pattern[str]:
    """Return the names a profile takes in this format: only providers who speak it take its longer or dotted ones."""
    return form.spec.names if profile.speaks == form.name else PLAIN_NAMES


def nearest_name(name: str) -> str:
    """Return the name with every other character replaced; the same for every provider."""
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name.strip())[:_SIZE_MAX]
    return plain if plain[:1].isalpha() or plain[:1] == "_" else f"_{plain}"[:_SIZE_MAX]
