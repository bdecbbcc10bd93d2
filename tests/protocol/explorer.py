"""Try everything that can happen in a small world, and look at every state it comes to."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tests.protocol.checks import check, is_at_end
from tests.protocol.world import Action, World

HEALED_WITHIN = 500
"""Steps without a fault in which a world comes to its end, or never does."""


class Found(NamedTuple):
    """What went wrong, and how it came to that."""

    what: str
    trace: tuple[Action, ...]

    def __str__(self) -> str:
        steps = "\n".join(
            f"  {number:>3}  {' '.join(map(str, action))}" for number, action in enumerate(self.trace)
        )
        return f"{self.what}\n{steps}"


class Explored(NamedTuple):
    """How much there was, and what was wrong with it."""

    states: int
    transitions: int
    ends: int
    found: Found | None


def explore(first: World, *, states_max: int) -> Explored:
    """Come to every state that can be come to, breadth first, and stop at the first broken promise.

    In every state it is checked that what must hold holds, and that from there the world comes to its end
    when nothing fails any more.
    """
    mark = first.fingerprint()
    came: dict[int, tuple[int, Action] | None] = {mark: None}
    healed: set[int] = set()
    front = deque([(mark, first)])
    transitions = ends = 0

    def failed(what: str, *last: Action) -> Explored:
        return Explored(len(came), transitions, ends, Found(what, (*_trace(came, mark), *last)))

    while front:
        mark, world = front.popleft()
        ends += is_at_end(world)
        if (what := _heal(world, mark, healed)) is not None:
            return failed(what)
        for action in world.actions():
            transitions += 1
            after = world.clone()
            if (what := _broken(after, action)) is not None:
                return failed(what, action)
            next_mark = after.fingerprint()
            if next_mark in came:
                continue
            came[next_mark] = (mark, action)
            if len(came) > states_max:
                return failed(f"there are more than {states_max} states")
            front.append((next_mark, after))
    return Explored(len(came), transitions, ends, None)


def _broken(world: World, action: Action) -> str | None:
    """Let something happen and say what is wrong then."""
    try:
        world.act(action)
        check(world)
    except AssertionError as error:
        return str(error) or f"an assertion failed in {action}"
    return None


def _heal(world: World, mark: int, healed: set[int]) -> str | None:
    """Let everything arrive, without another fault, until nothing is left to happen.

    What came to its end from some state comes to its end from everything that leads there.
    """
    path: list[int] = []
    world = world.clone()
    for _ in range(HEALED_WITHIN):
        if mark in healed:
            break
        path.append(mark)
        action = next(world.progress(), None)
        if action is None:
            if not is_at_end(world):
                return "nothing is left to happen, and this is not the end"
            break
        if (what := _broken(world, action)) is not None:
            return f"{what} (after {action}, while the network is well)"
        mark = world.fingerprint()
    else:
        return f"no end came within {HEALED_WITHIN} steps"
    healed.update(path)
    return None


def _trace(came: dict[int, tuple[int, Action] | None], mark: int) -> tuple[Action, ...]:
    steps: list[Action] = []
    while (step := came[mark]) is not None:
        mark, action = step
        steps.append(action)
    return tuple(reversed(steps))
