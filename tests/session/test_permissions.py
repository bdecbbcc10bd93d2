"""What may be told about a permission: plain values, so that what is journaled of them is what was meant."""

from __future__ import annotations

import msgspec

from midstream.session.permissions import Allowed, Ask, Permission


def test_a_permission_says_by_default_that_all_is_shown_and_can_be_changed() -> None:
    wanted = Permission("agent", "Bash", "execute", "{}")
    assert (wanted.is_fixed, wanted.is_vague) == (False, False)
    assert Ask() == Ask("", 0.0)
    assert Allowed() == Allowed(None)


def test_they_are_values() -> None:
    wanted = Permission("agent", "Bash", "execute", '{"command":"make"}', is_fixed=True)
    assert msgspec.json.decode(msgspec.json.encode(wanted), type=Permission) == wanted
