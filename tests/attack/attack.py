"""Attacks: functions that try forbidden actions against real servers on loopback.

A file `*_attacks.py` in this folder has the attacks of one subject. Each is a function of a `Ground` under
`@attack`, cites its clauses by `@spec`, and raises `AssertionError` if the attack succeeds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from tests.attack.ground import Ground

Play = Callable[[Ground], None]


class Attack(Struct, frozen=True):
    """One attack.


    Args:
        name: The function's name, after its file's name.     play: The function.     is_quick: Whether it is
            part of `make test`.
    """

    name: str
    play: Play
    is_quick: bool


_ATTACKS: list[Attack] = []


def attack(*, quick: bool = False) -> Callable[[Play], Play]:
    """Register a function as an attack; `quick` ones are part of `make test`, in 15 s altogether."""

    def register(play: Play) -> Play:
        subject = play.__module__.rpartition(".")[2].removesuffix("_attacks")
        name = play.__name__.removeprefix("attack_")
        _ATTACKS.append(Attack(f"{subject}.{name}", play, quick))
        return play

    return register


def find_attacks(words: str = "", *, quick: bool = False) -> list[Attack]:
    """Return the attacks whose name contains these words; with `quick` only those of `make test`."""
    for path in sorted(Path(__file__).parent.glob("*_attacks.py")):
        importlib.import_module(f"tests.attack.{path.stem}")
    return [each for each in _ATTACKS if words in each.name and (each.is_quick or not quick)]
