from __future__ import annotations

import pytest

from midstream.engine.forwarding import (
    GIVE_UP,
    Accepted,
    decode_command,
    encode_answer,
    encode_command,
    make_idempotent,
    name_approver,
    read_answer,
)
from midstream.errors import (
    DrainingError,
    MidstreamError,
    SeqnoGapError,
    SessionBusyError,
    UnavailableError,
    WrongSecretError,
)
from midstream.history.messages import Outcome, ToolResult, UserMessage
from midstream.session.call_references import CallRef
from midstream.session.calls import Choice
from midstream.session.session import Received, Session
from midstream.session.turn.commands import Answer, CallFinished, Cancel, Command, Resume, SendMessage
from midstream.session.turn.states import AwaitingModel
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec

COMMANDS: list[Command | Received] = [
    SendMessage(UserMessage.of("hi")),
    Cancel(7),
    Received("k", "digest of s", 0, "digest", SendMessage(UserMessage.of("naïve ☃"))),
    Received("k", "digest of s", 3, "digest", CallFinished(1, 2, ToolResult("a", "done", Outcome.OK))),
    Received("k", "digest of s", 4, "digest", None),
    Received("k", "digest of s", 0, "digest", SendMessage(UserMessage.of("hi")), 30.0),
    Received("k", "digest of s", 4, "digest", None, connection=2**53),
    Received("k", "digest of s", 0, "digest", SendMessage(UserMessage.of("hi")), caller="acme:ada"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_forwarded_command_decodes_unchanged(command: Command | Received) -> None:
    assert decode_command(encode_command(command)) == command


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"command":{"kind":"Dance","command":{}}}',
        b'{"command":{"kind":"Cancel","command":[]}}',
        b"{}",
    ],
)
def test_a_command_of_another_version_can_be_sent_again(body: bytes) -> None:
    with pytest.raises(UnavailableError):
        decode_command(body)


def test_a_request_to_give_up_is_not_a_command() -> None:
    with pytest.raises(UnavailableError):
        decode_command(GIVE_UP)


def test_an_answer_is_the_journals_end() -> None:
    for accepted in (Accepted(12), Accepted(12, is_replayed=True), Accepted()):
        assert read_answer(encode_answer(accepted)) == accepted


def test_an_answer_of_an_older_server_is_the_journals_end() -> None:
    assert read_answer(b'{"position":12}') == Accepted(12)
    assert encode_answer(Accepted(12)) == b'{"position":12}', "which an older server reads"


@pytest.mark.parametrize(
    "error",
    [
        SessionBusyError("busy"),
        WrongSecretError("no"),
        DrainingError("soon", retry_after_s=1.5),
        SeqnoGapError("gap", expected=4),
        MidstreamError("who knows"),
    ],
    ids=lambda error: error.code,
)
def test_a_forwarded_refusal_decodes_unchanged(error: MidstreamError) -> None:
    with pytest.raises(type(error)) as caught:
        read_answer(encode_answer(error))
    arrived = caught.value
    assert type(arrived) is type(error)
    assert (arrived.message, arrived.retry_after_s) == (error.message, error.retry_after_s)
    if isinstance(error, SeqnoGapError):
        assert isinstance(arrived, SeqnoGapError)
        assert arrived.expected == error.expected


def test_a_refusal_of_another_version_can_be_sent_again() -> None:
    with pytest.raises(UnavailableError, match="new"):
        read_answer(b'{"code":"a_new_one","message":"new"}')


@spec("TURN-74")
def test_a_forwarded_command_has_a_number_or_the_turn() -> None:
    resting = Session()
    running = Session(turn=AwaitingModel(7, 1, attempt=1), turns=7)
    world = FakeWorld()
    assert make_idempotent(Cancel(), resting, world) is None
    assert make_idempotent(Cancel(), running, world) == Cancel(7)
    assert make_idempotent(Cancel(3), running, world) == Cancel(3)
    assert make_idempotent(Resume(), running, world) is None
    command = COMMANDS[-1]
    assert make_idempotent(command, running, world) is command
    first, second = (make_idempotent(Resume(), resting, world) for _ in range(2))
    assert isinstance(first, Received)
    assert isinstance(second, Received)
    assert first.command == Resume()
    assert first.stream != second.stream, "two askers are two"


@spec("SEC-49")
@pytest.mark.parametrize(
    "body",
    [
        b'{"command":{"kind":"Recover","command":{}}}',
        b'{"command":{"kind":"TurnExpired","command":{"turn":1}}}',
        b'{"command":{"kind":"Cancel","command":{"turn":' + b"[" * 100_000 + b"]" * 100_000 + b"}}}",
        b"\xff",
    ],
    ids=["internal", "also internal", "deep", "no text"],
)
def test_commands_that_clients_do_not_send_are_refused(body: bytes) -> None:
    with pytest.raises(UnavailableError):
        decode_command(body)


@spec("SEC-49")
def test_an_answer_without_a_principal_gets_the_name_of_its_node() -> None:
    answer = Answer(CallRef(1, 1, "a"), "digest", Choice.ALLOW)
    named = Answer(CallRef(1, 1, "a"), "digest", Choice.ALLOW, by="node node-7")
    of_ada = Answer(CallRef(1, 1, "a"), "digest", Choice.ALLOW, by="ada")
    assert name_approver(answer, "node-7") == named
    received = Received("k", "digest of s", 3, "digest", answer)
    assert name_approver(received, "node-7") == Received("k", "digest of s", 3, "digest", named)
    for other in (of_ada, Cancel(7), Received("k", "digest of s", 3, "digest", None)):
        assert name_approver(other, "node-7") == other
