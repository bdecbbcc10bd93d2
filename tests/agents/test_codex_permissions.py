"""The client of Codex's app server that reads on during a decision: cases that a scripted app server cannot show."""

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


def permissions_of(rules: Rules | Asking = EVERYTHING) -> CodexPermissions:
    return CodexPermissions(rules, "thread-1", None, World())


async def test_changes_without_an_item_are_described_by_the_requests_own_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codex_permissions, "ITEM_S", 0.01)
    seen: list[Permission] = []

    async def decide(permission: Permission) -> Verdict:
        seen.append(permission)
        return True

    params = {"itemId": "w", "reason": "needs more", "grantRoot": "/srv"}
    assert await permissions_of(decide).decide(CHANGE, params) == "accept"
    (asked,) = seen
    assert asked.is_vague
    assert asked.arguments == '{"changes":[],"grantRoot":"/srv","reason":"needs more"}'


async def test_cancelled_permission_requests_are_answered_as_cancelled() -> None:
    is_asked = asyncio.Event()

    async def wait_forever(_: Permission, __: Ask) -> Decision:
        is_asked.set()
        await asyncio.Event().wait()
        return Allowed()

    waiting = CodexPermissions(ASK_FIRST, "thread-1", wait_forever, World())
    deciding = asyncio.ensure_future(waiting.decide(COMMAND, {"itemId": "w", "command": "make"}))
    async with asyncio.timeout(60):
        await is_asked.wait()
        waiting.cancel_requests()
        assert await deciding == "cancel"


async def test_without_a_person_permission_is_refused_with_the_reason() -> None:
    alone = permissions_of(ASK_FIRST)
    assert await alone.decide(COMMAND, {"itemId": "w", "command": "make"}) == "decline"
    assert "no person can be asked" in alone.refusals["w"]


def test_a_client_whose_app_server_was_stopped_starts_no_other_one() -> None:
    client = OnceClient(sdk.CodexConfig(launch_args_override=(sys.executable, "-c", "input()")))
    client.close()
    with pytest.raises(sdk.TransportClosedError, match="stopped"):
        client.start()
