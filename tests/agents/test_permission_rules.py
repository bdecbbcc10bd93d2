"""Who may do what: rules that decide, somebody who is asked."""

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
    assert isinstance(words, str)
    assert words.startswith("'rm' (delete) is not allowed here")


async def test_code_may_decide() -> None:
    async def decide(permission: Permission) -> Verdict:
        return True if permission.tool == "yes" else "no"

    assert await decide_permission(decide, asking("edit", "yes")) == Allowed()
    assert await decide_permission(decide, asking("read", "other")) == "no"
    assert await decide_permission(CAUTIOUS, asking("read")) == Allowed()


class People:
    """Somebody who allows everything, with other arguments, and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Permission, Ask]] = []

    async def decide(self, permission: Permission, terms: Ask) -> Decision:
        self.asked.append((permission, terms))
        return Allowed('{"path":"b"}')


@spec("TURN-82")
async def test_a_person_is_asked_where_the_rules_say_so_and_about_nothing_else() -> None:
    people, terms = People(), Ask("It writes.", 60.0)
    rules = Rules(tools=frozenset({"build"}), refused=frozenset({"push"}), others=terms)
    wanted = asking("edit", "write")
    assert await decide_permission(rules, wanted, people.decide) == Allowed('{"path":"b"}')
    assert await decide_permission(rules, asking("read"), people.decide) == Allowed()
    assert await decide_permission(rules, asking("execute", "build"), people.decide) == Allowed()
    assert isinstance(await decide_permission(rules, asking("execute", "push"), people.decide), str)
    assert isinstance(await decide_permission(CAUTIOUS, wanted, people.decide), str)
    assert people.asked == [(wanted, terms)]


@spec("TURN-82")
async def test_code_may_leave_it_to_a_person() -> None:
    people = People()

    async def unsure(_: Permission) -> Verdict:
        return Ask("I do not know.")

    assert await decide_permission(unsure, asking("edit"), people.decide) == Allowed('{"path":"b"}')
    assert people.asked == [(asking("edit"), Ask("I do not know."))]


@spec("TURN-82")
async def test_where_nobody_is_there_what_a_person_would_decide_is_refused_with_the_reason() -> None:
    words = await decide_permission(ASK_FIRST, asking("delete", "rm"))
    assert isinstance(words, str)
    assert words.startswith("'rm' (delete) is not allowed here: no person can be asked")
    assert await decide_permission(ASK_FIRST, asking("search")) == Allowed()


@spec("SEC-27")
async def test_a_pattern_of_names_has_terms_of_its_own_whatever_the_kind() -> None:
    several = Ask("A payment.", approvers=2)
    rules = Rules(refused=frozenset({"bank_close"}), others=ASK_FIRST.others, asked={"bank_*": several})
    assert rules.verdict(asking("read", "bank_pay")) == several
    assert isinstance(rules.verdict(asking("read", "bank_close")), str)
    assert rules.verdict(asking("read", "Bank_pay")) is True
    assert rules.verdict(asking("edit", "other")) == Ask()
