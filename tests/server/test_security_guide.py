"""The examples of `docs/guides/security.md` run, and its limits are the real ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import fields

from midstream.engine.agent import Agent
from midstream.server.limits import Limits
from midstream.testing.scripted_model import ScriptedModel, text
from tests.server.known_people import post_message, status_and_code
from tests.server.serving import asgi_client

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "security.md").read_text(encoding="utf-8")


def _app(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:  # noqa: ANN401 - the guide's
    """Run the guide up to its program of this number, and return the app of that program."""
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    _, *programs = programs  # The first one is about mounting.
    assert len(programs) == 3
    hello = ModuleType("hello")
    vars(hello).update(agent=Agent(ScriptedModel(lambda _: text("Hello."))))
    monkeypatch.setitem(sys.modules, "hello", hello)
    names: dict[str, Any] = {}
    for program in programs[:number]:
        exec(compile(program, "security.md", "exec"), names)  # The code is from our own guide.
    return names["app"]


BEARER = {"authorization": "Bearer token-of-ada"}
COOKIE = {"cookie": "__Host-login=signed-in"}
KEY = {"x-api-key": "key-of-bob"}


@pytest.mark.parametrize(
    ("number", "good", "bad"),
    [
        (1, BEARER, [{}, COOKIE, KEY, {"authorization": "Bearer bad"}, {"authorization": "Basic good"}]),
        (2, COOKIE, [{}, BEARER, KEY, {"cookie": "__Host-login=other"}, {"cookie": "login=signed-in"}]),
        (3, KEY, [{}, COOKIE, {"x-api-key": "other"}]),
        (3, BEARER, [{"authorization": "Bearer bad"}]),
    ],
    ids=["bearer", "cookie", "a function of one's own", "several ways"],
)
async def test_the_apps_of_the_guide_authenticate_by_the_presented_credentials(
    number: int,
    good: dict[str, str],
    bad: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    async with asgi_client(_app(number, monkeypatch, tmp_path)) as client:
        assert (await post_message(client, "s1", good)).status_code == 200
        assert (await client.get("/v1/sessions/s1", headers=good)).status_code == 200
        for shown in bad:
            assert status_and_code(await post_message(client, "s1", shown)) == (401, "unauthorized"), shown
            assert status_and_code(await client.get("/v1/sessions/s1", headers=shown)) == (
                401,
                "unauthorized",
            ), shown


async def test_a_cookie_of_the_app_does_not_admit_a_page_of_another_site(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with asgi_client(_app(2, monkeypatch, tmp_path)) as client:
        assert (await post_message(client, "s1", COOKIE)).status_code == 200
        form = {**COOKIE, "content-type": "application/x-www-form-urlencoded"}
        for method, path in (
            ("POST", "/cancel"),
            ("DELETE", ""),
            ("POST", "/resume"),
            ("POST", "/viewers"),
            ("DELETE", "/viewers"),
        ):
            answer = await client.request(method, f"/v1/sessions/s1{path}", headers=form)
            assert status_and_code(answer) == (403, "foreign_origin"), path
        assert status_and_code(await client.get("/v1/sessions/s1/events", headers=COOKIE)) == (
            403,
            "foreign_origin",
        )
        assert (await client.get("/v1/sessions/s1", headers=COOKIE)).json()["turns"] == 1
        meant = {**COOKIE, "x-midstream": "1"}
        assert (await client.post("/v1/sessions/s1/cancel", headers=meant)).status_code == 202


def test_every_limit_is_in_the_guide_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+_(?:max|minute))` \| ([\d]+)(?: KiB)? \|", GUIDE, re.MULTILINE))
    limits = Limits()
    defaults = {field.name: getattr(limits, field.name) for field in fields(Limits)}
    assert defaults.pop("header_bytes_max") == 1024 * int(rows.pop("header_bytes_max"))
    assert {name: int(value) for name, value in rows.items()} == defaults
