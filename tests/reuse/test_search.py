"""Random client applications and failures: no message lost, doubled, or in the wrong conversation.

`make pool-search` runs a hundred thousand lives; here a few hundred known ones run. `make pool-search
ARGS=SEED` repeats a failing seed with its trace.
"""

from __future__ import annotations

from collections import Counter

import pytest

from midstream.agents import agent_failures, pool_turns
from midstream.agents.pool_entries import Claim
from midstream.errors import ModelError
from tests.reuse.client_lives import ACTIONS, ClientLife, run_life
from tests.spec import spec

BLOCKS = 2
LIVES = 120
"""Seeds of one block."""


@spec("REUSE-50", "REUSE-51")
@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_promise_holds_for_any_client_application(block: int) -> None:
    failed: dict[int, list[str]] = {}
    figures: Counter[str] = Counter()
    for seed in range(block * LIVES, (block + 1) * LIVES):
        life = run_life(seed)
        figures += life.figures
        if life.problems:
            failed[seed] = life.problems
    assert failed == {}
    never = [act.__name__ for act, _ in ACTIONS if not figures[act.__name__.strip("_")]]
    assert never == [], "nothing was tried"
    assert figures["resumed"] > figures["replays"] > 0


@pytest.mark.slow
def test_a_seed_gives_the_same_life_every_time() -> None:
    for seed in (7, 11):
        assert run_life(seed).trace == run_life(seed).trace


def _last_only(*given: object) -> object:
    return _messages_of(*given)[-1:]  # type: ignore[arg-type]


_messages_of = pool_turns._messages_of
_remedy = agent_failures.remedy


def _repeat_always(error: ModelError, situation: agent_failures.FailureSituation) -> agent_failures.Remedy:
    """Repeat the message to an agent that may have received it: one that became silent, or failed without a reason."""
    is_doubtful = agent_failures.cause_of(error) in {
        agent_failures.FailureCause.STALLED,
        agent_failures.FailureCause.UNKNOWN,
    }
    if is_doubtful and not situation.has_spoken and not situation.is_forced:
        return agent_failures.Repeat(is_forced=True)
    return _remedy(error, situation)


async def _never_release(claim: Claim, record: object) -> None:
    """Never release an agent."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "name", "broken", "lives"),
    [
        (pool_turns, "_messages_of", _last_only, 60),
        (agent_failures, "remedy", _repeat_always, 400),
        (Claim, "release", _never_release, 60),
    ],
    ids=[
        "a queued message is left out",
        "what may have been taken is said again",
        "a record is never let go",
    ],
)
def test_a_broken_promise_is_found(
    monkeypatch: pytest.MonkeyPatch, home: object, name: str, broken: object, lives: int
) -> None:
    monkeypatch.setattr(home, name, broken)
    assert any(_fails(ClientLife(seed)) for seed in range(lives))


def _fails(life: ClientLife) -> bool:
    life.run()
    return bool(life.problems)
