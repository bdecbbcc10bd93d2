"""The quick attacks, each on its own ground; `make attack` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack.attack import Attack, find_attacks
from tests.attack.ground import Ground


@pytest.mark.slow
@pytest.mark.parametrize("attack", find_attacks(quick=True), ids=lambda attack: attack.name)
def test_an_attack_does_not_succeed(attack: Attack, tmp_path: Path) -> None:
    attack.play(Ground(tmp_path))


def test_attacks_are_selected_by_words() -> None:
    assert [each.name for each in find_attacks("revoked_line")] == [
        "credential.a_revoked_line_ends_its_credentials"
    ]
