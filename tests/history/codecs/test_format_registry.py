from __future__ import annotations

import pytest

from midstream.errors import UsageError
from midstream.history.codecs.format_registry import FORMATS, find_format
from midstream.history.profiles import PROFILES, WIRES


def test_every_format_has_existing_profiles() -> None:
    for name in FORMATS:
        form = find_format(name)
        assert form.name == name
        assert form.profile in PROFILES
        assert form.wire == "" or form.wire in WIRES


def test_an_unknown_format_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match="bedrock, pydantic-ai, langchain"):
        find_format("nobody")
