"""Each wait ends once, at its deadline, and not after it was removed."""

from __future__ import annotations

from midstream.engine.timers import Wait, Waits, split_work_and_waits
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.turn.commands import CallExpired, CancelExpired, Command, QuestionExpired, TurnExpired
from midstream.session.turn.pending import (
    AwaitCancelled,
    AwaitClient,
    AwaitEnd,
    AwaitPerson,
    CallModel,
    RunCall,
)
from midstream.testing.fake_worlds import FakeWorld


class WaitBench:
    """Waits of a session, and the commands that they caused."""

    def __init__(self) -> None:
        self.world = FakeWorld()
        self.commands: list[Command] = []
        self.waits = Waits(self.world, self.commands.append)

    def at(self, seconds: float) -> float:
        """Return a deadline this many seconds from the start."""
        return FakeWorld().now() + seconds


async def test_each_kind_of_wait_ends_at_its_deadline_with_its_own_command() -> None:
    bench = WaitBench()
    bench.waits.set(
        [
            AwaitEnd(3, bench.at(40)),
            AwaitClient(CallRef(3, 1, "c"), bench.at(10)),
            AwaitPerson(CallRef(3, 1, "p"), bench.at(20)),
            AwaitCancelled(3, bench.at(30)),
        ]
    )
    await bench.world.advance(9.9)
    assert bench.commands == []
    expected = [
        CallExpired(CallRef(3, 1, "c")),
        QuestionExpired(CallRef(3, 1, "p")),
        CancelExpired(3),
        TurnExpired(3),
    ]
    for count in range(1, 5):
        await bench.world.advance(10.0)
        assert bench.commands == expected[:count]


async def test_a_wait_ends_once_however_often_it_is_set() -> None:
    bench = WaitBench()
    client = AwaitClient(CallRef(3, 1, "c"), bench.at(10))
    bench.waits.set([client])
    await bench.world.advance(10.0)
    bench.waits.set([client])
    bench.waits.set([client, AwaitClient(CallRef(3, 1, "d"), bench.at(15))])
    await bench.world.advance(10.0)
    assert bench.commands == [CallExpired(CallRef(3, 1, "c")), CallExpired(CallRef(3, 1, "d"))]


async def test_a_removed_wait_does_not_fire_and_an_earlier_deadline_comes_first() -> None:
    bench = WaitBench()
    bench.waits.set([AwaitClient(CallRef(3, 1, "c"), bench.at(10))])
    bench.waits.set([AwaitClient(CallRef(3, 1, "d"), bench.at(5))])
    await bench.world.advance(5.0)
    assert bench.commands == [CallExpired(CallRef(3, 1, "d"))]
    bench.waits.set([AwaitClient(CallRef(3, 1, "e"), bench.at(30))])
    await bench.world.advance(5.0)
    bench.waits.clear()
    await bench.world.advance(30.0)
    assert bench.commands == [CallExpired(CallRef(3, 1, "d"))]


async def test_a_clock_that_was_set_back_prolongs_a_wait() -> None:
    class SetBack(FakeWorld):
        behind_s = 0.0

        def now(self) -> float:
            return super().now() - self.behind_s

    world, commands = SetBack(), list[Command]()
    waits = Waits(world, commands.append)
    waits.set([AwaitEnd(3, world.now() + 10)])
    world.behind_s = 5.0
    await world.advance(10.0)
    assert commands == []
    await world.advance(5.0)
    assert commands == [TurnExpired(3)]


def test_work_and_waits_are_distinguished() -> None:
    ask, run = CallModel(AttemptRef(3, 1, 1)), RunCall(CallRef(3, 1, "c"), 1)
    waits: list[Wait] = [
        AwaitClient(CallRef(3, 1, "c"), 1.0),
        AwaitPerson(CallRef(3, 1, "c"), 1.0),
        AwaitCancelled(3, 1.0),
        AwaitEnd(3, 1.0),
    ]
    assert split_work_and_waits([ask, *waits, run]) == ([ask, run], waits)
