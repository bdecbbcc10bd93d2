"""A session whose conversation a client application resends: its latest transcript is the history."""

from __future__ import annotations

import random

import pytest

from midstream.errors import JournalMovedError
from midstream.history.messages import (
    Entry,
    Finish,
    Response,
    ResponsePart,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UserMessage,
)
from midstream.session import session as sessions
from midstream.session.application_request import ApplicationRequest
from midstream.session.applications import Beginning, EntryChain, compare, link_digests
from midstream.session.call_references import AttemptRef
from midstream.session.calls import CallPlan, Site, digest_of
from midstream.session.records import (
    Delta,
    EpochStarted,
    Record,
    SessionStatus,
    TranscriptAccepted,
    TurnStatus,
)
from midstream.session.session import Session
from midstream.session.turn.commands import (
    Cancel,
    Command,
    ModelFailed,
    ModelResponded,
    ModelStreamed,
    Recover,
    Refused,
    SendTranscript,
)
from midstream.session.turn.pending import CallModel
from midstream.session.turn.states import AwaitingModel, RunningCalls
from tests.search import tried
from tests.spec import spec

SEEDS = tried(150)
STEPS = 25
HI, MORE = UserMessage.of("hi"), UserMessage.of("more")


class ApplicationLife:
    """A session, its journal, and the application's own view of the conversation."""

    def __init__(self) -> None:
        self.session = Session()
        self.journal: list[tuple[int, Record]] = []
        self.sent: list[Entry] = []
        self.at = 1000.0
        self.node()

    def node(self) -> None:
        epoch = self.session.epoch + 1
        self._append((EpochStarted(epoch, "node", self.at),), epoch)
        self.take(Recover())

    def take(self, command: Command) -> tuple[Record, ...]:
        self.at += 1.0
        epoch = self.session.epoch
        decided = sessions.decide(self.session, command, epoch=epoch, at=self.at)
        self._append(decided, epoch)
        return decided

    def _append(self, records: tuple[Record, ...], epoch: int) -> None:
        for record in records:
            self.journal.append((epoch, record))
            self.session = sessions.evolve(self.session, record, epoch=epoch)

    def send(self, *entries: Entry, count: int | None = None) -> TranscriptAccepted:
        """Resend the conversation."""
        self.sent = list(entries)
        found = compare(EntryChain().then(self.session.history), self.session.turn, Beginning(), entries)
        number = self.session.application.count if count is None else count
        request = ApplicationRequest(f"r{number + 1}", f"{number + 1:032x}")
        decided = self.take(SendTranscript(request, number, found.keep, found.tail, results=found.results))
        return next(record for record in decided if isinstance(record, TranscriptAccepted))

    @property
    def place(self) -> AttemptRef:
        turn = self.session.turn
        assert isinstance(turn, AwaitingModel)
        return turn.ref

    def response(self, words: str, *ids: str) -> Response:
        """Let the model respond."""
        calls = tuple(ToolCall(each, "look") for each in ids)
        response = Response((Thinking("hm"), Text(words), *calls), Finish.CALLS if ids else Finish.STOP)
        plans = tuple(CallPlan(each, digest_of("look", "{}"), Site.CLIENT, has_effects=False) for each in ids)
        self.take(ModelResponded(self.place, response, plans))
        return response

    def stream_text(self, words: str) -> None:
        place = self.place
        self.take(
            ModelStreamed(place, (Delta(place.turn, place.response_no, place.attempt, 0, "text", words),))
        )


def resent(response: Response, *results: str) -> Step:
    """Return a response as an application sends it back: without the thinking, and with other white space."""
    parts: tuple[ResponsePart, ...] = (Text(f" {response.text} "), *response.calls)
    pairs = zip(response.calls, results, strict=True)
    return Step(Response(parts), tuple(ToolResult(call.id, content) for call, content in pairs))


@spec("REUSE-76")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_latest_transcript_of_an_application_is_the_history_and_all_open_work(seed: int) -> None:
    chance, life, number = random.Random(seed), ApplicationLife(), 0
    view: list[Entry] = []
    for _ in range(STEPS):
        cut = chance.randrange(len(view) + 1) if chance.random() < 0.3 else len(view)
        view = view[:cut]
        if not view or chance.random() < 0.8:
            number += 1
            view.append(UserMessage.of(f"message {number}"))
        life.send(*view)
        history = life.session.history
        assert EntryChain().then(history).links == link_digests(b"", view), seed
        assert isinstance(life.session.turn, AwaitingModel)
        (asked,) = (each for each in sessions.pending_work(life.session) if isinstance(each, CallModel))
        assert asked.ref == life.place
        newest = life.session.application.newest
        assert newest is not None
        assert (newest.is_open, newest.entries) == (True, len(view))
        match chance.randrange(6):
            case 0:
                pass  # It sends another transcript before there is a response.
            case 1:
                life.stream_text("half")
                life.node()  # The process dies.
                if chance.random() < 0.5:
                    view.append(resent(Response((Text("half" + life.response(" and half").text),))))
            case 2:
                life.stream_text("half")
                life.take(ModelFailed(life.place, "model_unavailable", "gone", is_retriable=True))
            case 3:
                response = life.response("I look.", "a", "b")
                if chance.random() < 0.7:
                    view.append(resent(response, "a tree", "a stone"))
            case 4:
                life.take(Cancel())
            case _:
                view.append(resent(life.response(f"response {number}")))
        assert sessions.fold(life.journal) == life.session
        if sessions.is_prunable(life.session):
            assert sessions.restore_session(sessions.prune_session(life.session, at=life.at)) == life.session


@spec("REUSE-76")
def test_a_resent_response_is_journaled_once_and_keeps_parts_that_no_application_resends() -> None:
    life = ApplicationLife()
    life.send(HI)
    response = life.response("hello")
    accepted = life.send(HI, resent(response), MORE)
    assert (accepted.keep, accepted.tail) == (2, (MORE,))
    assert life.session.history.entries == (HI, Step(response), MORE)


@spec("REUSE-76")
def test_the_results_of_all_calls_continue_their_turn_and_any_other_transcript_closes_it() -> None:
    life = ApplicationLife()
    life.send(HI)
    response = life.response("I look.", "a", "b")
    assert isinstance(life.session.turn, RunningCalls)
    assert sessions.pending_work(life.session) == ()  # Nothing waits for the application.
    assert (life.session.is_live, life.session.status) == (False, SessionStatus.COMPLETED)
    accepted = life.send(HI, resent(response, "a tree", "a stone"))
    assert (accepted.turn, accepted.response, accepted.tail) == (1, 2, ())
    again = life.response("Again.", "c")
    accepted = life.send(HI, resent(response, "a tree", "a stone"), MORE)
    assert (accepted.turn, accepted.response, accepted.tail) == (2, 1, (MORE,))
    assert again not in [entry.response for entry in life.session.history.entries if isinstance(entry, Step)]


@spec("REUSE-70")
def test_a_partial_response_is_kept_when_the_process_dies_and_the_next_attempt_continues_after_it() -> None:
    life = ApplicationLife()
    life.send(HI)
    life.stream_text("one ")
    life.node()
    assert [entry.response.text for entry in life.session.history.entries if isinstance(entry, Step)] == [
        "one "
    ]
    life.response("two")
    newest = life.session.application.newest
    assert newest is not None
    assert (newest.status, newest.has_begun) == (TurnStatus.COMPLETED, True)


@spec("REUSE-70")
def test_the_application_retries_a_failed_model_call() -> None:
    life = ApplicationLife()
    life.send(HI)
    failed = life.take(
        ModelFailed(life.place, "model_unavailable", "wait", is_retriable=True, retry_after_s=7.0)
    )
    assert [getattr(record, "retry_after_s", None) for record in failed] == [7.0, None]
    newest = life.session.application.newest
    assert newest is not None
    assert (newest.status, newest.has_begun) == (TurnStatus.FAILED, False)


def test_a_transcript_compared_with_an_outdated_session_is_refused() -> None:
    life = ApplicationLife()
    life.send(HI)
    before = life.session
    with pytest.raises(Refused) as caught:
        life.send(HI, MORE, count=0)
    assert isinstance(caught.value.error, JournalMovedError)
    assert life.session == before
