"""Try every possible sequence of events in a small world, and check every reached state."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tests.protocol.checks import check, is_at_end
from tests.protocol.world import Action, SmallWorld

HEALED_WITHIN = 500
"""Steps without a fault within which a world comes to its end, or never does."""


class Found(NamedTuple):
    """A violation, and the steps that led to it."""

    what: str
    trace: tuple[Action, ...]

    def __str__(self) -> str:
        steps = "\n".join(
            f"  {number:>3}  {' '.join(map(str, action))}" for number, action in enumerate(self.trace)
        )
        return f"{self.what}\n{steps}"


class ExploredWorld(NamedTuple):
    """Number of states, and the violation found."""

    states: int
    transitions: int
    ends: int
    found: Found | None


def explore(first: SmallWorld, *, states_max: int) -> ExploredWorld:
    """Visit every reachable state, breadth first, and stop at the first broken promise.

    In every state, the invariants are checked, and that the world comes to its end from there without further
    faults.
    """
    mark = first.fingerprint()
    came: dict[int, tuple[int, Action] | None] = {mark: None}
    healed: set[int] = set()
    front = deque([(mark, first)])
    transitions = ends = 0

    def failed(what: str, *last: Action) -> ExploredWorld:
        return ExploredWorld(len(came), transitions, ends, Found(what, (*_trace(came, mark), *last)))

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
    return ExploredWorld(len(came), transitions, ends, None)


def _broken(world: SmallWorld, action: Action) -> str | None:
    """Perform an action and return the violation after it."""
    try:
        world.act(action)
        check(world)
    except AssertionError as error:
        return str(error) or f"an assertion failed in {action}"
    return None


def _heal(world: SmallWorld, mark: int, healed: set[int]) -> str | None:
    """Deliver everything, without another fault, until no action is left.

    A world that ends from some state ends from every state that leads there.
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
