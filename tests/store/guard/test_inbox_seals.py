from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.errors import StoreDamagedError, UnavailableError
from midstream.store.contract import ForwardedCommand
from midstream.store.guard.chain import ChainKey, ChainKeys
from midstream.store.guard.inbox_seals import COMMAND_AGE_MAX_S, InboxSeals
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec

KEYS = ChainKeys((ChainKey(b"k" * 32),), is_mixed=False, place="")
OTHERS = ChainKeys((ChainKey(b"o" * 32),), is_mixed=False, place="")


def command(seals: InboxSeals, number: int = 1) -> tuple[ForwardedCommand, bytes]:
    stored, nonce = seals.seal_command("s", "node-1", b"say hi")
    return ForwardedCommand(number, "s", stored, "node-1"), nonce


@spec("SEC-48")
def test_a_sealed_command_and_its_answer_can_be_opened() -> None:
    world = FakeWorld()
    sender, node = InboxSeals(KEYS, world), InboxSeals(KEYS, world)
    sent, nonce = command(sender)
    assert node.open_command(sent) == b"say hi"
    assert node.open_command(sent) == b"say hi", "the store delivers it again under a new epoch"
    assert sender.open_answer(nonce, node.seal_answer(1, b"done")) == b"done"


@spec("SEC-48")
@pytest.mark.parametrize(
    "change",
    [
        lambda sent: replace(sent, session="t"),
        lambda sent: replace(sent, sender="node-2"),
        lambda sent: replace(sent, body=sent.body[:-1] + b"!"),
        lambda sent: replace(sent, body=b"\0" + sent.body[1:]),
        lambda sent: replace(sent, body=sent.body[:20]),
        lambda sent: replace(sent, body=b""),
        lambda sent: replace(sent, body=b"say hi"),
    ],
)
def test_a_moved_or_changed_command_is_refused(change: object) -> None:
    assert callable(change)
    seals = InboxSeals(KEYS, FakeWorld())
    with pytest.raises(StoreDamagedError, match="no node of this store"):
        seals.open_command(change(command(seals)[0]))


@spec("SEC-48")
async def test_a_repeated_late_or_foreign_command_is_refused() -> None:
    world = FakeWorld()
    sender, node = InboxSeals(KEYS, world), InboxSeals(KEYS, world)
    sent, _ = command(sender)
    node.open_command(sent)
    with pytest.raises(StoreDamagedError, match="before"):
        node.open_command(replace(sent, number=2))
    node.seal_answer(1, b"done")
    with pytest.raises(StoreDamagedError, match="before"):
        node.open_command(sent)
    with pytest.raises(StoreDamagedError, match="no node"):
        InboxSeals(OTHERS, world).open_command(sent)
    await world.advance(COMMAND_AGE_MAX_S + 1)
    with pytest.raises(StoreDamagedError, match="60 s ago"):
        InboxSeals(KEYS, world).open_command(sent)


@spec("SEC-48")
def test_an_answer_is_valid_only_for_its_command() -> None:
    world = FakeWorld()
    sender, node = InboxSeals(KEYS, world), InboxSeals(KEYS, world)
    (one, first), (two, second) = command(sender, 1), command(sender, 2)
    node.open_command(one)
    node.open_command(two)
    answer = node.seal_answer(1, b"yes")
    for nonce, stored in (
        (second, answer),
        (first, answer[:-1] + b"!"),
        (first, b""),
        (first, b'{"position":1}'),
    ):
        with pytest.raises(UnavailableError):
            sender.open_answer(nonce, stored)
    with pytest.raises(UnavailableError):
        sender.open_answer(first, node.seal_answer(99, b"yes"))
    assert sender.open_answer(first, answer) == b"yes"
