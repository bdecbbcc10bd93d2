"""Judge a chaos run from the outside: the server's journals, the clients' logs, the ledger of the tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from midstream.client.local_tools import declare
from midstream.history.messages import Outcome, ToolResult, UserMessage
from midstream.protocol.frames import CancelPayload, EventId, ResultPayload, SendPayload, digest_of, encode
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import (
    CallEnded,
    CommandAccepted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    StreamOpened,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.session.turn.states import SUSPECTED_CODE
from midstream.store.contract import StoredRecord
from midstream.testing.history_checker import ClientLog, Evidence, Execution, ShownEvent, check_ended
from tests.chaos.turns import ASK_RESPONSE, TURNS, WAYS, WORDS, client_tools, is_stopped, message_of
from tests.fault.fault_client_process import read_notes
from tests.fault.matrix import read_ledger
from tests.fault.turn import ANSWER_OF_CLIENT, EffectLedger


class ChaosVerdict(Struct):
    """The result of a run.


    Args:
        events: Records of all journals.     shown: Events that clients stored, including those that only
            read.     lost: Events that a client should have received and did not.     duplicated: Events
            received twice, and messages or commands that are in a journal twice.     executions: Runs of
            tools, none of which may run twice.     repeated: Runs of a call that had run before.
            interrupted: Turns that were given up after too many servers died on them.     unknown: Calls
            whose outcome cannot be known: their process was killed.     problems: Descriptions of all faults,
            including these.
    """

    sessions: int = 0
    turns: int = 0
    stopped: int = 0
    interrupted: int = 0
    events: int = 0
    shown: int = 0
    lost: int = 0
    duplicated: int = 0
    executions: int = 0
    repeated: int = 0
    unknown: int = 0
    problems: list[str] = field(default_factory=list)


def judge(folder: Path, journals: Mapping[str, Sequence[StoredRecord]]) -> ChaosVerdict:
    """Compare everything; all turns have ended."""
    verdict = ChaosVerdict(sessions=len(journals))
    executed: dict[str, list[Execution]] = {}
    for each in read_ledger(folder):
        executed.setdefault(each.session, []).append(each)
    begun = {path.stem for way in WAYS for path in (folder / way).glob("*.begun")}
    for name in sorted((begun | executed.keys()) ^ journals.keys()):
        verdict.problems.append(f"session {name!r} is not known to both sides")
    payloads = SentPayloads(EffectLedger(folder / "ledger"))
    for name in sorted(begun & journals.keys()):
        _judge_session(folder, name, journals[name], executed.get(name, []), payloads, verdict)
    if verdict.lost or verdict.duplicated or verdict.repeated:
        verdict.problems.append(
            f"{verdict.lost} lost, {verdict.duplicated} duplicated, {verdict.repeated} executed again"
        )
    return verdict


def _judge_session(
    folder: Path,
    name: str,
    stored: Sequence[StoredRecord],
    ledger: Sequence[Execution],
    payloads: SentPayloads,
    verdict: ChaosVerdict,
) -> None:
    notes = folder / name.partition("-")[0]
    seen, read = (
        [ShownEvent(line.id, bytes(line.record)) for line in read_notes(notes / f"{name}.{what}")]
        for what in ("seen", "read")
    )
    records = [decode(each.body) for each in stored]
    reader = ClientLog("reader", name, start=0, seen=read)
    logs = [*streams_of(name, seen, records, payloads), reader]
    verdict.problems += map(str, check_ended(Evidence({name: stored}, logs, ledger)))
    verdict.events += len(stored)
    verdict.shown += len(seen) + len(read)
    verdict.executions += len(ledger)
    calls = Counter((each.turn, each.response, each.call_id) for each in ledger)
    verdict.repeated += sum(calls.values()) - len(calls)
    for log in logs:
        verdict.lost += len(
            expected_positions(log, records, TURNS)
            - {EventId.parse(each.event_id).position for each in log.seen}
        )
    for shown in (seen, read):
        verdict.duplicated += count_repeated(each.event_id for each in shown)
    verdict.duplicated += count_repeated(
        (each.stream, each.seqno) for each in records if isinstance(each, CommandAccepted)
    )
    _judge_turns(name, records, verdict)


def streams_of(
    name: str, seen: Sequence[ShownEvent], records: Sequence[Record], payloads: SentPayloads
) -> Iterator[ClientLog]:
    """Yield the received events of each stream of a client; a stream has one turn and ends with it."""
    of_stream: list[ShownEvent] = []
    turn = 0
    for each in seen:
        of_stream.append(each)
        if isinstance(decode(each.body), TurnEnded):
            first = decode(of_stream[0].body)
            stream = first.stream if isinstance(first, StreamOpened) else ""
            sent = payloads.sent(turn, stream, records)
            who = f"client in turn {turn + 1}"
            yield ClientLog(who, name, stream, sent=sent, acked={0}, seen=of_stream)
            of_stream = []
            turn += 1


class SentPayloads:
    """The digests of a client's commands in a turn."""

    def __init__(self, ledger: EffectLedger) -> None:
        self._tools = declare(client_tools(ledger))

    def sent(self, turn: int, stream: str, records: Sequence[Record]) -> dict[int, str]:
        """Return the digest of each command of a stream: first the message, then the commands that may follow it."""
        message = SendPayload(UserMessage.of(message_of(turn)).parts, self._tools)
        number = turn + 1
        later = (
            ResultPayload(number, ASK_RESPONSE, ToolResult("b", ANSWER_OF_CLIENT)),
            ResultPayload(number, ASK_RESPONSE, ToolResult("b", UNKNOWN_CONTENT, Outcome.UNKNOWN)),
            CancelPayload(),
            CancelPayload(number),
        )
        possible = {digest_of(encode(each)) for each in later}
        commands = [each for each in records if isinstance(each, CommandAccepted) and each.stream == stream]
        return {0: digest_of(encode(message))} | {
            each.seqno: each.digest for each in commands if each.seqno and each.digest in possible
        }


def expected_positions(log: ClientLog, records: Sequence[Record], turns: int) -> set[int]:
    """Return the positions that a client must have received: from the first record of its stream to its turn's end."""
    first, ends = 1, 0
    if log.stream:
        first = next(at for at, each in enumerate(records, 1) if getattr(each, "stream", "") == log.stream)
    for at, record in enumerate(records[first - 1 :], first):
        ends += isinstance(record, TurnEnded)
        if ends == (1 if log.stream else turns):
            return set(range(first, at + 1))
    return set(range(first, len(records) + 1))


def count_repeated(things: Iterator[object]) -> int:
    """Return how many elements are repetitions of earlier ones."""
    counted = Counter(things)
    return sum(counted.values()) - len(counted)


def _judge_turns(name: str, records: Sequence[Record], verdict: ChaosVerdict) -> None:
    messages = [each.message for each in records if isinstance(each, MessageAccepted)]
    expected = [UserMessage.of(message_of(turn)) for turn in range(TURNS)]
    verdict.duplicated += max(0, len(messages) - TURNS)
    verdict.lost += max(0, TURNS - len(messages))
    if messages != expected:
        verdict.problems.append(f"in session {name!r} were the messages {messages}")
    ends = [each for each in records if isinstance(each, TurnEnded)]
    verdict.turns += len(ends)
    for turn, end in enumerate(ends):
        texts = tuple(
            each.body.text
            for each in records
            if isinstance(each, ResponseCompleted) and each.turn == end.turn
        )
        verdict.stopped += end.status is TurnStatus.CANCELLED
        verdict.interrupted += end.status is TurnStatus.INTERRUPTED
        allowed = {TurnStatus.COMPLETED}
        if is_stopped(name, turn):
            allowed.add(TurnStatus.CANCELLED)
        if end.code == SUSPECTED_CODE:
            allowed.add(TurnStatus.INTERRUPTED)
        if end.status not in allowed or (end.status is TurnStatus.COMPLETED and texts != WORDS):
            verdict.problems.append(f"turn {end.turn} of {name!r} ended {end.status} with the texts {texts}")
    outcomes = [each.result.outcome for each in records if isinstance(each, CallEnded)]
    verdict.unknown += outcomes.count(Outcome.UNKNOWN)
