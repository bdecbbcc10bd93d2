"""Who may do what: rules that decide, somebody who is asked."""

from __future__ import annotations

import pytest

from midstream.runtime.permissions import (
    CAUTIOUS,
    EVERYTHING,
    HARMLESS,
    Kind,
    Permission,
    Rules,
    Verdict,
    verdict,
)

KINDS: tuple[Kind, ...] = (
    "read",
    "search",
    "think",
    "fetch",
    "edit",
    "delete",
    "move",
    "execute",
    "other",
)


def asking(kind: Kind, tool: str = "it") -> Permission:
    return Permission("agent", tool, kind, "{}")


@pytest.mark.parametrize("kind", KINDS)
def test_by_default_what_has_effects_is_refused(kind: Kind) -> None:
    assert (CAUTIOUS.verdict(asking(kind)) is True) == (kind in HARMLESS)
    assert EVERYTHING.verdict(asking(kind)) is True


def test_a_name_is_stronger_than_a_kind_and_a_refusal_than_both() -> None:
    rules = Rules(tools=frozenset({"deploy", "both"}), refused=frozenset({"peek", "both"}))
    assert rules.verdict(asking("execute", "deploy")) is True
    assert rules.verdict(asking("read")) is True
    for tool in ("peek", "both"):
        assert rules.verdict(asking("read", tool)) is not True


def test_a_refusal_says_what_was_refused() -> None:
    words = CAUTIOUS.verdict(asking("delete", "rm"))
    assert words is not True
    assert words.startswith("'rm' (delete) is not allowed here")


async def test_somebody_may_decide() -> None:
    async def ask(permission: Permission) -> Verdict:
        return True if permission.tool == "yes" else "no"

    assert await verdict(ask, asking("edit", "yes")) is True
    assert await verdict(ask, asking("read", "other")) == "no"
    assert await verdict(CAUTIOUS, asking("read")) is True
