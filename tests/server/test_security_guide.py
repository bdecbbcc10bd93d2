"""The example of `docs/guides/security.md` runs, and its limits are the ones there are."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import fields

from midstream.server.limits import Limits
from midstream.testing.models import ScriptedModel, text
from tests.server.people import say, told
from tests.server.serving import called

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "security.md").read_text(encoding="utf-8")


async def test_the_app_of_the_guide_knows_people_by_their_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    claims = {"good": SimpleNamespace(user="ada", customer="acme", ends=None)}
    names: dict[str, Any] = {
        "model": ScriptedModel(lambda _: text("Hello.")),
        "my_tokens": SimpleNamespace(read=claims.get),
    }
    exec(compile(program, "security.md", "exec"), names)  # it is our own guide
    async with called(names["app"]) as client:
        assert (await say(client, "s1", {"authorization": "Bearer good"})).status_code == 200
        assert told(await say(client, "s1", {"authorization": "Bearer bad"})) == (401, "unauthorized")


def test_every_limit_is_in_the_guide_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+_(?:max|minute))` \| ([\d]+)(?: KiB)? \|", GUIDE, re.MULTILINE))
    limits = Limits()
    defaults = {field.name: getattr(limits, field.name) for field in fields(Limits)}
    assert defaults.pop("header_bytes_max") == 1024 * int(rows.pop("header_bytes_max"))
    assert {name: int(value) for name, value in rows.items()} == defaults
