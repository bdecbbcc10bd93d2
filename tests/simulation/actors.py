"""Actors of the simulation: clients with streams, people who answer, readers that come and go, meddlers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
from msgspec import Struct

from midstream.engine.host import Host
from midstream.errors import (
    MidstreamError,
    QuestionClosedError,
    SeqnoGapError,
    SessionBusyError,
    SessionNotFoundError,
)
from midstream.history.messages import ToolResult, UserMessage
from midstream.protocol.frames import EventId
from midstream.session.call_references import CallRef
from midstream.session.calls import CHOICES, Choice, QuestionKind, Site
from midstream.session.questions import Question, questions_of
from midstream.session.records import (
    CallStarted,
    MessageAccepted,
    QuestionAsked,
    Record,
    ResponseCompleted,
    decode,
)
from midstream.session.session import Received
from midstream.session.turn.commands import (
    Answer,
    CallFinished,
    Cancel,
    Command,
    Resume,
    SendMessage,
    WhenBusy,
    Withdraw,
)
from midstream.store.contract import StoredRecord
from midstream.testing.history_checker import ClientLog, Execution, ShownEvent
from tests.simulation.agents import CLIENT_TOOL, CLIENT_TOOL_S, client_tools
from tests.simulation.lab import CutOffError, Lab
from tests.simulation.loop import pass_time

FOLLOW_S = 40.0
"""Seconds of one connection of a reader."""
TRIES_MAX = 400
Apply = Callable[[Record], None]
"""Function for the reaction of a client to a received record."""


class SimulatedClient:
    """A client with one stream: it sends its message until it is acknowledged, follows, runs its own tools."""

    def __init__(self, lab: Lab, session: str, number: int) -> None:
        self.log = ClientLog(f"speaker {number} of {session}", session, f"{session}-{number}")
        self._lab = lab
        self._chance = lab.chance(f"speaker {session} {number}")
        self._number = number
        self._turn = 0
        self._mine: set[tuple[int, int, str]] = set()
        """Calls of its turn that are its own to run."""
        self._done: set[tuple[int, int, str]] = set()
        self._command = asyncio.Lock()

    async def live(self) -> None:
        message = SendMessage(
            UserMessage.of(f"message {self._number}"),
            client_tools() if self._chance.random() < 0.5 else (),
            when_busy=self._chance.choice([WhenBusy.QUEUE, WhenBusy.QUEUE, WhenBusy.REFUSE]),
            timeout_s=self._chance.choice([0.0, 0.0, 0.0, 25.0]),
        )
        if await self._send(message):
            if self._chance.random() < 0.2:
                self._lab.spawn(self._change_my_mind())
            await follow(self._lab, self._chance, self.log, self._apply)

    async def _change_my_mind(self) -> None:
        await pass_time(self._chance.expovariate(0.3))
        await self._send(Cancel())

    async def _send(self, command: Command) -> bool:
        """Send the next command until it is acknowledged; return whether it was."""
        async with self._command:
            seqno = len(self.log.sent)
            digest = f"{self.log.stream}/{seqno}/{type(command).__name__}"
            received = Received(self.log.stream, "secret", seqno, digest, command)
            self.log.sent[seqno] = digest
            answer = await submit(self._lab, self._chance, self.log.session, received)
            if isinstance(answer, MidstreamError):
                if seqno == 0:
                    del self.log.sent[seqno]
                assert isinstance(answer, SessionBusyError | SessionNotFoundError), repr(answer)
                return False
            self.log.acked.add(seqno)
            if self._chance.random() < 0.1:  # Its checkpoint did not receive the ack.
                await submit(self._lab, self._chance, self.log.session, received)
            return True

    def _apply(self, record: Record) -> None:
        match record:
            case MessageAccepted(stream=self.log.stream):
                self._turn = record.turn
            case ResponseCompleted(turn=self._turn):
                mine = [plan.call_id for plan in record.plans if plan.site is Site.CLIENT]
                self._mine |= {(record.turn, record.response, call_id) for call_id in mine}
            case CallStarted():
                call = (record.turn, record.response, record.call_id)
                if call in self._mine and call not in self._done:
                    self._done.add(call)
                    self._lab.spawn(self._run(*call))

    async def _run(self, turn: int, response: int, call_id: str) -> None:
        """Run a tool of this client once, and send its outcome until it is acknowledged."""
        if self._chance.random() < 0.1:
            return  # Its user never answers.
        run = Execution(self.log.session, turn, response, call_id, 1, CLIENT_TOOL)
        self._lab.outside.ledger.append(run)
        is_late = self._chance.random() < 0.1
        await pass_time(CLIENT_TOOL_S + 10.0 if is_late else self._chance.expovariate(1.0))
        await self._send(CallFinished(turn, response, ToolResult(call_id, "from the client")))


class PassingSpeaker(SimulatedClient):
    """A client that sends its message and leaves. It returns when all is at rest, and reads the result."""

    async def live(self) -> None:
        if await self._send(SendMessage(UserMessage.of("go on without me"))):
            self._lab.following += 1
            while not self._lab.is_over:
                await pass_time(FOLLOW_S)
            self._lab.following -= 1
            await follow(self._lab, self._chance, self.log, self._apply)


class Person:
    """A person who answers questions of all sessions, late, sometimes not, sometimes one that is already closed."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self._chance = lab.chance(name)
        lab.on_append.append(self._on_record)

    def _on_record(self, session: str, body: bytes) -> None:
        if not body.startswith(b'{"type":"question_asked"') or self._lab.is_over:
            return
        asked = decode(body)
        assert isinstance(asked, QuestionAsked)
        if self._chance.random() < 0.7:
            self._lab.spawn(self._answer(session, asked))

    async def _answer(self, session: str, asked: QuestionAsked) -> None:
        await pass_time(self._chance.expovariate(0.3))
        answer = _decision(self._chance, asked)
        if self._chance.random() < 0.05:
            answer = msgspec.structs.replace(answer, digest="of other arguments")
        await submit(self._lab, self._chance, session, answer)


def _decision(chance: random.Random, asked: QuestionAsked) -> Answer:
    choice = chance.choice(CHOICES[asked.kind])
    is_edited = choice is Choice.ALLOW and chance.random() < 0.3
    edited = '{"word": "edited"}' if is_edited else None
    return Answer(
        CallRef(asked.turn, asked.response, asked.call_id), asked.digest, choice, "said", edited, "somebody"
    )


async def answer_everything(lab: Lab, chance: random.Random) -> None:
    """Answer every open question of any session."""
    await _answer_all(lab, chance, lambda _: True)


async def answer_unexpiring(lab: Lab, chance: random.Random) -> None:
    """Answer the questions that never expire, and leave all others to their sessions."""
    await _answer_all(lab, chance, lambda question: not question.expires_at)


async def _answer_all(lab: Lab, chance: random.Random, which: Callable[[Question], bool]) -> None:
    for name in list(lab.memory.sessions):
        for question in questions_of(name, lab.folded(name)):
            if not which(question):
                continue
            choice = {QuestionKind.APPROVAL: Choice.ALLOW, QuestionKind.QUESTION: Choice.RESPOND}.get(
                question.kind, Choice.SKIP
            )
            ref = CallRef(question.turn, question.response, question.call_id)
            await submit(lab, chance, name, Answer(ref, question.digest, choice, "at last"))


class Meddler:
    """A client that sends any command of a client application, at any time."""

    def __init__(self, lab: Lab, session: str, *, acts: int) -> None:
        self._lab = lab
        self._session = session
        self._acts = acts
        self._chance = lab.chance(f"meddler {session}")
        lab.on_append.append(self._on_record)

    def _on_record(self, session: str, body: bytes) -> None:
        """Resume a failed turn, withdraw a queued message: sometimes, and a little later."""
        if session != self._session or self._lab.is_over:
            return
        if body.startswith(b'{"type":"turn_ended"') and (b'"failed"' in body or b'"interrupted"' in body):
            if self._chance.random() < 0.5:
                self._lab.spawn(self._send(Resume()))
        elif body.startswith(b'{"type":"message_queued"') and self._chance.random() < 0.3:
            self._lab.spawn(self._send(Withdraw()))

    async def _send(self, command: Command) -> None:
        await pass_time(self._chance.expovariate(1.0))
        self._lab.note("meddler", "says", self._session, type(command).__name__)
        await submit(self._lab, self._chance, self._session, command)

    async def live(self) -> None:
        for number in range(self._acts):
            await pass_time(self._chance.expovariate(0.1))
            if self._lab.is_over:
                return
            await self._send(self._command(number))

    def _command(self, number: int) -> Command:
        match self._chance.randrange(6):
            case 0:
                return Cancel()
            case 1:
                return Cancel(self._chance.randrange(1, 4))
            case 2:
                return Withdraw(self._chance.choice([None, 1, 2]))
            case 3 | 4:
                return Resume(self._chance.choice([None, None, 1, 2]))
            case _:
                return SendMessage(UserMessage.of(f"meddling {number}"), when_busy=WhenBusy.QUEUE)


class SimulatedReader:
    """A reader that follows a session from any position, for a while."""

    def __init__(self, lab: Lab, session: str, number: int, *, start: int | None) -> None:
        self.log = ClientLog(f"reader {number} of {session}", session, start=start)
        self._lab = lab
        self._chance = lab.chance(f"reader {session} {number}")

    async def live(self) -> None:
        await pass_time(self._chance.expovariate(0.5))
        await follow(self._lab, self._chance, self.log, lambda _record: None)


# --- access to a session
# ----------------------------------------------------------------------------------------


class _Following(Struct):
    """The position of a follower."""

    seen: int | None
    is_connected: bool = True


async def submit(
    lab: Lab, chance: random.Random, session: str, command: Command | Received
) -> int | MidstreamError:
    """Send a command until a server has answered it; return the answer."""

    async def ask(host: Host) -> int:
        runner = await host.session(session, create=True)
        return await runner.submit(command)

    for tries in range(TRIES_MAX):
        server = await lab.any_server(chance)
        try:
            return await lab.call(server, ask(server.host))
        except CutOffError:
            pass
        except MidstreamError as error:
            # A node that was overtaken without noticing may have folded less than the journal holds: a client
            # restarts from the number of the error, and so here from the one it sends.
            if isinstance(error, SessionBusyError | QuestionClosedError) or (
                error.retry == "never" and not isinstance(error, SeqnoGapError)
            ):
                return error
        await pass_time(chance.expovariate(3.0 if tries < TRIES_MAX // 2 else 0.1))
    raise TimeoutError(f"{command} was never answered")


async def follow(lab: Lab, chance: random.Random, log: ClientLog, apply: Apply) -> None:
    """Read a session until the run is over and no event is left; connections end now and then."""
    at = _Following(log.start)
    lab.following += 1
    while not (lab.is_over and at.seen == lab.end_of(log.session)):
        server = await lab.any_server(chance)
        at = _Following(at.seen)
        patience_s = FOLLOW_S * chance.random() if not lab.is_over else 1.0
        try:
            await lab.call(server, _serve(server.host, log, at, apply), patience_s=patience_s)
        except (CutOffError, MidstreamError):
            pass
        finally:
            at.is_connected = False
        await pass_time(chance.expovariate(2.0))
    lab.following -= 1


async def _serve(host: Host, log: ClientLog, at: _Following, apply: Apply) -> None:
    """Act as the server's side of a reader's connection."""
    runner = await host.session(log.session)
    if at.seen is None:  # A stream begins at its opening, a mere reader at the end.
        known = runner.state.streams.get(log.stream)
        if log.stream and known is None:
            raise SessionNotFoundError("this process has not heard of the stream yet")
        at.seen = known.since if known else runner.newest.position
    runner.attach()
    try:
        while True:
            after = at.seen
            page = await runner.read(after=after, limit=20)
            if not at.is_connected:
                return
            for stored in page:
                log.seen.append(_shown_event(stored))
                at.seen = stored.position
                apply(decode(stored.body))
            if not page:
                await runner.wait(after)
    finally:
        runner.detach()


def _shown_event(stored: StoredRecord) -> ShownEvent:
    return ShownEvent(str(EventId(stored.epoch, stored.position)), stored.body)
