"""The mailbox before a session's journal: handled in order, merged for fast models, refused when the session ends."""

from __future__ import annotations

import asyncio

import pytest

from midstream.engine.mailbox import (
    MAILBOX_MAX,
    OUTPUT_EVERY_S,
    Effect,
    Envelope,
    Mailbox,
    is_mere_result,
    is_model_output,
    merge,
)
from midstream.environment import World
from midstream.errors import MidstreamError, StoreBusyError
from midstream.history.messages import ToolResult, UserMessage
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.records import Delta
from midstream.session.session import Received
from midstream.session.turn.commands import CallFinished, Cancel, ModelStreamed, SendMessage
from midstream.session.turn.pending import RunCall
from midstream.store.contract import Attempt
from midstream.testing.fake_worlds import FakeWorld

FINISHED = CallFinished(1, 1, ToolResult("c1", "done"))


def _delta(text: str, attempt: int = 1) -> Envelope:
    return Envelope(ModelStreamed(AttemptRef(1, 1, attempt), (Delta(1, 1, attempt, 0, "text", text),)))


class ImmediateAppends:
    """Accepts deltas immediately if allowed, and records them."""

    def __init__(self, *, may: bool = True) -> None:
        self.words: list[str] = []
        self._may = may

    def __call__(self, words: list[Envelope]) -> bool:
        if self._may:
            accepted_command = [each.command for each in words]
            self.words.append(
                "".join(each.deltas[0].text for each in accepted_command if isinstance(each, ModelStreamed))
            )
        return self._may


NEVER = ImmediateAppends(may=False)


async def _moments(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _effect() -> Envelope:
    def run(_attempt: Attempt) -> CallFinished:
        return FINISHED

    return Envelope(Effect(RunCall(CallRef(1, 1, "c1"), 1), run))


def _command(command: SendMessage | Cancel) -> tuple[Envelope, asyncio.Future[int]]:
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    return Envelope(command, done), done


async def test_it_is_idle_again_when_all_taken_commands_are_settled() -> None:
    mailbox = Mailbox(World(), NEVER)
    seen = [mailbox.is_idle]
    mailbox.put(_delta("a"))
    seen.append(mailbox.is_idle)
    mailbox.take()
    mailbox.put(_delta("b"))
    mailbox.settle()
    seen.append(mailbox.is_idle)
    mailbox.take()
    mailbox.settle()
    assert [*seen, mailbox.is_idle] == [True, False, False, True]
    async with asyncio.timeout(60):
        await mailbox.wait_until_idle()


async def test_the_consumer_waits_until_a_command_arrives() -> None:
    mailbox = Mailbox(World(), NEVER)
    waiting = asyncio.create_task(mailbox.arrival())
    await asyncio.sleep(0)
    assert not waiting.done()
    mailbox.put(_delta("a"))
    mailbox.put(_delta("b"))
    async with asyncio.timeout(60):
        await waiting
        await mailbox.arrival()  # an available command need not arrive
    assert len(mailbox.take()) == 2


async def _is_due(mailbox: Mailbox) -> bool:
    waiting = asyncio.create_task(mailbox.arrival())
    for _ in range(5):
        await asyncio.sleep(0)
    is_due = waiting.done()
    waiting.cancel()
    return is_due


async def test_deltas_after_a_pause_are_due_at_once_and_close_followers_wait_for_one_another() -> None:
    world = FakeWorld()
    mailbox = Mailbox(world, NEVER)
    mailbox.put(_delta("a"))
    assert await _is_due(mailbox)
    mailbox.take()
    mailbox.settle()
    await world.advance(OUTPUT_EVERY_S / 2)
    mailbox.put(_delta("b"))
    mailbox.put(_delta("c"))
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S)
    assert await _is_due(mailbox)
    assert len(mailbox.take()) == 2
    mailbox.settle()
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S)
    mailbox.put(_delta("d"))
    assert await _is_due(mailbox)


async def test_deltas_during_an_append_of_deltas_wait_for_its_readers_and_no_earlier_ones() -> None:
    world = FakeWorld()
    mailbox = Mailbox(world, NEVER)
    mailbox.put(_delta("a"))
    mailbox.take()
    mailbox.settle()
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S / 2)
    mailbox.put(Envelope(FINISHED))
    mailbox.put(_delta("b"))
    assert len(mailbox.take()) == 2
    mailbox.put(_delta("c"))  # within the pause that started with "a"
    mailbox.settle()
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S * 0.75)
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S / 2)
    assert await _is_due(mailbox)


async def test_simultaneous_deltas_are_appended_together_at_once_and_close_followers_too() -> None:
    world, appends = FakeWorld(), ImmediateAppends()
    mailbox = Mailbox(world, appends)
    mailbox.put(_delta("a"))
    mailbox.put(_delta("b"))
    assert (appends.words, mailbox.is_idle) == ([], False), "there may be more in this moment"
    await _moments(1)
    assert (appends.words, mailbox.is_idle) == (["ab"], True)
    for word in "cd":
        mailbox.put(_delta(word))
        await _moments(5)
        await world.advance(OUTPUT_EVERY_S / 3)
    assert (appends.words, mailbox.is_idle) == (["ab"], False), "deltas are being read"
    await world.advance(OUTPUT_EVERY_S)
    assert (appends.words, mailbox.is_idle) == (["ab", "cd"], True)
    assert not await _is_due(mailbox)


async def test_deltas_that_cannot_be_appended_at_once_are_taken() -> None:
    mailbox = Mailbox(FakeWorld(), ImmediateAppends(may=False))
    mailbox.put(_delta("a"))
    mailbox.put(_delta("b"))
    assert await _is_due(mailbox)
    assert len(mailbox.take()) == 2


@pytest.mark.parametrize("is_taken", [True, False])
async def test_deltas_do_not_overtake_waiting_or_taken_commands(
    is_taken: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    appends = ImmediateAppends()
    mailbox = Mailbox(FakeWorld(), appends)
    mailbox.put(_delta("a"))
    mailbox.put(Envelope(FINISHED))
    if is_taken:
        mailbox.take()
        mailbox.put(_delta("b"))
    assert await _is_due(mailbox)
    assert appends.words == []
    assert len(mailbox.take()) == (1 if is_taken else 2)


@pytest.mark.parametrize("hurry", ["command", "full", "rest"])
async def test_deltas_are_not_delayed_if_another_command_waits_for_its_append(hurry: str) -> None:
    mailbox = Mailbox(FakeWorld(), NEVER)
    mailbox.put(_delta("a"))
    mailbox.take()
    mailbox.settle()
    mailbox.put(_delta("b"))
    assert not await _is_due(mailbox)
    resting = None
    if hurry == "command":
        mailbox.put(Envelope(FINISHED))
    elif hurry == "full":
        while not mailbox.is_full:
            mailbox.put(_delta("c"))
    else:
        resting = asyncio.create_task(mailbox.wait_until_idle())
    assert await _is_due(mailbox)
    mailbox.take()
    mailbox.settle()
    if resting is not None:
        async with asyncio.timeout(60):
            await resting


async def test_the_pause_between_appends_of_deltas_starts_at_the_end_of_an_append() -> None:
    world = FakeWorld()
    mailbox = Mailbox(world, NEVER)
    mailbox.put(_delta("a"))
    assert await _is_due(mailbox)
    mailbox.take()
    await world.advance(2 * OUTPUT_EVERY_S)  # a slow disk, or many readers
    mailbox.settle()
    mailbox.put(_delta("b"))
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S)
    assert await _is_due(mailbox)


async def test_the_pause_between_appends_of_deltas_starts_when_their_readers_have_them() -> None:
    world = FakeWorld()
    mailbox = Mailbox(world, NEVER)
    mailbox.put(_delta("a"))
    mailbox.take()
    sent: list[asyncio.Task[None]] = []

    def write_to_many() -> None:
        sent.append(asyncio.create_task(world.advance(2 * OUTPUT_EVERY_S)))

    # A reader that the append woke, and that writes when all others were woken too.
    asyncio.get_running_loop().call_soon(write_to_many)
    mailbox.settle()
    mailbox.put(_delta("b"))
    assert not await _is_due(mailbox)
    async with asyncio.timeout(60):
        await sent[0]
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S)
    assert await _is_due(mailbox)


async def test_deltas_that_remain_when_clients_are_refused_are_taken_next() -> None:
    mailbox = Mailbox(FakeWorld(), NEVER)
    mailbox.put(_delta("a"))
    mailbox.take()
    asked, done = _command(Cancel())
    mailbox.put(asked)
    mailbox.refuse_clients(StoreBusyError("busy"))
    assert not await _is_due(mailbox)
    mailbox.put(Envelope(FINISHED))
    assert await _is_due(mailbox)
    assert isinstance(done.exception(), StoreBusyError)


async def test_a_call_that_runs_in_its_append_is_taken_alone() -> None:
    mailbox = Mailbox(World(), NEVER)
    put = [_delta("a"), _effect(), _effect(), _delta("b")]
    for envelope in put:
        mailbox.put(envelope)
    assert [mailbox.take() for _ in range(5)] == [put[:1], put[1:2], put[2:3], put[3:], []]


async def test_a_full_mailbox_has_room_after_a_take() -> None:
    mailbox = Mailbox(World(), NEVER)
    for _ in range(MAILBOX_MAX):
        assert not mailbox.is_full
        mailbox.put(_delta("a"))
    assert mailbox.is_full
    waiting = asyncio.create_task(mailbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    mailbox.take()
    async with asyncio.timeout(60):
        await waiting


async def test_a_task_has_reported_while_its_command_waits() -> None:
    mailbox = Mailbox(World(), NEVER)
    ours, other = asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(asyncio.sleep(0))
    mailbox.put(Envelope(FINISHED, reporter=ours))
    mailbox.put(_delta("a"))
    assert (mailbox.has_report_of(ours), mailbox.has_report_of(other)) == (True, False)
    mailbox.take()
    assert not mailbox.has_report_of(ours)
    await asyncio.wait([ours, other])


async def test_a_refusal_of_clients_keeps_the_outcomes_of_tools() -> None:
    mailbox = Mailbox(World(), NEVER)
    asked, done = _command(SendMessage(UserMessage.of("hi")))
    finished = Envelope(FINISHED)
    mailbox.put(asked)
    mailbox.put(finished)
    mailbox.refuse_clients(StoreBusyError("busy"))
    with pytest.raises(StoreBusyError):
        await done
    assert mailbox.take() == [finished]


async def test_a_command_for_an_ended_session_is_refused() -> None:
    mailbox = Mailbox(World(), NEVER)
    asked, done = _command(Cancel())
    mailbox.put(asked)
    mailbox.put(Envelope(FINISHED))
    mailbox.refuse_all(StoreBusyError("busy"))
    with pytest.raises(MidstreamError):
        await done
    assert (mailbox.take(), mailbox.is_idle) == ([], True)


async def test_an_envelope_is_answered_once() -> None:
    asked, done = _command(Cancel())
    asked.answer(3)
    asked.answer(StoreBusyError("too late"))
    assert await done == 3
    Envelope(FINISHED).answer(3)  # without a waiter


def test_adjacent_deltas_of_one_attempt_are_one_command() -> None:
    finished = Envelope(FINISHED)
    batch = [_delta("a"), _delta("b"), finished, _delta("c"), _delta("d", attempt=2)]
    assert [each.command for each in merge(batch)] == [
        _delta("ab").command,
        FINISHED,
        _delta("c").command,
        _delta("d", attempt=2).command,
    ]


def test_a_batch_of_deltas_is_distinguished_from_one_that_changes_pending_work() -> None:
    assert is_model_output([_delta("a"), _delta("b", attempt=2)])
    assert not is_model_output([_delta("a"), Envelope(FINISHED)])
    assert not is_model_output([Envelope(None)])


def test_a_clients_result_without_consequences_is_distinguished() -> None:
    of_client = Envelope(Received("k", "secret", 1, "d", FINISHED))
    message = Envelope(Received("k", "secret", 0, "d", SendMessage(UserMessage.of("hi"))))
    assert is_mere_result([of_client], 2)
    assert is_mere_result([of_client], 0)
    assert not is_mere_result([of_client], 3)  # it has a consequence
    assert not is_mere_result([of_client, of_client], 2)
    assert not is_mere_result([message], 2)
    assert not is_mere_result([Envelope(FINISHED)], 1)  # of a tool that ran here
