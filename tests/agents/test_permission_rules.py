"""Permissions: rules that decide, and people who are asked."""

from __future__ import annotations

import pytest

from midstream.agents.permission_rules import (
    ASK_FIRST,
    CAUTIOUS,
    EVERYTHING,
    HARMLESS,
    Allowed,
    Ask,
    Decision,
    Kind,
    Permission,
    Rules,
    Verdict,
    decide_permission,
)
from tests.spec import spec

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


def permission(kind: Kind, tool: str = "it") -> Permission:
    return Permission("agent", tool, kind, "{}")


@pytest.mark.parametrize("kind", KINDS)
def test_by_default_tools_with_effects_are_refused(kind: Kind) -> None:
    assert (CAUTIOUS.verdict(permission(kind)) is True) == (kind in HARMLESS)
    assert EVERYTHING.verdict(permission(kind)) is True


def test_a_name_takes_precedence_over_a_kind_and_a_refusal_over_both() -> None:
    rules = Rules(tools=frozenset({"deploy", "both"}), refused=frozenset({"peek", "both"}))
    assert rules.verdict(permission("execute", "deploy")) is True
    assert rules.verdict(permission("read")) is True
    for tool in ("peek", "both"):
        assert rules.verdict(permission("read", tool)) is not True


def test_a_refusal_names_the_refused_action() -> None:
    words = CAUTIOUS.verdict(permission("delete", "rm"))
    assert isinstance(words, str)
    assert words.startswith("'rm' (delete) is not allowed here")


async def test_a_function_may_decide() -> None:
    async def decide(permission: Permission) -> Verdict:
        return True if permission.tool == "yes" else "no"

    assert await decide_permission(decide, permission("edit", "yes")) == Allowed()
    assert await decide_permission(decide, permission("read", "other")) == "no"
    assert await decide_permission(CAUTIOUS, permission("read")) == Allowed()


class AllowAll:
    """Allows everything with other arguments, and stores the questions."""

    def __init__(self) -> None:
        self.asked: list[tuple[Permission, Ask]] = []

    async def decide(self, permission: Permission, terms: Ask) -> Decision:
        self.asked.append((permission, terms))
        return Allowed('{"path":"b"}')


@spec("TURN-82")
async def test_a_person_is_asked_only_where_the_rules_require_it() -> None:
    people, terms = AllowAll(), Ask("It writes.", 60.0)
    rules = Rules(tools=frozenset({"build"}), refused=frozenset({"push"}), others=terms)
    wanted = permission("edit", "write")
    assert await decide_permission(rules, wanted, people.decide) == Allowed('{"path":"b"}')
    assert await decide_permission(rules, permission("read"), people.decide) == Allowed()
    assert await decide_permission(rules, permission("execute", "build"), people.decide) == Allowed()
    assert isinstance(await decide_permission(rules, permission("execute", "push"), people.decide), str)
    assert isinstance(await decide_permission(CAUTIOUS, wanted, people.decide), str)
    assert people.asked == [(wanted, terms)]


@spec("TURN-82")
async def test_a_function_may_leave_the_decision_to_a_person() -> None:
    people = AllowAll()

    async def unsure(_: Permission) -> Verdict:
        return Ask("I do not know.")

    assert await decide_permission(unsure, permission("edit"), people.decide) == Allowed('{"path":"b"}')
    assert people.asked == [(permission("edit"), Ask("I do not know."))]


@spec("TURN-82")
async def test_without_a_person_such_a_permission_is_refused_with_the_reason() -> None:
    words = await decide_permission(ASK_FIRST, permission("delete", "rm"))
    assert isinstance(words, str)
    assert words.startswith("'rm' (delete) is not allowed here: no person can be asked")
    assert await decide_permission(ASK_FIRST, permission("search")) == Allowed()


@spec("SEC-27")
async def test_a_pattern_of_names_has_its_own_terms_whatever_the_kind() -> None:
    several = Ask("A payment.", approvers=2)
    rules = Rules(refused=frozenset({"bank_close"}), others=ASK_FIRST.others, asked={"bank_*": several})
    assert rules.verdict(permission("read", "bank_pay")) == several
    assert isinstance(rules.verdict(permission("read", "bank_close")), str)
    assert rules.verdict(permission("read", "Bank_pay")) is True
    assert rules.verdict(permission("edit", "other")) == Ask()
