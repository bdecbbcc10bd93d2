"""Values about a permission: plain, so that their journaled form equals the original."""

from __future__ import annotations

import math

import msgspec
import pytest

from midstream.errors import UsageError
from midstream.number_checks import WAIT_S_MAX
from midstream.session.permissions import Allowed, Ask, Permission
from tests.spec import spec


def test_a_permission_by_default_is_complete_and_can_be_changed() -> None:
    wanted = Permission("agent", "Bash", "execute", "{}")
    assert (wanted.is_fixed, wanted.is_vague) == (False, False)
    assert Ask() == Ask("", 0.0)
    assert Allowed() == Allowed(None)


@spec("SEC-78")
@pytest.mark.parametrize("seconds", [-1.0, 1e300, math.inf, math.nan, WAIT_S_MAX + 1])
def test_the_answer_time_of_a_person_is_within_bounds(seconds: float) -> None:
    with pytest.raises(UsageError):
        Ask(answer_s=seconds)
    assert Ask(answer_s=WAIT_S_MAX).answer_s == WAIT_S_MAX


def test_permissions_are_serializable_values() -> None:
    wanted = Permission("agent", "Bash", "execute", '{"command":"make"}', is_fixed=True)
    assert msgspec.json.decode(msgspec.json.encode(wanted), type=Permission) == wanted
