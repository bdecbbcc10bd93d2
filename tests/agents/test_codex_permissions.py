"""The client of Codex's app server that reads on while somebody decides: what a scripted app server cannot show."""

from __future__ import annotations

import asyncio
import sys

import pytest

pytest.importorskip("openai_codex", reason="the package is not installed here: `make contract` has it")

import openai_codex as sdk

from midstream.agents import codex_permissions
from midstream.agents.codex_permissions import CHANGE, COMMAND, CodexPermissions, OnceClient
from midstream.agents.permission_rules import ASK_FIRST, EVERYTHING, Asking, Rules, Verdict
from midstream.environment import World
from midstream.session.permissions import Allowed, Ask, Decision, Permission


def leave(rules: Rules | Asking = EVERYTHING) -> CodexPermissions:
    return CodexPermissions(rules, "thread-1", None, World())


async def test_changes_that_were_never_told_are_asked_about_as_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codex_permissions, "ITEM_S", 0.01)
    seen: list[Permission] = []

    async def decide(permission: Permission) -> Verdict:
        seen.append(permission)
        return True

    params = {"itemId": "w", "reason": "needs more", "grantRoot": "/srv"}
    assert await leave(decide).decide(CHANGE, params) == "accept"
    (asked,) = seen
    assert asked.is_vague
    assert asked.arguments == '{"changes":[],"grantRoot":"/srv","reason":"needs more"}'


async def test_who_is_let_go_is_told_that_it_was_cancelled() -> None:
    is_asked = asyncio.Event()

    async def person(_: Permission, __: Ask) -> Decision:
        is_asked.set()
        await asyncio.Event().wait()
        return Allowed()

    waiting = CodexPermissions(ASK_FIRST, "thread-1", person, World())
    deciding = asyncio.ensure_future(waiting.decide(COMMAND, {"itemId": "w", "command": "make"}))
    async with asyncio.timeout(60):
        await is_asked.wait()
        waiting.cancel_requests()
        assert await deciding == "cancel"


async def test_where_nobody_is_there_leave_is_refused_with_the_reason() -> None:
    alone = leave(ASK_FIRST)
    assert await alone.decide(COMMAND, {"itemId": "w", "command": "make"}) == "decline"
    assert "no person can be asked" in alone.refusals["w"]


def test_a_client_whose_app_server_was_stopped_starts_no_other_one() -> None:
    client = OnceClient(sdk.CodexConfig(launch_args_override=(sys.executable, "-c", "input()")))
    client.close()
    with pytest.raises(sdk.TransportClosedError, match="stopped"):
        client.start()
