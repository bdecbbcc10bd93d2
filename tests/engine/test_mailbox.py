"""What waits for a session's journal: taken in order, joined where a model talks fast, refused where nobody will."""

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


def _said(text: str, attempt: int = 1) -> Envelope:
    return Envelope(ModelStreamed(AttemptRef(1, 1, attempt), (Delta(1, 1, attempt, 0, "text", text),)))


class Said:
    """What takes words at once, where it may, and knows which."""

    def __init__(self, *, may: bool = True) -> None:
        self.words: list[str] = []
        self._may = may

    def __call__(self, words: list[Envelope]) -> bool:
        if self._may:
            said = [each.command for each in words]
            self.words.append(
                "".join(each.deltas[0].text for each in said if isinstance(each, ModelStreamed))
            )
        return self._may


NEVER = Said(may=False)


async def _moments(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _effect() -> Envelope:
    def run(_attempt: Attempt) -> CallFinished:
        return FINISHED

    return Envelope(Effect(RunCall(CallRef(1, 1, "c1"), 1), run))


def _asked(command: SendMessage | Cancel) -> tuple[Envelope, asyncio.Future[int]]:
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    return Envelope(command, done), done


async def test_it_is_at_rest_again_when_all_that_was_taken_is_done_with() -> None:
    mailbox = Mailbox(World(), NEVER)
    seen = [mailbox.is_idle]
    mailbox.put(_said("a"))
    seen.append(mailbox.is_idle)
    mailbox.take()
    mailbox.put(_said("b"))
    mailbox.settle()
    seen.append(mailbox.is_idle)
    mailbox.take()
    mailbox.settle()
    assert [*seen, mailbox.is_idle] == [True, False, False, True]
    async with asyncio.timeout(60):
        await mailbox.wait_until_idle()


async def test_who_takes_waits_until_something_is_there() -> None:
    mailbox = Mailbox(World(), NEVER)
    waiting = asyncio.create_task(mailbox.arrival())
    await asyncio.sleep(0)
    assert not waiting.done()
    mailbox.put(_said("a"))
    mailbox.put(_said("b"))
    async with asyncio.timeout(60):
        await waiting
        await mailbox.arrival()  # what is there need not arrive
    assert len(mailbox.take()) == 2


async def _is_due(mailbox: Mailbox) -> bool:
    waiting = asyncio.create_task(mailbox.arrival())
    for _ in range(5):
        await asyncio.sleep(0)
    is_due = waiting.done()
    waiting.cancel()
    return is_due


async def test_words_after_a_pause_go_at_once_and_those_that_follow_closely_wait_for_one_another() -> None:
    world = FakeWorld()
    mailbox = Mailbox(world, NEVER)
    mailbox.put(_said("a"))
    assert await _is_due(mailbox)
    mailbox.take()
    mailbox.settle()
    await world.advance(OUTPUT_EVERY_S / 2)
    mailbox.put(_said("b"))
    mailbox.put(_said("c"))
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S)
    assert await _is_due(mailbox)
    assert len(mailbox.take()) == 2
    mailbox.settle()
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S)
    mailbox.put(_said("d"))
    assert await _is_due(mailbox)


async def test_words_that_come_during_an_append_of_words_wait_for_its_readers_and_no_earlier_ones() -> None:
    world = FakeWorld()
    mailbox = Mailbox(world, NEVER)
    mailbox.put(_said("a"))
    mailbox.take()
    mailbox.settle()
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S / 2)
    mailbox.put(Envelope(FINISHED))
    mailbox.put(_said("b"))
    assert len(mailbox.take()) == 2
    mailbox.put(_said("c"))  # within the pause that began with "a"
    mailbox.settle()
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S * 0.75)
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S / 2)
    assert await _is_due(mailbox)


async def test_words_of_one_moment_go_at_once_together_and_those_that_come_closely_behind_them_too() -> None:
    world, said = FakeWorld(), Said()
    mailbox = Mailbox(world, said)
    mailbox.put(_said("a"))
    mailbox.put(_said("b"))
    assert (said.words, mailbox.is_idle) == ([], False), "there may be more in this moment"
    await _moments(1)
    assert (said.words, mailbox.is_idle) == (["ab"], True)
    for word in "cd":
        mailbox.put(_said(word))
        await _moments(5)
        await world.advance(OUTPUT_EVERY_S / 3)
    assert (said.words, mailbox.is_idle) == (["ab"], False), "what was said is being read"
    await world.advance(OUTPUT_EVERY_S)
    assert (said.words, mailbox.is_idle) == (["ab", "cd"], True)
    assert not await _is_due(mailbox)


async def test_words_that_cannot_go_at_once_are_taken() -> None:
    mailbox = Mailbox(FakeWorld(), Said(may=False))
    mailbox.put(_said("a"))
    mailbox.put(_said("b"))
    assert await _is_due(mailbox)
    assert len(mailbox.take()) == 2


@pytest.mark.parametrize("is_taken", [True, False])
async def test_words_overtake_nothing_that_waits_or_was_taken(
    is_taken: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    said = Said()
    mailbox = Mailbox(FakeWorld(), said)
    mailbox.put(_said("a"))
    mailbox.put(Envelope(FINISHED))
    if is_taken:
        mailbox.take()
        mailbox.put(_said("b"))
    assert await _is_due(mailbox)
    assert said.words == []
    assert len(mailbox.take()) == (1 if is_taken else 2)


@pytest.mark.parametrize("hurry", ["command", "full", "rest"])
async def test_words_are_not_held_back_where_something_else_waits_for_its_append(hurry: str) -> None:
    mailbox = Mailbox(FakeWorld(), NEVER)
    mailbox.put(_said("a"))
    mailbox.take()
    mailbox.settle()
    mailbox.put(_said("b"))
    assert not await _is_due(mailbox)
    resting = None
    if hurry == "command":
        mailbox.put(Envelope(FINISHED))
    elif hurry == "full":
        while not mailbox.is_full:
            mailbox.put(_said("c"))
    else:
        resting = asyncio.create_task(mailbox.wait_until_idle())
    assert await _is_due(mailbox)
    mailbox.take()
    mailbox.settle()
    if resting is not None:
        async with asyncio.timeout(60):
            await resting


async def test_the_pause_between_appends_of_words_begins_at_the_end_of_one() -> None:
    world = FakeWorld()
    mailbox = Mailbox(world, NEVER)
    mailbox.put(_said("a"))
    assert await _is_due(mailbox)
    mailbox.take()
    await world.advance(2 * OUTPUT_EVERY_S)  # a slow disk, or many readers
    mailbox.settle()
    mailbox.put(_said("b"))
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S)
    assert await _is_due(mailbox)


async def test_the_pause_between_appends_of_words_begins_when_their_readers_were_sent_them() -> None:
    world = FakeWorld()
    mailbox = Mailbox(world, NEVER)
    mailbox.put(_said("a"))
    mailbox.take()
    sent: list[asyncio.Task[None]] = []

    def write_to_many() -> None:
        sent.append(asyncio.create_task(world.advance(2 * OUTPUT_EVERY_S)))

    # A reader that was woken by the append, and writes when all others were woken too.
    asyncio.get_running_loop().call_soon(write_to_many)
    mailbox.settle()
    mailbox.put(_said("b"))
    assert not await _is_due(mailbox)
    async with asyncio.timeout(60):
        await sent[0]
    assert not await _is_due(mailbox)
    await world.advance(OUTPUT_EVERY_S)
    assert await _is_due(mailbox)


async def test_words_that_stay_when_clients_are_refused_are_taken_next() -> None:
    mailbox = Mailbox(FakeWorld(), NEVER)
    mailbox.put(_said("a"))
    mailbox.take()
    asked, done = _asked(Cancel())
    mailbox.put(asked)
    mailbox.refuse_clients(StoreBusyError("busy"))
    assert not await _is_due(mailbox)
    mailbox.put(Envelope(FINISHED))
    assert await _is_due(mailbox)
    assert isinstance(done.exception(), StoreBusyError)


async def test_a_call_that_runs_in_its_append_is_taken_alone() -> None:
    mailbox = Mailbox(World(), NEVER)
    put = [_said("a"), _effect(), _effect(), _said("b")]
    for envelope in put:
        mailbox.put(envelope)
    assert [mailbox.take() for _ in range(5)] == [put[:1], put[1:2], put[2:3], put[3:], []]


async def test_a_full_one_has_room_when_something_was_taken() -> None:
    mailbox = Mailbox(World(), NEVER)
    for _ in range(MAILBOX_MAX):
        assert not mailbox.is_full
        mailbox.put(_said("a"))
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
    mailbox.put(_said("a"))
    assert (mailbox.has_report_of(ours), mailbox.has_report_of(other)) == (True, False)
    mailbox.take()
    assert not mailbox.has_report_of(ours)
    await asyncio.wait([ours, other])


async def test_clients_come_again_but_what_a_tool_did_stays() -> None:
    mailbox = Mailbox(World(), NEVER)
    asked, done = _asked(SendMessage(UserMessage.of("hi")))
    finished = Envelope(FINISHED)
    mailbox.put(asked)
    mailbox.put(finished)
    mailbox.refuse_clients(StoreBusyError("busy"))
    with pytest.raises(StoreBusyError):
        await done
    assert mailbox.take() == [finished]


async def test_nobody_waits_for_a_session_that_has_ended() -> None:
    mailbox = Mailbox(World(), NEVER)
    asked, done = _asked(Cancel())
    mailbox.put(asked)
    mailbox.put(Envelope(FINISHED))
    mailbox.refuse_all(StoreBusyError("busy"))
    with pytest.raises(MidstreamError):
        await done
    assert (mailbox.take(), mailbox.is_idle) == ([], True)


async def test_an_answer_is_given_once() -> None:
    asked, done = _asked(Cancel())
    asked.answer(3)
    asked.answer(StoreBusyError("too late"))
    assert await done == 3
    Envelope(FINISHED).answer(3)  # nobody waits


def test_neighbouring_words_of_one_attempt_are_one_command() -> None:
    finished = Envelope(FINISHED)
    batch = [_said("a"), _said("b"), finished, _said("c"), _said("d", attempt=2)]
    assert [each.command for each in merge(batch)] == [
        _said("ab").command,
        FINISHED,
        _said("c").command,
        _said("d", attempt=2).command,
    ]


def test_a_batch_of_words_is_told_from_one_that_changes_what_is_owed() -> None:
    assert is_model_output([_said("a"), _said("b", attempt=2)])
    assert not is_model_output([_said("a"), Envelope(FINISHED)])
    assert not is_model_output([Envelope(None)])


def test_a_result_of_a_client_that_led_to_nothing_is_told_from_all_else() -> None:
    of_client = Envelope(Received("k", "secret", 1, "d", FINISHED))
    said = Envelope(Received("k", "secret", 0, "d", SendMessage(UserMessage.of("hi"))))
    assert is_mere_result([of_client], 2)
    assert is_mere_result([of_client], 0)
    assert not is_mere_result([of_client], 3)  # something follows from it
    assert not is_mere_result([of_client, of_client], 2)
    assert not is_mere_result([said], 2)
    assert not is_mere_result([Envelope(FINISHED)], 1)  # of a tool that ran here
