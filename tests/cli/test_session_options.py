"""The source of the commands about sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.cli import Invocation
from midstream.cli.session_options import source_of
from midstream.cli.session_sources import ServerSource, StoreSource
from midstream.cli.visible_text import json_of
from midstream.errors import UsageError
from midstream.paths import Paths


def test_a_store_and_a_url_exclude_each_other(tmp_path: Path) -> None:
    invocation = Invocation(Paths(tmp_path, tmp_path), "never")
    assert isinstance(source_of(invocation, None, None), StoreSource)
    assert isinstance(source_of(invocation, None, "http://127.0.0.1:8000"), ServerSource)
    with pytest.raises(UsageError, match="exclude each other"):
        source_of(invocation, str(tmp_path / "s.db"), "http://127.0.0.1:8000")


def test_json_output_is_safe_to_print() -> None:
    assert json_of({"text": "a\x1bb\u202e"}) == '{"text":"a\\u001bb\\u202e"}'
